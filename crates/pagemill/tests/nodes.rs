//! Where pages come from when there are several nodes: nodes and CPUs that are not there, so that every number is
//! exact (C3.6, C3.7, C3.12, C3.13).
use crate::common::{self, EXACT_FORMS, FORMS, all, bulk, fake_cpu, go_to, poll_once, singles};
use pagemill::{
    Allocator, Block, BlockList, Bulk, Delivered, Error, Gfp, InvalidRequest, Memory, NodeId, NodeMask, Order, Page,
    PageList, Policy, Shortfall, Stats, Watermarks, Why,
};
use std::pin::pin;
use std::task::{Poll, Waker};

fn node(id: usize) -> NodeId {
    NodeId::new(id).unwrap()
}
fn mask(ids: &[usize]) -> NodeMask {
    ids.iter().map(|&id| node(id)).collect()
}

/// Four nodes of two CPUs each, `pages` on each; nodes 0 and 1 are near each other, and so are 2 and 3.
fn four(pages: [usize; 4], describe: impl Fn(usize, Memory) -> Memory) -> Allocator {
    let distances = [[10, 15, 30, 40], [15, 10, 40, 30], [30, 40, 10, 15], [40, 30, 15, 10]];
    let nodes = (0..8).map(|cpu| node(cpu / 2)).collect();
    let builder = Allocator::builder().cpus(8, fake_cpu).nodes(nodes, distances.map(Vec::from).to_vec());
    let add = |builder: pagemill::Builder, (id, &pages): (usize, &usize)| {
        builder.memory(describe(id, Memory::anonymous(pages).node(node(id))))
    };
    pages.iter().enumerate().filter(|(_, pages)| **pages > 0).fold(builder, add).build().unwrap()
}

fn four_nodes(pages: usize) -> Allocator {
    four([pages; 4], |_, memory| memory)
}

/// The node of a page: by where its arena lies, which a page of each node tells.
struct Map(Vec<(usize, usize, usize)>);

impl Map {
    fn of(allocator: &Allocator, nodes: usize, pages: usize) -> Self {
        let place = |id| {
            let mut list = PageList::new();
            let all = Bulk::up_to(pages + 1).gfp(Gfp::NOWAIT | Gfp::THISNODE).exact_node(node(id));
            allocator.alloc_pages_bulk_list(all, &mut list).unwrap();
            let addrs: Vec<usize> = core::iter::from_fn(|| list.pop()).map(|page| page.addr()).collect();
            assert_eq!(addrs.len(), pages, "all of node {id}");
            (*addrs.iter().min().unwrap(), *addrs.iter().max().unwrap(), id)
        };
        let map = Self((0..nodes).map(place).collect());
        allocator.drain();
        map
    }
    fn node_of(&self, addr: usize) -> usize {
        let found: Vec<usize> =
            self.0.iter().filter(|(from, to, _)| (from..=to).contains(&&addr)).map(|place| place.2).collect();
        assert_eq!(found.len(), 1, "{addr:#x}");
        found[0]
    }
    fn count<'p>(&self, pages: impl IntoIterator<Item = &'p Page>) -> [usize; 4] {
        pages.into_iter().fold([0; 4], |mut counts, page| {
            counts[self.node_of(page.addr())] += 1;
            counts
        })
    }
}

fn by_node(allocator: &Allocator) -> Vec<Stats> {
    allocator.zoneinfo().into_iter().map(|zone| zone.stats).collect()
}

fn assert_all_back(allocator: &Allocator) {
    common::assert_all_back(allocator);
    let stats = allocator.stats();
    assert_eq!(stats.numa_hit + stats.numa_miss, stats.allocated);
    assert_eq!(stats.numa_local + stats.numa_other, stats.allocated);
    assert_eq!(stats.numa_miss, stats.numa_foreign);
}

