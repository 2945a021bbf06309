/* See module.h. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/module.h>
