/* The flags of requests. SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * The first fifteen bits are those of `PAGEMILL_GFP_...`; the others are the kernel's alone. */
#ifndef PAGEMILL_LINUX_GFP_TYPES_H
#define PAGEMILL_LINUX_GFP_TYPES_H

#include <linux/types.h>
#include <pagemill.h>

#define __GFP_MOVABLE ((gfp_t)PAGEMILL_GFP_MOVABLE)
#define __GFP_RECLAIMABLE ((gfp_t)PAGEMILL_GFP_RECLAIMABLE)
#define __GFP_ZERO ((gfp_t)PAGEMILL_GFP_ZERO)
#define __GFP_HIGH ((gfp_t)PAGEMILL_GFP_ATOMIC)
#define __GFP_DIRECT_RECLAIM ((gfp_t)PAGEMILL_GFP_NOIO)
#define __GFP_IO ((gfp_t)(PAGEMILL_GFP_NOFS & ~PAGEMILL_GFP_NOIO))
#define __GFP_FS ((gfp_t)(PAGEMILL_GFP_KERNEL & ~PAGEMILL_GFP_NOFS))
#define __GFP_DMA32 ((gfp_t)PAGEMILL_GFP_DMA32)
#define __GFP_THISNODE ((gfp_t)PAGEMILL_GFP_THISNODE)
#define __GFP_NORETRY ((gfp_t)PAGEMILL_GFP_NORETRY)
#define __GFP_RETRY_MAYFAIL ((gfp_t)PAGEMILL_GFP_RETRY_MAYFAIL)
#define __GFP_NOFAIL ((gfp_t)PAGEMILL_GFP_NOFAIL)
#define __GFP_NOWARN ((gfp_t)PAGEMILL_GFP_NOWARN)

/* As `__GFP_DMA32`: device addresses below 16 MiB there are not. */
#define __GFP_DMA ((gfp_t)1 << 16)
/* A block that is one: its pages but the first have no references of their own (a compound page). */
#define __GFP_COMP ((gfp_t)1 << 17)
/* These change nothing. Background reclaim wakes below the watermark whether a request says so or not, a process's memory is all
 * mapped, and no account is charged. */
#define __GFP_KSWAPD_RECLAIM ((gfp_t)1 << 18)
#define __GFP_HIGHMEM ((gfp_t)1 << 19)
#define __GFP_MEMALLOC ((gfp_t)1 << 20)
#define __GFP_NOMEMALLOC ((gfp_t)1 << 21)
#define __GFP_HARDWALL ((gfp_t)1 << 22)
#define __GFP_WRITE ((gfp_t)1 << 23)
#define __GFP_ACCOUNT ((gfp_t)1 << 24)
#define __GFP_COLD ((gfp_t)1 << 25)
#define __GFP_SKIP_ZERO ((gfp_t)0)
#define __GFP_ZEROTAGS ((gfp_t)0)

#define __GFP_RECLAIM (__GFP_DIRECT_RECLAIM | __GFP_KSWAPD_RECLAIM)
/* Their names of 2013. */
#define __GFP_WAIT __GFP_RECLAIM
#define __GFP_REPEAT __GFP_RETRY_MAYFAIL

#define GFP_ATOMIC (__GFP_HIGH | __GFP_KSWAPD_RECLAIM)
#define GFP_KERNEL (__GFP_RECLAIM | __GFP_IO | __GFP_FS)
#define GFP_KERNEL_ACCOUNT (GFP_KERNEL | __GFP_ACCOUNT)
#define GFP_NOWAIT __GFP_KSWAPD_RECLAIM
#define GFP_NOIO __GFP_RECLAIM
#define GFP_NOFS (__GFP_RECLAIM | __GFP_IO)
#define GFP_USER (GFP_KERNEL | __GFP_HARDWALL)
#define GFP_DMA __GFP_DMA
#define GFP_DMA32 __GFP_DMA32
#define GFP_HIGHUSER (GFP_USER | __GFP_HIGHMEM)
#define GFP_HIGHUSER_MOVABLE (GFP_HIGHUSER | __GFP_MOVABLE)
#define GFP_TRANSHUGE_LIGHT \
    ((GFP_HIGHUSER_MOVABLE | __GFP_COMP | __GFP_NOMEMALLOC | __GFP_NOWARN) & ~__GFP_RECLAIM)
#define GFP_TRANSHUGE (GFP_TRANSHUGE_LIGHT | __GFP_DIRECT_RECLAIM)

#endif
