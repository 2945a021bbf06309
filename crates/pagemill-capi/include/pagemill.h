// Pages in bulk, for C11 and C++17. SPDX-License-Identifier: MIT OR Apache-2.0
//
// One page is 4096 bytes. A block of order n is 2^n contiguous pages, aligned to its size. Pages come from an allocator, and go
// back by their address alone, from any thread.
//
// Functions return an error, 0 if they worked. What they say of signal handlers holds for handlers that interrupt this library
// too. No function throws. A structure that begins with `size` may get more fields later: set all of it to 0, then `size`, then what
// you need. A handle that was closed is refused, as long as its memory is not that of a newer handle. A pointer that was never a
// handle must not be passed as one.
//
// This file is generated from the crate pagemill-capi: do not edit it.


#ifndef PAGEMILL_H
#define PAGEMILL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

// Private memory, committed as it is touched.
#define PAGEMILL_MEMORY_ANONYMOUS 0

// Huge pages of 2 MiB that the administrator set aside. `pages` is a multiple of 512.
#define PAGEMILL_MEMORY_HUGE_PAGES 1

// A file in memory, which another process may map.
#define PAGEMILL_MEMORY_MEMFD 2

// A file in memory of huge pages.
#define PAGEMILL_MEMORY_MEMFD_HUGE_PAGES 3

// Memory that the caller has mapped: `pages` pages from `start`, which is aligned to 2 MiB. It stays readable and writable,
// and nothing else uses it, until the allocator is closed and every page was freed.
#define PAGEMILL_MEMORY_BROUGHT 4

// The memory is locked, which commits all of it.
#define PAGEMILL_MEMORY_LOCKED 1

// If the system refuses huge pages, or to lock the memory, ordinary memory will do.
#define PAGEMILL_MEMORY_OR_ORDINARY 2

// Only as much memory as the process's memory limit has room for.
#define PAGEMILL_MEMORY_WITHIN_LIMIT 4

// Its device addresses lie below 4 GiB: it serves `PAGEMILL_GFP_DMA32`.
#define PAGEMILL_MEMORY_DMA32 8

// Per-CPU lists: restartable sequences where they work, else the portable backend. `PAGEMILL_BACKEND` in the environment
// chooses too.
#define PAGEMILL_BACKEND_BEST 0

// Restartable sequences, or an error.
#define PAGEMILL_BACKEND_RSEQ 1

// The portable backend.
#define PAGEMILL_BACKEND_PORTABLE 2

// The system is asked for no huge pages: what a program touches is all that it commits, 4 KiB at a time.
#define PAGEMILL_NO_HUGE_PAGES 1

// A thread reclaims while a zone is below its watermarks.
#define PAGEMILL_BACKGROUND_RECLAIM 2

// Memory near the caller's CPU first. In a request: the allocator's policy.
#define PAGEMILL_POLICY_DEFAULT 0

// The lowest node of `policy_nodes` first, then the others.
#define PAGEMILL_POLICY_PREFERRED 1

// The nodes of `policy_nodes` alone.
#define PAGEMILL_POLICY_BIND 2

// The nodes of `policy_nodes` in turn.
#define PAGEMILL_POLICY_INTERLEAVE 3

// In a request: memory near the caller's CPU first, whatever the allocator's policy is.
#define PAGEMILL_POLICY_LOCAL 4

// The pages are committed before they are delivered: the first access to a page does not fault.
#define PAGEMILL_BULK_POPULATED 1

// Device addresses are the process's own: for simulated devices and for trials.
#define PAGEMILL_DEVICE_IDENTITY 0

// Physical addresses. It needs CAP_SYS_ADMIN, and locks the memory. The kernel may still move pages that are not of reserved huge pages, and
// a fork moves all: use it only where nothing does, and VFIO where there is an IOMMU.
#define PAGEMILL_DEVICE_PHYSICAL 1

// Addresses of the IOMMU of a VFIO container (type 1), `fd`, which has its groups and its IOMMU already.
#define PAGEMILL_DEVICE_VFIO 2

// Offsets in the UMEM of an AF_XDP socket, `fd`: the allocator has one arena, which becomes the UMEM.
#define PAGEMILL_DEVICE_UMEM 3

// Registered buffers of an io_uring, `fd`, which has none yet. The upper bits of a device address, from bit 30 on, are the `buf_index` of
// requests; their `addr` is the pointer. An arena has a buffer for each GiB, and no request may reach from one buffer to the next: no page
// does, nor a block of a pool.
#define PAGEMILL_DEVICE_FIXED_BUFFERS 4

// Whatever the functions `map` and `unmap` say: a GPU's addresses, for example.
#define PAGEMILL_DEVICE_FUNCTIONS 5

// Freed blocks are filled with a pattern, which is looked at when they are handed out again: the hook of `pagemill_on_misuse` is called with
// `PAGEMILL_ERROR_MISUSE` if somebody has written to one, and `misused` counts it. For finding faults: it costs time.
#define PAGEMILL_DMA_POOL_POISONED 1

// May reclaim and wait. Not in a signal handler.
#define PAGEMILL_GFP_KERNEL 112

// As `PAGEMILL_GFP_KERNEL`, but its reclaim calls no shrinker that does I/O.
#define PAGEMILL_GFP_NOIO 16

// As `PAGEMILL_GFP_KERNEL`, but its reclaim calls no shrinker that enters a file system.
#define PAGEMILL_GFP_NOFS 48

// Neither waits nor reclaims.
#define PAGEMILL_GFP_NOWAIT 0

// `PAGEMILL_GFP_NOWAIT` with access to part of the reserve.
#define PAGEMILL_GFP_ATOMIC 8

// Modifier: place among pages that can be moved.
#define PAGEMILL_GFP_MOVABLE 1

// Modifier: place among pages that reclaim can give back.
#define PAGEMILL_GFP_RECLAIMABLE 2

// Modifier: the memory comes zeroed.
#define PAGEMILL_GFP_ZERO 4

// Modifier: from memory with device addresses below 4 GiB.
#define PAGEMILL_GFP_DMA32 256

// Modifier: from this node or not at all.
#define PAGEMILL_GFP_THISNODE 512

// Modifier: one round of reclaim, then give up.
#define PAGEMILL_GFP_NORETRY 1024

// Modifier: try hard, but give up. A bulk request then tries for all its pages.
#define PAGEMILL_GFP_RETRY_MAYFAIL 2048

// Modifier: never give up. Not with `PAGEMILL_GFP_NOWAIT` and `PAGEMILL_GFP_ATOMIC`.
#define PAGEMILL_GFP_NOFAIL 4096

// Modifier: accepted, and changes nothing.
#define PAGEMILL_GFP_NOWARN 8192

// Modifier: charge the request's account, which must be named.
#define PAGEMILL_GFP_ACCOUNT 16384

// The size of a page in bytes, to which each page is aligned.
#define PAGEMILL_PAGE_SIZE 4096

// The largest order of a block: 1 GiB.
#define PAGEMILL_ORDER_MAX 18

// Nothing is read ahead.
#define PAGEMILL_PAGE_CACHE_NO_READAHEAD 1

// Each page is zeroed before it goes back to the allocator.
#define PAGEMILL_PAGE_CACHE_WIPED 2

// The file is opened for reading only.
#define PAGEMILL_FILE_READ_ONLY 1

// It goes past the system's cache (`O_DIRECT`), so that pages are cached once.
#define PAGEMILL_FILE_DIRECT 2

// It is created if it is not there.
#define PAGEMILL_FILE_CREATE 4

// Nothing is known. The numbers of advice are those of `posix_fadvise(2)`.
#define PAGEMILL_ADVICE_NORMAL 0

// The file is read at random: nothing is read ahead.
#define PAGEMILL_ADVICE_RANDOM 1

// It is read in sequence: windows are twice as large.
#define PAGEMILL_ADVICE_SEQUENTIAL 2

// These bytes will be read soon: reading them begins now.
#define PAGEMILL_ADVICE_WILLNEED 3

// These bytes will not be read soon: their pages go now if they are clean.
#define PAGEMILL_ADVICE_DONTNEED 4

// The file is read in sequence, once: pages go when they have been read, unless others use them too.
#define PAGEMILL_ADVICE_NOREUSE 5

// The pool prefers memory of the node `node`: pages of others do not stay in it.
#define PAGEMILL_PAGE_POOL_NODE 1

// The caller is the consumer: a page goes to its cache.
#define PAGEMILL_PAGE_POOL_DIRECT 1

// The shrinker only frees pages.
#define PAGEMILL_SHRINKER_FREES 0

// The shrinker does I/O: it is not called for `PAGEMILL_GFP_NOIO`.
#define PAGEMILL_SHRINKER_IO 1

// The shrinker calls into a file system: it is not called for `PAGEMILL_GFP_NOIO` and `PAGEMILL_GFP_NOFS`.
#define PAGEMILL_SHRINKER_FILESYSTEM 2

