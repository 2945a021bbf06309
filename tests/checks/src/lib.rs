//! Pagemill as its users see it, for the project's checks: the README's example as a doc test, and the hot paths inlined into
//! a caller.

pub mod hot;

/// The README: its Rust blocks are compiled and run as doc tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
