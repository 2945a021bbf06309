//! Records the flags of the C++ peers, and compiles the shim over DPDK's inline functions when the feature `dpdk`
//! asks for it.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-env=BENCH_CXXFLAGS={}", cxxflags());
    #[cfg(feature = "dpdk")]
    build_dpdk_shim();
}

/// The flags that C++ was compiled with, found where the crate `cc` finds them. The row `snmalloc` wants to know
/// whether its assertions are compiled in.
fn cxxflags() -> String {
    let target = env::var("TARGET").unwrap_or_default();
    let names = [format!("CXXFLAGS_{target}"), format!("CXXFLAGS_{}", target.replace('-', "_")), "CXXFLAGS".to_owned()];
    for name in &names {
        println!("cargo::rerun-if-env-changed={name}");
    }
    names.iter().find_map(|name| env::var(name).ok()).unwrap_or_default()
}

#[cfg(feature = "dpdk")]
fn build_dpdk_shim() {
    println!("cargo::rerun-if-changed=src/rows/dpdk_shim.c");
    let dpdk = match pkg_config::Config::new().atleast_version("21.11").probe("libdpdk") {
        Ok(library) => library,
        Err(error) => panic!(
            "the feature `dpdk` needs DPDK 21.11 or later (Debian: apt-get install libdpdk-dev pkg-config): {error}"
        ),
    };
    let mut shim = cc::Build::new();
    shim.file("src/rows/dpdk_shim.c").includes(&dpdk.include_paths).opt_level(3);
    // What `pkg-config --cflags libdpdk` says beside the paths; the inline functions need the vector headers.
    shim.flag("-include").flag("rte_config.h");
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() == Ok("x86_64") {
        shim.flag("-march=corei7");
    }
    shim.compile("pagemill_dpdk_shim");
}
