//! A controller in memory, for tests: of this crate, and of programs. It reads queues, lists and data at the addresses
//! that the driver gives it, by the specification and without the driver's code. It records what a real controller
//! would refuse, and can be made to misbehave.
use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pagemill::Allocator;

use crate::Error;
use crate::bus::Bus;
use crate::prp::Prp;
use crate::spec::{
    ACQ, AQA, ASQ, CAP, CC, CC_EN, CC_SHAPE, CC_SHN_NORMAL, CSTS, CSTS_RDY, CSTS_SHST_DONE, DOORBELLS, FUA, PAGE, VS,
    admin, io,
};
use crate::transfer::Random;

/// The outcome of an I/O command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "only this crate's tests let commands fail"))]
pub(crate) enum Fate {
    /// It succeeds.
    Done,
    /// It fails with this status.
    Fails(u16),
    /// It never comes back by itself.
    Lost,
}

/// A function that changes the controller's output.
type Change<N, T> = Box<dyn Fn(N, &mut T) + Send>;

/// How it behaves.
pub(crate) struct Behaviour {
    /// The outcome of the n-th I/O command, counted from 0 over all queues and resets.
    pub(crate) fate: Box<dyn Fn(u64) -> Fate + Send>,
    /// Changes the double words of a completion before it is written.
    pub(crate) lie: Change<u64, [u32; 4]>,
    /// An Abort completes the lost command.
    pub(crate) aborts: bool,
    /// Aborts are not answered.
    pub(crate) holds_aborts: bool,
    /// The number of its interrupts.
    pub(crate) vectors: u16,
    /// After this many admin commands none is answered.
    pub(crate) admins: u64,
    /// It does not stop when it is disabled.
    pub(crate) is_stuck: bool,
    /// Whether the function can be reset.
    pub(crate) can_reset: bool,
    /// Whether a reset of the function stops it.
    pub(crate) reset_helps: bool,
    /// Whether its access to memory can't be switched off.
    pub(crate) is_free: bool,
    pub(crate) cap: u64,
    pub(crate) queues: u16,
    pub(crate) mdts: u8,
    /// It reads doorbells from memory, while it is awake.
    pub(crate) has_shadows: bool,
    /// How long a shutdown takes.
    pub(crate) shutdown: Duration,
    /// Changes the page of Identify.
    pub(crate) identify: Change<u32, [u8; PAGE]>,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            fate: Box::new(|_| Fate::Done),
            lie: Box::new(|_, _| {}),
            aborts: false,
            holds_aborts: false,
            vectors: 0,
            admins: u64::MAX,
            is_stuck: false,
            can_reset: true,
            reset_helps: true,
            is_free: false,
            // 64 entries, contiguous, half a second, the NVM command set.
            cap: 63 | 1 << 16 | 1 << 24 | 1 << 37,
            queues: 8,
            mdts: 9,
            has_shadows: false,
            shutdown: Duration::ZERO,
            identify: Box::new(|_, _| {}),
        }
    }
}

/// A submission queue and its completion queue.
#[derive(Clone, Copy, Default)]
struct Pair {
    commands: u64,
    completions: u64,
    depth: u16,
    head: u16,
    tail: u16,
    next: u16,
    phase: bool,
    /// How far the driver has read completions.
    read: u16,
    /// It looks for commands in shadows.
    is_awake: bool,
}

pub(crate) struct State {
    pub(crate) behaviour: Behaviour,
    registers: BTreeMap<usize, u32>,
    pairs: BTreeMap<u16, Pair>,
    completion_queues: BTreeMap<u16, (u64, u16)>,
    /// The addresses of shadows and EventIdx.
    shadows: Option<(u64, u64)>,
    /// Writes to doorbells of I/O queues.
    pub(crate) rings: u64,
    /// Commands that were fetched and are not finished: the queue, the command, its number among I/O commands.
    pending: Vec<(u16, [u32; 16], u64)>,
    lost: Vec<(u16, [u32; 16])>,
    /// The memory that it may access.
    memory: Vec<Range<u64>>,
    pub(crate) disk: Vec<u8>,
    clock: Duration,
    random: Random,
    pub(crate) ios: u64,
    admins: u64,
    /// What a real controller would refuse.
    pub(crate) complaints: Vec<String>,
    pub(crate) is_master: bool,
    pub(crate) resets: u32,
    pub(crate) shutdowns: u32,
    /// When the shutdown under way is done.
    shut_at: Option<Duration>,
    /// Writes in its cache, and those that it has lost by being disabled.
    cached: u64,
    pub(crate) lost_writes: u64,
    /// I/O commands, by their operation codes and their double words 12.
    pub(crate) seen: Vec<(u8, u32)>,
    /// For this many reads of the status its registers are hidden.
    pub(crate) hidden: u32,
    /// The drive that has it.
    user: Weak<Fake>,
}

