//! Opening the named drive.
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use pagemill::{Allocator, Memory as Arena, PAGE_SIZE};

use super::signals::Stop;
use crate::Error;
use crate::controller::Controller;
use crate::dma::{Dma, Mapped};
use crate::drive::{Drive, Settings};
use crate::pci::{Address, Function, System};
use crate::queue::Queue;
use crate::vfio::VfioDevice;

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

    /// Doorbells by registers, even if memory would do
    #[arg(long)]
    no_shadows: bool,

    /// Reset the controller every N requests; none is lost
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    reset_every: Option<u64>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds".to_owned())?;
    if (0.001..=86_400.0).contains(&seconds) { Ok(seconds) } else { Err("from 0.001 to 86400".to_owned()) }
}

impl DriveArgs {
    /// The drive, and all its queues as one, for this thread.
    pub(super) fn open(&self) -> Result<(Drive, Queue), Error> {
        let settings = Settings {
            queues: self.queues,
            depth: self.depth,
            timeout: Duration::from_secs_f64(self.timeout),
            namespace: self.namespace,
            is_polled: self.poll,
            has_shadows: !self.no_shadows,
            reset_every: self.reset_every,
        };
        let drive = Drive::open(&memory(self.memory)?, self.address, settings)?;
        let queue = drive.all();
        Ok((drive, queue))
    }

    /// Requests at a time, in all queues.
    pub(super) fn in_all(&self) -> usize {
        usize::from(self.depth) * usize::from(self.queues)
    }

    /// A check between steps: whether a signal came. The drive's messages go to `notice`.
    pub(super) fn checking<'a>(
        &self,
        drive: &'a Drive,
        stop: &'a Stop,
        notice: &'a mut dyn FnMut(&str),
    ) -> impl FnMut() -> Result<(), Error> + use<'a> {
        move || {
            drive.said().iter().for_each(|said| notice(said));
            stop.check()
        }
    }
}

/// A controller that is only asked, and its memory, which is to be dropped after it.
pub(super) struct Asked {
    pub(super) controller: Controller,
    _mapped: Arc<Mapped>,
}

/// Opens a controller that is only asked. It has no queues but the admin queue.
pub(super) fn asked(address: Address) -> Result<Asked, Error> {
    let system = System::this();
    let drive = Function::open(&system, address)?;
    let mapped = memory(LITTLE)?.attach(&system, &drive)?;
    let bus = VfioDevice::open(mapped.container()?, &drive, 0)?;
    let mut controller = Controller::new(Arc::new(bus), mapped.memory(), Duration::from_secs(10))?;
    controller.start()?;
    Ok(Asked { controller, _mapped: mapped })
}

fn memory(mib: u32) -> Result<Dma, Error> {
    let pages = mib as usize * ((1 << 20) / PAGE_SIZE);
    let allocator = Allocator::builder().memory(Arena::anonymous(pages).within_limit()).build();
    Ok(Dma::new(&allocator.map_err(|why| Error::Exhausted(why.into()))?))
}
