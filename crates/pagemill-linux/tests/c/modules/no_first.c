/* No function is named as the first. */
#include <linux/module.h>

int unused(void);
int unused(void) { return 0; }
