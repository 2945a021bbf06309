//! For platforms without restartable sequences: the self-test fails, so none of these functions is called.
use super::Lists;
use core::sync::atomic::AtomicU32;

const WHY: &str = "this platform has no restartable sequences";

pub(crate) fn cpu(_offset: isize) -> u32 {
    u32::MAX
}
pub(crate) unsafe fn pop(_lists: Lists) -> u32 {
    unreachable!("{WHY}")
}
pub(crate) unsafe fn pop_n(_lists: Lists, _to: *mut u32, _want: usize, _least: usize) -> usize {
    unreachable!("{WHY}")
}
pub(crate) unsafe fn pop_words(_lists: Lists, _to: *mut usize, _n: usize, _zero: usize, _states: *const u8) -> bool {
    unreachable!("{WHY}")
}
pub(crate) unsafe fn push_words(_lists: Lists, _from: *const usize, _n: usize, _zero: usize) -> bool {
    unreachable!("{WHY}")
}
pub(crate) unsafe fn push(_lists: Lists, _pfn: u32) -> bool {
    unreachable!("{WHY}")
}
pub(crate) unsafe fn push_n(_lists: Lists, _from: *const u32, _n: usize) -> bool {
    unreachable!("{WHY}")
}
pub(crate) unsafe fn count(_lists: Lists, _counter: usize) {
    unreachable!("{WHY}")
}
pub(super) unsafe fn spin(_offset: isize, _inside: &AtomicU32, _leave: &AtomicU32, _turns: u64) -> bool {
    unreachable!("{WHY}")
}
