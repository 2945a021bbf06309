//! Allocators: made from options, grown, looked at, and closed.
use crate::error::{Error, code};
use crate::gfp::gfp;
use crate::handle::{self, handle};
use crate::sized::{self, BeginsWithSize};
use crate::text;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::AtomicPtr;
use core::sync::atomic::Ordering::{AcqRel, Acquire};
use core::time::Duration;
use pagemill::{Backend, BuildError, Faults, Memory, NodeId, NodeMask, Policy, Watermarks};

/// An allocator of pages. The type is opaque.
///
/// Any thread may use an allocator, several at the same time. Pages keep their memory alive: a page is valid until it is freed,
/// also after its allocator was released.
///
/// The child of a `fork` goes on with a copy of each allocator: what was handed out stays handed out, everything else is free there.
/// Memory of `PAGEMILL_MEMORY_MEMFD`, and shared memory that was brought, stays the parent's. A child that was made without the
/// C library's fork handlers (`_Fork`, `vfork`, a raw system call) must call nothing of this library until it execs.
pub struct Allocator;
handle!(Allocator, pagemill::Allocator, b"pm alloc");

/// Private memory, committed as it is touched.
pub const PAGEMILL_MEMORY_ANONYMOUS: u32 = 0;
/// Huge pages of 2 MiB that the administrator set aside. `pages` is a multiple of 512.
pub const PAGEMILL_MEMORY_HUGE_PAGES: u32 = 1;
/// A file in memory, which another process may map.
pub const PAGEMILL_MEMORY_MEMFD: u32 = 2;
/// A file in memory of huge pages.
pub const PAGEMILL_MEMORY_MEMFD_HUGE_PAGES: u32 = 3;
/// Memory that the caller has mapped: `pages` pages from `start`, which is aligned to 2 MiB. It stays readable and writable,
/// and nothing else uses it, until the allocator is closed and every page was freed.
pub const PAGEMILL_MEMORY_BROUGHT: u32 = 4;

/// The memory is locked, which commits all of it.
pub const PAGEMILL_MEMORY_LOCKED: u32 = 1;
/// If the system refuses huge pages, or to lock the memory, ordinary memory will do.
pub const PAGEMILL_MEMORY_OR_ORDINARY: u32 = 2;
/// Only as much memory as the process's memory limit has room for.
pub const PAGEMILL_MEMORY_WITHIN_LIMIT: u32 = 4;
/// Its device addresses lie below 4 GiB: it serves `PAGEMILL_GFP_DMA32`.
pub const PAGEMILL_MEMORY_DMA32: u32 = 8;

/// A piece of memory for an allocator to manage: an arena. Set `size` to `sizeof(struct pagemill_memory)`, `pages`, and
/// whatever else is not to be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MemoryOptions {
    /// The size of this structure, in bytes.
    pub size: usize,
    /// How much, in pages of 4096 bytes.
    pub pages: usize,
    /// One of `PAGEMILL_MEMORY_ANONYMOUS` to `PAGEMILL_MEMORY_BROUGHT`.
    pub kind: u32,
    /// Any of `PAGEMILL_MEMORY_LOCKED` to `PAGEMILL_MEMORY_DMA32`.
    pub flags: u32,
    /// The first byte of memory that is brought.
    pub start: *mut c_void,
    /// The NUMA node that it is on.
    pub node: u32,
    /// Free pages below which only requests with access to reserves succeed.
    pub min: u32,
    /// Free pages below which background reclaim wakes.
    pub low: u32,
    /// Free pages at which background reclaim stops.
    pub high: u32,
    /// Pages that are kept from requests that could use another kind of zone.
    pub lowmem_reserve: u32,
    /// 0.
    pub reserved: u32,
}
// SAFETY: integers and a pointer, the size first.
unsafe impl BeginsWithSize for MemoryOptions {}

