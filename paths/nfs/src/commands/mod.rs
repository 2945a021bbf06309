//! `pagemill nfs`: its arguments, and what it says.
mod allow;
mod report;
mod serve;

use clap::{Args, Subcommand};

use crate::Error;

/// Serve a directory over NFSv3
///
/// Clients mount it without a portmapper: MOUNT and NFS are on one port. The
/// server acts as the user that a client names, so it needs root.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub struct NfsArgs {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  pagemill nfs serve /srv/data
                     then, as root on this machine:
  mount -t nfs -o vers=3,nolock,proto=tcp,port=2049,mountport=2049 \\
    127.0.0.1:/srv/data /mnt
  pagemill nfs serve /srv/data --address 10.0.0.1 --allow 10.0.0.0/24

Exit codes:
  0  stopped by SIGTERM or SIGINT, with all that was written on the disk
  1  failed: standard error says what, why and what to do next
  2  the command line makes no sense";

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::ServeArgs),
}

impl NfsArgs {
    /// What the subcommand is called.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.command {
            Command::Serve(_) => "serve",
        }
    }
}

/// Runs the subcommand. `notice` is told, while it runs, what the user should know. Returns what goes to standard output.
///
/// # Errors
/// The directory cannot be served. What goes wrong for one client is answered to that client.
pub fn run(args: &NfsArgs, notice: &mut dyn FnMut(&str)) -> Result<String, Error> {
    match &args.command {
        Command::Serve(args) => serve::run(args, notice),
    }
}
