//! Pages as an io_uring's provided buffers: what is sent arrives in them, and no page is lost or in two hands, also when
//! numbers are wrong and when the ring is dropped while the kernel has pages.
use crate::common::{Rng, all_without_waiting, in_child, one_cpu};
use crate::device_rings::{fd, ring};
use io_uring::{IoUring, cqueue, opcode, squeue::Flags, types};
use pagemill::{Allocator, BufRing, DeviceError, Gfp, InFlight, Memory, Page};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::{UnixDatagram, UnixStream};

const GROUP: u16 = 3;

/// A ring of buffers, if the kernel knows them.
fn buf_ring(ring: &IoUring, entries: u16, allocator: &Allocator) -> Option<BufRing> {
    match BufRing::new(fd(ring), GROUP, entries, allocator) {
        Err(why @ DeviceError::System { errno: libc::EINVAL, .. }) => {
            println!("skipped: {why}");
            None
        }
        made => Some(made.unwrap()),
    }
}

/// Receives until the buffers or the socket end.
fn receive_many(ring: &mut IoUring, socket: &impl AsRawFd) {
    let receive = opcode::RecvMulti::new(types::Fd(socket.as_raw_fd()), GROUP).build();
    // SAFETY: it names no memory; the ring of buffers owns the pages.
    unsafe { ring.submission().push(&receive) }.unwrap();
    ring.submit().unwrap();
}

/// Receives once, and returns the result and the buffer's number.
fn receive(ring: &mut IoUring, socket: &impl AsRawFd) -> (i32, Option<u16>) {
    let receive = opcode::Recv::new(types::Fd(socket.as_raw_fd()), std::ptr::null_mut(), 4096).buf_group(GROUP);
    // SAFETY: as above.
    unsafe { ring.submission().push(&receive.build().flags(Flags::BUFFER_SELECT)) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    let done = ring.completion().next().unwrap();
    (done.result(), cqueue::buffer_select(done.flags()))
}

/// Linux 6.8 and newer do.
fn kernel_says_what_it_took() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers =
        release.split(|letter: char| !letter.is_ascii_digit()).map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(8))
}

fn take(buffers: &mut BufRing, id: u16) -> Result<Page, DeviceError> {
    // SAFETY: the tests submit no request that writes later: what the kernel chose, it has written. Other numbers are refused.
    unsafe { buffers.take(id) }
}

/// Messages of random sizes, many times as many as there are buffers, so that positions wrap too.
#[test]
fn messages_arrive_whole_in_pages_that_are_refilled_in_bulk() {
    let Some(mut ring) = ring() else { return };
    let allocator = one_cpu(Memory::anonymous(512));
    let Some(mut buffers) = buf_ring(&ring, 16, &allocator) else { return };
    assert_eq!(buffers.fill(Gfp::NOWAIT).unwrap(), 16);
    let (here, there) = UnixDatagram::pair().unwrap();
    let mut random = Rng::new(0x5eed_0020);
    let (mut received, mut refills) = (0u32, 0);
    receive_many(&mut ring, &there);
    while received < 80_000 {
        let sent: Vec<(u32, usize)> =
            (0..1 + random.below(10) as u32).map(|n| (received + n, 4 + random.below(4093))).collect();
        for &(number, len) in &sent {
            let mut message = [number as u8; 4096];
            message[..4].copy_from_slice(&number.to_le_bytes());
            here.send(&message[..len]).unwrap();
        }
        let mut pages = Vec::new();
        while pages.len() < sent.len() {
            ring.submit_and_wait(1).unwrap();
            let done: Vec<_> = ring.completion().collect();
            for done in done {
                assert!(done.result() > 0, "{}", done.result());
                let page = take(&mut buffers, cqueue::buffer_select(done.flags()).unwrap()).unwrap();
                pages.push((page, done.result() as usize));
                if !cqueue::more(done.flags()) {
                    receive_many(&mut ring, &there);
                }
            }
        }
        for ((page, len), (number, sent)) in pages.iter().zip(&sent) {
            assert_eq!((*len, &page[..4]), (*sent, &number.to_le_bytes()[..]));
            assert!(page[4..*len].iter().all(|byte| *byte == *number as u8), "message {number}");
        }
        received += sent.len() as u32;
        // Holes are filled now and then: one call for all.
        let holes = buffers.holes();
        if holes > 5 {
            assert_eq!(buffers.fill(Gfp::NOWAIT).unwrap(), holes);
            refills += 1;
        }
    }
    assert!(refills > 1000);
    drop((here, there, ring));
    drop(buffers);
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
}

