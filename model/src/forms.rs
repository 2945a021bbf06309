//! Single pages and blocks; and the list, callback and runs forms.
use crate::request::{How, Request};
use crate::unit::{Holding, Unit};
use crate::world::{Failure, World, demand};
use pagemill::{Block, Bulk, Error, Gfp, InvalidRequest, List, Order, PAGE_SIZE, Page};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// The payload with which a callback unwinds.
struct Stop;

impl World {
    /// Allocates one page or one block.
    pub(crate) fn one(&mut self, request: Request) -> Result<(), Failure> {
        let how = How { is_drained: request.how.is_drained, is_dma32: request.how.is_dma32, ..How::PLAIN };
        let (request, _) = self.begin(Request { how, ..request }, 0);
        let Request { gfp, order, .. } = request;
        let result = match order {
            Order::ZERO => self.allocator.alloc_page(gfp).map(Block::from),
            _ => self.allocator.alloc_pages(gfp, order),
        };
        self.reconcile()?;
        let bounds = self.bounds();
        self.check_refusal(result.as_ref().err())?;
        match result {
            Ok(block) => {
                demand!(bounds.high == 1, "a block of order {} came, and there is none", order.get());
                demand!(block.order() == order, "a block of order {} came, not {}", block.order().get(), order.get());
                let told = self.told(gfp, order);
                self.hold_new(block, gfp, told)?;
            }
            Err(Error::Exhausted(exhausted)) => {
                demand!(bounds.low == 0, "a request failed that {} block waits for: {exhausted}", bounds.low);
                demand!(exhausted.wanted - exhausted.got == 1, "one block failed, and {exhausted:?}");
                self.check_why(exhausted.why, 0, 1, false)?;
            }
            Err(_) => {}
        }
        self.end()
    }

    pub(crate) fn split(&mut self, which: usize, keep: usize) -> Result<(), Failure> {
        let Some(Holding { block, tag }) = self.pick_any(which) else { return Ok(()) };
        let (addr, order) = (block.addr(), block.order());
        // A whole pageblock keeps the mobility with which it was requested; the mobility of a smaller block is not known.
        let frame = self.ledger.frame_of(addr);
        let zone = self.zones.as_mut().filter(|_| order >= Order::PAGEBLOCK).and_then(|zones| zones.at(frame));
        let told = zone.and_then(|(_, zone)| zone.expect.mobility_of(frame));
        self.give(addr, order, tag)?;
        let mut pages = block.split();
        demand!(pages.len() == order.pages().get(), "order {} split into {} pages", order.get(), pages.len());
        for (i, page) in pages.by_ref().take(keep).enumerate() {
            demand!(page.addr() == addr + i * page.len(), "page {i} of a split block is at {:#x}", page.addr());
            self.hold_new(page.into(), Gfp::KERNEL, told)?;
        }
        drop(pages);
        Ok(())
    }

    // ── lists ──────────────────────────────────────────────────────────────────────────────────────────────────

    pub(crate) fn list<T: Unit>(&mut self, request: Request) -> Result<(), Failure> {
        let mut hand = core::mem::take(T::hand(self));
        let (had, of) = (hand.list.len(), hand.list.order());
        demand!(had == hand.items.len(), "a list of {} has {had} blocks", hand.items.len());
        let (request, account) = self.begin(request, 0);
        let Request { gfp, order, .. } = request;
        let result = self.allocator.alloc_pages_bulk_list(request.bulk(&account), &mut hand.list);
        if had > 0 && of != order {
            let is_refused = matches!(result, Err(Error::Invalid(InvalidRequest::ListOrder { .. })));
            demand!(
                is_refused || self.check_refusal(result.as_ref().err()).is_ok(),
                "a list of order {} took order {}: {result:?}",
                of.get(),
                order.get()
            );
            self.asked = None;
        } else {
            let added = self.settle(&account, result.map(|done| (done.blocks, done.shortfall)))?;
            demand!(hand.list.len() == had + added, "a list of {had} and {added} has {}", hand.list.len());
        }
        // Takes all blocks off and checks them: first those that were there, then the new ones.
        let told = self.told(gfp, order);
        let units: Vec<T> = hand.list.by_ref().collect();
        for (i, unit) in units.iter().enumerate() {
            match hand.items.get(i) {
                Some(&(addr, _)) => {
                    demand!(unit.addr() == addr, "{:#x} is {i}th on a list, not {addr:#x}", unit.addr())
                }
                None => {
                    let tag = self.next_tag();
                    self.take(unit.addr(), order, gfp, tag, told)?;
                    hand.items.push_back((unit.addr(), tag));
                }
            }
        }
        hand.list.extend(units);
        *T::hand(self) = hand;
        self.end()
    }

