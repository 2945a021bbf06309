/* Numbers that threads share. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Without a return value, an operation orders nothing; with one, it orders everything before it and after it; _relaxed, _acquire
 * and _release as they say. atomic_read and atomic_set order nothing. */
#ifndef PAGEMILL_LINUX_ATOMIC_H
#define PAGEMILL_LINUX_ATOMIC_H

#include <linux/compiler.h>

#define ATOMIC_INIT(number) {(number)}
#define ATOMIC64_INIT(number) {(number)}
#define ATOMIC_LONG_INIT(number) {(number)}

/* One family of functions for each type: its name, that of the type, and that of the number. */
#define __PAGEMILL_ATOMIC_BASE(name, type, number)                                                                        \
    static inline number name##_read(const type *of) { return __atomic_load_n(&of->counter, __ATOMIC_RELAXED); }          \
    static inline number name##_read_acquire(const type *of) { return __atomic_load_n(&of->counter, __ATOMIC_ACQUIRE); }  \
    static inline void name##_set(type *of, number to) { __atomic_store_n(&of->counter, to, __ATOMIC_RELAXED); }          \
    static inline void name##_set_release(type *of, number to) { __atomic_store_n(&of->counter, to, __ATOMIC_RELEASE); }  \
    static inline void name##_add(number by, type *of) { __atomic_fetch_add(&of->counter, by, __ATOMIC_RELAXED); }        \
    static inline void name##_sub(number by, type *of) { __atomic_fetch_sub(&of->counter, by, __ATOMIC_RELAXED); }        \
    static inline void name##_and(number by, type *of) { __atomic_fetch_and(&of->counter, by, __ATOMIC_RELAXED); }        \
    static inline void name##_or(number by, type *of) { __atomic_fetch_or(&of->counter, by, __ATOMIC_RELAXED); }          \
    static inline void name##_xor(number by, type *of) { __atomic_fetch_xor(&of->counter, by, __ATOMIC_RELAXED); }        \
    static inline void name##_andnot(number by, type *of) { name##_and(~by, of); }                                        \
    static inline void name##_inc(type *of) { name##_add(1, of); }                                                        \
    static inline void name##_dec(type *of) { name##_sub(1, of); }

/* Those with a return value, once for each order. */
#define __PAGEMILL_ATOMIC_ORDERED(name, type, number, suffix, order)                                                      \
    static inline number name##_add_return##suffix(number by, type *of) {                                                 \
        return __atomic_add_fetch(&of->counter, by, order);                                                               \
    }                                                                                                                     \
    static inline number name##_sub_return##suffix(number by, type *of) {                                                 \
        return __atomic_sub_fetch(&of->counter, by, order);                                                               \
    }                                                                                                                     \
    static inline number name##_fetch_add##suffix(number by, type *of) {                                                  \
        return __atomic_fetch_add(&of->counter, by, order);                                                               \
    }                                                                                                                     \
    static inline number name##_fetch_sub##suffix(number by, type *of) {                                                  \
        return __atomic_fetch_sub(&of->counter, by, order);                                                               \
    }                                                                                                                     \
    static inline number name##_fetch_and##suffix(number by, type *of) {                                                  \
        return __atomic_fetch_and(&of->counter, by, order);                                                               \
    }                                                                                                                     \
    static inline number name##_fetch_or##suffix(number by, type *of) {                                                   \
        return __atomic_fetch_or(&of->counter, by, order);                                                                \
    }                                                                                                                     \
    static inline number name##_fetch_xor##suffix(number by, type *of) {                                                  \
        return __atomic_fetch_xor(&of->counter, by, order);                                                               \
    }                                                                                                                     \
    static inline number name##_fetch_andnot##suffix(number by, type *of) { return name##_fetch_and##suffix(~by, of); }   \
    static inline number name##_inc_return##suffix(type *of) { return name##_add_return##suffix(1, of); }                 \
    static inline number name##_fetch_inc##suffix(type *of) { return name##_fetch_add##suffix(1, of); }                   \
    static inline number name##_dec_return##suffix(type *of) { return name##_sub_return##suffix(1, of); }                 \
    static inline number name##_fetch_dec##suffix(type *of) { return name##_fetch_sub##suffix(1, of); }                   \
    static inline number name##_xchg##suffix(type *of, number to) { return __atomic_exchange_n(&of->counter, to, order); }\
    static inline bool name##_try_cmpxchg##suffix(type *of, number *from, number to) {                                    \
        /* atomic_long_t has a counter of another type than its functions. */                                             \
        __typeof__(of->counter) was = *from;                                                                              \
        bool is_done = __atomic_compare_exchange_n(&of->counter, &was, to, false, order, __ATOMIC_RELAXED);               \
        *from = was;                                                                                                      \
        return is_done;                                                                                                   \
    }                                                                                                                     \
    static inline number name##_cmpxchg##suffix(type *of, number from, number to) {                                       \
        name##_try_cmpxchg##suffix(of, &from, to);                                                                        \
        return from;                                                                                                      \
    }

