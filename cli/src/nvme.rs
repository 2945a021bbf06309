//! `pagemill nvme`: the subcommands of the crate `pagemill-nvme`, said and failed as this program does.
use std::io::{self, Write};

use pagemill_nvme::Error;
pub(crate) use pagemill_nvme::commands::NvmeArgs;

use crate::failure::{Failure, print, printable};

pub(crate) fn run(args: &NvmeArgs) -> Result<(), Failure> {
    let said = pagemill_nvme::commands::run(args, &mut warn).map_err(|error| {
        let failure = Failure::new(args.name(), &error);
        let failure = match error {
            Error::Interrupted { signal, .. } => failure.by_signal(signal),
            _ => failure,
        };
        match error.next_step() {
            Some(next) => failure.next(next),
            None => failure,
        }
    })?;
    print(&said.out)
}

fn warn(what: &str) {
    // With standard error closed there is nobody to tell.
    let _ = writeln!(io::stderr(), "pagemill: nvme: {}", printable(what));
}
