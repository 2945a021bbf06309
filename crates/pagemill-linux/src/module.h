/* What the end of a module asks of the other files. */
#ifndef MODULE_H
#define MODULE_H

#include <stddef.h>

/* Gives back what caches keep, and says what is not freed. Returns how many pages objects take. */
size_t pagemill_linux_slabs_left(void (*say)(const char *format, ...));
/* Caches that are not destroyed. */
unsigned int pagemill_linux_caches(void);
/* Threads that have not ended. */
unsigned int pagemill_linux_threads(void);
/* Ends a line of the log that has no end. */
void pagemill_linux_end_log(void);

#endif
