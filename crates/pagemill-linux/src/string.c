/* What the kernel's <linux/string.h> has beside the C library's. */
#include "internal.h"
#include <ctype.h>
#include <linux/slab.h>
#include <linux/string.h>

ssize_t pagemill_strscpy(char *to, const char *from, size_t size) {
    if (size == 0)
        return -E2BIG;
    size_t length = strnlen(from, size);
    bool is_cut = length == size;
    length -= is_cut;
    memcpy(to, from, length);
    to[length] = 0;
    return is_cut ? -E2BIG : (ssize_t)length;
}

char *skip_spaces(const char *text) {
    while (isspace(*text))
        text++;
    return (char *)text;
}

char *strim(char *text) {
    size_t length = strlen(text);
    while (length > 0 && isspace(text[length - 1]))
        text[--length] = 0;
    return skip_spaces(text);
}

void *memchr_inv(const void *bytes, int byte, size_t size) {
    const unsigned char *at = bytes;
    for (; size > 0; at++, size--)
        if (*at != (unsigned char)byte)
            return (void *)at;
    return NULL;
}

bool sysfs_streq(const char *one, const char *other) {
    size_t length = strcspn(one, "\n");
    return strncmp(one, other, length) == 0 && strcspn(other, "\n") == length;
}

void **__memcat_p(void **one, void **other) {
    size_t n = 0, m = 0;
    while (one[n])
        n++;
    while (other[m])
        m++;
    void **both = kmalloc_array(n + m + 1, sizeof(void *), GFP_KERNEL);
    if (both) {
        memcpy(both, one, n * sizeof(void *));
        memcpy(both + n, other, (m + 1) * sizeof(void *));
    }
    return both;
}
