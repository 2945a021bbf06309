//! `pagemill crypt`: the subcommands of the crate `pagemill-crypt`, said and failed as this program does.
use std::io::{self, Write};

pub(crate) use pagemill_crypt::commands::CryptArgs;

use crate::failure::{Failure, print, printable};

pub(crate) fn run(args: &CryptArgs) -> Result<(), Failure> {
    let said = pagemill_crypt::commands::run(args).map_err(|error| {
        let failure = Failure::new(args.name(), &error);
        match error.next_step() {
            Some(next) => failure.next(next),
            None => failure,
        }
    })?;
    for warning in said.warnings {
        // With standard error closed there is nobody to warn.
        let _ = writeln!(io::stderr(), "pagemill: crypt: {}", printable(&warning));
    }
    print(&said.out)
}