#[test]
fn numa_hit_miss_and_foreign_are_exact() {
    let allocator = four_nodes(1024);
    go_to(5);
    // Node 2's own, to the last; then the nearest, node 3; then 0 (30 away), then 1.
    let (_own, shortfall) = bulk(&allocator, Bulk::up_to(1024));
    assert_eq!(shortfall, None);
    let count = |of: fn(&Stats) -> u64| by_node(&allocator).iter().map(of).collect::<Vec<_>>();
    assert_eq!(count(|stats| stats.numa_hit), [0, 0, 1024, 0]);
    let singles = singles(&allocator, 24);
    let (_rest, shortfall) = bulk(&allocator, Bulk::up_to(3000 - 24));
    assert_eq!(shortfall, None);
    assert_eq!(count(|stats| stats.numa_hit), [0, 0, 1024, 0]);
    assert_eq!(count(|stats| stats.numa_miss), [1024, 952, 0, 1024]);
    assert_eq!(count(|stats| stats.numa_foreign), [0, 0, 3000, 0]);
    assert_eq!(count(|stats| stats.numa_local), [0, 0, 1024, 0]);
    assert_eq!(count(|stats| stats.numa_other), [1024, 952, 0, 1024]);
    // A CPU of node 1 finds what is left there.
    go_to(2);
    let (left, shortfall) = bulk(&allocator, Bulk::up_to(73));
    assert_eq!((left.len(), shortfall), (72, Some(Shortfall { missing: 1, why: Why::Exhausted })));
    assert_eq!(count(|stats| stats.numa_hit), [0, 72, 1024, 0]);
    drop((_own, singles, _rest, left));
    assert_all_back(&allocator);
}

#[test]
fn blocks_fall_back_to_other_nodes_and_count_as_pages() {
    let allocator = four_nodes(1024);
    let order = Order::new(3).unwrap();
    go_to(0);
    let mut blocks = BlockList::new();
    let delivered = allocator.alloc_pages_bulk_list(Bulk::up_to(200).order(order), &mut blocks).unwrap();
    assert_eq!(delivered, Delivered { blocks: 200, shortfall: None });
    let single: Block = allocator.alloc_pages(Gfp::KERNEL, order).unwrap();
    let stats = by_node(&allocator);
    assert_eq!((stats[0].numa_hit, stats[1].numa_miss, stats[0].numa_foreign), (1024, 73 * 8, 73 * 8));
    drop((blocks, single));
    assert_all_back(&allocator);
}

#[test]
fn nowait_requests_take_one_page_at_a_time_of_other_nodes() {
    // C3.6: bulk goes on with the next node for KERNEL alone; the single attempt goes wherever it may.
    let allocator = four_nodes(512);
    go_to(0);
    let (mut pages, shortfall) = bulk(&allocator, Bulk::up_to(600).gfp(Gfp::NOWAIT));
    assert_eq!((pages.len(), shortfall), (512, Some(Shortfall { missing: 88, why: Why::Exhausted })));
    let (one, _) = bulk(&allocator, Bulk::up_to(600).gfp(Gfp::NOWAIT));
    assert_eq!(one.len(), 1);
    pages.extend(one);
    let (more, _) = bulk(&allocator, Bulk::up_to(600).gfp(Gfp::KERNEL | Gfp::THISNODE));
    assert_eq!(more.len(), 0);
    let (more, shortfall) = bulk(&allocator, Bulk::up_to(2000).gfp(Gfp::KERNEL));
    assert_eq!((more.len(), shortfall.is_some()), (4 * 512 - 513, true));
    drop((pages, more));
    assert_all_back(&allocator);
}

