//! Memory for secrets: keys, passphrases, and the material that they are made from.
//!
//! Each [`Locked`] has pages of its own. The system is asked to keep them out of swap (`mlock`) and out of core dumps,
//! and they are zeroed before they are freed. Secrets do not share pages, because a lock covers whole pages and locks
//! do not nest: unlocking one secret would unlock its neighbour. If the system refuses a lock, the work goes on, and
//! the program can report it ([`lock_failure`]).
//!
//! Registers and the stack are not protected during a computation; what it leaves on the stack is overwritten
//! afterwards ([`scrub_stack`], [`scrub_blocks`]). The memory of argon2, which may be a gigabyte, is zeroed but not locked.
use std::alloc::{self, Layout};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::OnceLock;

use zeroize::Zeroize;

use crate::Error;

/// Alignment and granule of a lock.
const PAGE: usize = 4096;
/// More bytes of stack than any of the computations uses.
const SCRUBBED: usize = 64 << 10;
/// More than the cipher uses for sectors.
const SCRUBBED_BLOCKS: usize = 12 << 10;

/// The system's first refusal to lock memory.
static LOCK_FAILURE: OnceLock<i32> = OnceLock::new();

/// Why the system refused to keep a secret out of swap, if it did. The program reports this once.
///
/// ```
/// if let Some(why) = pagemill_crypt::secret::lock_failure() {
///     eprintln!("keys may reach the swap space: {why}");
/// }
/// ```
pub fn lock_failure() -> Option<io::Error> {
    LOCK_FAILURE.get().map(|&errno| io::Error::from_raw_os_error(errno))
}

/// Zeroed bytes on locked pages of their own, zeroed again when dropped. `Debug` shows the length alone.
///
/// ```
/// # use pagemill_crypt::secret::Locked;
/// let mut key = Locked::zeroed(64);
/// key[0] = 7;
/// assert_eq!(format!("{key:?}"), "Locked(64 bytes)");
/// ```
pub struct Locked {
    /// Points at pages of its own, even if `len` is 0.
    bytes: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its pages alone, as a `Vec<u8>` would.
unsafe impl Send for Locked {}
// SAFETY: a shared reference gives shared bytes and nothing else.
unsafe impl Sync for Locked {}

impl Locked {
    /// `len` zero bytes.
    ///
    /// # Panics
    /// If `len` exceeds the address space. Running out of memory aborts, as for a `Vec`.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout's size is at least one page.
        let Some(bytes) = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }) else {
            alloc::handle_alloc_error(layout)
        };
        // SAFETY: the range was just allocated; locking and advice change no byte of it.
        let locked = unsafe {
            libc::madvise(bytes.as_ptr().cast(), layout.size(), libc::MADV_DONTDUMP);
            libc::mlock(bytes.as_ptr().cast(), layout.size())
        };
        if locked != 0 {
            let why = io::Error::last_os_error();
            LOCK_FAILURE.get_or_init(|| {
                tracing::warn!(
                    name: "lock refused",
                    %why,
                    "keys may reach the swap space: the system refused to lock memory; raise its limit (LimitMEMLOCK, ulimit -l)"
                );
                why.raw_os_error().unwrap_or(0)
            });
        }
        Self { bytes, len }
    }

    /// A copy of `bytes`. The caller zeroes the original.
    #[must_use]
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut copy = Self::zeroed(bytes.len());
        copy.copy_from_slice(bytes);
        copy
    }

    /// `len` bytes from the system's random numbers.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has none.
    pub fn random(len: usize) -> Result<Self, Error> {
        let mut secret = Self::zeroed(len);
        random(&mut secret)?;
        Ok(secret)
    }

    fn layout(len: usize) -> Layout {
        let size = len.max(1).next_multiple_of(PAGE);
        Layout::from_size_align(size, PAGE).expect("a secret fits the address space")
    }
}

