//! fio verifies its writes: random writes from several connections with flushes among them, read back and compared by
//! checksums.

use crate::common::served::*;
use crate::common::*;
use pagemill_crypt::serve::Way;

const JOBS: u64 = 3;
const EACH: u64 = 4 * MIB;

fn line(served: &Served, sector: u64, more: &str) -> String {
    let uri = served.uri();
    format!(
        "fio --name=verified --ioengine=nbd --thread --uri={uri} --rw=randwrite --bsrange={sector}-256k --bs_unaligned=0 \
         --blockalign={sector} --size={EACH} --offset_increment={EACH} --numjobs={JOBS} --iodepth=16 --randseed=7 \
         --fsync=13 --verify=crc32c --verify_fatal=1 --output-format=json --group_reporting {more}"
    )
}

fn fio(bench: &Bench, served: &Served, sector: u64, more: &str) -> serde_json::Value {
    let report = bench.ok(&line(served, sector, more));
    let report: serde_json::Value = serde_json::from_str(&report[report.find('{').expect(&report)..]).unwrap();
    let job = report["jobs"][0].clone();
    assert_eq!(job["error"], 0, "{job}");
    job
}

#[test]
fn random_writes_of_several_connections_are_verified() {
    let Some(bench) = Bench::with(&["fio"]) else { return };
    let len = JOBS * EACH;
    for (way, sector) in [(Way::Plain, 512), (Way::Uring, 4096), (Way::Plain, 4096)] {
        let file = bench.file("image", len);
        // Fewer pages than needed at once: some requests are done in short parts, and some wait.
        let setup = Setup { way, pages: 1024, ..Setup::new() };
        let Some(served) = Served::start(&bench, bench.open("image"), plain_volume(len, sector), setup) else {
            continue;
        };
        let job = fio(&bench, &served, sector, "--do_verify=1");
        let (written, read) = (job["write"]["io_bytes"].as_u64(), job["read"]["io_bytes"].as_u64());
        assert_eq!((written, read), (Some(len), Some(len)), "{way:?}: all of it was written, and read back");
        assert!(job["sync"]["total_ios"].as_u64() > Some(0), "{way:?}: it flushes");
        // Another run verifies the first one's data, and writes nothing.
        let again = fio(&bench, &served, sector, "--verify_only=1");
        assert_eq!(again["error"], 0);
        served.stop();
        assert!(plain_contents(&file, sector).iter().any(|&byte| byte != 0));
        // It finds a change in the file, which makes one sector decrypt to noise.
        let mut stored = [0];
        let at = EACH + 100_000;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut stored, at).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[stored[0] ^ 1], at).unwrap();
        let served = Served::start(&bench, bench.open("image"), plain_volume(len, sector), setup).unwrap();
        assert!(!bench.run(&line(&served, sector, "--verify_only=1")).status.success(), "{way:?}: it verifies nothing");
        served.stop();
    }
}
