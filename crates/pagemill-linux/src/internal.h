/* What the files of this library have in common. */
#ifndef INTERNAL_H
#define INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <linux/list.h>
#include <linux/mm.h>
#include <pagemill-linux.h>
#include <unistd.h>

/* Warnings so far, and misuse that was refused. */
extern unsigned long pagemill_linux_faults;
/* Whether all new memory is zeroed: the kernel's option init_on_alloc. */
extern bool pagemill_linux_init_on_alloc;

uint32_t pagemill_linux_flags(gfp_t gfp);
struct page *pagemill_linux_hand_out(void *block, unsigned int order, gfp_t gfp);
void pagemill_linux_take_back(struct page *page);
bool pagemill_linux_claim(const char *function, struct page *page);
bool pagemill_linux_is_page(const struct page *page);
enum pagemill_error pagemill_linux_report(const struct page *page);
void pagemill_linux_refused(const char *function, const struct page *page, enum pagemill_error error);

#endif
