/* Device addresses. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The allocator's memory is mapped for the device as a whole, once: mapping a page is looking its address up, and unmapping nothing. Every
 * `struct device` stands for the device of `pagemill_linux_use_device`. */
#ifndef PAGEMILL_LINUX_DMA_MAPPING_H
#define PAGEMILL_LINUX_DMA_MAPPING_H

#include <linux/dma-direction.h>
#include <linux/mm.h>

struct device;

#define DMA_MAPPING_ERROR (~(dma_addr_t)0)
#define DMA_BIT_MASK(n) ((n) == 64 ? ~0ULL : (1ULL << (n)) - 1)

/* The device address of a byte of the allocator's memory, or DMA_MAPPING_ERROR. */
dma_addr_t pagemill_linux_dma_address(const void *address);

static inline dma_addr_t dma_map_page(struct device *dev, struct page *page, size_t offset, size_t size,
                                      enum dma_data_direction direction) {
    (void)dev, (void)size, (void)direction;
    return pagemill_linux_dma_address((char *)page_address(page) + offset);
}

static inline dma_addr_t dma_map_single(struct device *dev, void *address, size_t size, enum dma_data_direction direction) {
    (void)dev, (void)size, (void)direction;
    return pagemill_linux_dma_address(address);
}

static inline int dma_mapping_error(struct device *dev, dma_addr_t address) {
    (void)dev;
    return address == DMA_MAPPING_ERROR ? -ENOMEM : 0;
}

#define dma_unmap_page(dev, address, size, direction) ((void)(address))
#define dma_unmap_single(dev, address, size, direction) ((void)(address))
#define dma_sync_single_for_cpu(dev, address, size, direction) ((void)(address))
#define dma_sync_single_for_device(dev, address, size, direction) ((void)(address))

#endif
