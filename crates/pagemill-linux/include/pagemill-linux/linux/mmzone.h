/* The orders of Linux's blocks. Pagemill's go further, up to PAGEMILL_ORDER_MAX. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MMZONE_H
#define PAGEMILL_LINUX_MMZONE_H

#define MAX_PAGE_ORDER 10
#define NR_PAGE_ORDERS (MAX_PAGE_ORDER + 1)
/* The number of orders, until Linux 6.3. From 6.4 to 6.7 it was the highest order, and later it is gone. */
#define MAX_ORDER NR_PAGE_ORDERS
#define MAX_ORDER_NR_PAGES (1UL << MAX_PAGE_ORDER)
#define PAGE_ALLOC_COSTLY_ORDER 3

#endif