#[test]
fn numbers_that_no_completion_brought_are_refused() {
    let Some(mut ring) = ring() else { return };
    let allocator = one_cpu(Memory::anonymous(64));
    let Some(mut buffers) = buf_ring(&ring, 4, &allocator) else { return };
    let refused = |buffers: &mut BufRing, id| {
        assert_eq!(take(buffers, id).map(drop), Err(DeviceError::NoBuffer { group: GROUP, id }), "number {id}");
    };
    refused(&mut buffers, 0); // Nothing is in the ring.
    buffers.fill(Gfp::NOWAIT).unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(b"one").unwrap();
    let (3, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    let is_known = kernel_says_what_it_took();
    if is_known {
        (0..4).filter(|other| *other != id).for_each(|other| refused(&mut buffers, other));
    }
    for id in [4, 5, 1 << 15, u16::MAX] {
        refused(&mut buffers, id);
    }
    let page = take(&mut buffers, id).unwrap();
    assert_eq!(&page[..3], b"one");
    refused(&mut buffers, id);
    assert_eq!(buffers.fill(Gfp::NOWAIT).unwrap(), 1);
    if is_known {
        refused(&mut buffers, id); // Refilled, and not chosen yet.
    }
    drop((page, buffers));
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
}

#[test]
fn a_receive_without_buffers_fails_until_pages_are_free() {
    let Some(mut ring) = ring() else { return };
    let allocator = one_cpu(Memory::anonymous(8));
    let mut all = all_without_waiting(&allocator, Gfp::NOWAIT);
    let Some(mut buffers) = buf_ring(&ring, 16, &allocator) else { return };
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(b"hello").unwrap();
    assert_eq!(buffers.fill(Gfp::NOWAIT).unwrap(), 0);
    assert_eq!(receive(&mut ring, &there), (-libc::ENOBUFS, None));
    all.truncate(5);
    assert_eq!((buffers.fill(Gfp::NOWAIT).unwrap(), buffers.holes()), (3, 13));
    let (5, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    assert_eq!(&take(&mut buffers, id).unwrap()[..5], b"hello");
    assert!(
        matches!(buffers.fill(Gfp::NOWAIT | Gfp::NOFAIL), Err(DeviceError::Memory(_))),
        "flags that exclude each other"
    );
    drop((all, buffers));
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
}

/// A page that the kernel has, nobody else may get.
#[test]
fn a_dropped_ring_leaks_only_pages_that_the_kernel_took() {
    own_process!(); // It counts what the process leaks.
    let Some(mut ring) = ring() else { return };
    if !kernel_says_what_it_took() {
        return println!("skipped: this kernel does not say which buffers it took");
    }
    let allocator = one_cpu(Memory::anonymous(64));
    let Some(mut buffers) = buf_ring(&ring, 8, &allocator) else { return };
    buffers.fill(Gfp::NOWAIT).unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    let mut ids = Vec::new();
    for _ in 0..3 {
        here.write_all(b"x").unwrap();
        ids.extend(receive(&mut ring, &there).1);
    }
    take(&mut buffers, ids[1]).unwrap();
    // A request that waits for data gets no buffer of the group once the ring is dropped.
    receive_many(&mut ring, &there);
    let leaked = InFlight::leaked();
    drop(buffers);
    here.write_all(b"late").unwrap();
    ring.submit_and_wait(1).unwrap();
    assert_eq!(ring.completion().next().map(|done| done.result()), Some(-libc::ENOBUFS));
    assert_eq!((allocator.validate().unwrap().handed_out, InFlight::leaked() - leaked), (2, 2));
    // The group's number is free again.
    let mut again = buf_ring(&ring, 8, &allocator).unwrap();
    assert_eq!(again.fill(Gfp::NOWAIT).unwrap(), 8);
    let (4, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    assert_eq!(&take(&mut again, id).unwrap()[..4], b"late");
}

#[test]
fn refused_rings_of_buffers_say_what_to_do() {
    let allocator = one_cpu(Memory::anonymous(64));
    let why = BufRing::new(File::open("/dev/null").unwrap().as_fd(), GROUP, 4, &allocator).unwrap_err();
    assert!(why.to_string().contains("use the descriptor of an io_uring"), "{why}");
    let Some(ring) = ring() else { return };
    for entries in [0, 3, 32769, u16::MAX] {
        let why = BufRing::new(fd(&ring), GROUP, entries, &allocator).unwrap_err();
        assert!(why.to_string().ends_with("ask for a power of two up to 32768"), "{why}");
    }
    let Some(_buffers) = buf_ring(&ring, 4, &allocator) else { return };
    let why = BufRing::new(fd(&ring), GROUP, 4, &allocator).unwrap_err();
    assert!(why.to_string().contains("use another number for the group"), "{why}");
}

/// The group ends behind its back: by a call of the program, or because only another thread may end it.
#[test]
fn a_ring_that_cannot_say_what_the_kernel_took_leaks_all() {
    own_process!();
    let Ok(ring) = IoUring::builder().setup_single_issuer().build(8) else {
        return println!("skipped: no io_uring for a single thread here");
    };
    let allocator = one_cpu(Memory::anonymous(64));
    let Some(mut buffers) = buf_ring(&ring, 8, &allocator) else { return };
    buffers.fill(Gfp::NOWAIT).unwrap();
    let leaked = InFlight::leaked();
    std::thread::scope(|scope| scope.spawn(|| drop(buffers)).join().unwrap());
    assert_eq!((allocator.validate().unwrap().handed_out, InFlight::leaked() - leaked), (8, 8));
    let mut other = BufRing::new(fd(&ring), GROUP + 1, 8, &allocator).unwrap();
    other.fill(Gfp::NOWAIT).unwrap();
    ring.submitter().unregister_buf_ring(GROUP + 1).unwrap();
    let error = take(&mut other, 0).unwrap_err();
    assert!(matches!(error, DeviceError::System { errno: libc::ENOENT, .. }), "{error}");
    drop(other);
    assert_eq!((allocator.validate().unwrap().handed_out, InFlight::leaked() - leaked), (16, 16));
}

/// The program ended the group and gave its number to another ring, which is further on than the first one ever was. The first
/// one leaves the group to it.
#[test]
fn a_ring_whose_group_was_replaced_hands_out_no_page() {
    own_process!();
    let Some(mut ring) = ring() else { return };
    if !kernel_says_what_it_took() {
        return println!("skipped: this kernel does not say which buffers it took");
    }
    let allocator = one_cpu(Memory::anonymous(64));
    let Some(mut first) = buf_ring(&ring, 4, &allocator) else { return };
    first.fill(Gfp::NOWAIT).unwrap();
    ring.submitter().unregister_buf_ring(GROUP).unwrap();
    let mut second = buf_ring(&ring, 8, &allocator).unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    for _ in 0..9 {
        second.fill(Gfp::NOWAIT).unwrap();
        here.write_all(b"x").unwrap();
        let (1, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
        take(&mut second, id).unwrap();
    }
    let why = take(&mut first, 0).unwrap_err();
    assert!(why.to_string().contains("another ring of buffers has taken the place"), "{why}");
    let leaked = InFlight::leaked();
    drop(first); // It cannot tell what the kernel took.
    assert_eq!(InFlight::leaked() - leaked, 4);
    second.fill(Gfp::NOWAIT).unwrap();
    here.write_all(b"x").unwrap();
    let (1, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    take(&mut second, id).unwrap();
    drop(second);
    assert_eq!((allocator.validate().unwrap().handed_out, InFlight::leaked() - leaked), (4, 4));
}

/// The head that the kernel reports is then the second ring's, at which the first one had taken nothing yet.
#[test]
fn a_dropped_ring_whose_group_was_replaced_frees_no_page_that_the_kernel_took() {
    own_process!();
    let Some(mut ring) = ring() else { return };
    let allocator = one_cpu(Memory::anonymous(64));
    let Some(mut first) = buf_ring(&ring, 4, &allocator) else { return };
    first.fill(Gfp::NOWAIT).unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(b"x").unwrap();
    let (1, Some(_)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    ring.submitter().unregister_buf_ring(GROUP).unwrap();
    let mut second = buf_ring(&ring, 4, &allocator).unwrap();
    second.fill(Gfp::NOWAIT).unwrap();
    let leaked = InFlight::leaked();
    drop(first);
    assert_eq!(InFlight::leaked() - leaked, 4);
    here.write_all(b"still").unwrap();
    let (5, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    assert_eq!(&take(&mut second, id).unwrap()[..5], b"still");
}

/// Another io_uring has groups of its own, also with the same number.
#[test]
fn rings_of_other_io_urings_do_not_take_a_groups_place() {
    own_process!();
    let (Some(mut ring), Some(other)) = (ring(), ring()) else { return };
    if !kernel_says_what_it_took() {
        return println!("skipped: this kernel does not say which buffers it took");
    }
    let allocator = one_cpu(Memory::anonymous(64));
    let Some(mut buffers) = buf_ring(&ring, 4, &allocator) else { return };
    let others = buf_ring(&other, 4, &allocator).unwrap();
    buffers.fill(Gfp::NOWAIT).unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    here.write_all(b"x").unwrap();
    let (1, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    take(&mut buffers, id).unwrap();
    drop((buffers, others));
    assert_eq!(allocator.validate().unwrap().handed_out, 0);
}

#[test]
fn a_forked_child_cannot_use_its_parents_ring_of_buffers() {
    own_process!();
    let Some(mut ring) = ring() else { return };
    let allocator = one_cpu(Memory::anonymous(64));
    let Some(mut buffers) = buf_ring(&ring, 8, &allocator) else { return };
    buffers.fill(Gfp::NOWAIT).unwrap();
    let (mut here, there) = UnixStream::pair().unwrap();
    let mut parents = Some(buffers);
    in_child("has its parent's buffers", || {
        let mut buffers = parents.take().unwrap();
        assert_eq!(buffers.fill(Gfp::NOWAIT), Err(DeviceError::Forked));
        assert_eq!(take(&mut buffers, 0).map(drop), Err(DeviceError::Forked));
        drop(buffers);
    });
    let mut buffers = parents.unwrap();
    here.write_all(b"still here").unwrap();
    let (10, Some(id)) = receive(&mut ring, &there) else { panic!("nothing was received") };
    assert_eq!(&take(&mut buffers, id).unwrap()[..10], b"still here");
}
