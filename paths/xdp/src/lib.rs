//! Packets through AF_XDP, on pages of a `PagePool`. The allocator's arena is the sockets' UMEM.
//!
//! The way of a packet, and of its page:
//! 1. [`commands`] has the program's subcommands; `run` sets everything up and reports, `lane` is the loop of a thread.
//! 2. `port` is a queue of an interface. It fills the fill ring with pages of the lane's pool, 64 at a time. Until the
//!    kernel returns it, a page is in a table (`frames`).
//! 3. The kernel's program (`program`, five instructions) sends the queue's packets to the socket (`umem`), which writes
//!    each to a page and its address to the receive ring (`ring`).
//! 4. The lane drops, answers (`echo`) or forwards the packet on the same page. A sent page comes back by the completion
//!    ring, and goes to the pool's cache, from which the fill ring takes it again.
//!
//! Lanes share nothing but the UMEM, so none of this takes a lock. The rings are not trusted: an address that a ring returns
//! is believed only if the kernel has that page from this very ring, once.
//!
//! Ends: sockets first, then tables, then the pools. A page whose socket may still be open is never handed out again, even
//! if a thread panics: it is lost instead. The kernel's program is detached when its descriptor closes, so by whatever ends
//! the process.
//!
//! Not supported: packets larger than a page, in several parts; IPv6 in `echo`.
pub mod commands;
mod counts;
mod echo;
mod error;
#[cfg(test)]
mod fake;
mod frames;
mod generate;
mod interface;
mod lane;
pub mod measure;
mod output;
mod port;
mod program;
mod ring;
mod run;
mod signals;
mod umem;

pub use error::Error;
pub use generate::{Ends, packet};
pub use interface::{Interface, Mac};
pub use program::Flood;
