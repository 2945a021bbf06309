//! An NFSv3 server (RFC 1813) on the page cache.
#![expect(dead_code, reason = "the connections are not there yet")]

mod call;
mod calls;
mod credentials;
mod data;
mod error;
mod export;
mod handles;
mod mount;
mod nfs;
mod pages;
mod service;
mod status;
mod xdr;

pub use error::Error;
