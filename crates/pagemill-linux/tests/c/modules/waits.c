/* Waits in its first function, for a minute. */
#include <linux/delay.h>
#include <linux/module.h>

static int __init first(void) {
    pr_info("it has begun, at 0%%percent\n");
    msleep(60000);
    pr_info("nobody has ended it\n");
    return 0;
}
module_init(first)