// What a call returns: 0, or what is wrong. `pagemill_strerror` has a sentence for each.
//
// The hundreds tell the kinds apart. 1xx: no memory now; try later, ask for less, or free some. 2xx: the arguments are wrong, and
// the same call would fail again. 3xx: misuse of a pointer. 4xx: an allocator or a device cannot be made or changed as asked.
// 5xx: input or output failed. A later version may add values.
//
enum pagemill_error {
  // It worked.
  PAGEMILL_ERROR_NONE = 0,
  // There are no more pages.
  PAGEMILL_ERROR_EXHAUSTED = 100,
  // Free memory is below the watermark for the request's flags.
  PAGEMILL_ERROR_BELOW_MARK = 101,
  // No node that the request names is allowed, or has memory.
  PAGEMILL_ERROR_NOT_ALLOWED = 102,
  // The request's account has no more.
  PAGEMILL_ERROR_ACCOUNT = 103,
  // A shrinker asked, with flags that reclaim.
  PAGEMILL_ERROR_RECLAIMING = 104,
  // The request was cancelled.
  PAGEMILL_ERROR_CANCELLED = 105,
  // No memory was freed before the request's timeout.
  PAGEMILL_ERROR_TIMED_OUT = 106,
  // An injected fault made the request fail.
  PAGEMILL_ERROR_FAULT = 107,
  // The system does not commit the pages.
  PAGEMILL_ERROR_UNCOMMITTED = 108,
  // A null pointer, or a `size` that no version of the structure has.
  PAGEMILL_ERROR_ARGUMENT = 200,
  // A handle that is closed, or of another type.
  PAGEMILL_ERROR_HANDLE = 201,
  // Flags that there are not, that contradict each other, or that this allocator does not support.
  PAGEMILL_ERROR_FLAGS = 202,
  // An order above 18.
  PAGEMILL_ERROR_ORDER = 203,
  // A count that is negative, above INT_MAX, or below the least number of the same request.
  PAGEMILL_ERROR_COUNT = 204,
  // A request that the allocator could not serve if all its pages were free.
  PAGEMILL_ERROR_TOO_MANY = 205,
  // The flag `PAGEMILL_GFP_ACCOUNT` without an account.
  PAGEMILL_ERROR_NO_ACCOUNT = 206,
  // Nodes, or a policy, that there are not.
  PAGEMILL_ERROR_NODE = 207,
  // A list has blocks of one order.
  PAGEMILL_ERROR_LIST_ORDER = 208,
  // A request that must have a number, in the callback form.
  PAGEMILL_ERROR_LEAST = 209,
  // The name of a counter that there is not.
  PAGEMILL_ERROR_NAME = 210,
  // A request for more elements than the pool's reserve has when it is full.
  PAGEMILL_ERROR_ABOVE_RESERVE = 211,
  // A size that a pool's reserve cannot have, or not while a request waits for more.
  PAGEMILL_ERROR_RESERVE = 212,
  // A size, an alignment or a boundary that a pool's blocks, fragments or ring cannot have.
  PAGEMILL_ERROR_SIZE = 213,
  // Another value that no request can have.
  PAGEMILL_ERROR_INVALID = 299,
  // The block is free already.
  PAGEMILL_ERROR_DOUBLE_FREE = 300,
  // Pagemill did not hand out this pointer.
  PAGEMILL_ERROR_FOREIGN = 301,
  // The block was handed out with another order.
  PAGEMILL_ERROR_WRONG_ORDER = 302,
  // The pointer is not that of a page.
  PAGEMILL_ERROR_UNALIGNED = 303,
  // The pointer lies inside a block, not at its start.
  PAGEMILL_ERROR_INSIDE = 304,
  // The page was freed twice before, and was put aside.
  PAGEMILL_ERROR_QUARANTINED = 305,
  // Another misuse.
  PAGEMILL_ERROR_MISUSE = 399,
  // The system refuses memory, a thread, a lock or a device.
  PAGEMILL_ERROR_SYSTEM = 400,
  // An arena's size, alignment, watermarks or place cannot be.
  PAGEMILL_ERROR_ARENA = 401,
  // The backend does not work here, or there is none of this name.
  PAGEMILL_ERROR_BACKEND = 402,
  // A description of faults that cannot be read.
  PAGEMILL_ERROR_FAULTS = 403,
  // Pages, or elements of a pool, are still handed out.
  PAGEMILL_ERROR_IN_USE = 404,
  // An invariant of Pagemill is broken: please report it.
  PAGEMILL_ERROR_BROKEN = 405,
  // The device, or this machine, lacks something; or the device's addresses cannot be.
  PAGEMILL_ERROR_DEVICE = 406,
  // This is a forked child, and what it asks for is its parent's.
  PAGEMILL_ERROR_FORKED = 407,
  // Reading or writing a file failed. errno has the system's number, or the one that a function of the program's returned.
  PAGEMILL_ERROR_IO = 500,
};

// A limit on pages, which requests that name it are charged to. The type is opaque.
struct pagemill_account;

// An allocator of pages. The type is opaque.
//
// Any thread may use an allocator, several at the same time. Pages keep their memory alive: a page is valid until it is freed,
// also after its allocator was released.
//
// The child of a `fork` goes on with a copy of each allocator: what was handed out stays handed out, everything else is free there.
// Memory of `PAGEMILL_MEMORY_MEMFD`, and shared memory that was brought, stays the parent's. A child that was made without the
// C library's fork handlers (`_Fork`, `vfork`, a raw system call) must call nothing of this library until it execs.
struct pagemill_allocator;

// Ends the waits of requests that name it. The type is opaque.
struct pagemill_cancel_token;

// An allocator's memory as a device sees it: each byte has a device address. The type is opaque. Any thread may use a device.
//
// Every arena of the allocator is mapped for the device as a whole, once: when the device is made, or, if the arena is added later, when an
// address in it is first looked up. Its memory does not go back to the system then.
//
// The child of a `fork` gets `PAGEMILL_ERROR_FORKED` from each call that looks up an address; what it releases stays as it is for the
// parent.
struct pagemill_device;

// A pool of blocks of one size, each with a device address. Blocks are smaller than a page, or as large as many. The type is opaque. Any
// thread may use a pool.
//
// What the pool knows of its blocks lies outside them: a device that writes to a freed block damages no list. But free a block only when the
// device is done with it, since the next owner gets the same memory.
//
// In the child of a `fork` the pool is its parent's: the child gets `PAGEMILL_ERROR_FORKED`, and statistics without blocks.
struct pagemill_dma_pool;

// A file that is open in a page cache. The type is opaque. Any thread may use it, several at the same time; one that reads on its
// own has a window of readahead of its own with `pagemill_file_reopen`.
struct pagemill_file;

// Bytes that a page cache lends. The type is opaque.
struct pagemill_lent;

// A list of blocks of one order. It owns its blocks, and no pointer to them is handed out: free them by way of the list, or take them
// off. Its links lie outside the blocks. The type is opaque. One thread at a time may use a list.
struct pagemill_list;

// A pool that keeps a reserve of elements: a request for as many as the reserve has, which may wait, always succeeds as long as other
// owners free theirs. The type is opaque. Any thread may use a pool.
//
// Code that holds elements of a pool must not wait for more of the same pool: it asks for all at once.
//
// The child of a `fork` goes on with the reserve that there was. Elements of other threads stay handed out there for ever, so it may release the
// pool, not destroy it.
struct pagemill_mempool;

// A cache of pages of files, which come from an allocator. The type is opaque. Any thread may use it.
//
// It is a shrinker of its allocator: when memory is short, clean pages go, and dirty ones are written first, unless the request has
// `PAGEMILL_GFP_NOIO` or `PAGEMILL_GFP_NOFS`.
//
// The child of a `fork` must not use it, nor its files: it may close them, which changes nothing of its parent's.
struct pagemill_page_cache;

// A pool of pages that circulate: its consumer takes pages from a cache that nobody else touches, and other threads return them by a ring.
// Pages keep their contents, their place and so their device addresses. The type is opaque.
//
// The functions for the consumer are called by one thread at a time: allocating, `PAGEMILL_PAGE_POOL_DIRECT`, statistics and the first call
// that destroys. Any thread may return pages and fragments, also after that.
//
// The child of a `fork` goes on with a copy of the pool, if no memory of the pool is shared with the parent; it must not use fragments.
struct pagemill_page_pool;

// The registration of a function that frees pages when memory is short. The type is opaque.
struct pagemill_shrinker;

// A piece of memory for an allocator to manage: an arena. Set `size` to `sizeof(struct pagemill_memory)`, `pages`, and
// whatever else is not to be 0.
struct pagemill_memory {
  // The size of this structure, in bytes.
  size_t size;
  // How much, in pages of 4096 bytes.
  size_t pages;
  // One of `PAGEMILL_MEMORY_ANONYMOUS` to `PAGEMILL_MEMORY_BROUGHT`.
  uint32_t kind;
  // Any of `PAGEMILL_MEMORY_LOCKED` to `PAGEMILL_MEMORY_DMA32`.
  uint32_t flags;
  // The first byte of memory that is brought.
  void *start;
  // The NUMA node that it is on.
  uint32_t node;
  // Free pages below which only requests with access to reserves succeed.
  uint32_t min;
  // Free pages below which background reclaim wakes.
  uint32_t low;
  // Free pages at which background reclaim stops.
  uint32_t high;
  // Pages that are kept from requests that could use another kind of zone.
  uint32_t lowmem_reserve;
  // 0.
  uint32_t reserved;
};

