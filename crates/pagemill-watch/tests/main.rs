//! The tests of `pagemill-watch`, on its public interface, in one program.
#[macro_use]
#[path = "../../../tests/own_process.rs"]
mod own_process;
#[expect(dead_code, reason = "no test here waits for more than an answer")]
#[path = "../../../tests/patience.rs"]
mod patience;

#[cfg(feature = "metrics")]
mod metrics_facade;
mod serve_http;
mod serve_stats;
