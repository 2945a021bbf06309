//! Far NBD servers that the fuzzer plays, for the client that a volume behind an NBD URI uses: each request gets its own
//! reply or none, once, and nothing is lost.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| pagemill_crypt::fuzzing::check_far_end(bytes));