pub(crate) const BLOCK: usize = 512;
/// The most Aborts at a time.
pub(crate) const ABORTS: usize = 2;

/// A drive in this process's memory, for tests of programs: see [`Drive::on_fake`](crate::Drive::on_fake).
///
/// It has blocks of 512 bytes, eight pairs of queues, and a clock of its own, which advances by a millisecond whenever
/// it is looked at. It completes commands in random order.
#[derive(Clone)]
pub struct Fake(Arc<Mutex<State>>);

impl Fake {
    /// A drive with so many blocks, all zeros.
    ///
    /// ```
    /// # use pagemill::{Allocator, Memory};
    /// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
    /// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
    /// let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
    /// assert_eq!(drive.namespace().blocks, 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn new(blocks: usize) -> Self {
        Self::with(Behaviour::default(), blocks, 1)
    }

    /// One that may misbehave.
    pub(crate) fn with(behaviour: Behaviour, blocks: usize, seed: u64) -> Self {
        let state = State {
            behaviour,
            registers: BTreeMap::new(),
            pairs: BTreeMap::new(),
            completion_queues: BTreeMap::new(),
            shadows: None,
            rings: 0,
            pending: Vec::new(),
            lost: Vec::new(),
            memory: Vec::new(),
            disk: vec![0; blocks * BLOCK],
            clock: Duration::ZERO,
            random: Random::new(seed),
            ios: 0,
            admins: 0,
            complaints: Vec::new(),
            is_master: false,
            resets: 0,
            shutdowns: 0,
            shut_at: None,
            cached: 0,
            lost_writes: 0,
            seen: Vec::new(),
            hidden: 0,
            user: Weak::new(),
        };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Access for a drive. A second drive would send it stale commands of the first, whose pages have other owners.
    pub(crate) fn open(&self) -> Result<Arc<Self>, Error> {
        let mut state = self.state();
        if state.user.strong_count() > 0 {
            let what = "a Drive has this drive in memory".to_owned();
            return Err(Error::InUse { what, next: "drop that Drive and its queues first" });
        }
        let opened = Arc::new(self.clone());
        state.user = Arc::downgrade(&opened);
        Ok(opened)
    }

    /// Lets it access all of an allocator's memory.
    pub(crate) fn reach(&self, allocator: &Allocator) {
        let arenas = allocator.arenas();
        let ranges = arenas.iter().map(|arena| arena.range.start as u64..arena.range.end as u64);
        self.state().memory = ranges.collect();
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The place in this process of a device address.
    fn place(&mut self, addr: u64, len: usize) -> *mut u8 {
        let inside = self.memory.iter().any(|memory| addr >= memory.start && addr + len as u64 <= memory.end);
        assert!(inside && self.is_master, "{len} bytes at {addr:#x} are not the controller's to reach");
        ptr::with_exposed_provenance_mut(addr as usize)
    }

    fn read(&mut self, addr: u64, bytes: &mut [u8]) {
        let place = self.place(addr, bytes.len());
        // SAFETY: inside of the arena, which lives as long as the driver has it, and the driver waits for its completion.
        unsafe { ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), bytes.len()) };
    }

    fn write(&mut self, addr: u64, bytes: &[u8]) {
        let place = self.place(addr, bytes.len());
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    fn word(&self, at: usize) -> u32 {
        self.registers.get(&at).copied().unwrap_or(0)
    }

    fn is_ready(&self) -> bool {
        self.word(CSTS) & CSTS_RDY != 0
    }

    fn halt(&mut self) {
        self.look_at_shutdown();
        self.lost_writes += mem::take(&mut self.cached);
        self.shut_at = None;
        self.registers.insert(CSTS, 0);
        self.pairs.clear();
        self.shadows = None;
        self.completion_queues.clear();
        self.pending.clear();
        self.lost.clear();
    }

    pub(crate) fn reset(&mut self) {
        self.halt();
        self.registers.insert(CC, 0);
    }

    fn configure(&mut self, value: u32) {
        let before = self.word(CC);
        self.registers.insert(CC, value);
        if value & CC_EN == 0 {
            if !self.behaviour.is_stuck {
                self.halt();
            }
        } else if before & CC_EN == 0 {
            if value & CC_SHAPE != CC_SHAPE {
                self.complaints.push(format!("configured as {value:#x}"));
            }
            let (aqa, low) =
                (self.word(AQA), |state: &Self, at| u64::from(state.word(at)) | u64::from(state.word(at + 4)) << 32);
            let (commands, completions) = (low(self, ASQ), low(self, ACQ));
            let pair = Pair { commands, completions, depth: (aqa & 0xfff) as u16 + 1, phase: true, ..Pair::default() };
            self.pairs.insert(0, pair);
            self.registers.insert(CSTS, CSTS_RDY);
        } else if value & CC_SHN_NORMAL != 0 {
            self.shutdowns += 1;
            if self.pairs.keys().any(|&id| id != 0) {
                self.complaints.push("a shutdown with queues".to_owned());
            }
            self.shut_at = Some(self.clock + self.behaviour.shutdown);
        }
    }

    /// A shutdown that is over has put the cache on the medium.
    fn look_at_shutdown(&mut self) {
        if self.shut_at.is_some_and(|at| self.clock >= at) {
            self.cached = 0;
            let status = self.word(CSTS) | CSTS_SHST_DONE;
            self.registers.insert(CSTS, status);
        }
    }

    /// Deletes a queue.
    fn delete(&mut self, opcode: u8, id: u16) -> u16 {
        if opcode == admin::DELETE_CQ && self.pairs.contains_key(&id) {
            return 0x10c;
        }
        let is_there = if opcode == admin::DELETE_SQ {
            self.pending.retain(|(queue, ..)| *queue != id);
            self.lost.retain(|(queue, _)| *queue != id);
            id != 0 && self.pairs.remove(&id).is_some()
        } else {
            self.completion_queues.remove(&id).is_some()
        };
        if is_there { 0 } else { 0x101 }
    }

    fn doorbell(&mut self, at: usize, value: u32) {
        let (id, is_completion) = ((at / 8) as u16, at % 8 == 4);
        let Some(mut pair) = self.pairs.get(&id).copied() else {
            return self.complaints.push(format!("a doorbell of queue {id}, which there is not"));
        };
        if value >= u32::from(pair.depth) {
            return self.complaints.push(format!("queue {id}: a doorbell of {value}"));
        }
        self.rings += u64::from(id != 0);
        if is_completion {
            pair.read = value as u16;
            self.pairs.insert(id, pair);
            return;
        }
        pair.tail = value as u16;
        pair.is_awake = true;
        self.fetch(id, pair);
    }

    fn fetch(&mut self, id: u16, mut pair: Pair) {
        while pair.head != pair.tail {
            let mut bytes = [0; 64];
            self.read(pair.commands + 64 * u64::from(pair.head), &mut bytes);
            let mut command = [0; 16];
            for (word, bytes) in command.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_le_bytes(bytes.try_into().unwrap());
            }
            pair.head = (pair.head + 1) % pair.depth;
            let is_abort = |(id, command): (u16, &[u32; 16])| id == 0 && command[0] as u8 == admin::ABORT;
            let aborts = self.pending.iter().filter(|(id, command, _)| is_abort((*id, command))).count();
            if is_abort((id, &command)) && aborts == ABORTS {
                self.complaints.push(format!("more than {ABORTS} Aborts at once"));
            }
            let nth = if id == 0 { self.admins } else { self.ios };
            self.pending.push((id, command, nth));
            *(if id == 0 { &mut self.admins } else { &mut self.ios }) += 1;
        }
        self.pairs.insert(id, pair);
    }

    /// Looks into the shadow of a queue, and sleeps when nothing is new: it first says from which position on it is to
    /// be woken, and then looks once more.
    fn look_at_shadow(&mut self, id: u16) {
        let Some((shadows, events)) = self.shadows.filter(|_| id != 0) else { return };
        let (mut pair, at) = (self.pairs[&id], 8 * u64::from(id));
        let word = |state: &mut Self, at| {
            let mut bytes = [0; 4];
            state.read(shadows + at, &mut bytes);
            u32::from_le_bytes(bytes)
        };
        // It needs the head of completions only when it has no room for one.
        pair.read = word(self, at + 4) as u16;
        if pair.is_awake {
            let tail = word(self, at);
            if tail >= u32::from(pair.depth) {
                return self.complaints.push(format!("queue {id}: a shadow of {tail}"));
            }
            pair.is_awake = tail as u16 != pair.tail;
            pair.tail = tail as u16;
            self.write(events + at, &tail.to_le_bytes());
        }
        self.fetch(id, pair);
    }

    /// Executes one of its commands at random. False if none completes.
    fn step(&mut self) -> bool {
        self.clock += Duration::from_millis(1);
        for id in self.pairs.keys().copied().collect::<Vec<_>>() {
            self.look_at_shadow(id);
        }
        if self.pending.is_empty() || !self.is_ready() {
            return false;
        }
        let which = self.random.below(self.pending.len() as u64) as usize;
        let (id, command, nth) = self.pending[which];
        let pair = self.pairs[&id];
        if (pair.next + 1) % pair.depth == pair.read {
            return false; // No room for a completion.
        }
        if id == 0 && command[0] as u8 == admin::ABORT && self.behaviour.holds_aborts {
            return false;
        }
        self.pending.remove(which);
        if id == 0 {
            let is_answered = nth < self.behaviour.admins;
            if is_answered {
                let (answer, status) = self.admin(&command);
                self.complete(id, &command, answer, status, u64::MAX);
            }
            return is_answered;
        }
        match (self.behaviour.fate)(nth) {
            Fate::Done => {
                let status = self.transfer(&command);
                self.complete(id, &command, 0, status, nth);
            }
            Fate::Fails(status) => self.complete(id, &command, 0, status, nth),
            Fate::Lost => {
                self.lost.push((id, command));
                return false;
            }
        }
        true
    }

    /// Its queues, without the admin queues.
    #[cfg(test)]
    pub(crate) fn queues(&self) -> usize {
        self.completion_queues.len() + self.pairs.keys().filter(|&&id| id != 0).count()
    }

    /// Commands that were lost.
    #[cfg(test)]
    pub(crate) fn lost(&self) -> usize {
        self.lost.len()
    }

    /// Completes the lost commands.
    #[cfg(test)]
    pub(crate) fn find(&mut self) {
        for (id, command) in mem::take(&mut self.lost) {
            let status = self.transfer(&command);
            self.complete(id, &command, 0, status, u64::MAX);
        }
    }

    fn complete(&mut self, id: u16, command: &[u32; 16], answer: u32, status: u16, nth: u64) {
        let pair = self.pairs[&id];
        let last = u32::from(status) << 17 | u32::from(pair.phase) << 16 | command[0] >> 16;
        let mut words = [answer, 0, u32::from(id) << 16 | u32::from(pair.head), last];
        if id != 0 {
            (self.behaviour.lie)(nth, &mut words);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (at, (body, phase)) = (pair.completions + 16 * u64::from(pair.next), bytes.split_at(12));
        self.write(at, body);
        // Pairs with `after_phase`: another thread that sees the phase sees the rest, and the data, too.
        fence(Ordering::Release);
        self.write(at + 12, phase);
        let pair = self.pairs.get_mut(&id).unwrap();
        pair.next = (pair.next + 1) % pair.depth;
        pair.phase ^= pair.next == 0;
    }

    fn admin(&mut self, command: &[u32; 16]) -> (u32, u16) {
        let data = u64::from(command[6]) | u64::from(command[7]) << 32;
        let (id, depth) = (command[10] as u16, (command[10] >> 16) as u16 + 1);
        match command[0] as u8 {
            admin::IDENTIFY => {
                let mut page = [0; PAGE];
                match command[10] & 0xff {
                    admin::CNS_CONTROLLER => {
                        (page[77], page[512], page[513], page[525]) = (self.behaviour.mdts, 0x66, 0x44, 1);
                        page[4..8].copy_from_slice(b"fake");
                        page[257] = self.behaviour.has_shadows.into();
                        (page[258], page[516], page[520]) = (ABORTS as u8 - 1, 1, 1 << 2 | 1 << 3);
                    }
                    // 1 MiB of zeros, 4 ranges of up to 1000 blocks, and 2000 in all.
                    admin::CNS_LIMITS => {
                        (page[1], page[3]) = (8, 4);
                        page[4..8].copy_from_slice(&1000u32.to_le_bytes());
                        page[8..16].copy_from_slice(&2000u64.to_le_bytes());
                    }
                    admin::CNS_NAMESPACES => page[0] = 1,
                    // An identifier of 8 bytes, and the command set of plain blocks.
                    admin::CNS_DESCRIPTORS => (page[0], page[1], page[12], page[13]) = (1, 8, 4, 1),
                    _ if command[1] == 1 => {
                        page[..8].copy_from_slice(&((self.disk.len() / BLOCK) as u64).to_le_bytes());
                        page[130] = 9;
                    }
                    _ => {}
                }
                (self.behaviour.identify)(command[10] & 0xff, &mut page);
                self.write(data, &page);
                (0, 0)
            }
            admin::GET_LOG => {
                let bytes = 4 * ((command[10] >> 16) as usize + 1);
                let mut page = [0; PAGE];
                match command[10] & 0xff {
                    admin::LOG_HEALTH if bytes == 512 => (page[1], page[2], page[3]) = (0x2c, 1, 100),
                    admin::LOG_ERRORS if bytes == 64 => page[0] = 1,
                    _ => return (0, 0x109),
                }
                self.write(data, &page[..bytes]);
                (0, 0)
            }
            admin::DOORBELL_BUFFER => {
                self.shadows = Some((data, u64::from(command[8]) | u64::from(command[9]) << 32));
                (0, 0)
            }
            admin::SET_FEATURES => {
                let most = u32::from(self.behaviour.queues - 1);
                (most << 16 | most, 0)
            }
            opcode @ (admin::DELETE_SQ | admin::DELETE_CQ) => (0, self.delete(opcode, id)),
            admin::CREATE_CQ => {
                self.completion_queues.insert(id, (data, depth));
                (0, 0)
            }
            admin::CREATE_SQ => {
                let Some(&(completions, other)) = self.completion_queues.get(&((command[11] >> 16) as u16)) else {
                    return (0, 0x100);
                };
                if other != depth || u64::from(depth) > (self.behaviour.cap & 0xffff) + 1 {
                    return (0, 0x102);
                }
                self.pairs.insert(id, Pair { commands: data, completions, depth, phase: true, ..Pair::default() });
                (0, 0)
            }
            admin::ABORT => {
                let found = self.lost.iter().position(|(queue, lost)| {
                    u32::from(*queue) == command[10] & 0xffff && lost[0] >> 16 == command[10] >> 16
                });
                match found.filter(|_| self.behaviour.aborts) {
                    Some(found) => {
                        let (queue, lost) = self.lost.remove(found);
                        self.complete(queue, &lost, 0, 0x07, u64::MAX);
                        (0, 0)
                    }
                    None => (1, 0),
                }
            }
            _ => (0, 0x01),
        }
    }

    /// Deallocated blocks read as 0xdd: a driver that relied on zeros would be wrong.
    fn deallocate(&mut self, command: &[u32; 16]) -> u16 {
        let addr = u64::from(command[6]) | u64::from(command[7]) << 32;
        if command[11] != 1 << 2 {
            return 0x4002;
        }
        for nth in 0..u64::from(command[10]) + 1 {
            let mut range = [0; 16];
            self.read(addr + 16 * nth, &mut range);
            let blocks = u32::from_le_bytes(range[4..8].try_into().unwrap()) as usize;
            let lba = u64::from_le_bytes(range[8..].try_into().unwrap()) as usize;
            if lba + blocks > self.disk.len() / BLOCK {
                return 0x4080;
            }
            self.disk[lba * BLOCK..][..blocks * BLOCK].fill(0xdd);
        }
        0
    }

    fn transfer(&mut self, command: &[u32; 16]) -> u16 {
        let pair = |at: usize| u64::from(command[at]) | u64::from(command[at + 1]) << 32;
        if command[1] != 1 {
            return 0x400b;
        }
        let opcode = command[0] as u8;
        self.seen.push((opcode, command[12]));
        match opcode {
            io::FLUSH => {
                self.cached = 0;
                return 0;
            }
            io::DATASET_MANAGEMENT => return self.deallocate(command),
            _ if command[12] & FUA != 0 => {}
            io::WRITE | io::WRITE_ZEROES => self.cached += 1,
            _ => {}
        }
        let (lba, blocks) = (pair(10), u64::from(command[12] & 0xffff) + 1);
        let bytes = blocks as usize * BLOCK;
        if lba + blocks > (self.disk.len() / BLOCK) as u64 {
            return 0x4080;
        }
        if opcode == io::WRITE_ZEROES {
            self.disk[lba as usize * BLOCK..][..bytes].fill(0);
            return 0;
        }
        if self.behaviour.mdts > 0 && bytes as u128 > (PAGE as u128) << self.behaviour.mdts {
            self.complaints.push(format!("a command of {bytes} bytes"));
            return 0x4002;
        }
        let prp = Prp { first: pair(6), second: pair(8) };
        let walked = walk(prp, bytes, &mut |at| {
            let mut entry = [0; 8];
            self.read(at, &mut entry);
            u64::from_le_bytes(entry)
        });
        let pieces = match walked {
            Ok(pieces) => pieces,
            Err(why) => {
                self.complaints.push(why);
                return 0x4013;
            }
        };
        let mut at = lba as usize * BLOCK;
        for (addr, len) in pieces {
            let mut piece = vec![0; len];
            if opcode == io::WRITE {
                self.read(addr, &mut piece);
                self.disk[at..at + len].copy_from_slice(&piece);
            } else {
                piece.copy_from_slice(&self.disk[at..at + len]);
                self.write(addr, &piece);
            }
            at += len;
        }
        0
    }
}

