//! Tests of the library's promises from outside, in one program.
#[macro_use]
#[path = "../../own_process.rs"]
mod own_process;

mod promises;
mod zero;
