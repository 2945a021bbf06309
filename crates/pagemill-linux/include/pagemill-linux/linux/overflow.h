/* Arithmetic that says when it overflows, and sizes that become SIZE_MAX then, which no allocation serves. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_OVERFLOW_H
#define PAGEMILL_LINUX_OVERFLOW_H

#include <linux/limits.h>
#include <linux/types.h>

#define check_add_overflow(a, b, sum) __builtin_add_overflow(a, b, sum)
#define check_sub_overflow(a, b, difference) __builtin_sub_overflow(a, b, difference)
#define check_mul_overflow(a, b, product) __builtin_mul_overflow(a, b, product)

static inline size_t size_mul(size_t a, size_t b) {
    size_t size;
    return check_mul_overflow(a, b, &size) ? SIZE_MAX : size;
}
static inline size_t size_add(size_t a, size_t b) {
    size_t size;
    return check_add_overflow(a, b, &size) ? SIZE_MAX : size;
}
#define array_size(a, b) size_mul(a, b)
#define array3_size(a, b, c) size_mul(size_mul(a, b), c)
#define flex_array_size(pointer, member, count) size_mul(count, sizeof(*(pointer)->member))
#define struct_size(pointer, member, count) size_add(sizeof(*(pointer)), flex_array_size(pointer, member, count))

#endif
