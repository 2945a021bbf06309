//! Deriving a key from a passphrase: argon2id, argon2i (RFC 9106) and PBKDF2, and the limits on its cost.
//!
//! A header says what opening it costs, and a hostile header may ask for terabytes or years. [`Limits`] are checked
//! before anything is spent (I1).
use std::time::{Duration, Instant};

use argon2::{Algorithm, Argon2, Block, Params, Version};
use clap::ValueEnum;
use zeroize::Zeroize;

use crate::Error;
use crate::hash::Hash;
use crate::secret::random;

/// Bytes of new salts.
pub(crate) const SALT: usize = 32;
/// The fewest passes of argon2 in new keyslots.
const MIN_TIME: u32 = 4;
/// The fewest iterations of PBKDF2 that the LUKS formats allow.
pub(crate) const MIN_ITERATIONS: u32 = 1000;
/// Memory below which argon2 is not calibrated, in KiB.
const MIN_MEMORY_KIB: u32 = 32 << 10;
/// The most memory that argon2 is calibrated to, in KiB, as in `cryptsetup`.
const MAX_MEMORY_KIB: u32 = 1 << 20;
/// The most threads that argon2 is calibrated for.
const MAX_LANES: u32 = 4;

/// Limits on the cost of deriving one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Memory, in KiB.
    pub memory_kib: u64,
    /// PBKDF2: iterations times digests. Argon2: passes times KiB. Both are about a microsecond each, or less.
    pub work: u64,
}

impl Limits {
    /// No limits, for parameters that this program has chosen itself.
    pub(crate) const NONE: Self = Self { memory_kib: u64::MAX, work: u64::MAX };
}

impl Default for Limits {
    /// 4 GiB, the most that `cryptsetup` uses; 2^28 units of work, a few minutes.
    fn default() -> Self {
        Self { memory_kib: 4 << 20, work: 1 << 28 }
    }
}

/// A function that derives a key from a passphrase, with its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kdf {
    /// PBKDF2 with HMAC.
    Pbkdf2 {
        /// The hash under HMAC.
        hash: Hash,
        /// The number of iterations.
        iterations: u32,
        /// The salt.
        salt: Vec<u8>,
    },
    /// Argon2, version 0x13.
    Argon2 {
        /// Argon2id rather than argon2i.
        is_id: bool,
        /// Passes over the memory.
        time: u32,
        /// The memory, in KiB.
        memory_kib: u32,
        /// Lanes, which can be computed in parallel.
        lanes: u32,
        /// The salt.
        salt: Vec<u8>,
    },
}

impl Kdf {
    /// Fills `key` from `passphrase`.
    ///
    /// # Errors
    /// [`Error::TooExpensive`] beyond `limits`, [`Error::Header`] for invalid parameters.
    pub fn derive(&self, passphrase: &[u8], key: &mut [u8], limits: &Limits) -> Result<(), Error> {
        self.check(key.len(), limits)?;
        match self {
            Self::Pbkdf2 { hash, iterations, salt } => {
                hash.pbkdf2(passphrase, salt, *iterations, key);
                Ok(())
            }
            Self::Argon2 { is_id, time, memory_kib, lanes, salt } => {
                let algorithm = if *is_id { Algorithm::Argon2id } else { Algorithm::Argon2i };
                let wrong =
                    |why: argon2::Error| Error::Header(format!("argon2 cannot work with its parameters: {why}"));
                let params = Params::new(*memory_kib, *time, *lanes, Some(key.len())).map_err(wrong)?;
                let blocks = params.block_count();
                let mut memory: Vec<Block> = Vec::new();
                memory.try_reserve_exact(blocks).map_err(|_| {
                    Error::TooExpensive(format!(
                        "argon2 needs {} MiB, which the system does not have",
                        memory_kib >> 10
                    ))
                })?;
                memory.resize(blocks, Block::new());
                let argon2 = Argon2::new(algorithm, Version::V0x13, params);
                let done = argon2.hash_password_into_with_memory(passphrase, salt, key, &mut memory);
                memory.iter_mut().for_each(Zeroize::zeroize);
                done.map_err(wrong)
            }
        }
    }

