//! AES-XTS on the `aes` crate, for every processor: 32 blocks at a time, which is as many as it works on at once.
use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, KeyInit};
use aes::{Aes128, Aes256};

use super::Sectors;

const BLOCK: usize = 16;
const BLOCKS: usize = 32;

/// The keys of one of the two lengths. `aes` zeroes them when they are dropped.
#[expect(clippy::large_enum_variant, reason = "it is boxed, once a volume")]
pub(super) enum Schedule {
    Aes128 { data: Aes128, tweak: Aes128 },
    Aes256 { data: Aes256, tweak: Aes256 },
}

impl Schedule {
    /// From a key of 32 or 64 bytes, which the caller has checked; the second half is for the tweaks.
    pub(super) fn new(key: &[u8]) -> Self {
        fn keys<C: KeyInit>(key: &[u8]) -> (C, C) {
            let half = |half| C::new_from_slice(half).expect("half of a key has the cipher's length");
            let (data, tweak) = key.split_at(key.len() / 2);
            (half(data), half(tweak))
        }
        if key.len() == 64 {
            let (data, tweak) = keys(key);
            Self::Aes256 { data, tweak }
        } else {
            let (data, tweak) = keys(key);
            Self::Aes128 { data, tweak }
        }
    }

    pub(super) fn run(&self, sectors: Sectors, data: &mut [u8], decrypt: bool) {
        match self {
            Self::Aes128 { data: key, tweak } => run(key, tweak, sectors, data, decrypt),
            Self::Aes256 { data: key, tweak } => run(key, tweak, sectors, data, decrypt),
        }
    }
}

fn run<C>(key: &C, tweak_key: &C, sectors: Sectors, data: &mut [u8], decrypt: bool)
where
    C: BlockCipherEncrypt<BlockSize = aes::cipher::consts::U16> + BlockCipherDecrypt,
{
    for (i, sector) in (0..).zip(data.chunks_exact_mut(sectors.size.bytes())) {
        let number = u128::from(sectors.first.wrapping_add(sectors.step.wrapping_mul(i)));
        let mut tweak = Array::from(number.to_le_bytes());
        tweak_key.encrypt_block(&mut tweak);
        let mut tweak = u128::from_le_bytes(tweak.into());
        for chunk in sector.chunks_exact_mut(BLOCK * BLOCKS) {
            let mut tweaks = [0u128; BLOCKS];
            for place in &mut tweaks {
                *place = tweak;
                tweak = doubled(tweak);
            }
            xor(chunk, &tweaks);
            let (blocks, _) = Array::slice_as_chunks_mut(chunk);
            if decrypt {
                key.decrypt_blocks(blocks)
            } else {
                key.encrypt_blocks(blocks)
            }
            xor(chunk, &tweaks);
        }
    }
}

fn xor(chunk: &mut [u8], tweaks: &[u128; BLOCKS]) {
    let (blocks, _) = chunk.as_chunks_mut::<BLOCK>();
    for (block, tweak) in blocks.iter_mut().zip(tweaks) {
        *block = (u128::from_le_bytes(*block) ^ tweak).to_le_bytes();
    }
}

/// Times x in XTS's field: GF(2^128) modulo x^128 + x^7 + x^2 + x + 1.
#[inline(always)]
fn doubled(tweak: u128) -> u128 {
    (tweak << 1) ^ ((tweak >> 127) * 0x87)
}
