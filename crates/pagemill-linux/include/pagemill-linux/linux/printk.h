/* The kernel's log, on standard output: each line with the seconds since the machine started. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_PRINTK_H
#define PAGEMILL_LINUX_PRINTK_H

#include <linux/compiler.h>
#include <linux/types.h>

/* A message's level is in front of it. */
#define KERN_SOH "\001"
#define KERN_EMERG KERN_SOH "0"
#define KERN_ALERT KERN_SOH "1"
#define KERN_CRIT KERN_SOH "2"
#define KERN_ERR KERN_SOH "3"
#define KERN_WARNING KERN_SOH "4"
#define KERN_NOTICE KERN_SOH "5"
#define KERN_INFO KERN_SOH "6"
#define KERN_DEBUG KERN_SOH "7"
#define KERN_DEFAULT ""
#define KERN_CONT KERN_SOH "c"

/* Writes to the log. Formats are those of printf; of the kernel's own, %pe (the name of an error) and %px and %pK (an address). */
int printk(const char *format, ...) __attribute__((format(printf, 1, 2)));
#define _printk printk
int vprintk(const char *format, __builtin_va_list args);
/* Writes the chain of calls to the log. */
void dump_stack(void);

#ifndef pr_fmt
#define pr_fmt(format) format
#endif
#define no_printk(format, ...) ({ if (0) printk(format, ##__VA_ARGS__); 0; })
#define pr_emerg(format, ...) printk(KERN_EMERG pr_fmt(format), ##__VA_ARGS__)
#define pr_alert(format, ...) printk(KERN_ALERT pr_fmt(format), ##__VA_ARGS__)
#define pr_crit(format, ...) printk(KERN_CRIT pr_fmt(format), ##__VA_ARGS__)
#define pr_err(format, ...) printk(KERN_ERR pr_fmt(format), ##__VA_ARGS__)
#define pr_warn(format, ...) printk(KERN_WARNING pr_fmt(format), ##__VA_ARGS__)
#define pr_warning pr_warn
#define pr_notice(format, ...) printk(KERN_NOTICE pr_fmt(format), ##__VA_ARGS__)
#define pr_info(format, ...) printk(KERN_INFO pr_fmt(format), ##__VA_ARGS__)
#define pr_cont(format, ...) printk(KERN_CONT format, ##__VA_ARGS__)
#ifdef DEBUG
#define pr_debug(format, ...) printk(KERN_DEBUG pr_fmt(format), ##__VA_ARGS__)
#define pr_devel pr_debug
#else
#define pr_debug(format, ...) no_printk(KERN_DEBUG pr_fmt(format), ##__VA_ARGS__)
#define pr_devel pr_debug
#endif

#define __pagemill_once(call)                                             \
    do {                                                                  \
        static bool was_here_;                                            \
        if (!__atomic_exchange_n(&was_here_, true, __ATOMIC_RELAXED))     \
            call;                                                         \
    } while (0)
#define printk_once(...) __pagemill_once(printk(__VA_ARGS__))
#define pr_err_once(...) __pagemill_once(pr_err(__VA_ARGS__))
#define pr_warn_once(...) __pagemill_once(pr_warn(__VA_ARGS__))
#define pr_info_once(...) __pagemill_once(pr_info(__VA_ARGS__))
/* The log has no limit on its rate. */
#define printk_ratelimited printk
#define pr_err_ratelimited pr_err
#define pr_warn_ratelimited pr_warn
#define pr_info_ratelimited pr_info
#define printk_ratelimit() 1

#endif
