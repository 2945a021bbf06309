//! Physical memory as the kernel shows it to root: `/proc/kcore`, an ELF file with a segment for each piece of it.
use std::fs::File;
use std::os::unix::fs::FileExt;

pub(crate) struct Kcore {
    file: File,
    /// First physical address, bytes, and where they are in the file.
    pieces: Vec<(u64, u64, u64)>,
}

impl Kcore {
    /// None, and says so, where the kernel has no such file or keeps it from us.
    pub(crate) fn open() -> Option<Self> {
        let file = File::open("/proc/kcore").map_err(|why| println!("skipped: no /proc/kcore here ({why})")).ok()?;
        let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let mut head = [0; 64];
        file.read_exact_at(&mut head, 0).unwrap();
        let (table, n) = (word(&head, 32), u16::from_le_bytes([head[56], head[57]]));
        let piece = |number| {
            let mut entry = [0; 56];
            file.read_exact_at(&mut entry, table + number * 56).unwrap();
            // Offset, physical address and size; what has no such address says -1.
            let piece = (word(&entry, 24), word(&entry, 40), word(&entry, 8));
            (entry[0] == 1 && piece.0 != u64::MAX).then_some(piece)
        };
        let pieces = (0..u64::from(n)).filter_map(piece).collect();
        Some(Self { file, pieces })
    }

    /// The page at a physical address.
    pub(crate) fn page(&self, addr: u64) -> [u8; 4096] {
        // The kernel's own image is a piece besides, within the memory that holds it: arm64 takes parts of it away after the
        // boot, and what is there by then is read as zeros by way of the image.
        let pieces = self.pieces.iter().filter(|piece| (piece.0..piece.0 + piece.1).contains(&addr));
        let &(first, _, at) = pieces.max_by_key(|piece| piece.1).expect("memory that is there");
        let mut page = [0; 4096];
        self.file.read_exact_at(&mut page, at + (addr - first)).unwrap();
        page
    }
}
