//! The numbers of the NVM Express base specification (revision 1.4, sections 3 to 5; command sets by revision 2.0) that are used here.
//!
//! Registers, by their offset in the controller's first memory range; the fields of the two that are taken apart; operation
//! codes; and what a command looks like.

/// Capabilities: 64 bits.
pub(crate) const CAP: usize = 0x00;
/// The controller's version.
pub(crate) const VS: usize = 0x08;
/// Configuration.
pub(crate) const CC: usize = 0x14;
/// Status.
pub(crate) const CSTS: usize = 0x1c;
/// The lengths of the admin queues.
pub(crate) const AQA: usize = 0x24;
/// The address of the admin submission queue: 64 bits.
pub(crate) const ASQ: usize = 0x28;
/// The address of the admin completion queue: 64 bits.
pub(crate) const ACQ: usize = 0x30;
/// The first doorbell.
pub(crate) const DOORBELLS: usize = 0x1000;

/// CC: enabled.
pub(crate) const CC_EN: u32 = 1;
/// CC: submission entries of 2^6 bytes, completion entries of 2^4, pages of 2^(12+0), the NVM command set.
pub(crate) const CC_SHAPE: u32 = 6 << 16 | 4 << 20;
/// CC: a normal shutdown.
pub(crate) const CC_SHN_NORMAL: u32 = 1 << 14;
/// CSTS: ready.
pub(crate) const CSTS_RDY: u32 = 1;
/// CSTS: a fatal error; only a reset helps.
pub(crate) const CSTS_CFS: u32 = 1 << 1;
/// CSTS: the state of a shutdown.
pub(crate) const CSTS_SHST: u32 = 3 << 2;
/// CSTS: the shutdown is done.
pub(crate) const CSTS_SHST_DONE: u32 = 2 << 2;

/// Bytes of the controller's pages, as configured.
pub(crate) const PAGE: usize = 4096;
const _: () = assert!(PAGE == pagemill::PAGE_SIZE);

/// Bytes of an entry of a submission queue.
pub(crate) const COMMAND_BYTES: usize = 64;
/// Bytes of an entry of a completion queue.
pub(crate) const COMPLETION_BYTES: usize = 16;

/// The fields of CAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities(pub(crate) u64);

impl Capabilities {
    /// Entries of the longest queue.
    pub(crate) fn longest_queue(self) -> usize {
        (self.0 & 0xffff) as usize + 1
    }
    /// Milliseconds within which CSTS.RDY follows CC.EN; at least one second is given.
    pub(crate) fn ready_ms(self) -> u64 {
        ((self.0 >> 24 & 0xff) * 500).max(1000)
    }
    /// Bytes from one doorbell to the next.
    pub(crate) fn stride(self) -> usize {
        4 << (self.0 >> 32 & 0xf)
    }
    /// Whether it speaks the NVM command set.
    pub(crate) fn has_nvm(self) -> bool {
        self.0 >> 37 & 1 == 1
    }
    /// Whether its namespaces name their command sets; otherwise all have the NVM command set.
    pub(crate) fn has_command_sets(self) -> bool {
        self.0 >> 43 & 1 == 1
    }
    /// The shift of the smallest page that it takes.
    pub(crate) fn smallest_page(self) -> u32 {
        12 + (self.0 >> 48 & 0xf) as u32
    }
}

