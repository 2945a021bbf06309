/* Threads, and what they wait with.
 *
 * All threads that sleep here sleep on one condition, and each wake wakes all of them: `wakes` counts the wakes, so a thread that read it,
 * then found nothing to go on with, and sleeps until it changes, misses none. Modules have few threads. */
#include "internal.h"
#include "module.h"
#include <errno.h>
#include <linux/completion.h>
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/mutex.h>
#include <linux/random.h>
#include <linux/rcupdate.h>
#include <linux/rwsem.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/wait.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>
#undef current

static u64 now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (u64)time.tv_sec * NSEC_PER_SEC + (u64)time.tv_nsec;
}

u64 ktime_get_ns(void) { return now(CLOCK_MONOTONIC); }
u64 ktime_get_real_ns(void) { return now(CLOCK_REALTIME); }
unsigned long pagemill_jiffies(void) { return ktime_get_ns() / (NSEC_PER_SEC / HZ); }

void pagemill_sleep_ns(u64 ns) {
    struct timespec time = {(time_t)(ns / NSEC_PER_SEC), (long)(ns % NSEC_PER_SEC)};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &time, &time) == EINTR) {}
}

void get_random_bytes(void *bytes, size_t size) {
    char *at = bytes;
    while (size > 0) {
        ssize_t got = getrandom(at, size, 0);
        if (got > 0) {
            at += got;
            size -= (size_t)got;
        }
    }
}

u64 get_random_u64(void) {
    static __thread u64 numbers[64];
    static __thread unsigned int left;
    if (left == 0) {
        get_random_bytes(numbers, sizeof numbers);
        left = 64;
    }
    return numbers[--left];
}

unsigned int pagemill_nr_cpus(void) {
    static unsigned int n;
    if (n == 0)
        n = (unsigned int)sysconf(_SC_NPROCESSORS_CONF);
    return n;
}

unsigned int pagemill_this_cpu(void) { return (unsigned int)sched_getcpu(); }

void pagemill_spin(spinlock_t *lock) {
    for (unsigned int turn = 1; !spin_trylock(lock); turn++)
        if (turn % 128 == 0)
            sched_yield();
}

static pthread_mutex_t sleepers_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken;
static unsigned int wakes, sleepers;

__attribute__((constructor)) static void begin(void) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&woken, &monotonic);
}

unsigned int pagemill_sleeps(void) { return __atomic_load_n(&wakes, __ATOMIC_SEQ_CST); }

unsigned long pagemill_sleep(unsigned int since, unsigned long ticks) {
    u64 begun = ktime_get_ns(), most = ticks > 1UL << 40 ? 0 : ticks * (NSEC_PER_SEC / HZ), end = begun + most;
    struct timespec until = {(time_t)(end / NSEC_PER_SEC), (long)(end % NSEC_PER_SEC)};
    bool is_over = false;
    pthread_mutex_lock(&sleepers_lock);
    __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
    while (pagemill_sleeps() == since && !is_over) {
        if (most == 0)
            pthread_cond_wait(&woken, &sleepers_lock);
        else
            is_over = pthread_cond_timedwait(&woken, &sleepers_lock, &until) == ETIMEDOUT;
    }
    __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&sleepers_lock);
    if (most == 0)
        return ticks;
    u64 slept = ktime_get_ns() - begun;
    return is_over || slept >= most ? 0 : ticks - slept / (NSEC_PER_SEC / HZ);
}

void pagemill_wake(void) {
    __atomic_fetch_add(&wakes, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST) == 0)
        return;
    pthread_mutex_lock(&sleepers_lock);
    pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&sleepers_lock);
}

