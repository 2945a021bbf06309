//! Pages, blocks, runs and pooled handles as buffers of runtimes over io_uring (features `compio`, `monoio`, `tokio-uring`):
//! they are written to a file and read back, and the memory is whole at the end.
use crate::common::one_cpu;
use pagemill::{Allocator, Block, Bulk, Gfp, Memory, Mempool, Order, Page, PageMempool, Pooled, Run};
use std::sync::Arc;

const RESERVE: usize = 4;

/// One of each, filled with its own byte.
struct Buffers {
    page: Page,
    block: Block,
    run: Run<Block>,
    pooled: Pooled<Arc<PageMempool>>,
}

/// Where each of them is in the file.
const PLACES: [u64; 4] = [0, 4096, 5 * 4096, 13 * 4096];

fn buffers(allocator: &Allocator, pool: &Arc<PageMempool>, byte: u8) -> Buffers {
    let (order, mut runs) = (Order::new(3).unwrap(), Vec::new());
    allocator.alloc_pages_bulk_runs(Bulk::exact(1).order(order), &mut runs).unwrap();
    let mut buffers = Buffers {
        page: allocator.alloc_page(Gfp::KERNEL).unwrap(),
        block: allocator.alloc_pages(Gfp::KERNEL, Order::new(2).unwrap()).unwrap(),
        run: runs.pop().unwrap(),
        pooled: pool.alloc_owned(Gfp::KERNEL).unwrap(),
    };
    buffers.page.fill(byte);
    buffers.block.fill(byte + 1);
    buffers.run.as_mut_bytes().fill(byte + 2);
    buffers.pooled.fill(byte + 3);
    buffers
}

impl Buffers {
    /// Asserts that each is filled with its byte.
    fn check(&self, byte: u8) {
        let all: [&[u8]; 4] = [&self.page[..], &self.block, self.run.as_bytes(), &self.pooled[..]];
        for (part, byte) in all.into_iter().zip(byte..) {
            assert!(part.iter().all(|found| *found == byte), "{} bytes of {byte}", part.len());
        }
    }
}

/// Runs `transfer`, which writes the first buffers to a file and reads the file into the others.
fn write_and_read(transfer: impl FnOnce(std::fs::File, Buffers, Buffers) -> (Buffers, Buffers)) {
    let allocator = one_cpu(Memory::anonymous(256));
    let pool = Arc::new(Mempool::pages(&allocator, RESERVE).unwrap());
    let [from, to] = [1, 101].map(|byte| buffers(&allocator, &pool, byte));
    let (from, to) = transfer(crate::device_rings::file(), from, to);
    from.check(1);
    to.check(1);
    drop((from, to));
    assert_eq!((pool.stats().out, pool.stats().reserve), (0, RESERVE));
    drop(pool);
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
}

/// Passes each buffer to a method of a runtime's file, which takes it and returns it.
#[cfg(any(feature = "monoio", feature = "tokio-uring"))]
macro_rules! all {
    ($file:ident.$transfer:ident, $buffers:ident) => {{
        let (page, page_there) = $file.$transfer($buffers.page, PLACES[0]).await;
        let (block, block_there) = $file.$transfer($buffers.block, PLACES[1]).await;
        let (run, run_there) = $file.$transfer($buffers.run, PLACES[2]).await;
        let (pooled, pooled_there) = $file.$transfer($buffers.pooled, PLACES[3]).await;
        [page, block, run, pooled].into_iter().for_each(|result| result.unwrap());
        Buffers { page: page_there, block: block_there, run: run_there, pooled: pooled_there }
    }};
}

#[cfg(feature = "compio")]
mod compio {
    use super::{Buffers, PLACES, write_and_read};
    use compio_buf::{BufResult, IntoInner, IoBuf, IoBufMut};
    use compio_driver::op::{ReadAt, ReadManagedAt, WriteAt};
    use compio_driver::{AsRawFd, OpCode, Proactor, ProactorBuilder, PushEntry, ResultTakeBuffer, SharedFd};
    use pagemill::Allocator;
    use std::fs::File;
    use std::num::NonZeroU16;
    use std::os::unix::fs::FileExt;

