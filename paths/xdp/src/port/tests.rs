//! A queue whose kernel lies: it loses no page, and hands none out twice.
use std::collections::BTreeSet;

use pagemill::PageSource;
use proptest::prelude::*;

use super::*;
use crate::fake::{Fake, HEADROOM};

const PAGE: u64 = PAGE_SIZE as u64;

/// A port with its pool, and the kernel's side.
struct World {
    port: Port<PageSource<Page>>,
    pages: Pages<PageSource<Page>>,
    counts: Counts,
    fake: Fake,
    umem: Umem,
}

impl World {
    fn new(pages: usize, start: u32) -> Self {
        let umem = Umem::new(pages).unwrap();
        let (fake, rings) = Fake::new(128, start);
        let pool = PagePool::new(PageSource::pages(umem.allocator()));
        let (port, pages) = (Port::new(rings, &umem), Pages { pool, is_recycling: true });
        Self { port, pages, counts: Counts::default(), fake, umem }
    }

    fn refill(&mut self) {
        self.port.refill(&mut self.pages, &mut self.counts).unwrap();
        self.fake.look();
    }

    /// Receives all that is there.
    fn receive(&mut self) -> Vec<Packet<PageSource<Page>>> {
        let mut packets = Vec::new();
        while self.port.ready().unwrap() > 0 {
            let packet = self.port.receive(&mut self.counts);
            self.counts.received += u64::from(packet.is_some());
            packets.extend(packet);
            self.port.end_receiving();
        }
        packets
    }

    fn send(&mut self, packet: Packet<PageSource<Page>>) {
        self.port.send(packet, &mut self.pages, &mut self.counts).unwrap();
        self.port.end_sending();
        self.fake.look();
    }

    fn complete(&mut self) {
        while self.port.complete(&mut self.pages, &mut self.counts).unwrap() {}
    }

    /// Ends everything: every page is free again.
    fn end(mut self) {
        let closed = self.umem.close(Vec::new()).unwrap();
        self.port.split().1.end(&closed);
        assert_eq!(self.pages.pool.in_flight(), 0, "pages that did not come back");
        drop(self.pages);
        let census = self.umem.allocator().validate().unwrap();
        assert_eq!((census.handed_out, census.quarantined), (0, 0));
    }
}

fn packet_at(frame: u64, len: u32) -> Desc {
    Desc { addr: frame + HEADROOM, len, options: 0 }
}

#[test]
fn packets_come_and_go_on_their_pages() {
    for start in [0, u32::MAX - 70] {
        let mut world = World::new(1024, start);
        for round in 0..10 {
            world.refill();
            let frames: Vec<u64> = world.fake.empty.drain(..).collect();
            assert!(frames.len() >= 64, "{}", frames.len());
            for &frame in &frames {
                world.fake.receive(packet_at(frame, 60)).unwrap();
            }
            let packets = world.receive();
            assert_eq!(packets.len(), frames.len());
            for mut packet in packets {
                packet.fill(round);
                world.send(packet);
            }
            let sent: Vec<u64> = world.fake.sending.drain(..).collect();
            assert_eq!(sent, frames.iter().map(|frame| frame + HEADROOM).collect::<Vec<_>>());
            for addr in sent {
                world.fake.complete(addr).unwrap();
            }
            world.complete();
        }
        assert_eq!((world.counts.received, world.counts.completed), (world.counts.sent, world.counts.sent));
        world.end();
    }
}

#[test]
fn a_full_send_ring_drops_and_loses_nothing() {
    let mut world = World::new(1024, 0);
    for _ in 0..3 {
        world.port.refill(&mut world.pages, &mut world.counts).unwrap();
        world.fake.empty.extend(std::iter::from_fn(|| {
            world.fake.fill.ready().unwrap().gt(&0).then(|| world.fake.fill.pop()).flatten()
        }));
        world.fake.fill.publish();
        for frame in world.fake.empty.drain(..).collect::<Vec<_>>() {
            world.fake.receive(packet_at(frame, 60)).unwrap();
        }
        for packet in world.receive() {
            world.port.send(packet, &mut world.pages, &mut world.counts).unwrap();
        }
    }
    assert_eq!((world.counts.sent, world.counts.drop_send_ring_full), (128, 64));
    world.end();
}

