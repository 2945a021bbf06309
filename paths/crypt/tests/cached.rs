//! A server that keeps plain pages: clients never read old bytes, and no plain page is left behind.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use crate::common::served::*;
use crate::common::*;
use pagemill::{Gfp, PAGE_SIZE, page_caches};
use pagemill_crypt::serve::Way;

/// Pseudo-random numbers, the same each time.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

const LEN: u64 = 4 * MIB;

/// The bytes that the `version`-th write to a sector gives it: no two sectors and no two versions are alike.
fn stamp(sector: u64, version: u64, len: usize) -> Vec<u8> {
    let mut numbers = Numbers(sector << 32 ^ version);
    (0..len).map(|_| numbers.below(256) as u8).collect()
}

/// Each client writes to every second sector, and knows what these have. They lie in the same pages, and other clients read
/// across all of them meanwhile, so that each write comes beside reads of its page. Each answer is compared.
#[test]
fn no_client_reads_old_bytes_after_a_write_was_answered() {
    // A cache as large as the volume, and a small one that evicts all the time.
    for cache in [LEN, LEN / 8] {
        let setup = Setup { threads: 3, cache: Some(cache as usize / PAGE_SIZE), may_discard: true, ..Setup::new() };
        by_each_way(setup, LEN, 512, |bench, served, way| {
            let is_over = AtomicBool::new(false);
            let sectors = LEN / 512;
            Client::connect(&served).ask(command::WRITE_ZEROES, 0, 0, LEN as u32).unwrap();
            thread::scope(|scope| {
                let write = |me: u64| {
                    let mut client = Client::connect(&served);
                    let mut numbers = Numbers(me);
                    let mut versions = vec![None; sectors as usize];
                    for version in 0..1500 {
                        let sector = numbers.below(sectors / 2) * 2 + me;
                        let fua = if numbers.below(16) == 0 { FUA } else { 0 };
                        if numbers.below(8) == 0 {
                            client.ask(command::WRITE_ZEROES, fua, sector * 512, 512).unwrap();
                            versions[sector as usize] = None;
                        } else {
                            client.write(sector * 512, &stamp(sector, version, 512), fua).unwrap();
                            versions[sector as usize] = Some(version);
                        }
                        // What was just written, and an older one with its neighbours.
                        let other = numbers.below(sectors / 2) * 2 + me;
                        for sector in [sector, other] {
                            let count = 1 + numbers.below((sectors - sector).min(64));
                            let read = client.read(sector * 512, (count * 512) as usize).unwrap();
                            for (sector, is) in (sector..).zip(read.chunks(512)).step_by(2) {
                                let has = versions[sector as usize];
                                let expected = has.map_or(vec![0; 512], |version| stamp(sector, version, 512));
                                assert!(is == expected, "{way:?}, {me}: sector {sector} has not version {has:?}");
                            }
                        }
                    }
                    versions
                };
                let reads = scope.spawn(|| {
                    let mut client = Client::connect(&served);
                    let mut numbers = Numbers(77);
                    while !is_over.load(Relaxed) {
                        let at = numbers.below(sectors - 256) * 512;
                        client.read(at, 256 * 512).unwrap();
                    }
                });
                let writers: Vec<_> = (0..2).map(|me| scope.spawn(move || write(me))).collect();
                let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
                // Also if one has failed.
                is_over.store(true, Relaxed);
                reads.join().unwrap();
                let versions: Vec<_> = ended.into_iter().map(Result::unwrap).collect();
                let mut model = vec![0; LEN as usize];
                for (sector, place) in (0..sectors).zip(model.chunks_mut(512)) {
                    if let Some(version) = versions[sector as usize % 2][sector as usize] {
                        place.copy_from_slice(&stamp(sector, version, 512));
                    }
                }
                let read = Client::connect(&served).read(0, LEN as usize).unwrap();
                assert!(read == model, "{way:?}: what a new client reads");
                let file = bench.open("image");
                assert!(plain_contents(&file, 512) == model, "{way:?}: what the file holds");
            });
            served.stop();
        });
    }
}

