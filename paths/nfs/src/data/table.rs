//! The files that are open: no more than so many, of which those that were used least recently leave.
//!
//! An entry in the table is a file, or kept for the thread that opens or closes it. Others that want this file wait: a file
//! that was opened again before it is written back would show old bytes, and the late write-back would overwrite new ones
//! (D4).
use super::{FileKey, OpenFile, Pending};
use crate::sync::{lock, wait};
use rustix::fs::Stat;
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

pub(super) struct Table {
    entries: Mutex<Entries>,
    /// An entry that was kept has a file, or is gone.
    changed: Condvar,
    most: usize,
}

#[derive(Default)]
struct Entries {
    by_key: HashMap<FileKey, Entry>,
    /// The key of each file that is open, by its generation.
    by_generation: HashMap<u64, FileKey>,
    /// Counts uses.
    turn: u64,
    /// The turn of the last look for files that nobody uses.
    swept: u64,
}

enum Entry {
    Open {
        file: Arc<OpenFile>,
        /// The turn of its last use.
        used: u64,
    },
    /// With what the file system does not know yet of a file that is being closed.
    Kept(Option<Pending>),
}

/// An entry that this thread keeps. It is gone once this is dropped.
struct Keeps<'t>(&'t Table, FileKey);

impl Keeps<'_> {
    fn put(self, file: OpenFile) -> Arc<OpenFile> {
        let file = Arc::new(file);
        let (table, key) = (self.0, self.1);
        std::mem::forget(self);
        let mut entries = table.entries();
        entries.turn += 1;
        let used = entries.turn;
        entries.by_key.insert(key, Entry::Open { file: file.clone(), used });
        entries.by_generation.insert(key.generation, key);
        drop(entries);
        table.changed.notify_all();
        file
    }
}

impl Drop for Keeps<'_> {
    fn drop(&mut self) {
        let mut entries = self.0.entries();
        entries.by_key.remove(&self.1);
        if entries.by_generation.get(&self.1.generation) == Some(&self.1) {
            entries.by_generation.remove(&self.1.generation);
        }
        drop(entries);
        self.0.changed.notify_all();
    }
}

impl Entries {
    /// Takes out the file that was used least recently, unless all are in use.
    fn take_oldest(&mut self) -> Option<(FileKey, OpenFile)> {
        let used = |(key, entry): (&FileKey, &Entry)| match entry {
            Entry::Open { file, used } if Arc::strong_count(file) == 1 => Some((*used, *key)),
            _ => None,
        };
        let (_, key) = self.by_key.iter().filter_map(used).min_by_key(|&(used, _)| used)?;
        self.take(&key).map(|file| (key, file))
    }

    /// Takes a file out of its entry, which the caller keeps, unless it is in use.
    fn take(&mut self, key: &FileKey) -> Option<OpenFile> {
        let entry = self.by_key.get_mut(key)?;
        match std::mem::replace(entry, Entry::Kept(None)) {
            Entry::Kept(pending) => {
                *entry = Entry::Kept(pending);
                None
            }
            Entry::Open { file, used } => match Arc::try_unwrap(file) {
                Ok(file) => {
                    *entry = Entry::Kept(file.unsaved());
                    Some(file)
                }
                Err(file) => {
                    *entry = Entry::Open { file, used };
                    None
                }
            },
        }
    }
}

impl Table {
    pub(super) fn new(most: usize) -> Self {
        Self { entries: Mutex::default(), changed: Condvar::new(), most }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        lock(&self.entries)
    }

    /// The file, if it is open. Waits for a thread that opens or closes it.
    pub(super) fn find(&self, key: &FileKey) -> Option<Arc<OpenFile>> {
        self.find_or(key, |_| ()).ok()
    }

    /// The file of this generation, if it is open and no thread opens or closes it.
    pub(super) fn of_generation(&self, generation: u64) -> Option<(FileKey, Arc<OpenFile>)> {
        let mut entries = self.entries();
        let key = *entries.by_generation.get(&generation)?;
        entries.turn += 1;
        let turn = entries.turn;
        match entries.by_key.get_mut(&key)? {
            Entry::Open { file, used } => {
                *used = turn;
                Some((key, file.clone()))
            }
            Entry::Kept(_) => None,
        }
    }

    /// What the file system does not know of a file yet, also while that is being closed.
    pub(super) fn pending(&self, key: &FileKey, seen: &Stat) -> Option<Pending> {
        match self.entries().by_key.get(key)? {
            Entry::Open { file, .. } => file.pending(seen),
            Entry::Kept(pending) => *pending,
        }
    }

    /// Closes the files that nobody has used since the last call but one, so that others may remove and run them.
    pub(super) fn close_idle(&self) {
        let mut entries = self.entries();
        let turn = entries.turn;
        let before = std::mem::replace(&mut entries.swept, turn);
        let idle = |(key, entry): (&FileKey, &Entry)| match entry {
            Entry::Open { used, .. } if *used <= before => Some(*key),
            _ => None,
        };
        let idle: Vec<_> = entries.by_key.iter().filter_map(idle).collect();
        drop(entries);
        idle.iter().for_each(|key| self.forget(key));
    }

    /// All files that are open.
    pub(super) fn all(&self) -> Vec<Arc<OpenFile>> {
        let file = |entry: &Entry| match entry {
            Entry::Open { file, .. } => Some(file.clone()),
            Entry::Kept(_) => None,
        };
        self.entries().by_key.values().filter_map(file).collect()
    }

    /// The file, or what `missing` makes of the table, which is locked still.
    fn find_or<R>(&self, key: &FileKey, missing: impl FnOnce(&mut Entries) -> R) -> Result<Arc<OpenFile>, R> {
        let mut entries = self.entries();
        loop {
            entries.turn += 1;
            let turn = entries.turn;
            match entries.by_key.get_mut(key) {
                None => return Err(missing(&mut entries)),
                Some(Entry::Open { file, used }) => {
                    *used = turn;
                    return Ok(file.clone());
                }
                Some(Entry::Kept(_)) => {
                    entries = wait(&self.changed, entries);
                }
            }
        }
    }

    /// The file; opens it if it is not open. If the table is full, another file is closed first. If all are in use, which
    /// takes as many threads, the table has more for a while.
    pub(super) fn get(&self, key: &FileKey, open: impl FnOnce() -> io::Result<OpenFile>) -> io::Result<Arc<OpenFile>> {
        let keep = |entries: &mut Entries| _ = entries.by_key.insert(*key, Entry::Kept(None));
        match self.find_or(key, keep) {
            Ok(file) => Ok(file),
            Err(()) => {
                let keeps = Keeps(self, *key);
                self.make_room();
                Ok(keeps.put(open()?))
            }
        }
    }

    fn make_room(&self) {
        loop {
            let mut entries = self.entries();
            if entries.by_key.len() <= self.most {
                return;
            }
            let Some((key, file)) = entries.take_oldest() else { return };
            drop(entries);
            self.close(key, file);
        }
    }

    /// Closes a file whose entry this thread keeps.
    fn close(&self, key: FileKey, file: OpenFile) {
        let _keeps = Keeps(self, key);
        file.close();
    }

    /// Closes a file. One that is in use is the next to leave.
    pub(super) fn forget(&self, key: &FileKey) {
        let mut entries = self.entries();
        if let Some(file) = entries.take(key) {
            drop(entries);
            return self.close(*key, file);
        }
        if let Some(Entry::Open { used, .. }) = entries.by_key.get_mut(key) {
            *used = 0;
        }
    }

    /// How many entries there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries().by_key.len()
    }
}
