//! A memory limit below the arena's size, set by a control group: errors instead of a kill, as far as the system allows.
//!
//! Each child goes into a group of its own, made below that of this process (version 1), or beside it where the memory
//! controller is delegated (version 2), and removed again.
use crate::common::{FORMS, bulk, slots, status_of_child, until};
use pagemill::{Allocator, BuildError, Bulk, Error, Exhausted, Gfp, Memory, Page, Shortfall, Why};
use std::fs::{create_dir, read_to_string, remove_dir, write};
use std::ops::ControlFlow::Continue;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const MIB: usize = 1 << 20;
const LIMIT: usize = 64 * MIB;
/// The arena: four times the limit.
const PAGES: usize = 4 * LIMIT / 4096;

/// A control group with a limit; it goes when this is dropped.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let text = read_to_string("/proc/self/cgroup").map_err(|why| why.to_string())?;
        let path = |wanted: &dyn Fn(&str) -> bool| {
            let mut lines =
                text.lines().filter_map(|line| line.splitn(3, ':').skip(1).collect::<Vec<_>>().try_into().ok());
            lines.find_map(|[controllers, path]: [&str; 2]| wanted(controllers).then_some(path.trim_start_matches('/')))
        };
        let v1 = path(&|controllers| controllers.split(',').any(|name| name == "memory"));
        let v2 = path(&|controllers| controllers.is_empty());
        let (parent, name) = match (v1, v2) {
            (Some(own), _) => (PathBuf::from("/sys/fs/cgroup/memory").join(own), "memory.limit_in_bytes"),
            (None, Some(own)) => {
                // The root has nothing beside it.
                let beside = PathBuf::from(own).parent().map(PathBuf::from).unwrap_or_default();
                (PathBuf::from("/sys/fs/cgroup").join(beside), "memory.max")
            }
            (None, None) => return Err("no control groups".into()),
        };
        let number = MADE.fetch_add(1, Relaxed);
        let folder = parent.join(format!("pagemill-test-{}-{number}", std::process::id()));
        create_dir(&folder).map_err(|why| format!("{}: {why}", folder.display()))?;
        let group = Self(folder);
        write(group.0.join(name), LIMIT.to_string()).map_err(|why| format!("{name}: {why}"))?;
        // Without swap, where the system has any, and counts it.
        let _ = write(group.0.join("memory.swap.max"), "0");
        let _ = write(group.0.join("memory.memsw.limit_in_bytes"), LIMIT.to_string());
        Ok(group)
    }

    /// The status of a child in this group, as `waitpid` gives it.
    fn run(&self, work: impl FnOnce()) -> i32 {
        status_of_child("is in a control group", || {
            write(self.0.join("cgroup.procs"), std::process::id().to_string()).unwrap();
            work();
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The last process may still be on its way out.
        if !std::thread::panicking() {
            until("the end of a control group's last process", || remove_dir(&self.0).is_ok());
        } else if remove_dir(&self.0).is_err() {
            eprintln!("{} stays", self.0.display());
        }
    }
}

/// A group, or why there is none.
fn group() -> Option<Group> {
    Group::new().map_err(|why| eprintln!("skipped: no right to make a control group with a memory limit ({why})")).ok()
}

fn touch(pages: &mut [Page]) {
    pages.iter_mut().for_each(|page| page[0] = 1);
}

#[test]
fn an_arena_beyond_the_memory_limit_is_killed_when_touched() {
    own_process!();
    let Some(group) = group() else { return };
    let status = group.run(|| {
        let allocator = Allocator::builder().pages(PAGES).huge_pages(false).build().unwrap();
        let mut pages = bulk(&allocator, Bulk::up_to(PAGES)).0;
        touch(&mut pages);
    });
    assert_eq!((libc::WIFSIGNALED(status), libc::WTERMSIG(status)), (true, libc::SIGKILL), "the limit limits nothing");
}

#[test]
fn populated_requests_stop_at_the_memory_limit() {
    own_process!();
    let Some(group) = group() else { return };
    for huge_pages in [false, true] {
        let status = group.run(|| bring_what_there_is_room_for(huge_pages));
        assert_eq!(status, 0, "the child died of {status:#x}, huge pages: {huge_pages}");
    }
}

fn bring_what_there_is_room_for(huge_pages: bool) {
    let allocator = Allocator::builder().pages(PAGES).huge_pages(huge_pages).build().unwrap();
    // All of it, or nothing: the array stays as it was.
    let mut slots = slots::<Page>(PAGES);
    slots[3] = Some(allocator.alloc_page(Gfp::KERNEL).unwrap());
    let refused = allocator.alloc_pages_bulk_array(Bulk::exact(PAGES).populated(), &mut slots).unwrap_err();
    let Error::Exhausted(Exhausted { wanted, why: Why::Uncommitted, .. }) = refused else { panic!("{refused}") };
    assert_eq!((wanted, slots.iter().flatten().count(), slots[3].is_some()), (PAGES, 1, true));
    assert!(refused.to_string().contains("limit"), "{refused}");
    slots[3] = None;
    let refused = allocator.populate(|_| Continue(())).unwrap_err();
    assert!(matches!(refused, BuildError::MemoryLimit { .. }), "{refused}");
    allocator.give_back();

    // As many as there is room for, more than half of the limit, in each form; they can be touched.
    let request = Bulk::up_to(PAGES).populated();
    for (name, form) in FORMS {
        let (mut pages, shortfall) = form(&allocator, request, PAGES).unwrap();
        let n = pages.len();
        assert!(n * 4096 > LIMIT / 2 && n * 4096 < LIMIT, "{name}: {n}");
        assert_eq!(shortfall, Some(Shortfall { missing: PAGES - n, why: Why::Uncommitted }), "{name}");
        touch(&mut pages);
        if name == "list" {
            // There is no more, until some go back.
            let got = allocator.alloc_pages_bulk_array(request, &mut slots).unwrap();
            assert!(got.added * 4096 < 8 * MIB, "{got:?}");
            slots.fill_with(|| None);
        }
        drop(pages);
        allocator.give_back();
    }
    drop(slots);
    allocator.drain();
    let stats = allocator.stats();
    assert_eq!((stats.free, stats.shortfalls(), stats.shortfalls_by(Why::Uncommitted)), (PAGES as u64, 6, 6));
}

#[test]
fn an_arena_within_the_limit_can_be_touched_whole() {
    own_process!();
    let Some(group) = group() else { return };
    let status = group.run(|| {
        let large = || Memory::anonymous(PAGES).within_limit();
        let allocator = Allocator::builder().memory(large()).huge_pages(false).build().unwrap();
        let [BuildError::MemoryLimit { wanted, room }] = allocator.notes()[..] else { panic!() };
        let managed = allocator.managed_pages().get();
        assert!(wanted == PAGES * 4096 && room < LIMIT && managed * 4096 <= room && managed * 4096 > LIMIT / 2);
        // Room promised to the first is not promised again.
        assert!(matches!(allocator.add_memory(large()), Err(BuildError::MemoryLimit { .. })));
        let small = Allocator::builder().memory(Memory::anonymous(512).within_limit()).build().unwrap();
        assert!(small.notes().is_empty());
        drop(small);
        let mut pages = bulk(&allocator, Bulk::up_to(PAGES)).0;
        assert_eq!(pages.len(), managed);
        touch(&mut pages);
        // The default is half of the limit, not of the system's memory.
        assert_eq!(Allocator::builder().build().unwrap().managed_pages().get(), LIMIT / 2 / 4096);
    });
    assert_eq!(status, 0, "the child died of {status:#x}");
}
