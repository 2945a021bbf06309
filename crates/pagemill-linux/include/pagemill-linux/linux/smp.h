/* CPUs, by number. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_SMP_H
#define PAGEMILL_LINUX_SMP_H

#include <linux/types.h>

/* The number of CPUs that there may be: those of the machine. */
unsigned int pagemill_nr_cpus(void);
/* The CPU that the caller is on, and may leave at any time. */
unsigned int pagemill_this_cpu(void);
#define nr_cpu_ids pagemill_nr_cpus()
#define smp_processor_id() pagemill_this_cpu()
#define raw_smp_processor_id() pagemill_this_cpu()
#define get_cpu() pagemill_this_cpu()
#define put_cpu() ((void)0)
#define num_possible_cpus() nr_cpu_ids
#define num_present_cpus() nr_cpu_ids
#define num_online_cpus() nr_cpu_ids
#define cpu_online(cpu) ((cpu) < nr_cpu_ids)
#define cpu_possible(cpu) ((cpu) < nr_cpu_ids)
#define for_each_possible_cpu(cpu) for ((cpu) = 0; (cpu) < nr_cpu_ids; (cpu)++)
#define for_each_online_cpu for_each_possible_cpu
#define for_each_present_cpu for_each_possible_cpu

#endif
