//! The tests of the program `pagemill`, in one program.
mod common;

mod bench_crypt;
mod bench_rpc;
mod copy;
mod copy_faults;
mod copy_refused;
mod crypt_exports;
mod crypt_far;
mod crypt_memory;
mod crypt_mount;
mod crypt_serve;
mod crypt_service;
mod crypt_soak;
mod nfs;
mod program;
mod read;
mod stress;
mod top;
mod xdp;