// What an allocator is to be like. Set `size` to `sizeof(struct pagemill_options)`, and whatever is not to be 0.
struct pagemill_options {
  // The size of this structure, in bytes.
  size_t size;
  // The arena's size, in pages of 4096 bytes, divided among the system's nodes. 0: half of the system's memory, as address
  // space, unless `memory` is set.
  size_t pages;
  // An arena besides, or null.
  const struct pagemill_memory *memory;
  // One of `PAGEMILL_BACKEND_BEST` to `PAGEMILL_BACKEND_PORTABLE`.
  uint32_t backend;
  // `PAGEMILL_NO_HUGE_PAGES` and `PAGEMILL_BACKGROUND_RECLAIM`.
  uint32_t flags;
  // One of `PAGEMILL_POLICY_DEFAULT` to `PAGEMILL_POLICY_LOCAL`: the policy of requests that name none.
  uint32_t policy;
  // 0.
  uint32_t reserved;
  // The nodes of the policy, bit n for node n.
  uint64_t policy_nodes;
  // Whole free pageblocks go back to the system after they were free for so long, in milliseconds. 0: never.
  uint64_t give_back_after_ms;
  // Faults to inject, as in `"after=100,p=0.01,gfp=atomic,seed=7"`; null: those of `PAGEMILL_FAIL` in the environment.
  const char *faults;
  // Gets the words of an error, if it is not null: up to `message_size` bytes, with the 0 at the end.
  char *message;
  // The bytes at `message`.
  size_t message_size;
};

// An arena, as `pagemill_arenas` describes it.
struct pagemill_arena {
  // Its first byte.
  void *start;
  // Its size, in pages of 4096 bytes.
  size_t pages;
  // The NUMA node that it is on.
  uint32_t node;
  // Whether it serves `PAGEMILL_GFP_DMA32`.
  uint32_t is_dma32;
};

// A bulk request. `pagemill_bulk_up_to`, `pagemill_bulk_at_least` and `pagemill_bulk_exact` make one; set the other fields as you like.
struct pagemill_bulk {
  // The size of this structure, in bytes.
  size_t size;
  // The number of blocks without which the request fails, and delivers nothing. In the array form occupied slots count. 0: it
  // delivers what it gets, and fewer than `most` are no error.
  int64_t least;
  // The number of blocks that it asks for; in the array form, of slots that it looks at.
  int64_t most;
  // Flags: `PAGEMILL_GFP_KERNEL` and so on. 0 is `PAGEMILL_GFP_NOWAIT`.
  uint32_t gfp;
  // Each block has 2^order pages.
  uint32_t order;
  // The nodes that it may take memory of, bit n for node n. 0: all.
  uint64_t nodes;
  // The nodes of the policy.
  uint64_t policy_nodes;
  // One of `PAGEMILL_POLICY_DEFAULT` to `PAGEMILL_POLICY_LOCAL`.
  uint32_t policy;
  // `PAGEMILL_BULK_POPULATED`.
  uint32_t flags;
  // How long a request that may wait does so, in nanoseconds. 0: without a limit of its own.
  uint64_t timeout_ns;
  // Ends its wait, or null.
  const struct pagemill_cancel_token *cancel;
  // Is charged for its pages, or null.
  const struct pagemill_account *account;
};

// The result of the array form, over the array's first n slots.
struct pagemill_filled {
  // Slots that this call filled.
  size_t added;
  // Slots that are occupied now.
  size_t occupied;
  // The first empty slot; n if there is none. All slots before it are occupied.
  size_t first_hole;
  // How many slots are empty.
  size_t missing;
  // Why: one of the errors 1xx, or 0 if none is empty.
  int why;
};

// The result of the list, callback and runs forms.
struct pagemill_delivered {
  // Blocks delivered by this call.
  size_t blocks;
  // How many are missing.
  size_t missing;
  // Why: one of the errors 1xx, or 0 if none is missing.
  int why;
};

// Contiguous blocks.
struct pagemill_run {
  // The first block's address.
  void *start;
  // How many blocks.
  size_t blocks;
};

// How a device gets its addresses. Set `size` to `sizeof(struct pagemill_device_options)`, `kind`, and what that kind needs; the rest is 0.
struct pagemill_device_options {
  // The size of this structure, in bytes.
  size_t size;
  // One of `PAGEMILL_DEVICE_IDENTITY` to `PAGEMILL_DEVICE_FUNCTIONS`.
  uint32_t kind;
  // The descriptor of VFIO's container, of the socket or of the io_uring. It is duplicated: close yours when you like.
  int fd;
  // VFIO: device addresses have at most so many bits. 0: as the IOMMU allows.
  uint32_t address_bits;
  // UMEM: the size of a chunk, 2048 or 4096 bytes.
  uint32_t chunk;
  // UMEM: the bytes at the beginning of a chunk that stay free.
  uint32_t headroom;
  // Registered buffers: how many the table has room for, up to 16384. 0: 1024.
  uint32_t entries;
  // Makes memory known to the device, `pages` pages of 4096 bytes from `memory` on, which is one arena. It writes the device address of
  // the first byte and returns 1, if the others follow it; or writes the address of each page, and returns `pages`. 0: the device refuses.
  //
  // It may not call this device's functions, may be called by any thread, and returns: no exception, no longjmp.
  size_t (*map)(void *memory, size_t pages, uint64_t *addresses, void *user);
  // Undoes `map`, of which it gets the `n` addresses. When it returns, the device reaches the memory no more. It is called when the device
  // and all pools over it are gone. As `map` otherwise.
  void (*unmap)(void *memory, size_t pages, const uint64_t *addresses, size_t n, void *user);
  // Whether one transfer may reach from the first device address to the last: 1 or 0. 1 for memory of up to 1 GiB that is aligned to its
  // size. May be null: it always may. As `map` otherwise.
  int (*is_one_piece)(uint64_t first, uint64_t last, void *user);
  // Passed to the functions.
  void *user;
  // Gets the words of an error, with what to do, if it is not null: up to `message_size` bytes, with the 0 at the end.
  char *message;
  // The bytes at `message`.
  size_t message_size;
};

// What a pool has.
struct pagemill_dma_pool_statistics {
  // Blocks that are handed out. Exact while no thread allocates or frees.
  size_t in_use;
  // All blocks of the pool.
  size_t blocks;
  // The bytes of a block.
  size_t block_bytes;
  // The pages that the blocks lie in.
  size_t pages;
  // Bytes of the pool's tables and lists that are in use.
  size_t metadata;
  // Blocks that were refused when they were freed. In a poisoned pool, blocks that were written to while free count too.
  uint64_t misused;
};

// A pool's size, elements and pressure. Counts are of elements.
struct pagemill_mempool_statistics {
  // The size of a full reserve.
  size_t min_nr;
  // Elements in the reserve now.
  size_t reserve;
  // The fewest in the reserve since the pool was made or resized.
  size_t low_water;
  // Elements that are handed out.
  size_t out;
  // Elements that left the reserve since the pool was made.
  uint64_t from_reserve;
  // Requests that wait now.
  size_t waiting;
  // Waits that ended.
  uint64_t waits;
  // Their total time, in microseconds.
  uint64_t waited_us;
  // The longest of them, in microseconds.
  uint64_t longest_wait_us;
  // More elements were freed than were out, or an element was not the pool's.
  uint64_t misused;
};

// A misuse, as the hook of `pagemill_on_misuse` gets it.
struct pagemill_misuse {
  // What is wrong: one of the errors 3xx.
  enum pagemill_error error;
  // The pointer that was refused.
  void *pointer;
};

// What a page cache is to be like. Set `size` to `sizeof(struct pagemill_page_cache_options)`, and whatever is not to be 0.
struct pagemill_page_cache_options {
  // The size of this structure, in bytes.
  size_t size;
  // The most pages that it has at a time, lent ones included. 0: as many as its allocator has.
  size_t limit;
  // How many of its pages may be dirty before writers write some back. 0: a fifth of the limit.
  size_t dirty_limit;
  // The largest window of readahead, in pages. 0: 1024.
  size_t window;
  // The number of threads that read and write files, started as they are needed. 0: 3.
  uint32_t threads;
  // `PAGEMILL_PAGE_CACHE_NO_READAHEAD` and `PAGEMILL_PAGE_CACHE_WIPED`.
  uint32_t flags;
  // A name for observers, or null.
  const char *name;
};

// What a page cache has counted since it was made, and what it has now.
struct pagemill_page_cache_statistics {
  // Pages that readers found in the cache.
  uint64_t hits;
  // Pages that readers did not find, and waited for, and those that writers made.
  uint64_t misses;
  // Pages that were read from a file.
  uint64_t read;
  // Those of them that no request had asked for: read ahead.
  uint64_t read_ahead;
  // Pages read ahead that were evicted before anybody asked for them.
  uint64_t ahead_unused;
  // Requests of readahead: windows that had a hole.
  uint64_t windows;
  // Those of them that a reader began by reaching the marker, without waiting.
  uint64_t windows_marked;
  // Windows that were shortened because there was no memory.
  uint64_t windows_shortened;
  // Reads of a file: one for each run of neighbouring holes.
  uint64_t reads;
  // Those of them that failed.
  uint64_t reads_failed;
  // Pages that were written to a file.
  uint64_t written;
  // Writes to a file.
  uint64_t writes;
  // Those of them that failed.
  uint64_t writes_failed;
  // Pages that were replaced by a copy, since somebody read the old one as it was written to.
  uint64_t copied;
  // Pages that were evicted.
  uint64_t evicted;
  // Calls of the allocator's reclaim, for clean pages.
  uint64_t shrinks;
  // Pages lent.
  uint64_t lent;
  // Pages that it has now, lent ones included.
  uint64_t pages;
  // Those of them that are to be written.
  uint64_t dirty;
  // Pages that it may have.
  uint64_t limit;
  // Bytes of its descriptors and of its indexes.
  uint64_t metadata;
};