#[test]
fn interleave_divides_a_bulk_request() {
    let allocator = four_nodes(1024);
    let map = Map::of(&allocator, 4, 1024);
    let interleave = |n| Bulk::up_to(n).policy(Policy::Interleave(NodeMask::ALL));
    for cpu in [0, 3, 7] {
        go_to(cpu);
        let before = by_node(&allocator);
        let (pages, _) = bulk(&allocator, interleave(64));
        assert_eq!(map.count(&pages), [16; 4]);
        let counted: Vec<u64> = by_node(&allocator)
            .iter()
            .zip(&before)
            .map(|(now, then)| now.numa_interleave - then.numa_interleave)
            .collect();
        assert_eq!(counted, [16; 4]);
    }
    // The remainder goes to the nodes whose turn comes first; turns go on from call to call.
    for n in [1, 2, 3, 5, 63, 65, 66, 67, 1000, 1001] {
        let (pages, shortfall) = bulk(&allocator, interleave(n));
        let count = map.count(&pages);
        assert_eq!((count.iter().sum::<usize>(), shortfall), (n, None));
        assert!(count.iter().all(|&of_node| of_node == n / 4 || of_node == n.div_ceil(4)), "{n}: {count:?}");
    }
    // Each page takes one turn, however many a request has, wherever it goes on, and whatever it must have.
    let next = |n| bulk(&allocator, interleave(n)).0.iter().map(|page| map.node_of(page.addr())).collect::<Vec<_>>();
    let mut last = next(1)[0];
    for n in [1, 2, 3, 4, 5, 7, 64, 65, 600, 1] {
        let mut nodes = next(n);
        nodes.sort_unstable();
        let mut expected: Vec<usize> = (1..=n).map(|turn| (last + turn) % 4).collect();
        expected.sort_unstable();
        assert_eq!(nodes, expected, "{n} after node {last}");
        last = (last + n) % 4;
        allocator.alloc_pages_bulk_list(interleave(1), &mut PageList::new()).unwrap();
        let least = Bulk::at_least(6, 6).policy(Policy::Interleave(NodeMask::ALL));
        allocator.alloc_pages_bulk_list(least, &mut PageList::new()).unwrap();
        last = (last + 7) % 4;
    }
    // Single pages in turn; every form divides.
    let some = mask(&[1, 3]);
    let singles: Vec<Page> =
        (0..10).flat_map(|_| bulk(&allocator, Bulk::up_to(1).policy(Policy::Interleave(some))).0).collect();
    assert_eq!(map.count(&singles), [0, 5, 0, 5]);
    let request = Bulk::up_to(30).policy(Policy::Interleave(some));
    for (name, form) in FORMS {
        let (pages, _) = form(&allocator, request, 30).unwrap();
        assert_eq!(map.count(&pages), [0, 15, 0, 15], "{name}");
    }
    for (name, form) in EXACT_FORMS {
        let (pages, _) = form(&allocator, Bulk::exact(30).policy(Policy::Interleave(some)), 30).unwrap();
        assert_eq!(map.count(&pages), [0, 15, 0, 15], "{name}, exactly");
    }
    drop(singles);
    assert_all_back(&allocator);
}

#[test]
fn interleave_takes_missing_pages_of_other_nodes() {
    let allocator = four_nodes(512);
    let map = Map::of(&allocator, 4, 512);
    let (taken, _) = bulk(&allocator, Bulk::up_to(507).exact_node(node(2)));
    assert_eq!(map.count(&taken), [0, 0, 507, 0]);
    allocator.drain();
    let (pages, shortfall) = bulk(&allocator, Bulk::up_to(64).policy(Policy::Interleave(NodeMask::ALL)));
    let count = map.count(&pages);
    assert_eq!((count.iter().sum::<usize>(), shortfall), (64, None));
    assert_eq!(count[2], 5);
    assert!(count.iter().enumerate().all(|(id, &of_node)| id == 2 || of_node >= 16), "{count:?}");
    drop(pages);
    // The same for requests that may not wait, which go round once more; and one by one.
    allocator.drain();
    let request = Bulk::up_to(64).policy(Policy::Interleave(NodeMask::ALL));
    let (pages, shortfall) = bulk(&allocator, request.gfp(Gfp::NOWAIT));
    let count = map.count(&pages);
    assert_eq!((count.iter().sum::<usize>(), shortfall, count[2]), (64, None, 5));
    assert!(count.iter().enumerate().all(|(id, &of_node)| id == 2 || of_node >= 16), "{count:?}");
    let singles: Vec<Page> =
        (0..8).flat_map(|_| bulk(&allocator, Bulk::up_to(1).policy(Policy::Interleave(NodeMask::ALL))).0).collect();
    assert_eq!(map.count(&singles), [2, 2, 0, 4]);
    drop((taken, pages, singles));
    assert_all_back(&allocator);
}

#[test]
fn an_interleaving_allocator_divides_single_requests() {
    let distances = vec![vec![10, 20], vec![20, 10]];
    let allocator = Allocator::builder()
        .cpus(2, fake_cpu)
        .nodes(vec![node(0), node(1)], distances)
        .memory(Memory::anonymous(512))
        .memory(Memory::anonymous(512).node(node(1)))
        .policy(Policy::Interleave(NodeMask::ALL))
        .build()
        .unwrap();
    let pages = singles(&allocator, 100);
    let out: Vec<u64> = by_node(&allocator).iter().map(|stats| stats.allocated).collect();
    assert_eq!(out, [50, 50]);
    drop(pages);
    assert_all_back(&allocator);
}

