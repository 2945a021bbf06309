//! AES-XTS with the processor's instructions, in vectors of one, two or four blocks.
//!
//! One loop serves all widths ([`Lanes`]): eight vectors at once, which hides the latency of a round (four cycles on the
//! processors of today). With four blocks a vector that is 512 bytes, the smallest sector.
//! - The tweaks of up to eight vectors of sectors are encrypted together. One at a time, the latency of each would take
//!   half the time of a 512-byte sector.
//! - The tweak of block `j` is that of the sector times `x^j`: the eight vectors of a chunk come from each other
//!   (times `x^width`), and the next chunk's from this one's, all eight independently (times `x^(8 width)`).
//!
//! Invariant I1: a chunk is loaded whole before any of it is stored, so input and output may be the same bytes.
use std::arch::x86_64::*;

use super::Sectors;

/// Round keys of the longest key: 14 rounds, and one before the first.
const KEYS: usize = 15;
type RoundKeys = [[u8; 16]; KEYS];

/// The expanded keys. Plain bytes: it lives in [`crate::secret::Locked`] memory, which zeroes it.
#[repr(C)]
pub(super) struct Schedule {
    encrypt: RoundKeys,
    decrypt: RoundKeys,
    tweak: RoundKeys,
}

impl Schedule {
    /// Expands both halves of `key`, each 16 or 32 bytes.
    ///
    /// # Safety
    /// The processor has AES instructions.
    #[target_feature(enable = "aes,sse2")]
    pub(super) unsafe fn expand(&mut self, key: &[u8]) {
        let (data, tweak) = key.split_at(key.len() / 2);
        let rounds = data.len() / 4 + 6;
        expand(data, &mut self.encrypt);
        expand(tweak, &mut self.tweak);
        // The equivalent inverse cipher: the same rounds backwards, the inner keys through the inverse MixColumns.
        self.decrypt[0] = self.encrypt[rounds];
        self.decrypt[rounds] = self.encrypt[0];
        for i in 1..rounds {
            // SAFETY: both are 16 bytes long; the instructions are there, as the caller vouches.
            unsafe {
                let key = _mm_loadu_si128(self.encrypt[rounds - i].as_ptr().cast());
                _mm_storeu_si128(self.decrypt[i].as_mut_ptr().cast(), _mm_aesimc_si128(key));
            }
        }
    }
}

/// FIPS 197, section 5.2, word by word.
#[target_feature(enable = "aes,sse2")]
fn expand(key: &[u8], keys: &mut RoundKeys) {
    let n = key.len() / 4;
    let words = keys.as_flattened_mut();
    words[..key.len()].copy_from_slice(key);
    let mut rcon = 1u32;
    for i in n..4 * (n + 7) {
        let word = |i: usize| u32::from_le_bytes([words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]]);
        let mut next = word(i - 1);
        // The instruction gives SubWord in its lowest word and RotWord of that in the one above.
        let assisted = _mm_aeskeygenassist_si128::<0>(_mm_set1_epi32(next as i32));
        if i % n == 0 {
            next = _mm_cvtsi128_si32(_mm_shuffle_epi32::<1>(assisted)) as u32 ^ rcon;
            rcon = (rcon << 1) ^ ((rcon >> 7) * 0x11b);
        } else if n > 6 && i % n == 4 {
            next = _mm_cvtsi128_si32(assisted) as u32;
        }
        next ^= word(i - n);
        words[4 * i..4 * i + 4].copy_from_slice(&next.to_le_bytes());
    }
}

/// Vectors at once.
const WIDE: usize = 8;
/// Blocks of the widest chunk.
const MAX_BLOCKS: usize = WIDE * 4;

