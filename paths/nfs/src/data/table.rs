//! The files that are open: no more than so many, of which those that were used least recently leave.
//!
//! A place in the table is a file, or kept for the thread that opens or closes it. Others that want this file wait: a file
//! that was opened again before it is written back would show old bytes, and the late write-back would overwrite new ones
//! (D4).
use super::{FileKey, OpenFile, Pending};
use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

pub(super) struct Table {
    places: Mutex<Places>,
    /// A place that was kept is free, or has a file.
    changed: Condvar,
    most: usize,
}

#[derive(Default)]
struct Places {
    by_key: HashMap<FileKey, Place>,
    /// The key of each file that is open, by its generation.
    by_generation: HashMap<u64, FileKey>,
    /// Counts uses.
    turn: u64,
    /// The turn of the last look for files that nobody uses.
    swept: u64,
}

enum Place {
    Open {
        file: Arc<OpenFile>,
        /// The turn of its last use.
        used: u64,
    },
    /// With what the file system does not know yet of a file that is being closed.
    Kept(Option<Pending>),
}

/// A place that this thread keeps. It is free once this is dropped.
struct Keeps<'t>(&'t Table, FileKey);

impl Keeps<'_> {
    fn put(self, file: OpenFile) -> Arc<OpenFile> {
        let file = Arc::new(file);
        let (table, key) = (self.0, self.1);
        std::mem::forget(self);
        let mut places = table.places();
        places.turn += 1;
        let used = places.turn;
        places.by_key.insert(key, Place::Open { file: file.clone(), used });
        places.by_generation.insert(key.generation, key);
        drop(places);
        table.changed.notify_all();
        file
    }
}

impl Drop for Keeps<'_> {
    fn drop(&mut self) {
        let mut places = self.0.places();
        places.by_key.remove(&self.1);
        if places.by_generation.get(&self.1.generation) == Some(&self.1) {
            places.by_generation.remove(&self.1.generation);
        }
        drop(places);
        self.0.changed.notify_all();
    }
}

impl Places {
    /// Takes the file that was used least recently off its place, unless all are in use.
    fn take_oldest(&mut self) -> Option<(FileKey, OpenFile)> {
        let used = |(key, place): (&FileKey, &Place)| match place {
            Place::Open { file, used } if Arc::strong_count(file) == 1 => Some((*used, *key)),
            _ => None,
        };
        let (_, key) = self.by_key.iter().filter_map(used).min_by_key(|&(used, _)| used)?;
        self.take(&key).map(|file| (key, file))
    }

    /// Takes a file off its place, which the caller keeps, unless it is in use.
    fn take(&mut self, key: &FileKey) -> Option<OpenFile> {
        let place = self.by_key.get_mut(key)?;
        match std::mem::replace(place, Place::Kept(None)) {
            Place::Kept(pending) => {
                *place = Place::Kept(pending);
                None
            }
            Place::Open { file, used } => match Arc::try_unwrap(file) {
                Ok(file) => {
                    *place = Place::Kept(file.pending());
                    Some(file)
                }
                Err(file) => {
                    *place = Place::Open { file, used };
                    None
                }
            },
        }
    }
}

impl Table {
    pub(super) fn new(most: usize) -> Self {
        Self { places: Mutex::default(), changed: Condvar::new(), most }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        // No place is half changed where a panic could come.
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file, if it is open. Waits for a thread that opens or closes it.
    pub(super) fn find(&self, key: &FileKey) -> Option<Arc<OpenFile>> {
        self.find_or(key, |_| ()).ok()
    }

    /// The file of this generation, if it is open and no thread opens or closes it.
    pub(super) fn of_generation(&self, generation: u64) -> Option<(FileKey, Arc<OpenFile>)> {
        let mut places = self.places();
        let key = *places.by_generation.get(&generation)?;
        places.turn += 1;
        let turn = places.turn;
        match places.by_key.get_mut(&key)? {
            Place::Open { file, used } => {
                *used = turn;
                Some((key, file.clone()))
            }
            Place::Kept(_) => None,
        }
    }

    /// What the file system does not know of a file yet, also while that is being closed.
    pub(super) fn pending(&self, key: &FileKey) -> Option<Pending> {
        match self.places().by_key.get(key)? {
            Place::Open { file, .. } => file.pending(),
            Place::Kept(pending) => *pending,
        }
    }

    /// Closes the files that nobody has used since the last call but one, so that others may remove and run them.
    pub(super) fn close_idle(&self) {
        let mut places = self.places();
        let turn = places.turn;
        let before = std::mem::replace(&mut places.swept, turn);
        let idle = |(key, place): (&FileKey, &Place)| match place {
            Place::Open { used, .. } if *used <= before => Some(*key),
            _ => None,
        };
        let idle: Vec<_> = places.by_key.iter().filter_map(idle).collect();
        drop(places);
        idle.iter().for_each(|key| self.forget(key));
    }

    /// All files that are open.
    pub(super) fn all(&self) -> Vec<Arc<OpenFile>> {
        let file = |place: &Place| match place {
            Place::Open { file, .. } => Some(file.clone()),
            Place::Kept(_) => None,
        };
        self.places().by_key.values().filter_map(file).collect()
    }

    /// The file, or what `missing` makes of the table, which is locked still.
    fn find_or<R>(&self, key: &FileKey, missing: impl FnOnce(&mut Places) -> R) -> Result<Arc<OpenFile>, R> {
        let mut places = self.places();
        loop {
            places.turn += 1;
            let turn = places.turn;
            match places.by_key.get_mut(key) {
                None => return Err(missing(&mut places)),
                Some(Place::Open { file, used }) => {
                    *used = turn;
                    return Ok(file.clone());
                }
                Some(Place::Kept(_)) => {
                    places = self.changed.wait(places).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    /// The file; opens it if it is not open. If the table is full, another file is closed first. If all are in use, which
    /// takes as many threads, the table has more for a while.
    pub(super) fn get(&self, key: &FileKey, open: impl FnOnce() -> io::Result<OpenFile>) -> io::Result<Arc<OpenFile>> {
        let keep = |places: &mut Places| _ = places.by_key.insert(*key, Place::Kept(None));
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
            let mut places = self.places();
            if places.by_key.len() <= self.most {
                return;
            }
            let Some((key, file)) = places.take_oldest() else { return };
            drop(places);
            self.close(key, file);
        }
    }

    /// Closes a file whose place this thread keeps.
    fn close(&self, key: FileKey, file: OpenFile) {
        let _keeps = Keeps(self, key);
        file.close();
    }

    /// Closes a file. One that is in use is the next to leave.
    pub(super) fn forget(&self, key: &FileKey) {
        let mut places = self.places();
        if let Some(file) = places.take(key) {
            drop(places);
            return self.close(*key, file);
        }
        if let Some(Place::Open { used, .. }) = places.by_key.get_mut(key) {
            *used = 0;
        }
    }

    /// How many places are taken.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.places().by_key.len()
    }
}
