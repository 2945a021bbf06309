//! Physical memory as the kernel shows it to root: `/proc/kcore`, an ELF file with a segment for each piece of it.
use std::fs::File;
use std::os::unix::fs::FileExt;

pub(crate) struct Kcore {
    file: File,
    pieces: Vec<Piece>,
}

/// A segment of memory that has physical addresses.
#[derive(Clone, Copy)]
struct Piece {
    /// The first physical address.
    addr: u64,
    bytes: u64,
    /// Where its bytes begin in the file.
    offset: u64,
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
            let piece = Piece { addr: word(&entry, 24), bytes: word(&entry, 40), offset: word(&entry, 8) };
            // A segment without physical address says -1.
            (entry[0] == 1 && piece.addr != u64::MAX).then_some(piece)
        };
        let pieces = (0..u64::from(n)).filter_map(piece).collect();
        Some(Self { file, pieces })
    }

    /// The page at a physical address.
    pub(crate) fn page(&self, addr: u64) -> [u8; 4096] {
        let mut page = [0; 4096];
        self.file.read_exact_at(&mut page, offset_of(&self.pieces, addr).expect("memory that is there")).unwrap();
        page
    }
}

/// Where the file has the byte at a physical address.
///
/// The memory under the kernel's image has two segments: the image's own, and the one of all the memory around it, which is
/// larger. Both lead to the same bytes while the image is mapped. After the boot arm64 frees what the image needed only for it
/// (some MiB of code and data) and unmaps it there: programs get these frames, and the image's segment reads as zeros.
fn offset_of(pieces: &[Piece], addr: u64) -> Option<u64> {
    let holds = |piece: &&Piece| (piece.addr..piece.addr + piece.bytes).contains(&addr);
    let memory = pieces.iter().filter(holds).max_by_key(|piece| piece.bytes)?;
    Some(memory.offset + (addr - memory.addr))
}

/// The segments of Debian's Linux 6.1 on arm64 with 2 GiB at 1 GiB, and a page that a program got of the image's freed part.
#[test]
fn a_frame_that_the_kernels_image_gave_up_is_read_from_the_memory_around_it() {
    let image = Piece { addr: 0x4020_0000, bytes: 0x0201_0000, offset: 0xd449_6140_3000 };
    let memory = Piece { addr: 0x4000_0000, bytes: 0x8000_0000, offset: 0x3000 };
    for pieces in [[image, memory], [memory, image]] {
        assert_eq!(offset_of(&pieces, 0x41e2_4000), Some(0x01e2_7000));
        assert_eq!(offset_of(&pieces, 0x44d3_8000), Some(0x04d3_b000), "outside of the image");
        assert_eq!(offset_of(&pieces, 0xc000_0000), None);
    }
}
