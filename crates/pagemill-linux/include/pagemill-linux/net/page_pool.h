/* The header's place until 2023. SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <net/page_pool/helpers.h>
