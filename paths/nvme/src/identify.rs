//! The identify data of a controller and of its namespaces (section 5.15): pages of fields at fixed places. No field is
//! trusted.
use std::time::Duration;

use serde::Serialize;

use crate::Error;
use crate::spec::PAGE;

/// The shift of the largest supported block.
const MOST_SHIFT: u32 = 16;
/// A controller has at least this long to shut down: some do not say how long they take, or say too little.
const LEAST_SHUTDOWN: Duration = Duration::from_secs(5);
/// And at most this long.
const MOST_SHUTDOWN: Duration = Duration::from_secs(300);
/// The type of the command set in a namespace's list of descriptors.
const COMMAND_SET: u8 = 4;

/// What a controller says of itself.
///
/// ```
/// # use pagemill::{Allocator, Memory};
/// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
/// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// if drive.info().has_write_cache {
///     drive.queue()?.flush()?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ControllerInfo {
    /// The PCI vendor ID.
    pub vendor: u16,
    /// Its serial number.
    pub serial: String,
    /// Its model.
    pub model: String,
    /// Its firmware.
    pub firmware: String,
    /// Bytes that one command may move; `None` if there is no limit.
    pub max_transfer: Option<u64>,
    /// The most namespaces.
    pub namespaces: u32,
    /// Whether it may lose written data until a flush.
    pub has_write_cache: bool,
    /// The most Abort commands at a time.
    pub aborts: u16,
    /// Whether it fills blocks with zeros (Write Zeroes).
    pub has_write_zeroes: bool,
    /// Whether it deallocates blocks (Dataset Management).
    pub has_deallocate: bool,
    /// Whether it reads doorbells from memory, as emulated controllers do (Doorbell Buffer Config).
    pub has_shadow_doorbells: bool,
    /// Microseconds that it may take to shut down (RTD3 Entry Latency); 0 if it does not say.
    pub shutdown_us: u32,
    /// The most entries of its error log.
    pub error_entries: u16,
    /// Bytes that one command fills with zeros; `None` if it names no limit.
    pub zeroes_bytes: Option<u64>,
    /// Ranges that one command deallocates; `None` if it names no limit.
    pub deallocate_ranges: Option<u8>,
    /// Blocks of such a range.
    pub deallocate_range_blocks: Option<u32>,
    /// Blocks of all ranges of a command.
    pub deallocate_blocks: Option<u64>,
}

/// What a controller says of a namespace: blocks numbered from 0.
///
/// ```
/// # use pagemill::{Allocator, Memory};
/// # use pagemill_nvme::{Dma, Drive, Fake, Settings};
/// # let dma = Dma::new(&Allocator::builder().memory(Memory::anonymous(4096)).build()?);
/// # let drive = Drive::on_fake(&dma, &Fake::new(1000), Settings::default())?;
/// assert_eq!(drive.namespace().bytes(), 1000 * 512);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NamespaceInfo {
    /// Its number.
    pub id: u32,
    /// The number of blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// Bytes of metadata with each block.
    pub metadata: u16,
    /// Whether the metadata protects the blocks.
    pub is_protected: bool,
    /// Blocks that are best deallocated together, from a multiple of that on; 0 if it does not say.
    pub deallocate_unit: u32,
    /// Blocks that are best written together; 0 if it does not say.
    pub write_unit: u32,
}

/// Fields of a page from a controller.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8; PAGE]);

impl Fields<'_> {
    pub(crate) fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.0[at], self.0[at + 1]])
    }
    pub(crate) fn u32(&self, at: usize) -> u32 {
        u32::from(self.u16(at)) | u32::from(self.u16(at + 2)) << 16
    }
    pub(crate) fn u64(&self, at: usize) -> u64 {
        u64::from(self.u32(at)) | u64::from(self.u32(at + 4)) << 32
    }
    /// Text, padded with spaces. Characters other than printable ASCII are replaced.
    fn text(&self, at: usize, len: usize) -> String {
        let shown = self.0[at..at + len].iter().map(|&byte| match byte {
            b' '..=b'~' => char::from(byte),
            0 => ' ',
            _ => '?',
        });
        shown.collect::<String>().trim().to_owned()
    }
}

/// A limit of 2^shift pages in bytes; `None` for 0, or if there is no number for it.
fn power_of_pages(shift: u8) -> Option<u64> {
    (PAGE as u64).checked_shl(shift.into()).filter(|bytes| shift > 0 && bytes >> shift == PAGE as u64)
}

