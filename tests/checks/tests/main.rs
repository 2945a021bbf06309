//! Promises that are tested from outside of the library, in one program.
#[macro_use]
#[path = "../../own_process.rs"]
mod own_process;

mod promises;
mod zero;