    fn wait<O: OpCode + 'static>(driver: &mut Proactor, operation: O) -> BufResult<usize, O> {
        let mut entry = driver.push(operation);
        loop {
            match entry {
                PushEntry::Ready(result) => return result,
                PushEntry::Pending(key) => {
                    driver.poll(None).unwrap();
                    entry = driver.pop(key);
                }
            }
        }
    }

    fn write<B: IoBuf>(driver: &mut Proactor, file: &SharedFd<File>, at: u64, buffer: B) -> B {
        let len = buffer.buf_len();
        let BufResult(result, operation) = wait(driver, WriteAt::new(file.clone(), at, buffer));
        assert_eq!(result.unwrap(), len);
        operation.into_inner()
    }

    fn read<B: IoBufMut>(driver: &mut Proactor, file: &SharedFd<File>, at: u64, buffer: B) -> B {
        let len = buffer.buf_len();
        let BufResult(result, operation) = wait(driver, ReadAt::new(file.clone(), at, buffer));
        assert_eq!(result.unwrap(), len);
        operation.into_inner()
    }

    #[test]
    fn compio_writes_from_handles_and_reads_into_them() {
        let Ok(mut driver) = Proactor::new() else { return println!("skipped: no driver of compio here") };
        write_and_read(|file, from, to| {
            let (file, driver) = (SharedFd::new(file), &mut driver);
            driver.attach(file.as_raw_fd()).unwrap();
            let from = Buffers {
                page: write(driver, &file, PLACES[0], from.page),
                block: write(driver, &file, PLACES[1], from.block),
                run: write(driver, &file, PLACES[2], from.run),
                pooled: write(driver, &file, PLACES[3], from.pooled),
            };
            let to = Buffers {
                page: read(driver, &file, PLACES[0], to.page),
                block: read(driver, &file, PLACES[1], to.block),
                run: read(driver, &file, PLACES[2], to.run),
                pooled: read(driver, &file, PLACES[3], to.pooled),
            };
            (from, to)
        });
    }

    #[test]
    fn compios_own_buffers_are_blocks_of_the_global_allocator() {
        own_process!(); // It counts what is out of the global allocator.
        let out = || Allocator::global().validate().unwrap().handed_out;
        let before = out();
        let driver = ProactorBuilder::new()
            .buffer_pool_allocator::<Allocator>()
            .buffer_pool_size(NonZeroU16::new(4).unwrap())
            .buffer_pool_buffer_len(8192)
            .build();
        let Ok(mut driver) = driver else { return println!("skipped: no driver of compio here") };
        let file = crate::device_rings::file();
        file.write_all_at(&[7; 8192], 0).unwrap();
        let file = SharedFd::new(file);
        driver.attach(file.as_raw_fd()).unwrap();
        let pool = driver.buffer_pool().unwrap();
        assert_eq!(out() - before, 4 * 2);
        let operation = ReadManagedAt::new(file, 0, &pool, 8192).unwrap();
        // SAFETY: the result is that of the operation.
        let buffer = unsafe { wait(&mut driver, operation).take_buffer() }.unwrap().unwrap();
        assert!(buffer.iter().all(|byte| *byte == 7) && buffer.len() == 8192);
        drop((buffer, pool, driver));
        assert_eq!(out(), before);
    }
}

#[cfg(feature = "monoio")]
mod monoio {
    use super::{Buffers, PLACES, write_and_read};
    use monoio::fs::File;
    use monoio::{IoUringDriver, RuntimeBuilder};

    #[test]
    fn monoio_writes_from_handles_and_reads_into_them() {
        let Ok(mut runtime) = RuntimeBuilder::<IoUringDriver>::new().build() else {
            return println!("skipped: no io_uring here");
        };
        write_and_read(|file, from, to| {
            runtime.block_on(async {
                let file = File::from_std(file).unwrap();
                (all!(file.write_all_at, from), all!(file.read_exact_at, to))
            })
        });
    }
}

#[cfg(feature = "tokio-uring")]
mod tokio_uring {
    use super::{Buffers, PLACES, write_and_read};
    use tokio_uring::fs::File;

    #[test]
    fn tokio_uring_writes_from_handles_and_reads_into_them() {
        if crate::device_rings::ring().is_none() {
            return; // It says so.
        }
        write_and_read(|file, from, to| {
            tokio_uring::start(async {
                let file = File::from_std(file);
                (all!(file.write_all_at, from), all!(file.read_exact_at, to))
            })
        });
    }
}
