/* The kernel's log and texts. */
#include "internal.h"
#include "module.h"
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <linux/err.h>
#include <linux/kernel.h>
#include <linux/ktime.h>
#include <linux/slab.h>
#include <printf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static bool is_inside_line;

/* %Y stands for the kernel's %pe: the name of an error. */
static int print_error(FILE *to, const struct printf_info *info, const void *const *arguments) {
    void *pointer = **(void *const *const *)arguments;
    const char *name = IS_ERR(pointer) ? strerrorname_np((int)-PTR_ERR(pointer)) : NULL;
    char text[64];
    if (name)
        snprintf(text, sizeof text, "-%s", name);
    else
        snprintf(text, sizeof text, "%p", pointer);
    return fprintf(to, "%*s", info->left ? -info->width : info->width, text);
}

static int error_takes(const struct printf_info *info, size_t n, int *types, int *sizes) {
    (void)info, (void)sizes;
    if (n > 0)
        types[0] = PA_POINTER;
    return 1;
}

__attribute__((constructor)) static void begin(void) { register_printf_specifier('Y', print_error, error_takes); }

int vprintk(const char *format, va_list arguments) {
    bool goes_on = false;
    while (format[0] == KERN_SOH[0] && format[1]) {
        goes_on |= format[1] == 'c';
        format += 2;
    }
    /* The C library does not know the kernel's own formats. */
    char known[1024];
    size_t to = 0;
    bool is_begun = false;
    for (const char *at = format; *at && to < sizeof known - 1; at++) {
        bool is_pointer = is_begun && at[0] == 'p';
        /* Flags, a width and a precision may stand before the letter. */
        is_begun = is_begun ? strchr("-+ #.*0123456789", at[0]) != NULL : at[0] == '%';
        known[to++] = is_pointer && at[1] == 'e' ? 'Y' : *at;
        if (is_pointer && at[1] && strchr("exK", at[1]))
            at++;
    }
    known[to] = 0;
    pthread_mutex_lock(&log_lock);
    if (is_inside_line && !goes_on)
        putchar('\n');
    if (!is_inside_line || !goes_on) {
        u64 us = ktime_get_ns() / NSEC_PER_USEC;
        printf("[%5lu.%06lu] ", (unsigned long)(us / USEC_PER_SEC), (unsigned long)(us % USEC_PER_SEC));
    }
    int length = vprintf(known, arguments);
    is_inside_line = to == 0 || known[to - 1] != '\n';
    fflush(stdout);
    pthread_mutex_unlock(&log_lock);
    return length;
}

int printk(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vprintk(format, arguments);
    va_end(arguments);
    return length;
}

void pagemill_linux_end_log(void) {
    pthread_mutex_lock(&log_lock);
    if (is_inside_line)
        putchar('\n');
    is_inside_line = false;
    fflush(stdout);
    pthread_mutex_unlock(&log_lock);
}

void dump_stack(void) {
    void *calls[32];
    int n = backtrace(calls, ARRAY_SIZE(calls));
    printk("Call Trace:\n");
    for (int at = 1; at < n; at++) {
        Dl_info info;
        bool is_known = dladdr(calls[at], &info) && info.dli_sname;
        printk(" %s+%#lx\n", is_known ? info.dli_sname : "?",
               (unsigned long)calls[at] - (is_known ? (unsigned long)info.dli_saddr : 0));
    }
}

void panic(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    printk(KERN_EMERG "Kernel panic - not syncing: ");
    char text[512];
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    printk(KERN_CONT "%s\n", text);
    abort();
}

int scnprintf(char *text, size_t size, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, size, format, arguments);
    va_end(arguments);
    return size == 0 ? 0 : min(length, (int)size - 1);
}

char *kasprintf(gfp_t gfp, const char *format, ...) {
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    size_t size = (size_t)vsnprintf(NULL, 0, format, arguments) + 1;
    va_end(arguments);
    char *text = kmalloc(size, gfp);
    if (text)
        vsnprintf(text, size, format, again);
    va_end(again);
    return text;
}

static unsigned int digit(char c) {
    return isdigit(c) ? (unsigned int)(c - '0') : isalpha(c) ? (unsigned int)(tolower(c) - 'a' + 10) : 99;
}

/* By hand, since the C library also takes spaces, signs and, in some versions, 0b. */
int kstrtoull(const char *text, unsigned int base, unsigned long long *number) {
    unsigned long long is = 0;
    text += *text == '+';
    bool is_hexadecimal = text[0] == '0' && tolower(text[1]) == 'x' && isxdigit(text[2]);
    if (base == 0)
        base = is_hexadecimal ? 16 : text[0] == '0' ? 8 : 10;
    text += base == 16 && is_hexadecimal ? 2 : 0;
    const char *first = text;
    bool is_too_large = false;
    for (; digit(*text) < base; text++) {
        is_too_large |= __builtin_mul_overflow(is, base, &is);
        is_too_large |= __builtin_add_overflow(is, digit(*text), &is);
    }
    if (text == first)
        return -EINVAL;
    if (is_too_large)
        return -ERANGE;
    text += *text == '\n';
    if (*text)
        return -EINVAL;
    *number = is;
    return 0;
}

int kstrtoll(const char *text, unsigned int base, long long *number) {
    unsigned long long is;
    bool is_negative = *text == '-';
    if (is_negative && text[1] == '+')
        return -EINVAL;
    int error = kstrtoull(text + is_negative, base, &is);
    if (error)
        return error;
    if (is > (unsigned long long)LLONG_MAX + is_negative)
        return -ERANGE;
    *number = is_negative ? (long long)-is : (long long)is;
    return 0;
}

#define NARROWER(name, type, wide, most)                                 \
    int name(const char *text, unsigned int base, type *number) {        \
        wide is;                                                         \
        int error = most(text, base, &is);                               \
        if (!error && is != (wide)(type)is)                              \
            error = -ERANGE;                                             \
        if (!error)                                                      \
            *number = (type)is;                                          \
        return error;                                                    \
    }
NARROWER(kstrtoul, unsigned long, unsigned long long, kstrtoull)
NARROWER(kstrtouint, unsigned int, unsigned long long, kstrtoull)
NARROWER(kstrtou64, u64, unsigned long long, kstrtoull)
NARROWER(kstrtou32, u32, unsigned long long, kstrtoull)
NARROWER(kstrtou16, u16, unsigned long long, kstrtoull)
NARROWER(kstrtou8, u8, unsigned long long, kstrtoull)
NARROWER(kstrtol, long, long long, kstrtoll)
NARROWER(kstrtoint, int, long long, kstrtoll)
NARROWER(kstrtos64, s64, long long, kstrtoll)
NARROWER(kstrtos32, s32, long long, kstrtoll)
NARROWER(kstrtos16, s16, long long, kstrtoll)
NARROWER(kstrtos8, s8, long long, kstrtoll)

int kstrtobool(const char *text, bool *is_true) {
    if (strchr("yYtT1", text[0]) && text[0])
        *is_true = true;
    else if (strchr("nNfF0", text[0]) && text[0])
        *is_true = false;
    else if (strncasecmp(text, "on", 2) == 0 || strncasecmp(text, "of", 2) == 0)
        *is_true = tolower(text[1]) == 'n';
    else
        return -EINVAL;
    return 0;
}
