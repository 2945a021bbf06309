//! `pagemill bench` as a program of its own.

use clap::Parser;

/// Measures Pagemill beside what a program would use today.
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    bench: pagemill_bench::BenchArgs,
}

fn main() -> std::process::ExitCode {
    match pagemill_bench::run(&Cli::parse().bench) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
