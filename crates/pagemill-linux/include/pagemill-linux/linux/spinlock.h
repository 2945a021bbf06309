/*
 * Locks that spin, and yield the processor now and then: in a process the holder may not be running. Nothing holds signals or other
 * threads off, so the forms for interrupts are the plain ones. SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef PAGEMILL_LINUX_SPINLOCK_H
#define PAGEMILL_LINUX_SPINLOCK_H

#include <linux/compiler.h>
#include <linux/irqflags.h>
#include <linux/preempt.h>

typedef struct spinlock {
    unsigned int is_taken;
} spinlock_t;
typedef spinlock_t raw_spinlock_t;

/* Spins and yields until the lock is free. */
void pagemill_spin(spinlock_t *lock);

#define __SPIN_LOCK_UNLOCKED(name) {0}
#define DEFINE_SPINLOCK(name) spinlock_t name = {0}
#define DEFINE_RAW_SPINLOCK(name) DEFINE_SPINLOCK(name)
static inline void spin_lock_init(spinlock_t *lock) { lock->is_taken = 0; }
static inline int spin_trylock(spinlock_t *lock) { return !__atomic_exchange_n(&lock->is_taken, 1, __ATOMIC_ACQUIRE); }
static inline void spin_lock(spinlock_t *lock) {
    if (!spin_trylock(lock))
        pagemill_spin(lock);
}
static inline void spin_unlock(spinlock_t *lock) { __atomic_store_n(&lock->is_taken, 0, __ATOMIC_RELEASE); }
static inline int spin_is_locked(spinlock_t *lock) { return __atomic_load_n(&lock->is_taken, __ATOMIC_RELAXED); }
#define spin_lock_irq spin_lock
#define spin_unlock_irq spin_unlock
#define spin_lock_bh spin_lock
#define spin_unlock_bh spin_unlock
#define spin_lock_nested(lock, class) spin_lock(lock)
#define spin_lock_irqsave(lock, flags) ((flags) = 0, spin_lock(lock))
#define spin_unlock_irqrestore(lock, flags) ((void)(flags), spin_unlock(lock))
#define spin_trylock_irqsave(lock, flags) ((flags) = 0, spin_trylock(lock))
#define assert_spin_locked(lock) ((void)(lock))
#define lockdep_assert_held(lock) ((void)(lock))
#define raw_spin_lock_init spin_lock_init
#define raw_spin_lock spin_lock
#define raw_spin_unlock spin_unlock
#define raw_spin_lock_irqsave spin_lock_irqsave
#define raw_spin_unlock_irqrestore spin_unlock_irqrestore

#endif
