/* The program that pagemill-kmod makes of a module: sets its parameters, calls its first and its last function, and says what it leaves
 * behind.
 *
 * Ends with 0; 1 if the first function returned an error, the module was warned of anything or did not free all its memory; 2 if
 * it has no first function or a parameter is wrong. A program with a function main of its own does not get this file. */
#include "internal.h"
#include "module.h"
#include <limits.h>
#include <linux/kernel.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Of a module without a first function. The C library has a function of this name, a system call, which an undefined name would become. */
static bool has_none;
__attribute__((weak)) int init_module(void) {
    has_none = true;
    return 0;
}
__attribute__((weak)) void cleanup_module(void);
extern const struct pagemill_module_param *const __start_pagemill_params[] __attribute__((weak));
extern const struct pagemill_module_param *const __stop_pagemill_params[] __attribute__((weak));
extern const struct pagemill_module_text *const __start_pagemill_param_texts[] __attribute__((weak));
extern const struct pagemill_module_text *const __stop_pagemill_param_texts[] __attribute__((weak));

static const char *name = "module";

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "pagemill-kmod: %s: ", name);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

/* `bool` is a macro, which another macro's argument may have expanded. */
static const char *type_of(const struct pagemill_module_param *param) {
    return strcmp(param->type, "_Bool") == 0 ? "bool" : param->type;
}

/* Reads one value. 0, or a negative error. */
static int set(const struct pagemill_module_param *param, void *place, const char *value) {
    const char *type = type_of(param);
    long long is = 0;
    unsigned long long bits = 0;
    bool truth;
    if (strcmp(type, "charp") == 0)
        return (*(char **)place = strdup(value)) ? 0 : -ENOMEM;
    if (strcmp(type, "string") == 0)
        return strscpy((char *)place, value, param->size) < 0 ? -ENOSPC : 0;
    if (strcmp(type, "bool") == 0 || strcmp(type, "invbool") == 0) {
        int error = kstrtobool(value, &truth);
        if (error)
            return error;
        truth ^= type[0] == 'i';
        if (param->size == sizeof(int))
            *(int *)place = truth;
        else
            *(bool *)place = truth;
        return 0;
    }
    bool is_signed = strcmp(type, "int") == 0 || strcmp(type, "long") == 0 || strcmp(type, "short") == 0;
    int error = is_signed ? kstrtoll(value, 0, &is) : kstrtoull(value, 0, &bits);
    if (error)
        return error;
    int unused = 64 - 8 * (int)param->size;
    if (is_signed ? is << unused >> unused != is : bits << unused >> unused != bits)
        return -ERANGE;
    bits = is_signed ? (unsigned long long)is : bits;
    memcpy(place, &bits, param->size);
    return 0;
}

static const char *text_of(const char *param) {
    for (const struct pagemill_module_text *const *at = __start_pagemill_param_texts; at < __stop_pagemill_param_texts; at++)
        if (strcmp((*at)->name, param) == 0)
            return (*at)->text;
    return "";
}

static const struct pagemill_module_param *param_of(const char *words, size_t length) {
    for (const struct pagemill_module_param *const *at = __start_pagemill_params; at < __stop_pagemill_params; at++)
        if (strlen((*at)->name) == length && strncmp((*at)->name, words, length) == 0)
            return *at;
    say("it has no parameter %.*s; its parameters are:", (int)length, words);
    for (const struct pagemill_module_param *const *at = __start_pagemill_params; at < __stop_pagemill_params; at++)
        fprintf(stderr, "    %s (%s) %s\n", (*at)->name, type_of(*at), text_of((*at)->name));
    return NULL;
}

/* Sets a parameter by an argument. Says what is wrong. */
static bool set_by(const char *argument) {
    size_t length = strcspn(argument, "=");
    const struct pagemill_module_param *param = param_of(argument, length);
    if (!param)
        return false;
    char *values = strdup(argument[length] ? argument + length + 1 : "1"), *rest = values, *value;
    unsigned int n = 0;
    int error = values ? 0 : -ENOMEM;
    bool is_one = param->most == 1;
    while (!error && (value = is_one ? rest : strsep(&rest, ","))) {
        error = n < param->most ? set(param, (char *)param->value + n * param->size, value) : -ENOSPC;
        n++;
        if (is_one)
            break;
    }
    if (param->count)
        *param->count = n;
    free(values);
    if (error)
        say("%s: the parameter %s is of type %s: %s", argument, param->name, type_of(param), strerror(-error));
    return !error;
}

/* What the module left. Returns whether it is nothing. */
static bool is_clean(void) {
    struct pagemill_census census;
    unsigned int threads = pagemill_linux_threads();
    if (threads > 0) {
        say("%u of its threads have not ended, so its memory cannot be counted", threads);
        return false;
    }
    unsigned long faults = pagemill_linux_faults;
    size_t slabs = pagemill_linux_slabs_left(say);
    enum pagemill_error error = pagemill_validate(pagemill_linux_allocator(), &census);
    if (error)
        say("its allocator does not add up: %s", pagemill_strerror(error));
    else if (census.handed_out > slabs)
        say("%zu pages are not freed", census.handed_out - slabs);
    if (faults > 0)
        say("warnings: %lu, see above", faults);
    return !error && census.handed_out == 0 && faults == 0 && pagemill_linux_caches() == 0;
}

int main(int argc, char **argv) {
    int at = 1;
    if (at < argc && strcmp(argv[at], "--init-on-alloc") == 0) {
        pagemill_linux_init_on_alloc = true;
        at++;
    }
    if (at < argc)
        name = argv[at++];
    for (; at < argc; at++)
        if (!set_by(argv[at]))
            return 2;
    if (!pagemill_linux_allocator()) {
        say("the system refuses the allocator's memory");
        return 1;
    }
    int result = init_module();
    if (has_none) {
        say("it has no first function: name one with module_init");
        return 2;
    }
    pagemill_linux_end_log();
    if (result < 0)
        say("its first function failed: -%s (%s)", strerrorname_np(-result) ? strerrorname_np(-result) : "?", strerror(-result));
    if (result >= 0 && cleanup_module)
        cleanup_module();
    pagemill_linux_end_log();
    bool clean = is_clean();
    if (result >= 0 && clean)
        say("its first function returned %d%s, and all its memory is freed", result, cleanup_module ? ", the last one ran" : "");
    return result < 0 || !clean;
}
