//! The tests of `pagemill-crypt` by its public interface, in one program.
#[macro_use]
#[path = "../../../tests/own_process.rs"]
mod own_process;

mod common;

mod advice;
mod backup;
mod cached;
mod cipher;
mod commands;
mod cryptsetup;
mod data;
mod devices;
mod erase;
mod exports;
mod far;
mod far_headers;
mod far_lies;
mod fio;
mod headers;
mod key_files;
mod keys_served;
mod mount;
mod nbd;
mod nbd_clients;
mod odd_volumes;
mod resize;
mod serve;
mod serve_any_bytes;
mod serve_disk;
mod serve_hostile;
mod tls;
mod unknown_headers;
