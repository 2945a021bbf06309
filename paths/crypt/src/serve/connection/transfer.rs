//! The bytes of requests: into pages, through the cipher, and to the disk or the client. Reads, writes and zeroes of a
//! connection.
use std::io;
use std::time::Instant;

use super::{Blocked, Connection, Context, Current, MAX_BYTES, MAX_EXTENTS, Part, SHORT};
use crate::Error;
use crate::nbd::{Extent, Fault, Request};
use crate::serve::buffer::Buffer;
use crate::serve::disk::{Op, Todo};
use crate::serve::memory::Patience;
use crate::serve::path::DataPath;
use crate::serve::requests::fault_of;

impl Connection {
    pub(super) fn begin_reading(&mut self, request: Request, context: &mut Context<'_>) {
        let memory = &context.path.memory;
        let (len, part) = (request.len as usize, memory.part());
        let mut buffers = Vec::new();
        for at in (0..len).step_by(part) {
            match memory.borrow(part.min(len - at)) {
                Some(buffer) => buffers.push(buffer),
                None => {
                    buffers.into_iter().for_each(|buffer| memory.give_back(buffer));
                    memory.note_short();
                    self.current = Some(Current::SlowRead { request, done: 0 });
                    return;
                }
            }
        }
        let flight = self.flights.open(request, buffers.len(), true);
        for (buffer, at) in buffers.into_iter().zip((0..).step_by(part)) {
            self.submit(Todo::Read, context.path.in_file(request.at + at), buffer, flight, context);
        }
    }

    /// A read without pages: reads the next part into the connection's own buffer.
    pub(super) fn go_on_reading(
        &mut self,
        request: Request,
        done: usize,
        context: &mut Context<'_>,
    ) -> Option<Blocked> {
        let rest = request.len as usize - done;
        if rest == 0 {
            return None;
        }
        self.current = Some(Current::SlowRead { request, done });
        if self.turn_left == 0 {
            return Some(Blocked::Turn);
        }
        // Once its header is sent, nothing else may be answered before its last byte, so other requests are finished
        // first.
        if self.flights.count() > 0 {
            return Some(Blocked::Disk);
        }
        let Some(mut buffer) = self.own.take() else {
            return Some(if self.outbox.len() > 0 { Blocked::Output } else { Blocked::Disk });
        };
        buffer.set_len(rest.min(SHORT));
        self.submit(Todo::Read, context.path.in_file(request.at + done as u64), buffer, usize::MAX, context);
        self.send(context);
        None
    }

    pub(super) fn slow_part_done(&mut self, mut op: Op, result: io::Result<()>, path: &DataPath) {
        let Some(Current::SlowRead { request, done }) = &mut self.current else {
            unreachable!("a connection's own buffer comes back, and nobody sent it")
        };
        let decrypted = match result {
            Ok(()) if op.is_plain => Ok(()),
            Ok(()) => path.decrypt(request.at + *done as u64, &mut op.buffer).map_err(|_| Fault::Io),
            Err(error) => Err(fault_of(&error)),
        };
        let (replies, request, is_first) = (self.session.replies(), *request, *done == 0);
        match decrypted {
            Ok(()) => {
                *done += op.buffer.len();
                if is_first {
                    self.outbox.write(|out| replies.before_data(&request, out));
                }
                self.outbox.data(op.buffer);
            }
            Err(fault) if is_first => {
                self.own = Some(op.buffer);
                self.current = None;
                self.outbox.write(|out| replies.error(request.cookie, fault, out));
            }
            // A part of the answer is sent, so the error can't be reported any more.
            Err(_) => self.die(path),
        }
    }

    /// Receives a write's bytes, encrypts them, and gives them to the disk.
    pub(super) fn go_on_writing(
        &mut self,
        request: Request,
        flight: usize,
        mut done: usize,
        mut part: Option<Part>,
        context: &mut Context<'_>,
    ) -> Option<Blocked> {
        let (path, len) = (context.path, request.len as usize);
        while done < len {
            let staged = self.end - self.start;
            let wanted = (len - done).min(path.memory.part());
            if part.is_none() && wanted > SHORT && staged < wanted {
                part = path.memory.borrow(wanted).map(|buffer| Part { buffer, got: 0 });
                if part.is_none() {
                    path.memory.note_short();
                }
            }
            let at = request.at + done as u64;
            let (count, secret) = if let Some(Part { buffer, got }) = &mut part {
                let count = staged.min(buffer.len() - *got);
                buffer.copy_in(*got, &self.stage[self.start..self.start + count]);
                self.start += count;
                *got += count;
                if *got < buffer.len() {
                    self.current = Some(Current::Write { request, flight, done, part });
                    return Some(Blocked::Input);
                }
                (buffer.len(), encrypted(&mut self.stalled, context, at, buffer.len(), || buffer.slices()))
            } else {
                let count = if staged >= wanted { wanted } else { wanted.min(SHORT) };
                if staged < count {
                    self.current = Some(Current::Write { request, flight, done, part });
                    return Some(Blocked::Input);
                }
                let bytes = &self.stage[self.start..self.start + count];
                (count, encrypted(&mut self.stalled, context, at, count, || std::iter::once(bytes)))
            };
            match secret {
                Ok(Some(secret)) => {
                    self.flights.more(flight);
                    self.submit(Todo::Write, path.in_file(at), secret, flight, context);
                }
                Ok(None) => {
                    self.current = Some(Current::Write { request, flight, done, part });
                    return Some(Blocked::Memory);
                }
                Err(fault) => self.flights.fail(flight, fault),
            }
            match part.take() {
                Some(part) => path.memory.give_back(part.buffer),
                None => self.start += count,
            }
            done += count;
        }
        self.flights.all_begun(flight);
        self.answer_if_done(flight, context);
        None
    }

