//! Records what the harness was built with, for the header of every report.

use std::env;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = Command::new(rustc).arg("--version").output().map(|output| output.stdout).unwrap_or_default();
    let version = String::from_utf8_lossy(&version);
    let version = version.split(" (").next().unwrap_or_default().trim();
    println!("cargo::rustc-env=BENCH_RUSTC={version}");
    println!("cargo::rustc-env=BENCH_OPT_LEVEL={}", env::var("OPT_LEVEL").unwrap_or_default());
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default().replace('\x1f', " ");
    println!("cargo::rustc-env=BENCH_RUSTFLAGS={flags}");
}