/// Walks the entries like a controller that knows only how many bytes to move. Returns the places of the data,
/// piece by piece. `read` is its bus. An error is what a controller would refuse.
pub(crate) fn walk(prp: Prp, bytes: usize, read: &mut dyn FnMut(u64) -> u64) -> Result<Vec<(u64, usize)>, String> {
    let inside = prp.first as usize % PAGE;
    let mut pieces = vec![(prp.first, bytes.min(PAGE - inside))];
    let mut left = bytes - pieces[0].1;
    if left == 0 {
        return Ok(pieces);
    }
    if left <= PAGE {
        if !(prp.second as usize).is_multiple_of(PAGE) {
            return Err(format!("the second entry {:#x} lies inside of a page", prp.second));
        }
        pieces.push((prp.second, left));
        return Ok(pieces);
    }
    let mut at = prp.second;
    if !at.is_multiple_of(8) {
        return Err(format!("the list {at:#x} is not aligned"));
    }
    while left > 0 {
        let entry = read(at);
        let is_last_of_page = (at as usize + 8).is_multiple_of(PAGE);
        if is_last_of_page && left > PAGE {
            if !(entry as usize).is_multiple_of(PAGE) {
                return Err(format!("the next list {entry:#x} lies inside of a page"));
            }
            at = entry;
            continue;
        }
        if !(entry as usize).is_multiple_of(PAGE) {
            return Err(format!("the entry {entry:#x} lies inside of a page"));
        }
        pieces.push((entry, left.min(PAGE)));
        left -= left.min(PAGE);
        at += 8;
    }
    Ok(pieces)
}

