/* Every part of a module's surroundings, used once. A check that is not so is warned of. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#define DEBUG

#include <asm/timex.h>
#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/delay.h>
#include <linux/device.h>
#include <linux/export.h>
#include <linux/hardirq.h>
#include <linux/interrupt.h>
#include <linux/kref.h>
#include <linux/kthread.h>
#include <linux/mempool.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/prandom.h>
#include <linux/random.h>
#include <linux/rwsem.h>
#include <linux/sched/clock.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/time64.h>
#include <linux/timekeeping.h>
#include <linux/vmalloc.h>
#include <linux/wait.h>

#define CHECK(condition) WARN(!(condition), "not so: %s", #condition)

static int number = 5;
module_param(number, int, 0644);
MODULE_PARM_DESC(number, "a number");
static bool flag;
module_param(flag, bool, 0);
static unsigned long sizes[4];
static unsigned int n_sizes;
module_param_array(sizes, ulong, &n_sizes, 0444);
static char label[8] = "none";
module_param_string(label, label, sizeof(label), 0444);
static char *text = "";
module_param_named(words, text, charp, S_IRUGO);
static unsigned char small;
module_param(small, byte, 0444);

struct item {
    struct kref kref;
    struct rcu_head rcu;
    struct list_head list;
    int value;
};

static DEFINE_PER_CPU(int, counter);
static DEFINE_SPINLOCK(lock);
static DEFINE_MUTEX(mutex);
static DECLARE_RWSEM(rwsem);
static DECLARE_COMPLETION(done);
static DECLARE_WAIT_QUEUE_HEAD(queue);
static atomic_t arrived = ATOMIC_INIT(0);
static unsigned long by_spin, by_mutex, by_rwsem, constructed, released, called_back;

static int worker(void *data) {
    unsigned long flags;
    for (int turn = 0; turn < 10000; turn++) {
        spin_lock_irqsave(&lock, flags);
        by_spin++;
        spin_unlock_irqrestore(&lock, flags);
        mutex_lock(&mutex);
        by_mutex++;
        mutex_unlock(&mutex);
        down_write(&rwsem);
        by_rwsem++;
        up_write(&rwsem);
        down_read(&rwsem);
        up_read(&rwsem);
        kfree(kmalloc(turn % 3000 + 1, GFP_KERNEL));
        this_cpu_inc(counter);
    }
    if (atomic_inc_return(&arrived) == 4)
        complete(&done);
    wake_up(&queue);
    while (!kthread_should_stop())
        schedule_timeout_interruptible(HZ);
    return (int)(long)data;
}

static void threads(void) {
    struct task_struct *tasks[4];
    int sum = 0;
    for (long at = 0; at < 4; at++) {
        tasks[at] = kthread_run(worker, (void *)at, "worker/%ld", at);
        CHECK(!IS_ERR(tasks[at]));
    }
    wait_event(queue, atomic_read(&arrived) == 4);
    wait_for_completion(&done);
    for (int at = 0; at < 4; at++)
        CHECK(kthread_stop(tasks[at]) == at);
    for (unsigned int cpu = 0; cpu < nr_cpu_ids; cpu++)
        sum += per_cpu(counter, cpu);
    CHECK(sum == 4 * 10000 && by_spin == 4 * 10000 && by_mutex == 4 * 10000 && by_rwsem == 4 * 10000);
    CHECK(wait_for_completion_timeout(&done, 1) == 0 && !completion_done(&done));
    complete_all(&done);
    CHECK(try_wait_for_completion(&done) && wait_for_completion_timeout(&done, HZ) > 0);
    CHECK(wait_event_timeout(queue, false, 1) == 0 && wait_event_interruptible(queue, true) == 0);

    struct task_struct *never = kthread_create(worker, NULL, "never");
    kthread_bind(never, 0);
    CHECK(kthread_stop(never) == -EINTR);
    CHECK(down_read_trylock(&rwsem) && !down_write_trylock(&rwsem));
    up_read(&rwsem);
    CHECK(down_write_trylock(&rwsem) && !down_read_trylock(&rwsem));
    up_write(&rwsem);
    CHECK(mutex_trylock(&mutex) && !mutex_trylock(&mutex) && mutex_is_locked(&mutex));
    mutex_unlock(&mutex);
    CHECK(spin_trylock(&lock) && !spin_trylock(&lock));
    spin_unlock(&lock);
}

static int parked(void *unused) {
    while (!kthread_should_stop()) {
        if (kthread_should_park())
            kthread_parkme();
        cond_resched();
    }
    return 0;
}

static void parking(void) {
    struct task_struct *task = kthread_run(parked, NULL, "parked");
    CHECK(kthread_park(task) == 0);
    kthread_unpark(task);
    CHECK(kthread_stop(task) == 0);
    set_current_state(TASK_UNINTERRUPTIBLE);
    CHECK(schedule_timeout(1) == 0);
    CHECK(schedule_timeout_uninterruptible(1) == 0 && current->pid > 0);
    schedule();
    yield();
}

static void release(struct kref *kref) {
    released++;
    kfree(container_of(kref, struct item, kref));
}

static void call_back(struct rcu_head *head) {
    called_back++;
    kfree(container_of(head, struct item, rcu));
}

static void references(void) {
    struct item *item = kzalloc(sizeof(*item), GFP_KERNEL), *seen;
    struct item __rcu *shown = NULL;
    kref_init(&item->kref);
    kref_get(&item->kref);
    CHECK(!kref_put(&item->kref, release) && kref_put(&item->kref, release) && released == 1);

    item = kzalloc(sizeof(*item), GFP_KERNEL);
    rcu_assign_pointer(shown, item);
    rcu_read_lock();
    seen = rcu_dereference(shown);
    CHECK(seen == item && seen->value == 0);
    rcu_read_unlock();
    RCU_INIT_POINTER(shown, NULL);
    call_rcu(&item->rcu, call_back);
    rcu_barrier();
    CHECK(called_back == 1);
    item = kmalloc(sizeof(*item), GFP_KERNEL);
    kfree_rcu(item, rcu);
    kvfree_rcu_mightsleep(vmalloc(100));
    synchronize_rcu();
}

static void construct(void *object) {
    constructed++;
    ((struct item *)object)->value = 77;
}

static void objects(void) {
    void *array[100];
    struct kmem_cache *cache = kmem_cache_create("items", sizeof(struct item), 0, SLAB_HWCACHE_ALIGN, construct);
    struct kmem_cache *plain = KMEM_CACHE(item, SLAB_TYPESAFE_BY_RCU);
    CHECK(kmem_cache_size(cache) == sizeof(struct item));
    CHECK(kmem_cache_alloc_bulk(cache, GFP_KERNEL, 100, array) == 100 && constructed >= 100);
    for (int at = 0; at < 100; at++)
        CHECK(((struct item *)array[at])->value == 77 && IS_ALIGNED((unsigned long)array[at], 64));
    kmem_cache_free_bulk(cache, 100, array);
    kmem_cache_shrink(cache);
    kmem_cache_destroy(cache);
    struct item *item = kmem_cache_zalloc(plain, GFP_KERNEL);
    CHECK(item->value == 0);
    kmem_cache_free(plain, item);
    mempool_t *pool = mempool_create_slab_pool(4, plain), *sized = mempool_create_kmalloc_pool(4, 1000);
    item = mempool_alloc(pool, GFP_KERNEL);
    mempool_free(item, pool);
    mempool_destroy(pool);
    void *element = mempool_alloc(sized, GFP_NOIO);
    CHECK(ksize(element) == 1024);
    mempool_free(element, sized);
    mempool_destroy(sized);
    kmem_cache_destroy(plain);

    for (size_t size = 1; size <= SZ_4M; size = size * 5 / 4 + 1) {
        char *object = kmalloc(size, GFP_KERNEL);
        CHECK(object && ksize(object) >= size && ksize(object) == kmalloc_size_roundup(size));
        CHECK(!is_power_of_2(size) || IS_ALIGNED((unsigned long)object, min(size, PAGE_SIZE)));
        memset(object, 1, size);
        kfree_sensitive(object);
    }
    CHECK(kmalloc(0, GFP_KERNEL) == ZERO_SIZE_PTR && ZERO_OR_NULL_PTR(NULL));
    CHECK(!kmalloc(SZ_8M, GFP_KERNEL | __GFP_NOWARN) && !kcalloc(SIZE_MAX / 2, 3, GFP_KERNEL | __GFP_NOWARN));
    kfree(NULL);
    kfree(ZERO_SIZE_PTR);
    char *grown = krealloc(NULL, 10, GFP_KERNEL);
    strscpy(grown, "ten", 10);
    grown = krealloc(grown, 1000, GFP_KERNEL);
    CHECK(!strcmp(grown, "ten"));
    CHECK(krealloc(grown, 0, GFP_KERNEL) == ZERO_SIZE_PTR);
    void *large = kvzalloc(SZ_16M, GFP_KERNEL), *little = kvmalloc(10, GFP_KERNEL);
    CHECK(is_vmalloc_addr(large) && !is_vmalloc_addr(little) && !memchr_inv(large, 0, SZ_16M));
    kvfree(large);
    kvfree(little);
    char *copy = kstrdup("kept", GFP_KERNEL), *cut = kstrndup("cut off", 3, GFP_KERNEL);
    char *made = kasprintf(GFP_KERNEL, "%s %d", copy, 7), *bytes = kmemdup(made, 7, GFP_KERNEL);
    CHECK(!strcmp(cut, "cut") && !strcmp(bytes, "kept 7"));
    array[0] = copy, array[1] = cut, array[2] = made, array[3] = bytes;
    kfree_bulk(4, array);
    CHECK(struct_size((struct { int n; int at[]; } *)NULL, at, SIZE_MAX) == SIZE_MAX);
}

static void memory(void) {
    char *start = __vmalloc_node(3 * PAGE_SIZE, SZ_64K, GFP_KERNEL | __GFP_ZERO, NUMA_NO_NODE, NULL);
    CHECK(IS_ALIGNED((unsigned long)start, SZ_64K) && !memchr_inv(start, 0, 3 * PAGE_SIZE));
    CHECK(vmalloc_to_page(start + PAGE_SIZE) == virt_to_page(start) + 1 && is_vmalloc_addr(start + PAGE_SIZE));
    vfree(start);
    vfree(NULL);
    struct page *pages[2] = {alloc_pages(GFP_KERNEL, 1)};
    split_page(pages[0], 1);
    pages[1] = pages[0] + 1;
    CHECK(vm_map_ram(pages, 2, NUMA_NO_NODE) == page_address(pages[0]));
    vm_unmap_ram(page_address(pages[0]), 2);
    __free_page(pages[0]);
    __free_page(pages[1]);

    unsigned int __percpu *copies = __alloc_percpu(100 * sizeof(int), 64), *two = alloc_percpu(unsigned int);
    for (unsigned int cpu = 0; cpu < nr_cpu_ids; cpu++) {
        CHECK(*per_cpu_ptr(copies + 99, cpu) == 0 && IS_ALIGNED((unsigned long)per_cpu_ptr(copies, cpu), 64));
        *per_cpu_ptr(copies + 99, cpu) = cpu;
        *per_cpu_ptr(two, cpu) = ~0U;
    }
    for (unsigned int cpu = 0; cpu < nr_cpu_ids; cpu++)
        CHECK(*per_cpu_ptr(copies + 99, cpu) == cpu);
    free_percpu(two);
    free_percpu(copies);
}

static void act(void *data) { (*(int *)data)++; }

static void device_gone(struct device *dev) { dev_info(dev, "gone\n"); }

static void devices(void) {
    static struct device dev;
    int acted = 0;
    dev_set_name(&dev, "dev%d", 1);
    CHECK(device_register(&dev) == 0 && !strcmp(dev_name(&dev), "dev1") && dev_to_node(&dev) == NUMA_NO_NODE);
    dev.release = device_gone;
    CHECK(devm_add_action(&dev, act, &acted) == 0 && devm_add_action_or_reset(&dev, act, &acted) == 0);
    devm_remove_action(&dev, act, &acted);
    CHECK(devm_kzalloc(&dev, 100, GFP_KERNEL) != NULL);
    devm_kfree(&dev, devm_kcalloc(&dev, 3, 100, GFP_KERNEL));
    dev_set_drvdata(&dev, &acted);
    CHECK(dev_get_drvdata(&dev) == &acted && get_device(&dev) == &dev);
    put_device(&dev);
    device_unregister(&dev);
    CHECK(acted == 1);
    struct device nameless = {};
    CHECK(device_register(&nameless) == -EINVAL);
}

static void numbers(void) {
    u64 large = 1000000007, wide;
    unsigned long bits[2] = {0}, ul;
    unsigned int ui;
    long l;
    int i;
    u8 byte;
    bool truth;
    char cut[4], padded[] = "  padded \n";
    struct rnd_state state;
    CHECK(do_div(large, 1000) == 7 && large == 1000000 && div_u64(10, 3) == 3 && DIV_ROUND_UP(7, 2) == 4);
    CHECK(fls(0) == 0 && fls(8) == 4 && __ffs(8) == 3 && ilog2(1025) == 10 && order_base_2(1025) == 11);
    CHECK(roundup_pow_of_two(5) == 8 && rounddown_pow_of_two(5) == 4 && round_up(13, 8) == 16 && rounddown(13, 5) == 10);
    CHECK(min(2, 3) == 2 && max_t(u8, 2, 3) == 3 && clamp(9, 1, 5) == 5 && abs(-3L) == 3 && min3(3, 1, 2) == 1);
    set_bit(70, bits);
    CHECK(test_bit(70, bits) && !test_and_set_bit(1, bits) && test_and_clear_bit(70, bits) && hweight64(bits[0]) == 1);
    CHECK(kstrtoint("-12\n", 0, &i) == 0 && i == -12 && kstrtouint("0x10", 0, &ui) == 0 && ui == 16);
    CHECK(kstrtou8("256", 0, &byte) == -ERANGE && kstrtol("1 2", 10, &l) == -EINVAL && kstrtoul("-1", 10, &ul) == -EINVAL);
    CHECK(kstrtoull("18446744073709551616", 10, (unsigned long long *)&wide) == -ERANGE && kstrtobool("on", &truth) == 0 && truth);
    CHECK(strscpy(cut, "longer") == -E2BIG && !strcmp(cut, "lon") && !strcmp(strim(padded), "padded"));
    CHECK(sysfs_streq("yes\n", "yes") && !sysfs_streq("yes", "yes, no") && scnprintf(cut, 4, "%d", 12345) == 3);
    CHECK(get_random_u32_below(7) < 7 && get_random_u32_inclusive(3, 3) == 3);
    prandom_seed_state(&state, 1);
    CHECK(prandom_u32_state(&state) != prandom_u32_state(&state));
    get_random_bytes(bits, sizeof(bits));
    ktime_t begun = ktime_get();
    cycles_t cycles = get_cycles();
    unsigned long ticks = jiffies;
    udelay(1);
    usleep_range(1, 10);
    msleep(2 * 1000 / HZ);
    CHECK(ktime_us_delta(ktime_get(), begun) >= 8000 && get_cycles() > cycles && time_after(jiffies, ticks));
    CHECK(ktime_get_real_seconds() > 0 && local_clock() > 0 && smp_processor_id() < num_possible_cpus());
    atomic64_t big = ATOMIC64_INIT(5);
    CHECK(atomic64_add_return(3, &big) == 8 && atomic64_cmpxchg(&big, 8, 1) == 8 && atomic64_dec_and_test(&big));
    CHECK(atomic64_fetch_add_unless(&big, 1, 0) == 0 && !atomic64_inc_not_zero(&big) && xchg(&ul, 3) | 1);
}

static int __init surroundings_init(void) {
    unsigned long flags;
    pr_info("number %d flag %d sizes %u: %lu %lu label %s words %s small %u\n", number, flag, n_sizes, sizes[0], sizes[1],
            label, text, small);
    preempt_disable();
    local_irq_save(flags);
    local_irq_restore(flags);
    preempt_enable();
    CHECK(!in_interrupt() && !irqs_disabled());
    threads();
    parking();
    references();
    objects();
    memory();
    devices();
    numbers();
    pr_debug("an error is %pe, an address %px\n", ERR_PTR(-ENOMEM), (void *)0x10);
    pr_info("|%9pe|%-8pe|%5px|%d%%pe\n", ERR_PTR(-ENOMEM), ERR_PTR(-EINVAL), (void *)0x10, 5);
    pr_info("a line");
    pr_cont(" that goes on\n");
    pr_warn("no end");
    pr_err_once("once\n");
    dump_stack();
    return 0;
}

static void __exit surroundings_exit(void) { pr_notice("the end"); }

module_init(surroundings_init);
module_exit(surroundings_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_AUTHOR("Pagemill");
MODULE_DESCRIPTION("A module's surroundings");
MODULE_VERSION("1");
EXPORT_SYMBOL_GPL(surroundings_init);
