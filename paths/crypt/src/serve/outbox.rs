//! What a client has still to take: answers, and the bytes of reads in the pages where they were decrypted.
use std::collections::VecDeque;
use std::io::IoSlice;

use super::buffer::{Buffer, Origin};
use super::disk::ENTRIES;
use super::memory::Memory;
use super::socket::{Moved, Socket};

#[derive(Debug)]
enum Piece {
    Bytes(Vec<u8>),
    Data(Buffer),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Data(buffer) => buffer.len(),
        }
    }
}

/// Pieces in their order.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that are sent.
    sent: usize,
    /// Bytes that are not.
    left: usize,
}

impl Outbox {
    pub(super) fn len(&self) -> usize {
        self.left
    }

    /// Adds what `write` adds to a vector.
    pub(super) fn write<T>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        if !matches!(self.pieces.back(), Some(Piece::Bytes(_))) {
            self.pieces.push_back(Piece::Bytes(Vec::new()));
        }
        let Some(Piece::Bytes(bytes)) = self.pieces.back_mut() else { unreachable!("it was just pushed") };
        let before = bytes.len();
        let result = write(bytes);
        let is_empty = bytes.is_empty();
        self.left += bytes.len() - before;
        if is_empty {
            self.pieces.pop_back();
        }
        result
    }

    /// Adds the bytes of a read.
    pub(super) fn data(&mut self, buffer: Buffer) {
        self.left += buffer.len();
        self.pieces.push_back(Piece::Data(buffer));
    }

    /// Sends as much as the client takes now. A connection's own buffer that was sent goes to `own`, others back.
    pub(super) fn send(&mut self, socket: &mut Socket, memory: &Memory, own: &mut Option<Buffer>) -> Moved {
        let mut total = 0;
        while self.left > 0 {
            let mut vector = Vec::new();
            let mut from = self.sent;
            for piece in &self.pieces {
                if vector.len() >= ENTRIES {
                    break;
                }
                match piece {
                    Piece::Bytes(bytes) => vector.push(IoSlice::new(&bytes[from..])),
                    Piece::Data(buffer) => buffer.window(from, ENTRIES, &mut vector),
                }
                from = 0;
            }
            match socket.send(&vector) {
                Moved::Bytes(n) => {
                    total += n;
                    self.advance(n, memory, own);
                }
                Moved::NotNow if total > 0 => break,
                other => return other,
            }
        }
        Moved::Bytes(total)
    }

    fn advance(&mut self, count: usize, memory: &Memory, own: &mut Option<Buffer>) {
        self.left -= count;
        self.sent += count;
        while let Some(first) = self.pieces.front() {
            let len = first.len();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            if let Some(Piece::Data(buffer)) = self.pieces.pop_front() {
                give_back(buffer, memory, own);
            }
        }
    }

    /// Forgets everything: the client is gone.
    pub(super) fn clear(&mut self, memory: &Memory, own: &mut Option<Buffer>) {
        for piece in self.pieces.drain(..) {
            if let Piece::Data(buffer) = piece {
                give_back(buffer, memory, own);
            }
        }
        (self.sent, self.left) = (0, 0);
    }
}

fn give_back(buffer: Buffer, memory: &Memory, own: &mut Option<Buffer>) {
    match buffer.origin {
        Origin::Connection => *own = Some(buffer),
        _ => memory.give_back(buffer),
    }
}
