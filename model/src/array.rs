//! The array form, with holes.
use crate::op::Holes;
use crate::request::Request;
use crate::unit::Unit;
use crate::world::{Failure, World, demand};
use pagemill::Order;

/// Slots behind the request's n, which the request must not touch.
const BEHIND: usize = 3;

impl World {
    pub(crate) fn array<T: Unit>(&mut self, request: Request, holes: Holes) -> Result<(), Failure> {
        let (n, order) = (request.ask.most(), request.order);
        let (mut slots, tags) =
            self.slots::<T>(order, n + BEHIND, |i| if i < n { holes.is_hole(i, n) } else { i & 1 == 0 });
        let before: Vec<usize> = slots.iter().map(addr_in).collect();
        let had = before[..n].iter().filter(|&&addr| addr != 0).count();
        let (request, account) = self.begin(request, had);

        let result = self.allocator.alloc_pages_bulk_array(request.bulk(&account), &mut slots);
        let is_filled = result.is_ok();
        let (holes_left, first) =
            (slots[..n].iter().filter(|slot| slot.is_none()).count(), slots[..n].iter().position(Option::is_none));
        if let Ok(filled) = result {
            demand!(filled.occupied == n - holes_left, "{filled:?}, and {holes_left} of {n} slots are empty");
            demand!(filled.first_hole == first.unwrap_or(n), "{filled:?}, and the first hole is {first:?} of {n}");
            demand!(filled.added == filled.occupied - had, "{filled:?}, and {had} were occupied before");
        }
        let added = self.settle(&account, result.map(|filled| (filled.added, filled.shortfall)))?;
        demand!(n - holes_left == had + added, "an array has {} of {n} slots, not {had} + {added}", n - holes_left);

        // New blocks fill the first holes. Everything else is as it was.
        let told = self.told(request.gfp, order);
        let mut new = 0;
        for (i, (slot, &addr)) in slots.into_iter().zip(&before).enumerate() {
            match (slot, addr) {
                (Some(unit), 0) => {
                    demand!(is_filled && i < n, "slot {i} of {n} was filled");
                    new += 1;
                    self.hold_new(unit.into_block(), request.gfp, told)?;
                }
                (Some(unit), addr) => {
                    demand!(unit.addr() == addr, "slot {i} held {addr:#x} and holds {:#x}", unit.addr());
                    self.hold(unit.into_block(), tags[i]);
                }
                (None, addr) => {
                    demand!(addr == 0, "slot {i} lost {addr:#x}");
                    demand!(i >= n || new == added, "slot {i} is empty, and {} blocks stand behind it", added - new);
                }
            }
        }
        self.end()
    }

    /// An array of `n` slots, and the tags of its blocks. A slot is empty if `is_hole` says so, or if no block of that order is
    /// held.
    pub(crate) fn slots<T: Unit>(
        &mut self,
        order: Order,
        n: usize,
        is_hole: impl Fn(usize) -> bool,
    ) -> (Vec<Option<T>>, Vec<u32>) {
        let held = (0..n).map(|i| if is_hole(i) { None } else { self.pick::<T>(order) });
        held.map(|held| held.map_or((None, 0), |(unit, tag)| (Some(unit), tag))).unzip()
    }
}

/// The address in a slot, 0 if it is empty.
pub(crate) fn addr_in<T: Unit>(slot: &Option<T>) -> usize {
    slot.as_ref().map_or(0, Unit::addr)
}
