/* From a member to its structure. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <linux/compiler.h>
