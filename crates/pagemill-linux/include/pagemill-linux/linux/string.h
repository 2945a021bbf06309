/* Texts and bytes. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_STRING_H
#define PAGEMILL_LINUX_STRING_H

#include <linux/errno.h>
#include <linux/types.h>

void *memcpy(void *to, const void *from, size_t size);
void *memmove(void *to, const void *from, size_t size);
void *memset(void *to, int byte, size_t size);
int memcmp(const void *one, const void *other, size_t size);
void *memchr(const void *bytes, int byte, size_t size);
size_t strlen(const char *text);
size_t strnlen(const char *text, size_t most);
char *strcpy(char *to, const char *from);
char *strncpy(char *to, const char *from, size_t size);
char *strcat(char *to, const char *from);
char *strncat(char *to, const char *from, size_t size);
int strcmp(const char *one, const char *other);
int strncmp(const char *one, const char *other, size_t size);
int strcasecmp(const char *one, const char *other);
int strncasecmp(const char *one, const char *other, size_t size);
char *strchr(const char *text, int character);
char *strrchr(const char *text, int character);
char *strstr(const char *text, const char *part);
size_t strspn(const char *text, const char *set);
size_t strcspn(const char *text, const char *set);
char *strpbrk(const char *text, const char *set);
char *strsep(char **text, const char *set);

/* Copies a text with its end, cut to `size`: the length, or -E2BIG if it was cut. */
ssize_t pagemill_strscpy(char *to, const char *from, size_t size);
#define __pagemill_strscpy_2(to, from) pagemill_strscpy(to, from, sizeof(to))
#define __pagemill_strscpy_of(to, from, size, chosen, ...) chosen
#define strscpy(...) __pagemill_strscpy_of(__VA_ARGS__, pagemill_strscpy, __pagemill_strscpy_2, )(__VA_ARGS__)

char *strim(char *text);
char *skip_spaces(const char *text);
/* The first byte that is another, or null. */
void *memchr_inv(const void *bytes, int byte, size_t size);
bool sysfs_streq(const char *one, const char *other);
static inline void memzero_explicit(void *bytes, size_t size) {
    memset(bytes, 0, size);
    __asm__ volatile("" : : "r"(bytes) : "memory");
}
#define memset_after(object, byte, member)                                                                       \
    memset((char *)(object) + offsetof(typeof(*(object)), member) + sizeof((object)->member), byte,              \
           sizeof(*(object)) - offsetof(typeof(*(object)), member) - sizeof((object)->member))

/* The pointers of two arrays that end with null, in a new one, which kfree frees; or null. */
void **__memcat_p(void **one, void **other);
#define memcat_p(one, other) ((typeof(*(one)) *)__memcat_p((void **)(one), (void **)(other)))

char *kstrdup(const char *text, gfp_t gfp);
char *kstrndup(const char *text, size_t most, gfp_t gfp);
void *kmemdup(const void *bytes, size_t size, gfp_t gfp);

#endif
