//! The commands that other crates implement: `bench`, `crypt`, `nvme` and `xdp`. Their errors become failures of this program.
use std::fmt::Display;
use std::io::{self, Write};

use crate::failure::{Failure, print, printable};

/// The exit code by which scripts know a wrong passphrase; `pagemill --help` lists it.
#[cfg(feature = "crypt")]
const WRONG_PASSPHRASE: u8 = 3;

#[cfg(feature = "bench")]
pub(crate) fn bench(args: &pagemill_bench::BenchArgs) -> Result<(), Failure> {
    use crate::failure::{USAGE, said};
    use pagemill_bench::Error;
    let program = std::env::current_exe().map_err(|error| Failure::new("this program's own file", said(&error)))?;
    let tables = [pagemill_crypt_bench::TABLE, pagemill_xdp_bench::TABLE, pagemill_nfs_bench::TABLE];
    pagemill_bench::run(args, &program, &tables).map_err(|error| {
        let failure = failed("no figures", &error, error.next_step());
        match error {
            Error::Interrupted { signal } => failure.by_signal(signal),
            Error::UnknownName { .. } | Error::NotBuilt { .. } | Error::NoRows | Error::Outputs(_) => {
                failure.code(USAGE)
            }
            _ => failure,
        }
    })
}

#[cfg(feature = "crypt")]
pub(crate) fn crypt(args: &pagemill_crypt::commands::CryptArgs) -> Result<(), Failure> {
    use pagemill_crypt::Error;
    let said = pagemill_crypt::commands::run(args, &mut |what| warn("crypt", what)).map_err(|error| {
        let failure = failed(args.name(), &error, error.next_step());
        match error {
            Error::WrongPassphrase { .. } => failure.code(WRONG_PASSPHRASE),
            _ => failure,
        }
    })?;
    said.warnings.iter().for_each(|warning| warn("crypt", warning));
    print(&said.out)
}

#[cfg(feature = "nfs")]
pub(crate) fn nfs(args: &pagemill_nfs::commands::NfsArgs) -> Result<(), Failure> {
    let said = pagemill_nfs::commands::run(args, &mut |what| warn("nfs", what))
        .map_err(|error| failed(args.name(), &error, Some(error.next_step())))?;
    print(&said)
}

#[cfg(feature = "nvme")]
pub(crate) fn nvme(args: &pagemill_nvme::commands::NvmeArgs) -> Result<(), Failure> {
    use pagemill_nvme::Error;
    let said = pagemill_nvme::commands::run(args, &mut |what| warn("nvme", what)).map_err(|error| {
        let failure = failed(args.name(), &error, error.next_step());
        match error {
            Error::Interrupted { signal, .. } => failure.by_signal(signal),
            _ => failure,
        }
    })?;
    print(&said.out)
}

#[cfg(feature = "xdp")]
pub(crate) fn xdp(args: &pagemill_xdp::commands::XdpArgs) -> Result<(), Failure> {
    use pagemill_xdp::Error;
    let said = pagemill_xdp::commands::run(args, &mut |what| warn("xdp", what)).map_err(|error| {
        let failure = failed(args.name(), &error, error.next_step());
        match error {
            Error::Interrupted { signal, .. } => failure.by_signal(signal),
            _ => failure,
        }
    })?;
    print(&said.out)
}

fn failed(what: &str, error: &impl Display, next: Option<&'static str>) -> Failure {
    let failure = Failure::new(what, error);
    match next {
        Some(next) => failure.next(next),
        None => failure,
    }
}

fn warn(command: &str, what: &str) {
    // If standard error is closed, the warning is lost and the command goes on.
    let _ = writeln!(io::stderr(), "pagemill: {command}: {}", printable(what));
}
