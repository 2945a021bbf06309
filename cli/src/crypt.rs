//! `pagemill crypt`: the subcommands of the crate `pagemill-crypt`, said and failed as this program does.
use std::io::{self, Write};

pub(crate) use pagemill_crypt::commands::CryptArgs;

use crate::failure::{Failure, print, printable};

pub(crate) fn run(args: &CryptArgs) -> Result<(), Failure> {
    let said = pagemill_crypt::commands::run(args, &mut warn).map_err(|error| {
        let failure = Failure::new(args.name(), &error);
        match error.next_step() {
            Some(next) => failure.next(next),
            None => failure,
        }
    })?;
    said.warnings.iter().for_each(|warning| warn(warning));
    print(&said.out)
}

fn warn(what: &str) {
    // With standard error closed there is nobody to tell.
    let _ = writeln!(io::stderr(), "pagemill: crypt: {}", printable(what));
}