    pub(crate) fn list_pop<T: Unit>(&mut self, n: usize) -> Result<(), Failure> {
        for _ in 0..n {
            let hand = T::hand(self);
            match (hand.list.pop(), hand.items.pop_front()) {
                (Some(unit), Some((addr, tag))) => {
                    demand!(unit.addr() == addr, "{:#x} is at the head of a list, not {addr:#x}", unit.addr());
                    self.hold(unit.into_block(), tag);
                }
                (None, None) => break,
                (unit, item) => {
                    return Err(Failure::new(format!("a list has {:?}, not {item:?}", unit.map(|unit| unit.addr()))));
                }
            }
        }
        Ok(())
    }

    /// Puts held blocks on the list: one by one, or all on another list that is joined to it.
    pub(crate) fn list_push<T: Unit>(&mut self, order: Order, n: usize, is_join: bool) -> Result<(), Failure> {
        let mut hand = core::mem::take(T::hand(self));
        let mut other = List::new();
        let fits = hand.list.is_empty() || hand.list.order() == order;
        let mut pushed = Vec::new();
        while pushed.len() < n && (fits || is_join) {
            let Some((unit, tag)) = self.pick::<T>(order) else { break };
            pushed.push((unit.addr(), tag));
            let on_list = if is_join { other.push(unit) } else { hand.list.push(unit) };
            demand!(on_list.is_ok(), "a list of order {} refused a block of that order", order.get());
        }
        let joined = hand.list.append(&mut other);
        if joined.is_ok() {
            demand!(other.is_empty(), "{} blocks stayed on a list that was joined to another", other.len());
            hand.items.extend(pushed);
        } else {
            demand!(!fits && other.len() == pushed.len(), "two lists were not joined: {joined:?}");
            for (unit, (_, tag)) in other.by_ref().zip(pushed) {
                self.hold(unit.into_block(), tag);
            }
        }
        demand!(hand.list.len() == hand.items.len(), "a list of {} has {}", hand.items.len(), hand.list.len());
        *T::hand(self) = hand;
        Ok(())
    }

    // ── callback ───────────────────────────────────────────────────────────────────────────────────────────────

    pub(crate) fn callback<T: Unit>(
        &mut self,
        request: Request,
        unwind: Option<usize>,
        nested: Option<usize>,
    ) -> Result<(), Failure> {
        let (request, account) = self.begin(request, 0);
        let (mut got, mut own, mut is_alone) = (Vec::<T>::new(), Vec::<Page>::new(), true);
        let allocator = &self.allocator;
        // The pages that the callback itself requests must not wait, because they are not in the plan.
        let nested_gfp = if request.gfp.may_wait() { request.gfp | Gfp::NORETRY } else { request.gfp };
        let result = catch_unwind(AssertUnwindSafe(|| {
            let bulk = request.describe(Bulk::up_to(request.ask.most()), &account);
            allocator.alloc_pages_bulk_callback(bulk, |unit| {
                got.push(unit);
                if nested.is_some_and(|every| got.len().is_multiple_of(every)) {
                    is_alone = false;
                    own.extend(allocator.alloc_page(nested_gfp));
                }
                if unwind == Some(got.len() - 1) {
                    resume_unwind(Box::new(Stop));
                }
            })
        }));
        // The callback's own requests, successful or not, may have shrunk the cache for both.
        let high = if is_alone { self.bounds().high } else { request.ask.most() };
        let is_disturbed = !is_alone || result.is_err();
        match result {
            Ok(result) if is_alone => {
                let added = self.settle(&account, result.map(|done| (done.blocks, done.shortfall)))?;
                demand!(added == got.len(), "{} blocks were handed over, {added} are said to", got.len());
            }
            // The callback took pages itself, so fewer may have been left.
            Ok(result) => demand!(
                result.as_ref().is_ok_and(|done| done.blocks == got.len()) && got.len() <= high,
                "{} blocks were handed over, and {result:?}",
                got.len()
            ),
            Err(payload) if payload.is::<Stop>() => demand!(got.len() <= high, "too many: at most {high} were there"),
            Err(payload) => resume_unwind(payload),
        }
        self.reconcile()?;
        if is_disturbed {
            self.disturbed();
        }
        let told = self.told(request.gfp, request.order);
        for unit in got {
            self.hold_new(unit.into_block(), request.gfp, told)?;
        }
        self.end()?;
        for page in own {
            self.hold_new(page.into(), request.gfp, None)?;
        }
        Ok(())
    }

    // ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────

    pub(crate) fn runs<T: Unit>(&mut self, request: Request) -> Result<(), Failure> {
        let mut hand = core::mem::take(T::runs(self));
        let before: Vec<_> = hand.runs.iter().map(|run| (run.addr(), run.len())).collect();
        let (request, account) = self.begin(request, 0);
        let Request { gfp, order, .. } = request;
        let result = self.allocator.alloc_pages_bulk_runs(request.bulk(&account), &mut hand.runs);
        let added = self.settle(&account, result.map(|done| (done.blocks, done.shortfall)))?;

        let told = self.told(gfp, order);
        let mut blocks = 0;
        let mut end = 0;
        for (i, run) in hand.runs.iter().enumerate() {
            if let Some(&known) = before.get(i) {
                demand!(
                    (run.addr(), run.len()) == known,
                    "run {i} was {known:?}, and is {:?}",
                    (run.addr(), run.len())
                );
                continue;
            }
            demand!(run.addr() != end, "two runs meet at {end:#x}");
            demand!(run.bytes() == run.len() * order.bytes(), "{} blocks have {} bytes", run.len(), run.bytes());
            end = run.addr() + run.bytes();
            let tag = self.next_tag();
            for block in 0..run.len() {
                self.take(run.addr() + block * order.bytes(), order, gfp, tag, told)?;
            }
            blocks += run.len();
            hand.tags.push((tag, order));
        }
        demand!(blocks == added, "runs of {blocks} blocks came, {added} are said to");
        *T::runs(self) = hand;
        self.end()
    }

    /// A run of neighbouring pages. Where nothing but its number decides, it must come exactly if so many neighbours are free.
    pub(crate) fn contig(&mut self, gfp: Gfp, n: usize) -> Result<(), Failure> {
        let is_told = self.zones.is_some() && self.machine.is_none() && !self.is_failing;
        if is_told {
            self.allocator.drain();
        }
        let owners: Vec<_> =
            if is_told { self.ledger.owners_in(0..self.ledger.frames()).collect() } else { Vec::new() };
        let has_run = owners.split(|&owner| owner != 0).any(|free| free.len() >= n);
        // Nodes are counted, and take turns, as for other requests; the model does not follow it.
        self.counts.is_known = false;
        self.zones.iter_mut().for_each(|zones| zones.turn = None);
        match self.allocator.alloc_contig(gfp, n) {
            Ok(run) => {
                demand!(run.len() == n && (has_run || !is_told), "a run of {} pages came for one of {n}", run.len());
                let (tag, told) = (self.next_tag(), self.told(gfp, Order::ZERO));
                for page in 0..n {
                    self.take(run.addr() + page * PAGE_SIZE, Order::ZERO, gfp, tag, told)?;
                }
                self.page_runs.runs.push(run);
                self.page_runs.tags.push((tag, Order::ZERO));
            }
            Err(Error::Exhausted(why)) => {
                demand!(n > 0 && (why.wanted, why.got) == (n, 0), "a run of {n} pages failed: {why}");
                demand!(!is_told || !has_run, "a run of {n} pages failed, and there is one: {why}");
            }
            Err(Error::Invalid(InvalidRequest::NoPages)) => demand!(n == 0, "a run of {n} pages has none"),
            Err(Error::Invalid(InvalidRequest::MoreThanManaged { blocks, most, .. })) => {
                demand!(blocks == n && n > most, "a run of {n} pages is above the most, {most}");
            }
            Err(error) => demand!(!is_told, "a run of {n} pages: {error}"),
        }
        Ok(())
    }

    pub(crate) fn run_split(&mut self, which: usize, keep: usize) -> Result<(), Failure> {
        let hand = &mut self.page_runs;
        if hand.runs.is_empty() {
            return Ok(());
        }
        let at = which % hand.runs.len();
        let (run, (tag, _)) = (hand.runs.swap_remove(at), hand.tags.swap_remove(at));
        let len = run.len();
        let mut pages = run.into_pages();
        demand!(pages.len() == len, "a run of {len} became {} pages", pages.len());
        for page in pages.by_ref().take(keep) {
            self.hold(page.into(), tag);
        }
        let left = pages.len();
        let Some(first) = pages.next() else { return Ok(()) };
        for i in 0..left {
            self.give(first.addr() + i * first.len(), Order::ZERO, tag)?;
        }
        drop(first);
        drop(pages);
        Ok(())
    }
}
