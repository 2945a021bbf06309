//! LUKS headers that the fuzzer writes: both versions are read, and what reads is opened, within tight limits.
//!
//! A LUKS2 copy has a checksum, which no fuzzer guesses: the input changes metadata that is right, a few bytes at a place, and
//! the rest is put around it. The first byte says which.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemill_crypt::kdf::Limits;
use pagemill_crypt::{Luks, luks1, luks2};
use sha2::Digest;

/// What a volume of `pagemill crypt format --kdf pbkdf2` says.
const METADATA: &str = r#"{"config":{"json_size":"12288","keyslots_size":"16744448"},"digests":{"0":{"digest":"Jab65GC0fSiIObyU7g6c/O9oq/RjXrSseLGRHdFLJ5U=","hash":"sha256","iterations":1000,"keyslots":["0","1"],"salt":"S+Ut+3YHNR8g2SnOH0lBINtGk6VtbkJ9kJhHNNyMK10=","segments":["0"],"type":"pbkdf2"}},"keyslots":{"0":{"af":{"hash":"sha256","stripes":4000,"type":"luks1"},"area":{"encryption":"aes-xts-plain64","key_size":32,"offset":"32768","size":"131072","type":"raw"},"kdf":{"hash":"sha256","iterations":1000,"salt":"FbhMMf1ZYfjYS1ZhzOhEMsdL2HtRdt2orH2ZWf1M+Xk=","type":"pbkdf2"},"key_size":32,"type":"luks2"},"1":{"af":{"hash":"sha1","stripes":40,"type":"luks1"},"area":{"encryption":"aes-xts-plain64","key_size":64,"offset":"163840","size":"4096","type":"raw"},"kdf":{"cpus":1,"memory":32,"salt":"FbhMMf1ZYfjYS1ZhzOhEMsdL2HtRdt2orH2ZWf1M+Xk=","time":1,"type":"argon2id"},"key_size":64,"type":"luks2","priority":2}},"segments":{"0":{"encryption":"aes-xts-plain64","iv_tweak":"0","offset":"16777216","sector_size":512,"size":"dynamic","type":"crypt"}},"tokens":{}}"#;

/// [`METADATA`] with each change: a place of two bytes, how many bytes it replaces and by how many, and those.
fn changed(mut changes: &[u8]) -> Vec<u8> {
    let mut json = METADATA.as_bytes().to_vec();
    while let Some((&[low, high, lengths], rest)) = changes.split_first_chunk() {
        let at = usize::from(u16::from_le_bytes([low, high])) % json.len();
        let (old, new) = (usize::from(lengths >> 4), usize::from(lengths & 15).min(rest.len()));
        json.splice(at..json.len().min(at + old), rest[..new].iter().copied());
        changes = &rest[new..];
    }
    json
}

const HEADER: usize = 16 << 10;
/// A header's, and some key material's.
const FILE: usize = 256 << 10;

/// The primary copy of a LUKS2 header with `json` in it.
fn luks2_copy(json: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; FILE];
    bytes[..8].copy_from_slice(b"LUKS\xba\xbe\0\x02");
    bytes[8..16].copy_from_slice(&(HEADER as u64).to_be_bytes());
    bytes[72..78].copy_from_slice(b"sha256");
    let len = json.len().min(HEADER - 4096 - 1);
    bytes[4096..4096 + len].copy_from_slice(&json[..len]);
    let sum = sha2::Sha256::digest(&bytes[..HEADER]);
    bytes[448..480].copy_from_slice(&sum);
    bytes
}

fn open(bytes: &[u8]) {
    let Ok(luks) = Luks::read(&bytes) else { return };
    let limits = Limits { memory_kib: 64, work: 2000 };
    for detached in [false, true] {
        let _ = luks.geometry(FILE as u64, detached);
    }
    let _ = luks.unlock(&bytes, b"passphrase", None, &limits);
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&choice, bytes)) = bytes.split_first() else { return };
    match choice % 3 {
        0 => {
            let _ = luks2::Header::parse(bytes);
        }
        1 if bytes.is_empty() => {
            assert!(Luks::read(&luks2_copy(METADATA.as_bytes()).as_slice()).is_ok(), "it begins right")
        }
        1 => open(&luks2_copy(&changed(bytes))),
        _ => {
            let mut file = vec![0; FILE];
            let len = bytes.len().min(luks1::HEADER - 8);
            file[8..8 + len].copy_from_slice(&bytes[..len]);
            file[..8].copy_from_slice(b"LUKS\xba\xbe\0\x01");
            open(&file);
        }
    }
});