/// Overwrites the stack below its caller, where the functions that the caller called left copies of keys: a hash's
/// block, the cipher's round keys. Otherwise they would stay there until another call goes as deep, which may be never
/// in a server's first thread.
#[inline(never)]
pub(crate) fn scrub_stack() {
    let mut below = [0u8; SCRUBBED];
    // Volatile writes, which the compiler does not remove.
    below.zeroize();
    std::hint::black_box(&below);
}

/// The same after sectors were encrypted or decrypted, where the compiler may have kept a few of their blocks. It costs
/// a fraction of a microsecond, so it follows each piece of a request.
#[inline(never)]
pub(crate) fn scrub_blocks() {
    let mut below = [0u8; SCRUBBED_BLOCKS];
    // The array has to be there, and zero.
    std::hint::black_box(&mut below);
}

/// Fills `bytes` from the system's random numbers.
///
/// # Errors
/// [`Error::Io`] when the system has none.
pub fn random(bytes: &mut [u8]) -> Result<(), Error> {
    getrandom::fill(bytes)
        .map_err(|error| Error::io("the system's random numbers", io::Error::other(error.to_string())))
}

impl Deref for Locked {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes of our own, which the shared borrow keeps unchanged.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes of our own, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_ptr(), self.len) }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let layout = Self::layout(self.len);
        self.zeroize();
        // SAFETY: the pages of `zeroed`, with its layout, after which nobody uses them.
        unsafe {
            libc::munlock(self.bytes.as_ptr().cast(), layout.size());
            // The allocator may reuse the pages, so core dumps include them again.
            libc::madvise(self.bytes.as_ptr().cast(), layout.size(), libc::MADV_DODUMP);
            alloc::dealloc(self.bytes.as_ptr(), layout);
        }
    }
}

impl fmt::Debug for Locked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Locked({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The system's value of `name` for the mapping with `address`.
    fn mapping(address: usize, name: &str) -> Option<String> {
        let text = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let mut is_inside = false;
        for line in text.lines() {
            let range = line.split(' ').next()?.split_once('-');
            if let Some((start, end)) = range
                && let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
            {
                is_inside = (start..end).contains(&address);
            } else if is_inside && let Some(rest) = line.strip_prefix(name) {
                return Some(rest.trim().to_owned());
            }
        }
        None
    }

    #[test]
    fn dropping_a_secret_leaves_its_neighbour_locked() {
        let (a, b) = (Locked::copy_of(b"one"), Locked::copy_of(&[7; 5000]));
        if let Some(why) = lock_failure() {
            return eprintln!("skipped: memory cannot be locked here: {why}");
        }
        drop(a);
        let locked = mapping(b.as_ptr() as usize, "Locked:").expect("/proc/self/smaps has the mapping");
        let kb: u64 = locked.strip_suffix(" kB").unwrap().parse().unwrap();
        assert!(kb >= 8, "{locked}");
        assert_eq!(&b[..], &[7; 5000]);
    }

    #[test]
    fn a_secret_stays_out_of_core_dumps() {
        let secret = Locked::copy_of(b"attack at dawn");
        let flags = mapping(secret.as_ptr() as usize, "VmFlags:").expect("/proc/self/smaps has the mapping");
        assert!(flags.split(' ').any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn a_secret_is_zeroed_before_its_pages_go_back() {
        use std::os::unix::fs::FileExt;
        let secret = Locked::copy_of(&b"attack at dawn; ".repeat(256));
        assert!(!format!("{secret:?}").contains("attack"));
        let address = secret.as_ptr() as u64;
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let mut there = vec![0; secret.len()];
        memory.read_exact_at(&mut there, address).unwrap();
        assert_eq!(there, secret[..]);
        drop(secret);
        // The heap may have unmapped the page or reused it; the secret is in neither.
        there.fill(0);
        let _ = memory.read_exact_at(&mut there, address);
        assert!(!there.windows(8).any(|bytes| bytes == b"at dawn;"));
        assert_eq!(Locked::zeroed(0).len(), 0);
    }
}
