/* Cycles a page, by the number of pages of a request: singly, and in bulk through a list and through an array. The loop is that of the
 * measurements of 2017 and 2021 that docs/linux.md names. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/gfp.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/timex.h>

#define MOST 128

static unsigned int loops = 1000;
module_param(loops, uint, 0444);
MODULE_PARM_DESC(loops, "requests of each kind and size");

static struct page *pages[MOST];

static bool singly(unsigned long n) {
    bool is_full = true;
    for (unsigned long at = 0; at < n; at++)
        is_full &= (pages[at] = alloc_page(GFP_KERNEL)) != NULL;
    for (unsigned long at = 0; at < n; at++)
        if (pages[at])
            __free_page(pages[at]);
    memset(pages, 0, sizeof(pages));
    return is_full;
}

static bool by_list(unsigned long n) {
    LIST_HEAD(list);
    bool is_full = alloc_pages_bulk_list(GFP_KERNEL, n, &list) == n;
    free_pages_bulk(&list);
    return is_full;
}

static bool by_array(unsigned long n) {
    unsigned long got = alloc_pages_bulk_array(GFP_KERNEL, n, pages);
    release_pages(pages, (int)got);
    memset(pages, 0, sizeof(pages));
    return got == n;
}

static int __init bulk_bench_init(void) {
    static const struct {
        const char *name;
        bool (*once)(unsigned long n);
    } ways[] = {{"singly", singly}, {"list", by_list}, {"array", by_array}};

    for (unsigned long n = 1; n <= MOST; n *= 2) {
        for (size_t way = 0; way < ARRAY_SIZE(ways); way++) {
            ktime_t begun = ktime_get();
            cycles_t cycles = get_cycles();
            for (unsigned int loop = 0; loop < loops; loop++)
                if (!ways[way].once(n))
                    return -ENOMEM;
            cycles = get_cycles() - cycles;
            pr_info("%s: %lu pages: %lu cycles, %lld ns a page\n", ways[way].name, n, cycles / (loops * n),
                    ktime_to_ns(ktime_sub(ktime_get(), begun)) / (s64)(loops * n));
        }
    }
    return 0;
}

static void __exit bulk_bench_exit(void) { pr_info("done\n"); }

module_init(bulk_bench_init);
module_exit(bulk_bench_exit);
MODULE_DESCRIPTION("Cycles a page in bulk");
MODULE_LICENSE("Dual MIT/GPL");
