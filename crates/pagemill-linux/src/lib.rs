//! Pagemill under the Linux kernel's names, for C: `include/pagemill-linux` has the headers, and the files in C beside this one are the
//! library behind them, on top of `pagemill.h`. There is nothing in Rust here but the program `pagemill-kmod` (`kmod.rs`):
//! `cargo xtask install --prefix` compiles and installs all of it, `install.rs` says how, and the tests compile programs against it.
