//! The logs of a controller: its health (page 02h) and its errors (page 01h), section 5.14.1. No field is trusted.
use serde::Serialize;

use crate::Status;
use crate::identify::Fields;
use crate::spec::PAGE;

/// Bytes of an entry of the error log.
pub(crate) const ERROR_BYTES: usize = 64;

/// How a drive is, by itself: its SMART / Health Information log.
///
/// ```
/// # use pagemill::{Allocator, Memory};
/// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
/// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// let health = drive.health()?;
/// for warning in health.warnings() {
///     eprintln!("{}; {}", warning.what, warning.next);
/// }
/// println!("{} °C, {} % of its life used", health.temperature_c, health.used_percent);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Health {
    /// The critical warnings: a bit for each of [`warnings`](Self::warnings).
    pub critical_warning: u8,
    /// The temperature of the whole, in °C.
    pub temperature_c: i32,
    /// Spare blocks that are left, in percent.
    pub spare_percent: u8,
    /// Below this many percent of spare blocks the drive warns.
    pub spare_threshold_percent: u8,
    /// Percent of its expected life that is used; it may be above 100, and 255 stands for all that is above 254.
    pub used_percent: u8,
    /// Bytes that were read, in whole units of 512,000.
    pub bytes_read: u128,
    /// Bytes that were written, in whole units of 512,000.
    pub bytes_written: u128,
    /// Commands that read.
    pub reads: u128,
    /// Commands that wrote.
    pub writes: u128,
    /// Minutes in which it was busy.
    pub busy_minutes: u128,
    /// How often it was switched on.
    pub power_cycles: u128,
    /// Hours for which it was on.
    pub power_on_hours: u128,
    /// How often it lost power without a shutdown.
    pub unsafe_shutdowns: u128,
    /// Errors of its medium, and data that did not come back whole.
    pub media_errors: u128,
    /// Entries that its error log has had.
    pub error_entries: u128,
    /// Minutes above the temperature at which it warns.
    pub warm_minutes: u32,
    /// Minutes above its critical temperature.
    pub hot_minutes: u32,
    /// The temperatures of its sensors, in °C.
    pub sensors_c: Vec<i32>,
}

/// A critical warning of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Warning {
    /// What is wrong.
    pub what: &'static str,
    /// What to do.
    pub next: &'static str,
}

const WARNINGS: [Warning; 6] = [
    Warning { what: "few spare blocks are left", next: "copy its data and replace the drive" },
    Warning { what: "it is too hot or too cold", next: "look at its cooling" },
    Warning { what: "its medium has become unreliable", next: "copy its data and replace the drive" },
    Warning { what: "it takes no more writes", next: "copy its data and replace the drive" },
    Warning {
        what: "the backup power of its write cache has failed",
        next: "flush after each write that matters, and replace the drive",
    },
    Warning { what: "its persistent memory region fails", next: "copy what is there and replace the drive" },
];
const OTHER: Warning = Warning { what: "it warns of something that has no name here", next: "ask its maker" };

impl Health {
    pub(crate) fn read(page: &[u8; PAGE]) -> Self {
        let fields = Fields(page);
        let celsius = |at| i32::from(fields.u16(at)) - 273;
        let number = |at| u128::from(fields.u64(at)) | u128::from(fields.u64(at + 8)) << 64;
        let bytes = |at| number(at).saturating_mul(512_000);
        Self {
            critical_warning: page[0],
            temperature_c: celsius(1),
            spare_percent: page[3],
            spare_threshold_percent: page[4],
            used_percent: page[5],
            bytes_read: bytes(32),
            bytes_written: bytes(48),
            reads: number(64),
            writes: number(80),
            busy_minutes: number(96),
            power_cycles: number(112),
            power_on_hours: number(128),
            unsafe_shutdowns: number(144),
            media_errors: number(160),
            error_entries: number(176),
            warm_minutes: fields.u32(192),
            hot_minutes: fields.u32(196),
            // A sensor that is not there is at 0 K.
            sensors_c: (0..8).map(|nth| 200 + 2 * nth).filter(|&at| fields.u16(at) != 0).map(celsius).collect(),
        }
    }

    /// The critical warnings, with what to do.
    #[must_use]
    pub fn warnings(&self) -> Vec<Warning> {
        let named = (0..8).filter(|bit| self.critical_warning >> bit & 1 == 1);
        named.map(|bit| WARNINGS.get(bit).copied().unwrap_or(OTHER)).collect()
    }
}