// The functions of a file that a program brings, and what they get. Set `size` to `sizeof(struct pagemill_backing)`, and all others
// to 0 that there are not.
//
// Functions return a number below 0, that of the system's error, if they fail: `-EIO`, for example. `-EINTR` is tried again. Several
// threads call them at the same time, but never a read or write of bytes that another one writes. They must return: no exception, no
// longjmp. They may allocate, but use no file of the same cache. A function that writes takes pages that it needs from a pool, with
// `PAGEMILL_GFP_NOIO`.
struct pagemill_backing {
  // The size of this structure, in bytes.
  size_t size;
  // Is passed to each function.
  void *user;
  // The file's length in bytes, now.
  int64_t (*len)(void *user);
  // Reads as `preadv(2)` does: returns how many bytes, at least one unless the file ends at `at`.
  int64_t (*read)(const struct iovec *parts, size_t n, uint64_t at, void *user);
  // Writes as `pwritev(2)` does, and lengthens the file if need be. Null: the file is for reading only.
  int64_t (*write)(const struct iovec *parts, size_t n, uint64_t at, void *user);
  // Returns 0 once what was written before is durable. Null: it always is.
  int (*sync)(void *user);
  // Cuts the file, or lengthens it with zeros, and returns 0. Null: its length does not change but by writes.
  int (*set_len)(uint64_t len, void *user);
  // Is called once, on any thread, when the cache calls no other function any more; or null.
  void (*release)(void *user);
  // The most bytes that one call of `read` or `write` should have. 0: any number.
  size_t largest;
};

// What a pool is to be like. Set `size` to `sizeof(struct pagemill_page_pool_options)`, and whatever is not to be 0.
struct pagemill_page_pool_options {
  // The size of this structure, in bytes.
  size_t size;
  // Each page of the pool is a block of 2^order pages.
  uint32_t order;
  // Pages that the ring has room for, up to 32768, rounded up to a power of two. 0: 1024. What finds it full goes back to the allocator.
  uint32_t ring;
  // 0, or `PAGEMILL_PAGE_POOL_NODE`.
  uint32_t flags;
  // The node of `PAGEMILL_PAGE_POOL_NODE`.
  uint32_t node;
  // A name for observers, which is copied, or null.
  const char *name;
};

// A pool's figures, by the names that Linux gives them.
struct pagemill_page_pool_statistics {
  // Pages that came from the cache.
  uint64_t fast;
  // Requests that asked the allocator.
  uint64_t slow;
  // Those of them that were for blocks of an order above 0.
  uint64_t slow_high_order;
  // Requests that found the cache and the ring empty.
  uint64_t empty;
  // Requests that found the cache empty, and filled it from the ring.
  uint64_t refill;
  // Pages of the ring that are of another node than the pool's: they went back to the allocator.
  uint64_t waive;
  // Pages that the consumer put into its cache.
  uint64_t cached;
  // Pages that the consumer returned while its cache was full.
  uint64_t cache_full;
  // Pages that were put into the ring.
  uint64_t ring;
  // Pages that found the ring full, and went back to the allocator.
  uint64_t ring_full;
  // Pages that the consumer was done with while somebody held a fragment.
  uint64_t released_refcnt;
  // Pages that are out now: handed out, and neither returned nor released; with the one that fragments are cut from.
  size_t in_flight;
  // Whether the pool has ended: 1 or 0.
  uint32_t has_ended;
  // The seconds since its end.
  uint32_t age_s;
};

// All pages of an allocator at rest, counted by state.
struct pagemill_census {
  // All pages.
  size_t managed;
  // Free in a zone.
  size_t free;
  // On per-CPU lists and in depots.
  size_t listed;
  // Handed out.
  size_t handed_out;
  // Put aside for good, because they had two owners at once.
  size_t quarantined;
};

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Makes an allocator, by options or, if they are null, with half of the system's memory as address space. `*allocator` gets the
// handle, or null. It must be released or closed.
//
// Errors: 2xx for options that cannot be, 4xx for what the system refuses. `options->message` gets the details.
//
// Threads: any. Signal handlers: no. It may wait for locks.
enum pagemill_error pagemill_allocator_create(const struct pagemill_options *options,
                                              struct pagemill_allocator **allocator);

// The allocator of the whole process, made on the first call: half of the system's memory as address space, committed as it is
// touched. Every caller gets the same handle, which cannot be closed. Null if the system refuses even that.
//
// Threads: any. Signal handlers: no, but for a call that is not the first.
struct pagemill_allocator *pagemill_allocator_global(void);

// Lets an allocator go. Its pages stay valid; each arena is unmapped when its last page is freed.
//
// Errors: `PAGEMILL_ERROR_HANDLE` for a handle that is closed already, and for the one of `pagemill_allocator_global`.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no. It may wait for locks.
enum pagemill_error pagemill_allocator_release(struct pagemill_allocator *allocator);

// Closes an allocator of which no page is handed out, and unmaps its memory. `*pages_out`, unless the pointer is null, gets the
// number of pages that are handed out.
//
// Errors: `PAGEMILL_ERROR_IN_USE` if there are any; nothing has changed then. `PAGEMILL_ERROR_HANDLE` as for
// `pagemill_allocator_release`.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no. It may wait for locks.
enum pagemill_error pagemill_allocator_close(struct pagemill_allocator *allocator,
                                             size_t *pages_out);

// Adds an arena to an allocator.
//
// Errors: as for `pagemill_allocator_create`.
//
// Threads: any. Signal handlers: no. It may wait for locks.
enum pagemill_error pagemill_add_memory(struct pagemill_allocator *allocator,
                                        const struct pagemill_memory *memory);

// Describes the allocator's arenas, in the order in which they were added: the first `n` of them at `arenas`. Returns how many there are, or
// 0 for no open handle. An arena never moves: register it with a device once.
//
// Threads: any. Signal handlers: no. It allocates memory with malloc.
size_t pagemill_arenas(const struct pagemill_allocator *allocator,
                       struct pagemill_arena *arenas,
                       size_t n);

// Moves the pages of all CPUs' lists to the zones. Returns how many; 0 for no open handle.
//
// Threads: any. Signal handlers: no. It may wait for locks.
size_t pagemill_drain(struct pagemill_allocator *allocator);

// Gives free memory back to the system. Returns how many pages; 0 for no open handle.
//
// Threads: any. Signal handlers: no. It may wait for locks.
size_t pagemill_give_back(struct pagemill_allocator *allocator);

// Whether restartable sequences work on this system: 1 or 0.
//
// Threads: any. Signal handlers: no.
int pagemill_has_rseq(void);

// Fills the null slots among the first n of an array, in ascending order (the array form). n is `request->most`. Slots that are not
// null are occupied; what they point to is not looked at. Slots from n on are neither read nor written. Free the blocks with
// `pagemill_free_pages_bulk` or singly.
//
// `filled` may be null. If the request is refused, all its fields are 0.
//
// Errors: 1xx if the request did not get its least number, 2xx if an argument is wrong. The array is then as it was. A count that
// is negative or above INT_MAX is PAGEMILL_ERROR_COUNT, and warned of once on standard error.
//
// Threads: any; nobody else may use the array meanwhile. Signal handlers: yes for order 0, with `PAGEMILL_GFP_NOWAIT` or
// `PAGEMILL_GFP_ATOMIC` and a valid count.
enum pagemill_error pagemill_alloc_pages_bulk_array(struct pagemill_allocator *allocator,
                                                    const struct pagemill_bulk *request,
                                                    void **slots,
                                                    struct pagemill_filled *filled);

// Fills an array that is known to be empty, without reading it: as `pagemill_alloc_pages_bulk_array`, but the first n slots may hold
// anything before. Slots that get no block become null, also if the request fails.
//
// Errors, threads and signal handlers: as for `pagemill_alloc_pages_bulk_array`.
enum pagemill_error pagemill_alloc_pages_bulk_array_fresh(struct pagemill_allocator *allocator,
                                                          const struct pagemill_bulk *request,
                                                          void **slots,
                                                          struct pagemill_filled *filled);

// Adds blocks to the tail of a list, which may have some already (the list form).
//
// `delivered` may be null. If the request is refused, all its fields are 0.
//
// Errors: as for `pagemill_alloc_pages_bulk_array`; `PAGEMILL_ERROR_LIST_ORDER` if the list has blocks of another order. The list
// is then as it was.
//
// Threads: any; nobody else may use the list meanwhile. Signal handlers: as for `pagemill_alloc_pages_bulk_array`.
enum pagemill_error pagemill_alloc_pages_bulk_list(struct pagemill_allocator *allocator,
                                                   const struct pagemill_bulk *request,
                                                   struct pagemill_list *list,
                                                   struct pagemill_delivered *delivered);

// Hands each block to `each`, which owns it from then on (the callback form). `user` is passed through. The function may allocate and
// free. It must return: no exception, no longjmp.
//
// `delivered` may be null. If the request is refused, all its fields are 0.
//
// Errors: 2xx if an argument is wrong, `PAGEMILL_ERROR_LEAST` if `request->least` is not 0. `each` was then not called.
//
// Threads: any. Signal handlers: as for `pagemill_alloc_pages_bulk_array`, if `each` may be called there.
enum pagemill_error pagemill_alloc_pages_bulk_callback(struct pagemill_allocator *allocator,
                                                       const struct pagemill_bulk *request,
                                                       void (*each)(void *block, void *user),
                                                       void *user,
                                                       struct pagemill_delivered *delivered);

