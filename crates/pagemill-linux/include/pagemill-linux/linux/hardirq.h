/* See irqflags.h and preempt.h. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/irqflags.h>
#include <linux/preempt.h>
