//! Answers to requests: simple replies, or chunks if structured replies were negotiated.
use super::negotiate::ALLOCATION_ID;
use super::requests::{Command, Request};

pub(super) const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// This chunk is the last one of its reply.
const DONE: u16 = 1;

mod chunk {
    pub(super) const NONE: u16 = 0;
    pub(super) const OFFSET_DATA: u16 = 1;
    pub(super) const BLOCK_STATUS: u16 = 5;
    pub(super) const ERROR: u16 = (1 << 15) + 1;
}

/// The protocol's errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    /// The export is read-only.
    NotPermitted = 1,
    /// The disk failed.
    Io = 5,
    /// No memory for it now.
    NoMemory = 12,
    /// The request is invalid.
    Invalid = 22,
    /// The disk is full, or the request goes beyond its end.
    NoSpace = 28,
    /// What is asked for would not be fast.
    NotSupported = 95,
    /// The server stops.
    ShuttingDown = 108,
}

/// A part of an export, as `base:allocation` sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes.
    pub len: u32,
    /// Nothing was ever written there.
    pub is_hole: bool,
    /// It reads as zeroes. (A hole under a cipher does not.)
    pub is_zero: bool,
}

/// How a session's requests are answered. It is small and copied with each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replies {
    pub(super) structured: bool,
}

impl Replies {
    /// Answers a request that is done; not for reads and block status.
    pub fn done(self, cookie: u64, out: &mut Vec<u8>) {
        match self.structured {
            true => chunk(cookie, chunk::NONE, 0, out),
            false => simple(cookie, 0, out),
        }
    }

    /// Answers a request that failed.
    pub fn error(self, cookie: u64, fault: Fault, out: &mut Vec<u8>) {
        match self.structured {
            true => {
                chunk(cookie, chunk::ERROR, 6, out);
                out.extend((fault as u32).to_be_bytes());
                out.extend(0u16.to_be_bytes()); // No text.
            }
            false => simple(cookie, fault as u32, out),
        }
    }

    /// The header before the bytes of a read; exactly `request.len` bytes follow it.
    pub fn before_data(self, request: &Request, out: &mut Vec<u8>) {
        match self.structured {
            true => {
                chunk(request.cookie, chunk::OFFSET_DATA, 8 + request.len, out);
                out.extend(request.at.to_be_bytes());
            }
            false => simple(request.cookie, 0, out),
        }
    }

    /// Answers with extents, from the request's first byte on. Extents beyond its end are left out, and so are all but
    /// the first if the client asked for one. Without any extent the answer is an error, since the protocol demands
    /// one.
    pub fn block_status(self, request: &Request, extents: &[Extent], out: &mut Vec<u8>) {
        let one = matches!(request.command, Command::BlockStatus { one: true });
        let mut left = request.len;
        let mut told = Vec::new();
        for extent in extents.iter().filter(|extent| extent.len > 0).take(if one { 1 } else { usize::MAX }) {
            if left == 0 {
                break;
            }
            let len = extent.len.min(left);
            left -= len;
            told.extend(len.to_be_bytes());
            told.extend((u32::from(extent.is_hole) | u32::from(extent.is_zero) << 1).to_be_bytes());
        }
        if told.is_empty() {
            return self.error(request.cookie, Fault::Io, out);
        }
        chunk(request.cookie, chunk::BLOCK_STATUS, 4 + told.len() as u32, out);
        out.extend(ALLOCATION_ID.to_be_bytes());
        out.extend(told);
    }
}

fn simple(cookie: u64, error: u32, out: &mut Vec<u8>) {
    out.extend(SIMPLE_MAGIC.to_be_bytes());
    out.extend(error.to_be_bytes());
    out.extend(cookie.to_be_bytes());
}

/// A chunk's header. Each reply here has only one chunk.
fn chunk(cookie: u64, kind: u16, len: u32, out: &mut Vec<u8>) {
    out.extend(CHUNK_MAGIC.to_be_bytes());
    out.extend(DONE.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(cookie.to_be_bytes());
    out.extend(len.to_be_bytes());
}
