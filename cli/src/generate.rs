//! `pagemill generate`: man pages and shell completions, made from the description of the command line that the program itself reads.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_complete::Shell;

use crate::failure::{Failure, said};

/// Write man pages and shell completions to a folder
///
/// They are placed below it as below /usr/local: share/man/man1, and the folders
/// in which bash, zsh and fish look for completions.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub(crate) struct GenerateArgs {
    /// The folder; it is made if there is none
    folder: PathBuf,
}

const AFTER_HELP: &str = "\
Example:
  pagemill generate ~/.local && man pagemill-copy";

/// Where each shell looks for completions below a prefix.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "share/bash-completion/completions/pagemill"),
    (Shell::Zsh, "share/zsh/site-functions/_pagemill"),
    (Shell::Fish, "share/fish/vendor_completions.d/pagemill.fish"),
];

/// Writes the files for this command line.
pub(crate) fn run(args: &GenerateArgs, command: Command) -> Result<(), Failure> {
    write(&args.folder, command).map_err(|error| {
        Failure::new(format!("can't write to {}", args.folder.display()), said(&error))
            .next("name a folder that you may write to")
    })
}

fn write(folder: &Path, mut command: Command) -> io::Result<()> {
    let pages = folder.join("share/man/man1");
    fs::create_dir_all(&pages)?;
    // Before completions: these add the command `help`, with a page for each command once more.
    clap_mangen::generate_to(command.clone(), pages)?;
    for (shell, name) in SHELLS {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut command, "pagemill", &mut script);
        let file = folder.join(name);
        fs::create_dir_all(file.parent().unwrap_or(folder))?;
        fs::write(file, script)?;
    }
    Ok(())
}
