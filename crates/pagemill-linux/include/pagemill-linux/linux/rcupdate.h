/*
 * Readers that take no lock, and writers that wait until all readers of before are done (a grace period). SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Readers write to a counter that all share, two for the process: it is as right as the kernel's, and slower.
 */
#ifndef PAGEMILL_LINUX_RCUPDATE_H
#define PAGEMILL_LINUX_RCUPDATE_H

#include <linux/atomic.h>
#include <linux/compiler.h>

struct callback_head {
    struct callback_head *next;
    void (*func)(struct callback_head *head);
};
#define rcu_head callback_head
typedef void (*rcu_callback_t)(struct rcu_head *head);

void rcu_read_lock(void);
void rcu_read_unlock(void);
/* Not between the two. */
void synchronize_rcu(void);
/* Calls the function after a grace period, from a thread for this purpose. */
void call_rcu(struct rcu_head *head, rcu_callback_t function);
/* Waits for all those calls of before. */
void rcu_barrier(void);
#define rcu_read_lock_bh rcu_read_lock
#define rcu_read_unlock_bh rcu_read_unlock
#define rcu_read_lock_sched rcu_read_lock
#define rcu_read_unlock_sched rcu_read_unlock
#define synchronize_rcu_expedited synchronize_rcu
#define synchronize_net synchronize_rcu
#define call_rcu_hurry call_rcu
#define rcu_read_lock_held() 1

#define rcu_dereference(pointer) __atomic_load_n(&(pointer), __ATOMIC_ACQUIRE)
#define rcu_dereference_protected(pointer, condition) ((void)(condition), (pointer))
#define rcu_dereference_check(pointer, condition) ((void)(condition), rcu_dereference(pointer))
#define rcu_dereference_raw rcu_dereference
#define rcu_access_pointer(pointer) READ_ONCE(pointer)
#define rcu_assign_pointer(pointer, value) __atomic_store_n(&(pointer), value, __ATOMIC_RELEASE)
#define RCU_INIT_POINTER(pointer, value) WRITE_ONCE(pointer, value)

/* Frees what kmalloc or vmalloc returned after a grace period. The form with one argument waits for it. */
void pagemill_kvfree_rcu(struct rcu_head *head, size_t offset);
void pagemill_kvfree_now(const void *object);
#define __pagemill_kvfree_rcu_2(pointer, member) \
    pagemill_kvfree_rcu(&(pointer)->member, offsetof(__typeof__(*(pointer)), member))
#define kvfree_rcu_mightsleep(pointer) (synchronize_rcu(), pagemill_kvfree_now(pointer))
#define kfree_rcu_mightsleep kvfree_rcu_mightsleep
#define __pagemill_kvfree_rcu_1 kvfree_rcu_mightsleep
#define __pagemill_third(a, b, chosen, ...) chosen
#define kvfree_rcu(...) __pagemill_third(__VA_ARGS__, __pagemill_kvfree_rcu_2, __pagemill_kvfree_rcu_1)(__VA_ARGS__)
#define kfree_rcu kvfree_rcu

#endif
