//! The process's memory limit: that of its control groups, versions 1 and 2, which containers set.
//!
//! The system does not refuse memory above such a limit, it kills a process. So code that commits memory checks first how much
//! is left. The answer is an estimate: other processes of the group may take the rest a moment later.
use std::fs::{File, read_to_string};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The limits of the process's control groups, and what is left of them. Limits are read anew each time. The set of groups is
/// fixed when this is made, and leaves out groups that had no limit then.
///
/// ```
/// match pagemill_os::MemoryLimit::of_process() {
///     Some(limit) => println!("{} bytes, {} of them left", limit.bytes(), limit.room()),
///     None => println!("as much as there is"),
/// }
/// ```
#[derive(Debug)]
pub struct MemoryLimit {
    groups: Vec<Group>,
    /// Bytes that are being committed now. Some of them may be counted as used already.
    claimed: AtomicUsize,
}

/// A group with a limit: three open files.
#[derive(Debug)]
struct Group {
    limit: File,
    used: File,
    stat: File,
    /// The name in `stat` of the inactive page cache: it counts as used, and the system gives it up first.
    cache: &'static str,
}

/// The system also charges 8 bytes a page for page tables, and 5 for an arena's states and links. Together that is at most this
/// fraction of the pages.
const BESIDE: usize = 256;
const _: () = assert!((8 + 5) * BESIDE <= pagemill_core::PAGE_SIZE);
/// Bytes kept for the process's other needs: stacks, heap, kernel memory.
const SLACK: usize = 2 << 20;

impl MemoryLimit {
    /// The limit of this process; `None` if none of its groups has one.
    pub fn of_process() -> Option<Self> {
        if cfg!(miri) {
            return None; // Miri reads no files.
        }
        let read = |name| read_to_string(Path::new("/proc/self").join(name)).unwrap_or_default();
        Self::of(&read("cgroup"), &read("mountinfo"))
    }

    /// The limit by these two texts, in the formats of `/proc/self/cgroup` and `/proc/self/mountinfo`.
    ///
    /// ```
    /// use pagemill_os::MemoryLimit;
    /// assert!(MemoryLimit::of("0::/no/such/group", "1 0 0:1 / /no/such/mount rw - cgroup2 cgroup2 rw").is_none());
    /// ```
    pub fn of(groups: &str, mounts: &str) -> Option<Self> {
        let mut found = Vec::new();
        for mount in mounts.lines().filter_map(Mount::of) {
            let names = mount.names();
            let path = groups.lines().find_map(|line| mount.path_in(line));
            let Some(folder) = path.map(|path| mount.folder_of(path)) else { continue };
            let up = folder.ancestors().take_while(|folder| folder.starts_with(mount.point));
            found.extend(up.filter_map(|folder| Group::open(folder, names)));
        }
        (!found.is_empty()).then(|| Self { groups: found, claimed: AtomicUsize::new(0) })
    }

    /// The lowest of its limits, in bytes.
    pub fn bytes(&self) -> usize {
        self.groups.iter().map(Group::limit).min().unwrap_or(usize::MAX)
    }

    /// Bytes that may still be committed, less a margin for page tables, stacks and the heap.
    pub fn room(&self) -> usize {
        let left = self.groups.iter().map(Group::left).min().unwrap_or(usize::MAX);
        let room = left.saturating_sub(SLACK);
        (room - room.div_ceil(BESIDE + 1)).saturating_sub(self.claimed.load(Relaxed))
    }

    /// Sets room aside for `bytes` that are about to be committed, until the returned [`Claim`] is dropped. `None` if there is
    /// not that much room.
    ///
    /// ```
    /// if let Some(limit) = pagemill_os::MemoryLimit::of_process() {
    ///     assert!(limit.claim(usize::MAX / 2).is_none());
    /// }
    /// ```
    pub fn claim(&self, bytes: usize) -> Option<Claim<'_>> {
        // Added before the check: of two threads that claim the last bytes, one at most gets them.
        self.claimed.fetch_add(bytes, Relaxed);
        let claim = Claim { limit: self, bytes };
        let left = self.groups.iter().map(Group::left).min().unwrap_or(usize::MAX);
        let claimed = self.claimed.load(Relaxed);
        (claimed.saturating_add(claimed / BESIDE).saturating_add(SLACK) <= left).then_some(claim)
    }

    /// To be called in the child of a fork: the threads that claimed are not in it.
    pub fn forget_claims(&self) {
        self.claimed.store(0, Relaxed);
    }
}

/// Room that is set aside: see [`MemoryLimit::claim`].
#[derive(Debug)]
#[must_use = "the room is set aside until this is dropped"]
pub struct Claim<'l> {
    limit: &'l MemoryLimit,
    bytes: usize,
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Saturates only in the child of a fork, which forgot the claim.
        let less = |claimed: usize| Some(claimed.saturating_sub(self.bytes));
        let _ = self.limit.claimed.fetch_update(Relaxed, Relaxed, less);
    }
}

/// A mount of a control group file system.
struct Mount<'t> {
    is_v2: bool,
    /// The group that the mount point shows.
    root: &'t str,
    point: &'t Path,
}

