/* A module that calls a function that no header has, and one that no library has. */
#include <linux/module.h>

#ifdef DECLARED
int declared_and_nowhere(void);
#define CALLED declared_and_nowhere
#else
#define CALLED nowhere
#endif

static int __init no_function_init(void) { return CALLED(); }

module_init(no_function_init);