    /// Checks its cost against `limits`.
    fn check(&self, key_len: usize, limits: &Limits) -> Result<(), Error> {
        let (memory_kib, work, what) = match self {
            Self::Pbkdf2 { hash, iterations, .. } => {
                let digests = key_len.div_ceil(hash.digest_len()) as u64;
                (0, u64::from(*iterations) * digests, format!("{iterations} iterations of pbkdf2"))
            }
            Self::Argon2 { time, memory_kib, .. } => {
                let what = format!("{time} passes of argon2 over {} MiB", memory_kib >> 10);
                (u64::from(*memory_kib), u64::from(*memory_kib) * u64::from(*time), what)
            }
        };
        if memory_kib > limits.memory_kib {
            let limit = limits.memory_kib >> 10;
            return Err(Error::TooExpensive(format!("the header asks for {what}; {limit} MiB are allowed")));
        }
        if work > limits.work {
            let limit = limits.work;
            let why = format!("the header asks for {what}, {work} units of work; {limit} are allowed");
            return Err(Error::TooExpensive(why));
        }
        Ok(())
    }
}

/// The kind of function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KdfKind {
    /// Memory-hard; the default of LUKS2
    Argon2id,
    /// Memory-hard, with no access that depends on the passphrase
    Argon2i,
    /// Iterations of a hash; all that LUKS1 has
    Pbkdf2,
}

/// The cost of a new keyslot's function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdfChoice {
    /// Which one.
    pub kind: KdfKind,
    /// The hash of PBKDF2.
    pub hash: Hash,
    /// How long one attempt should take on this machine.
    pub target: Duration,
    /// Iterations (PBKDF2) or passes (argon2), instead of `target`.
    pub iterations: Option<u32>,
    /// Memory of argon2 in KiB: the maximum with `target`, the exact amount with `iterations`.
    pub memory_kib: Option<u32>,
    /// Lanes of argon2; by default as many as there are processors, up to 4.
    pub lanes: Option<u32>,
}

impl KdfChoice {
    /// Two seconds of `kind` on this machine, as in `cryptsetup`.
    #[must_use]
    pub fn new(kind: KdfKind) -> Self {
        let target = Duration::from_secs(2);
        Self { kind, hash: Hash::Sha256, target, iterations: None, memory_kib: None, lanes: None }
    }

    /// Makes a function with a fresh salt. If the choice is by time, this machine is measured.
    ///
    /// # Errors
    /// [`Error::Request`] for invalid parameters, [`Error::Io`] without random numbers.
    pub(crate) fn make(&self, key_len: usize) -> Result<Kdf, Error> {
        let mut salt = vec![0; SALT];
        random(&mut salt)?;
        match self.kind {
            KdfKind::Pbkdf2 => {
                let iterations = match self.iterations {
                    Some(n) if n < MIN_ITERATIONS => {
                        return Err(Error::Request(format!(
                            "{n} iterations of pbkdf2: {MIN_ITERATIONS} are the least"
                        )));
                    }
                    Some(n) => n,
                    None => iterations_in(self.hash, key_len, self.target),
                };
                Ok(Kdf::Pbkdf2 { hash: self.hash, iterations, salt })
            }
            KdfKind::Argon2id | KdfKind::Argon2i => {
                let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
                let lanes = self.lanes.unwrap_or(processors.min(MAX_LANES));
                let is_id = self.kind == KdfKind::Argon2id;
                let memory_kib = self.memory_kib.unwrap_or_else(|| memory_kib().clamp(MIN_MEMORY_KIB, MAX_MEMORY_KIB));
                if lanes == 0 || memory_kib < lanes.saturating_mul(8) || self.iterations == Some(0) {
                    let why =
                        format!("argon2 with {lanes} lanes over {memory_kib} KiB: it takes a pass and 8 KiB a lane");
                    return Err(Error::Request(why));
                }
                let (time, memory_kib) = match self.iterations {
                    Some(time) => (time, memory_kib),
                    None => passes_in(is_id, lanes, memory_kib, self.target)?,
                };
                Ok(Kdf::Argon2 { is_id, time, memory_kib, lanes, salt })
            }
        }
    }
}

/// Iterations of PBKDF2 that take about `target`.
pub(crate) fn iterations_in(hash: Hash, key_len: usize, target: Duration) -> u32 {
    let (mut iterations, mut key) = (MIN_ITERATIONS, vec![0; key_len]);
    loop {
        let start = Instant::now();
        hash.pbkdf2(b"calibration", b"of this machine", iterations, &mut key);
        let took = start.elapsed();
        // Long enough for the clock, and for the processor to speed up.
        if took >= Duration::from_millis(50) {
            let wanted = f64::from(iterations) * target.as_secs_f64() / took.as_secs_f64();
            return (wanted.min(f64::from(u32::MAX)) as u32).max(MIN_ITERATIONS);
        }
        iterations *= 4;
    }
}