#[test]
fn a_changed_allowed_set_holds_from_the_next_refill() {
    let allocator = four_nodes(1024);
    let map = Map::of(&allocator, 4, 1024);
    for n in [300, 900] {
        // Small requests go through the list, large ones past it.
        go_to(0);
        allocator.set_allowed_nodes(NodeMask::ALL).unwrap();
        let mut nodes = Vec::new();
        let mut kept = Vec::new();
        let delivered = allocator
            .alloc_pages_bulk_callback(Bulk::up_to(n), |page: Page| {
                nodes.push(map.node_of(page.addr()));
                kept.push(page);
                if kept.len() == 10 {
                    allocator.set_allowed_nodes(mask(&[3])).unwrap();
                }
            })
            .unwrap();
        assert_eq!((delivered.blocks, delivered.shortfall), (n, None));
        let first = nodes.iter().take_while(|&&node| node == 0).count();
        assert!((10..=64).contains(&first), "one section's pages at most were under way: {first}");
        assert!(nodes[first..].iter().all(|&node| node == 3), "{nodes:?}");
        drop(kept);
        allocator.drain();
    }
    // Plain requests are served elsewhere too, though the list of this CPU has pages of node 0.
    allocator.set_allowed_nodes(NodeMask::ALL).unwrap();
    let page = [(); 2].map(|()| allocator.alloc_page(Gfp::KERNEL).unwrap());
    assert_eq!(map.count(&page), [2, 0, 0, 0]);
    assert!(by_node(&allocator)[0].listed > 0);
    let next = {
        allocator.set_allowed_nodes(mask(&[1, 2])).unwrap();
        let next = allocator.alloc_page(Gfp::KERNEL).unwrap();
        assert_eq!(map.node_of(next.addr()), 1);
        // In bulk, too, the list is passed over, in each form and for one page or several.
        let listed = by_node(&allocator)[0].listed;
        for n in [1, 2, 40] {
            for gfp in [Gfp::KERNEL, Gfp::NOWAIT, Gfp::KERNEL | Gfp::ZERO] {
                assert_eq!(map.count(&bulk(&allocator, Bulk::up_to(n).gfp(gfp)).0), [0, n, 0, 0]);
            }
            for (name, form) in FORMS {
                let (pages, _) = form(&allocator, Bulk::up_to(n), n).unwrap();
                assert_eq!(map.count(&pages), [0, n, 0, 0], "{name} of {n}");
            }
            for (name, form) in EXACT_FORMS {
                let (pages, _) = form(&allocator, Bulk::exact(n), n).unwrap();
                assert_eq!(map.count(&pages), [0, n, 0, 0], "{name} of exactly {n}");
            }
        }
        assert_eq!(by_node(&allocator)[0].listed, listed, "nobody took from that list");
        next
    };
    let (none, shortfall) = bulk(&allocator, Bulk::up_to(5).nodes(mask(&[0, 3])));
    assert_eq!((none.len(), shortfall), (0, Some(Shortfall { missing: 5, why: Why::NotAllowed })));
    let nobody = Err(Error::Invalid(InvalidRequest::NoSuchNode { nodes: 1 << 9 }));
    assert_eq!(allocator.set_allowed_nodes(mask(&[9])), nobody);
    drop((page, next));
    assert_all_back(&allocator);
}

#[test]
fn thisnode_returns_no_remote_page() {
    let allocator = four_nodes(600);
    let map = Map::of(&allocator, 4, 600);
    go_to(6);
    let gfp = Gfp::KERNEL | Gfp::THISNODE;
    let (mut pages, shortfall) = bulk(&allocator, Bulk::up_to(590).gfp(gfp));
    assert_eq!((pages.len(), shortfall), (590, None));
    let singles = all(&allocator, gfp);
    assert_eq!(singles.len(), 10);
    let mut slots: Vec<Option<Page>> = (0..4).map(|_| None).collect();
    assert!(allocator.alloc_pages_bulk_array(Bulk::exact(1).gfp(gfp), &mut slots).is_err());
    assert!(slots.iter().all(Option::is_none));
    assert!(allocator.alloc_pages(gfp, Order::new(2).unwrap()).is_err());
    let (none, shortfall) = bulk(&allocator, Bulk::up_to(8).gfp(gfp));
    assert_eq!((none.len(), shortfall), (0, Some(Shortfall { missing: 8, why: Why::Exhausted })));
    pages.extend(singles);
    assert_eq!(map.count(&pages), [0, 0, 0, 600]);
    // Without the flag there is more than enough.
    assert_eq!(bulk(&allocator, Bulk::up_to(8)).0.len(), 8);
    drop(pages);
    assert_all_back(&allocator);
}