/// A vector of `BLOCKS` blocks, and what XTS does with it.
///
/// Safety, for every function: the processor has the instructions of the implementation, and pointers lead to
/// `16 * BLOCKS` bytes of which nothing is asked but that. They are inlined into functions that have those
/// instructions enabled.
trait Lanes {
    type V: Copy;
    const BLOCKS: usize;
    unsafe fn load(from: *const u8) -> Self::V;
    unsafe fn store(to: *mut u8, v: Self::V);
    /// One round key for every block.
    unsafe fn key(key: &[u8; 16]) -> Self::V;
    unsafe fn xor(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn enc(v: Self::V, key: Self::V) -> Self::V;
    unsafe fn enc_last(v: Self::V, key: Self::V) -> Self::V;
    unsafe fn dec(v: Self::V, key: Self::V) -> Self::V;
    unsafe fn dec_last(v: Self::V, key: Self::V) -> Self::V;
    /// The block at `tweak` times `x^j`, for each block `j` of the vector.
    unsafe fn spread(tweak: &[u8; 16]) -> Self::V;
    /// Times `x^BLOCKS` in XTS's field, each block.
    unsafe fn times_width(v: Self::V) -> Self::V;
    /// Times `x^(WIDE * BLOCKS)`.
    unsafe fn times_chunk(v: Self::V) -> Self::V;
}

/// Implements [`Lanes`] with the intrinsics of one width. Multiplying by `x^n` shifts by n bits and folds the n bits
/// that fall out back in, times x^7 + x^2 + x + 1.
macro_rules! lanes {
    ($name:ident, $v:ty, $blocks:literal, $load:ident, $store:ident, $broadcast:expr, $xor:ident,
     $enc:ident, $enc_last:ident, $dec:ident, $dec_last:ident,
     $shl:ident, $shr:ident, $byte_shl:ident, $byte_shr:ident, $clmul:ident, $set1:ident, $spread:ident) => {
        struct $name;
        impl Lanes for $name {
            type V = $v;
            const BLOCKS: usize = $blocks;
            #[inline(always)]
            unsafe fn load(from: *const u8) -> $v {
                // SAFETY: as the trait says.
                unsafe { $load(from.cast()) }
            }
            #[inline(always)]
            unsafe fn store(to: *mut u8, v: $v) {
                // SAFETY: as the trait says.
                unsafe { $store(to.cast(), v) }
            }
            #[inline(always)]
            unsafe fn key(key: &[u8; 16]) -> $v {
                // SAFETY: as the trait says.
                unsafe { $broadcast(_mm_loadu_si128(key.as_ptr().cast())) }
            }
            #[inline(always)]
            unsafe fn xor(a: $v, b: $v) -> $v {
                // SAFETY: as the trait says.
                unsafe { $xor(a, b) }
            }
            #[inline(always)]
            unsafe fn enc(v: $v, key: $v) -> $v {
                // SAFETY: as the trait says.
                unsafe { $enc(v, key) }
            }
            #[inline(always)]
            unsafe fn enc_last(v: $v, key: $v) -> $v {
                // SAFETY: as the trait says.
                unsafe { $enc_last(v, key) }
            }
            #[inline(always)]
            unsafe fn dec(v: $v, key: $v) -> $v {
                // SAFETY: as the trait says.
                unsafe { $dec(v, key) }
            }
            #[inline(always)]
            unsafe fn dec_last(v: $v, key: $v) -> $v {
                // SAFETY: as the trait says.
                unsafe { $dec_last(v, key) }
            }
            #[inline(always)]
            unsafe fn spread(tweak: &[u8; 16]) -> $v {
                // SAFETY: as the trait says.
                unsafe { $spread(Self::key(tweak)) }
            }
            #[inline(always)]
            unsafe fn times_width(v: $v) -> $v {
                // SAFETY: as the trait says.
                unsafe {
                    let out = $shr::<{ 64 - $blocks }>(v);
                    let shifted = $xor($shl::<$blocks>(v), $byte_shl::<8>(out));
                    $xor(shifted, $clmul::<1>(out, $set1(0x87)))
                }
            }
            #[inline(always)]
            unsafe fn times_chunk(v: $v) -> $v {
                // SAFETY: as the trait says.
                unsafe {
                    // WIDE * BLOCKS bits are BLOCKS bytes.
                    let out = $byte_shr::<{ 16 - $blocks }>(v);
                    $xor($byte_shl::<$blocks>(v), $clmul::<0>(out, $set1(0x87)))
                }
            }
        }
    };
}
const _: () = assert!(WIDE == 8, "times_chunk shifts by BLOCKS bytes");

lanes!(
    One,
    __m128i,
    1,
    _mm_loadu_si128,
    _mm_storeu_si128,
    std::convert::identity,
    _mm_xor_si128,
    _mm_aesenc_si128,
    _mm_aesenclast_si128,
    _mm_aesdec_si128,
    _mm_aesdeclast_si128,
    _mm_slli_epi64,
    _mm_srli_epi64,
    _mm_bslli_si128,
    _mm_bsrli_si128,
    _mm_clmulepi64_si128,
    _mm_set1_epi64x,
    spread_one
);
lanes!(
    Two,
    __m256i,
    2,
    _mm256_loadu_si256,
    _mm256_storeu_si256,
    _mm256_broadcastsi128_si256,
    _mm256_xor_si256,
    _mm256_aesenc_epi128,
    _mm256_aesenclast_epi128,
    _mm256_aesdec_epi128,
    _mm256_aesdeclast_epi128,
    _mm256_slli_epi64,
    _mm256_srli_epi64,
    _mm256_bslli_epi128,
    _mm256_bsrli_epi128,
    _mm256_clmulepi64_epi128,
    _mm256_set1_epi64x,
    spread_two
);
lanes!(
    Four,
    __m512i,
    4,
    _mm512_loadu_si512,
    _mm512_storeu_si512,
    _mm512_broadcast_i32x4,
    _mm512_xor_si512,
    _mm512_aesenc_epi128,
    _mm512_aesenclast_epi128,
    _mm512_aesdec_epi128,
    _mm512_aesdeclast_epi128,
    _mm512_slli_epi64,
    _mm512_srli_epi64,
    _mm512_bslli_epi128,
    _mm512_bsrli_epi128,
    _mm512_clmulepi64_epi128,
    _mm512_set1_epi64,
    spread_four
);

/// Encrypts the tweaks of the `N * BLOCKS` sectors from `first` on.
///
/// # Safety
/// As [`Lanes`] says.
#[inline(always)]
unsafe fn tweaks<L: Lanes, const R: usize, const N: usize>(
    keys: &RoundKeys,
    first: u64,
    step: u64,
    tweaks: &mut [[u8; 16]; MAX_BLOCKS],
) {
    for (i, tweak) in (0..).zip(&mut tweaks[..N * L::BLOCKS]) {
        *tweak = u128::from(first.wrapping_add(step.wrapping_mul(i))).to_le_bytes();
    }
    // SAFETY: N is at most WIDE and BLOCKS at most 4, so all vectors lie in the array.
    unsafe {
        let place = tweaks.as_mut_ptr().cast::<u8>();
        let key = L::key(&keys[0]);
        let mut v: [L::V; N] = std::array::from_fn(|i| L::xor(L::load(place.add(16 * L::BLOCKS * i)), key));
        for round in &keys[1..R] {
            let key = L::key(round);
            for v in &mut v {
                *v = L::enc(*v, key);
            }
        }
        let key = L::key(&keys[R]);
        for (i, v) in v.into_iter().enumerate() {
            L::store(place.add(16 * L::BLOCKS * i), L::enc_last(v, key));
        }
    }
}

/// Encrypts or decrypts `count` sectors.
///
/// # Safety
/// As [`Lanes`] says; `from` and `to` are `count` sectors each, the same or apart; a sector is a multiple of 512 bytes.
#[inline(always)]
unsafe fn run<L: Lanes, const R: usize, const DECRYPT: bool>(
    schedule: &Schedule,
    sectors: Sectors,
    count: usize,
    from: *const u8,
    to: *mut u8,
) {
    let round_keys = if DECRYPT { &schedule.decrypt } else { &schedule.encrypt };
    let mut sector_tweaks = [[0; 16]; MAX_BLOCKS];
    let (size, batch) = (sectors.size.bytes(), WIDE * L::BLOCKS);
    let vector = 16 * L::BLOCKS;
    // SAFETY: every access is at `sector * size + offset + i * vector`, below `count * size`, since WIDE vectors divide
    // a sector; the array of tweaks has WIDE * BLOCKS places.
    unsafe {
        let keys: [L::V; KEYS] = std::array::from_fn(|i| L::key(&round_keys[i]));
        for sector in 0..count {
            if sector % batch == 0 {
                let first = sectors.first.wrapping_add(sectors.step.wrapping_mul(sector as u64));
                // A page of small sectors needs few tweaks.
                if count - sector <= 2 * L::BLOCKS {
                    tweaks::<L, R, 2>(&schedule.tweak, first, sectors.step, &mut sector_tweaks);
                } else {
                    tweaks::<L, R, WIDE>(&schedule.tweak, first, sectors.step, &mut sector_tweaks);
                }
            }
            let mut tweak = [L::spread(&sector_tweaks[sector % batch]); WIDE];
            for i in 1..WIDE {
                tweak[i] = L::times_width(tweak[i - 1]);
            }
            let mut offset = sector * size;
            loop {
                let mut v: [L::V; WIDE] =
                    std::array::from_fn(|i| L::xor(L::xor(L::load(from.add(offset + i * vector)), tweak[i]), keys[0]));
                for key in &keys[1..R] {
                    for v in &mut v {
                        *v = if DECRYPT { L::dec(*v, *key) } else { L::enc(*v, *key) };
                    }
                }
                for (i, v) in v.into_iter().enumerate() {
                    // The last round's key and the tweak are both added at the end: together.
                    let key = L::xor(keys[R], tweak[i]);
                    let done = if DECRYPT { L::dec_last(v, key) } else { L::enc_last(v, key) };
                    L::store(to.add(offset + i * vector), done);
                }
                offset += WIDE * vector;
                if offset == (sector + 1) * size {
                    break;
                }
                for tweak in &mut tweak {
                    *tweak = L::times_chunk(*tweak);
                }
            }
        }
    }
}

/// Vectors of one block have nothing to spread.
#[inline(always)]
fn spread_one(v: __m128i) -> __m128i {
    v
}

/// Each block by its own number of bits: block `j` times `x^j`. A shift by 64 gives 0.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn spread_two(v: __m256i) -> __m256i {
    let out = _mm256_srlv_epi64(v, _mm256_set_epi64x(63, 63, 64, 64));
    let shifted = _mm256_sllv_epi64(v, _mm256_set_epi64x(1, 1, 0, 0));
    let folded = _mm256_clmulepi64_epi128::<1>(out, _mm256_set1_epi64x(0x87));
    _mm256_xor_si256(_mm256_xor_si256(shifted, _mm256_bslli_epi128::<8>(out)), folded)
}

