//! Keys in several lists, each key in one at most: doubly linked by indices, found by a hash map.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

const END: u32 = u32::MAX;

/// One multiplication: keys are numbers that no adversary chooses.
#[derive(Default)]
pub(super) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, n: u64) {
        let n = (self.0 ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = n ^ (n >> 32);
    }
}

struct Node {
    key: u64,
    list: u8,
    /// For the policy's own use: a count of reads, for example.
    note: u8,
    older: u32,
    newer: u32,
}

/// Lists with an old end, from which keys are taken, and a new end, at which they come in.
pub(super) struct Lists<const N: usize> {
    nodes: Vec<Node>,
    unused: Vec<u32>,
    found: HashMap<u64, u32, BuildHasherDefault<Mix>>,
    /// Oldest, newest, length.
    ends: [(u32, u32, usize); N],
}

impl<const N: usize> Lists<N> {
    pub(super) fn new() -> Self {
        Self { nodes: Vec::new(), unused: Vec::new(), found: HashMap::default(), ends: [(END, END, 0); N] }
    }

    /// The list that a key is in.
    pub(super) fn list(&self, key: u64) -> Option<usize> {
        self.found.get(&key).map(|&at| usize::from(self.nodes[at as usize].list))
    }

    pub(super) fn len(&self, list: usize) -> usize {
        self.ends[list].2
    }

    pub(super) fn note(&mut self, key: u64) -> &mut u8 {
        &mut self.nodes[self.found[&key] as usize].note
    }

    pub(super) fn oldest(&self, list: usize) -> Option<u64> {
        let at = self.ends[list].0;
        (at != END).then(|| self.nodes[at as usize].key)
    }

    /// The key that came in next after this one.
    pub(super) fn newer(&self, key: u64) -> Option<u64> {
        let at = self.nodes[self.found[&key] as usize].newer;
        (at != END).then(|| self.nodes[at as usize].key)
    }

    /// Puts a key at the new end of a list, wherever it was before. Its note is kept, and 0 for a new one.
    pub(super) fn put(&mut self, list: usize, key: u64) {
        let note = self.remove(key).unwrap_or(0);
        let (_, newest, _) = self.ends[list];
        let node = Node { key, list: list as u8, note, older: newest, newer: END };
        let at = match self.unused.pop() {
            Some(at) => {
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        };
        match newest {
            END => self.ends[list].0 = at,
            _ => self.nodes[newest as usize].newer = at,
        }
        self.ends[list].1 = at;
        self.ends[list].2 += 1;
        self.found.insert(key, at);
    }

    /// Forgets a key; its note, if it was there.
    pub(super) fn remove(&mut self, key: u64) -> Option<u8> {
        let at = self.found.remove(&key)?;
        let Node { list, note, older, newer, .. } = self.nodes[at as usize];
        let ends = &mut self.ends[usize::from(list)];
        ends.2 -= 1;
        match older {
            END => ends.0 = newer,
            _ => self.nodes[older as usize].newer = newer,
        }
        match newer {
            END => self.ends[usize::from(list)].1 = older,
            _ => self.nodes[newer as usize].older = older,
        }
        self.unused.push(at);
        Some(note)
    }

    /// Takes the oldest key off a list.
    pub(super) fn pop(&mut self, list: usize) -> Option<u64> {
        let key = self.oldest(list)?;
        self.remove(key);
        Some(key)
    }
}
