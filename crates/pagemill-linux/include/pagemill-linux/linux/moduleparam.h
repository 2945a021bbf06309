/* A module's parameters: `pagemill-kmod FILE.c name=value` sets them. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MODULEPARAM_H
#define PAGEMILL_LINUX_MODULEPARAM_H

#include <linux/types.h>

struct pagemill_module_param {
    const char *name;
    const char *type;       /* As the module wrote it: int, uint, bool, charp and so on; string for an array of characters. */
    void *value;
    size_t size;            /* Of one element; of a string, with its end. */
    unsigned int most;      /* Elements that there is room for. */
    unsigned int *count;    /* Gets the number of elements, or null. */
};

struct pagemill_module_text {
    const char *name;
    const char *text;
};

/* The runtime finds the parameters by pointers in sections of the program. */
#define __pagemill_param(called, kind, place, one, many, number)                                           \
    static const struct pagemill_module_param __param_##called = {#called, kind, place, one, many, number}; \
    static const struct pagemill_module_param *const __param_at_##called                                    \
        __attribute__((section("pagemill_params"), used)) = &__param_##called

#define module_param_named(name, variable, type, mode) \
    __pagemill_param(name, #type, &(variable), sizeof(variable), 1, NULL)
#define module_param(name, type, mode) module_param_named(name, name, type, mode)
#define module_param_array_named(name, array, type, count, mode) \
    __pagemill_param(name, #type, array, sizeof((array)[0]), sizeof(array) / sizeof((array)[0]), count)
#define module_param_array(name, type, count, mode) module_param_array_named(name, name, type, count, mode)
#define module_param_string(name, string, length, mode) __pagemill_param(name, "string", string, length, 1, NULL)

#define MODULE_PARM_DESC(called, words)                                                    \
    static const struct pagemill_module_text __param_text_##called = {#called, words};     \
    static const struct pagemill_module_text *const __param_text_at_##called               \
        __attribute__((section("pagemill_param_texts"), used)) = &__param_text_##called

#endif