// Delivers contiguous runs, neighbouring blocks merged, as an I/O vector wants them (the runs form). `runs` has room for `request->most`
// runs: it may be that no two blocks are neighbours. `*n_runs` gets their number. Free them with `pagemill_free_run`, or each block on its own.
//
// `delivered` may be null. If the request is refused, all its fields are 0.
//
// Errors: as for `pagemill_alloc_pages_bulk_array`; `*n_runs` is then 0.
//
// Threads: any. Signal handlers: no. It allocates memory with malloc, and a process without any ends.
enum pagemill_error pagemill_alloc_pages_bulk_runs(struct pagemill_allocator *allocator,
                                                   const struct pagemill_bulk *request,
                                                   struct pagemill_run *runs,
                                                   size_t *n_runs,
                                                   struct pagemill_delivered *delivered);

// Frees the blocks of an array's first n slots, all of one order and of whichever allocators. Empties the slots of the blocks that
// it frees, and passes over null slots. `*freed`, unless the pointer is null, gets their number.
//
// Errors: 3xx if it refused some, the first one's: their slots are as they were, all others are freed. `PAGEMILL_ERROR_COUNT` for a number
// that is negative or above INT_MAX, `PAGEMILL_ERROR_ORDER` for an order above 18.
//
// Threads: any; nobody else may use the array meanwhile. Signal handlers: yes for order 0.
enum pagemill_error pagemill_free_pages_bulk(void **slots,
                                             int64_t n,
                                             uint32_t order,
                                             size_t *freed);

// Makes a cancel. Null is never returned.
//
// Threads: any. Signal handlers: no.
struct pagemill_cancel_token *pagemill_cancel_create(void);

// Ends the waits that are under way with it, and all later ones as they begin. Their requests deliver what they have, or fail.
//
// Errors: 2xx for no open handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_cancel(const struct pagemill_cancel_token *cancel);

// Frees a cancel that no request uses.
//
// Errors: 2xx for no open handle.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_cancel_destroy(struct pagemill_cancel_token *cancel);

// Makes an account with a limit, in pages. Null is never returned.
//
// Threads: any. Signal handlers: no.
struct pagemill_account *pagemill_account_create(size_t limit);

// How many pages are charged now; 0 for no open handle.
//
// Threads: any. Signal handlers: yes.
size_t pagemill_account_charged(const struct pagemill_account *account);

// Takes pages off the charge, but never below 0. Freeing pages does not: any thread may free, and none knows the account.
//
// Errors: 2xx for no open handle.
//
// Threads: any. Signal handlers: yes.
enum pagemill_error pagemill_account_uncharge(const struct pagemill_account *account,
                                              size_t pages);

// Frees an account that no request uses.
//
// Errors: 2xx for no open handle.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_account_destroy(struct pagemill_account *account);

// Makes a device over an allocator, and maps the allocator's arenas for it. `*device` gets the handle, or null.
//
// Errors: `PAGEMILL_ERROR_SYSTEM` if the system refuses, `PAGEMILL_ERROR_DEVICE` if this machine or the device lacks something, 2xx if an
// argument is wrong. `options->message` then has the words.
//
// Threads: any. Signal handlers: no. A device of an io_uring for a single thread is made and released on that thread.
enum pagemill_error pagemill_device_create(struct pagemill_allocator *allocator,
                                           const struct pagemill_device_options *options,
                                           struct pagemill_device **device);

// The device address of a byte in the allocator's memory: of a page, or anywhere in a block. `*address` gets it.
//
// Errors: `PAGEMILL_ERROR_FOREIGN` for a pointer outside that memory, `PAGEMILL_ERROR_FORKED`; for the first look-up in an arena that was
// added later, as for `pagemill_device_create`. 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_device_address(const struct pagemill_device *device,
                                            const void *byte,
                                            uint64_t *address);

// The device addresses of `n` bytes, as `pagemill_device_address` gives one: those of pages that were allocated in bulk, for example. Null
// pointers are passed over, and leave their slot of `addresses` as it is.
//
// Errors: as for `pagemill_device_address`, the first one's: slots before it are written.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_device_addresses(const struct pagemill_device *device,
                                              void *const *bytes,
                                              uint64_t *addresses,
                                              int64_t n);

// Shares the table of registered buffers with another io_uring, `fd`, which has none yet: it then reaches the same memory at the same device
// addresses. The library keeps it open as long as the device exists.
//
// Errors: `PAGEMILL_ERROR_SYSTEM` before Linux 6.12, or if the rings are of different users. `PAGEMILL_ERROR_INVALID` for a device of
// another kind.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_device_share(struct pagemill_device *device,
                                          int fd);

// The device's pools in the format of the kernel's `pools` file, a line for each: name, blocks that are handed out, blocks, bytes of a
// block, pages. Up to `size` bytes at `text`, with the 0 at the end. Returns the whole length, as `snprintf` does; 0 for no open handle.
//
// Threads: any. Signal handlers: no.
size_t pagemill_device_pools(const struct pagemill_device *device,
                             char *text,
                             size_t size);

// Lets a device go. Its memory is unmapped when the last pool over it is gone, too.
//
// Errors: 2xx for no open handle.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_device_release(struct pagemill_device *device);

// Makes a pool of blocks of `bytes` bytes, at least 16, rounded up to a multiple of `align`. The addresses of blocks are multiples of
// `align`, a power of two, in the process and for the device; 0: of any. No block crosses a multiple of `boundary`, a power of two; 0: there
// is none. `flags` is 0 or `PAGEMILL_DMA_POOL_POISONED`. `name` is copied. `*pool` gets the handle, or null.
//
// A block of up to 4096 bytes lies in one page. The pool has no memory at first, takes pages from the device's allocator as it needs them,
// and keeps them until it is destroyed.
//
// Errors: `PAGEMILL_ERROR_SIZE` if there can be no such blocks: also if they are larger than a page, and the device has each page elsewhere.
// 4xx if the system refuses address space, or in a forked child. 2xx if another argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_create(const char *name,
                                             struct pagemill_device *device,
                                             size_t bytes,
                                             size_t align,
                                             size_t boundary,
                                             uint32_t flags,
                                             struct pagemill_dma_pool **pool);

// Allocates one block. `*block` gets it, or null; `*address`, unless the pointer is null, gets its device address. The contents are
// unspecified unless `gfp` has `PAGEMILL_GFP_ZERO`. The other flags matter when the pool has no free block and takes another page.
//
// Errors: 1xx if the pool and its allocator have no memory, `PAGEMILL_ERROR_DEVICE` if the device does not map it, `PAGEMILL_ERROR_FORKED`.
// 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_alloc(struct pagemill_dma_pool *pool,
                                            uint32_t gfp,
                                            uint64_t *address,
                                            void **block);

// Fills all null slots among the first n of an array, in ascending order, or none. `addresses` is null or has n slots, too: a block's device
// address goes to the slot with the number of the block's. `*added`, unless the pointer is null, gets the number of blocks.
//
// Errors: as for `pagemill_dma_pool_alloc`. The slots are then as they were.
//
// Threads: any; nobody else may use the arrays meanwhile. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_alloc_bulk(struct pagemill_dma_pool *pool,
                                                 uint32_t gfp,
                                                 void **slots,
                                                 uint64_t *addresses,
                                                 int64_t n,
                                                 size_t *added);

// Frees one block, which the device must be done with.
//
// Errors: 3xx for any pointer that is not that of a block of this pool which is handed out: null, freed already, another pool's, inside a
// block. It changes nothing then. 2xx for no open handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_free(struct pagemill_dma_pool *pool,
                                           void *block);

// Frees the blocks of an array's first n slots. Empties the slots of those that it frees, and passes over null slots. `*freed`, unless the
// pointer is null, gets their number.
//
// Errors: as for `pagemill_dma_pool_free`, the first one's: those slots are as they were, all others are freed.
//
// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_free_bulk(struct pagemill_dma_pool *pool,
                                                void **slots,
                                                int64_t n,
                                                size_t *freed);

// Reads a pool's statistics.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_stats(const struct pagemill_dma_pool *pool,
                                            struct pagemill_dma_pool_statistics *stats);

// Destroys a pool of which no block is handed out, and frees its pages. `*out`, unless the pointer is null, gets the number of blocks that
// are handed out.
//
// Errors: `PAGEMILL_ERROR_IN_USE` if there are any; nothing has changed then.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_destroy(struct pagemill_dma_pool *pool,
                                              size_t *out);

// Lets a pool go. If a block of it is handed out, its pages stay for ever, mapped for the device, since that may still write to them; the
// hook of `pagemill_on_misuse` is called with `PAGEMILL_ERROR_MISUSE`. Nobody can free such a block any more.
//
// Errors: 2xx for no open handle.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_dma_pool_release(struct pagemill_dma_pool *pool);

// A sentence for an error. It lives for ever. A number that is no error has a sentence too.
//
// Threads: any. Signal handlers: yes.
const char *pagemill_strerror(int error);

// Makes an empty list. Null is never returned.
//
// Threads: any. Signal handlers: no.
struct pagemill_list *pagemill_list_create(void);

