/*
 * One copy of a variable for each CPU. In a process a thread may move to another CPU at any time, so the this_cpu_ functions are
 * atomic. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef PAGEMILL_LINUX_PERCPU_H
#define PAGEMILL_LINUX_PERCPU_H

#include <linux/smp.h>
#include <linux/types.h>

#ifndef __percpu
#define __percpu
#endif

/* Variables of a source file: the section is CPU 0's copy, and the others are made as they are first used. */
#define DEFINE_PER_CPU(type, name) __attribute__((section("pagemill_percpu"))) typeof(type) name
#define DECLARE_PER_CPU(type, name) extern __attribute__((section("pagemill_percpu"))) typeof(type) name
#define DEFINE_PER_CPU_ALIGNED(type, name) DEFINE_PER_CPU(type, name) __attribute__((aligned(64)))
#define DEFINE_PER_CPU_SHARED_ALIGNED DEFINE_PER_CPU_ALIGNED

/* Zeroed memory for each CPU, aligned to `align`, at most a page. Null if there is none. */
void __percpu *__alloc_percpu_gfp(size_t size, size_t align, gfp_t gfp);
static inline void __percpu *__alloc_percpu(size_t size, size_t align) { return __alloc_percpu_gfp(size, align, 0); }
#define alloc_percpu(type) ((typeof(type) __percpu *)__alloc_percpu(sizeof(type), __alignof__(type)))
#define alloc_percpu_gfp(type, gfp) ((typeof(type) __percpu *)__alloc_percpu_gfp(sizeof(type), __alignof__(type), gfp))
/* Warns of any pointer but null that is not allocated. */
void free_percpu(void __percpu *copies);
/* The copy of a CPU. */
void *pagemill_per_cpu(const volatile void *copies, unsigned int cpu);

#define per_cpu_ptr(pointer, cpu) ((typeof(pointer))pagemill_per_cpu(pointer, cpu))
#define this_cpu_ptr(pointer) per_cpu_ptr(pointer, smp_processor_id())
#define raw_cpu_ptr this_cpu_ptr
#define per_cpu(variable, cpu) (*per_cpu_ptr(&(variable), cpu))
#define get_cpu_var(variable) (*this_cpu_ptr(&(variable)))
#define put_cpu_var(variable) ((void)&(variable))
#define get_cpu_ptr(pointer) this_cpu_ptr(pointer)
#define put_cpu_ptr(pointer) ((void)(pointer))

#define this_cpu_read(variable) __atomic_load_n(this_cpu_ptr(&(variable)), __ATOMIC_RELAXED)
#define this_cpu_write(variable, value) __atomic_store_n(this_cpu_ptr(&(variable)), value, __ATOMIC_RELAXED)
#define this_cpu_add(variable, value) ((void)__atomic_fetch_add(this_cpu_ptr(&(variable)), (typeof(variable))(value), __ATOMIC_RELAXED))
#define this_cpu_add_return(variable, value) __atomic_add_fetch(this_cpu_ptr(&(variable)), (typeof(variable))(value), __ATOMIC_RELAXED)
#define this_cpu_sub(variable, value) this_cpu_add(variable, -(typeof(variable))(value))
#define this_cpu_sub_return(variable, value) this_cpu_add_return(variable, -(typeof(variable))(value))
#define this_cpu_inc(variable) this_cpu_add(variable, 1)
#define this_cpu_dec(variable) this_cpu_sub(variable, 1)
#define this_cpu_inc_return(variable) this_cpu_add_return(variable, 1)
#define this_cpu_dec_return(variable) this_cpu_sub_return(variable, 1)
#define __this_cpu_read this_cpu_read
#define __this_cpu_write this_cpu_write
#define __this_cpu_add this_cpu_add
#define __this_cpu_sub this_cpu_sub
#define __this_cpu_inc this_cpu_inc
#define __this_cpu_dec this_cpu_dec
#define raw_cpu_add this_cpu_add
#define raw_cpu_inc this_cpu_inc
#define __this_cpu_add_return this_cpu_add_return
#define __this_cpu_sub_return this_cpu_sub_return

#endif
