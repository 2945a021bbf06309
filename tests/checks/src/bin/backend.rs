//! Says which list backend `PAGEMILL_BACKEND`, or the self-test, leads to here. Ends with 3
//! where the one that is asked for cannot be had, and says why.

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
