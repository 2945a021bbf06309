//! A load on a drive, as fio makes them: each thread has a queue of its own, and keeps random reads (or writes) of 4 KiB
//! under way in it. Prints what each queue did, and the latencies of all.
//!
//! ```console
//! # cargo run --release -p pagemill-nvme --example load -- 0000:01:00.0 --seconds 5
//! # cargo run --release -p pagemill-nvme --example load -- 0000:01:00.0 --writes --overwrite
//! $ cargo run --release -p pagemill-nvme --example load -- fake
//! ```
use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use pagemill::{Allocator, Memory};
use pagemill_nvme::{Dma, Drive, Fake, Queue, Refused, Request, Settings};

/// Random requests of 4 KiB, from several threads, each on its own queue.
#[derive(Parser)]
struct Args {
    /// The drives' PCI addresses, or `fake` for one in memory
    #[arg(required = true)]
    drives: Vec<String>,
    /// Threads of each drive, each with a queue
    #[arg(long, default_value_t = 2)]
    threads: u16,
    /// Requests under way in each queue
    #[arg(long, default_value_t = 16)]
    depth: u16,
    /// Seconds
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Look for completions; no interrupts
    #[arg(long)]
    poll: bool,
    /// Doorbells by registers, also of drives that read them from memory
    #[arg(long)]
    no_shadows: bool,
    /// Write instead of reading
    #[arg(long, requires = "overwrite")]
    writes: bool,
    /// What is on the drive may be lost
    #[arg(long)]
    overwrite: bool,
}

const SIZE: usize = 4096;

/// Keeps `depth` requests under way for `time`. Returns how long each took, in nanoseconds.
fn work(drive: &Drive, queue: &Queue, args: &Args, seed: u64) -> Result<Vec<u64>, pagemill_nvme::Error> {
    let each = SIZE as u64 / u64::from(drive.namespace().block_size);
    let places = drive.namespace().blocks / each;
    let (begin, time) = (Instant::now(), Duration::from_secs_f64(args.seconds));
    let mut random = seed;
    let mut next = || {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 32) % places * each
    };
    let request = |lba, buffer| if args.writes { Request::write(lba, buffer) } else { Request::read(lba, buffer) };
    let (mut took, mut done) = (Vec::new(), Vec::new());
    let mut buffers = (0..args.depth).map(|_| drive.buffer(SIZE)).collect::<Result<Vec<_>, _>>()?;
    if args.writes {
        buffers.iter_mut().for_each(|buffer| buffer.pieces_mut().for_each(|piece| piece.fill(seed as u8)));
    }
    loop {
        if begin.elapsed() < time {
            while let Some(buffer) = buffers.pop() {
                match queue.submit(request(next(), buffer), 0) {
                    Ok(()) => {}
                    // After a reset, or while a command is aborted, the queue may have less room for a while.
                    Err(Refused { request, error: pagemill_nvme::Error::Busy(_) }) => {
                        buffers.extend(request.into_buffer());
                        break;
                    }
                    Err(refused) => return Err(refused.error),
                }
            }
        } else if queue.out() == 0 {
            return Ok(took);
        }
        queue.wait(Duration::from_millis(100), &mut done)?;
        for done in done.drain(..) {
            took.push(done.took.as_nanos() as u64);
            // The buffer of a finished request goes into the next.
            buffers.extend(done.ok()?.into_buffer());
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(8192).within_limit()).build()?);
    let settings = Settings {
        queues: args.threads,
        depth: args.depth,
        is_polled: args.poll,
        has_shadows: !args.no_shadows,
        ..Settings::default()
    };
    // All drives over the same memory.
    let open = |name: &String| -> Result<Drive, Box<dyn Error>> {
        Ok(match name.as_str() {
            "fake" => Drive::on_fake(&dma, &Fake::new(20_000), settings)?,
            address => Drive::open(&dma, address.parse()?, settings)?,
        })
    };
    let drives = args.drives.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    let what = if args.writes { "writes" } else { "reads" };
    let (names, threads, depth) = (args.drives.join(", "), args.threads, args.depth);
    println!("{names}: random {what} of 4 KiB, {threads} threads a drive, each with {depth} under way");
    let begin = Instant::now();
    let results: Vec<_> = thread::scope(|scope| {
        let mut running = Vec::new();
        for nth in 0..drives.len() * usize::from(args.threads) {
            let at = nth / usize::from(args.threads);
            let (drive, args, queue) = (&drives[at], &args, drives[at].queue());
            running.push((at, scope.spawn(move || work(drive, &queue?, args, nth as u64 + 1))));
        }
        running.into_iter().map(|(at, thread)| (at, thread.join().expect("no thread panics"))).collect()
    });
    let seconds = begin.elapsed().as_secs_f64();
    let mut all = Vec::new();
    for (nth, (at, took)) in results.into_iter().enumerate() {
        let (took, name, queue) = (took?, &args.drives[at], nth % usize::from(args.threads) + 1);
        println!("{name} queue {queue}: {} requests, {:.0} IOPS", took.len(), took.len() as f64 / seconds);
        all.extend(took);
    }
    let (mut aborts, mut resets) = (0, 0);
    for drive in &drives {
        let counts = drive.shut_down()?;
        (aborts, resets) = (aborts + counts.aborts, resets + counts.resets);
    }
    all.sort_unstable();
    let at = |percent: f64| {
        let nth = (all.len() as f64 * percent / 100.0).ceil() as usize;
        all.get(nth.max(1) - 1).map_or(0.0, |&ns| ns as f64 / 1e3)
    };
    println!("all: {} requests in {seconds:.2} s, {:.0} IOPS", all.len(), all.len() as f64 / seconds);
    let (half, ninety, most, longest) = (at(50.0), at(90.0), at(99.0), at(100.0));
    println!("us: half within {half:.1}, 90 % {ninety:.1}, 99 % {most:.1}, all {longest:.1}");
    println!("{aborts} aborts, {resets} resets");
    Ok(())
}