/// Its place in line, and those behind it, are for memory of the node that it began on.
#[test]
fn a_task_that_waits_for_this_node_keeps_its_node_on_other_cpus() {
    let allocator = four_nodes(64);
    let map = Map::of(&allocator, 4, 64);
    for policy in [Policy::Local, Policy::Bind(mask(&[0, 3]))] {
        go_to(0);
        let gfp = Gfp::KERNEL | Gfp::THISNODE;
        let mut pages = all(&allocator, gfp);
        assert_eq!(map.count(&pages), [64, 0, 0, 0]);
        let mut some = pin!(allocator.alloc_bulk_async::<_, Page>(Bulk::up_to(3).gfp(gfp).policy(policy)));
        let mut both = pin!(allocator.alloc_bulk_async::<_, Page>(Bulk::exact(2).gfp(gfp).policy(policy)));
        assert!(poll_once(some.as_mut(), Waker::noop()).is_pending());
        assert!(poll_once(both.as_mut(), Waker::noop()).is_pending());
        go_to(6);
        assert!(poll_once(some.as_mut(), Waker::noop()).is_pending(), "it took memory of another node");
        assert!(poll_once(both.as_mut(), Waker::noop()).is_pending(), "it took memory of another node");
        pages.truncate(61);
        let Poll::Ready(some) = poll_once(some, Waker::noop()) else { panic!("three pages of its node are free") };
        pages.truncate(59);
        let Poll::Ready(both) = poll_once(both, Waker::noop()) else { panic!("two pages of its node are free") };
        let mut lists = [some.unwrap(), both.unwrap()];
        let got: Vec<Page> = lists.iter_mut().flat_map(|list| core::iter::from_fn(|| list.pop())).collect();
        assert_eq!(map.count(&got), [5, 0, 0, 0]);
    }
    assert_all_back(&allocator);
}

#[test]
fn exact_node_bind_and_preferred_choose_the_node() {
    let allocator = four_nodes(600);
    let map = Map::of(&allocator, 4, 600);
    go_to(0);
    let of = |request| map.count(&bulk(&allocator, request).0);
    for gfp in [Gfp::KERNEL, Gfp::NOWAIT] {
        // From that node alone, or fewer; from wherever the caller is.
        assert_eq!(of(Bulk::up_to(700).gfp(gfp).exact_node(node(2))), [0, 0, 600, 0]);
        allocator.drain();
        assert_eq!(of(Bulk::up_to(64).gfp(gfp).exact_node(node(1))), [0, 64, 0, 0]);
        allocator.drain();
    }
    let mut list = PageList::new();
    assert!(allocator.alloc_pages_bulk_list(Bulk::exact(601).exact_node(node(2)), &mut list).is_err());
    assert!(list.is_empty());
    assert_eq!(of(Bulk::up_to(10).policy(Policy::Preferred(node(3)))), [0, 0, 0, 10]);
    assert_eq!(of(Bulk::up_to(700).policy(Policy::Preferred(node(3)))), [0, 0, 100, 600]);
    // Bound to two nodes: the nearer one first, and nothing beyond them.
    allocator.drain();
    assert_eq!(of(Bulk::up_to(700).policy(Policy::Bind(mask(&[1, 3])))), [0, 600, 0, 100]);
    allocator.drain();
    // Requests that may not wait are served in bulk by the nearest of them.
    assert_eq!(of(Bulk::up_to(700).policy(Policy::Bind(mask(&[1, 3]))).gfp(Gfp::NOWAIT)), [0, 600, 0, 0]);
    allocator.drain();
    assert_eq!(of(Bulk::up_to(2000).policy(Policy::Bind(mask(&[1, 3])))), [0, 600, 0, 600]);
    allocator.drain();
    // A nodemask narrows whatever policy there is.
    assert_eq!(of(Bulk::up_to(10).nodes(mask(&[2, 3]))), [0, 0, 10, 0]);
    let narrowed = Bulk::up_to(10).policy(Policy::Preferred(node(3))).nodes(mask(&[0, 1]));
    assert_eq!(of(narrowed).iter().take(2).sum::<usize>(), 10);
    assert_all_back(&allocator);
}

