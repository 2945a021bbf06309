/* Numbers of errors: the system's, which <errno.h> takes from here, and one of the kernel's own. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_ERRNO_H
#define PAGEMILL_LINUX_ERRNO_H

#include_next <linux/errno.h>

#define ENOTSUPP 524

#endif
