//! A volume as a file, through FUSE, as other programs see it.
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use pagemill::Allocator;
use pagemill_crypt::mount::Mounted;
use pagemill_crypt::secret::Locked;
use pagemill_crypt::serve::{DataPath, Disk, Memory, VolumeFile};
use pagemill_crypt::volume::Geometry;
use pagemill_crypt::{SectorSize, Volume};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

const LEN: usize = 3 << 20;

fn plain(image: &Path, sector: u64) -> VolumeFile {
    let data = File::options().read(true).write(true).create(true).truncate(false).open(image).unwrap();
    data.set_len(LEN as u64).unwrap();
    plain_on(data, sector)
}

fn plain_on(data: File, sector: u64) -> VolumeFile {
    let sector_size = SectorSize::new(sector).unwrap();
    let geometry = Geometry { offset: 0, len: LEN as u64, sector_size, first_unit: 0, counts_sectors: false };
    let volume = Volume::new(&Locked::copy_of(&[3; 64]), geometry).unwrap();
    let allocator = Allocator::builder().pages(4096).build().unwrap();
    let memory = Memory::new(&allocator, 256, 1 << 20).unwrap();
    VolumeFile::new(DataPath { volume, disk: Disk::new(data, 0, sector as usize, false), memory })
}

/// `None`, and a line that says so, if mounting is not possible.
fn mounted(file: VolumeFile, at: &Path, is_read_only: bool) -> Option<Mounted> {
    match Mounted::new(file, at, is_read_only, 2) {
        Ok(mounted) => Some(mounted),
        Err(why) if matches!(why.kind(), ErrorKind::PermissionDenied | ErrorKind::NotFound) => {
            println!("skipped: mounting takes /dev/fuse, and root or fusermount3 ({why})");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut seed = seed;
    let next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[test]
fn a_mounted_volume_is_a_file_that_keeps_its_data() {
    for sector in [512, 4096] {
        let folder = tempfile::tempdir().unwrap();
        let (image, at) = (folder.path().join("image"), folder.path().join("plain"));
        let mut model = noise(1, LEN);
        plain(&image, sector).write_at(0, &model).unwrap();
        File::create(&at).unwrap();
        let Some(mut mount) = mounted(plain(&image, sector), &at, false) else { return };
        let mut unmounter = mount.unmounter();
        let serving = std::thread::spawn(|| mount.serve());

        let meta = fs::metadata(&at).unwrap();
        assert_eq!((meta.len(), meta.permissions().mode() & 0o777), (LEN as u64, 0o600));
        assert!(fs::read(&at).unwrap() == model, "what the volume held");
        let file = File::options().read(true).write(true).open(&at).unwrap();
        for (at, len) in [(0, 1), (511, 2), (5000, 9000), (LEN - 1, 1), (1 << 20, (1 << 20) + 77), (4096, 4096)] {
            let bytes = noise(at as u64, len);
            file.write_all_at(&bytes, at as u64).unwrap();
            model[at..at + len].copy_from_slice(&bytes);
        }
        file.sync_all().unwrap();
        // The data is in the image now.
        let mut stored = vec![0; LEN];
        plain(&image, sector).read_at(0, &mut stored).unwrap();
        assert!(stored == model, "after fsync");

        assert_eq!(file.set_len(1).unwrap_err().kind(), ErrorKind::PermissionDenied);
        assert_eq!(file.write_at(&[1; 8], LEN as u64).unwrap_err().kind(), ErrorKind::StorageFull);
        assert_eq!(file.write_at(&[model[LEN - 1]; 8], LEN as u64 - 1).unwrap(), 1, "as much as there is room for");
        assert_eq!(file.read_at(&mut [0; 8], LEN as u64).unwrap(), 0);

        // The name is removed; programs that have the file open go on.
        unmounter.unmount().unwrap();
        assert_eq!(fs::metadata(&at).unwrap().size(), 0, "the file that was hidden");
        file.write_all_at(&[42; 4096], 8192).unwrap();
        model[8192..8192 + 4096].fill(42);
        drop(file);
        serving.join().unwrap().unwrap();
        plain(&image, sector).read_at(0, &mut stored).unwrap();
        assert!(stored == model, "after the last one closed it");
    }
}

/// A file system on a loop device writes zeroes by making holes, if the file below allows that; in a volume they would be
/// noise.
#[test]
fn zeroes_through_a_loop_device_are_zeroes_and_holes_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (image, at) = (folder.path().join("image"), folder.path().join("plain"));
    let mut model = noise(4, LEN);
    plain(&image, 4096).write_at(0, &model).unwrap();
    File::create(&at).unwrap();
    let Some(mut mount) = mounted(plain(&image, 4096), &at, false) else { return };
    let mut unmounter = mount.unmounter();
    let serving = std::thread::spawn(|| mount.serve());
    let file = File::options().read(true).write(true).open(&at).unwrap();
    for mode in [FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, FallocateFlags::ZERO_RANGE] {
        assert_eq!(rustix::fs::fallocate(&file, mode, 0, 4096), Err(Errno::OPNOTSUPP));
    }
    drop(file);
    let run = |program: &str, words: &[&str]| {
        let done = Command::new(program).args(words).output();
        done.unwrap_or_else(|error| panic!("{program}, of Debian's packages mount and util-linux: {error}"))
    };
    let attached = run("losetup", &["--find", "--show", at.to_str().unwrap()]);
    let device = String::from_utf8(attached.stdout).unwrap().trim().to_owned();
    if attached.status.success() {
        let part = ["--offset", "1048576", "--length", "524288", &device];
        // It changes nothing, whether it is refused or ignored.
        run("blkdiscard", &[&part[..], &["--offset", "0"]].concat());
        let zeroed = [run("blkdiscard", &[&["--zeroout"], &part[..]].concat()), run("losetup", &["--detach", &device])];
        assert!(zeroed.iter().all(|done| done.status.success()), "{zeroed:?}");
        model[1 << 20..3 << 19].fill(0);
    } else {
        eprintln!("skipped: no loop device: {}", String::from_utf8_lossy(&attached.stderr).trim());
    }
    unmounter.unmount().unwrap();
    serving.join().unwrap().unwrap();
    let mut stored = vec![0; LEN];
    plain(&image, 4096).read_at(0, &mut stored).unwrap();
    assert!(stored == model);
}

#[test]
fn a_read_only_mount_refuses_writes() {
    let folder = tempfile::tempdir().unwrap();
    let (image, at) = (folder.path().join("image"), folder.path().join("plain"));
    let model = noise(2, LEN);
    plain(&image, 4096).write_at(0, &model).unwrap();
    File::create(&at).unwrap();
    let Some(mut mount) = mounted(plain(&image, 4096), &at, true) else { return };
    let mut unmounter = mount.unmounter();
    let serving = std::thread::spawn(|| mount.serve());
    assert!(fs::read(&at).unwrap() == model);
    let refused = File::options().write(true).open(&at).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);
    unmounter.unmount().unwrap();
    serving.join().unwrap().unwrap();
}

#[test]
fn a_failed_sync_is_reported_when_the_mount_ends() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().join("plain");
    File::create(&at).unwrap();
    // It accepts every write, and fails to sync.
    let no_disk = File::options().read(true).write(true).open("/dev/zero").unwrap();
    let Some(mut mount) = mounted(plain_on(no_disk, 512), &at, false) else { return };
    let mut unmounter = mount.unmounter();
    let serving = std::thread::spawn(|| mount.serve());
    File::options().write(true).open(&at).unwrap().write_all_at(&[1; 512], 0).unwrap();
    unmounter.unmount().unwrap();
    assert_eq!(serving.join().unwrap().unwrap_err().kind(), ErrorKind::InvalidInput);
}
