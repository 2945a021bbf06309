//! A controller: starting it, sending it admin commands, and stopping it.
//!
//! Memory that the controller knows is not freed while it may still write there (I1). [`Controller::stop`] says whether
//! it has certainly stopped; if not, the memory is leaked.
use std::mem;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use crate::Error;
use crate::bus::Bus;
use crate::doorbells::Doorbells;
use crate::identify::{ControllerInfo, NamespaceInfo, active, check_command_set};
use crate::logs;
use crate::memory::{Memory, Shared};
use crate::pair::Pair;
use crate::spec::{
    ACQ, AQA, ASQ, CAP, CC, CC_EN, CC_SHAPE, CC_SHN_NORMAL, CSTS, CSTS_CFS, CSTS_RDY, CSTS_SHST, CSTS_SHST_DONE,
    Capabilities, Command, DOORBELLS, PAGE, VS, admin,
};

/// Entries of the admin queues: one command at a time that is waited for, and some Aborts.
const ADMIN_DEPTH: u16 = 16;
/// How long to sleep between two polls of a register, or of the admin queue without interrupts.
const LOOK: Duration = Duration::from_micros(500);

/// No pair of queues.
#[expect(clippy::reversed_empty_ranges, reason = "it is empty")]
pub(crate) const NO_QUEUES: RangeInclusive<u16> = 1..=0;
/// How long its registers may read as all ones before it counts as gone.
const HIDDEN: Duration = Duration::from_secs(2);

/// A controller, and the memory that it knows.
///
pub(crate) struct Controller {
    admin: Pair<Asked>,
    doorbells: Doorbells,
    asked: u64,
    /// Aborts under way.
    aborts: u16,
    /// Commands whose Abort was answered, by queue and identifier.
    answered: Vec<(u16, u16)>,
    /// The page that Identify fills.
    page: Shared,
    pub(crate) bus: Arc<dyn Bus>,
    cap: Capabilities,
    /// How long an admin command may take.
    timeout: Duration,
    may_be_running: bool,
}

/// The purpose of an admin command.
enum Asked {
    /// Its answer is waited for. The number distinguishes it from a late answer to an earlier command.
    Answer(u64),
    /// Aborts a command of a queue. Its answer is not waited for.
    Abort { queue: u16, id: u16, since: Duration },
}

/// Whether a controller can answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    Well,
    /// It has reported a fatal error.
    Fatal,
    /// Somebody else has reset it.
    Disabled,
}

impl Controller {
    /// Checks whether this controller is supported. It is not started.
    pub(crate) fn new(bus: Arc<dyn Bus>, memory: &Memory, timeout: Duration) -> Result<Self, Error> {
        let cap = Capabilities(bus.read64(CAP));
        if cap.0 == u64::MAX {
            return Err(Error::Gone);
        }
        if !cap.has_nvm() {
            return Err(Error::Unsupported("the controller does not speak the NVM command set".to_owned()));
        }
        if 1 << cap.smallest_page() != PAGE {
            let least = 1usize << cap.smallest_page();
            return Err(Error::Unsupported(format!(
                "the controller takes pages of {least} bytes at least, not {PAGE}"
            )));
        }
        if bus.len() < DOORBELLS + 2 * cap.stride() {
            return Err(Error::Broken(format!("{} bytes of registers have no room for a doorbell", bus.len())));
        }
        if cap.longest_queue() < 2 {
            return Err(Error::Broken("its queues have one entry".to_owned()));
        }
        let depth = ADMIN_DEPTH.min(cap.longest_queue().min(usize::from(u16::MAX)) as u16);
        let admin = Pair::new(memory, 0, depth)?;
        let page = Shared::new(memory, PAGE)?;
        let (asked, aborts, answered, may_be_running) = (0, 0, Vec::new(), false);
        let doorbells = Doorbells::registers(cap.stride());
        Ok(Self { admin, doorbells, asked, aborts, answered, page, bus, cap, timeout, may_be_running })
    }

    /// The version of the specification that it reports.
    pub(crate) fn version(&self) -> (u16, u8, u8) {
        let version = self.bus.read32(VS);
        ((version >> 16) as u16, (version >> 8) as u8, version as u8)
    }

    /// Entries of the longest queue that both it and this driver support.
    pub(crate) fn longest_queue(&self) -> u16 {
        self.cap.longest_queue().min(4096) as u16
    }

    /// Pairs of queues that have doorbells among the registers, without the admin queues.
    pub(crate) fn doorbells(&self) -> u16 {
        ((self.bus.len() - DOORBELLS) / (2 * self.cap.stride()) - 1).min(u16::MAX.into()) as u16
    }

