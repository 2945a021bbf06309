/* Devices, as far as memory for them is concerned. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_DEVICE_H
#define PAGEMILL_LINUX_DEVICE_H

#include <linux/compiler.h>
#include <linux/list.h>
#include <linux/numa.h>
#include <linux/printk.h>
#include <linux/slab.h>
#include <linux/types.h>

struct device_driver {
    const char *name;
};

struct device_dma_parameters {
    unsigned int max_segment_size;
    unsigned long segment_boundary_mask;
};

/* Zeroed, or anything that device_initialize or device_register begins. */
struct device {
    struct device *parent;
    struct device_driver *driver;
    const char *init_name;
    void *driver_data, *platform_data;
    /* The highest address that it reaches, streaming and coherent. */
    u64 *dma_mask;
    u64 coherent_dma_mask, bus_dma_limit;
    struct device_dma_parameters *dma_parms;
    const struct dma_map_ops *dma_ops;
    int numa_node;
    /* Called for the last reference. */
    void (*release)(struct device *dev);
    /* The rest is the library's. */
    int references;
    char name[64];
    struct pagemill_device_action *actions;
};

void device_initialize(struct device *dev);
/* 0, or -EINVAL for a device without a name. */
int device_add(struct device *dev);
int device_register(struct device *dev);
/* Does the actions of devm_add_action, the last one first. */
void device_del(struct device *dev);
void device_unregister(struct device *dev);
struct device *get_device(struct device *dev);
void put_device(struct device *dev);
int dev_set_name(struct device *dev, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline const char *dev_name(const struct device *dev) { return dev->init_name ? dev->init_name : dev->name; }
static inline const char *dev_driver_string(const struct device *dev) { return dev->driver ? dev->driver->name : ""; }
static inline void *dev_get_drvdata(const struct device *dev) { return dev->driver_data; }
static inline void dev_set_drvdata(struct device *dev, void *data) { dev->driver_data = data; }
static inline int dev_to_node(struct device *dev) { return dev->numa_node; }
static inline void set_dev_node(struct device *dev, int node) { dev->numa_node = node; }

/* What is done when the device goes. 0 or -ENOMEM. */
int devm_add_action(struct device *dev, void (*action)(void *data), void *data);
/* The same, or does it at once if there is no memory. */
int devm_add_action_or_reset(struct device *dev, void (*action)(void *data), void *data);
/* Forgets an action: warns if there is none. */
void devm_remove_action(struct device *dev, void (*action)(void *data), void *data);
void *devm_kmalloc(struct device *dev, size_t size, gfp_t gfp);
void devm_kfree(struct device *dev, const void *object);
static inline void *devm_kzalloc(struct device *dev, size_t size, gfp_t gfp) { return devm_kmalloc(dev, size, gfp | __GFP_ZERO); }
static inline void *devm_kcalloc(struct device *dev, size_t n, size_t size, gfp_t gfp) {
    return devm_kzalloc(dev, size_mul(n, size), gfp);
}

#define dev_printk(level, dev, format, ...) printk(level "%s: " format, dev_name(dev), ##__VA_ARGS__)
#define dev_err(dev, format, ...) dev_printk(KERN_ERR, dev, format, ##__VA_ARGS__)
#define dev_warn(dev, format, ...) dev_printk(KERN_WARNING, dev, format, ##__VA_ARGS__)
#define dev_notice(dev, format, ...) dev_printk(KERN_NOTICE, dev, format, ##__VA_ARGS__)
#define dev_info(dev, format, ...) dev_printk(KERN_INFO, dev, format, ##__VA_ARGS__)
#ifdef DEBUG
#define dev_dbg(dev, format, ...) dev_printk(KERN_DEBUG, dev, format, ##__VA_ARGS__)
#else
#define dev_dbg(dev, format, ...) no_printk("%s: " format, dev_name(dev), ##__VA_ARGS__)
#endif

#endif