int mutex_trylock(struct mutex *mutex) {
    unsigned int is_free = 0;
    return __atomic_compare_exchange_n(&mutex->state, &is_free, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

void mutex_lock(struct mutex *mutex) {
    if (mutex_trylock(mutex))
        return;
    for (;;) {
        unsigned int since = pagemill_sleeps();
        if (__atomic_exchange_n(&mutex->state, 2, __ATOMIC_SEQ_CST) == 0)
            return;
        pagemill_sleep(since, MAX_SCHEDULE_TIMEOUT);
    }
}

void mutex_unlock(struct mutex *mutex) {
    if (__atomic_exchange_n(&mutex->state, 0, __ATOMIC_SEQ_CST) == 2)
        pagemill_wake();
}

/* Guards the words of all locks for readers and writers. */
static spinlock_t rwsem_lock;

static bool try_read(struct rw_semaphore *lock) {
    spin_lock(&rwsem_lock);
    bool may = lock->readers >= 0 && lock->writers == 0;
    lock->readers += may;
    spin_unlock(&rwsem_lock);
    return may;
}

static bool try_write(struct rw_semaphore *lock, int waiting) {
    spin_lock(&rwsem_lock);
    bool may = lock->readers == 0;
    lock->readers -= may;
    lock->writers += (unsigned int)(may ? -(waiting < 0) : (waiting > 0));
    spin_unlock(&rwsem_lock);
    return may;
}

int down_read_trylock(struct rw_semaphore *lock) { return try_read(lock); }
int down_write_trylock(struct rw_semaphore *lock) { return try_write(lock, 0); }
void down_read(struct rw_semaphore *lock) { wait_event(*lock, try_read(lock)); }

void down_write(struct rw_semaphore *lock) {
    /* The first try makes the thread a writer that waits, a later one ends that. */
    if (!try_write(lock, 1))
        wait_event(*lock, try_write(lock, -1));
}

static void leave(struct rw_semaphore *lock, int by) {
    spin_lock(&rwsem_lock);
    lock->readers += by;
    spin_unlock(&rwsem_lock);
    pagemill_wake();
}

void up_read(struct rw_semaphore *lock) { leave(lock, -1); }
void up_write(struct rw_semaphore *lock) { leave(lock, 1); }

bool try_wait_for_completion(struct completion *completion) {
    unsigned int done = __atomic_load_n(&completion->done, __ATOMIC_ACQUIRE);
    while (done > 0 && done < UINT_MAX)
        if (__atomic_compare_exchange_n(&completion->done, &done, done - 1, false, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE))
            return true;
    return done == UINT_MAX;
}

bool completion_done(struct completion *completion) { return __atomic_load_n(&completion->done, __ATOMIC_ACQUIRE) > 0; }

void complete(struct completion *completion) {
    unsigned int done = __atomic_load_n(&completion->done, __ATOMIC_RELAXED);
    while (done < UINT_MAX - 1 && !__atomic_compare_exchange_n(&completion->done, &done, done + 1, false, __ATOMIC_SEQ_CST,
                                                               __ATOMIC_RELAXED)) {}
    pagemill_wake();
}

void complete_all(struct completion *completion) {
    __atomic_store_n(&completion->done, UINT_MAX, __ATOMIC_SEQ_CST);
    pagemill_wake();
}

unsigned long wait_for_completion_timeout(struct completion *completion, unsigned long ticks) {
    return wait_event_timeout(*completion, try_wait_for_completion(completion), ticks);
}

void wait_for_completion(struct completion *completion) {
    wait_for_completion_timeout(completion, MAX_SCHEDULE_TIMEOUT);
}

static __thread struct task_struct *of_this_thread;
static unsigned int n_running;

struct task_struct *pagemill_current(void) {
    if (!of_this_thread) {
        /* A thread that the module did not make: the one of its first function. */
        static __thread struct task_struct task;
        task.pid = gettid();
        pthread_getname_np(pthread_self(), task.comm, sizeof task.comm);
        of_this_thread = &task;
    }
    return of_this_thread;
}

static void *run(void *of) {
    struct task_struct *task = of;
    of_this_thread = task;
    task->pid = gettid();
    pthread_setname_np(pthread_self(), task->comm);
    wait_event(*task, __atomic_load_n(&task->is_started, __ATOMIC_SEQ_CST));
    task->result = -EINTR;
    if (!kthread_should_stop())
        task->result = task->function(task->data);
    __atomic_store_n(&task->is_done, true, __ATOMIC_SEQ_CST);
    __atomic_fetch_sub(&n_running, 1, __ATOMIC_SEQ_CST);
    pagemill_wake();
    return NULL;
}

unsigned int pagemill_linux_threads(void) { return __atomic_load_n(&n_running, __ATOMIC_SEQ_CST); }

struct task_struct *kthread_create(int (*function)(void *data), void *data, const char *name, ...) {
    struct task_struct *task = calloc(1, sizeof *task);
    if (!task)
        return ERR_PTR(-ENOMEM);
    va_list arguments;
    va_start(arguments, name);
    vsnprintf(task->comm, sizeof task->comm, name, arguments);
    va_end(arguments);
    task->function = function;
    task->data = data;
    __atomic_fetch_add(&n_running, 1, __ATOMIC_SEQ_CST);
    pthread_t thread;
    int error = pthread_create(&thread, NULL, run, task);
    if (error) {
        __atomic_fetch_sub(&n_running, 1, __ATOMIC_SEQ_CST);
        free(task);
        return ERR_PTR(-error);
    }
    task->thread = thread;
    return task;
}

void kthread_bind(struct task_struct *task, unsigned int cpu) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(cpu, &cpus);
    WARN_ON(pthread_setaffinity_np(task->thread, sizeof cpus, &cpus) != 0);
}

int wake_up_process(struct task_struct *task) {
    bool was_asleep = __atomic_exchange_n(&task->__state, TASK_RUNNING, __ATOMIC_SEQ_CST) != TASK_RUNNING;
    was_asleep |= !__atomic_exchange_n(&task->is_started, true, __ATOMIC_SEQ_CST);
    pagemill_wake();
    return was_asleep;
}

int kthread_stop(struct task_struct *task) {
    __atomic_store_n(&task->should_stop, true, __ATOMIC_SEQ_CST);
    kthread_unpark(task);
    wake_up_process(task);
    pthread_join(task->thread, NULL);
    int result = task->result;
    free(task);
    return result;
}

bool kthread_should_stop(void) { return __atomic_load_n(&pagemill_current()->should_stop, __ATOMIC_SEQ_CST); }
bool kthread_should_park(void) { return __atomic_load_n(&pagemill_current()->should_park, __ATOMIC_SEQ_CST); }

int kthread_park(struct task_struct *task) {
    __atomic_store_n(&task->should_park, true, __ATOMIC_SEQ_CST);
    wake_up_process(task);
    wait_event(*task, __atomic_load_n(&task->is_parked, __ATOMIC_SEQ_CST) || __atomic_load_n(&task->is_done, __ATOMIC_SEQ_CST));
    return task->is_parked ? 0 : -ENOSYS;
}

void kthread_unpark(struct task_struct *task) {
    __atomic_store_n(&task->should_park, false, __ATOMIC_SEQ_CST);
    pagemill_wake();
}

void kthread_parkme(void) {
    struct task_struct *task = pagemill_current();
    while (kthread_should_park()) {
        __atomic_store_n(&task->is_parked, true, __ATOMIC_SEQ_CST);
        pagemill_wake();
        wait_event(*task, !kthread_should_park());
    }
    __atomic_store_n(&task->is_parked, false, __ATOMIC_SEQ_CST);
}

long schedule_timeout(long ticks) {
    struct task_struct *task = pagemill_current();
    long left = (long)wait_event_timeout(*task, __atomic_load_n(&task->__state, __ATOMIC_SEQ_CST) == TASK_RUNNING,
                                         (unsigned long)ticks);
    __atomic_store_n(&task->__state, TASK_RUNNING, __ATOMIC_SEQ_CST);
    return left;
}

static long sleep_as(unsigned int state, long ticks) {
    __atomic_store_n(&pagemill_current()->__state, state, __ATOMIC_SEQ_CST);
    return schedule_timeout(ticks);
}

long schedule_timeout_interruptible(long ticks) { return sleep_as(TASK_INTERRUPTIBLE, ticks); }
long schedule_timeout_uninterruptible(long ticks) { return sleep_as(TASK_UNINTERRUPTIBLE, ticks); }

void schedule(void) {
    if (__atomic_load_n(&pagemill_current()->__state, __ATOMIC_SEQ_CST) == TASK_RUNNING)
        sched_yield();
    else
        schedule_timeout(MAX_SCHEDULE_TIMEOUT);
}

int cond_resched(void) { return 0; }
void yield(void) { sched_yield(); }

/* Readers of each phase. A writer changes the phase twice, and waits for the old one's readers each time: a reader that read the
 * phase before a change may count itself after it. */
static unsigned long readers[2];
static unsigned int phase;
static __thread unsigned int depth, of_phase;

void rcu_read_lock(void) {
    if (depth++ == 0) {
        of_phase = __atomic_load_n(&phase, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&readers[of_phase], 1, __ATOMIC_SEQ_CST);
    }
}

void rcu_read_unlock(void) {
    if (WARN_ONCE(depth == 0, "rcu_read_unlock without rcu_read_lock") || --depth > 0)
        return;
    __atomic_fetch_sub(&readers[of_phase], 1, __ATOMIC_SEQ_CST);
}

void synchronize_rcu(void) {
    static DEFINE_MUTEX(writers);
    if (WARN_ONCE(depth > 0, "synchronize_rcu by a reader would wait for ever"))
        return;
    mutex_lock(&writers);
    for (int turn = 0; turn < 2; turn++) {
        unsigned int old = __atomic_fetch_xor(&phase, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&readers[old], __ATOMIC_SEQ_CST) > 0)
            sched_yield();
    }
    mutex_unlock(&writers);
}