impl ControllerInfo {
    /// Reads the page. Queue entries of unsupported sizes are an error, since no command could be sent.
    pub(crate) fn read(page: &[u8; PAGE]) -> Result<Self, Error> {
        let fields = Fields(page);
        let (command, completion) = (page[512], page[513]);
        if command & 0xf > 6 || completion & 0xf > 4 || command >> 4 < 6 || completion >> 4 < 4 {
            let why = format!("it takes queue entries of {command:#x} and {completion:#x}, not of 64 and 16 bytes");
            return Err(Error::Broken(why));
        }
        Ok(Self {
            vendor: fields.u16(0),
            serial: fields.text(4, 20),
            model: fields.text(24, 40),
            firmware: fields.text(64, 8),
            // In units of the smallest page, which is 4096 bytes on supported controllers.
            max_transfer: power_of_pages(page[77]),
            namespaces: fields.u32(516),
            has_write_cache: page[525] & 1 == 1,
            aborts: u16::from(page[258]) + 1,
            has_write_zeroes: page[520] >> 3 & 1 == 1,
            has_deallocate: page[520] >> 2 & 1 == 1,
            has_shadow_doorbells: page[257] & 1 == 1,
            shutdown_us: fields.u32(88),
            error_entries: u16::from(page[262]) + 1,
            zeroes_bytes: None,
            deallocate_ranges: None,
            deallocate_range_blocks: None,
            deallocate_blocks: None,
        })
    }

    /// Adds the limits for the NVM command set.
    pub(crate) fn read_limits(&mut self, page: &[u8; PAGE]) {
        let fields = Fields(page);
        // As with the largest transfer: a power of two, in units of the smallest page.
        self.zeroes_bytes = power_of_pages(page[1]);
        self.deallocate_ranges = Some(page[3]).filter(|&most| most > 0);
        self.deallocate_range_blocks = Some(fields.u32(4)).filter(|&most| most > 0);
        self.deallocate_blocks = Some(fields.u64(8)).filter(|&most| most > 0);
    }

    /// How long it may take to shut down. It has at least 5 s, and at most 5 minutes, whatever it says.
    pub(crate) fn shutdown_limit(&self) -> Duration {
        Duration::from_micros(self.shutdown_us.into()).clamp(LEAST_SHUTDOWN, MOST_SHUTDOWN)
    }
}

impl NamespaceInfo {
    /// Reads the page of namespace `id`; `None` if there is none with that number.
    pub(crate) fn read(id: u32, page: &[u8; PAGE]) -> Result<Option<Self>, Error> {
        let fields = Fields(page);
        let blocks = fields.u64(0);
        if blocks == 0 {
            return Ok(None);
        }
        let (formats, which) = (usize::from(page[25]) + 1, page[26]);
        let broken = |why| Err(Error::Broken(format!("namespace {id}: {why}")));
        // With more than 16 formats there are two more bits.
        let nth = usize::from(which & 0xf) | if formats > 16 { usize::from(which >> 5 & 3) << 4 } else { 0 };
        if nth >= formats || nth >= 64 {
            return broken(format!("it has format {nth} of {formats}"));
        }
        let format = fields.u32(128 + 4 * nth);
        let shift = format >> 16 & 0xff;
        if !(9..32).contains(&shift) {
            return broken(format!("blocks of 2^{shift} bytes"));
        }
        if shift > MOST_SHIFT {
            let (block, most) = (1u32 << shift, 1u32 << MOST_SHIFT);
            let why = format!("namespace {id}: blocks of {block} bytes are not driven here: {most} are the most");
            return Err(Error::Unsupported(why));
        }
        if blocks.checked_shl(shift).is_none_or(|bytes| bytes >> shift != blocks) {
            return broken(format!("{blocks} blocks of 2^{shift} bytes are more than there are numbers for"));
        }
        let (metadata, is_protected) = (format as u16, page[29] & 7 != 0);
        // The units are there if NSFEAT has bit 4; each is counted from 0.
        let unit = |at| if page[24] >> 4 & 1 == 1 { u32::from(fields.u16(at)) + 1 } else { 0 };
        let (deallocate_unit, write_unit) = (unit(68), unit(72));
        Ok(Some(Self { id, blocks, block_size: 1 << shift, metadata, is_protected, deallocate_unit, write_unit }))
    }

    /// Bytes of the namespace.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Checks that it has plain blocks without metadata, and that a command of this controller can move one.
    pub(crate) fn check_plain(&self, controller: &ControllerInfo) -> Result<(), Error> {
        let Self { id, metadata, block_size, .. } = self;
        if let Some(most) = controller.max_transfer
            && u64::from(*block_size) > most
        {
            let why = format!("a command of this controller moves up to {most}");
            return Err(Error::Unsupported(format!("namespace {id}: it has blocks of {block_size} bytes, and {why}")));
        }
        if *metadata == 0 && !self.is_protected {
            return Ok(());
        }
        let what = if self.is_protected { "protected by what goes with them" } else { "not alone" };
        Err(Error::Unsupported(format!("namespace {id}: its blocks are {what}: {metadata} bytes of metadata each")))
    }
}

/// Checks that a namespace has the NVM command set, by its list of descriptors: entries of a type, a length, two unused
/// bytes and that many bytes, up to a type or a length of 0. A list without a command set is fine.
pub(crate) fn check_command_set(id: u32, page: &[u8; PAGE]) -> Result<(), Error> {
    let mut rest = page.as_slice();
    let set = loop {
        let [kind, len, _, _, tail @ ..] = rest else { break 0 };
        match (*kind, tail.get(..usize::from(*len))) {
            (0, _) | (_, None | Some([])) => break 0,
            (COMMAND_SET, Some(value)) => break value[0],
            (_, Some(value)) => rest = &tail[value.len()..],
        }
    };
    let what = match set {
        0 => return Ok(()),
        1 => "holds keys and values".to_owned(),
        2 => "is zoned".to_owned(),
        _ => format!("is for command set {set}"),
    };
    Err(Error::Unsupported(format!(
        "namespace {id} {what}: only plain blocks, to be written in any order, are driven here"
    )))
}

