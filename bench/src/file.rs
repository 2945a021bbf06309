//! A file that a report is written to once everything is measured.
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::Error;

/// Opened before measuring, so that minutes of measuring do not end at a path that can't be written. The file keeps its
/// contents until the report is complete: a run that is stopped does not destroy the figures of an earlier one.
pub(crate) struct ReportFile {
    path: PathBuf,
    file: File,
}

impl ReportFile {
    pub(crate) fn open(path: &Path) -> Result<ReportFile, Error> {
        match File::options().write(true).create(true).truncate(false).open(path) {
            Ok(file) => Ok(ReportFile { path: path.to_owned(), file }),
            Err(error) => Err(Error::Write { path: path.to_owned(), error }),
        }
    }

    /// Whether both are the same regular file.
    pub(crate) fn is(&self, other: &ReportFile) -> bool {
        let id = |file: &File| file.metadata().ok().filter(|data| data.is_file()).map(|data| (data.dev(), data.ino()));
        id(&self.file).is_some() && id(&self.file) == id(&other.file)
    }

    pub(crate) fn write(self, body: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), Error> {
        let ReportFile { path, file } = self;
        let write = || {
            // A pipe or a device can't be truncated.
            if file.metadata()?.is_file() {
                file.set_len(0)?;
            }
            let mut out = BufWriter::new(file);
            body(&mut out)?;
            out.flush()
        };
        write().map_err(|error| Error::Write { path, error })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_keeps_its_contents_until_the_report_is_written() {
        let path = std::env::temp_dir().join(format!("pagemill-report-{}", std::process::id()));
        fs::write(&path, "the figures of another run").unwrap();
        drop(ReportFile::open(&path).unwrap()); // and then the run is stopped
        assert_eq!(fs::read_to_string(&path).unwrap(), "the figures of another run");
        ReportFile::open(&path).unwrap().write(|out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        let (again, null) = (ReportFile::open(&path).unwrap(), || ReportFile::open(Path::new("/dev/null")).unwrap());
        assert!(ReportFile::open(&path).unwrap().is(&again));
        assert!(!null().is(&again) && !null().is(&null()), "a device takes any number of reports");
        fs::remove_file(&path).unwrap();
        assert!(matches!(ReportFile::open(&path.join("below")), Err(Error::Write { .. })));
        ReportFile::open(Path::new("/dev/null")).unwrap().write(|out| out.write_all(b"new")).unwrap();
    }
}
