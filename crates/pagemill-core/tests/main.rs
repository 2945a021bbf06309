//! The tests of `pagemill-core` by its public interface, in one program.

// Loom's atomics work in its models alone: there are tests for it, and no others.
#[cfg(not(loom))]
mod buddy;
#[cfg(not(loom))]
mod contig;
#[cfg(not(loom))]
mod holes;
#[cfg(not(loom))]
mod idle;
#[cfg(loom)]
mod loom_buddy;
#[cfg(loom)]
mod loom_pcp;
#[cfg(not(loom))]
mod marks;
#[cfg(not(loom))]
mod memory_map;
#[cfg(not(loom))]
mod pcp;
#[cfg(not(loom))]
mod policy;
#[cfg(not(loom))]
mod used;