/// Per-CPU lists: restartable sequences where they work, else the portable backend. `PAGEMILL_BACKEND` in the environment
/// chooses too.
pub const PAGEMILL_BACKEND_BEST: u32 = 0;
/// Restartable sequences, or an error.
pub const PAGEMILL_BACKEND_RSEQ: u32 = 1;
/// The portable backend.
pub const PAGEMILL_BACKEND_PORTABLE: u32 = 2;

/// The system is asked for no huge pages: what a program touches is all that it commits, 4 KiB at a time.
pub const PAGEMILL_NO_HUGE_PAGES: u32 = 1;
/// A thread reclaims while a zone is below its watermarks.
pub const PAGEMILL_BACKGROUND_RECLAIM: u32 = 2;

/// Memory near the caller's CPU first. In a request: the allocator's policy.
pub const PAGEMILL_POLICY_DEFAULT: u32 = 0;
/// The lowest node of `policy_nodes` first, then the others.
pub const PAGEMILL_POLICY_PREFERRED: u32 = 1;
/// The nodes of `policy_nodes` alone.
pub const PAGEMILL_POLICY_BIND: u32 = 2;
/// The nodes of `policy_nodes` in turn.
pub const PAGEMILL_POLICY_INTERLEAVE: u32 = 3;
/// In a request: memory near the caller's CPU first, whatever the allocator's policy is.
pub const PAGEMILL_POLICY_LOCAL: u32 = 4;

/// What an allocator is to be like. Set `size` to `sizeof(struct pagemill_options)`, and whatever is not to be 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    /// The size of this structure, in bytes.
    pub size: usize,
    /// The arena's size, in pages of 4096 bytes, divided among the system's nodes. 0: half of the system's memory, as address
    /// space, unless `memory` is set.
    pub pages: usize,
    /// An arena besides, or null.
    pub memory: *const MemoryOptions,
    /// One of `PAGEMILL_BACKEND_BEST` to `PAGEMILL_BACKEND_PORTABLE`.
    pub backend: u32,
    /// `PAGEMILL_NO_HUGE_PAGES` and `PAGEMILL_BACKGROUND_RECLAIM`.
    pub flags: u32,
    /// One of `PAGEMILL_POLICY_DEFAULT` to `PAGEMILL_POLICY_LOCAL`: the policy of requests that name none.
    pub policy: u32,
    /// 0.
    pub reserved: u32,
    /// The nodes of the policy, bit n for node n.
    pub policy_nodes: u64,
    /// Whole free pageblocks go back to the system after they were free for so long, in milliseconds. 0: never.
    pub give_back_after_ms: u64,
    /// Faults to inject, as in `"after=100,p=0.01,gfp=atomic,seed=7"`; null: those of `PAGEMILL_FAIL` in the environment.
    pub faults: *const c_char,
    /// Gets the words of an error, if it is not null: up to `message_size` bytes, with the 0 at the end.
    pub message: *mut c_char,
    /// The bytes at `message`.
    pub message_size: usize,
}
// SAFETY: integers and pointers, the size first.
unsafe impl BeginsWithSize for Options {}

/// An error of C's, with the words of the library's error if it had any.
struct Refused(Error, Option<BuildError>);

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self(error, None)
    }
}

impl From<BuildError> for Refused {
    fn from(why: BuildError) -> Self {
        Self(why.into(), Some(why))
    }
}

