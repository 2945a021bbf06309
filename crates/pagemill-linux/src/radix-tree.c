/* An index from a number to a pointer: nodes of 64 slots, each with a bit for what is in it. A lower node exists only while it has an
 * item below, so a search passes over empty parts by their bits. */
#include <limits.h>
#include <linux/radix-tree.h>
#include <stdlib.h>

#define BITS 6
#define SLOTS (1 << BITS)

struct radix_tree_node {
    uint64_t present;
    void *slots[SLOTS];
};

/* The largest index of a tree of so many levels. */
static unsigned long largest(unsigned int height) {
    return height * BITS >= 64 ? ULONG_MAX : (1UL << height * BITS) - 1;
}

static unsigned int slot_of(unsigned long index, unsigned int level) {
    return index >> level * BITS & (SLOTS - 1);
}

int radix_tree_insert(struct radix_tree_root *root, unsigned long index, void *item) {
    if (!item)
        return -EINVAL;
    while (root->height == 0 || index > largest(root->height)) {
        struct radix_tree_node *top = calloc(1, sizeof *top);
        if (!top)
            return -ENOMEM;
        root->height++;
        if (root->top) {
            top->slots[0] = root->top;
            top->present = 1;
        } else {
            while (index > largest(root->height))
                root->height++;
        }
        root->top = top;
    }
    struct radix_tree_node *node = root->top;
    for (unsigned int level = root->height - 1; level > 0; level--) {
        unsigned int slot = slot_of(index, level);
        if (!node->slots[slot]) {
            struct radix_tree_node *below = calloc(1, sizeof *below);
            if (!below) {
                /* Takes away the nodes that were made for it. */
                radix_tree_delete(root, index);
                return -ENOMEM;
            }
            node->slots[slot] = below;
            node->present |= 1ULL << slot;
        }
        node = node->slots[slot];
    }
    unsigned int slot = slot_of(index, 0);
    if (node->slots[slot])
        return -EEXIST;
    node->slots[slot] = item;
    node->present |= 1ULL << slot;
    return 0;
}

void *radix_tree_lookup(const struct radix_tree_root *root, unsigned long index) {
    if (index > largest(root->height))
        return NULL;
    void *at = root->top;
    for (unsigned int level = root->height; at && level > 0; level--)
        at = ((struct radix_tree_node *)at)->slots[slot_of(index, level - 1)];
    return at;
}

void *radix_tree_delete(struct radix_tree_root *root, unsigned long index) {
    struct radix_tree_node *path[64 / BITS + 1];
    void *at = root->top;
    if (index > largest(root->height))
        return NULL;
    unsigned int level = root->height;
    for (; at && level > 0; level--) {
        path[level - 1] = at;
        at = path[level - 1]->slots[slot_of(index, level - 1)];
    }
    for (; level < root->height; level++) {
        unsigned int slot = slot_of(index, level);
        path[level]->slots[slot] = NULL;
        path[level]->present &= ~(1ULL << slot);
        if (path[level]->present)
            return at;
        free(path[level]);
    }
    *root = (struct radix_tree_root){NULL, 0};
    return at;
}

/* The first index from `index` to `last` below a node that has an item. Whether there is any. */
static bool find_next(const struct radix_tree_node *node, unsigned int level, unsigned long *index, unsigned long last) {
    for (;;) {
        unsigned int slot = slot_of(*index, level);
        uint64_t from = node->present & ~0ULL << slot;
        if (!from)
            return false;
        unsigned int found = (unsigned int)__builtin_ctzll(from);
        if (found != slot)
            *index = ((*index >> level * BITS) + (found - slot)) << level * BITS;
        if (*index > last)
            return false;
        if (level == 0 || find_next(node->slots[found], level - 1, index, last))
            return true;
        unsigned long next = ((*index >> level * BITS) + 1) << level * BITS;
        /* The top of the highest tree has fewer slots than others: the index wraps there. */
        if (found == SLOTS - 1 || next == 0)
            return false;
        *index = next;
    }
}

/* The last index from `index` down to `first`. */
static bool find_prev(const struct radix_tree_node *node, unsigned int level, unsigned long *index, unsigned long first) {
    for (;;) {
        unsigned int slot = slot_of(*index, level);
        uint64_t upto = node->present & ~0ULL >> (SLOTS - 1 - slot);
        if (!upto)
            return false;
        unsigned int found = (unsigned int)(SLOTS - 1 - __builtin_clzll(upto));
        if (found != slot)
            *index = (((*index >> level * BITS) - (slot - found) + 1) << level * BITS) - 1;
        if (*index < first)
            return false;
        if (level == 0 || find_prev(node->slots[found], level - 1, index, first))
            return true;
        if (found == 0)
            return false;
        *index = ((*index >> level * BITS) << level * BITS) - 1;
    }
}

unsigned long radix_tree_next_present(struct radix_tree_root *root, unsigned long index, unsigned long max_scan) {
    unsigned long end = index + max_scan < index ? ULONG_MAX : index + max_scan;
    unsigned long at = index;
    bool may_be = max_scan > 0 && root->top && index <= largest(root->height);
    return may_be && find_next(root->top, root->height - 1, &at, end - (end - index == max_scan)) ? at : end;
}

unsigned long radix_tree_prev_present(struct radix_tree_root *root, unsigned long index, unsigned long max_scan) {
    unsigned long before = max_scan > index ? 0 : index - max_scan;
    unsigned long first = before + (index - before == max_scan);
    unsigned long at = index < largest(root->height) ? index : largest(root->height);
    return max_scan > 0 && root->top && at >= first && find_prev(root->top, root->height - 1, &at, first) ? at : before;
}

unsigned long radix_tree_next_hole(struct radix_tree_root *root, unsigned long index, unsigned long max_scan) {
    while (max_scan-- > 0 && radix_tree_lookup(root, index) && index != ULONG_MAX)
        index++;
    return index;
}

unsigned long radix_tree_prev_hole(struct radix_tree_root *root, unsigned long index, unsigned long max_scan) {
    while (max_scan-- > 0 && radix_tree_lookup(root, index) && index != 0)
        index--;
    return index;
}