    pub(crate) fn stride(&self) -> usize {
        self.cap.stride()
    }

    /// Starts it, from any state, so that it takes admin commands. All other queues are gone.
    pub(crate) fn start(&mut self) -> Result<(), Error> {
        self.bus.set_master(true)?;
        self.disable()?;
        self.admin.clear();
        (self.aborts, self.answered) = (0, Vec::new());
        let (commands, completions) = self.admin.addrs();
        let last = u32::from(self.admin.depth() - 1);
        self.bus.write32(AQA, last << 16 | last);
        self.bus.write64(ASQ, commands);
        self.bus.write64(ACQ, completions);
        self.may_be_running = true;
        self.bus.write32(CC, CC_SHAPE | CC_EN);
        let limit = Duration::from_millis(self.cap.ready_ms());
        self.wait_for(CSTS_RDY | CSTS_CFS, &[CSTS_RDY], limit, "it did not get ready")
    }

    /// Stops it, so that its queues are gone: by disabling it, or if that fails, by a reset of the function.
    fn disable(&mut self) -> Result<(), Error> {
        if self.bus.read32(CSTS) == u32::MAX {
            return Err(Error::Gone);
        }
        self.bus.write32(CC, 0);
        let limit = Duration::from_millis(self.cap.ready_ms());
        if self.wait_for(CSTS_RDY, &[0], limit, "it did not stop").is_err() {
            self.bus.reset()?;
            self.wait_for(CSTS_RDY, &[0], limit, "it did not stop, even by a reset of the function")?;
            self.bus.set_master(true)?;
        }
        self.may_be_running = false;
        Ok(())
    }

    /// Waits until these bits of the status have one of the `wanted` values.
    fn wait_for(&self, bits: u32, wanted: &[u32], limit: Duration, what: &str) -> Result<(), Error> {
        let begin = self.bus.now();
        loop {
            let status = self.bus.read32(CSTS);
            match status {
                u32::MAX => return Err(Error::Gone),
                status if wanted.contains(&(status & bits)) => return Ok(()),
                status if bits & status & CSTS_CFS != 0 => {
                    return Err(Error::Silent("the controller says that it failed for good".to_owned()));
                }
                _ if self.bus.now().saturating_sub(begin) > limit => {
                    return Err(Error::Silent(format!("the controller: {what} within {:.1} s", limit.as_secs_f64())));
                }
                _ => self.bus.wait(&[0], LOOK)?,
            }
        }
    }

    /// Its condition. A reset of the function by somebody else hides its registers for a while (PCI Express allows 100
    /// ms), so it is gone only if they stay hidden.
    pub(crate) fn condition(&self) -> Result<Condition, Error> {
        let begin = self.bus.now();
        while self.bus.read32(CSTS) == u32::MAX {
            if self.bus.now().saturating_sub(begin) > HIDDEN {
                return Err(Error::Gone);
            }
            self.bus.wait(&[0], LOOK)?;
        }
        match (self.bus.read32(CSTS), self.bus.read32(CC)) {
            (status, _) if status & CSTS_CFS != 0 => Ok(Condition::Fatal),
            (status, configured) if status & CSTS_RDY == 0 || configured & CC_EN == 0 => Ok(Condition::Disabled),
            _ => Ok(Condition::Well),
        }
    }

    /// Executes an admin command, and returns its answer.
    pub(crate) fn ask(&mut self, command: Command, what: impl Fn() -> String) -> Result<u32, Error> {
        if self.admin.is_full() {
            return Err(Error::Silent(format!("{}: the controller answers no admin command", what())));
        }
        self.asked += 1;
        self.admin.push(command, Asked::Answer(self.asked));
        self.admin.ring(&*self.bus, &self.doorbells);
        let begin = self.bus.now();
        let done = loop {
            let popped = self.admin.pop()?;
            self.admin.thank(&*self.bus, &self.doorbells);
            match popped {
                Some(done) => match done.what {
                    Asked::Answer(number) if number == self.asked => break done,
                    what => self.note(&what),
                },
                None if self.bus.now().saturating_sub(begin) > self.timeout => {
                    let limit = self.timeout.as_secs_f64();
                    return Err(Error::Silent(format!("{}: no answer within {limit:.1} s", what())));
                }
                None => self.bus.wait(&[0], LOOK)?,
            }
        };
        match done.status {
            status if status.is_ok() => Ok(done.answer),
            status => Err(Error::Status { what: what(), status }),
        }
    }