#[test]
fn reads_come_from_the_cache_until_a_trim_or_a_write() {
    let setup = Setup { threads: 1, cache: Some(LEN as usize / PAGE_SIZE), may_discard: true, ..Setup::new() };
    by_each_way(setup, LEN, 4096, |bench, served, _| {
        let mut client = Client::connect(&served);
        let bytes = pattern(LEN as usize);
        client.write(0, &bytes, 0).unwrap();
        assert!(client.read(0, LEN as usize).unwrap() == bytes);
        // Bytes of the file that changes behind the server's back are not seen.
        let file = bench.open("image");
        std::os::unix::fs::FileExt::write_all_at(&file, &[0; 4096], 64 << 10).unwrap();
        assert!(client.read(0, LEN as usize).unwrap() == bytes);
        client.ask(command::TRIM, 0, 128 << 10, 64 << 10).unwrap();
        let hole = client.read(128 << 10, 64 << 10).unwrap();
        assert!(hole != bytes[128 << 10..192 << 10], "the trimmed bytes");
        client.write(64 << 10, &bytes[..4096], FUA).unwrap();
        assert!(client.read(64 << 10, 4096).unwrap() == bytes[..4096]);
        assert!(client.read(68 << 10, 4096).unwrap() == bytes[68 << 10..72 << 10]);
        drop(client);
        served.stop();
    });
}

/// Bytes that were asked for come from the cache: nobody reads them from the file when it has changed.
#[test]
fn a_cache_request_reads_into_the_cache() {
    let setup = Setup { threads: 1, cache: Some(LEN as usize / PAGE_SIZE), ..Setup::new() };
    by_each_way(setup, LEN, 512, |bench, served, way| {
        let mut client = Client::connect(&served);
        let bytes = pattern(LEN as usize);
        client.write(0, &bytes, 0).unwrap();
        client.ask(command::CACHE, 0, 512, 64 << 10).unwrap();
        // It is answered before they are read, all at once; who reads the first of them waits for that.
        assert!(client.read(0, 512).unwrap() == bytes[..512]);
        std::os::unix::fs::FileExt::write_all_at(&bench.open("image"), &[0; MIB as usize], 0).unwrap();
        assert!(client.read(512 << 10, 4096).unwrap() != bytes[512 << 10..][..4096], "{way:?}: was not asked for");
        assert!(client.read(512, 64 << 10).unwrap() == bytes[512..][..64 << 10], "{way:?}");
        // All of it and the most that there can be: one is more than a turn reads, the other beyond the end.
        client.ask(command::CACHE, 0, 0, LEN as u32).unwrap();
        assert_eq!(client.ask(command::CACHE, 0, 0, u32::MAX), Err(22));
        drop(client);
        served.stop();
    });
}

/// Without wiping, the pages of the cache would hold the whole volume.
#[test]
fn cached_pages_are_zeroed_when_the_server_stops() {
    own_process!(); // It looks at all caches of the process.
    let bench = Bench::with(&[]).unwrap();
    let (pages, len) = (256, MIB);
    let plain = pattern(PAGE_SIZE).repeat(pages);
    bench.file("image", len);
    let setup = Setup { way: Way::Plain, threads: 1, pages: 1024, promised: 16, cache: Some(pages), ..Setup::new() };
    let served = Served::start(&bench, bench.open("image"), plain_volume(len, 4096), setup).unwrap();
    let mut client = Client::connect(&served);
    for at in (0..len as usize).step_by(PAGE_SIZE) {
        client.write(at as u64, &plain[at..at + PAGE_SIZE], 0).unwrap();
        assert!(client.read(at as u64, PAGE_SIZE).unwrap() == plain[at..at + PAGE_SIZE]);
    }
    let caches = page_caches();
    assert_eq!((caches.len(), caches[0].name.as_str(), caches[0].stats.pages), (1, "crypt", pages as u64));
    drop(client);
    let allocator = served.drop_server();
    assert!(page_caches().is_empty());
    let all: Vec<_> = std::iter::from_fn(|| allocator.alloc_page(Gfp::NOWAIT).ok()).collect();
    let left = all.iter().filter(|page| page[..] == plain[..PAGE_SIZE]).count();
    // Buffers of requests are used again and again, and are not zeroed.
    assert!(all.len() > 900 && left < 64, "{left} of {} pages have plain bytes", all.len());
}
