/* What every kernel source uses: sizes, bounds, rounding. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_KERNEL_H
#define PAGEMILL_LINUX_KERNEL_H

/* <sys/sysinfo.h> includes this file too, for the system's. */
#include_next <linux/kernel.h>
#include <linux/bitops.h>
#include <linux/build_bug.h>
#include <linux/compiler.h>
#include <linux/container_of.h>
#include <linux/errno.h>
#include <linux/limits.h>
#include <linux/log2.h>
#include <linux/math.h>
#include <linux/minmax.h>
#include <linux/printk.h>
#include <linux/types.h>

#ifndef ARRAY_SIZE
#define ARRAY_SIZE(array) (sizeof(array) / sizeof((array)[0]))
#endif
#ifndef PTR_ALIGN
#define PTR_ALIGN(pointer, to) ((typeof(pointer))ALIGN((unsigned long)(pointer), to))
#define PTR_ALIGN_DOWN(pointer, to) ((typeof(pointer))ALIGN_DOWN((unsigned long)(pointer), to))
#endif
#define PTR_IF(condition, pointer) ((condition) ? (pointer) : NULL)
#define upper_32_bits(number) ((u32)(((number) >> 16) >> 16))
#define lower_32_bits(number) ((u32)((number) & 0xffffffff))

#define might_sleep() ((void)0)
#define might_sleep_if(condition) ((void)(condition))
#define cant_sleep() ((void)0)

/* Ends the process with a message. */
__attribute__((noreturn, format(printf, 1, 2))) void panic(const char *format, ...);

int sprintf(char *text, const char *format, ...) __attribute__((format(printf, 2, 3)));
int snprintf(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
int vsnprintf(char *text, size_t size, const char *format, __builtin_va_list args);
int sscanf(const char *text, const char *format, ...);
/* As snprintf, but it returns the number of characters that were written, without the 0 at the end. */
int scnprintf(char *text, size_t size, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* A new text, which kfree frees. */
char *kasprintf(gfp_t gfp, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* They read a whole number, with a newline after it or not: 0, -EINVAL for anything else, -ERANGE for one that does not fit. */
int kstrtoull(const char *text, unsigned int base, unsigned long long *number);
int kstrtoll(const char *text, unsigned int base, long long *number);
int kstrtoul(const char *text, unsigned int base, unsigned long *number);
int kstrtol(const char *text, unsigned int base, long *number);
int kstrtouint(const char *text, unsigned int base, unsigned int *number);
int kstrtoint(const char *text, unsigned int base, int *number);
int kstrtou64(const char *text, unsigned int base, u64 *number);
int kstrtou32(const char *text, unsigned int base, u32 *number);
int kstrtou16(const char *text, unsigned int base, u16 *number);
int kstrtou8(const char *text, unsigned int base, u8 *number);
int kstrtos64(const char *text, unsigned int base, s64 *number);
int kstrtos32(const char *text, unsigned int base, s32 *number);
int kstrtos16(const char *text, unsigned int base, s16 *number);
int kstrtos8(const char *text, unsigned int base, s8 *number);
int kstrtobool(const char *text, bool *is_true);

#endif
