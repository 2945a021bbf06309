//! Copies one drive onto another. Both reach the same memory, so a block that was read from the one is written to the
//! other from where it lies. One task awaits many copies at a time.
//!
//! ```console
//! # cargo run --release -p pagemill-nvme --example mirror -- 0000:01:00.0 0000:02:00.0
//! $ cargo run --release -p pagemill-nvme --example mirror -- fake fake
//! ```
use std::error::Error;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use pagemill::{Allocator, Memory};
use pagemill_nvme::{Dma, Drive, Fake, Queue, Request, Settings};

/// Bytes of a piece.
const PIECE: u64 = 128 << 10;
/// Copies at a time.
const DEPTH: usize = 16;

type Copy<'a> = Pin<Box<dyn Future<Output = Result<(), pagemill_nvme::Error>> + 'a>>;

/// Copies `len` bytes at block `lba`.
async fn copy(from: (&Drive, &Queue), to: &Queue, lba: u64, len: u64) -> Result<(), pagemill_nvme::Error> {
    let buffer = from.0.buffer(len as usize)?;
    let read = from.1.start(Request::read(lba, buffer)).await.ok()?;
    let buffer = read.into_buffer().expect("a read that succeeded has its buffer");
    to.start(Request::write(lba, buffer)).await.ok().map(drop)
}

fn main() -> Result<(), Box<dyn Error>> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let [from, to] = names.as_slice() else { return Err("usage: mirror FROM TO".into()) };
    let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(8192).within_limit()).build()?);
    // Polled, since one thread waits for both.
    let settings = Settings { is_polled: true, ..Settings::default() };
    let open = |name: &str| -> Result<Drive, Box<dyn Error>> {
        Ok(match name {
            "fake" => Drive::on_fake(&dma, &Fake::new(10_000), settings)?,
            address => Drive::open(&dma, address.parse()?, settings)?,
        })
    };
    let (source, target) = (open(from)?, open(to)?);
    let block = u64::from(source.namespace().block_size);
    if source.namespace().bytes() > target.namespace().bytes() || u64::from(target.namespace().block_size) != block {
        return Err("the second drive is smaller, or has other blocks".into());
    }
    let (reads, writes) = (source.queue()?, target.queue()?);
    let blocks = source.namespace().blocks;
    let mut pieces = (0..blocks).step_by((PIECE / block) as usize);
    let mut copies: Vec<Copy<'_>> = Vec::new();
    // The queue of the reads runs the task. Each poll of a write makes progress in the other queue.
    reads.block_on(poll_fn(|context| {
        loop {
            while copies.len() < DEPTH
                && let Some(lba) = pieces.next()
            {
                let len = PIECE.min((blocks - lba) * block);
                copies.push(Box::pin(copy((&source, &reads), &writes, lba, len)));
            }
            let before = copies.len();
            let mut failed = None;
            copies.retain_mut(|copy| match copy.as_mut().poll(context) {
                Poll::Ready(result) => {
                    failed = failed.take().or(result.err());
                    false
                }
                Poll::Pending => true,
            });
            match failed {
                Some(error) => return Poll::Ready(Err(error)),
                None if copies.is_empty() && before == 0 => return Poll::Ready(Ok(())),
                None if copies.len() == before => return Poll::Pending,
                None => {}
            }
        }
    }))?;
    writes.flush()?;
    source.shut_down()?;
    target.shut_down()?;
    println!("{} bytes from {from} to {to}", blocks * block);
    Ok(())
}
