//! AES-XTS over the sectors of a request, from one buffer to another or in place (IEEE 1619, `aes-xts-plain64`).
//!
//! The tweak of a sector is its number, 64 bits, little-endian. Sector sizes are multiples of 512 bytes, so ciphertext
//! stealing never happens. [`Xts::new`] chooses the fastest [`Backend`] that the processor has; all give the same
//! bytes, which the tests hold against the standard's vectors and each other.
//!
//! Invariant I1: the expanded keys lie in [`Locked`] memory, but for those of the portable backend, which are zeroed
//! and not locked.
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

use crate::Error;
use crate::secret::{Locked, scrub_stack};

/// Bytes a sector: 512, 1024, 2048 or 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SectorSize(u16);

impl SectorSize {
    /// 512 bytes: the unit of the formats.
    pub const SMALLEST: Self = Self(512);
    /// 4096 bytes: a page.
    pub const LARGEST: Self = Self(4096);

    /// `bytes` as a sector size, if the formats have it.
    ///
    /// ```
    /// # use pagemill_crypt::SectorSize;
    /// assert!(SectorSize::new(4096).is_some());
    /// assert!(SectorSize::new(768).is_none());
    /// ```
    #[must_use]
    pub fn new(bytes: u64) -> Option<Self> {
        matches!(bytes, 512 | 1024 | 2048 | 4096).then_some(Self(bytes as u16))
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(self) -> usize {
        usize::from(self.0)
    }
}

/// The sectors in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sectors {
    /// Bytes a sector.
    pub size: SectorSize,
    /// The first one's tweak.
    pub first: u64,
    /// From one tweak to the next: 1 where tweaks count sectors, `size / 512` where they count 512-byte units.
    pub step: u64,
}

/// The implementation that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Four blocks an instruction, with AVX-512 and VAES.
    Vaes512,
    /// Two blocks an instruction, with AVX2 and VAES.
    Vaes256,
    /// One block an instruction, with AES-NI.
    AesNi,
    /// The crate `aes`, on any processor.
    Portable,
}

impl Backend {
    /// All, the fastest first.
    pub const ALL: [Self; 4] = [Self::Vaes512, Self::Vaes256, Self::AesNi, Self::Portable];

