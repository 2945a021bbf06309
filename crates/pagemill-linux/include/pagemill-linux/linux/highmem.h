/* All memory is mapped. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_HIGHMEM_H
#define PAGEMILL_LINUX_HIGHMEM_H

#include <linux/mm.h>

#define kmap(page) page_address(page)
#define kunmap(page) ((void)(page))
#define kmap_local_page(page) page_address(page)
#define kunmap_local(address) ((void)(address))
#define kmap_atomic(page) page_address(page)
#define kunmap_atomic(address) ((void)(address))

#endif
