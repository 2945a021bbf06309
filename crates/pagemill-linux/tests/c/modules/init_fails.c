/* A module whose first function fails, after it has freed what it had. Its last one must not run. */
#include <linux/module.h>
#include <linux/slab.h>

static int __init init_fails_init(void) {
    void *object = kzalloc(100, GFP_KERNEL);
    kfree(object);
    return -ENODEV;
}

static void __exit init_fails_exit(void) { pr_info("the last function ran\n"); }

module_init(init_fails_init);
module_exit(init_fails_exit);
MODULE_LICENSE("Dual MIT/GPL");