/// The library's description of memory.
fn memory_of(options: &MemoryOptions) -> Result<Memory, Error> {
    const FLAGS: u32 =
        PAGEMILL_MEMORY_LOCKED | PAGEMILL_MEMORY_OR_ORDINARY | PAGEMILL_MEMORY_WITHIN_LIMIT | PAGEMILL_MEMORY_DMA32;
    let pages = options.pages;
    let memory = match options.kind {
        PAGEMILL_MEMORY_ANONYMOUS => Memory::anonymous(pages),
        PAGEMILL_MEMORY_HUGE_PAGES => Memory::huge_pages(pages),
        PAGEMILL_MEMORY_MEMFD => Memory::memfd(pages),
        PAGEMILL_MEMORY_MEMFD_HUGE_PAGES => Memory::memfd_of_huge_pages(pages),
        // SAFETY: the C caller promises what this function asks for, at `PAGEMILL_MEMORY_BROUGHT`.
        PAGEMILL_MEMORY_BROUGHT => unsafe { Memory::brought(options.start.cast(), pages) },
        _ => return Err(Error::Invalid),
    };
    if options.flags & !FLAGS != 0 || options.reserved != 0 {
        return Err(Error::Invalid);
    }
    let has = |flag| options.flags & flag != 0;
    let MemoryOptions { min, low, high, lowmem_reserve, .. } = *options;
    let memory = memory.node(node(options.node)?).watermarks(Watermarks { min, low, high, lowmem_reserve });
    let memory = if has(PAGEMILL_MEMORY_LOCKED) { memory.locked() } else { memory };
    let memory = if has(PAGEMILL_MEMORY_OR_ORDINARY) { memory.or_ordinary() } else { memory };
    let memory = if has(PAGEMILL_MEMORY_WITHIN_LIMIT) { memory.within_limit() } else { memory };
    Ok(if has(PAGEMILL_MEMORY_DMA32) { memory.dma32() } else { memory })
}

pub(crate) fn node(node: u32) -> Result<NodeId, Error> {
    NodeId::new(node as usize).ok_or(Error::Node)
}

/// The library's policy; `None` for the default.
pub(crate) fn policy_of(policy: u32, nodes: u64) -> Result<Option<Policy>, Error> {
    let set = NodeMask::from_bits(nodes);
    match policy {
        PAGEMILL_POLICY_DEFAULT => Ok(None),
        PAGEMILL_POLICY_LOCAL => Ok(Some(Policy::Local)),
        PAGEMILL_POLICY_PREFERRED => Ok(Some(Policy::Preferred(node(nodes.trailing_zeros())?))),
        PAGEMILL_POLICY_BIND => Ok(Some(Policy::Bind(set))),
        PAGEMILL_POLICY_INTERLEAVE => Ok(Some(Policy::Interleave(set))),
        _ => Err(Error::Node),
    }
}

/// # Safety
/// The pointers in `options` are null, or lead to what their fields say.
unsafe fn build(options: &Options) -> Result<pagemill::Allocator, Refused> {
    if options.flags & !(PAGEMILL_NO_HUGE_PAGES | PAGEMILL_BACKGROUND_RECLAIM) != 0 || options.reserved != 0 {
        return Err(Error::Invalid.into());
    }
    let builder = pagemill::Allocator::builder()
        .huge_pages(options.flags & PAGEMILL_NO_HUGE_PAGES == 0)
        .background_reclaim(options.flags & PAGEMILL_BACKGROUND_RECLAIM != 0);
    let builder = if options.pages > 0 { builder.pages(options.pages) } else { builder };
    let builder = match options.backend {
        PAGEMILL_BACKEND_BEST => builder,
        PAGEMILL_BACKEND_RSEQ => builder.backend(Backend::Rseq),
        PAGEMILL_BACKEND_PORTABLE => builder.backend(Backend::Portable),
        _ => return Err(Error::Backend.into()),
    };
    let builder = match policy_of(options.policy, options.policy_nodes)? {
        Some(policy) => builder.policy(policy),
        None => builder,
    };
    let builder = match options.give_back_after_ms {
        0 => builder,
        idle => builder.give_back_after(Duration::from_millis(idle)),
    };
    let builder = if options.faults.is_null() {
        builder
    } else {
        // SAFETY: the caller says that it is a text with a 0 at its end.
        let faults = unsafe { CStr::from_ptr(options.faults) }.to_str().map_err(|_| Error::Faults)?;
        builder.faults(faults.parse::<Faults>()?)
    };
    if options.memory.is_null() {
        return Ok(builder.build()?);
    }
    // SAFETY: the caller says so.
    let memory = memory_of(unsafe { sized::read(options.memory) }?)?;
    Ok(builder.memory(memory).build()?)
}

