//! Structures that begin with their size, so that a later version can add fields (C programs that were compiled before keep
//! working, and programs that were compiled after are refused only if they use what this version does not know).
use crate::error::Error;
use core::slice;

/// A structure whose first field is its size in bytes.
///
/// # Safety
/// Any bytes are a value of it, and its first field is a `usize`.
pub(crate) unsafe trait BeginsWithSize: Copy {}

/// Reads a structure of the caller's version.
///
/// # Safety
/// Null, or a structure of the size that its first field says.
#[inline]
pub(crate) unsafe fn read<'a, T: BeginsWithSize>(from: *const T) -> Result<&'a T, Error> {
    if from.is_null() {
        return Err(Error::Argument);
    }
    // SAFETY: it begins with its size.
    let size = unsafe { from.cast::<usize>().read() };
    if size == size_of::<T>() {
        // SAFETY: it has the size of this version's, and any bytes are a value.
        return Ok(unsafe { &*from });
    }
    // SAFETY: the caller says so.
    unsafe { read_larger(from, size) }
}

/// A structure of a later version, whose further fields must be 0. This is the first version, so none is smaller.
#[cold]
unsafe fn read_larger<'a, T: BeginsWithSize>(from: *const T, size: usize) -> Result<&'a T, Error> {
    /// Four kilobytes of options: this is no size.
    const SIZE_MAX: usize = 4096;
    if !(size_of::<T>()..=SIZE_MAX).contains(&size) {
        return Err(Error::Argument);
    }
    // SAFETY: the caller says that the structure has this size.
    let more = unsafe { slice::from_raw_parts(from.cast::<u8>(), size) };
    if more[size_of::<T>()..].iter().any(|&byte| byte != 0) {
        return Err(Error::Argument);
    }
    // SAFETY: it is larger than this version's, and any bytes are a value.
    Ok(unsafe { &*from })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct Options {
        size: usize,
        value: u64,
    }
    // SAFETY: two integers, the size first.
    unsafe impl BeginsWithSize for Options {}

    #[test]
    fn later_fields_are_refused_unless_they_are_0_and_other_sizes_always() {
        let value = |words: [u64; 4]| {
            // SAFETY: the sizes below are at most that of the array, or refused before they are used.
            unsafe { read(words.as_ptr().cast::<Options>()) }.map(|options| options.value)
        };
        assert_eq!(value([16, 7, 9, 9]), Ok(7));
        assert_eq!(value([24, 7, 0, 9]), Ok(7));
        assert_eq!(value([32, 7, 0, 9]), Err(Error::Argument));
        assert_eq!([0, 8, 15, 4097, u64::MAX].map(|size| value([size, 7, 0, 0])), [Err(Error::Argument); 5]);
        // SAFETY: null.
        assert_eq!(unsafe { read(core::ptr::null::<Options>()) }, Err(Error::Argument));
    }
}
