/* Devices: references, names, and what is done when one goes. */
#include "internal.h"
#include <linux/device.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <linux/spinlock.h>

struct pagemill_device_action {
    struct pagemill_device_action *next;
    void (*action)(void *data);
    void *data;
};

static DEFINE_SPINLOCK(lock);

void device_initialize(struct device *dev) {
    dev->references = 1;
    dev->numa_node = NUMA_NO_NODE;
    dev->actions = NULL;
}

int device_add(struct device *dev) { return *dev_name(dev) ? 0 : -EINVAL; }

int device_register(struct device *dev) {
    device_initialize(dev);
    return device_add(dev);
}

/* Takes the last action, or the last one that is this, off the device. */
static struct pagemill_device_action *take(struct device *dev, void (*action)(void *), void *data) {
    spin_lock(&lock);
    struct pagemill_device_action **at = &dev->actions;
    while (action && *at && ((*at)->action != action || (*at)->data != data))
        at = &(*at)->next;
    struct pagemill_device_action *taken = *at;
    if (taken)
        *at = taken->next;
    spin_unlock(&lock);
    return taken;
}

void device_del(struct device *dev) {
    struct pagemill_device_action *last;
    while ((last = take(dev, NULL, NULL))) {
        last->action(last->data);
        free(last);
    }
}

void device_unregister(struct device *dev) {
    device_del(dev);
    put_device(dev);
}

struct device *get_device(struct device *dev) {
    if (dev)
        WARN_ON(__atomic_fetch_add(&dev->references, 1, __ATOMIC_RELAXED) <= 0);
    return dev;
}

void put_device(struct device *dev) {
    if (!dev)
        return;
    int left = __atomic_sub_fetch(&dev->references, 1, __ATOMIC_ACQ_REL);
    WARN(left < 0, "more references to the device %s are put than there are", dev_name(dev));
    if (left != 0)
        return;
    device_del(dev);
    if (dev->release)
        dev->release(dev);
}

int dev_set_name(struct device *dev, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(dev->name, sizeof dev->name, format, arguments);
    va_end(arguments);
    return 0;
}

int devm_add_action(struct device *dev, void (*action)(void *data), void *data) {
    struct pagemill_device_action *added = malloc(sizeof *added);
    if (!added)
        return -ENOMEM;
    *added = (struct pagemill_device_action){NULL, action, data};
    spin_lock(&lock);
    added->next = dev->actions;
    dev->actions = added;
    spin_unlock(&lock);
    return 0;
}

int devm_add_action_or_reset(struct device *dev, void (*action)(void *data), void *data) {
    int error = devm_add_action(dev, action, data);
    if (error)
        action(data);
    return error;
}

void devm_remove_action(struct device *dev, void (*action)(void *data), void *data) {
    struct pagemill_device_action *taken = take(dev, action, data);
    WARN(!taken, "the device %s has no such action", dev_name(dev));
    free(taken);
}

static void free_object(void *object) { kfree(object); }

void *devm_kmalloc(struct device *dev, size_t size, gfp_t gfp) {
    void *object = kmalloc(size, gfp);
    if (object && devm_add_action(dev, free_object, object)) {
        kfree(object);
        object = NULL;
    }
    return object;
}

void devm_kfree(struct device *dev, const void *object) {
    struct pagemill_device_action *taken = take(dev, free_object, (void *)object);
    if (WARN(!taken, "devm_kfree of %p, which is not of the device %s", object, dev_name(dev)))
        return;
    free(taken);
    kfree(object);
}
