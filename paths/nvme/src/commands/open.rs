//! Opening the named drive.
use std::time::Duration;

use clap::Args;
use pagemill::{Allocator, Memory as Arena, PAGE_SIZE, VfioMap};

use super::signals::Stop;
use crate::Error;
use crate::controller::Controller;
use crate::drive::{Drive, Settings};
use crate::memory::Memory;
use crate::pci::{Address, Function, System};
use crate::vfio::{Container, VfioDevice};

/// Memory for a controller that is only identified, in MiB.
const LITTLE: u32 = 8;

/// The drive, and the settings for driving it.
#[derive(Args, Debug)]
pub(super) struct DriveArgs {
    /// The drive's PCI address, as 0000:01:00.0
    #[arg(value_name = "DEV")]
    pub(super) address: Address,

    /// The namespace
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    namespace: u32,

    /// Pairs of queues
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    queues: u16,

    /// Requests in each queue at a time
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=4095))]
    pub(super) depth: u16,

    /// Look for completions; no interrupts
    #[arg(long)]
    pub(super) poll: bool,

    /// MiB for queues, lists and data
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    memory: u32,

    /// Seconds a command may take
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds)]
    timeout: f64,

    /// Reset the controller every N requests; none is lost
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    reset_every: Option<u64>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds".to_owned())?;
    if (0.001..=86_400.0).contains(&seconds) { Ok(seconds) } else { Err("from 0.001 to 86400".to_owned()) }
}

impl DriveArgs {
    pub(super) fn open(&self) -> Result<Drive<VfioDevice>, Error> {
        let vectors = if self.poll { 0 } else { self.queues + 1 };
        let controller = controller(self.address, self.memory, vectors, Duration::from_secs_f64(self.timeout))?;
        let settings = Settings {
            queues: self.queues,
            depth: self.depth,
            timeout: Duration::from_secs_f64(self.timeout),
            namespace: self.namespace,
            reset_every: self.reset_every,
        };
        Drive::start(controller, settings)
    }

    /// Requests at a time, in all queues.
    pub(super) fn in_all(&self) -> usize {
        usize::from(self.depth) * usize::from(self.queues)
    }

    /// A check between steps: whether a signal came. The drive's messages go to `notice`.
    pub(super) fn checking<'a>(
        &self,
        stop: &'a Stop,
        notice: &'a mut dyn FnMut(&str),
    ) -> impl FnMut(&mut Drive<VfioDevice>) -> Result<(), Error> + use<'a> {
        move |drive| {
            drive.said().iter().for_each(|said| notice(said));
            stop.check()
        }
    }
}

/// A controller that is only identified.
pub(super) fn asked(address: Address) -> Result<Controller<VfioDevice>, Error> {
    let mut controller = controller(address, LITTLE, 0, Duration::from_secs(10))?;
    controller.start()?;
    Ok(controller)
}

fn controller(
    address: Address,
    memory_mib: u32,
    vectors: u16,
    timeout: Duration,
) -> Result<Controller<VfioDevice>, Error> {
    let system = System::this();
    let drive = Function::open(&system, address)?;
    let container = Container::open(&system, &drive)?;
    let pages = memory_mib as usize * ((1 << 20) / PAGE_SIZE);
    let allocator = Allocator::builder().memory(Arena::anonymous(pages).within_limit()).build();
    let allocator = allocator.map_err(|why| Error::Exhausted(why.into()))?;
    let memory = Memory::new(&allocator, VfioMap::new(container.fd())?)?;
    Controller::new(VfioDevice::open(container, &drive, vectors)?, memory, timeout)
}
