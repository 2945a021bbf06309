//! C2.5: how much stack a signal handler needs that allocates or frees. A handler's own stack may be small.
//!
//! Measured: each call is made by a handler on a stack that was painted before; how far down the paint is gone, less what a
//! handler that does nothing needs there (the system's frame), is what the call took.
use crate::common::{arena, backends, stay_here};
use pagemill::{Allocator, Bulk, Gfp, Page, PageList, free_pages_bulk};
use std::cell::UnsafeCell;
use std::mem::zeroed;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::Relaxed};

/// The bytes that the front page promises: for a page, and for 64 in bulk. Code that is checked and little optimised, as the
/// tests' is, needs 0.6 KiB more for a page.
const ONE: usize = if cfg!(debug_assertions) { 2656 } else { 2048 };
const MANY: usize = 4096;

const STACK: usize = 64 << 10;
const PAINT: u8 = 0xa5;

static ALLOCATOR: AtomicPtr<Allocator> = AtomicPtr::new(null_mut());
static CALL: AtomicUsize = AtomicUsize::new(0);
static KEPT: Kept = Kept(UnsafeCell::new(Have { pages: [const { None }; 64], list: PageList::new() }));

struct Kept(UnsafeCell<Have>);
// SAFETY: one thread has it: in the handler, or while no signal comes.
unsafe impl Sync for Kept {}
struct Have {
    pages: [Option<Page>; 64],
    list: PageList,
}

/// A call that a handler makes, with the allocator and the pages that it keeps.
type Call = fn(&Allocator, &mut Have);

extern "C" fn handler(_signal: i32) {
    // SAFETY: `used` stores a function of this type, sets the allocator for as long as the signal takes, and looks at
    // `KEPT` only before and after.
    unsafe {
        let call = std::mem::transmute::<usize, Call>(CALL.load(Relaxed));
        call(&*ALLOCATOR.load(Relaxed), &mut *KEPT.0.get());
    }
}

/// Bytes of stack that the call took.
fn used(allocator: &Allocator, call: Call) -> usize {
    let depth = |call: Call| {
        let mut stack = vec![PAINT; STACK];
        ALLOCATOR.store((&raw const *allocator).cast_mut(), Relaxed);
        CALL.store(call as usize, Relaxed);
        // SAFETY: plain system calls with valid arguments; zero is a valid value of these structures. The stack lives until
        // it is no longer the handler's.
        unsafe {
            let own = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: STACK };
            let mut before: libc::stack_t = zeroed();
            assert_eq!(libc::sigaltstack(&raw const own, &raw mut before), 0);
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = handler as extern "C" fn(i32) as usize;
            action.sa_flags = libc::SA_ONSTACK;
            let mut old: libc::sigaction = zeroed();
            assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const action, &raw mut old), 0);
            assert_eq!(libc::raise(libc::SIGUSR2), 0);
            assert_eq!(libc::sigaction(libc::SIGUSR2, &raw const old, null_mut()), 0);
            assert_eq!(libc::sigaltstack(&raw const before, null_mut()), 0);
        }
        let untouched = stack.iter().take_while(|&&byte| byte == PAINT).count();
        assert!(untouched > 0, "more than {STACK} bytes");
        STACK - untouched
    };
    depth(call) - depth(|_, _| {})
}

fn page(allocator: &Allocator, have: &mut Have, gfp: Gfp) {
    have.pages[0] = allocator.alloc_page(gfp).ok();
}
fn array(allocator: &Allocator, have: &mut Have, gfp: Gfp) {
    let _ = allocator.alloc_pages_bulk_array(Bulk::up_to(64).gfp(gfp), &mut have.pages);
}
fn list(allocator: &Allocator, have: &mut Have, gfp: Gfp) {
    let _ = allocator.alloc_pages_bulk_list(Bulk::up_to(64).gfp(gfp), &mut have.list);
}

/// How full this CPU's list is when the handler runs.
#[derive(Clone, Copy, Debug)]
enum Lists {
    Empty,
    Some,
    Full,
}

/// Gives the handler pages to free, in no order.
fn keep(pages: Vec<Page>, in_list: bool) {
    // SAFETY: no handler runs.
    let have = unsafe { &mut *KEPT.0.get() };
    for (i, page) in pages.into_iter().enumerate() {
        if in_list {
            have.list.push(page).unwrap();
        } else {
            have.pages[i * 7 % 64] = Some(page);
        }
    }
}

fn empty() {
    // SAFETY: no handler runs.
    let have = unsafe { &mut *KEPT.0.get() };
    free_pages_bulk(&mut have.pages);
    have.list.clear();
}

#[test]
fn calls_in_a_signal_handler_stay_within_the_documented_stack() {
    own_process!();
    let calls: [(&str, usize, Call); 11] = [
        ("alloc_page, NOWAIT", ONE, |a, have| page(a, have, Gfp::NOWAIT)),
        ("alloc_page, ATOMIC", ONE, |a, have| page(a, have, Gfp::ATOMIC)),
        ("alloc_page, ATOMIC | ZERO", ONE, |a, have| page(a, have, Gfp::ATOMIC | Gfp::ZERO)),
        ("64 in an array, NOWAIT", MANY, |a, have| array(a, have, Gfp::NOWAIT)),
        ("64 in an array, ATOMIC", MANY, |a, have| array(a, have, Gfp::ATOMIC)),
        ("64 in an array, ATOMIC | MOVABLE", MANY, |a, have| array(a, have, Gfp::ATOMIC | Gfp::MOVABLE)),
        ("64 in a list, NOWAIT", MANY, |a, have| list(a, have, Gfp::NOWAIT)),
        ("64 in a list, ATOMIC", MANY, |a, have| list(a, have, Gfp::ATOMIC)),
        ("a page freed", ONE, |_, have| drop(have.pages[7].take())),
        ("an array freed", MANY, |_, have| _ = free_pages_bulk(&mut have.pages)),
        ("a list freed", MANY, |_, have| _ = have.list.clear()),
    ];
    // On one CPU, whose lists it fills.
    stay_here();
    let mut too_much = Vec::new();
    for backend in backends() {
        for (lists, pages) in [(Lists::Empty, 4096), (Lists::Some, 4096), (Lists::Full, 4096), (Lists::Empty, 70)] {
            for (what, limit, call) in calls {
                let allocator = arena(pages).backend(backend).build().unwrap();
                let take =
                    |n: usize| (0..n).map_while(|_| allocator.alloc_page(Gfp::NOWAIT).ok()).collect::<Vec<Page>>();
                let (some, mut others) = (take(64), take(1500));
                match lists {
                    Lists::Empty => _ = allocator.drain(),
                    Lists::Some => others.truncate(1300),
                    Lists::Full => others.clear(),
                }
                if what.ends_with("freed") {
                    keep(some, what.starts_with("a list"));
                }
                let took = used(&allocator, call);
                let line = format!("{backend}, {lists:?} lists, {pages} pages, {what}: {took} bytes");
                println!("{line}");
                if took > limit {
                    too_much.push(line);
                }
                empty();
            }
        }
    }
    assert!(too_much.is_empty(), "{too_much:#?}");
}
