//! A controller: started, asked, stopped.
//!
//! Nothing of the memory that it was told of is given back while it may still write there (I1): [`Controller::stop`] says whether
//! it was stopped for certain, by whichever means, and if not, the memory is leaked.
use std::mem;
use std::time::Duration;

use crate::Error;
use crate::bus::Bus;
use crate::identify::{ControllerInfo, NamespaceInfo, active, check_command_set};
use crate::memory::{Memory, Shared};
use crate::queue::Queue;
use crate::spec::{
    ACQ, AQA, ASQ, CAP, CC, CC_EN, CC_SHAPE, CC_SHN_NORMAL, CSTS, CSTS_CFS, CSTS_RDY, CSTS_SHST, CSTS_SHST_DONE,
    Capabilities, Command, DOORBELLS, PAGE, VS, admin,
};

/// Entries of the admin queues: one command that is waited for is out at a time, and some Aborts.
const ADMIN_DEPTH: u16 = 16;
/// How long this side sleeps between two looks at a register, and without interrupts at the admin queue.
const LOOK: Duration = Duration::from_micros(500);

/// How long its registers may read as all ones before it is taken for gone.
const HIDDEN: Duration = Duration::from_secs(2);

/// A controller that can be reached, and the memory that it is told of.
///
/// The fields go in their order: what is shared, then the memory that it is of, which is unmapped, then the way to the device.
pub(crate) struct Controller<B: Bus> {
    admin: Queue<Asked>,
    asked: u64,
    /// Aborts that are out.
    aborts: u16,
    /// Commands whose Abort was answered, by queue and identifier.
    answered: Vec<(u16, u16)>,
    /// What Identify fills.
    page: Shared,
    pub(crate) memory: Memory,
    pub(crate) bus: B,
    cap: Capabilities,
    /// How long an admin command may take.
    timeout: Duration,
    may_be_running: bool,
}

/// What an admin command is for.
enum Asked {
    /// Its answer is waited for; the number tells an answer that came late from the one that is waited for.
    Answer(u64),
    /// To abort a command of a queue. Nobody waits for it.
    Abort { queue: u16, id: u16, since: Duration },
}

/// Whether a controller is in a state to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Well,
    /// It has stopped by itself.
    Fatal,
    /// Somebody else has reset it.
    Disabled,
}

impl<B: Bus> Controller<B> {
    /// Looks whether this controller can be driven from here. It is not started.
    pub(crate) fn new(bus: B, memory: Memory, timeout: Duration) -> Result<Self, Error> {
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
        let admin = Queue::new(&memory, 0, depth)?;
        let page = Shared::new(&memory, PAGE)?;
        let (asked, aborts, answered, may_be_running) = (0, 0, Vec::new(), false);
        Ok(Self { admin, asked, aborts, answered, page, memory, bus, cap, timeout, may_be_running })
    }

    /// The version of the specification that it says it keeps to.
    pub(crate) fn version(&self) -> (u16, u8, u8) {
        let version = self.bus.read32(VS);
        ((version >> 16) as u16, (version >> 8) as u8, version as u8)
    }

    /// Entries of the longest queue that it takes, as far as a queue of ours can be.
    pub(crate) fn longest_queue(&self) -> u16 {
        self.cap.longest_queue().min(4096) as u16
    }

    /// Pairs of queues whose doorbells are among the registers, the admin ones left out.
    pub(crate) fn doorbells(&self) -> u16 {
        ((self.bus.len() - DOORBELLS) / (2 * self.cap.stride()) - 1).min(u16::MAX.into()) as u16
    }

    pub(crate) fn stride(&self) -> usize {
        self.cap.stride()
    }

    /// Starts it anew: from whatever state, to one in which it takes admin commands. It has forgotten all other queues.
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

    /// Has it stop and forget its queues: by its own switch, or if that does nothing, by a reset of the function.
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