impl Bus for Fake {
    fn len(&self) -> usize {
        DOORBELLS + 0x1000
    }
    fn read32(&self, at: usize) -> u32 {
        let mut state = self.state();
        state.look_at_shutdown();
        match at {
            CSTS if state.hidden > 0 => {
                state.hidden -= 1;
                u32::MAX
            }
            CAP => state.behaviour.cap as u32,
            _ if at == CAP + 4 => (state.behaviour.cap >> 32) as u32,
            VS => 0x1_0400,
            _ => state.word(at),
        }
    }
    fn write32(&self, at: usize, value: u32) {
        let mut state = self.state();
        match at {
            CC => state.configure(value),
            _ if at >= DOORBELLS => state.doorbell(at - DOORBELLS, value),
            _ => drop(state.registers.insert(at, value)),
        }
    }
    fn vectors(&self) -> u16 {
        self.state().behaviour.vectors
    }
    fn wait(&self, _vectors: &[u16], limit: Duration) -> Result<(), Error> {
        let mut state = self.state();
        if !state.step() {
            state.clock += limit;
        }
        Ok(())
    }
    fn now(&self) -> Duration {
        let mut state = self.state();
        state.step();
        state.clock
    }
    fn reset(&self) -> Result<(), Error> {
        let mut state = self.state();
        state.resets += 1;
        if !state.behaviour.can_reset {
            return Err(Error::Request("it cannot be reset".to_owned()));
        }
        if state.behaviour.reset_helps {
            state.behaviour.is_stuck = false;
            state.reset();
        }
        Ok(())
    }
    fn set_master(&self, may: bool) -> Result<(), Error> {
        let mut state = self.state();
        if !may && state.behaviour.is_free {
            return Err(Error::Request("it keeps its access".to_owned()));
        }
        state.is_master = may;
        Ok(())
    }
}