// Frees a list and all blocks on it.
//
// Errors: 2xx for no open handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_list_destroy(struct pagemill_list *list);

// The number of blocks on it; 0 for no open handle.
//
// Threads: any. Signal handlers: yes.
size_t pagemill_list_length(const struct pagemill_list *list);

// Takes the block at the head off the list. Its order is that of the request that put it there. Null if the list is empty, or for no open
// handle.
//
// Threads: any. Signal handlers: yes.
void *pagemill_list_pop(struct pagemill_list *list);

// Puts a block at the tail of a list, which owns it from then on.
//
// Errors: 3xx as for `pagemill_free_pages`, `PAGEMILL_ERROR_LIST_ORDER` if the list has blocks of another order. The block stays the
// caller's then.
//
// Threads: any. Signal handlers: yes for order 0.
enum pagemill_error pagemill_list_push(struct pagemill_list *list,
                                       void *block,
                                       uint32_t order);

// Calls `each` with each block, from the head on. `user` is passed through. The blocks stay the list's: freeing one is refused. The
// function must not use the list, which is empty meanwhile, and it must return: no exception, no longjmp.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: yes, if `each` may be called there.
enum pagemill_error pagemill_list_each(struct pagemill_list *list,
                                       void (*each)(void *block, void *user),
                                       void *user);

// Moves all blocks of `other` to the tail of `list`, in constant time.
//
// Errors: 2xx for no open handle, or twice the same, `PAGEMILL_ERROR_LIST_ORDER` if both have blocks, of different orders. Nothing has
// changed then.
//
// Threads: any. Signal handlers: yes.
enum pagemill_error pagemill_list_append(struct pagemill_list *list,
                                         struct pagemill_list *other);

// Frees all blocks on a list, in bulk. Returns how many; 0 for no open handle.
//
// Threads: any. Signal handlers: yes for order 0.
size_t pagemill_list_clear(struct pagemill_list *list);

// Makes a pool of blocks of 2^order pages, with a reserve of `min_nr` of them. `*pool` gets the handle, or null.
//
// Errors: 1xx if the allocator has too few, 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no. It may reclaim, and wait for locks.
enum pagemill_error pagemill_mempool_create_pages(struct pagemill_allocator *allocator,
                                                  uint32_t order,
                                                  size_t min_nr,
                                                  struct pagemill_mempool **pool);

// Makes a pool of elements that `alloc` makes and `free` ends, with a reserve of `min_nr` of them. `*pool` gets the handle, or null.
//
// `alloc` returns null if there is no memory now; `gfp` says what it may do, and a pool asks with `PAGEMILL_GFP_NOWAIT` first. Any thread may call
// the functions, several at the same time; `user` is passed through. They must return: no exception, no longjmp.
//
// Errors: 1xx if `alloc` makes too few, 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_mempool_create(void *(*alloc)(uint32_t gfp, void *user),
                                            void (*free)(void *element, void *user),
                                            void *user,
                                            size_t min_nr,
                                            struct pagemill_mempool **pool);

// Allocates one element. `*element` gets it, or null.
//
// Errors: 1xx if neither the source nor the reserve has one and `gfp` does not wait.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_mempool_alloc(struct pagemill_mempool *pool, uint32_t gfp, void **element);

// Hands `request->most` elements to `each`, which owns them from then on. `user` is passed through. The function must return: no exception, no
// longjmp. The request's `least` and `order` do not matter. `*delivered`, unless the pointer is null, gets the number of elements.
//
// Errors: 1xx if the request may not wait, or not any longer: what was handed over until then stays with its owner. 2xx if an argument is wrong;
// a request above the reserve is `PAGEMILL_ERROR_ABOVE_RESERVE`.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_mempool_alloc_bulk_callback(struct pagemill_mempool *pool,
                                                         const struct pagemill_bulk *request,
                                                         void (*each)(void *element, void *user),
                                                         void *user,
                                                         size_t *delivered);

// Fills the null slots among the first n of an array, in ascending order. n is `request->most`; its `least` and `order` do not matter.
// `*added`, unless the pointer is null, gets the number of slots that it filled.
//
// Errors: as for `pagemill_mempool_alloc_bulk_callback`; what was delivered stays in its slots.
//
// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
enum pagemill_error pagemill_mempool_alloc_bulk_array(struct pagemill_mempool *pool,
                                                      const struct pagemill_bulk *request,
                                                      void **slots,
                                                      size_t *added);

// Frees one element: to the reserve if it is not full, else to the source.
//
// Errors: for a pool of blocks 3xx as for `pagemill_free_pages`; nothing has changed then. Elements of functions are not checked. 2xx if an
// argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_mempool_free(struct pagemill_mempool *pool,
                                          void *element);

// Frees the elements of an array's first n slots, in one section. Empties the slots of those that it frees, and passes over null slots. `*freed`,
// unless the pointer is null, gets their number.
//
// Errors: as for `pagemill_mempool_free`, the first one's: those slots are as they were, all others are freed.
//
// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
enum pagemill_error pagemill_mempool_free_bulk(struct pagemill_mempool *pool,
                                               void **slots,
                                               int64_t n,
                                               size_t *freed);

// Changes the size of the reserve.
//
// Errors: 1xx if the source cannot make enough, 2xx if `min_nr` is 0 or below the size of a request that waits. The size is then as it was.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_mempool_resize(struct pagemill_mempool *pool,
                                            size_t min_nr);

// Reads a pool's statistics.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_mempool_stats(const struct pagemill_mempool *pool,
                                           struct pagemill_mempool_statistics *stats);

// Destroys a pool of which no element is handed out, and frees its reserve. `*out`, unless the pointer is null, gets the number of elements that
// are handed out.
//
// Errors: `PAGEMILL_ERROR_IN_USE` if there are any; nothing has changed then.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_mempool_destroy(struct pagemill_mempool *pool,
                                             size_t *out);

// Lets a pool go, and frees its reserve. Blocks that are handed out stay valid: `pagemill_free_pages` frees them.
//
// Errors: 2xx for no open handle.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_mempool_release(struct pagemill_mempool *pool);

// Allocates one page. Null if there is none, or if an argument is wrong: `pagemill_alloc_pages` with order 0 says which.
//
// The contents are unspecified unless `gfp` has `PAGEMILL_GFP_ZERO`.
//
// Threads: any. Signal handlers: yes, with `PAGEMILL_GFP_NOWAIT` or `PAGEMILL_GFP_ATOMIC`. errno stays as it is.
void *pagemill_alloc_page(struct pagemill_allocator *allocator,
                          uint32_t gfp);

// Frees one page, of whichever allocator.
//
// Errors: 3xx for any pointer that is not that of a page which is handed out: null, freed already, never handed out, inside a
// block, on a list. It changes nothing then. A pointer to a page that was handed out again since is not told from the new owner's.
//
// Threads: any, also not the one that allocated it. Signal handlers: yes. errno stays as it is.
enum pagemill_error pagemill_free_page(void *page);

// Allocates a block of 2^order pages, aligned to its size. `*block` gets its address, or null.
//
// Errors: 1xx if there is none, 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: yes for order 0, with `PAGEMILL_GFP_NOWAIT` or `PAGEMILL_GFP_ATOMIC`.
enum pagemill_error pagemill_alloc_pages(struct pagemill_allocator *allocator,
                                         uint32_t gfp,
                                         uint32_t order,
                                         void **block);

// Frees a block of 2^order pages.
//
// Errors: as for `pagemill_free_page`, and `PAGEMILL_ERROR_WRONG_ORDER`. `PAGEMILL_ERROR_ORDER` for an order above 18.
//
// Threads: any. Signal handlers: yes for order 0.
enum pagemill_error pagemill_free_pages(void *block,
                                        uint32_t order);

// Turns a block of 2^order pages into pages, each of which is freed on its own.
//
// Errors: as for `pagemill_free_pages`.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_split(void *block, uint32_t order);

// Allocates `pages` contiguous pages, any number of them. `*run` gets the first one's address, or null. Free them with
// `pagemill_free_run`, or each as a page.
//
// Errors: as for `pagemill_alloc_pages`.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_alloc_contig(struct pagemill_allocator *allocator,
                                          uint32_t gfp,
                                          size_t pages,
                                          void **run);

// Frees contiguous blocks of 2^order pages each, as `pagemill_alloc_contig` (order 0) and the runs form deliver them. `*freed`,
// unless the pointer is null, gets the number of blocks that were freed.
//
// Errors: 3xx if some of them are not handed out, the first one's. The others are freed, up to 64 in a row that are not: a number
// of blocks that is wrong is not tried to its end.
//
// Threads: any. Signal handlers: yes for order 0.
enum pagemill_error pagemill_free_run(void *run,
                                      size_t blocks,
                                      uint32_t order,
                                      size_t *freed);

// Sets a function that is called at each detected misuse, besides the error of the call that found it; null for none. It may run
// in the middle of a request and in a signal handler, so it must do only what a signal handler may.
//
// Threads: any. Signal handlers: yes.
void pagemill_on_misuse(void (*hook)(const struct pagemill_misuse *report));

// Makes a page cache whose pages come from `allocator`; `options` may be null. `*cache` gets the handle, or null.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_cache_create(struct pagemill_allocator *allocator,
                                               const struct pagemill_page_cache_options *options,
                                               struct pagemill_page_cache **cache);

