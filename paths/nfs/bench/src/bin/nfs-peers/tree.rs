//! A directory as both libraries want to see it: each file has a number, by which requests name it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use rustix::buffer::spare_capacity;

/// The number of the directory itself.
pub(crate) const ROOT: u64 = 1;

/// The files that were looked up so far.
pub(crate) struct Tree(RwLock<Known>);

struct Known {
    last: u64,
    entries: HashMap<u64, Arc<Entry>>,
    numbers: HashMap<PathBuf, u64>,
}

struct Entry {
    path: PathBuf,
    /// Opened at the first READ or WRITE.
    file: OnceLock<File>,
}

impl Known {
    fn number(&mut self, path: PathBuf) -> u64 {
        *self.numbers.entry(path).or_insert_with_key(|path| {
            self.last += 1;
            self.entries.insert(self.last, Arc::new(Entry { path: path.clone(), file: OnceLock::new() }));
            self.last
        })
    }
}

impl Entry {
    fn file(&self) -> io::Result<&File> {
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file = File::options().read(true).write(true).open(&self.path)?;
        Ok(self.file.get_or_init(|| file))
    }
}

impl Tree {
    pub(crate) fn new(root: PathBuf) -> Self {
        let mut known = Known { last: ROOT - 1, entries: HashMap::new(), numbers: HashMap::new() };
        known.number(root);
        Self(RwLock::new(known))
    }

    fn entry(&self, number: u64) -> io::Result<Arc<Entry>> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        known.entries.get(&number).cloned().ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn number(&self, path: PathBuf) -> u64 {
        if let Some(number) = self.0.read().unwrap_or_else(PoisonError::into_inner).numbers.get(&path) {
            return *number;
        }
        self.0.write().unwrap_or_else(PoisonError::into_inner).number(path)
    }

    fn path(&self, directory: u64, name: &[u8]) -> io::Result<PathBuf> {
        Ok(self.entry(directory)?.path.join(crate::component(name)?))
    }

    pub(crate) fn lookup(&self, directory: u64, name: &[u8]) -> io::Result<u64> {
        let path = self.path(directory, name)?;
        fs::symlink_metadata(&path)?;
        Ok(self.number(path))
    }

    pub(crate) fn metadata(&self, number: u64) -> io::Result<Metadata> {
        let entry = self.entry(number)?;
        entry.file.get().map_or_else(|| fs::symlink_metadata(&entry.path), File::metadata)
    }

    /// The bytes, and whether the file ends with them.
    pub(crate) fn read(&self, number: u64, offset: u64, count: u32) -> io::Result<(Vec<u8>, bool)> {
        let entry = self.entry(number)?;
        let file = entry.file()?;
        let mut bytes = Vec::with_capacity(count as usize);
        rustix::io::pread(file, spare_capacity(&mut bytes), offset)?;
        let is_end = file.metadata()?.len() <= offset + bytes.len() as u64;
        Ok((bytes, is_end))
    }

    pub(crate) fn write(&self, number: u64, offset: u64, data: &[u8]) -> io::Result<Metadata> {
        let entry = self.entry(number)?;
        let file = entry.file()?;
        file.write_all_at(data, offset)?;
        file.metadata()
    }

    pub(crate) fn sync(&self, number: u64) -> io::Result<()> {
        self.entry(number)?.file()?.sync_data()
    }

    pub(crate) fn create(&self, directory: u64, name: &[u8]) -> io::Result<(u64, Metadata)> {
        let path = self.path(directory, name)?;
        let metadata = File::create_new(&path)?.metadata()?;
        Ok((self.number(path), metadata))
    }

    pub(crate) fn remove(&self, directory: u64, name: &[u8]) -> io::Result<()> {
        let path = self.path(directory, name)?;
        fs::remove_file(&path)?;
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let number = known.numbers.remove(&path);
        number.map(|number| known.entries.remove(&number));
        Ok(())
    }

    /// The names of a directory in their order, those behind the file with this number. From the beginning: 0.
    pub(crate) fn names(&self, directory: u64, after: u64) -> io::Result<Vec<OsString>> {
        let names = fs::read_dir(&self.entry(directory)?.path)?.map(|entry| Ok(entry?.file_name()));
        let mut names = names.collect::<io::Result<Vec<_>>>()?;
        names.sort_unstable();
        if after != 0 {
            let last = self.entry(after)?;
            names.retain(|name| last.path.file_name().is_none_or(|last| name.as_os_str() > last));
        }
        Ok(names)
    }
}