#define __PAGEMILL_ATOMIC_TESTS(name, type, number)                                                                       \
    static inline bool name##_inc_and_test(type *of) { return name##_inc_return(of) == 0; }                               \
    static inline bool name##_dec_and_test(type *of) { return name##_dec_return(of) == 0; }                               \
    static inline bool name##_sub_and_test(number by, type *of) { return name##_sub_return(by, of) == 0; }                \
    static inline bool name##_add_negative(number by, type *of) { return name##_add_return(by, of) < 0; }                 \
    /* Adds, unless the number is `unless`: what it was. */                                                               \
    static inline number name##_fetch_add_unless(type *of, number by, number unless) {                                    \
        number was = name##_read(of);                                                                                     \
        while (was != unless && !name##_try_cmpxchg(of, &was, was + by)) {}                                               \
        return was;                                                                                                       \
    }                                                                                                                     \
    static inline bool name##_add_unless(type *of, number by, number unless) {                                            \
        return name##_fetch_add_unless(of, by, unless) != unless;                                                         \
    }                                                                                                                     \
    static inline bool name##_inc_not_zero(type *of) { return name##_add_unless(of, 1, 0); }                              \
    static inline bool name##_inc_unless_negative(type *of) {                                                             \
        number was = name##_read(of);                                                                                     \
        while (was >= 0 && !name##_try_cmpxchg(of, &was, was + 1)) {}                                                     \
        return was >= 0;                                                                                                  \
    }                                                                                                                     \
    static inline bool name##_dec_unless_positive(type *of) {                                                             \
        number was = name##_read(of);                                                                                     \
        while (was <= 0 && !name##_try_cmpxchg(of, &was, was - 1)) {}                                                     \
        return was <= 0;                                                                                                  \
    }                                                                                                                     \
    /* What it would be, if that is negative: then it stays. */                                                           \
    static inline number name##_dec_if_positive(type *of) {                                                               \
        number was = name##_read(of);                                                                                     \
        while (was > 0 && !name##_try_cmpxchg(of, &was, was - 1)) {}                                                      \
        return was - 1;                                                                                                   \
    }

#define __PAGEMILL_ATOMIC(name, type, number)                                                                             \
    __PAGEMILL_ATOMIC_BASE(name, type, number)                                                                            \
    __PAGEMILL_ATOMIC_ORDERED(name, type, number, , __ATOMIC_SEQ_CST)                                                     \
    __PAGEMILL_ATOMIC_ORDERED(name, type, number, _acquire, __ATOMIC_ACQUIRE)                                             \
    __PAGEMILL_ATOMIC_ORDERED(name, type, number, _release, __ATOMIC_RELEASE)                                             \
    __PAGEMILL_ATOMIC_ORDERED(name, type, number, _relaxed, __ATOMIC_RELAXED)                                             \
    __PAGEMILL_ATOMIC_TESTS(name, type, number)

__PAGEMILL_ATOMIC(atomic, atomic_t, int)
__PAGEMILL_ATOMIC(atomic64, atomic64_t, s64)
__PAGEMILL_ATOMIC(atomic_long, atomic_long_t, long)

#define xchg(place, to) __atomic_exchange_n(place, to, __ATOMIC_SEQ_CST)
#define cmpxchg(place, from, to)                                                                              \
    ({                                                                                                        \
        __typeof__(*(place)) from_ = (from);                                                                  \
        __atomic_compare_exchange_n(place, &from_, to, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);            \
        from_;                                                                                                \
    })
#define try_cmpxchg(place, from, to) \
    __atomic_compare_exchange_n(place, from, to, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)

#define smp_mb() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define smp_rmb() __atomic_thread_fence(__ATOMIC_ACQUIRE)
#define smp_wmb() __atomic_thread_fence(__ATOMIC_RELEASE)
#define mb() smp_mb()
#define rmb() smp_rmb()
#define wmb() smp_wmb()
#define smp_mb__before_atomic() smp_mb()
#define smp_mb__after_atomic() smp_mb()
#define smp_load_acquire(place) __atomic_load_n(place, __ATOMIC_ACQUIRE)
#define smp_store_release(place, value) __atomic_store_n(place, value, __ATOMIC_RELEASE)
#define smp_store_mb(variable, value) __atomic_store_n(&(variable), value, __ATOMIC_SEQ_CST)

#endif
