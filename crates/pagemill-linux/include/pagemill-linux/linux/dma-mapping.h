/* Device addresses. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The allocator's memory is mapped for the device as a whole, once: mapping a page is looking its address up, and unmapping nothing. Every
 * `struct device` stands for the device of `pagemill_linux_use_device`. */
#ifndef PAGEMILL_LINUX_DMA_MAPPING_H
#define PAGEMILL_LINUX_DMA_MAPPING_H

#include <linux/device.h>
#include <linux/dma-direction.h>
#include <linux/mm.h>

#define DMA_MAPPING_ERROR (~(dma_addr_t)0)
#define DMA_BIT_MASK(n) ((n) == 64 ? ~0ULL : (1ULL << (n)) - 1)

/* What a driver says that its device reaches. It is kept, and not compared with the addresses that the device gets. */
static inline int dma_set_mask(struct device *dev, u64 mask) {
    if (!dev->dma_mask)
        return -EIO;
    *dev->dma_mask = mask;
    return 0;
}

static inline int dma_set_coherent_mask(struct device *dev, u64 mask) {
    dev->coherent_dma_mask = mask;
    return 0;
}

static inline int dma_set_mask_and_coherent(struct device *dev, u64 mask) {
    return dma_set_mask(dev, mask) ? -EIO : dma_set_coherent_mask(dev, mask);
}

#define dma_get_mask(dev) ((dev)->dma_mask && *(dev)->dma_mask ? *(dev)->dma_mask : DMA_BIT_MASK(32))

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