/// Operations of the admin queue.
pub(crate) mod admin {
    pub(crate) const DELETE_SQ: u8 = 0x00;
    pub(crate) const CREATE_SQ: u8 = 0x01;
    pub(crate) const GET_LOG: u8 = 0x02;
    pub(crate) const DELETE_CQ: u8 = 0x04;
    pub(crate) const CREATE_CQ: u8 = 0x05;
    pub(crate) const IDENTIFY: u8 = 0x06;
    pub(crate) const ABORT: u8 = 0x08;
    pub(crate) const SET_FEATURES: u8 = 0x09;
    pub(crate) const DOORBELL_BUFFER: u8 = 0x7c;
    /// Identify: a namespace.
    pub(crate) const CNS_NAMESPACE: u32 = 0;
    /// Identify: the controller.
    pub(crate) const CNS_CONTROLLER: u32 = 1;
    /// Identify: the active namespaces.
    pub(crate) const CNS_NAMESPACES: u32 = 2;
    /// Identify: the list of a namespace's descriptors.
    pub(crate) const CNS_DESCRIPTORS: u32 = 3;
    /// Identify: the controller's limits for the NVM command set.
    pub(crate) const CNS_LIMITS: u32 = 6;
    /// Log: the latest errors.
    pub(crate) const LOG_ERRORS: u32 = 1;
    /// Log: its health.
    pub(crate) const LOG_HEALTH: u32 = 2;
    /// The feature "number of queues".
    pub(crate) const QUEUES: u32 = 0x07;
}

/// Operations of the other queues.
pub(crate) mod io {
    pub(crate) const FLUSH: u8 = 0x00;
    pub(crate) const WRITE: u8 = 0x01;
    pub(crate) const READ: u8 = 0x02;
    pub(crate) const WRITE_ZEROES: u8 = 0x08;
    pub(crate) const DATASET_MANAGEMENT: u8 = 0x09;
}

/// Double word 12: the data is on the medium before the command comes back (Force Unit Access).
pub(crate) const FUA: u32 = 1 << 30;

/// An entry of a submission queue. Its identifier is set when it is queued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Command(pub(crate) [u32; 16]);

impl Command {
    pub(crate) fn new(opcode: u8, nsid: u32) -> Self {
        let mut words = [0; 16];
        words[0] = u32::from(opcode);
        words[1] = nsid;
        Self(words)
    }
    /// With its two PRP entries.
    pub(crate) fn data(mut self, first: u64, second: u64) -> Self {
        self.put64(6, first);
        self.put64(8, second);
        self
    }
    /// With double word `at`, from 10 to 15, which each operation defines.
    pub(crate) fn word(mut self, at: usize, value: u32) -> Self {
        self.0[at] = value;
        self
    }
    /// With more bits in a double word.
    pub(crate) fn or(mut self, at: usize, bits: u32) -> Self {
        self.0[at] |= bits;
        self
    }
    /// With the place of a read or write: `blocks` blocks, at least one, from `lba`.
    pub(crate) fn place(mut self, lba: u64, blocks: u32) -> Self {
        self.put64(10, lba);
        // Counted from 0, in 16 bits; the caller stays within `request::MOST_BLOCKS`.
        self.0[12] = (blocks - 1) & 0xffff;
        self
    }
    /// With its identifier.
    pub(crate) fn with_id(mut self, id: u16) -> Self {
        self.0[0] = self.0[0] & 0xffff | u32::from(id) << 16;
        self
    }

    fn put64(&mut self, at: usize, value: u64) {
        self.0[at] = value as u32;
        self.0[at + 1] = (value >> 32) as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_has_its_fields_where_the_specification_has_them() {
        let read = Command::new(io::READ, 7).data(0x1_0000_2000, 0x2_0000_3000).place(0x5_0000_0006, 8).with_id(0xabcd);
        assert_eq!(read.0[..2], [0xabcd_0002, 7]);
        assert_eq!(read.0[6..10], [0x2000, 1, 0x3000, 2]);
        assert_eq!(read.0[10..13], [6, 5, 7]);
    }

    #[test]
    fn capabilities_are_read_from_their_bits() {
        // 2048 entries, contiguous, 7.5 s, a stride of 8, the NVM command set, pages from 4 KiB.
        let cap = Capabilities(2047 | 1 << 16 | 15 << 24 | 1 << 32 | 1 << 37);
        assert_eq!((cap.longest_queue(), cap.ready_ms(), cap.stride()), (2048, 7500, 8));
        assert!(cap.has_nvm() && !cap.has_command_sets());
        assert!(Capabilities(1 << 43).has_command_sets());
        assert_eq!(cap.smallest_page(), 12);
        assert_eq!(Capabilities(3 << 48).smallest_page(), 15);
    }
}
