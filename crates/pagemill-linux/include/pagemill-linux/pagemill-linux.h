/* What the kernel's names stand on. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_H
#define PAGEMILL_LINUX_H

#include <pagemill.h>

/* Sets the allocator that every kernel-shaped function takes its pages from. Call it before the first of them, once. Later the
 * allocator may be added no arena to, and it may be closed only when none of these functions is called any more.
 *
 * Without this call, the first function that needs one makes an allocator of half of the system's memory, as address space.
 *
 * Errors: `PAGEMILL_ERROR_INVALID` if there is an allocator already, `PAGEMILL_ERROR_HANDLE` for one that has no arena,
 * `PAGEMILL_ERROR_SYSTEM` if the system refuses the table of `struct page`.
 *
 * Threads: any. Signal handlers: no. */
enum pagemill_error pagemill_linux_use(struct pagemill_allocator *allocator);

/* The allocator that the kernel-shaped functions use. Null if the system refuses it.
 *
 * Threads: any. Signal handlers: yes, but for a call that is the first. */
struct pagemill_allocator *pagemill_linux_allocator(void);

/* Sets the device whose addresses `dma_map_page`, `dma_pool_alloc` and page pools hand out: a device over `pagemill_linux_allocator`. Call
 * it before the first of them, once. Without it a page's device address is its address.
 *
 * Errors: `PAGEMILL_ERROR_INVALID` if there is a device already, or for null.
 *
 * Threads: any. Signal handlers: no. */
enum pagemill_error pagemill_linux_use_device(struct pagemill_device *device);

#endif
