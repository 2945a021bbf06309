//! What the subcommands of `pagemill` have in common.
use std::io;

/// A number of bytes: plain, or with K, M, G or T behind it, which are powers of 1024.
///
/// # Errors
/// What is wrong, for the command line: it is no such number, or more than a file's length can be.
pub fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        Some(b'T' | b't') => (&text[..text.len() - 1], 40),
        _ => (text, 0),
    };
    let is_number = digits.bytes().all(|digit| digit.is_ascii_digit());
    let number = if is_number { digits.parse::<u64>().ok() } else { None };
    let number = number.ok_or_else(|| "a number, with K, M, G or T behind it if you like".to_owned())?;
    // A file's length is a signed number.
    let bytes = number.checked_mul(1 << shift).filter(|&bytes| i64::try_from(bytes).is_ok());
    bytes.ok_or_else(|| "larger than any file, drive or memory".to_owned())
}

/// What the system said, without the number that Rust adds.
#[must_use]
pub fn said(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes_and_an_end() {
        assert_eq!(["0", "512", "4k", "3G"].map(size), [Ok(0), Ok(512), Ok(4096), Ok(3 << 30)]);
        assert_eq!(size("9223372036854775807"), Ok(i64::MAX as u64));
        for wrong in ["", "G", "-1", "+64M", "1.5G", "1GB", "\u{e9}", "9223372036854775808", "8388608T", "9999999999T"]
        {
            assert!(size(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn what_the_system_said_has_no_number() {
        assert_eq!(said(&io::Error::from_raw_os_error(2)), "No such file or directory");
        assert_eq!(said(&io::Error::other("odd")), "odd");
    }
}