#[test]
fn an_address_is_believed_once_and_by_the_ring_that_has_it() {
    let mut world = World::new(1024, 0);
    world.refill();
    let frame = world.fake.empty[0];
    // Never sent; 0, as kernels have been seen to say; outside; at the end of all numbers.
    for addr in [frame, 0, 1024 * PAGE, u64::MAX] {
        world.fake.complete(addr).unwrap();
    }
    world.complete();
    assert_eq!((world.counts.lie_completed_not_there, world.counts.lie_completed_outside), (2, 2));
    // Twice the same, a frame that the kernel never had, one outside.
    let foreign = (0..1024 * PAGE).step_by(PAGE_SIZE).find(|frame| !world.fake.empty.contains(frame)).unwrap();
    for frame in [frame, frame, foreign, 1024 * PAGE, u64::MAX - HEADROOM] {
        world.fake.receive(packet_at(frame, 60)).unwrap();
    }
    let mut packets = world.receive();
    assert_eq!(packets.len(), 1);
    assert_eq!((world.counts.lie_received_not_there, world.counts.lie_received_outside), (2, 2));
    // It is being sent: it can't be received, and is complete only at the address that the kernel was given.
    world.send(packets.pop().unwrap());
    let addr = world.fake.sending[0];
    world.fake.receive(packet_at(frame, 60)).unwrap();
    assert!(world.receive().is_empty());
    for lie in [addr + 1, addr - HEADROOM, addr ^ 2048] {
        world.fake.complete(lie).unwrap();
    }
    world.complete();
    assert_eq!((world.counts.completed, world.counts.lie_completed_not_there), (0, 5));
    for addr in [addr, addr] {
        world.fake.complete(addr).unwrap();
    }
    world.complete();
    assert_eq!((world.counts.completed, world.counts.lie_completed_not_there), (1, 6));
    world.end();
}

#[test]
fn a_packet_that_leaves_its_page_is_dropped() {
    let mut world = World::new(1024, 0);
    world.refill();
    let frames = world.fake.empty.clone();
    world.fake.receive(packet_at(frames[0], PAGE_SIZE as u32 - 255)).unwrap();
    world.fake.receive(packet_at(frames[1], u32::MAX)).unwrap();
    world.fake.receive(Desc { options: 1, ..packet_at(frames[2], 60) }).unwrap();
    // The last part of the packet whose first part was that.
    world.fake.receive(packet_at(frames[3], 60)).unwrap();
    world.fake.receive(packet_at(frames[4], 0)).unwrap();
    world.fake.receive(packet_at(frames[5], PAGE_SIZE as u32 - 256)).unwrap();
    let packets = world.receive();
    assert_eq!((packets.len(), packets[0].len(), world.counts.drop_bad_length), (1, PAGE_SIZE - 256, 5));
    packets.into_iter().for_each(|packet| world.pages.end(packet));
    world.end();
}

#[test]
fn positions_that_cannot_be_are_an_error() {
    let mut world = World::new(1024, 0);
    let (lying, rings) = Fake::new(128, 0);
    let mut port: Port<PageSource<Page>> = Port::new(rings, &world.umem);
    lying.fill.lie(1);
    assert!(matches!(port.refill(&mut world.pages, &mut world.counts), Err(Error::Broken(_))));
    lying.rx.lie(129);
    assert!(matches!(port.ready(), Err(Error::Broken(_))));
    lying.completion.lie(u32::MAX);
    assert!(matches!(port.complete(&mut world.pages, &mut world.counts), Err(Error::Broken(_))));
    let closed = world.umem.close(Vec::new()).unwrap();
    port.split().1.end(&closed);
    world.end();
}

