//! Options for the memory of a subcommand that moves a volume's bytes.
use clap::Args;
use pagemill::{Allocator, PAGE_SIZE};

use crate::Error;
use crate::serve::Memory;

/// The page cache and the memory between clients and the disk.
#[derive(Args, Debug)]
pub(super) struct MemoryArgs {
    /// Use the page cache even where direct I/O works
    #[arg(long)]
    pub(super) buffered: bool,

    /// Memory for requests under way, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    memory: u32,

    /// Pages of it that are reserved for writes
    #[arg(long, value_name = "PAGES", default_value_t = Memory::PROMISED as u32, value_parser = clap::value_parser!(u32).range(1..))]
    reserve: u32,
}

impl MemoryArgs {
    pub(super) fn memory(&self) -> Result<Memory, Error> {
        self.memory_and(0)
    }

    /// The same, and so many pages more.
    pub(super) fn memory_and(&self, more: usize) -> Result<Memory, Error> {
        let pages = self.memory as usize * ((1 << 20) / PAGE_SIZE);
        let reserve = self.reserve as usize;
        if reserve > pages {
            let why = format!(
                "a reserve of {reserve} pages does not fit into {} MiB, which are {pages}: give more with --memory, or say \
                 a smaller --reserve",
                self.memory
            );
            return Err(Error::Request(why));
        }
        let allocator = Allocator::builder().memory(pagemill::Memory::anonymous(pages + more).within_limit()).build();
        let allocator = allocator.map_err(|why| Error::Memory(why.into()))?;
        Memory::new(&allocator, reserve, Memory::PART).map_err(Error::Memory)
    }
}