    fn identify(&mut self, nsid: u32, cns: u32, what: &str) -> Result<[u8; PAGE], Error> {
        self.page.clear();
        let command = Command::new(admin::IDENTIFY, nsid).data(self.page.addr(), 0).word(10, cns);
        self.ask(command, || format!("identifying {what}"))?;
        Ok(self.page.page())
    }

    pub(crate) fn info(&mut self) -> Result<ControllerInfo, Error> {
        let mut info = ControllerInfo::read(&self.identify(0, admin::CNS_CONTROLLER, "the controller")?)?;
        match self.identify(0, admin::CNS_LIMITS, "its limits") {
            Ok(page) => info.read_limits(&page),
            // Older controllers have no such page, and no such limits.
            Err(Error::Status { .. }) => {}
            Err(error) => return Err(error),
        }
        Ok(info)
    }

    /// The first `bytes` of a log of the whole controller, at most a page.
    fn log(&mut self, id: u32, bytes: usize, what: &str) -> Result<[u8; PAGE], Error> {
        self.page.clear();
        let last = (bytes / 4 - 1) as u32;
        let command = Command::new(admin::GET_LOG, u32::MAX).data(self.page.addr(), 0).word(10, last << 16 | id);
        self.ask(command, || format!("reading {what}"))?;
        Ok(self.page.page())
    }

    /// Its health log.
    pub(crate) fn health_log(&mut self) -> Result<logs::Health, Error> {
        Ok(logs::Health::read(&self.log(admin::LOG_HEALTH, 512, "its health log")?))
    }

    /// The latest entries of its error log, at most 64.
    pub(crate) fn error_log(&mut self, most: u16) -> Result<Vec<logs::ErrorEntry>, Error> {
        let count = usize::from(most).min(PAGE / logs::ERROR_BYTES);
        if count == 0 {
            return Ok(Vec::new());
        }
        let page = self.log(admin::LOG_ERRORS, count * logs::ERROR_BYTES, "its error log")?;
        Ok(logs::ErrorEntry::read(&page, count))
    }

    /// The first namespaces, up to 1024, which fit into a page.
    pub(crate) fn namespaces(&mut self) -> Result<Vec<u32>, Error> {
        Ok(active(&self.identify(0, admin::CNS_NAMESPACES, "its namespaces")?))
    }

