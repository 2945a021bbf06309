/* Numbers that follow from a seed, for tests that repeat. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_PRANDOM_H
#define PAGEMILL_LINUX_PRANDOM_H

#include <linux/random.h>

struct rnd_state {
    u64 state;
};

static inline void prandom_seed_state(struct rnd_state *state, u64 seed) { state->state = seed; }
/* Sebastiano Vigna's SplitMix64. */
static inline u32 prandom_u32_state(struct rnd_state *state) {
    u64 mixed = state->state += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
    return (u32)(mixed >> 32);
}

#endif