#[test]
fn a_starved_pool_fills_what_it_can() {
    // Fewer pages than the fill ring has slots.
    let mut world = World::new(96, 0);
    while world.port.refill(&mut world.pages, &mut world.counts).unwrap() && world.counts.no_page == 0 {}
    world.fake.look();
    assert!(world.counts.no_page > 0);
    let frames: Vec<u64> = world.fake.empty.drain(..).collect();
    assert!(!frames.is_empty());
    for frame in frames {
        world.fake.receive(packet_at(frame, 60)).unwrap();
    }
    let packets = world.receive();
    packets.into_iter().for_each(|packet| world.pages.end(packet));
    world.refill();
    assert!(!world.fake.empty.is_empty());
    world.end();
}

#[test]
fn pages_whose_socket_may_be_open_are_never_handed_out_again() {
    let mut world = World::new(256, 0);
    world.refill();
    let held = world.port.held()[0];
    assert_eq!(held, 64);
    drop(world.port);
    assert_eq!(world.pages.pool.in_flight(), held);
}

/// What a kernel says next; numbers choose among what there is.
#[derive(Clone, Debug)]
enum Says {
    Receives(usize, u32),
    ReceivesAgain(usize),
    Completes(usize),
    ReceivesAnything(u64, u32, u32),
    CompletesAnything(u64),
    SendsAll,
    DropsAll,
    Refills,
}

fn says() -> impl Strategy<Value = Says> {
    prop_oneof![
        4 => (any::<usize>(), 0..5000_u32).prop_map(|(at, len)| Says::Receives(at, len)),
        1 => any::<usize>().prop_map(Says::ReceivesAgain),
        3 => any::<usize>().prop_map(Says::Completes),
        2 => (0..300 * PAGE, any::<u32>(), 0..2_u32).prop_map(|(addr, len, options)| Says::ReceivesAnything(addr, len, options)),
        2 => (0..300 * PAGE).prop_map(Says::CompletesAnything),
        2 => Just(Says::SendsAll),
        1 => Just(Says::DropsAll),
        2 => Just(Says::Refills),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn whatever_the_kernel_says_no_page_is_lost_or_has_two_owners(all in proptest::collection::vec(says(), 1..200)) {
        let mut world = World::new(256, u32::MAX - 10);
        let mut hand: Vec<Packet<PageSource<Page>>> = Vec::new();
        let mut stamp = 0_u8;
        for one in all {
            match one {
                Says::Receives(at, len) if !world.fake.empty.is_empty() => {
                    let at = at % world.fake.empty.len();
                    let frame = world.fake.empty.swap_remove(at);
                    world.fake.receive(packet_at(frame, len)).unwrap();
                }
                Says::ReceivesAgain(at) if !world.fake.empty.is_empty() => {
                    let frame = world.fake.empty[at % world.fake.empty.len()];
                    world.fake.receive(packet_at(frame, 60)).unwrap();
                }
                Says::Completes(at) if !world.fake.sending.is_empty() => {
                    let at = at % world.fake.sending.len();
                    let addr = world.fake.sending.swap_remove(at);
                    world.fake.complete(addr).unwrap();
                }
                Says::ReceivesAnything(addr, len, options) => world.fake.receive(Desc { addr, len, options }).unwrap(),
                Says::CompletesAnything(addr) => world.fake.complete(addr).unwrap(),
                Says::SendsAll => hand.drain(..).for_each(|packet| world.send(packet)),
                Says::DropsAll => hand.drain(..).for_each(|packet| world.pages.end(packet)),
                Says::Refills => world.refill(),
                _ => {}
            }
            world.complete();
            // What is in hand is nobody else's: what is written there stays.
            for mut packet in world.receive() {
                stamp = stamp.wrapping_add(1);
                packet.fill(stamp);
                hand.push(packet);
            }
            let pages: BTreeSet<usize> = hand.iter().map(|packet| packet.page.addr()).collect();
            prop_assert_eq!(pages.len(), hand.len(), "a page is in two packets");
            for packet in &hand {
                prop_assert!(packet.windows(2).all(|two| two[0] == two[1]), "somebody else wrote to a page in hand");
            }
            let held: usize = world.port.held().iter().sum();
            prop_assert_eq!(world.pages.pool.in_flight(), held + hand.len());
        }
        hand.drain(..).for_each(|packet| world.pages.end(packet));
        world.end();
    }
}
