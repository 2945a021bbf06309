/* A module's frame: its first and last function, and what it says of itself. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_MODULE_H
#define PAGEMILL_LINUX_MODULE_H

#include <linux/err.h>
#include <linux/errno.h>
#include <linux/init.h>
#include <linux/kernel.h>
#include <linux/list.h>
#include <linux/moduleparam.h>
#include <linux/percpu.h>
#include <linux/preempt.h>
#include <linux/sched.h>
#include <linux/stat.h>
#include <linux/string.h>

struct module;
#define THIS_MODULE ((struct module *)0)

#define MODULE_INFO(tag, text) _Static_assert(1, text)
#define MODULE_LICENSE(text) MODULE_INFO(license, text)
#define MODULE_AUTHOR(text) MODULE_INFO(author, text)
#define MODULE_DESCRIPTION(text) MODULE_INFO(description, text)
#define MODULE_VERSION(text) MODULE_INFO(version, text)
#define MODULE_ALIAS(text) MODULE_INFO(alias, text)
#define MODULE_SOFTDEP(text) MODULE_INFO(softdep, text)
#define MODULE_IMPORT_NS(name) MODULE_INFO(import_ns, "")

/* There is one module in a process: nobody else needs its symbols, and it is not unloaded under its user. */
#define EXPORT_SYMBOL(name) _Static_assert(1, #name)
#define EXPORT_SYMBOL_GPL(name) EXPORT_SYMBOL(name)
#define try_module_get(module) ((void)(module), true)
#define module_put(module) ((void)(module))

#endif
