//! Finds what is in an image before it is formatted: a header, a signature that `wipefs` knows, or any bytes that are
//! not zero.
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use super::hold::uri;
use super::shown;
use super::target::Target;
use crate::{Error, Luks, Store};

/// Bytes that are read at once, and at the beginning and the end of a large image.
const STEP: u64 = 1 << 20;
/// An image of up to this many bytes is read completely.
const READ_WHOLE: u64 = 256 << 20;
/// A larger image is read at this many places between its ends, at equal distances.
const PLACES: u64 = 1024;
/// Bytes that are read at each of them.
const PLACE: u64 = 4096;

pub(super) fn refuse_what_is_there(target: &Target<'_>) -> Result<(), Error> {
    let path = shown(target.path);
    match Luks::read(&target.file) {
        Err(Error::NoHeader { .. }) => {}
        Err(error @ Error::Io { .. }) => return Err(error),
        _ => return Err(Error::Occupied(format!("{path} has a LUKS header, and overwriting it loses its data"))),
    }
    if let (None, Some(signatures)) = (uri(target.path), known_signatures(target.path)) {
        return Err(Error::Occupied(format!("{path} has something else on it: {signatures}")));
    }
    match data_at(&target.file, target.len()?).map_err(|error| Error::io(path.clone(), error))? {
        Some(at) => Err(Error::Occupied(format!("{path} is not empty: there is data at {at}"))),
        None => Ok(()),
    }
}

/// The signatures that `wipefs` finds at an image's beginning and at its end. Also `None` without that program.
fn known_signatures(path: &Path) -> Option<String> {
    // Root's programs may not be in a user's PATH.
    let found = ["wipefs", "/usr/sbin/wipefs", "/sbin/wipefs"].into_iter().find_map(|program| {
        let mut command = Command::new(program);
        command.args(["--no-act", "--noheadings", "--output", "TYPE,OFFSET", "--"]).arg(path);
        command.env("LC_ALL", "C").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()
    })?;
    let text = String::from_utf8_lossy(&found.stdout);
    let signatures = text.lines().filter_map(|line| line.trim().split_once(char::is_whitespace));
    let signatures: Vec<_> = signatures.map(|(kind, at)| format!("{kind} at {}", at.trim())).collect();
    (!signatures.is_empty()).then(|| signatures.join(", "))
}

/// The place of a byte that is not zero in the first `len` bytes, if one is found.
fn data_at(store: &dyn Store, len: u64) -> io::Result<Option<u64>> {
    let mut buf = vec![0; STEP as usize];
    let mut has_data = |at: u64, size: u64| {
        let there = &mut buf[..size.min(len - at) as usize];
        store.read_at(there, at)?;
        io::Result::Ok(there.iter().position(|&byte| byte != 0).map(|place| at + place as u64))
    };
    let ends = [(0, STEP), (len.saturating_sub(STEP), STEP)];
    let between = (1..PLACES).map(move |place| (len / PLACES * place / PLACE * PLACE, PLACE));
    let whole = (0..len.min(READ_WHOLE)).step_by(STEP as usize).map(|at| (at, STEP));
    let mut places: Box<dyn Iterator<Item = (u64, u64)>> = match len {
        ..=READ_WHOLE => Box::new(whole),
        _ => Box::new(ends.into_iter().chain(between)),
    };
    places.find_map(|(at, size)| has_data(at, size).transpose()).transpose()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn data_is_found_at_both_ends_of_an_image_and_between() {
        for (len, places) in [
            (3_000_001, vec![0, 1_500_000, 3_000_000]),
            (READ_WHOLE, vec![100, READ_WHOLE / 2 + 12_345, READ_WHOLE - 1]),
            // A stretch between the ends that is longer than the distance of two places is found.
            (1 << 34, vec![5, STEP - 1, (1 << 34) - STEP, (1 << 34) - 1]),
        ] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(len).unwrap();
            assert_eq!(data_at(&file, len).unwrap(), None, "{len}");
            for place in places {
                file.write_all_at(&[1], place).unwrap();
                assert_eq!(data_at(&file, len).unwrap(), Some(place), "{len}");
                file.write_all_at(&[0], place).unwrap();
            }
        }
        let (len, file) = (1 << 34, tempfile::tempfile().unwrap());
        file.set_len(len).unwrap();
        file.write_all_at(&vec![7; (len / PLACES + PLACE) as usize], 5 << 30).unwrap();
        assert!(data_at(&file, len).unwrap().is_some_and(|at| at >= 5 << 30));
        assert_eq!(data_at(&file, 0).unwrap(), None);
    }
}
