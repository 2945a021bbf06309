//! `pagemill xdp`: the subcommands that forward, drop, answer and make packets. Each is its arguments and a `run`.
mod generate;
mod receive;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::Error;
pub use crate::program::Mode;
use crate::run::Settings;

/// Forward, drop, answer and make packets, past the kernel's own stack
///
/// The interface's packets go to this program as long as it runs, and to the
/// kernel again when it ends, however it ends. It takes root, or CAP_NET_ADMIN,
/// CAP_NET_RAW, CAP_BPF, and CAP_IPC_LOCK or a limit on locked memory (ulimit -l)
/// that all packets fit.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment, after_help = AFTER_HELP)]
pub struct XdpArgs {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  pagemill xdp forward --from eth0 --to eth1     a bridge of two ports
  pagemill xdp echo eth0 --address 192.0.2.7     then: ping 192.0.2.7
  pagemill xdp drop eth0 --json                  counters as JSON, one a second
  pagemill xdp generate eth0 --mac 02:00:00:00:00:01 --count 1000000

Try it without a network card, as root:
  ip link add veth0 type veth peer name veth1
  ip link set veth0 up; ip link set veth1 up
  pagemill xdp drop veth0 --seconds 5 &
  pagemill xdp generate veth1 --mac ff:ff:ff:ff:ff:ff --seconds 3

Exit codes:
  0  done
  1  failed: standard error says what, why and what to do next
  2  the command line makes no sense
  stopped by a signal, it detaches and ends by that signal";

#[derive(Debug, Subcommand)]
enum Command {
    Forward(receive::ForwardArgs),
    Drop(receive::DropArgs),
    Echo(receive::EchoArgs),
    Generate(generate::GenerateArgs),
}

impl XdpArgs {
    /// What the subcommand is called.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self.command {
            Command::Forward(_) => "forward",
            Command::Drop(_) => "drop",
            Command::Echo(_) => "echo",
            Command::Generate(_) => "generate",
        }
    }
}

/// What all subcommands have.
#[derive(Args, Debug)]
struct Common {
    /// Where packets are taken: in the driver (native), or after it (generic)
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    mode: Mode,

    /// Queues, as 0,1 [default: all]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    queues: Option<Vec<u32>>,

    /// Threads, at most; a queue has one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,

    /// Slots of each ring: a power of two
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = slots)]
    ring: u32,

    /// MiB for packets [default: 2 pages and more for each slot]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    memory: Option<u32>,

    /// End after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    seconds: Option<Duration>,

    /// Seconds between two lines of counters
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,

    /// Print the counters as JSON, an object a line
    #[arg(long)]
    json: bool,

    /// A socket at which `pagemill top PATH` shows memory and pools
    #[arg(long, value_name = "PATH")]
    stats: Option<PathBuf>,
}

fn slots(text: &str) -> Result<u32, String> {
    let slots = text.parse().ok().filter(|slots: &u32| slots.is_power_of_two() && (64..=1 << 15).contains(slots));
    slots.ok_or_else(|| "a power of two from 64 to 32768".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds".to_owned())?;
    if (0.01..=1e9).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err("0.01 or more".to_owned()) }
}

impl Common {
    fn settings(&self) -> Settings {
        let mut queues = self.queues.clone();
        if let Some(queues) = &mut queues {
            queues.sort_unstable();
            queues.dedup();
        }
        let processors = std::thread::available_parallelism().map_or(1, Into::into);
        Settings {
            mode: self.mode,
            ring: self.ring,
            memory: self.memory,
            queues,
            threads: self.threads.map_or(processors, usize::from),
            time: self.seconds,
            interval: self.interval,
            is_json: self.json,
            stats: self.stats.clone(),
        }
    }
}

/// What a subcommand has to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// For standard output; ends with a line feed unless it is empty.
    pub out: String,
}

/// Runs a subcommand. What is to be said while it runs, a line each, goes to `notice`; counters go to standard output.
///
/// # Errors
/// What stopped it; [`Error::next_step`] says what to do.
pub fn run(args: &XdpArgs, notice: &mut dyn FnMut(&str)) -> Result<Said, Error> {
    let out = match &args.command {
        Command::Forward(args) => receive::forward(args, notice),
        Command::Drop(args) => receive::drop(args, notice),
        Command::Echo(args) => receive::echo(args, notice),
        Command::Generate(args) => generate::run(args, notice),
    }?;
    Ok(Said { out })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        xdp: XdpArgs,
    }

    fn parse(line: &str) -> Result<XdpArgs, String> {
        let words = ["xdp"].into_iter().chain(line.split_whitespace());
        Program::try_parse_from(words).map(|program| program.xdp).map_err(|error| error.to_string())
    }

    #[test]
    fn impossible_arguments_are_refused() {
        for line in [
            "forward --from a",
            "drop",
            "echo a",
            "echo a --address x",
            "generate a",
            "generate a --mac 1",
            "drop a --ring 100",
            "drop a --ring 0",
            "drop a --seconds 0",
            "drop a --seconds nan",
            "drop a --threads 0",
            "drop a --queues x",
            "generate a --mac 02:00:00:00:00:01 --size 59",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        assert_eq!(parse("forward --from a --to b").unwrap().name(), "forward");
    }

    #[test]
    fn a_missing_interface_is_an_error() {
        for line in ["drop none", "echo none --address 192.0.2.1", "forward --from none --to none2"] {
            let error = run(&parse(line).unwrap(), &mut |_| {}).unwrap_err();
            assert_eq!(error.to_string(), "there is no interface none", "{line}");
            assert!(error.next_step().is_some());
        }
    }
}
