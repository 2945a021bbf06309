//! `pagemill crypt resize`.
use std::fs::File;

use clap::Args;
use pagemill_command::size;

use super::alone::AloneArgs;
use super::hold::{HeaderFile, is_device, open_claimed, refuse_one_file, uri};
use super::{Said, shown};
use crate::{Error, Luks, Store};

/// Make a volume as large as its file or device, or as told
///
/// --size lengthens or shortens the file; a device is resized by its own tools
/// first. What is cut off is lost, so resize asks first, and refuses while the
/// volume is served or mounted: shrink the file system in it before. A volume in
/// use can grow: it has its new size when it is served or mounted again.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub(super) struct ResizeArgs {
    #[command(flatten)]
    volume: AloneArgs,

    /// How long the file is to be: bytes, or with K, M, G or T
    #[arg(long, value_parser = size)]
    size: Option<u64>,
}

pub(super) fn run(args: &ResizeArgs) -> Result<Said, Error> {
    resize(args).map_err(|error| error.in_file(args.volume.file()))
}

fn resize(args: &ResizeArgs) -> Result<Said, Error> {
    let ResizeArgs { volume, size } = args;
    let (image, is_detached) = (&volume.image, volume.header.is_some());
    if uri(image).is_some() {
        let why = "an export is as long as its server makes it: say resize there, where it is a file or a device";
        return Err(Error::Request(format!("{}: {why}", shown(image))));
    }
    volume.header.as_deref().map_or(Ok(()), |header| refuse_one_file(image, header))?;
    let header = HeaderFile::open(volume.file(), true)?;
    if is_device(image)? && size.is_some() {
        let why = format!("{} is a device: resize it by its own tools, then say resize without --size", shown(image));
        return Err(Error::Request(why));
    }
    let of_data = |error| Error::io(shown(image), error);
    let data = File::options().read(true).write(true).open(image).map_err(of_data)?;
    let has = data.size().map_err(of_data)?;
    let len = size.unwrap_or(has);
    let luks = header.read()?;
    luks.check_not_written_over()?;
    let fixed = luks.fixed_size();
    if fixed.is_some() {
        luks.check_changeable()?;
    }
    // `None` if its file is no volume as long as it is, which another size may mend.
    let before = fixed.or_else(|| Some(luks.geometry(has, is_detached).ok()?.len));
    let after = luks.whole_geometry(len, is_detached).map_err(|error| match error {
        Error::CutOff { needs, .. } => {
            Error::Request(format!("{len} bytes are too few: the smallest size that works is {needs} bytes"))
        }
        error => error,
    })?;
    let mut _claim = None;
    if len < has || before.is_some_and(|before| before > after.len) {
        _claim = Some(open_claimed(image, true)?);
        let len = after.len;
        volume.confirm(&format!("{}: what lies behind the volume's first {len} bytes will be lost", shown(image)))?;
    }
    header.locked(true, |store| {
        let mut now = Luks::read(store)?;
        if !now.is_same(&luks) || data.size().map_err(of_data)? != has {
            let why = format!("another program has changed {} or its header meanwhile: try again", shown(image));
            return Err(Error::Request(why));
        }
        let set_len = || data.set_len(len).and_then(|()| data.sync_all()).map_err(of_data);
        // At every moment the file is as long as its header says, or longer.
        if len > has {
            set_len()?;
        }
        if fixed.is_some() {
            now.set_size(store, after.len)?;
        }
        if len < has { set_len() } else { Ok(()) }
    })?;
    let mut what = format!("{} bytes of data", after.len);
    match before {
        Some(before) if before == after.len => what.push_str(", as before"),
        Some(before) => {
            what.push_str(&format!(", before {before}"));
            // While it is in use it can't shrink.
            if before < after.len {
                what.push_str("; a server or mount that runs has that until it is started again");
            }
        }
        None => {}
    }
    let out = volume.said(&what, serde_json::json!({ "data_bytes": after.len }));
    Ok(Said { out, warnings: Vec::new() })
}
