/* What must hold when the code is compiled. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_BUILD_BUG_H
#define PAGEMILL_LINUX_BUILD_BUG_H

#include <linux/bug.h>

#define BUILD_BUG_ON_MSG(condition, text) _Static_assert(!(condition), text)
#define BUILD_BUG_ON_ZERO(condition) ((int)sizeof(struct { int : -!!(condition); }))
#define BUILD_BUG() BUILD_BUG_ON(1)
#ifndef static_assert
#define static_assert(condition, ...) _Static_assert(condition, #condition)
#endif

#endif
