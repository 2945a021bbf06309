/* Threads. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_SCHED_H
#define PAGEMILL_LINUX_SCHED_H

#include <linux/compiler.h>
#include <linux/ktime.h>
#include <linux/smp.h>

#define TASK_COMM_LEN 16
/* The size of a kernel's stack on x86-64. */
#define THREAD_SIZE 16384UL
#define THREAD_ALIGN THREAD_SIZE
#define TASK_RUNNING 0
#define TASK_INTERRUPTIBLE 1
#define TASK_UNINTERRUPTIBLE 2
#define TASK_IDLE TASK_UNINTERRUPTIBLE

struct task_struct {
    unsigned int __state;
    int pid;
    char comm[TASK_COMM_LEN];
    /* Of a thread of kthread_create. */
    int (*function)(void *data);
    void *data;
    unsigned long thread;
    int result;
    bool is_started, should_stop, should_park, is_parked, is_done;
};

/* The caller's thread. */
struct task_struct *pagemill_current(void);
#define current pagemill_current()

#define __set_current_state(state) __atomic_store_n(&current->__state, state, __ATOMIC_SEQ_CST)
#define set_current_state(state) __set_current_state(state)
/* Sleeps until wake_up_process, or so many ticks, if the thread's state is not TASK_RUNNING. Returns those that are left. */
long schedule_timeout(long ticks);
long schedule_timeout_interruptible(long ticks);
long schedule_timeout_uninterruptible(long ticks);
void schedule(void);
int wake_up_process(struct task_struct *task);
/* Whether a kernel would let another thread run: the system decides on its own here. */
#define need_resched() 0
int cond_resched(void);
void yield(void);
#define cpu_relax() barrier()
#define signal_pending(task) ((void)(task), 0)
#define fatal_signal_pending(task) ((void)(task), 0)
/* The system does not hear of these. */
#define set_user_nice(task, nice) ((void)(task), (void)(nice))
#define sched_set_fifo(task) ((void)(task))
#define sched_set_normal(task, nice) ((void)(task), (void)(nice))

#endif
