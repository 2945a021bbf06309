/* An index from a number to a pointer. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Whoever changes a tree must be alone with it; any number may look. */
#ifndef PAGEMILL_LINUX_RADIX_TREE_H
#define PAGEMILL_LINUX_RADIX_TREE_H

#include <linux/errno.h>
#include <linux/gfp_types.h>

struct radix_tree_node;

struct radix_tree_root {
    struct radix_tree_node *top;
    /* Levels of nodes, each of six bits of the index. */
    unsigned int height;
};

#define RADIX_TREE_INIT(gfp) {NULL, 0}
#define RADIX_TREE(name, gfp) struct radix_tree_root name = RADIX_TREE_INIT(gfp)
#define INIT_RADIX_TREE(root, gfp) ((void)(*(root) = (struct radix_tree_root)RADIX_TREE_INIT(gfp)))

/* Returns 0, -EEXIST, -EINVAL for a null item, or -ENOMEM. */
int radix_tree_insert(struct radix_tree_root *root, unsigned long index, void *item);
void *radix_tree_lookup(const struct radix_tree_root *root, unsigned long index);
/* Returns the item that was there, or null. */
void *radix_tree_delete(struct radix_tree_root *root, unsigned long index);

/* The nearest index at or after `index` that has an item, among `max_scan` of them. If none has: `index + max_scan`, or the largest
 * index where that would be beyond. */
unsigned long radix_tree_next_present(struct radix_tree_root *root, unsigned long index, unsigned long max_scan);
/* The nearest at or before. If none has an item: `index - max_scan`, or 0 where that would be below. */
unsigned long radix_tree_prev_present(struct radix_tree_root *root, unsigned long index, unsigned long max_scan);
/* The same for an index without an item. */
unsigned long radix_tree_next_hole(struct radix_tree_root *root, unsigned long index, unsigned long max_scan);
unsigned long radix_tree_prev_hole(struct radix_tree_root *root, unsigned long index, unsigned long max_scan);

/* No lock is held while a node is allocated. */
static inline int radix_tree_preload(gfp_t gfp) {
    (void)gfp;
    return 0;
}

static inline void radix_tree_preload_end(void) {}

#endif
