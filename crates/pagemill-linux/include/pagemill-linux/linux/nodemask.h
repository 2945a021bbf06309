/* Sets of NUMA nodes. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_NODEMASK_H
#define PAGEMILL_LINUX_NODEMASK_H

#include <linux/compiler.h>
#include <linux/numa.h>

typedef struct {
    unsigned long bits[MAX_NUMNODES / (8 * sizeof(unsigned long))];
} nodemask_t;

#define NODE_MASK_NONE ((nodemask_t){{0}})
#define NODE_MASK_ALL ((nodemask_t){{~0UL}})
#define nodes_clear(mask) ((void)((mask).bits[0] = 0))
#define nodes_setall(mask) ((void)((mask).bits[0] = ~0UL))
#define node_set(node, mask) ((void)((mask).bits[0] |= 1UL << (node)))
#define node_clear(node, mask) ((void)((mask).bits[0] &= ~(1UL << (node))))
#define node_isset(node, mask) (((mask).bits[0] >> (node) & 1) != 0)
#define nodes_empty(mask) ((mask).bits[0] == 0)
#define nodes_weight(mask) __builtin_popcountl((mask).bits[0])
#define nodemask_of_node(node) ((nodemask_t){{1UL << (node)}})
#define first_node(mask) ((mask).bits[0] ? __builtin_ctzl((mask).bits[0]) : MAX_NUMNODES)

/* The nodes of the allocator's arenas, bit n for node n. */
unsigned long pagemill_linux_nodes(void);

static inline bool node_online(int node) {
    return node >= 0 && node < MAX_NUMNODES && (pagemill_linux_nodes() >> node & 1);
}

static inline int num_online_nodes(void) {
    return __builtin_popcountl(pagemill_linux_nodes());
}

#define for_each_online_node(node)                  \
    for (node = 0; node < MAX_NUMNODES; node++)     \
        if (node_online(node))

#endif
