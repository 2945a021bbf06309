//! NFS clients that the fuzzer plays: bytes as the transport takes them, and arguments of every procedure.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    pagemill_nfs::fuzzing::check_bytes(bytes);
    pagemill_nfs::fuzzing::check_procedure(bytes);
});
