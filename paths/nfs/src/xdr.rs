//! Headers and arguments out of XDR, results into it (RFC 4506). The types are those of the crate `nfs3_types`.
//!
//! What a peer sent is read here and not by that crate, which allocates whatever length a peer states. This reader allocates
//! nothing: names and handles are borrowed from the request.
use nfs3_types::nfs3::{Nfs3Option, nfstime3, sattr3, set_atime, set_mtime, specdata3};
use nfs3_types::xdr_codec::Pack;

/// The bytes are not what they should be: `GARBAGE_ARGS`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Garbage {
    /// They end too early.
    Cut,
    /// A length is beyond its limit, a value is none that there is, or bytes follow the end.
    Wrong,
}

/// Reads what a peer sent, one value after the other.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(args: &'a [u8]) -> Self {
        Self(args)
    }

    /// What was not read yet.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    /// How many bytes were not read yet.
    pub(crate) fn left(&self) -> usize {
        self.0.len()
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Garbage> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Garbage::Cut)?;
        self.0 = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Garbage> {
        const { assert!(N.is_multiple_of(4)) };
        self.take(N)?.try_into().map_err(|_| Garbage::Cut)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Garbage> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Garbage> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn bool(&mut self) -> Result<bool, Garbage> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Garbage::Wrong),
        }
    }

    /// Bytes of any length up to `max`. What pads them is not looked at.
    pub(crate) fn opaque(&mut self, max: usize) -> Result<&'a [u8], Garbage> {
        let len = self.u32()? as usize;
        if len > max {
            return Err(Garbage::Wrong);
        }
        let padded = self.take(len.next_multiple_of(4))?;
        Ok(&padded[..len])
    }

    /// The arguments end here.
    pub(crate) fn end(&self) -> Result<(), Garbage> {
        if self.0.is_empty() { Ok(()) } else { Err(Garbage::Wrong) }
    }

    pub(crate) fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Garbage>,
    ) -> Result<Option<T>, Garbage> {
        if self.bool()? { read(self).map(Some) } else { Ok(None) }
    }

    pub(crate) fn time(&mut self) -> Result<nfstime3, Garbage> {
        Ok(nfstime3 { seconds: self.u32()?, nseconds: self.u32()? })
    }

    pub(crate) fn device(&mut self) -> Result<specdata3, Garbage> {
        Ok(specdata3 { specdata1: self.u32()?, specdata2: self.u32()? })
    }

    pub(crate) fn attributes(&mut self) -> Result<sattr3, Garbage> {
        Ok(sattr3 {
            mode: some(self.option(Self::u32)?),
            uid: some(self.option(Self::u32)?),
            gid: some(self.option(Self::u32)?),
            size: some(self.option(Self::u64)?),
            atime: match self.u32()? {
                0 => set_atime::DONT_CHANGE,
                1 => set_atime::SET_TO_SERVER_TIME,
                2 => set_atime::SET_TO_CLIENT_TIME(self.time()?),
                _ => return Err(Garbage::Wrong),
            },
            mtime: match self.u32()? {
                0 => set_mtime::DONT_CHANGE,
                1 => set_mtime::SET_TO_SERVER_TIME,
                2 => set_mtime::SET_TO_CLIENT_TIME(self.time()?),
                _ => return Err(Garbage::Wrong),
            },
        })
    }
}

/// The crate's own kind of `Option`.
pub(crate) fn some<T: Pack + nfs3_types::xdr_codec::Unpack>(value: Option<T>) -> Nfs3Option<T> {
    value.map_or(Nfs3Option::None, Nfs3Option::Some)
}

/// The results in XDR.
pub(crate) fn pack(results: &impl Pack) -> Vec<u8> {
    let mut packed = Vec::with_capacity(results.packed_size());
    results.pack(&mut packed).expect("a vector takes all bytes, and no result is as long as 4 GiB");
    packed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_beyond_the_arguments_or_the_limit_is_garbage() {
        let read = |bytes, max| Reader::new(bytes).opaque(max);
        assert_eq!(read(&[0, 0, 0, 5, 1, 2, 3, 4], 64), Err(Garbage::Cut));
        assert_eq!(read(&[0xff; 8], usize::MAX), Err(Garbage::Cut));
        assert_eq!(read(&[0, 0, 0, 4, 1, 2, 3, 4], 3), Err(Garbage::Wrong));
        let mut padded = Reader::new(&[0, 0, 0, 3, 1, 2, 3, 0]);
        assert_eq!(padded.opaque(3), Ok(&[1, 2, 3][..]));
        assert_eq!(padded.end(), Ok(()));
    }

    #[test]
    fn unions_cut_short_and_unknown_arms_are_garbage() {
        let whole: Vec<u8> =
            [1, 0o644, 0, 0, 1, 0, 7, 2, 5, 6, 1].iter().flat_map(|&word: &u32| word.to_be_bytes()).collect();
        let mut reader = Reader::new(&whole);
        let read = reader.attributes().unwrap();
        assert_eq!((read.mode.unwrap(), read.size.unwrap()), (0o644, 7));
        assert!(matches!(read.atime, set_atime::SET_TO_CLIENT_TIME(nfstime3 { seconds: 5, nseconds: 6 })));
        assert!(matches!(read.mtime, set_mtime::SET_TO_SERVER_TIME));
        assert_eq!(reader.end(), Ok(()));
        for cut in 0..whole.len() {
            assert!(Reader::new(&whole[..cut]).attributes().is_err(), "cut at {cut}");
        }
        for at in [0, 8, 28, 40] {
            let mut wrong = whole.clone();
            wrong[at + 3] = 3;
            assert!(Reader::new(&wrong).attributes().is_err(), "an unknown arm at {at}");
        }
    }
}