impl<'t> Mount<'t> {
    /// From "id parent device root point options ... - type source options".
    fn of(line: &'t str) -> Option<Self> {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ').skip(3);
        let mut after = after.split(' ');
        let (root, point) = (before.next()?, Path::new(before.next()?));
        match (after.next()?, after.nth(1)?) {
            ("cgroup2", _) => Some(Self { is_v2: true, root, point }),
            ("cgroup", options) if options.split(',').any(|option| option == "memory") => {
                Some(Self { is_v2: false, root, point })
            }
            _ => None,
        }
    }

    /// The names of the limit, of the use, and of the cache in it.
    fn names(&self) -> [&'static str; 3] {
        match self.is_v2 {
            true => ["memory.max", "memory.current", "inactive_file "],
            false => ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "],
        }
    }

    /// The process's group in this mount, if the line "number:controllers:path" names it.
    fn path_in(&self, line: &'t str) -> Option<&'t str> {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        let is_here = match self.is_v2 {
            true => controllers.is_empty(),
            false => controllers.split(',').any(|name| name == "memory"),
        };
        is_here.then_some(path)
    }

    fn folder_of(&self, path: &str) -> PathBuf {
        let below = Path::new(path).strip_prefix(self.root).unwrap_or(Path::new(""));
        // The system shows a group outside of this mount as `/..`.
        if below.starts_with("..") { self.point.into() } else { self.point.join(below) }
    }
}

impl Group {
    fn open(folder: &Path, [limit, used, cache]: [&'static str; 3]) -> Option<Self> {
        let open = |name| File::open(folder.join(name)).ok();
        let group = Self { limit: open(limit)?, used: open(used)?, stat: open("memory.stat")?, cache };
        // Version 1 writes a number above any memory for "no limit".
        (group.limit() < 1 << 62).then_some(group)
    }

    /// In bytes; `usize::MAX` if the limit was lifted.
    fn limit(&self) -> usize {
        number_in(&self.limit).unwrap_or(usize::MAX)
    }

    /// Bytes left below the limit; 0 where that cannot be read.
    fn left(&self) -> usize {
        let Some(used) = number_in(&self.used) else { return 0 };
        let mut text = [0; 8192];
        let text = text_of(&self.stat, &mut text).unwrap_or("");
        let cache = text.lines().find_map(|line| line.strip_prefix(self.cache)?.trim().parse().ok());
        self.limit().saturating_sub(used.saturating_sub(cache.unwrap_or(0)))
    }
}

fn number_in(file: &File) -> Option<usize> {
    text_of(file, &mut [0; 32])?.trim().parse().ok()
}

/// Allocates nothing: a request may come from a signal handler.
fn text_of<'b>(file: &File, buffer: &'b mut [u8]) -> Option<&'b str> {
    let len = file.read_at(buffer, 0).ok()?;
    core::str::from_utf8(&buffer[..len]).ok()
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::{BESIDE, MemoryLimit, SLACK};
    use std::path::{Path, PathBuf};

    struct Tree(PathBuf);
    impl Tree {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("pagemill-limit-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }
        fn write(&self, name: &str, text: &str) {
            let path = self.0.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        fn mount(&self, root: &str, kind: &str) -> String {
            format!("40 30 0:35 {root} {} rw,nosuid shared:9 - {kind}\n", self.0.display())
        }
    }
    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_lowest_limit_of_a_group_and_its_parents_counts() {
        let tree = Tree::new("v2");
        tree.write("a/memory.max", "1073741824\n");
        tree.write("a/memory.current", "900000000\n");
        tree.write("a/memory.stat", "anon 1\ninactive_file 100000000\nactive_file 5\n");
        tree.write("a/b/memory.max", "max\n");
        tree.write("a/b/memory.current", "5\n");
        tree.write("a/b/memory.stat", "inactive_file 0\n");
        let mounts = format!("1 0 0:2 / / rw - ext4 /dev/vda rw\n{}", tree.mount("/", "cgroup2 cgroup2 rw"));
        let limit = MemoryLimit::of("0::/a/b\n", &mounts).unwrap();
        assert_eq!(limit.bytes(), 1 << 30);
        let left = (1 << 30) - 800_000_000;
        assert!(limit.room() < left - SLACK && limit.room() > left - SLACK - left / BESIDE - 2);
        // Claimed bytes are nobody else's until the claim is dropped.
        let claim = limit.claim(limit.room()).unwrap();
        assert!(limit.room() == 0 && limit.claim(1 << 20).is_none());
        drop(claim);
        drop(limit.claim(left / 2).unwrap());
        assert!(limit.claim(left).is_none());
        // A limit may change while it is watched.
        tree.write("a/memory.max", "max\n");
        assert!(limit.claim(1 << 40).is_some());
        assert!(MemoryLimit::of("0::/c\n", &mounts).is_none(), "a group that is not there");
    }

    #[test]
    fn limits_of_version_1_and_inside_a_container_are_read() {
        let tree = Tree::new("v1");
        tree.write("memory.limit_in_bytes", "536870912\n");
        tree.write("memory.usage_in_bytes", "36870912\n");
        tree.write("memory.stat", "inactive_file 7\ntotal_inactive_file 0\n");
        let mounts = tree.mount("/docker/x", "cgroup cgroup rw,memory");
        for path in ["/docker/x", "/", "/../y"] {
            let limit = MemoryLimit::of(&format!("0::/\n4:cpu,memory:{path}\n"), &mounts).unwrap();
            assert_eq!(limit.bytes(), 512 << 20);
            assert!(limit.claim(490_000_000).is_some() && limit.claim(500_000_000).is_none());
        }
        assert!(MemoryLimit::of("4:cpu:/docker/x\n", &mounts).is_none(), "no memory controller");
        assert!(MemoryLimit::of("4:memory:/\n", &tree.mount("/", "cgroup cgroup rw,cpu")).is_none());
        // No limit.
        tree.write("memory.limit_in_bytes", "9223372036854771712\n");
        assert!(MemoryLimit::of("4:memory:/\n", &mounts).is_none());
        assert!(Path::new(&tree.0).exists());
    }
}
