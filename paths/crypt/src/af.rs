//! The anti-forensic splitter of LUKS spreads a key over thousands of stripes, all of which are needed to get it back.
//! So wiping a keyslot works even if the drive keeps old copies of a few of its sectors.
use zeroize::Zeroize;

use crate::hash::Hash;
use crate::secret::Locked;
use crate::{Error, SectorSize, Sectors, Xts};

/// Stripes of new keyslots, as in the formats.
pub(crate) const STRIPES: usize = 4000;

/// Bytes that a key of `len` bytes takes in a keyslot: all stripes, in whole sectors.
pub(crate) fn material_len(len: usize, stripes: usize) -> usize {
    (len * stripes).next_multiple_of(SectorSize::SMALLEST.bytes())
}

/// The material of a keyslot: `key`, spread and encrypted with `slot_key`.
pub(crate) fn seal(slot_key: &[u8], key: &[u8], stripes: usize, hash: Hash) -> Result<Locked, Error> {
    let mut material = Locked::zeroed(material_len(key.len(), stripes));
    split(key, stripes, hash, &mut material)?;
    Xts::new(slot_key)?.encrypt_in_place(SECTORS, &mut material)?;
    Ok(material)
}

/// The key of `len` bytes from a keyslot's `material`. A wrong `slot_key` gives a wrong key.
pub(crate) fn open(
    slot_key: &[u8],
    mut material: Locked,
    len: usize,
    stripes: usize,
    hash: Hash,
) -> Result<Locked, Error> {
    Xts::new(slot_key)?.decrypt_in_place(SECTORS, &mut material)?;
    Ok(merge(&material, len, stripes, hash))
}

/// How key material is encrypted: as a small volume of its own.
const SECTORS: Sectors = Sectors { size: SectorSize::SMALLEST, first: 0, step: 1 };

/// Spreads `key` over `stripes` times its length, in `out`, which may be longer.
fn split(key: &[u8], stripes: usize, hash: Hash, out: &mut [u8]) -> Result<(), Error> {
    let (random, last) = out[..key.len() * stripes].split_at_mut(key.len() * (stripes - 1));
    crate::secret::random(random)?;
    let mut mixed = mixed(random, key.len(), hash);
    for ((last, mixed), key) in last.iter_mut().zip(mixed.iter()).zip(key) {
        *last = mixed ^ key;
    }
    mixed.zeroize();
    Ok(())
}

/// The key of `len` bytes that was spread over the first `stripes` stripes of `material`.
fn merge(material: &[u8], len: usize, stripes: usize, hash: Hash) -> Locked {
    let (random, last) = material[..len * stripes].split_at(len * (stripes - 1));
    let mut key = mixed(random, len, hash);
    for (key, last) in key.iter_mut().zip(last) {
        *key ^= last;
    }
    key
}

/// Xors all stripes but the last, and diffuses the result after each.
fn mixed(stripes: &[u8], len: usize, hash: Hash) -> Locked {
    let mut sum = Locked::zeroed(len);
    let mut diffused = Locked::zeroed(len);
    for stripe in stripes.chunks_exact(len) {
        for (sum, byte) in sum.iter_mut().zip(stripe) {
            *sum ^= byte;
        }
        // Each block of a digest's size is replaced by the digest of its number and its bytes. The last block may be
        // shorter.
        let parts = sum.chunks(hash.digest_len()).zip(diffused.chunks_mut(hash.digest_len()));
        for (i, (part, out)) in (0u32..).zip(parts) {
            hash.digest_into(&[&i.to_be_bytes(), part], out);
        }
        std::mem::swap(&mut sum, &mut diffused);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stripe_is_needed_to_open_a_key() {
        let key: Vec<u8> = (0..64).collect();
        for hash in [Hash::Sha1, Hash::Sha256, Hash::Sha512] {
            let mut material = vec![0; 64 * 50 + 100];
            split(&key, 50, hash, &mut material).unwrap();
            assert_eq!(&merge(&material, 64, 50, hash)[..], key);
            for stripe in 0..50 {
                material[stripe * 64 + 3] ^= 1;
                assert_ne!(&merge(&material, 64, 50, hash)[..], key, "stripe {stripe}");
                material[stripe * 64 + 3] ^= 1;
            }
        }
        let mut single = vec![0; 64];
        split(&key, 1, Hash::Sha256, &mut single).unwrap();
        assert_eq!(single, key);
    }
}