// Lets a page cache go. It ends with the last of its files and of what it lends.
//
// Errors: 2xx for no open handle.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_page_cache_close(struct pagemill_page_cache *cache);

// Changes the limit of a page cache; the one that it was made with is the largest. Pages above it are evicted now, as far as they
// can be.
//
// Errors: 2xx for no open handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_cache_set_limit(struct pagemill_page_cache *cache,
                                                  size_t pages);

// Evicts up to so many clean pages, those first that were used least. Returns how many; 0 for no open handle.
//
// Threads: any. Signal handlers: no.
size_t pagemill_page_cache_evict(struct pagemill_page_cache *cache, size_t pages);

// Writes up to so many dirty pages, of any file, without making them durable. Returns how many; 0 for no open handle.
//
// Threads: any. Signal handlers: no.
size_t pagemill_page_cache_write_back(struct pagemill_page_cache *cache,
                                      size_t pages);

// Reads a page cache's statistics.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_cache_stats(const struct pagemill_page_cache *cache,
                                              struct pagemill_page_cache_statistics *stats);

// Opens a regular file or a block device by its path. `flags` are any of `PAGEMILL_FILE_READ_ONLY` to `PAGEMILL_FILE_CREATE`.
// `*file` gets the handle, or null. One file is opened once; further openers of it are made by `pagemill_file_reopen`.
//
// Errors: 2xx if an argument is wrong, or the path is not that of such a file; `PAGEMILL_ERROR_IO` with the system's errno,
// EOPNOTSUPP if the file system has no `O_DIRECT`.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_cache_open_path(struct pagemill_page_cache *cache,
                                                  const char *path,
                                                  uint32_t flags,
                                                  struct pagemill_file **file);

// Opens the regular file or block device behind a descriptor, for reading only if the descriptor is. The descriptor stays the
// caller's, who may close it. `*file` gets the handle, or null. One file is opened once; further openers of it are made by
// `pagemill_file_reopen`.
//
// Errors: 2xx if an argument is wrong, or the descriptor is not one of such a file, or open with `O_WRONLY`, `O_APPEND` or
// `O_DIRECT`; `PAGEMILL_ERROR_IO` with the system's errno.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_cache_open(struct pagemill_page_cache *cache,
                                             int descriptor,
                                             struct pagemill_file **file);

// Opens a file of the program's own functions. `*file` gets the handle, or null.
//
// Errors: 2xx if an argument is wrong: `backing->release` is not called then. `PAGEMILL_ERROR_IO` with the errno of `backing->len`:
// `backing->release` was called then.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_cache_open_backing(struct pagemill_page_cache *cache,
                                                     const struct pagemill_backing *backing,
                                                     struct pagemill_file **file);

// Makes another opener of the same file, with a window of readahead of its own. `*opened` gets the handle, or null.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_reopen(const struct pagemill_file *file,
                                         struct pagemill_file **opened);

// Ends an opener. The last one writes what is dirty, without making it durable.
//
// Errors: `PAGEMILL_ERROR_IO` with the errno of a write that this opener was not told of; with EIO if it was the last opener, and
// pages that could not be written are lost. The handle is closed all the same. 2xx for no open handle.
//
// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_file_close(struct pagemill_file *file);

// Reads up to `n` bytes from `at` on. `*read`, unless the pointer is null, gets how many: fewer than `n` if the file ends there, or
// if a later page cannot be read; 0 at the file's end.
//
// Errors: `PAGEMILL_ERROR_IO` with the errno of the read, if the first page cannot be read; 1xx if there is no memory for it; 2xx if
// an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_read_at(const struct pagemill_file *file,
                                          void *into,
                                          size_t n,
                                          uint64_t at,
                                          size_t *read);

// Writes `n` bytes at `at`, into the cache; `pagemill_file_sync` makes them durable. The file is lengthened if need be. `*written`,
// unless the pointer is null, gets how many: all, unless memory ends meanwhile.
//
// Errors: 1xx if there is no memory for the first page; `PAGEMILL_ERROR_IO` with an errno if a page cannot be read whose other bytes
// are to stay, or if the file refuses dirty pages and the cache has as many as it likes; 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_write_at(const struct pagemill_file *file,
                                           const void *from,
                                           size_t n,
                                           uint64_t at,
                                           size_t *written);

// Writes `n` bytes at the end of the file, in one piece: other calls of this come before or after. `*at`, unless the pointer is
// null, gets where they are.
//
// Errors: as for `pagemill_file_write_at`. Some of the bytes may be there.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_append(const struct pagemill_file *file,
                                         const void *from,
                                         size_t n,
                                         uint64_t *at);

// Writes the first `n` bytes of these pages at `at`, where a page begins. The pages move into the cache, and no byte is copied;
// slots of pages that have moved become null. A page that is still there is the caller's: it was not reached, or its bytes were
// copied, as those of another allocator's pages are. Behind the bytes of a last page that is not full, the contents of the page
// change if it stays. `*written`, unless the pointer is null, gets how many bytes were written.
//
// Errors: as for `pagemill_file_write_at`; 3xx if a slot is not null and not a page that is handed out: nothing has changed then.
// `PAGEMILL_ERROR_INVALID` if `at` is inside of a page, or a slot is null. After an error, all pages are the caller's.
//
// Threads: any; nobody else may use the array meanwhile. Signal handlers: no.
enum pagemill_error pagemill_file_write_pages(const struct pagemill_file *file,
                                              void **pages,
                                              size_t n,
                                              uint64_t at,
                                              size_t *written);

// The file's length in bytes; 0 for no open handle.
//
// Threads: any. Signal handlers: no.
uint64_t pagemill_file_len(const struct pagemill_file *file);

// Cuts the file, or lengthens it with zeros: here and behind the cache.
//
// Errors: `PAGEMILL_ERROR_IO` with the errno of the file, 1xx if there is no memory; nothing has changed then. 2xx for no open
// handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_set_len(const struct pagemill_file *file,
                                          uint64_t len);

// Takes the length from the file, where others than this cache change it. `*len`, unless the pointer is null, gets it. Pages that
// are cached stay as they are, but for those behind the end: see `pagemill_file_invalidate`.
//
// Errors: as for `pagemill_file_set_len`.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_refresh(const struct pagemill_file *file,
                                          uint64_t *len);

// Writes what is dirty, and makes durable what was written before the call.
//
// Errors: `PAGEMILL_ERROR_IO` with the errno of any write since this opener was told of one; each opener is told once. Pages that
// could not be written stay dirty, and a later call tries again. 2xx for no open handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_sync(const struct pagemill_file *file);

// Begins to write the dirty pages of `n` bytes from `at` on, and returns how many; 0 for no open handle. `pagemill_file_sync` is
// told of errors.
//
// Threads: any. Signal handlers: no.
size_t pagemill_file_write_back(const struct pagemill_file *file,
                                uint64_t at,
                                uint64_t n);

// Says how the file will be used. `PAGEMILL_ADVICE_WILLNEED` and `PAGEMILL_ADVICE_DONTNEED` are about `n` bytes from `at` on; the
// others are about this opener.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_advise(const struct pagemill_file *file,
                                         uint32_t advice,
                                         uint64_t at,
                                         uint64_t n);

// Lets the pages of `n` bytes from `at` on go, so that they are read again: others than this cache have written to the file.
// `*stay`, unless the pointer is null, gets how many stay, because they are dirty or on their way.
//
// Errors: 2xx for no open handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_invalidate(const struct pagemill_file *file,
                                             uint64_t at,
                                             uint64_t n,
                                             size_t *stay);

// The first page at or after `page` that is in the cache, among the next `max` pages; `page + max` if none is, or UINT64_MAX where
// that would be beyond. Pages are counted from 0, and a run of holes is skipped without a look at each. UINT64_MAX for no open
// handle.
//
// Threads: any. Signal handlers: no.
uint64_t pagemill_file_next_present(const struct pagemill_file *file,
                                    uint64_t page,
                                    uint64_t max);

// The last page at or before `page` that is in the cache, among `max` pages; `page - max` if none is, or 0 where that would be
// below. UINT64_MAX for no open handle.
//
// Threads: any. Signal handlers: no.
uint64_t pagemill_file_prev_present(const struct pagemill_file *file,
                                    uint64_t page,
                                    uint64_t max);

// Lends `n` bytes from `at` on without a copy, up to the file's end. `*lent` gets the handle, or null. The bytes do not change, and
// their pages stay, until they are given back, also if the file is closed or cut. They count towards the cache's limit.
//
// Errors: as for `pagemill_file_read_at`, for any of the pages.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_file_lend(const struct pagemill_file *file,
                                       uint64_t at,
                                       size_t n,
                                       struct pagemill_lent **lent);

// The number of bytes lent: fewer than were asked for if the file ends there. 0 for no open handle.
//
// Threads: any. Signal handlers: no.
size_t pagemill_lent_len(const struct pagemill_lent *lent);

// Describes the bytes lent as an I/O vector, page by page: the first `n` parts at `parts`. Returns how many there are, or 0 for no
// open handle. Nobody may write to the bytes.
//
// Threads: any. Signal handlers: no.
size_t pagemill_lent_parts(const struct pagemill_lent *lent,
                           struct iovec *parts,
                           size_t n);