#[test]
fn a_node_without_memory_is_served_by_its_nearest() {
    let allocator = four([600, 0, 600, 600], |_, memory| memory);
    go_to(2);
    let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
    let (pages, _) = bulk(&allocator, Bulk::up_to(64));
    let zones = allocator.zoneinfo();
    let out: Vec<(usize, u64)> = zones.iter().map(|zone| (zone.node.get(), zone.stats.allocated)).collect();
    assert_eq!(out, [(0, 65), (2, 0), (3, 0)]);
    // A node without memory cannot be missed, so no miss is counted; nor are these pages local.
    assert_eq!((zones[0].stats.numa_hit, zones[0].stats.numa_other), (65, 65));
    drop((page, pages));
    assert_all_back(&allocator);
}

#[test]
fn lowmem_reserve_keeps_dma32_from_normal_requests() {
    let reserve = Watermarks { min: 20, low: 25, high: 30, lowmem_reserve: 100 };
    let allocator = Allocator::builder()
        .memory(Memory::anonymous(512).watermarks(Watermarks::above(20)))
        .memory(Memory::anonymous(512).dma32().watermarks(reserve))
        .cpus(1, || 0)
        .build()
        .unwrap();
    let all = |gfp| all(&allocator, gfp);
    // Normal memory first, then what the reserve leaves of the other.
    let normal = all(Gfp::NOWAIT);
    assert_eq!(normal.len(), (512 - 20) + (512 - 20 - 100));
    let low = all(Gfp::NOWAIT | Gfp::DMA32);
    assert_eq!(low.len(), 100);
    assert_eq!(all(Gfp::ATOMIC | Gfp::DMA32).len(), 10);
    let zones = allocator.zoneinfo();
    assert_eq!(zones.iter().map(|zone| zone.kind.name()).collect::<Vec<_>>(), ["DMA32", "Normal"]);
    assert_eq!(zones.iter().map(|zone| zone.managed).collect::<Vec<_>>(), [512, 512]);
    drop((normal, low));
    assert_all_back(&allocator);
    // Where no memory is declared so, the flag cannot be honoured.
    let plain = Allocator::builder().pages(8).build().unwrap();
    let refused = Error::Invalid(InvalidRequest::GfpUnsupported("DMA32"));
    assert_eq!(plain.alloc_page(Gfp::KERNEL | Gfp::DMA32).unwrap_err(), refused);
}

#[test]
fn a_bulk_call_is_counted_on_the_node_that_served_it() {
    let allocator = four_nodes(1024);
    let calls = || by_node(&allocator).iter().map(|stats| stats.bulk_alloc.iter().sum()).collect::<Vec<u64>>();
    go_to(0);
    let pages = bulk(&allocator, Bulk::up_to(64).policy(Policy::Preferred(node(2)))).0;
    assert_eq!((pages.len(), calls()), (64, vec![0, 0, 1, 0]));
    let more = bulk(&allocator, Bulk::up_to(64)).0;
    assert_eq!((more.len(), calls()), (64, vec![1, 0, 1, 0]));
}

/// Retiring a zone publishes a zonelist in which all later zones stand one place earlier.
#[test]
fn retiring_a_zone_amid_a_bulk_request_skips_no_other_zone() {
    let marks = Watermarks::NONE;
    let builder = Allocator::builder().cpus(1, || 0);
    let add = |builder: pagemill::Builder, _| builder.memory(Memory::anonymous(512).watermarks(marks));
    let allocator = (0..3).fold(builder, add).build().unwrap();
    let (first, mut pages) = (allocator.arenas()[0].id, Vec::<Page>::new());
    let delivered = allocator.alloc_pages_bulk_callback(Bulk::up_to(1536).gfp(Gfp::NOWAIT), |page| {
        pages.push(page);
        if pages.len() == 512 + 1 {
            assert_eq!(allocator.retire(first).unwrap().get(), 512, "the request is in the second zone");
        }
    });
    assert_eq!(delivered.unwrap(), Delivered { blocks: 1536, shortfall: None });
}

