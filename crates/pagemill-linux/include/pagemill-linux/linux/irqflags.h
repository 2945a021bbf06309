/* In a process nothing is an interrupt but a signal, and these do not hold signals off. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_IRQFLAGS_H
#define PAGEMILL_LINUX_IRQFLAGS_H

#include <linux/compiler.h>

#define local_irq_save(flags) do { (flags) = 0; barrier(); } while (0)
#define local_irq_restore(flags) do { (void)(flags); barrier(); } while (0)
#define local_irq_disable() barrier()
#define local_irq_enable() barrier()
#define local_bh_disable() barrier()
#define local_bh_enable() barrier()
#define local_save_flags(flags) ((void)((flags) = 0))
#define irqs_disabled() 0
#define irqs_disabled_flags(flags) ((void)(flags), 0)

#endif
