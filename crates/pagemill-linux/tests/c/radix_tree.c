/* The index: what was inserted is found, and the nearest slot that is present, or a hole, against a table of all. */
#include "check.h"
#include <limits.h>
#include <linux/radix-tree.h>

#define SPAN 5000

static RADIX_TREE(tree, GFP_KERNEL);
static bool present[SPAN];

static void compare(unsigned long base, unsigned long at, unsigned long max) {
    unsigned long next = at, prev = at, scanned;
    for (scanned = 0; scanned < max && !(next < SPAN && present[next]); scanned++)
        next++;
    CHECK(radix_tree_next_present(&tree, base + at, max) == base + next);
    if (base == 0 || max <= at) {
        for (scanned = 0; scanned < max && !(prev < SPAN && present[prev]) && prev > 0; scanned++)
            prev--;
        CHECK(radix_tree_prev_present(&tree, base + at, max) == base + prev);
    }
    for (next = at, scanned = 0; scanned < max && next < SPAN && present[next]; scanned++)
        next++;
    CHECK(radix_tree_next_hole(&tree, base + at, max) == base + next);
    for (prev = at, scanned = 0; scanned < max && present[prev] && prev > 0; scanned++)
        prev--;
    CHECK(radix_tree_prev_hole(&tree, base + at, max) == base + prev);
}

static void agrees_with_a_table(unsigned long base) {
    unsigned int seed = 1;
    for (int round = 0; round < 20000; round++) {
        seed = seed * 1103515245 + 12345;
        unsigned long at = (seed >> 8) % SPAN;
        /* Sparse at first and at the end, dense between. */
        if (round % 200 < 100 ? !present[at] : present[at]) {
            present[at] = !present[at];
            if (present[at])
                CHECK(radix_tree_insert(&tree, base + at, present + at) == 0);
            else
                CHECK(radix_tree_delete(&tree, base + at) == present + at);
        } else if (present[at]) {
            CHECK(radix_tree_insert(&tree, base + at, present) == -EEXIST);
        }
        CHECK(radix_tree_lookup(&tree, base + at) == (present[at] ? present + at : NULL));
        seed = seed * 1103515245 + 12345;
        compare(base, (seed >> 8) % SPAN, (seed >> 4) % 700);
    }
    for (unsigned long at = 0; at < SPAN; at++)
        CHECK(radix_tree_delete(&tree, base + at) == (present[at] ? present + at : NULL));
    memset(present, 0, sizeof present);
    CHECK(!tree.top && tree.height == 0);
}

int main(void) {
    agrees_with_a_table(0);
    agrees_with_a_table(1UL << 40);

    /* They never wrap. */
    CHECK(radix_tree_next_present(&tree, 7, 100) == 107 && radix_tree_prev_present(&tree, 207, 100) == 107);
    CHECK(radix_tree_insert(&tree, 0, &tree) == 0 && radix_tree_insert(&tree, ULONG_MAX, &tree) == 0);
    CHECK(radix_tree_insert(&tree, 1, NULL) == -EINVAL);
    CHECK(radix_tree_next_present(&tree, 1, ULONG_MAX) == ULONG_MAX);
    CHECK(radix_tree_next_present(&tree, ULONG_MAX - 5, 3) == ULONG_MAX - 2);
    CHECK(radix_tree_next_present(&tree, ULONG_MAX - 5, 100) == ULONG_MAX);
    CHECK(radix_tree_prev_present(&tree, ULONG_MAX - 1, ULONG_MAX) == 0);
    CHECK(radix_tree_prev_present(&tree, 5, 100) == 0 && radix_tree_prev_present(&tree, 5, 3) == 2);
    CHECK(radix_tree_next_present(&tree, 0, 0) == 0 && radix_tree_prev_present(&tree, 5, 0) == 5);
    CHECK(radix_tree_delete(&tree, 0) && radix_tree_delete(&tree, ULONG_MAX) && !tree.top);
    return 0;
}
