//! What a controller says of a command that it has done, in words.
use std::fmt;

/// The status of a completion: the field's 15 bits, without the phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status(pub u16);

/// What is known of a status: its type, its code, in words, what to do.
type Row = (u8, u8, &'static str, &'static str);

const CHECK_NUMBERS: &str = "check --lba and the length against `pagemill nvme identify`";
const CHECK_NAMESPACE: &str = "check --namespace against `pagemill nvme identify`";
const OURS: &str = "this is a fault of Pagemill's: please report it";
const AGAIN: &str = "try again; if it stays so, the drive has a fault";
const BACKUP: &str = "what is there is lost: copy the rest and replace the drive";

/// Those that a program of this kind can meet.
const KNOWN: &[Row] = &[
    (0, 0x00, "done", ""),
    (0, 0x01, "the controller does not know this operation", "the drive lacks what was asked for"),
    (0, 0x02, "a field of the command is invalid", OURS),
    (0, 0x03, "the command's number is in use", OURS),
    (0, 0x04, "the data did not come across the bus", AGAIN),
    (0, 0x05, "given up for want of power", AGAIN),
    (0, 0x06, "internal error of the controller", AGAIN),
    (0, 0x07, "aborted, as was asked", "give it more time with --timeout"),
    (0, 0x08, "aborted: its queue was deleted", AGAIN),
    (0, 0x0b, "invalid namespace or format", CHECK_NAMESPACE),
    (0, 0x0c, "commands in the wrong order", OURS),
    (0, 0x13, "an address in the list of pages has an invalid offset", OURS),
    (0, 0x20, "the namespace is write-protected", "lift its protection (nvme set-feature -f 0x84)"),
    (0, 0x21, "interrupted, to be tried again", AGAIN),
    (0, 0x22, "a passing error of the transport", AGAIN),
    (0, 0x80, "LBA out of range", CHECK_NUMBERS),
    (0, 0x81, "the namespace's capacity is exceeded", "free some of it"),
    (0, 0x82, "the namespace is not ready", AGAIN),
    (0, 0x83, "reserved by another host", "ask that host to give it up"),
    (0, 0x84, "the namespace is being formatted", "wait until it is"),
    (1, 0x00, "there is no such completion queue", OURS),
    (1, 0x01, "invalid number of a queue", OURS),
    (1, 0x02, "invalid length of a queue", OURS),
    (1, 0x03, "too many aborts at once", AGAIN),
    (1, 0x08, "invalid interrupt vector", "try --poll"),
    (1, 0x09, "there is no such log", "the drive lacks what was asked for"),
    (1, 0x0c, "a queue that others use cannot be deleted", OURS),
    (1, 0x80, "attributes that conflict", OURS),
    (1, 0x81, "invalid protection information", "namespaces with protection information are not supported"),
    (1, 0x82, "a write to a range that is read-only", "write elsewhere"),
    (2, 0x80, "write fault: the medium refused the data", BACKUP),
    (2, 0x81, "unrecovered read error: the medium has lost the data", BACKUP),
    (2, 0x82, "the guard of the data is wrong", BACKUP),
    (2, 0x83, "the application tag of the data is wrong", BACKUP),
    (2, 0x84, "the reference tag of the data is wrong", BACKUP),
    (2, 0x85, "what was compared differs", "write it again"),
    (2, 0x86, "access denied", "unlock the drive (sedutil, or its maker's program)"),
    (2, 0x87, "the block was deallocated, or never written", "write it first"),
];

impl Status {
    /// What a controller says when it did what it was asked.
    pub const OK: Self = Self(0);

    /// The code.
    #[must_use]
    pub fn code(self) -> u8 {
        self.0 as u8
    }
    /// The code's type: generic, of this command, of the medium, of the path.
    #[must_use]
    pub fn kind(self) -> u8 {
        (self.0 >> 8 & 7) as u8
    }
    /// Whether it was done.
    #[must_use]
    pub fn is_ok(self) -> bool {
        self.0 & 0x7ff == 0
    }
    /// Whether the same command may do better. Some controllers forget to say Do Not Retry where it is no use: only what
    /// passes by itself is worth it.
    #[must_use]
    pub fn may_pass(self) -> bool {
        let passes = matches!((self.kind(), self.code()), (0, 0x04 | 0x06 | 0x07 | 0x08 | 0x21 | 0x22 | 0x82) | (3, _));
        passes && self.0 >> 14 & 1 == 0
    }
    /// What to do about it.
    #[must_use]
    pub fn next_step(self) -> Option<&'static str> {
        self.known().map(|row| row.3).filter(|next| !next.is_empty())
    }

    fn known(self) -> Option<&'static Row> {
        KNOWN.iter().find(|row| (row.0, row.1) == (self.kind(), self.code()))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = self.known().map(|row| row.2);
        let what = what.unwrap_or(match self.kind() {
            0 => "an error that has no name here",
            1 => "an error of this kind of command that has no name here",
            2 => "an error of the medium that has no name here",
            3 => "an error of the path to the drive",
            _ => "an error of the maker's own",
        });
        write!(f, "{what} (status {}/{:02x}h)", self.kind(), self.code())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_shown_in_words_with_its_numbers() {
        assert_eq!(Status(0x80).to_string(), "LBA out of range (status 0/80h)");
        assert_eq!(Status(0x4000 | 0x0b).to_string(), "invalid namespace or format (status 0/0bh)");
        assert_eq!(Status(0x281).to_string(), "unrecovered read error: the medium has lost the data (status 2/81h)");
        assert_eq!(Status(0x7c5).to_string(), "an error of the maker's own (status 7/c5h)");
        assert!(Status(0x4080).next_step().is_some_and(|next| next.contains("--lba")));
        assert_eq!(Status::OK.next_step(), None);
    }

    #[test]
    fn transient_statuses_may_be_retried_unless_the_controller_forbids_it() {
        assert!(Status(0x06).may_pass() && Status(0x07).may_pass() && Status(0x302).may_pass());
        assert!(!Status(0x4006).may_pass(), "do not retry");
        assert!(!Status(0x80).may_pass() && !Status(0x281).may_pass() && !Status::OK.may_pass());
    }

    #[test]
    fn every_possible_status_has_words() {
        for bits in 0..1 << 15 {
            let status = Status(bits);
            assert!(status.to_string().len() > 10, "{bits:#x}");
            assert_eq!(status.is_ok(), (status.kind(), status.code()) == (0, 0), "{bits:#x}");
        }
    }

    #[test]
    fn no_status_is_listed_twice() {
        for (at, row) in KNOWN.iter().enumerate() {
            assert!(KNOWN[at + 1..].iter().all(|other| (other.0, other.1) != (row.0, row.1)), "{row:?}");
        }
    }
}
