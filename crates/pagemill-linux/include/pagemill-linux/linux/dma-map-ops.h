/* A device's own functions for mapping: Pagemill's devices map in their own way, so these are kept and never called. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_DMA_MAP_OPS_H
#define PAGEMILL_LINUX_DMA_MAP_OPS_H

#include <linux/dma-mapping.h>

static inline void set_dma_ops(struct device *dev, const struct dma_map_ops *ops) { dev->dma_ops = ops; }
static inline const struct dma_map_ops *get_dma_ops(struct device *dev) { return dev->dma_ops; }

#endif
