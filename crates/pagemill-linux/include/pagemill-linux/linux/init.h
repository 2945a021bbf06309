/* Where a module begins and ends. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_INIT_H
#define PAGEMILL_LINUX_INIT_H

#include <linux/compiler.h>

/* Nothing is discarded after the start. */
#define __init
#define __exit
#define __initdata
#define __initconst
#define __exitdata
#define __ref
#define __refdata

/* pagemill-kmod calls these two. */
int init_module(void);
void cleanup_module(void);

#define module_init(first)      \
    int init_module(void) {     \
        return first();         \
    }
#define module_exit(last)       \
    void cleanup_module(void) { \
        last();                 \
    }

/* In a module, each of the kernel's levels of initialisation is the module's own. */
#define early_initcall(first) module_init(first)
#define core_initcall(first) module_init(first)
#define postcore_initcall(first) module_init(first)
#define arch_initcall(first) module_init(first)
#define subsys_initcall(first) module_init(first)
#define fs_initcall(first) module_init(first)
#define device_initcall(first) module_init(first)
#define late_initcall(first) module_init(first)

#endif
