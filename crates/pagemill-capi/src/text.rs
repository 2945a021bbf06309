//! Texts for C: copied into the caller's buffer, as `snprintf` does.
use crate::error::{Error, pagemill_strerror};
use core::ffi::{CStr, c_char, c_int};

/// Copies as much of `text` as fits into `size` bytes with a 0 at the end, and returns its whole length.
///
/// # Safety
/// Null, or so many bytes.
pub(crate) unsafe fn copy(text: &str, to: *mut c_char, size: usize) -> usize {
    if !to.is_null() && size > 0 {
        let n = text.len().min(size - 1);
        // SAFETY: the caller says that there are more than n bytes.
        unsafe {
            core::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), n);
            to.add(n).write(0);
        }
    }
    text.len()
}

/// A text of C's.
///
/// # Safety
/// Null, or a text with a 0 at its end.
pub(crate) unsafe fn read<'a>(text: *const c_char) -> Result<&'a CStr, Error> {
    // SAFETY: the caller says so.
    if text.is_null() { Err(Error::Argument) } else { Ok(unsafe { CStr::from_ptr(text) }) }
}

/// The sentence of an error.
pub(crate) fn sentence(error: Error) -> &'static str {
    // SAFETY: `pagemill_strerror` returns a text that lives for ever, with a 0 at its end.
    unsafe { CStr::from_ptr(pagemill_strerror(error as c_int)) }.to_str().unwrap_or_default()
}