/// Makes an allocator, by options or, if they are null, with half of the system's memory as address space. `*allocator` gets the
/// handle, or null. It must be released or closed.
///
/// Errors: 2xx for options that cannot be, 4xx for what the system refuses. `options->message` gets the details.
///
/// Threads: any. Signal handlers: no. It may wait for locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_allocator_create(options: *const Options, allocator: *mut *mut Allocator) -> Error {
    // SAFETY: the caller passes null or a place for a pointer.
    let Some(place) = (unsafe { allocator.as_mut() }) else { return Error::Argument };
    *place = null_mut();
    if options.is_null() {
        return match pagemill::Allocator::builder().build() {
            Ok(built) => {
                *place = handle::open(built);
                Error::None
            }
            Err(why) => why.into(),
        };
    }
    // SAFETY: the caller passes a structure of the size that it says.
    let options = match unsafe { sized::read(options) } {
        Ok(options) => options,
        Err(error) => return error,
    };
    // SAFETY: the caller passes options as their fields say.
    match unsafe { build(options) } {
        Ok(built) => {
            *place = handle::open(built);
            Error::None
        }
        Err(Refused(error, why)) => {
            let words = why.map_or_else(|| text::sentence(error).to_owned(), |why| why.to_string());
            // SAFETY: the caller passes null, or so many bytes.
            unsafe { text::copy(&words, options.message, options.message_size) };
            error
        }
    }
}

/// The allocator of the whole process, made on the first call: half of the system's memory as address space, committed as it is
/// touched. Every caller gets the same handle, which cannot be closed. Null if the system refuses even that.
///
/// Threads: any. Signal handlers: no, but for a call that is not the first.
#[unsafe(no_mangle)]
pub extern "C" fn pagemill_allocator_global() -> *mut Allocator {
    // Acquire pairs with the AcqRel below.
    let handle = GLOBAL.load(Acquire);
    if !handle.is_null() {
        return handle;
    }
    let Ok(global) = pagemill::Allocator::try_global() else { return null_mut() };
    let handle = handle::open(global.clone());
    match GLOBAL.compare_exchange(null_mut(), handle, AcqRel, Acquire) {
        Ok(_) => handle,
        Err(other) => {
            // SAFETY: this call opened it, and nobody else has seen it.
            drop(unsafe { handle::close(handle) });
            other
        }
    }
}
static GLOBAL: AtomicPtr<Allocator> = AtomicPtr::new(null_mut());

/// Lets an allocator go. Its pages stay valid; each arena is unmapped when its last page is freed.
///
/// Errors: `PAGEMILL_ERROR_HANDLE` for a handle that is closed already, and for the one of `pagemill_allocator_global`.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no. It may wait for locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_allocator_release(allocator: *mut Allocator) -> Error {
    if is_global(allocator) {
        return Error::Handle;
    }
    // SAFETY: the caller passes null or a handle.
    code(unsafe { handle::close(allocator) }.map(drop))
}

/// Closes an allocator of which no page is handed out, and unmaps its memory. `*pages_out`, unless the pointer is null, gets the
/// number of pages that are handed out.
///
/// Errors: `PAGEMILL_ERROR_IN_USE` if there are any; nothing has changed then. `PAGEMILL_ERROR_HANDLE` as for
/// `pagemill_allocator_release`.
///
/// Threads: any, and no thread may use the handle meanwhile or later. Signal handlers: no. It may wait for locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_allocator_close(allocator: *mut Allocator, pages_out: *mut usize) -> Error {
    if is_global(allocator) {
        return Error::Handle;
    }
    // SAFETY: the caller passes null or a handle, and null or a place for a number.
    unsafe {
        let open = match handle::get(allocator) {
            Ok(open) => open.clone(),
            Err(error) => return error,
        };
        let out = open.close().err().map_or(0, |refused| refused.pages_out.get());
        if let Some(place) = pages_out.as_mut() {
            *place = out;
        }
        if out > 0 { Error::InUse } else { code(handle::close(allocator).map(drop)) }
    }
}

