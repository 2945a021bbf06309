//! The writes that a far end has answered and not flushed, and which requests may be under way together.
//!
//! A far end that is killed may lose what it has answered and not flushed, as a machine that loses power. So these writes
//! are kept here, encrypted as they were sent, until a flush that was sent after their answer has succeeded. When the far
//! end is back, they are written again before anything else.
//!
//! Invariants:
//! - Writes and trims that overlap are never under way together. So an order of begin is an order of effect, and writing
//!   what is kept again in the order of its numbers gives what was there (F1).
//! - A flush drops the writes that were answered before it was sent, and no others (F2).
//! - The bytes that are kept and under way are at most the limit, or one write (F3).
//! - Once a far end has answered a flush with an error, or a write that it had answered before, no flush succeeds any
//!   more, which is D1 of `disk` (F4). Then nothing is kept: nothing is promised any more.
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A write's bytes, encrypted.
pub(super) type Bytes = Arc<Vec<u8>>;

#[derive(Debug)]
struct Write {
    at: u64,
    bytes: Bytes,
    /// How many writes had been answered when this was; `None` while it is under way.
    answered: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Kept {
    limit: usize,
    /// The next number of a write or trim.
    next: u64,
    /// The writes by their numbers.
    writes: BTreeMap<u64, Write>,
    /// The places of the writes and trims that are under way.
    spans: BTreeMap<u64, Range<u64>>,
    /// Bytes of `writes`.
    bytes: usize,
    answers: u64,
    /// A flush is under way, and covers so many answers.
    flush: Option<u64>,
    has_lost: bool,
}

impl Kept {
    pub(super) fn new(limit: usize) -> Self {
        let (writes, spans) = (BTreeMap::new(), BTreeMap::new());
        Self { limit, next: 0, writes, spans, bytes: 0, answers: 0, flush: None, has_lost: false }
    }

    /// Whether a write or trim of these bytes may begin (F1, F3).
    pub(super) fn may_begin(&self, place: &Range<u64>, bytes: usize) -> bool {
        let is_free = self.spans.values().all(|span| span.end <= place.start || place.end <= span.start);
        is_free && (bytes == 0 || self.bytes == 0 || self.bytes + bytes <= self.limit)
    }

    /// Begins a write, or without bytes a trim. Returns its number.
    pub(super) fn begin(&mut self, place: Range<u64>, bytes: Option<Bytes>) -> u64 {
        let number = self.next;
        self.next += 1;
        if let Some(bytes) = bytes {
            self.bytes += bytes.len();
            self.writes.insert(number, Write { at: place.start, bytes, answered: None });
        }
        self.spans.insert(number, place);
        number
    }

    /// The far end has answered; `is_done` if without an error. What it refused is not kept, and neither is a write that
    /// is on its disk already.
    pub(super) fn answered(&mut self, number: u64, is_done: bool, is_durable: bool) {
        self.spans.remove(&number);
        let Some(write) = self.writes.get_mut(&number) else { return };
        match write.answered {
            // It is written again, and was answered before.
            Some(_) if is_done => {}
            Some(_) => self.lose(),
            None if is_done && !is_durable && !self.has_lost => {
                self.answers += 1;
                write.answered = Some(self.answers);
            }
            None => self.forget(number),
        }
    }

    fn forget(&mut self, number: u64) {
        self.bytes -= self.writes.remove(&number).map_or(0, |write| write.bytes.len());
    }

    /// Whether there is so much that it is time for a flush.
    pub(super) fn wants_flush(&self) -> bool {
        let is_much = self.bytes >= self.limit / 2 && !self.has_lost && self.flush.is_none();
        is_much && self.writes.values().any(|write| write.answered.is_some())
    }

    /// Whether a flush may begin: one at a time, so that none succeeds beside one that fails.
    pub(super) fn may_flush(&self) -> bool {
        self.flush.is_none()
    }

    pub(super) fn begin_flush(&mut self) {
        self.flush = Some(self.answers);
    }

    /// The far end has answered a flush (F2).
    pub(super) fn flushed(&mut self, is_done: bool) {
        let Some(covered) = self.flush.take() else { return };
        if !is_done {
            return self.lose();
        }
        let done = |write: &Write| write.answered.is_some_and(|answered| answered <= covered);
        let done: Vec<u64> = self.writes.iter().filter(|(_, write)| done(write)).map(|(&number, _)| number).collect();
        done.into_iter().for_each(|number| self.forget(number));
    }

    /// A flush would promise what is not there (F4).
    fn lose(&mut self) {
        self.has_lost = true;
        let answered = self.writes.iter().filter(|(_, write)| write.answered.is_some());
        let answered: Vec<u64> = answered.map(|(&number, _)| number).collect();
        answered.into_iter().for_each(|number| self.forget(number));
    }

    pub(super) fn has_lost(&self) -> bool {
        self.has_lost
    }

    /// The connections are lost: what was under way begins anew, and what was answered is written again. Returns the
    /// latter, in order.
    pub(super) fn start_over(&mut self) -> Vec<(u64, u64, Bytes)> {
        self.spans.clear();
        self.flush = None;
        let begun: Vec<u64> =
            self.writes.iter().filter(|(_, write)| write.answered.is_none()).map(|(&number, _)| number).collect();
        begun.into_iter().for_each(|number| self.forget(number));
        self.writes.iter().map(|(&number, write)| (number, write.at, Arc::clone(&write.bytes))).collect()
    }

