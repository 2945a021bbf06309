/* The size of a page. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_ASM_PAGE_H
#define PAGEMILL_ASM_PAGE_H

#define PAGE_SHIFT 12
#define PAGE_SIZE (1UL << PAGE_SHIFT)
#define PAGE_MASK (~(PAGE_SIZE - 1))

#endif