fn is_global(allocator: *const Allocator) -> bool {
    !allocator.is_null() && core::ptr::eq(allocator, GLOBAL.load(Acquire))
}

/// Adds an arena to an allocator.
///
/// Errors: as for `pagemill_allocator_create`.
///
/// Threads: any. Signal handlers: no. It may wait for locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_add_memory(allocator: *mut Allocator, memory: *const MemoryOptions) -> Error {
    let added = || {
        // SAFETY: the caller passes null or a handle, and null or a structure of the size that it says.
        let (allocator, memory) = unsafe { (handle::get(allocator)?, sized::read(memory)?) };
        allocator.add_memory(memory_of(memory)?)?;
        Ok(())
    };
    code(added())
}

/// An arena, as `pagemill_arenas` describes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Arena {
    /// Its first byte.
    pub start: *mut c_void,
    /// Its size, in pages of 4096 bytes.
    pub pages: usize,
    /// The NUMA node that it is on.
    pub node: u32,
    /// Whether it serves `PAGEMILL_GFP_DMA32`.
    pub is_dma32: u32,
}

/// Describes the allocator's arenas, in the order in which they were added: the first `n` of them at `arenas`. Returns how many there are, or
/// 0 for no open handle. An arena never moves: register it with a device once.
///
/// Threads: any. Signal handlers: no. It allocates memory with malloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_arenas(allocator: *const Allocator, arenas: *mut Arena, n: usize) -> usize {
    // SAFETY: the caller passes null or a handle.
    let Ok(allocator) = (unsafe { handle::get(allocator) }) else { return 0 };
    let found = allocator.arenas();
    for (at, arena) in found.iter().enumerate().take(if arenas.is_null() { 0 } else { n }) {
        let described = Arena {
            start: core::ptr::with_exposed_provenance_mut(arena.range.start),
            pages: arena.pages.get(),
            node: arena.node.get() as u32,
            is_dma32: u32::from(arena.kind == pagemill::ZoneKind::Dma32),
        };
        // SAFETY: the caller passes a place for n arenas.
        unsafe { arenas.add(at).write(described) };
    }
    found.len()
}

/// Moves the pages of all CPUs' lists to the zones. Returns how many; 0 for no open handle.
///
/// Threads: any. Signal handlers: no. It may wait for locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_drain(allocator: *mut Allocator) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(allocator) }.map_or(0, |allocator| allocator.drain().get())
}

/// Gives free memory back to the system. Returns how many pages; 0 for no open handle.
///
/// Threads: any. Signal handlers: no. It may wait for locks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pagemill_give_back(allocator: *mut Allocator) -> usize {
    // SAFETY: the caller passes null or a handle.
    unsafe { handle::get(allocator) }.map_or(0, |allocator| allocator.give_back().get())
}

/// Whether restartable sequences work on this system: 1 or 0.
///
/// Threads: any. Signal handlers: no.
#[unsafe(no_mangle)]
pub extern "C" fn pagemill_has_rseq() -> c_int {
    c_int::from(pagemill::self_test().is_ok())
}

/// The allocator and the flags of a request.
///
/// # Safety
/// Null or a handle.
#[inline]
pub(crate) unsafe fn request<'a>(
    allocator: *const Allocator,
    bits: u32,
) -> Result<(&'a pagemill::Allocator, pagemill::Gfp), Error> {
    // SAFETY: the caller says so.
    Ok((unsafe { handle::get(allocator) }?, gfp(bits)?))
}