    /// Waits until some bits of the status are one of `wanted`.
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
                _ => self.bus.wait(LOOK)?,
            }
        }
    }

    /// Whether it is well. A reset of the function by somebody else hides its registers for a while (PCI Express gives it
    /// 100 ms): only if they stay hidden it is gone.
    pub(crate) fn health(&self) -> Result<Health, Error> {
        let begin = self.bus.now();
        while self.bus.read32(CSTS) == u32::MAX {
            if self.bus.now().saturating_sub(begin) > HIDDEN {
                return Err(Error::Gone);
            }
            self.bus.wait(LOOK)?;
        }
        match (self.bus.read32(CSTS), self.bus.read32(CC)) {
            (status, _) if status & CSTS_CFS != 0 => Ok(Health::Fatal),
            (status, configured) if status & CSTS_RDY == 0 || configured & CC_EN == 0 => Ok(Health::Disabled),
            _ => Ok(Health::Well),
        }
    }

    /// Does an admin command, and returns what it answers.
    pub(crate) fn ask(&mut self, command: Command, what: impl Fn() -> String) -> Result<u32, Error> {
        if self.admin.is_full() {
            return Err(Error::Silent(format!("{}: the controller answers no admin command", what())));
        }
        self.asked += 1;
        self.admin.push(command, Asked::Answer(self.asked));
        self.admin.ring(&self.bus, self.cap.stride());
        let begin = self.bus.now();
        let done = loop {
            let popped = self.admin.pop()?;
            self.admin.thank(&self.bus, self.cap.stride());
            match popped {
                Some(done) => match done.what {
                    Asked::Answer(number) if number == self.asked => break done,
                    what => self.note(&what),
                },
                None if self.bus.now().saturating_sub(begin) > self.timeout => {
                    let limit = self.timeout.as_secs_f64();
                    return Err(Error::Silent(format!("{}: no answer within {limit:.1} s", what())));
                }
                None => self.bus.wait(LOOK)?,
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
        ControllerInfo::read(&self.identify(0, admin::CNS_CONTROLLER, "the controller")?)
    }

    /// The first namespaces, as many as there is room for in a page: 1024.
    pub(crate) fn namespaces(&mut self) -> Result<Vec<u32>, Error> {
        Ok(active(&self.identify(0, admin::CNS_NAMESPACES, "its namespaces")?))
    }

    /// A namespace of plain blocks; none if there is none of that number.
    ///
    /// # Errors
    /// `Unsupported` if it is for other commands.
    pub(crate) fn namespace(&mut self, id: u32) -> Result<Option<NamespaceInfo>, Error> {
        if self.cap.has_command_sets() {
            let what = format!("the command set of namespace {id}");
            match self.identify(id, admin::CNS_DESCRIPTORS, &what) {
                Ok(page) => check_command_set(id, &page)?,
                // There is no such namespace, which is told below, or no list, and then there are plain blocks alone.
                Err(Error::Status { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let page = self.identify(id, admin::CNS_NAMESPACE, &format!("namespace {id}"))?;
        NamespaceInfo::read(id, &page)
    }

    /// Asks for pairs of queues, at least one, and returns how many it grants: fewer, or more.
    pub(crate) fn grant(&mut self, pairs: u16) -> Result<u16, Error> {
        let count = u32::from(pairs - 1);
        let command = Command::new(admin::SET_FEATURES, 0).word(10, admin::QUEUES).word(11, count << 16 | count);
        let granted = self.ask(command, || format!("asking for {pairs} pairs of queues"))?;
        Ok((granted as u16).min((granted >> 16) as u16).saturating_add(1))
    }

    /// Makes a pair of queues known to it. With interrupts, completions cause that of number `vector`.
    pub(crate) fn create<T>(&mut self, queue: &Queue<T>, vector: Option<u16>) -> Result<(), Error> {
        let (id, last) = (u32::from(queue.id()), u32::from(queue.depth() - 1));
        let (commands, completions) = queue.addrs();
        let interrupts = vector.map_or(0, |vector| u32::from(vector) << 16 | 1 << 1);
        // Both lie in one piece (bit 0).
        let command = Command::new(admin::CREATE_CQ, 0).data(completions, 0).word(10, last << 16 | id);
        self.ask(command.word(11, interrupts | 1), || format!("making completion queue {id}"))?;
        let command = Command::new(admin::CREATE_SQ, 0).data(commands, 0).word(10, last << 16 | id);
        self.ask(command.word(11, id << 16 | 1), || format!("making submission queue {id}"))?;
        Ok(())
    }

    /// Asks it to give a command up, and does not wait for its answer. False if it has as many Aborts as it takes, which is
    /// `most`.
    pub(crate) fn abort(&mut self, queue: u16, id: u16, most: u16) -> bool {
        // One slot stays for commands that are waited for, if there are two.
        let most = most.min((self.admin.depth() - 2).max(1));
        if self.aborts >= most || self.admin.is_full() {
            return false;
        }
        let command = Command::new(admin::ABORT, 0).word(10, u32::from(id) << 16 | u32::from(queue));
        self.admin.push(command, Asked::Abort { queue, id, since: self.bus.now() });
        self.admin.ring(&self.bus, self.cap.stride());
        self.aborts += 1;
        true
    }

    /// The commands whose Abort was answered since the last time, by queue and identifier. An Abort may be too late, or not
    /// able to: the command's own completion tells.
    pub(crate) fn answered(&mut self) -> Result<Vec<(u16, u16)>, Error> {
        if self.aborts > 0 {
            while let Some(done) = self.admin.pop()? {
                self.note(&done.what);
            }
            self.admin.thank(&self.bus, self.cap.stride());
        }
        Ok(mem::take(&mut self.answered))
    }

    /// What came back though it is not waited for: an Abort, or what was given up.
    fn note(&mut self, what: &Asked) {
        if let &Asked::Abort { queue, id, .. } = what {
            self.aborts -= 1;
            self.answered.push((queue, id));
        }
    }

    /// Since when the oldest Abort is out.
    pub(crate) fn aborting_since(&mut self) -> Option<Duration> {
        match self.admin.oldest()?.1 {
            Asked::Abort { since, .. } => Some(*since),
            Asked::Answer(_) => None,
        }
    }

    /// Shuts it down in order: what it has in its cache is safe afterwards. Then it is stopped.
    pub(crate) fn shut_down(&mut self) -> Result<(), Error> {
        if !self.may_be_running {
            return Ok(());
        }
        let mut shut = Ok(());
        if self.health()? == Health::Well {
            self.bus.write32(CC, CC_SHAPE | CC_EN | CC_SHN_NORMAL);
            let limit = Duration::from_millis(self.cap.ready_ms());
            shut = self.wait_for(CSTS_SHST, &[CSTS_SHST_DONE], limit, "it did not shut down");
        }
        self.disable().and(shut)
    }

    /// Makes sure that it writes to no memory any more: it says that it stopped, or may not reach memory. False if neither.
    pub(crate) fn stop(&mut self) -> bool {
        let is_stopped = !self.may_be_running || self.disable().is_ok() || self.bus.set_master(false).is_ok();
        self.may_be_running = !is_stopped;
        is_stopped
    }
}

impl<B: Bus> Drop for Controller<B> {
    fn drop(&mut self) {
        if !self.stop() {
            self.admin.leak();
            self.page.leak();
        }
    }
}

impl Health {
    /// What happened, if it is not well.
    pub(crate) fn said(self) -> &'static str {
        match self {
            Self::Well => "the controller is well",
            Self::Fatal => "the controller says that it failed for good",
            Self::Disabled => "somebody else has reset the controller",
        }
    }
}
