/* What the kernel's C asks of the compiler. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_COMPILER_H
#define PAGEMILL_LINUX_COMPILER_H

#include <linux/types.h>

#define likely(condition) __builtin_expect(!!(condition), 1)
#define unlikely(condition) __builtin_expect(!!(condition), 0)
#define barrier() __asm__ volatile("" ::: "memory")
#define READ_ONCE(place) (*(const volatile __typeof__(place) *)&(place))
#define WRITE_ONCE(place, value) (*(volatile __typeof__(place) *)&(place) = (value))
#define container_of(pointer, type, member) \
    ((type *)((char *)(pointer) - offsetof(type, member)))

#ifndef __always_inline
#define __always_inline inline __attribute__((__always_inline__))
#endif
#ifndef noinline
#define noinline __attribute__((__noinline__))
#endif
#ifndef __must_check
#define __must_check __attribute__((__warn_unused_result__))
#endif
#ifndef __malloc
#define __malloc __attribute__((__malloc__))
#endif
#ifndef __maybe_unused
#define __maybe_unused __attribute__((__unused__))
#endif
#ifndef fallthrough
#define fallthrough __attribute__((__fallthrough__))
#endif
#define __user
#define __iomem
#define __rcu
#define __force
#define __percpu

#endif
