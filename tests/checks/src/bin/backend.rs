//! Prints the list backend that `PAGEMILL_BACKEND`, or else the self-test, selects on this machine. If the machine does not
//! have the selected backend, prints why and ends with 3.

use std::process::ExitCode;

use pagemill::{Allocator, BuildError};

fn main() -> ExitCode {
    match Allocator::builder().pages(1).build() {
        Ok(memory) => {
            println!("backend: {}", memory.backend());
            ExitCode::SUCCESS
        }
        Err(BuildError::Backend { why }) => {
            println!("unavailable: {why}");
            ExitCode::from(3)
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}
