/* A module that misuses the allocator. `how` says in which way. */
#include <linux/gfp.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

static char *how = "";
module_param(how, charp, 0444);

static struct page *kept;

static int __init misuse_init(void) {
    int on_stack = 0;
    void *object = kmalloc(64, GFP_KERNEL);

    if (!strcmp(how, "kfree twice")) {
        kfree(object);
        kfree(object);
    } else if (!strcmp(how, "kfree inside")) {
        kfree(object + 8);
        kfree(object);
    } else if (!strcmp(how, "kfree foreign")) {
        kfree(&on_stack);
        kfree(object);
    } else if (!strcmp(how, "wrong cache")) {
        struct kmem_cache *cache = kmem_cache_create("other", 64, 0, 0, NULL);
        kmem_cache_free(cache, object);
        kfree(object);
        kmem_cache_destroy(cache);
    } else if (!strcmp(how, "page twice")) {
        struct page *page = alloc_page(GFP_KERNEL);
        kfree(object);
        __free_page(page);
        __free_page(page);
    } else if (!strcmp(how, "vfree twice")) {
        void *memory = vmalloc(10000);
        kfree(object);
        vfree(memory);
        vfree(memory);
    } else if (!strcmp(how, "large twice")) {
        void *large = kmalloc(100000, GFP_KERNEL);
        kfree(object);
        kfree(large);
        kfree(large);
    } else if (!strcmp(how, "percpu twice")) {
        int __percpu *copies = alloc_percpu(int);
        kfree(object);
        free_percpu(copies);
        free_percpu(copies);
    } else if (!strcmp(how, "leak")) {
        kept = alloc_pages(GFP_KERNEL, 2);
        kmem_cache_create("forgotten", 64, 0, 0, NULL);
    } else if (!strcmp(how, "follow null")) {
        *(volatile int *)NULL = 1;
    } else {
        kfree(object);
    }
    return 0;
}

static void __exit misuse_exit(void) {}

module_init(misuse_init);
module_exit(misuse_exit);
MODULE_LICENSE("Dual MIT/GPL");
