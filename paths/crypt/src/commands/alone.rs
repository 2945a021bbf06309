//! What commands have in common that destroy something a server or a mount needs: they claim the volume, and ask first.
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::hold::{Claim, HeaderFile, refuse_one_file};
use super::{json_line, shown};
use crate::{Error, Store};

/// Which volume, and whether to ask.
#[derive(Args, Debug)]
pub(super) struct AloneArgs {
    /// The file, block device or NBD URI
    pub(super) image: PathBuf,

    /// The file that has the header, where it is detached
    #[arg(long, value_name = "FILE")]
    pub(super) header: Option<PathBuf>,

    /// Do it without asking
    #[arg(long)]
    force: bool,

    /// Print it as a JSON object
    #[arg(long)]
    json: bool,
}

impl AloneArgs {
    /// The file with the header.
    pub(super) fn file(&self) -> &Path {
        self.header.as_ref().unwrap_or(&self.image)
    }

    /// The header's file, and how long the data's is. Both are claimed as long as the claim lasts.
    pub(super) fn open(&self) -> Result<(HeaderFile, u64, Claim), Error> {
        self.header.as_deref().map_or(Ok(()), |header| refuse_one_file(&self.image, header))?;
        let data = HeaderFile::open(&self.image, true)?;
        let mut claim = data.claim(true)?;
        let data_len = data.size().map_err(|error| Error::io(shown(&self.image), error))?;
        let header = match &self.header {
            Some(path) => {
                let header = HeaderFile::open(path, true)?;
                claim.add(header.claim(true)?);
                header
            }
            None => data,
        };
        Ok((header, data_len, claim))
    }

    /// Asks whether to go on, with a sentence that says what will be lost.
    pub(super) fn confirm(&self, what: &str) -> Result<(), Error> {
        if self.force {
            return Ok(());
        }
        let Ok(mut terminal) = File::options().read(true).write(true).open("/dev/tty") else {
            let why = format!("{what}. There is no terminal to ask whether you want that: if you do, say --force");
            return Err(Error::Request(why));
        };
        match ask(&mut terminal, what).map_err(|error| Error::io("the terminal", error))? {
            true => Ok(()),
            false => Err(Error::Request("nothing was changed: to go on, type YES, or say --force".to_owned())),
        }
    }

    /// What was done: a sentence, or the fields of a JSON object beside the image's name.
    pub(super) fn said(&self, what: &str, mut fields: serde_json::Value) -> String {
        let image = shown(&self.image);
        if !self.json {
            return format!("{image}: {what}\n");
        }
        fields["image"] = image.into();
        json_line(&fields)
    }
}

/// Whether the user types YES.
fn ask(terminal: &mut File, what: &str) -> io::Result<bool> {
    terminal.write_all(format!("{what}.\nType YES to go on: ").as_bytes())?;
    // A terminal gives a line at a time.
    let mut line = [0; 64];
    let len = terminal.read(&mut line)?;
    Ok(line[..len] == *b"YES\n")
}

#[cfg(test)]
mod tests {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

    use super::*;

    #[test]
    fn only_yes_is_an_assent() {
        let pty = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&pty).unwrap();
        unlockpt(&pty).unwrap();
        let name = ptsname(&pty, Vec::new()).unwrap();
        let mut user = File::from(pty);
        for (line, expected) in
            [("YES\n", true), ("yes\n", false), ("\n", false), ("YES, but\n", false), ("\u{4}", false)]
        {
            let mut terminal = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
            user.write_all(line.as_bytes()).unwrap();
            assert_eq!(ask(&mut terminal, "All is lost").unwrap(), expected, "{line:?}");
        }
    }
}