// Gives back what a page cache has lent.
//
// Errors: 2xx for no open handle.
//
// Threads: any, and no thread may use the handle or the bytes meanwhile or later. Signal handlers: no.
enum pagemill_error pagemill_lent_give_back(struct pagemill_lent *lent);

// Makes a pool of the allocator's pages. `options` may be null: single pages, a ring of 1024. `*pool` gets the handle, or null. The pool has
// no pages at first.
//
// Errors: `PAGEMILL_ERROR_SIZE` for a ring above 32768, 2xx if another argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_pool_create(struct pagemill_allocator *allocator,
                                              const struct pagemill_page_pool_options *options,
                                              struct pagemill_page_pool **pool);

// Takes a page. `*page` gets it, or null. Its contents are what its last owner left, unless `gfp` has `PAGEMILL_GFP_ZERO`.
//
// It comes from the cache. An empty cache is filled with up to 64 pages from the ring, else with up to 64 of the allocator in one request.
// What the flags say of reclaim and waiting holds for that request; it never tries for all 64.
//
// A page of a pool goes back by `pagemill_page_pool_put`, or leaves the pool by `pagemill_page_pool_release_page`: the functions for
// ordinary pages refuse it.
//
// Errors: 1xx if cache, ring and allocator have none; 2xx if an argument is wrong, or the pool has ended.
//
// Threads: the consumer. Signal handlers: no.
enum pagemill_error pagemill_page_pool_alloc(struct pagemill_page_pool *pool,
                                             uint32_t gfp,
                                             void **page);

// Fills the null slots among the first n of an array, in ascending order, as many as it can. `*added`, unless the pointer is null, gets
// their number.
//
// Errors: as for `pagemill_page_pool_alloc`, if it filled none of them.
//
// Threads: the consumer; nobody else may use the array meanwhile. Signal handlers: no.
enum pagemill_error pagemill_page_pool_alloc_bulk(struct pagemill_page_pool *pool,
                                                  uint32_t gfp,
                                                  void **slots,
                                                  int64_t n,
                                                  size_t *added);

// Returns one page to its pool: to the ring; with `PAGEMILL_PAGE_POOL_DIRECT` to the consumer's cache. Where there is no room, and when the
// pool has ended, it goes back to the allocator. A device must be done with it.
//
// Errors: 3xx for any pointer that is not that of a page of this pool which is out: null, returned already, another pool's, an ordinary
// page, a fragment. It changes nothing then. 2xx if another argument is wrong.
//
// Threads: any; with `PAGEMILL_PAGE_POOL_DIRECT` the consumer. Signal handlers: no.
enum pagemill_error pagemill_page_pool_put(struct pagemill_page_pool *pool,
                                           void *page,
                                           uint32_t flags);

// Returns the pages of an array's first n slots, up to 64 in one section of the ring. Empties the slots of those that it takes, and passes
// over null slots. `*count`, unless the pointer is null, gets their number.
//
// Errors: as for `pagemill_page_pool_put`, the first one's: those slots are as they were, all others are taken.
//
// Threads: as for `pagemill_page_pool_put`; nobody else may use the array meanwhile. Signal handlers: no.
enum pagemill_error pagemill_page_pool_put_bulk(struct pagemill_page_pool *pool,
                                                void **slots,
                                                int64_t n,
                                                uint32_t flags,
                                                size_t *count);

// Takes a page out of its pool for good: from then on it is an ordinary block of the pool's order, which `pagemill_free_pages` frees.
//
// Errors: as for `pagemill_page_pool_put`.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_page_pool_release_page(struct pagemill_page_pool *pool,
                                                    void *page);

// Takes a part of a page: `bytes` bytes that begin at a multiple of 64, with an owner of its own. `*fragment` gets it, or null. The page
// goes back with the last of its fragments. Fragments are cut one after the other, and a new page is begun when the rest of the last one is
// too short.
//
// Errors: `PAGEMILL_ERROR_SIZE` for 0 bytes, or more than a page of the pool has; as for `pagemill_page_pool_alloc` otherwise.
//
// Threads: the consumer. Signal handlers: no. It takes a lock.
enum pagemill_error pagemill_page_pool_alloc_fragment(struct pagemill_page_pool *pool,
                                                      uint32_t gfp,
                                                      size_t bytes,
                                                      void **fragment);

// Returns a fragment.
//
// Errors: 3xx for any pointer that is not that of a fragment of this pool which is out; it changes nothing then. 2xx for no open handle.
//
// Threads: any. Signal handlers: no. It takes a lock.
enum pagemill_error pagemill_page_pool_put_fragment(struct pagemill_page_pool *pool,
                                                    void *fragment);

// Reads a pool's figures.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: the consumer; any when the pool has ended. Signal handlers: no.
enum pagemill_error pagemill_page_pool_stats(struct pagemill_page_pool *pool,
                                             struct pagemill_page_pool_statistics *stats);

// Ends a pool: pages that are in it go back to the allocator, and so does each that comes back later. When none is out the handle is closed.
// `*out`, unless the pointer is null, gets the number of pages that are out.
//
// Errors: `PAGEMILL_ERROR_IN_USE` if there are any. The pool has ended then, and the handle stays open, for those who return them; call
// again to close it when all are back.
//
// Threads: the consumer; any when the pool has ended, one at a time. No thread may use the handle after the call that closes it. Signal
// handlers: no.
enum pagemill_error pagemill_page_pool_destroy(struct pagemill_page_pool *pool,
                                               size_t *out);

// Registers a function that is called when the allocator's memory is short. It frees about `pages` pages and returns how many it freed. `gfp` are
// the flags of the request that found no memory; `user` is passed through. `does` is one of `PAGEMILL_SHRINKER_FREES` to
// `PAGEMILL_SHRINKER_FILESYSTEM`. `*shrinker` gets the handle, or null.
//
// The function is called on the thread of that request, in the middle of it, on the thread of background reclaim, or in a forked child. So no
// thread may hold a lock that it waits for while it allocates with flags that reclaim: try the lock. It may free, and allocate with
// `PAGEMILL_GFP_NOWAIT` or `PAGEMILL_GFP_ATOMIC`. It must return: no exception, no longjmp.
//
// Errors: 2xx if an argument is wrong.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_shrinker_register(struct pagemill_allocator *allocator,
                                               size_t (*shrink)(size_t pages, uint32_t gfp, void *user),
                                               void *user,
                                               uint32_t does,
                                               struct pagemill_shrinker **shrinker);

// Ends a registration. It does not wait for a call that is under way: free what `user` leads to only when none can be.
//
// Errors: 2xx for no open handle.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_shrinker_unregister(struct pagemill_shrinker *shrinker);

// Does what background reclaim does, for programs that prefer to call it themselves: reclaims until every zone is above its high mark, or no more is
// freed. Returns the number of pages that shrinkers freed; 0 for no open handle.
//
// Threads: any. Signal handlers: no.
size_t pagemill_reclaim_step(struct pagemill_allocator *allocator);

// Reads a counter by its name: `free`, `allocated`, `freed`, `misused` and so on. Sums over CPUs are exact at rest, and close while other
// threads work.
//
// Errors: `PAGEMILL_ERROR_NAME` if there is no such counter.
//
// Threads: any; it takes no lock. Signal handlers: no.
enum pagemill_error pagemill_stat(const struct pagemill_allocator *allocator,
                                  const char *name,
                                  uint64_t *value);

// The name of counter `at`, counted from 0: up to `size` bytes of it at `name`, with the 0 at the end. Returns the name's length, as
// `snprintf` does, and 0 beyond the last counter. A later version may have more counters, in another order.
//
// Threads: any. Signal handlers: yes.
size_t pagemill_stat_name(size_t at,
                          char *name,
                          size_t size);

// The counters in the format of `/proc/vmstat`: up to `size` bytes at `text`, with the 0 at the end. Returns the whole length, as
// `snprintf` does; 0 for no open handle.
//
// Threads: any. Signal handlers: no.
size_t pagemill_vmstat(const struct pagemill_allocator *allocator,
                       char *text,
                       size_t size);

// Walks every page of an allocator that nobody uses meanwhile, and checks that each is in exactly one place.
//
// Errors: `PAGEMILL_ERROR_BROKEN` if one is not; while other threads allocate or free, this proves nothing.
//
// Threads: any. Signal handlers: no.
enum pagemill_error pagemill_validate(const struct pagemill_allocator *allocator,
                                      struct pagemill_census *census);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PAGEMILL_H */

#ifndef PAGEMILL_H_REQUESTS
#define PAGEMILL_H_REQUESTS

#ifdef __cplusplus
extern "C" {
#endif

/* A request for up to n pages, which fails and delivers nothing if it gets fewer than k. Set its other fields as you like. */
static inline struct pagemill_bulk pagemill_bulk_at_least(int64_t k, int64_t n, uint32_t gfp) {
    struct pagemill_bulk request = {sizeof(struct pagemill_bulk), k, n, gfp, 0, 0, 0, 0, 0, 0, NULL, NULL};
    return request;
}

/* A request for up to n pages; fewer are no error. */
static inline struct pagemill_bulk pagemill_bulk_up_to(int64_t n, uint32_t gfp) {
    return pagemill_bulk_at_least(0, n, gfp);
}

/* A request for n pages, or none. */
static inline struct pagemill_bulk pagemill_bulk_exact(int64_t n, uint32_t gfp) {
    return pagemill_bulk_at_least(n, n, gfp);
}

#ifdef __cplusplus
}
#endif

#endif
