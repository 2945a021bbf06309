//! The memory that drives reach: an allocator, mapped once for all of them.
//!
//! A container of VFIO has one set of IOMMU tables, and the groups of all drives join it. It is made when the first
//! drive is opened, since a container without a group has no IOMMU, and closed after the last one: `mapped` is held by
//! drives alone.
use std::sync::{Arc, Mutex, PoisonError, Weak};

use pagemill::{Allocator, Identity, VfioMap};

use crate::Error;
use crate::fake::Fake;
use crate::memory::Memory;
use crate::pci::{Function, System};
use crate::vfio::Container;

/// The memory that drives may read and write, for buffers and queues: all of an allocator's arenas.
///
/// Drives that are opened over the same `Dma` share its mapping, and each other's buffers. The IOMMU stops them from
/// reaching other memory. Mapping commits and locks an arena as a whole, so give it an allocator of its own.
///
/// ```
/// use pagemill::{Allocator, Memory};
/// use pagemill_nvme::{Dma, Drive, Fake, Request, Settings};
/// let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(8192)).build()?);
/// let [from, to] = [Fake::new(1000), Fake::new(1000)].map(|fake| Drive::on_fake(&dma, &fake, Settings::default()));
/// let (from, to) = (from?, to?);
/// // Copies blocks from drive to drive, without a copy in memory.
/// let buffer = from.queue()?.read(0, 64 << 10)?;
/// to.queue()?.write(0, buffer)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Dma {
    allocator: Allocator,
    mapped: Mutex<Weak<Mapped>>,
}

/// A mapping that some drives use. The fields are dropped in this order: the memory is unmapped, then the container is
/// closed.
pub(crate) struct Mapped {
    memory: Memory,
    /// `None` for drives in memory.
    container: Option<Container>,
}

impl Dma {
    /// The memory of `allocator`. Nothing is mapped before a drive is opened.
    #[must_use]
    pub fn new(allocator: &Allocator) -> Self {
        Self { allocator: allocator.clone(), mapped: Mutex::default() }
    }

    #[cfg(test)]
    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// The mapping for a function, in whose container its group is.
    pub(crate) fn attach(&self, system: &System, function: &Function) -> Result<Arc<Mapped>, Error> {
        let mut slot = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapped) = slot.upgrade() {
            mapped.container()?.join(system, function)?;
            return Ok(mapped);
        }
        let container = Container::open(system, function)?;
        let memory = Memory::new(&self.allocator, VfioMap::new(container.fd())?)?;
        let mapped = Arc::new(Mapped { memory, container: Some(container) });
        *slot = Arc::downgrade(&mapped);
        Ok(mapped)
    }

    /// The mapping for a drive in memory.
    pub(crate) fn attach_fake(&self, fake: &Fake) -> Result<Arc<Mapped>, Error> {
        let mut slot = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        fake.reach(&self.allocator);
        if let Some(mapped) = slot.upgrade() {
            return if mapped.container.is_none() { Ok(mapped) } else { Err(mixed()) };
        }
        let mapped = Arc::new(Mapped { memory: Memory::new(&self.allocator, Identity)?, container: None });
        *slot = Arc::downgrade(&mapped);
        Ok(mapped)
    }
}

impl Mapped {
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }
    pub(crate) fn container(&self) -> Result<&Container, Error> {
        self.container.as_ref().ok_or_else(mixed)
    }
}

fn mixed() -> Error {
    Error::Request("drives in memory and others have addresses of different kinds: take a Dma for each".to_owned())
}
