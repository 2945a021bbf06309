//! `pagemill crypt`: the subcommands of the crate `pagemill-crypt`, said and failed as this program does.
use std::io::{self, Write};

use pagemill_crypt::Error;
pub(crate) use pagemill_crypt::commands::CryptArgs;

use crate::failure::{Failure, print, printable};

/// What a script tells a wrong passphrase by; `crypt --help` lists it.
const WRONG_PASSPHRASE: u8 = 3;

pub(crate) fn run(args: &CryptArgs) -> Result<(), Failure> {
    let said = pagemill_crypt::commands::run(args, &mut warn).map_err(|error| {
        let failure = Failure::new(args.name(), &error);
        let failure = match error {
            Error::WrongPassphrase { .. } => failure.code(WRONG_PASSPHRASE),
            _ => failure,
        };
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
