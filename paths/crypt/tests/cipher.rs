//! AES-XTS: the standard's vectors, and every backend against every other.
use pagemill_crypt::cipher::Backend;
use pagemill_crypt::{SectorSize, Sectors, Xts};
use proptest::prelude::*;

struct Vector {
    name: String,
    key: Vec<u8>,
    sector: u64,
    cipher: Vec<u8>,
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn vectors() -> Vec<Vector> {
    let mut vectors: Vec<Vector> = Vec::new();
    for line in include_str!("vectors/ieee1619.txt").lines().filter(|line| !line.starts_with('#')) {
        match line.split_once(' ') {
            Some(("vector", name)) => {
                vectors.push(Vector { name: name.to_owned(), key: Vec::new(), sector: 0, cipher: Vec::new() });
            }
            Some(("key", key)) => vectors.last_mut().unwrap().key = unhex(key),
            Some(("sector", number)) => vectors.last_mut().unwrap().sector = u64::from_str_radix(number, 16).unwrap(),
            _ if line.is_empty() => {}
            _ => vectors.last_mut().unwrap().cipher.extend(unhex(line)),
        }
    }
    vectors
}

fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| {
        let is_here = backend.is_here();
        if !is_here {
            eprintln!("skipped: the backend {backend:?}: this processor lacks its instructions");
        }
        is_here
    })
}

#[test]
fn every_backend_gives_the_standards_vectors() {
    let plain: Vec<u8> = (0..512).map(|i| i as u8).collect();
    let vectors = vectors();
    assert_eq!(vectors.len(), 6);
    for backend in backends() {
        for Vector { name, key, sector, cipher } in &vectors {
            let xts = Xts::with_backend(key, backend).unwrap();
            assert_eq!(xts.backend(), backend);
            let sectors = Sectors { size: SectorSize::SMALLEST, first: *sector, step: 1 };
            let mut out = vec![0; 512];
            xts.encrypt(sectors, &plain, &mut out).unwrap();
            assert_eq!(&out, cipher, "vector {name} with {backend:?}");
            xts.decrypt_in_place(sectors, &mut out).unwrap();
            assert_eq!(out, plain, "vector {name} with {backend:?}");
        }
    }
}

#[test]
fn partial_sectors_and_wrong_key_lengths_are_refused() {
    let xts = Xts::new(&[1; 32]).unwrap();
    let sectors = Sectors { size: SectorSize::LARGEST, first: 0, step: 8 };
    assert!(xts.encrypt(sectors, &[0; 4096], &mut [0; 8192]).is_err());
    assert!(xts.encrypt_in_place(sectors, &mut [0; 512]).is_err());
    assert!(xts.encrypt_in_place(sectors, &mut []).is_ok());
    for wrong in [0, 16, 31, 48, 63, 65, 128] {
        assert!(Xts::new(&vec![0; wrong]).is_err(), "{wrong} bytes");
    }
}

/// One sector a call by the portable backend, as the reference.
fn by_the_sector(key: &[u8], sectors: Sectors, plain: &[u8]) -> Vec<u8> {
    let xts = Xts::with_backend(key, Backend::Portable).unwrap();
    let mut out = plain.to_vec();
    for (i, sector) in (0..).zip(out.chunks_mut(sectors.size.bytes())) {
        let first = sectors.first.wrapping_add(sectors.step.wrapping_mul(i));
        xts.encrypt_in_place(Sectors { first, ..sectors }, sector).unwrap();
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn every_backend_gives_the_same_bytes(
        key in prop_oneof![prop::collection::vec(any::<u8>(), 32), prop::collection::vec(any::<u8>(), 64)],
        size in prop::sample::select(vec![512u64, 1024, 2048, 4096]),
        count in 0usize..70,
        // Also around the end of the sector numbers' range, where they wrap, as in the kernel.
        first in prop_oneof![any::<u64>(), 0u64..100, (u64::MAX - 100)..=u64::MAX],
        counts_units in any::<bool>(),
        seed in any::<u8>(),
    ) {
        let size = SectorSize::new(size).unwrap();
        let step = if counts_units { size.bytes() as u64 / 512 } else { 1 };
        let sectors = Sectors { size, first, step };
        let plain: Vec<u8> = (0..count * size.bytes()).map(|i| (i as u64).wrapping_mul(2_654_435_761) as u8 ^ seed).collect();
        let expected = by_the_sector(&key, sectors, &plain);
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_here()) {
            let xts = Xts::with_backend(&key, backend).unwrap();
            let mut out = vec![0; plain.len()];
            xts.encrypt(sectors, &plain, &mut out).unwrap();
            prop_assert!(out == expected, "{backend:?}");
            let mut in_place = plain.clone();
            xts.encrypt_in_place(sectors, &mut in_place).unwrap();
            prop_assert!(in_place == expected, "{backend:?} in place");
            xts.decrypt(sectors, &expected, &mut out).unwrap();
            prop_assert!(out == plain, "{backend:?} back");
            xts.decrypt_in_place(sectors, &mut in_place).unwrap();
            prop_assert!(in_place == plain, "{backend:?} back in place");
        }
    }
}