    /// Zeroes are encrypted and written like any data, so that they are read as zeroes.
    pub(super) fn go_on_zeroing(
        &mut self,
        request: Request,
        flight: usize,
        mut done: usize,
        context: &mut Context<'_>,
    ) -> Option<Blocked> {
        let (path, len) = (context.path, request.len as usize);
        while done < len {
            let blocked = if self.turn_left == 0 {
                Some(Blocked::Turn)
            } else if self.bytes >= MAX_BYTES {
                Some(Blocked::Disk)
            } else {
                let (at, count) = (request.at + done as u64, (len - done).min(path.memory.part()));
                match taken(&mut self.stalled, context, |patience| path.encrypted_zeroes(at, count, patience)) {
                    Ok(Some(secret)) => {
                        self.flights.more(flight);
                        self.submit(Todo::Write, path.in_file(at), secret, flight, context);
                        done += count;
                        None
                    }
                    Ok(None) => Some(Blocked::Memory),
                    Err(fault) => {
                        self.flights.fail(flight, fault);
                        done = len;
                        None
                    }
                }
            };
            if blocked.is_some() {
                self.current = Some(Current::Zeroes { request, flight, done });
                return blocked;
            }
        }
        self.flights.all_begun(flight);
        self.answer_if_done(flight, context);
        None
    }
}

/// Takes pages of the pool for a part, at once or when it is this connection's turn. It waits in the pool only if this
/// worker has no pages on the disk that could come back (W2).
fn taken(
    stalled: &mut Option<Instant>,
    context: &mut Context<'_>,
    take: impl Fn(Patience) -> Result<Option<Buffer>, Error>,
) -> Result<Option<Buffer>, Fault> {
    let fault = |error| if matches!(error, Error::Memory(_)) { Fault::NoMemory } else { Fault::Io };
    if context.may_take
        && let Some(buffer) = take(Patience::None).map_err(fault)?
    {
        if let Some(since) = stalled.take() {
            context.path.memory.note_wait(since.elapsed());
        }
        return Ok(Some(buffer));
    }
    let since = *stalled.get_or_insert_with(Instant::now);
    if !context.may_take || context.engine.in_flight() + context.elsewhere > 0 {
        return Ok(None);
    }
    let taken = take(Patience::Wait).map_err(fault)?;
    if taken.is_some() {
        *stalled = None;
        context.path.memory.note_wait(since.elapsed());
    }
    Ok(taken)
}

fn encrypted<'a, P: Iterator<Item = &'a [u8]>>(
    stalled: &mut Option<Instant>,
    context: &mut Context<'_>,
    at: u64,
    len: usize,
    plain: impl Fn() -> P,
) -> Result<Option<Buffer>, Fault> {
    let path = context.path;
    taken(stalled, context, |patience| path.encrypted(at, len, plain(), patience))
}

/// The extents of a request's bytes in the file: data and holes. Holes do not read as zeroes, since they are decrypted.
pub(super) fn extents(path: &DataPath, request: &Request, block: u64) -> io::Result<Vec<Extent>> {
    let mut found = Vec::new();
    let (mut at, end) = (request.at, request.at + u64::from(request.len));
    while at < end && found.len() < MAX_EXTENTS {
        let (until, is_hole) = path.disk.extent(path.in_file(at), path.in_file(end))?;
        let until = until - path.in_file(0);
        // Whole blocks: a block that is partly a hole counts as data.
        let rounded = if is_hole { until / block * block } else { until.next_multiple_of(block) };
        let (until, is_hole) = if rounded > at { (rounded.min(end), is_hole) } else { ((at + block).min(end), false) };
        found.push(Extent { len: (until - at) as u32, is_hole, is_zero: false });
        at = until;
    }
    Ok(found)
}
