/* A process cannot keep its CPU: these only keep the compiler from moving memory accesses. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_PREEMPT_H
#define PAGEMILL_LINUX_PREEMPT_H

#include <linux/compiler.h>

#define preempt_disable() barrier()
#define preempt_enable() barrier()
#define preempt_enable_no_resched() barrier()
#define preempt_count() 0
#define preemptible() 1
#define migrate_disable() barrier()
#define migrate_enable() barrier()
#define in_interrupt() 0
#define in_irq() 0
#define in_hardirq() 0
#define in_softirq() 0
#define in_serving_softirq() 0
#define in_atomic() 0
#define in_nmi() 0
#define in_task() 1

#endif
