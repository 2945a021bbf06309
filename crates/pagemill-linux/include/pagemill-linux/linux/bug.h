/* Warnings, and the end of the process. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_BUG_H
#define PAGEMILL_LINUX_BUG_H

#include <linux/compiler.h>

/* Writes a line on standard error that begins with the place. `format` may be null. */
__attribute__((__format__(__printf__, 4, 5))) void pagemill_linux_warn(const char *file, int line, const char *function,
                                                                       const char *format, ...);
/* The same, and ends the process. */
__attribute__((__noreturn__)) void pagemill_linux_bug(const char *file, int line, const char *function);

#define WARN(condition, ...)                                                  \
    ({                                                                        \
        bool is_so = !!(condition);                                           \
        if (unlikely(is_so))                                                  \
            pagemill_linux_warn(__FILE__, __LINE__, __func__, __VA_ARGS__);   \
        unlikely(is_so);                                                      \
    })
#define WARN_ON(condition) WARN(condition, NULL)
#define WARN_ONCE(condition, ...)                                                       \
    ({                                                                                  \
        static bool was_said;                                                           \
        bool is_so_once = !!(condition);                                                \
        if (unlikely(is_so_once) && !__atomic_exchange_n(&was_said, true, __ATOMIC_RELAXED)) \
            pagemill_linux_warn(__FILE__, __LINE__, __func__, __VA_ARGS__);             \
        unlikely(is_so_once);                                                           \
    })
#define WARN_ON_ONCE(condition) WARN_ONCE(condition, NULL)
#define VM_WARN_ON(condition) ((void)WARN_ON(condition))
#define VM_WARN_ON_ONCE(condition) ((void)WARN_ON_ONCE(condition))
#define VM_WARN_ONCE(condition, ...) ((void)WARN_ONCE(condition, __VA_ARGS__))

#define BUG() pagemill_linux_bug(__FILE__, __LINE__, __func__)
#define BUG_ON(condition)        \
    do {                         \
        if (unlikely(condition)) \
            BUG();               \
    } while (0)
#define VM_BUG_ON(condition) BUG_ON(condition)
#define VM_BUG_ON_PAGE(condition, page) BUG_ON(condition)
#define BUILD_BUG_ON(condition) _Static_assert(!(condition), "BUILD_BUG_ON: " #condition)

#endif
