/* A module's own threads. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_KTHREAD_H
#define PAGEMILL_LINUX_KTHREAD_H

#include <linux/err.h>
#include <linux/sched.h>

/* A thread that begins with wake_up_process. ERR_PTR(-EAGAIN) if the system refuses it. */
struct task_struct *kthread_create(int (*function)(void *data), void *data, const char *name, ...)
    __attribute__((format(printf, 3, 4)));
#define kthread_create_on_node(function, data, node, name, ...) kthread_create(function, data, name, ##__VA_ARGS__)
#define kthread_run(function, data, name, ...)                                                 \
    ({                                                                                         \
        struct task_struct *task_ = kthread_create(function, data, name, ##__VA_ARGS__);       \
        if (!IS_ERR(task_))                                                                    \
            wake_up_process(task_);                                                            \
        task_;                                                                                 \
    })
#define kthread_create_on_cpu(function, data, cpu, name)                                       \
    ({                                                                                         \
        struct task_struct *task_ = kthread_create(function, data, name, cpu);                 \
        if (!IS_ERR(task_))                                                                    \
            kthread_bind(task_, cpu);                                                          \
        task_;                                                                                 \
    })
/* Before it begins. */
void kthread_bind(struct task_struct *task, unsigned int cpu);
/* Asks the thread to end, waits until it has, and frees it: what its function returned, or -EINTR if it never began. A thread that
 * ends by itself stays until then. */
int kthread_stop(struct task_struct *task);
bool kthread_should_stop(void);
int kthread_park(struct task_struct *task);
void kthread_unpark(struct task_struct *task);
bool kthread_should_park(void);
void kthread_parkme(void);

#endif