/// An entry of a drive's error log.
///
/// ```
/// # use pagemill::{Allocator, Memory};
/// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
/// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// for entry in drive.errors(16)? {
///     println!("{}: {} at block {}", entry.number, entry.status, entry.lba);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ErrorEntry {
    /// Its number; later errors have higher ones.
    pub number: u64,
    /// The queue of the command; 0 is the admin queue.
    pub queue: u16,
    /// The command's identifier.
    pub command: u16,
    /// What the controller said.
    pub status: Status,
    /// The first block of the error, if it is about blocks.
    pub lba: u64,
    /// The namespace, if it is about one.
    pub namespace: u32,
}

impl ErrorEntry {
    /// The entries of a page, up to `count`, the newest first. One with the number 0 was never used.
    pub(crate) fn read(page: &[u8; PAGE], count: usize) -> Vec<Self> {
        let fields = Fields(page);
        let entries = (0..count.min(PAGE / ERROR_BYTES)).map(|nth| nth * ERROR_BYTES).map(|at| Self {
            number: fields.u64(at),
            queue: fields.u16(at + 8),
            command: fields.u16(at + 10),
            // Bit 0 is the phase.
            status: Status(fields.u16(at + 12) >> 1),
            lba: fields.u64(at + 16),
            namespace: fields.u32(at + 24),
        });
        entries.filter(|entry| entry.number != 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_health_log_is_read_with_its_units() {
        let mut page = [0; PAGE];
        (page[0], page[3], page[4], page[5]) = (0b1001, 90, 10, 7);
        page[1..3].copy_from_slice(&323u16.to_le_bytes());
        page[32..48].copy_from_slice(&3u128.to_le_bytes());
        page[48..64].copy_from_slice(&u128::MAX.to_le_bytes());
        page[128..144].copy_from_slice(&(1u128 << 70).to_le_bytes());
        page[196..200].copy_from_slice(&5u32.to_le_bytes());
        page[202..204].copy_from_slice(&273u16.to_le_bytes());
        let health = Health::read(&page);
        assert_eq!((health.temperature_c, health.spare_percent, health.used_percent), (50, 90, 7));
        assert_eq!((health.bytes_read, health.bytes_written), (1_536_000, u128::MAX));
        assert_eq!((health.power_on_hours, health.hot_minutes), (1 << 70, 5));
        assert_eq!(health.sensors_c, [0], "the second sensor is there, at 0 degrees");
        let said: Vec<_> = health.warnings().iter().map(|warning| warning.what).collect();
        assert_eq!(said, ["few spare blocks are left", "it takes no more writes"]);
    }

    #[test]
    fn every_critical_warning_has_words_and_a_next_step() {
        for critical_warning in 0..=255 {
            let mut page = [0; PAGE];
            page[0] = critical_warning;
            let warnings = Health::read(&page).warnings();
            assert_eq!(warnings.len(), critical_warning.count_ones() as usize);
            assert!(warnings.iter().all(|warning| !warning.what.is_empty() && !warning.next.is_empty()));
        }
    }

    #[test]
    fn unused_entries_of_an_error_log_are_left_out() {
        let mut page = [0; PAGE];
        page[..8].copy_from_slice(&9u64.to_le_bytes());
        page[8..16].copy_from_slice(&[1, 0, 5, 0, 1, 1, 0, 0]);
        page[16..24].copy_from_slice(&77u64.to_le_bytes());
        page[24..28].copy_from_slice(&1u32.to_le_bytes());
        let entry = ErrorEntry { number: 9, queue: 1, command: 5, status: Status(0x80), lba: 77, namespace: 1 };
        assert_eq!(ErrorEntry::read(&page, 64), [entry]);
        assert_eq!(ErrorEntry::read(&page, 0), []);
    }

    proptest! {
        #[test]
        fn any_log_page_is_read(bytes in prop::collection::vec(any::<u8>(), PAGE)) {
            let page: &[u8; PAGE] = bytes.as_slice().try_into().unwrap();
            prop_assert!(Health::read(page).sensors_c.len() <= 8);
            prop_assert!(ErrorEntry::read(page, 1000).len() <= 64);
        }
    }
}