#[test]
fn zone_counters_never_decrease() {
    let allocator = four_nodes(512);
    go_to(2);
    let more = [1, 1, 3].map(|id| allocator.add_memory(Memory::anonymous(256).node(node(id))).unwrap());
    let (pages, _) = bulk(&allocator, Bulk::up_to(1000).exact_node(node(1)));
    assert_eq!(pages.len(), 1000);
    let kept = bulk(&allocator, Bulk::up_to(5).exact_node(node(1))).0;
    drop(pages);
    let before = by_node(&allocator);
    assert_eq!((before[1].allocated, before[1].numa_hit, before[1].freed), (1005, 1005, 1000));
    for arena in more {
        allocator.retire(arena).unwrap();
    }
    let zones = allocator.zoneinfo();
    let stats = &zones[1].stats;
    assert_eq!((stats.allocated, stats.numa_hit, stats.numa_local, stats.freed), (1005, 1005, 1005, 1000));
    assert!(zones.iter().zip(&before).all(|(zone, before)| zone.stats.refills >= before.refills));
    // Managed pages are those of the arenas that are left.
    let has: Vec<(u64, usize)> = zones.iter().map(|zone| (zone.managed, zone.buddy.len())).collect();
    assert_eq!(has, [(512, 1); 4]);
    assert!(zones.iter().all(|zone| zone.stats.free + zone.stats.listed <= 512));
    assert!(allocator.stats().free <= 4 * 512);
    let summed: u64 = zones.iter().map(|zone| zone.stats.allocated).sum();
    assert_eq!(summed, allocator.stats().allocated);
    drop(kept);
}

const CPUS: usize = 64;
const NODES: usize = 8;

/// A machine of two boards with four nodes each: 12 to the neighbours on a ring of the board, 14 across it, 22 and more
/// to the other board.
fn distance(from: usize, to: usize) -> u8 {
    let step = (from % 4).abs_diff(to % 4);
    let on_board = [0, 2, 4, 2][step];
    let across = if from / 4 == to / 4 { 0 } else { 12 };
    (10 + on_board + across) as u8
}

#[test]
fn each_of_64_cpus_is_served_by_nodes_in_order_of_distance() {
    const PAGES: usize = 1024;
    let nodes = (0..CPUS).map(|cpu| node(cpu % NODES)).collect();
    let distances = (0..NODES).map(|from| (0..NODES).map(|to| distance(from, to)).collect()).collect();
    let builder = Allocator::builder().cpus(CPUS, fake_cpu).nodes(nodes, distances);
    let builder = (0..NODES).fold(builder, |builder, id| builder.memory(Memory::anonymous(PAGES).node(node(id))));
    let allocator = builder.build().unwrap();
    let map = Map::of(&allocator, NODES, PAGES);

    // Every CPU is served by its own node.
    let before = allocator.stats();
    let mut pages = Vec::new();
    for at in 0..CPUS {
        go_to(at);
        let page = allocator.alloc_page(Gfp::KERNEL).unwrap();
        let (more, _) = bulk(&allocator, Bulk::up_to(64));
        assert!(more.iter().chain([&page]).all(|page| map.node_of(page.addr()) == at % NODES));
        pages.push(page);
        pages.extend(more);
    }
    let stats = allocator.stats();
    assert_eq!(stats.numa_hit - before.numa_hit, CPUS as u64 * 65);
    assert_eq!((stats.numa_miss, stats.numa_other), (before.numa_miss, before.numa_other));
    drop(pages);

    // From each node on, all memory: node after node, each emptied before the next, in order of distance.
    for home in 0..NODES {
        allocator.drain();
        go_to(home + 3 * NODES);
        for gfp in [Gfp::KERNEL, Gfp::NOWAIT] {
            let pages = all(&allocator, gfp);
            assert_eq!(pages.len(), PAGES * NODES);
            let order: Vec<usize> = pages.chunks(PAGES).map(|chunk| map.node_of(chunk[0].addr())).collect();
            for (chunk, &expected) in pages.chunks(PAGES).zip(&order) {
                assert!(chunk.iter().all(|page| map.node_of(page.addr()) == expected), "from node {home}");
            }
            assert_eq!(order[0], home);
            assert!(order.is_sorted_by_key(|&to| distance(home, to)), "from node {home}: {order:?}");
            drop(pages);
            allocator.drain();
        }
        let (pages, shortfall) = bulk(&allocator, Bulk::up_to(PAGES * NODES + 1));
        assert_eq!(shortfall, Some(Shortfall { missing: 1, why: Why::Exhausted }));
        let far: Vec<u8> = pages.iter().map(|page| distance(home, map.node_of(page.addr()))).collect();
        assert!(far.is_sorted(), "bulk, from node {home}");
    }
    assert_all_back(&allocator);
}
