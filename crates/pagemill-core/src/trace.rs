//! Which steps of `docs/one-page.md` this thread went through. Compiled in by the feature `trace` alone.
use std::cell::RefCell;
use std::vec::Vec;

std::thread_local! {
    static STEPS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// Notes a step.
pub fn step(name: &'static str) {
    STEPS.with_borrow_mut(|steps| steps.push(name));
}

/// The steps since the last call.
pub fn take() -> Vec<&'static str> {
    STEPS.take()
}