    /// A namespace of plain blocks; `None` if there is none with that number.
    ///
    /// # Errors
    /// `Unsupported` if it has another command set.
    pub(crate) fn namespace(&mut self, id: u32) -> Result<Option<NamespaceInfo>, Error> {
        if self.cap.has_command_sets() {
            let what = format!("the command set of namespace {id}");
            match self.identify(id, admin::CNS_DESCRIPTORS, &what) {
                Ok(page) => check_command_set(id, &page)?,
                // There is no such namespace, which is found below, or no list; then it has plain blocks.
                Err(Error::Status { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let page = self.identify(id, admin::CNS_NAMESPACE, &format!("namespace {id}"))?;
        NamespaceInfo::read(id, &page)
    }

    /// Asks for pairs of queues, at least one. Returns how many it grants, which may be fewer or more.
    pub(crate) fn grant(&mut self, pairs: u16) -> Result<u16, Error> {
        let count = u32::from(pairs - 1);
        let command = Command::new(admin::SET_FEATURES, 0).word(10, admin::QUEUES).word(11, count << 16 | count);
        let granted = self.ask(command, || format!("asking for {pairs} pairs of queues"))?;
        Ok((granted as u16).min((granted >> 16) as u16).saturating_add(1))
    }

    /// Has it read the doorbells of queues that are made from now on from memory.
    pub(crate) fn shadow(&mut self, (positions, events): (u64, u64)) -> Result<(), Error> {
        let command = Command::new(admin::DOORBELL_BUFFER, 0).data(positions, events);
        self.ask(command, || "moving its doorbells to memory".to_owned())?;
        Ok(())
    }

    /// Creates a pair of queues in the controller. With interrupts, completions raise number `vector`.
    pub(crate) fn create<T>(&mut self, queue: &Pair<T>, vector: Option<u16>) -> Result<(), Error> {
        let (id, last) = (u32::from(queue.id()), u32::from(queue.depth() - 1));
        let (commands, completions) = queue.addrs();
        let interrupts = vector.map_or(0, |vector| u32::from(vector) << 16 | 1 << 1);
        // Both are contiguous (bit 0).
        let command = Command::new(admin::CREATE_CQ, 0).data(completions, 0).word(10, last << 16 | id);
        self.ask(command.word(11, interrupts | 1), || format!("making completion queue {id}"))?;
        let command = Command::new(admin::CREATE_SQ, 0).data(commands, 0).word(10, last << 16 | id);
        self.ask(command.word(11, id << 16 | 1), || format!("making submission queue {id}"))?;
        Ok(())
    }

    /// Asks it to abort a command, and does not wait for the answer. False if it has already `most` Aborts, the number
    /// that it takes.
    pub(crate) fn abort(&mut self, queue: u16, id: u16, most: u16) -> bool {
        // One slot stays free for commands that are waited for, if there are two.
        let most = most.min((self.admin.depth() - 2).max(1));
        if self.aborts >= most || self.admin.is_full() {
            return false;
        }
        let command = Command::new(admin::ABORT, 0).word(10, u32::from(id) << 16 | u32::from(queue));
        self.admin.push(command, Asked::Abort { queue, id, since: self.bus.now() });
        self.admin.ring(&*self.bus, &self.doorbells);
        self.aborts += 1;
        true
    }

    /// The commands whose Abort was answered since the last call, by queue and identifier. An Abort may come too late
    /// or fail; only the command's own completion shows that.
    pub(crate) fn answered(&mut self) -> Result<Vec<(u16, u16)>, Error> {
        if self.aborts > 0 {
            while let Some(done) = self.admin.pop()? {
                self.note(&done.what);
            }
            self.admin.thank(&*self.bus, &self.doorbells);
        }
        Ok(mem::take(&mut self.answered))
    }

    /// Handles an answer that is not waited for: of an Abort, or of a command that timed out.
    fn note(&mut self, what: &Asked) {
        if let &Asked::Abort { queue, id, .. } = what {
            self.aborts -= 1;
            self.answered.push((queue, id));
        }
    }

    /// When the oldest Abort under way was sent.
    pub(crate) fn aborting_since(&mut self) -> Option<Duration> {
        // Older commands that were never answered have slots, too.
        let sent = self.admin.whats_mut().filter_map(|asked| match asked {
            Asked::Abort { since, .. } => Some(*since),
            Asked::Answer(_) => None,
        });
        sent.min()
    }

    /// Whether Aborts are under way.
    pub(crate) fn is_aborting(&self) -> bool {
        self.aborts > 0
    }

    /// Whether it may use memory.
    pub(crate) fn may_be_running(&self) -> bool {
        self.may_be_running
    }

    /// Deletes pairs of queues: the submission queue first, since a completion queue that one uses can't be deleted.
    fn delete(&mut self, queues: RangeInclusive<u16>) -> Result<(), Error> {
        for id in queues {
            for (opcode, kind) in [(admin::DELETE_SQ, "submission"), (admin::DELETE_CQ, "completion")] {
                let command = Command::new(opcode, 0).word(10, id.into());
                self.ask(command, || format!("deleting {kind} queue {id}"))?;
            }
        }
        Ok(())
    }

    /// Shuts it down normally and stops it: deletes its `queues`, has it put its write cache on the medium, for which it
    /// has `limit`, and disables it.
    pub(crate) fn shut_down(&mut self, queues: RangeInclusive<u16>, limit: Duration) -> Result<(), Error> {
        if !self.may_be_running {
            return Ok(());
        }
        let condition = self.condition()?;
        let mut shut = Err(Error::Silent(format!("{}: what it had in its write cache may be lost", condition.said())));
        if condition == Condition::Well {
            // Its cache matters more than its queues, so an error here changes nothing of what follows.
            let deleted = self.delete(queues);
            self.bus.write32(CC, CC_SHAPE | CC_EN | CC_SHN_NORMAL);
            let what = "it did not shut down: what it had in its write cache may be lost";
            shut = self.wait_for(CSTS_SHST, &[CSTS_SHST_DONE], limit, what).and(deleted);
        }
        self.disable().and(shut)
    }

    /// Makes sure that it does not write to memory any more: it reports that it has stopped, or its access to memory is
    /// switched off. False if neither works.
    pub(crate) fn stop(&mut self) -> bool {
        let is_stopped = !self.may_be_running || self.disable().is_ok() || self.bus.set_master(false).is_ok();
        self.may_be_running = !is_stopped;
        is_stopped
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if !self.stop() {
            self.admin.leak();
            self.page.leak();
        }
    }
}

impl Condition {
    /// A message about what happened.
    pub(crate) fn said(self) -> &'static str {
        match self {
            Self::Well => "the controller is well",
            Self::Fatal => "the controller says that it failed for good",
            Self::Disabled => "somebody else has reset the controller",
        }
    }
}