    /// Begins to write a kept write again, unless it overlaps one under way.
    pub(super) fn begin_again(&mut self, number: u64, place: Range<u64>) -> bool {
        let may_begin = self.may_begin(&place, 0);
        if may_begin {
            self.spans.insert(number, place);
        }
        may_begin
    }

    /// How many writes are kept.
    pub(super) fn count(&self) -> usize {
        self.writes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(kept: &mut Kept, at: u64, bytes: &[u8]) -> u64 {
        kept.begin(at..at + bytes.len() as u64, Some(Arc::new(bytes.to_vec())))
    }

    fn is_kept(kept: &mut Kept) -> Vec<u64> {
        kept.start_over().into_iter().map(|(number, ..)| number).collect()
    }

    #[test]
    fn a_flush_drops_what_was_answered_before_it_was_sent() {
        let mut kept = Kept::new(1 << 20);
        let numbers: Vec<u64> = (0..4).map(|at| write(&mut kept, at * 512, &[1; 512])).collect();
        kept.answered(numbers[1], true, false);
        kept.begin_flush();
        assert!(!kept.may_flush());
        // Its answer comes after the flush was sent: the flush may not cover it.
        kept.answered(numbers[0], true, false);
        kept.answered(numbers[2], false, false);
        kept.flushed(true);
        assert!(kept.may_flush() && !kept.has_lost());
        // The last one is still under way, and begins anew elsewhere; the third was refused.
        assert_eq!((kept.count(), is_kept(&mut kept)), (2, vec![numbers[0]]));
    }

    #[test]
    fn overlapping_writes_wait_for_each_other() {
        let mut kept = Kept::new(1 << 20);
        let first = write(&mut kept, 512, &[1; 1024]);
        for (place, may_begin) in [(0..512, true), (0..513, false), (1535..1600, false), (1536..1600, true)] {
            assert_eq!(kept.may_begin(&place, 1), may_begin, "{place:?}");
        }
        kept.answered(first, true, false);
        let trim = kept.begin(0..4096, None);
        assert!(!kept.may_begin(&(4095..4096), 1));
        kept.answered(trim, true, false);
        assert!(kept.may_begin(&(4095..4096), 1));
        assert_eq!(is_kept(&mut kept), [first], "a trim is not kept");
    }

    #[test]
    fn kept_bytes_are_bounded_and_ask_for_a_flush_at_half_the_limit() {
        let mut kept = Kept::new(4096);
        assert!(kept.may_begin(&(0..9999), 9999), "one write of any length");
        let numbers = [0, 1024].map(|at| write(&mut kept, at, &[1; 1024]));
        assert!(!kept.wants_flush(), "nothing is answered: nothing would become free");
        numbers.into_iter().for_each(|number| kept.answered(number, true, false));
        assert!(kept.wants_flush());
        assert!(kept.may_begin(&(8192..10240), 2048) && !kept.may_begin(&(8192..10241), 2049));
        kept.begin_flush();
        assert!(!kept.wants_flush());
        kept.flushed(true);
        assert!(kept.may_begin(&(8192..12288), 4096));
        // A durable write is on the disk.
        let durable = write(&mut kept, 0, &[1; 4096]);
        kept.answered(durable, true, true);
        assert_eq!(kept.count(), 0);
    }

    #[test]
    fn what_was_under_way_on_lost_connections_may_begin_anew() {
        let mut kept = Kept::new(4096);
        let number = write(&mut kept, 0, &[1; 4096]);
        kept.begin(8192..9000, None);
        kept.begin_flush();
        assert!(!kept.may_begin(&(0..512), 512) && !kept.may_begin(&(8192..8193), 0) && !kept.may_flush());
        assert!(is_kept(&mut kept).is_empty(), "nothing was answered");
        assert!(kept.may_begin(&(0..4096), 4096) && kept.may_begin(&(8192..8193), 0) && kept.may_flush());
        // A late answer to the old one, if there were any, is nobody's.
        kept.answered(number, true, false);
        assert_eq!(kept.count(), 0);
    }

    #[test]
    fn a_failed_flush_or_rewrite_is_remembered_and_nothing_is_kept_after_it() {
        for again in [false, true] {
            let mut kept = Kept::new(4096);
            let number = write(&mut kept, 0, &[1; 512]);
            kept.answered(number, true, false);
            match again {
                true => {
                    assert_eq!(is_kept(&mut kept), [number]);
                    assert!(kept.begin_again(number, 0..512) && !kept.begin_again(number + 1, 511..600));
                    kept.answered(number, false, false);
                }
                false => {
                    kept.begin_flush();
                    kept.flushed(false);
                }
            }
            assert!(kept.has_lost());
            for at in 0..100 {
                assert!(kept.may_begin(&(at * 512..(at + 1) * 512), 512));
                let number = write(&mut kept, at * 512, &[1; 512]);
                kept.answered(number, true, false);
            }
            assert_eq!(kept.count(), 0);
        }
    }
}
