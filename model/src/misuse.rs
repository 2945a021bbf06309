//! Misuse: it must be refused with the right reason, and change nothing (C2.4). Only for a world alone: beside other worlds, a
//! freed block may have a new owner already.
use crate::op::Wrong;
use crate::unit::Holding;
use crate::world::{Failure, World, demand};
use core::ptr;
use pagemill::{Block, Misuse, MisuseKind, Order, PAGE_SIZE, free_pages_bulk_raw, free_raw};

/// Frees an address that must be refused.
fn free_wrong(addr: usize, order: Order) -> Result<(), Misuse> {
    // SAFETY: the caller chose an address that the checked entry promises to refuse.
    unsafe { free_raw(ptr::with_exposed_provenance_mut(addr), order) }
}

impl World {
    pub(crate) fn misuse(&mut self, wrong: Wrong, which: usize, order: Order) -> Result<(), Failure> {
        assert!(self.zones.is_some(), "misuse is tried alone: a freed block may be somebody else's");
        match wrong {
            Wrong::Twice => self.free_twice(which),
            Wrong::TwiceInOneCall => self.free_twice_in_one_call(which, order),
            Wrong::Free => self.free_what_is_free(which, order),
            Wrong::Foreign => {
                let on_stack = 0u8;
                let elsewhere = ptr::from_ref(&on_stack).addr() & !(PAGE_SIZE - 1);
                let addr = [0, elsewhere, usize::MAX & !(PAGE_SIZE - 1)][which % 3];
                Self::refuse(free_wrong(addr, order), addr, &[MisuseKind::Foreign])
            }
            Wrong::Order => self.free_another(which, |holding| {
                let (is, freed) = (holding.block.order().get(), other_order(holding.block.order(), which));
                (holding.block.addr(), freed, MisuseKind::WrongOrder { handed_out: is, freed: freed.get() })
            }),
            Wrong::Inside => self.free_another(which, |holding| {
                let (addr, of) = (holding.block.addr(), holding.block.order());
                match of.pages().get() {
                    1 => (addr + 1, of, MisuseKind::Unaligned),
                    pages => (addr + (1 + which % (pages - 1)) * PAGE_SIZE, order, MisuseKind::Inside),
                }
            }),
            Wrong::Unaligned => self.free_another(which, |holding| {
                (holding.block.addr() + 1 + which % (PAGE_SIZE - 1), holding.block.order(), MisuseKind::Unaligned)
            }),
        }
    }

    fn refuse(result: Result<(), Misuse>, addr: usize, kinds: &[MisuseKind]) -> Result<(), Failure> {
        let is_right = result.is_err_and(|misuse| misuse.addr == addr && kinds.contains(&misuse.kind));
        demand!(is_right, "freeing {addr:#x} wrongly came to {result:?}, not {kinds:?}");
        Ok(())
    }

    fn free_twice(&mut self, which: usize) -> Result<(), Failure> {
        let Some(Holding { block, tag }) = self.pick_any(which) else { return Ok(()) };
        let (addr, order) = (block.addr(), block.order());
        self.give(addr, order, tag)?;
        let freed = block.free();
        demand!(freed.is_ok(), "freeing {addr:#x} came to {freed:?}");
        self.misused += 1;
        Self::refuse(free_wrong(addr, order), addr, &[MisuseKind::DoubleFree])
    }

    /// Each block is in the array twice: it is freed once and refused once, and its second slot stays.
    fn free_twice_in_one_call(&mut self, which: usize, order: Order) -> Result<(), Failure> {
        let mut addrs = Vec::new();
        while addrs.len() <= which % 40 {
            let Some((block, tag)) = self.pick::<Block>(order) else { break };
            let addr = block.into_raw().0.expose_provenance();
            self.give(addr, order, tag)?;
            addrs.push(addr);
        }
        let n = addrs.len();
        let twice = addrs.iter().chain(&addrs).map(|&addr| ptr::with_exposed_provenance_mut(addr));
        let mut slots: Vec<*mut u8> = twice.collect();
        // SAFETY: the world owned the blocks, and their handles are gone. That each block is there twice is the case under test.
        let result = unsafe { free_pages_bulk_raw(&mut slots, order) };
        if n == 0 {
            demand!(result == Ok(0), "freeing nothing came to {result:?}");
            return Ok(());
        }
        self.misused += n as u64;
        let Err((freed, misuse)) = result else {
            return Err(Failure::new(format!("freeing {n} blocks twice in one call came to {result:?}")));
        };
        demand!(freed == n, "{freed} of {n} blocks were freed that stood in one call twice");
        demand!(misuse.kind == MisuseKind::DoubleFree, "blocks that stand in one call twice: {misuse:?}");
        let stayed = slots[n..].iter().zip(&addrs).all(|(slot, &addr)| slot.addr() == addr);
        demand!(stayed && slots[..n].iter().all(|slot| slot.is_null()), "refused slots are not as they were");
        Ok(())
    }

    fn free_what_is_free(&mut self, which: usize, order: Order) -> Result<(), Failure> {
        let frames = self.zones.iter().flat_map(|zones| &zones.zones).map(|zone| zone.piece.pages).sum();
        let from = which % frames;
        let Some(frame) = self.ledger.owners_in(from..frames).position(|owner| owner == 0) else { return Ok(()) };
        let addr = self.ledger.addr_of(from + frame);
        self.misused += 1;
        Self::refuse(free_wrong(addr, order), addr, &[MisuseKind::DoubleFree, MisuseKind::Foreign])
    }

    /// Frees an address or order other than a held block's. The block stays as it is.
    fn free_another(
        &mut self,
        which: usize,
        choose: impl FnOnce(&Holding) -> (usize, Order, MisuseKind),
    ) -> Result<(), Failure> {
        let Some(holding) = self.pick_any(which) else { return Ok(()) };
        let (addr, order, kind) = choose(&holding);
        let (ptr, of) = holding.block.into_raw();
        let result = free_wrong(addr, order);
        self.misused += 1;
        // SAFETY: `into_raw` gave the block up, and the refused call has not freed it.
        let block = unsafe { Block::from_raw(ptr, of) };
        let block = block.map_err(|misuse| Failure::new(format!("a block that was given up is lost: {misuse}")))?;
        self.ledger.look(block.addr(), of, holding.tag)?;
        self.hold(block, holding.tag);
        Self::refuse(result, addr, &[kind])
    }
}

/// Another order than this one.
fn other_order(order: Order, which: usize) -> Order {
    let orders = usize::from(Order::MAX.get()) + 1;
    let other = (usize::from(order.get()) + 1 + which % (orders - 1)) % orders;
    Order::new(other as u8).unwrap_or(Order::ZERO)
}