static struct rcu_head *calls, **last_call = &calls;
static spinlock_t calls_lock;

static bool is_called(void) { return __atomic_load_n(&calls, __ATOMIC_SEQ_CST) != NULL; }

static void *make_calls(void *unused) {
    for (;;) {
        wait_event(calls, is_called());
        spin_lock(&calls_lock);
        struct rcu_head *head = __atomic_exchange_n(&calls, NULL, __ATOMIC_SEQ_CST);
        last_call = &calls;
        spin_unlock(&calls_lock);
        synchronize_rcu();
        while (head) {
            struct rcu_head *next = head->next;
            /* No function is at such a low address: it is where the head lies in what is to be freed. */
            if ((unsigned long)head->func < PAGE_SIZE)
                kvfree((char *)head - (unsigned long)head->func);
            else
                head->func(head);
            head = next;
        }
    }
    return unused;
}

static void start_calls(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, make_calls, NULL) != 0)
        BUG();
    pthread_detach(thread);
}

static void enqueue(struct rcu_head *head, rcu_callback_t function) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start_calls);
    head->next = NULL;
    head->func = function;
    spin_lock(&calls_lock);
    __atomic_store_n(last_call, head, __ATOMIC_SEQ_CST);
    last_call = &head->next;
    spin_unlock(&calls_lock);
    pagemill_wake();
}

void call_rcu(struct rcu_head *head, rcu_callback_t function) { enqueue(head, function); }

struct barrier {
    struct rcu_head head;
    struct completion done;
};

static void pass(struct rcu_head *head) { complete_all(&container_of(head, struct barrier, head)->done); }

void rcu_barrier(void) {
    /* Not on this stack: the thread may still be in complete_all when this function has returned. */
    static struct barrier barrier;
    static DEFINE_MUTEX(one);
    mutex_lock(&one);
    reinit_completion(&barrier.done);
    enqueue(&barrier.head, pass);
    wait_for_completion(&barrier.done);
    mutex_unlock(&one);
}

void pagemill_kvfree_rcu(struct rcu_head *head, size_t offset) { enqueue(head, (rcu_callback_t)offset); }
void pagemill_kvfree_now(const void *object) { kvfree(object); }
