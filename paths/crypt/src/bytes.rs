//! Reading and writing fields of a header at fixed places, big-endian.
//!
//! Places are constants within the header's fixed size; callers hold headers in arrays. A field's *value* is checked
//! where it is used.

/// Fields out of a fixed array.
pub(crate) trait Fields {
    fn field<const N: usize>(&self, at: usize) -> [u8; N];

    fn u16_at(&self, at: usize) -> u16 {
        u16::from_be_bytes(self.field(at))
    }

    fn u32_at(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.field(at))
    }

    fn u64_at(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.field(at))
    }

    /// The text in a field of `N` bytes.
    fn text<const N: usize>(&self, at: usize) -> String {
        shown(&self.field::<N>(at))
    }
}

impl<const LEN: usize> Fields for [u8; LEN] {
    fn field<const N: usize>(&self, at: usize) -> [u8; N] {
        *self[at..].first_chunk().expect("a field lies within its header")
    }
}

/// The text in a field, up to its first zero byte, to be shown. Bytes that are not UTF-8 are replaced, so a header is
/// written with the field itself.
pub(crate) fn shown(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

/// A field with a text that fits it.
pub(crate) fn filled<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [0; N];
    put(&mut field, 0, text.as_bytes());
    field
}

/// Writes `bytes` at `at`.
pub(crate) fn put(header: &mut [u8], at: usize, bytes: &[u8]) {
    header[at..at + bytes.len()].copy_from_slice(bytes);
}