    /// Whether this processor has the instructions for it.
    #[must_use]
    pub fn is_here(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Vaes512 => x86::has_vaes_512(),
            #[cfg(target_arch = "x86_64")]
            Self::Vaes256 => x86::has_vaes_256(),
            #[cfg(target_arch = "x86_64")]
            Self::AesNi => x86::has_aes_ni(),
            Self::Portable => true,
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

/// A key, ready for use. It can be shared between threads, and is zeroed when dropped.
///
/// ```
/// use pagemill_crypt::{SectorSize, Sectors, Xts};
/// let xts = Xts::new(&[7; 64])?;
/// let sectors = Sectors { size: SectorSize::SMALLEST, first: 40, step: 1 };
/// let plain = vec![0; 1024]; // Sectors 40 and 41.
/// let mut secret = vec![0; 1024];
/// xts.encrypt(sectors, &plain, &mut secret)?;
/// assert_ne!(secret[..512], secret[512..]);
/// xts.decrypt_in_place(sectors, &mut secret)?;
/// assert_eq!(secret, plain);
/// # Ok::<(), pagemill_crypt::Error>(())
/// ```
pub struct Xts {
    backend: Backend,
    keys: Keys,
}

enum Keys {
    /// Memory that holds an [`x86::Schedule`], and the backend's functions for keys of this length.
    #[cfg(target_arch = "x86_64")]
    X86(Locked, [x86::Kernel; 2]),
    Portable(Box<portable::Schedule>),
}

impl Xts {
    /// From a key of 32 bytes (AES-128) or 64 (AES-256), with the fastest backend here.
    ///
    /// # Errors
    /// [`Error::Request`] for any other length.
    pub fn new(key: &[u8]) -> Result<Self, Error> {
        let backend = Backend::ALL.into_iter().find(|backend| backend.is_here()).unwrap_or(Backend::Portable);
        Self::with_backend(key, backend)
    }

    /// The same with a backend of the caller's choice, to compare them.
    ///
    /// # Errors
    /// [`Error::Request`] for any other length, and for a backend that is not [here](Backend::is_here).
    pub fn with_backend(key: &[u8], backend: Backend) -> Result<Self, Error> {
        if !matches!(key.len(), 32 | 64) {
            let why = format!("a key of {} bits: aes-xts takes 256 (AES-128) or 512 (AES-256)", 8 * key.len());
            return Err(Error::Request(why));
        }
        if !backend.is_here() {
            return Err(Error::Request(format!("this processor cannot run the cipher's backend {backend:?}")));
        }
        let keys = match backend {
            #[cfg(target_arch = "x86_64")]
            Backend::Vaes512 => x86_keys(key, x86::VAES_512),
            #[cfg(target_arch = "x86_64")]
            Backend::Vaes256 => x86_keys(key, x86::VAES_256),
            #[cfg(target_arch = "x86_64")]
            Backend::AesNi => x86_keys(key, x86::AES_NI),
            _ => Keys::Portable(Box::new(portable::Schedule::new(key))),
        };
        scrub_stack();
        Ok(Self { backend, keys })
    }

    /// The implementation that is used.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Encrypts `plain` into `secret`.
    ///
    /// # Errors
    /// [`Error::Request`] unless both have the same number of whole sectors.
    pub fn encrypt(&self, sectors: Sectors, plain: &[u8], secret: &mut [u8]) -> Result<(), Error> {
        self.run(sectors, plain, secret, false)
    }

    /// Decrypts `secret` into `plain`.
    ///
    /// # Errors
    /// As for [`Xts::encrypt`].
    pub fn decrypt(&self, sectors: Sectors, secret: &[u8], plain: &mut [u8]) -> Result<(), Error> {
        self.run(sectors, secret, plain, true)
    }

    /// Encrypts `data` in place.
    ///
    /// # Errors
    /// [`Error::Request`] unless it has a whole number of sectors.
    pub fn encrypt_in_place(&self, sectors: Sectors, data: &mut [u8]) -> Result<(), Error> {
        self.run_in_place(sectors, data, false)
    }

    /// Decrypts `data` in place.
    ///
    /// # Errors
    /// As for [`Xts::encrypt_in_place`].
    pub fn decrypt_in_place(&self, sectors: Sectors, data: &mut [u8]) -> Result<(), Error> {
        self.run_in_place(sectors, data, true)
    }

    fn run(&self, sectors: Sectors, from: &[u8], to: &mut [u8], decrypt: bool) -> Result<(), Error> {
        if from.len() != to.len() {
            return Err(Error::Request(format!("{} bytes into {}: the lengths differ", from.len(), to.len())));
        }
        let count = count(sectors, from.len())?;
        match &self.keys {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: both slices have `count` whole sectors, and borrows that exclude each other lie apart.
            Keys::X86(memory, kernels) => unsafe {
                kernels[usize::from(decrypt)](schedule(memory), sectors, count, from.as_ptr(), to.as_mut_ptr());
            },
            Keys::Portable(schedule) => {
                to.copy_from_slice(from);
                schedule.run(sectors, to, decrypt);
            }
        }
        let _ = count; // Unused where there are no kernels.
        Ok(())
    }

    fn run_in_place(&self, sectors: Sectors, data: &mut [u8], decrypt: bool) -> Result<(), Error> {
        let count = count(sectors, data.len())?;
        match &self.keys {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the slice has `count` whole sectors, and is both input and output, as a kernel allows.
            Keys::X86(memory, kernels) => unsafe {
                let data = data.as_mut_ptr();
                kernels[usize::from(decrypt)](schedule(memory), sectors, count, data, data);
            },
            Keys::Portable(schedule) => schedule.run(sectors, data, decrypt),
        }
        let _ = count; // Unused where there are no kernels.
        Ok(())
    }
}

impl fmt::Debug for Xts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Xts").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// Expands a key of 32 or 64 bytes. The processor has the instructions that `kernels` need.
#[cfg(target_arch = "x86_64")]
fn x86_keys(key: &[u8], kernels: [[x86::Kernel; 2]; 2]) -> Keys {
    let mut memory = Locked::zeroed(size_of::<x86::Schedule>());
    // SAFETY: `Locked` begins on a page and has the size; every byte pattern is a schedule; the processor has AES
    // instructions, as all kernels need.
    unsafe { (*memory.as_mut_ptr().cast::<x86::Schedule>()).expand(key) };
    Keys::X86(memory, kernels[usize::from(key.len() == 64)])
}

#[cfg(target_arch = "x86_64")]
fn schedule(memory: &Locked) -> &x86::Schedule {
    // SAFETY: `x86_keys` made this memory for a schedule, which any bytes are; it is borrowed as long.
    unsafe { &*memory.as_ptr().cast() }
}

fn count(sectors: Sectors, bytes: usize) -> Result<usize, Error> {
    let size = sectors.size.bytes();
    if !bytes.is_multiple_of(size) {
        return Err(Error::Request(format!("{bytes} bytes are no whole number of {size}-byte sectors")));
    }
    Ok(bytes / size)
}
