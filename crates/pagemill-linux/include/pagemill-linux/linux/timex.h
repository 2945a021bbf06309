/* The processor's own counter of cycles, which runs at a constant rate. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_TIMEX_H
#define PAGEMILL_LINUX_TIMEX_H

#include <linux/types.h>

typedef unsigned long cycles_t;

static inline cycles_t get_cycles(void) {
#ifdef __x86_64__
    return __builtin_ia32_rdtsc();
#else
    unsigned long cycles;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(cycles));
    return cycles;
#endif
}

#endif
