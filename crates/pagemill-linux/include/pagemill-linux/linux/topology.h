/* Where a thread runs. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_TOPOLOGY_H
#define PAGEMILL_LINUX_TOPOLOGY_H

#include <linux/nodemask.h>

/* The node of the caller's CPU. It may be another one when the function returns. */
int numa_node_id(void);

/* The same, or the first node that has memory, if that one has none. */
int numa_mem_id(void);

#endif
