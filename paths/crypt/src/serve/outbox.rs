//! Bytes that are still to be sent to a client: answers, and the bytes of reads, in the pages where they were
//! decrypted.
use std::collections::VecDeque;
use std::io::IoSlice;

use super::buffer::{Buffer, Origin};
use super::disk::ENTRIES;
use super::memory::Memory;
use super::socket::{Moved, Socket};

/// Bytes of answers after which a new piece begins. A piece is kept until all of it is sent.
const ANSWERS: usize = 64 << 10;

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
    /// Bytes of all pieces that are not sent.
    left: usize,
}

impl Outbox {
    pub(super) fn len(&self) -> usize {
        self.left
    }

    /// Adds the bytes that `write` appends to a vector.
    pub(super) fn write<T>(&mut self, write: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        if !matches!(self.pieces.back(), Some(Piece::Bytes(bytes)) if bytes.len() < ANSWERS) {
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

    /// Sends as much as the client takes now. A connection's own buffer that was sent goes to `own`; other buffers are
    /// freed.
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
        while let Some(first) = self.pieces.front_mut() {
            let len = first.len();
            if let Piece::Data(buffer) = first {
                // The client has them; now they are in the processor's cache.
                buffer.wipe(self.sent.min(len));
            }
            if self.sent < len {
                return;
            }
            self.sent -= len;
            if let Some(Piece::Data(buffer)) = self.pieces.pop_front() {
                give_back(buffer, memory, own);
            }
        }
    }

    /// Drops everything; the client is gone.
    pub(super) fn clear(&mut self, memory: &Memory, own: &mut Option<Buffer>) {
        for piece in self.pieces.drain(..) {
            if let Piece::Data(buffer) = piece {
                give_back(buffer, memory, own);
            }
        }
        (self.sent, self.left) = (0, 0);
    }
}

fn give_back(mut buffer: Buffer, memory: &Memory, own: &mut Option<Buffer>) {
    match buffer.origin {
        Origin::Connection => {
            buffer.wipe(buffer.len());
            *own = Some(buffer);
        }
        _ => memory.give_back(buffer),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::serve::fixture::path;

    /// A client that never takes all of its answers still gets them, and sent bytes are not kept.
    #[test]
    fn sent_answers_are_freed_while_others_wait() {
        const ANSWER: usize = 1000;
        let (path, mut own, mut outbox) = (path(16, 16), None, Outbox::default());
        let (mut client, server) = UnixStream::pair().unwrap();
        let mut socket = Socket::unix(server).unwrap();
        let (mut written, mut taken) = (0u32, 0u32);
        while taken < 10_000 {
            outbox.write(|out| out.extend(written.to_be_bytes().repeat(ANSWER / 4)));
            written += 1;
            let moved = outbox.send(&mut socket, &path.memory, &mut own);
            assert!(matches!(moved, Moved::Bytes(_) | Moved::NotNow), "{moved:?}");
            if outbox.len() < ANSWERS {
                continue;
            }
            let mut answer = [0; ANSWER];
            client.read_exact(&mut answer).unwrap();
            assert!(answer.chunks(4).all(|bytes| bytes == taken.to_be_bytes()), "answer {taken}");
            taken += 1;
            let kept = |piece: &Piece| if let Piece::Bytes(bytes) = piece { bytes.capacity() } else { 0 };
            let kept: usize = outbox.pieces.iter().map(kept).sum();
            assert!(kept <= 8 * ANSWERS, "{kept} bytes are kept for {} that are left", outbox.len());
        }
    }
}