/// The numbers of the active namespaces in a controller's list: ascending, up to the first 0.
pub(crate) fn active(page: &[u8; PAGE]) -> Vec<u32> {
    let fields = Fields(page);
    (0..PAGE / 4).map(|nth| fields.u32(4 * nth)).take_while(|&id| id != 0).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_identify_page_of_a_controller_is_read() {
        let mut page = [0; PAGE];
        page[..2].copy_from_slice(&0x1b36u16.to_le_bytes());
        page[4..24].copy_from_slice(b"pagemill            ");
        page[24..64].fill(b' ');
        page[24..34].copy_from_slice(b"a \x1b[31mmodel"[..10].try_into().unwrap());
        (page[77], page[258], page[512], page[513], page[525]) = (7, 3, 0x66, 0x44, 1);
        page[516..520].copy_from_slice(&256u32.to_le_bytes());
        let info = ControllerInfo::read(&page).unwrap();
        assert_eq!((info.vendor, info.serial.as_str(), info.model.as_str()), (0x1b36, "pagemill", "a ?[31mmod"));
        assert_eq!((info.max_transfer, info.namespaces, info.aborts), (Some(512 << 10), 256, 4));
        assert!(info.has_write_cache);
        page[77] = 255;
        assert_eq!(ControllerInfo::read(&page).unwrap().max_transfer, None, "more than there are numbers for");
        page[512] = 0x77;
        assert!(matches!(ControllerInfo::read(&page), Err(Error::Broken(_))), "commands of 128 bytes at least");
    }

    fn namespace(blocks: u64, formats: u8, which: u8, format: u32) -> [u8; PAGE] {
        let mut page = [0; PAGE];
        page[..8].copy_from_slice(&blocks.to_le_bytes());
        (page[25], page[26]) = (formats, which);
        page[128 + 4..128 + 8].copy_from_slice(&format.to_le_bytes());
        page
    }

    #[test]
    fn an_identify_page_of_a_namespace_is_read() {
        let read = |page| NamespaceInfo::read(1, &page);
        let info = read(namespace(131_072, 1, 1, 9 << 16)).unwrap().unwrap();
        assert_eq!((info.blocks, info.block_size, info.bytes()), (131_072, 512, 64 << 20));
        let mut page = [0; PAGE];
        (page[512], page[513]) = (0x66, 0x44);
        let controller = ControllerInfo::read(&page).unwrap();
        assert!(info.check_plain(&controller).is_ok());
        assert_eq!(read(namespace(0, 1, 1, 9 << 16)).unwrap(), None);
        let with_metadata = read(namespace(8, 1, 1, 12 << 16 | 8)).unwrap().unwrap();
        assert!(matches!(with_metadata.check_plain(&controller), Err(Error::Unsupported(_))));
        for (what, page) in [
            ("a format that is not listed", namespace(8, 0, 1, 9 << 16)),
            ("blocks of one byte", namespace(8, 1, 1, 0)),
            ("blocks of 2^200 bytes", namespace(8, 1, 1, 200 << 16)),
            ("more bytes than there are numbers for", namespace(u64::MAX, 1, 1, 9 << 16)),
        ] {
            assert!(matches!(read(page), Err(Error::Broken(_))), "{what}");
        }
    }

    #[test]
    fn the_command_set_is_found_in_the_list_of_identifiers() {
        let said = |list: &[u8]| {
            let mut page = [0; PAGE];
            page[..list.len()].copy_from_slice(list);
            check_command_set(7, &page).err().map(|error| error.to_string())
        };
        assert_eq!(said(&[]), None);
        assert_eq!(said(&[4, 1, 0, 0, 0]), None);
        // An identifier of 8 bytes (type 1) comes first.
        let zoned = said(&[1, 8, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9, 4, 1, 0, 0, 2]).unwrap();
        assert!(zoned.starts_with("namespace 7 is zoned: only plain blocks"), "{zoned}");
        assert!(said(&[4, 1, 0, 0, 1]).unwrap().starts_with("namespace 7 holds keys and values"));
        assert!(said(&[4, 1, 0, 0, 9]).unwrap().starts_with("namespace 7 is for command set 9"));
    }

    proptest! {
        /// Any page from a controller is read or refused.
        #[test]
        fn any_identify_page_is_read_or_refused(bytes in prop::collection::vec(any::<u8>(), PAGE)) {
            let page: &[u8; PAGE] = bytes.as_slice().try_into().unwrap();
            let _ = ControllerInfo::read(page);
            if let Ok(Some(info)) = NamespaceInfo::read(1, page) {
                prop_assert!(info.bytes() >= info.blocks && info.block_size >= 512);
            }
            let _ = check_command_set(1, page);
            prop_assert!(active(page).len() <= PAGE / 4);
        }
    }
}