/// Passes and KiB of argon2 that take about `target`: first more memory, up to `memory_kib`, then more passes.
fn passes_in(is_id: bool, lanes: u32, memory_kib: u32, target: Duration) -> Result<(u32, u32), Error> {
    let trial_kib = memory_kib.min(2 * MIN_MEMORY_KIB);
    let trial = Kdf::Argon2 { is_id, time: MIN_TIME, memory_kib: trial_kib, lanes, salt: vec![0; SALT] };
    let start = Instant::now();
    trial.derive(b"calibration", &mut [0; 64], &Limits::NONE)?;
    let each = start.elapsed().as_secs_f64() / f64::from(trial_kib) / f64::from(MIN_TIME);
    let work = target.as_secs_f64() / each;
    let least = trial_kib.min(MIN_MEMORY_KIB);
    let kib = ((work / f64::from(MIN_TIME)).min(f64::from(u32::MAX)) as u32).clamp(least, memory_kib);
    let time = (work / f64::from(kib)).min(f64::from(u32::MAX)) as u32;
    Ok((time.max(MIN_TIME), kib))
}

/// Half of the system's memory, in KiB.
fn memory_kib() -> u32 {
    // SAFETY: asks the system for two numbers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES).saturating_mul(libc::sysconf(libc::_SC_PAGESIZE)) };
    u32::try_from(bytes.max(0) / 2048).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_costs_are_refused_before_they_are_spent() {
        let salt = vec![0; SALT];
        let hostile = [
            Kdf::Argon2 { is_id: true, time: 1, memory_kib: u32::MAX, lanes: 1, salt: salt.clone() },
            Kdf::Argon2 { is_id: true, time: u32::MAX, memory_kib: 8, lanes: 1, salt: salt.clone() },
            Kdf::Pbkdf2 { hash: Hash::Sha512, iterations: u32::MAX, salt: salt.clone() },
        ];
        for kdf in hostile {
            let error = kdf.derive(b"x", &mut [0; 64], &Limits::default()).unwrap_err();
            assert!(matches!(error, Error::TooExpensive(_)), "{error}");
            assert!(error.next_step().is_some_and(|next| next.contains("--max-kdf")));
        }
        // Each limit by itself.
        let kdf = Kdf::Argon2 { is_id: true, time: 1, memory_kib: 65, lanes: 1, salt: salt.clone() };
        for (memory_kib, work, is_refused) in [(64, 65, true), (65, 64, true), (65, 65, false)] {
            assert_eq!(kdf.derive(b"x", &mut [0; 64], &Limits { memory_kib, work }).is_err(), is_refused);
        }
        let kdf = Kdf::Pbkdf2 { hash: Hash::Sha256, iterations: 1001, salt };
        let (tight, wide) = (Limits { memory_kib: 0, work: 2001 }, Limits { memory_kib: 0, work: 2002 });
        assert!(kdf.derive(b"x", &mut [0; 64], &tight).is_err());
        assert!(kdf.derive(b"x", &mut [0; 64], &wide).is_ok());
    }

    #[test]
    fn invalid_argon2_parameters_are_errors() {
        for (time, memory_kib, lanes, salt) in
            [(0, 64, 1, 16), (1, 7, 1, 16), (1, 64, 0, 16), (1, 64, 1, 7), (1, 64, 9, 16)]
        {
            let kdf = Kdf::Argon2 { is_id: true, time, memory_kib, lanes, salt: vec![0; salt] };
            let error = kdf.derive(b"x", &mut [0; 32], &Limits::default()).unwrap_err();
            assert!(matches!(error, Error::Header(_)), "{time} {memory_kib} {lanes} {salt}: {error}");
        }
    }

    #[test]
    fn a_target_time_chooses_iterations_and_passes() {
        let mut choice = KdfChoice { target: Duration::from_millis(60), ..KdfChoice::new(KdfKind::Pbkdf2) };
        let Kdf::Pbkdf2 { iterations: few, .. } = choice.make(64).unwrap() else { panic!() };
        choice.target *= 100;
        let Kdf::Pbkdf2 { iterations: many, .. } = choice.make(64).unwrap() else { panic!() };
        assert!(few >= MIN_ITERATIONS && many > few, "{few} {many}");
        choice = KdfChoice { kind: KdfKind::Argon2id, memory_kib: Some(4096), ..choice };
        let Kdf::Argon2 { time, memory_kib, .. } = choice.make(64).unwrap() else { panic!() };
        assert!(time > MIN_TIME && memory_kib == 4096, "{time} {memory_kib}");
    }
}
