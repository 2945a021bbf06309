//! The tests of `pagemill-core` by its public interface, in one program.

// Loom's atomics work in its models alone: there are tests for it, and no others. Miri takes a minute for two files in which it
// would see nothing: they have one thread, and the crate no `unsafe`.
#[cfg(not(any(loom, miri)))]
mod idle;
#[cfg(loom)]
mod loom_zone;
#[cfg(not(loom))]
mod marks;
#[cfg(not(any(loom, miri)))]
mod policy;