/// As [`spread_two`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,vpclmulqdq")]
fn spread_four(v: __m512i) -> __m512i {
    let out = _mm512_srlv_epi64(v, _mm512_set_epi64(61, 61, 62, 62, 63, 63, 64, 64));
    let shifted = _mm512_sllv_epi64(v, _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0));
    let folded = _mm512_clmulepi64_epi128::<1>(out, _mm512_set1_epi64(0x87));
    _mm512_xor_si512(_mm512_xor_si512(shifted, _mm512_bslli_epi128::<8>(out)), folded)
}

/// What one backend offers: `[AES-128, AES-256]`, each `[encrypt, decrypt]`.
pub(super) type Kernel = unsafe fn(&Schedule, Sectors, usize, *const u8, *mut u8);

macro_rules! kernels {
    ($name:ident, $lanes:ty, $features:literal) => {
        pub(super) const $name: [[Kernel; 2]; 2] = {
            /// # Safety
            /// As [`run`] says, with the instructions that are enabled here.
            #[target_feature(enable = $features)]
            unsafe fn kernel<const R: usize, const DECRYPT: bool>(
                schedule: &Schedule,
                sectors: Sectors,
                count: usize,
                from: *const u8,
                to: *mut u8,
            ) {
                // SAFETY: the caller vouches for all that `run` asks.
                unsafe { run::<$lanes, R, DECRYPT>(schedule, sectors, count, from, to) }
            }
            [[kernel::<10, false>, kernel::<10, true>], [kernel::<14, false>, kernel::<14, true>]]
        };
    };
}
kernels!(AES_NI, One, "aes,pclmulqdq,sse2");
kernels!(VAES_256, Two, "aes,avx2,vaes,vpclmulqdq");
kernels!(VAES_512, Four, "aes,avx512f,avx512bw,vaes,vpclmulqdq");

pub(super) fn has_aes_ni() -> bool {
    is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq")
}

pub(super) fn has_vaes_256() -> bool {
    let has_vector_aes = is_x86_feature_detected!("vaes") && is_x86_feature_detected!("vpclmulqdq");
    has_aes_ni() && has_vector_aes && is_x86_feature_detected!("avx2")
}

pub(super) fn has_vaes_512() -> bool {
    has_vaes_256() && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
}
