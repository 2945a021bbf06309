//! A request from beginning to end: the model works out what it must get before, and compares afterwards.
use crate::expect::Bounds;
use crate::plan::{Hidden, Plan, Wanted, Zone};
use crate::request::{Ends, How, Place, Request};
use crate::world::{Failure, World, demand};
use pagemill::{Account, Error, Exhausted, Gfp, InvalidRequest, NodeId, Shortfall, Stats, Why, ZoneInfo, ZoneKind};

/// A request under way.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) request: Request,
    pub(crate) plan: Plan,
    /// The number of blocks that came from each zone.
    pub(crate) got: Vec<usize>,
    /// Its number of blocks in all, including those that an array had already.
    had: usize,
    /// The number of turns that it takes, if nodes take turns for it.
    turns: usize,
    /// The least number of frames in each zone that are neither out nor on a list.
    bare: Vec<usize>,
    /// The errors with which it must be refused, because no state of the allocator could serve it; `None` if they are not known.
    refusals: Option<Vec<InvalidRequest>>,
    /// It misses nothing, so it ends before it could be refused.
    is_stopped: bool,
    /// The number of waits that had ended before it, unless other threads waited meanwhile.
    waits: Option<u64>,
}

impl How {
    /// No options.
    pub(crate) const PLAIN: Self =
        Self { is_drained: false, is_dma32: false, place: Place::Anywhere, ends: Ends::Alone, account: None };
}

impl World {
    /// Adapts a request to this machine, and works out what it must get. `had` of its blocks are there already.
    pub(crate) fn begin(&mut self, mut request: Request, had: usize) -> (Request, Account) {
        let missing = request.ask.most() - had;
        let Some(zones) = &self.zones else {
            request.how = How::PLAIN;
            self.asked = Some(self.unknown(request, had));
            return (request, request.account());
        };
        if request.how.is_dma32 && zones.has_dma32() {
            request.gfp = request.gfp | Gfp::DMA32;
        }
        if request.how.is_drained {
            self.allocator.drain();
        }
        // This request would wait some tenths of a second for each page that the cache lacks.
        if self.cache.is_registered() && request.gfp.contains(Gfp::RETRY_MAYFAIL) {
            request.gfp = request.gfp.noretry();
        }
        let here = self.node_here();
        let frames = request.order.pages().get();
        let mut wanted = Wanted { missing, needed: request.ask.least().saturating_sub(had) };
        if let Some(limit) = request.how.account {
            let granted = (missing * frames).min(limit) / frames;
            wanted.missing = if granted < wanted.needed { 0 } else { granted };
        }
        let listed = self.listed();
        let cached: Vec<usize> = zones.zones.iter().map(|zone| self.cache.frames_of(&self.ledger, zone)).collect();
        let hidden = Hidden { listed: &listed, cached: &cached, is_unsure: self.is_failing };
        let plan = zones.plan(&self.ledger, &request, here, wanted, hidden);
        // If the cache has too little, this request would wait some tenths of a second for nothing.
        let is_in_vain = plan.bounds.low < wanted.missing && plan.is_in_vain != Some(false);
        if is_in_vain && self.cache.is_registered() && request.gfp.may_wait() && request.how.ends == Ends::Alone {
            request.gfp = request.gfp | Gfp::NORETRY;
        }
        let n = wanted.missing;
        let bare = zones.zones.iter().zip(&listed).map(|(zone, listed)| zone.expect.free().saturating_sub(*listed));
        let (bare, got) = (bare.collect(), vec![0; zones.zones.len()]);
        let at_once = if request.ask.most() > 0 { vec![1, wanted.needed] } else { Vec::new() };
        let refusals = at_once.into_iter().filter_map(|blocks| zones.refusal(&request, here, blocks)).collect();
        let (waits, is_stopped) = (Some(self.allocator.stats().waits), n == 0);
        self.asked =
            Some(Asked { request, plan, got, had, turns: n, bare, refusals: Some(refusals), is_stopped, waits });
        (request, request.account())
    }

    /// If other threads use the allocator, any result is possible.
    fn unknown(&self, request: Request, had: usize) -> Asked {
        let plan = Plan {
            bounds: Bounds::up_to(request.ask.most() - had),
            of_zone: None,
            may_have: Vec::new(),
            wanted: None,
            divided: None,
            is_in_vain: None,
        };
        let (got, bare) = (Vec::new(), Vec::new());
        Asked { request, plan, got, had, turns: 0, bare, refusals: None, is_stopped: false, waits: None }
    }

    /// The node of the CPU on which this thread runs.
    pub(crate) fn node_here(&self) -> NodeId {
        self.machine
            .as_ref()
            .map_or(NodeId::ZERO, |built| built.machine.node_of_cpu.get((self.here)()).copied().unwrap_or(NodeId::ZERO))
    }

    /// An upper bound of the frames on each zone's lists: the dumps put zones of one node and kind together.
    fn listed(&self) -> Vec<usize> {
        let Some(zones) = &self.zones else { return Vec::new() };
        if let [zone] = &zones.zones[..] {
            return vec![(self.allocator.stats().listed as usize).min(zone.expect.free())];
        }
        let dumps = self.allocator.zoneinfo();
        let of = |zone: &Zone| {
            let is_its = |dump: &&ZoneInfo| dump.node == zone.piece.node && is_dma32(dump) == zone.piece.is_dma32;
            dumps.iter().find(is_its).map_or(0, |dump| dump.stats.listed as usize)
        };
        zones.zones.iter().map(|zone| if zone.is_retired { 0 } else { of(zone).min(zone.expect.free()) }).collect()
    }

    /// The request that [`begin`](Self::begin) began.
    fn asked(&self) -> &Asked {
        match &self.asked {
            Some(asked) => asked,
            None => unreachable!("no request was begun"),
        }
    }

    pub(crate) fn bounds(&self) -> Bounds {
        self.asked().plan.bounds
    }

    /// The request will not wait any more: it ended before a wait, or has what it must get.
    fn waits_no_more(&mut self) {
        if let Some(asked) = &mut self.asked {
            asked.plan.is_in_vain = asked.plan.is_in_vain.and(Some(false));
        }
    }

    /// Compares the error with which the request was refused, if any, with those that are due. Any other is a failure.
    pub(crate) fn check_refusal(&mut self, error: Option<&Error>) -> Result<(), Failure> {
        let Asked { request, refusals, is_stopped, .. } = self.asked();
        let known = refusals.as_ref();
        match error {
            Some(Error::Invalid(why)) => {
                let is_right = known.map_or(
                    matches!(*why, InvalidRequest::MoreThanManaged { blocks, most, .. } if blocks > most),
                    |known| known.contains(why),
                );
                demand!(is_right, "{request:?} was refused: {why}; not {known:?}");
                self.counts_are_unknown();
                self.waits_no_more();
                self.zones.iter_mut().for_each(|zones| zones.turn = None); // The request may have taken a turn first.
            }
            _ => demand!(
                *is_stopped || known.is_none_or(Vec::is_empty),
                "{request:?} was not refused, as {known:?}, but {error:?}"
            ),
        }
        Ok(())
    }

    /// Compares the result of a bulk request. Returns the number of blocks that it added, 0 on an error.
    pub(crate) fn settle(
        &mut self,
        account: &Account,
        result: Result<(usize, Option<Shortfall>), Error>,
    ) -> Result<usize, Failure> {
        self.reconcile()?;
        let Asked { request, had, .. } = *self.asked();
        let (ask, bounds) = (request.ask, self.bounds());
        let (least, most) = (ask.least(), ask.most());
        let frames = request.order.pages().get();
        let charged = account.charged().get();
        let how = format!("{request:?} with {had} occupied");
        self.check_refusal(result.as_ref().err())?;
        match result {
            Ok((added, shortfall)) => {
                demand!(bounds.admit(added), "{how} brought {added}, not {bounds:?}");
                let now = had + added;
                demand!(now >= least, "{how} came back with {now} and no error");
                if least > 0 {
                    self.waits_no_more();
                }
                demand!(
                    shortfall.is_some() == (now < most) && shortfall.is_none_or(|short| short.missing == most - now),
                    "{how} has {now} and says {shortfall:?}"
                );
                if let Some(shortfall) = shortfall {
                    self.check_why(shortfall.why, added, 1, added > 0 && !request.tries_for_all())?;
                }
                if request.how.account.is_some() {
                    demand!(charged == added * frames, "{how} brought {added} blocks and was charged {charged} pages");
                }
                Ok(added)
            }
            Err(Error::Exhausted(Exhausted { wanted, got, why, .. })) => {
                demand!(least > 0 && got < least && wanted == least, "{how} failed with {got} of {wanted}: {why}");
                // If the free count shows too few, the allocator does not take more than a list's batch.
                let is_untried = request.gfp.may_wait() && least - had > 64 && got == had;
                let is_due = is_untried || (had + bounds.low..=had + bounds.high).contains(&got);
                demand!(is_due, "{how} failed with {got}, not {bounds:?} more");
                self.check_why(why, got - had, least - got, false)?;
                demand!(charged == 0, "{how} failed and was charged {charged} pages");
                self.counts_are_unknown();
                Ok(0)
            }
            Err(_) => {
                demand!(charged == 0, "{how} was refused and was charged {charged} pages");
                Ok(0)
            }
        }
    }

    /// Checks the reason. `needed` more blocks were necessary. `is_content`: the request keeps what it got, and has not waited for
    /// more.
    pub(crate) fn check_why(&self, why: Why, added: usize, needed: usize, is_content: bool) -> Result<(), Failure> {
        let asked = self.asked();
        let Asked { request, plan, bare, .. } = asked;
        let frames = request.order.pages().get();
        let is_broke = request.how.account.is_some_and(|limit| (added + needed) * frames > limit);
        let is_nowhere = !plan.may_have.is_empty() && !plan.may_have.contains(&true);
        // A request that failed has given back what it took.
        let taken = if is_content { added * frames } else { 0 };
        let is_marked = |is_sure: bool| {
            let Some(zones) = &self.zones else { return false };
            let mine = zones.zones.iter().enumerate().filter(|(at, _)| plan.may_have[*at]);
            mine.into_iter().any(|(at, zone)| {
                let (low, min) = zone.floors(request.gfp);
                let floor = if is_content { low } else { min };
                floor > 0 && if is_sure { bare[at] > taken } else { zone.expect.free() + added > 0 }
            })
        };
        let is_late = request.how.ends == Ends::Expired && request.gfp.may_wait() && !is_content;
        let is_cancelled = request.is_cancelled() && !is_content;
        let is_in_turn = request.gfp.contains(Gfp::THISNODE) && plan.wanted.is_none();
        let is_right = match why {
            Why::Account => is_broke,
            _ if is_broke => false,
            Why::Cancelled => is_cancelled,
            _ if is_cancelled => false,
            Why::NotAllowed => is_nowhere || is_in_turn,
            _ if is_nowhere => false,
            Why::Fault => self.allocator.stats().faults > 0,
            Why::TimedOut => is_late,
            _ if is_late => false,
            // The model does not know which of the nodes that take turns was meant.
            Why::BelowMark | Why::Exhausted if is_in_turn => true,
            Why::BelowMark => is_marked(false),
            Why::Exhausted => !is_marked(true),
            _ => false,
        };
        demand!(is_right, "{request:?} lacks some and says {why:?}");
        Ok(())
    }

    /// Ends a request after its blocks have been recorded: checks the zones that they came from, and the counters.
    pub(crate) fn end(&mut self) -> Result<(), Failure> {
        let Some(asked) = self.asked.take() else { return Ok(()) };
        let Asked { request, plan, got, turns, waits, .. } = asked;
        let Some(zones) = &mut self.zones else { return Ok(()) };
        zones.take_turns(&request, turns);
        let came: usize = got.iter().sum();
        if came == 0 && request.ask.least() > 1 {
            // The request may or may not have taken a turn, so the next turn is not known.
            zones.turn = None;
        }
        if let Some(of_zone) = plan.of_zone.as_ref().filter(|_| came > 0) {
            demand!(got == *of_zone, "{request:?} got {got:?} of the zones, not {of_zone:?}");
        }
        self.check_division(&plan, &request, &got)?;
        let waited = waits.map_or(0, |before| self.allocator.stats().waits - before);
        let is_bounded = matches!(request.how.ends, Ends::Expired | Ends::CancelledBeforeDeadline);
        let may_sit_down = request.gfp.may_wait() && (is_bounded || self.cache.is_registered());
        demand!(waited <= u64::from(may_sit_down), "{request:?} waited {waited} times");
        if let (Some(is_in_vain), true) = (plan.is_in_vain, is_bounded && request.gfp.may_wait()) {
            demand!(waited == u64::from(is_in_vain), "{request:?} waited {waited} times, in vain: {is_in_vain}");
        }
        self.count(&request, plan.wanted, plan.divided.is_some(), &got);
        Ok(())
    }

    /// Checks that each node brought its share of a request for which nodes take turns.
    fn check_division(&self, plan: &Plan, request: &Request, got: &[usize]) -> Result<(), Failure> {
        let (Some((among, first)), Some(zones)) = (plan.divided, &self.zones) else { return Ok(()) };
        let (came, count) = (got.iter().sum::<usize>(), among.count());
        let mut node = first;
        for at in 0..count {
            // If the first turn is not known, each node may have one block more.
            let Some(of) = node.or_else(|| among.iter().nth(at)) else { break };
            let its = zones.zones.iter().zip(got).filter(|(zone, _)| zone.piece.node == of);
            let n: usize = its.map(|(_, got)| got).sum();
            let share = came / count + usize::from(at < came % count);
            let is_right = n == share || (first.is_none() && (came / count..=came.div_ceil(count)).contains(&n));
            demand!(is_right || came == 0, "{request:?}: {of} gave {n} of {came} in turn, not {share}: {got:?}");
            node = node.and_then(|node| among.next_after(node));
        }
        Ok(())
    }

    /// Counts the blocks of a request, as the allocator must (C3.13).
    fn count(&mut self, request: &Request, wanted: Option<NodeId>, is_divided: bool, got: &[usize]) {
        let here = self.node_here();
        let Some(zones) = &self.zones else { return };
        for (zone, &blocks) in zones.zones.iter().zip(got) {
            let pages = (blocks * request.order.pages().get()) as u64;
            let (node, counts) = (zone.piece.node, &mut self.counts);
            if node != here {
                counts.of(node).other += pages;
            }
            match wanted {
                Some(wanted) if wanted != node => {
                    counts.of(node).miss += pages;
                    counts.of(wanted).foreign += pages;
                }
                None if is_divided => counts.of(node).interleave += pages,
                // If a node that takes turns lacks its share, the model does not know which node counts a miss.
                None if pages > 0 => counts.is_known = false,
                _ => {}
            }
        }
    }

    /// Other threads took blocks meanwhile, or freed some that this world did not see.
    pub(crate) fn disturbed(&mut self) {
        if let Some(asked) = &mut self.asked {
            let Plan { bounds, may_have, .. } = asked.plan.clone();
            asked.plan = Plan { bounds, may_have, of_zone: None, wanted: None, divided: None, is_in_vain: None };
            asked.waits = None;
        }
        self.zones.iter_mut().for_each(|zones| zones.turn = None);
        self.counts_are_unknown();
    }

    /// Blocks were taken and freed that this world did not see.
    pub(crate) fn counts_are_unknown(&mut self) {
        self.counts.is_known = false;
    }

    /// After each operation, compares the counts of hits, misses and the rest.
    pub(crate) fn check_counts(&mut self) -> Result<(), Failure> {
        if self.machine.is_none() {
            return Ok(()); // With one zone every page is a hit, and walking a large zone takes long.
        }
        let mut found = Counts::default();
        for dump in self.allocator.zoneinfo() {
            let Stats { allocated, numa_hit, numa_miss, numa_foreign, numa_interleave, numa_local, numa_other, .. } =
                dump.stats;
            let node = dump.node;
            demand!(numa_hit + numa_miss == allocated, "{node}: {numa_hit} hits, {numa_miss} misses of {allocated}");
            demand!(numa_local + numa_other == allocated, "{node}: {numa_local} + {numa_other} of {allocated}");
            let of = found.of(node);
            (of.miss, of.foreign) = (of.miss + numa_miss, of.foreign + numa_foreign);
            (of.interleave, of.other) = (of.interleave + numa_interleave, of.other + numa_other);
        }
        let sums = found.of_node.iter().fold((0, 0), |sums, of| (sums.0 + of.miss, sums.1 + of.foreign));
        demand!(sums.0 == sums.1, "{} pages missed a node, and {} were missed by one", sums.0, sums.1);
        if self.counts.is_known {
            demand!(found.of_node == self.counts.of_node, "counted {found:?}, not {:?}", self.counts);
        }
        found.is_known = true;
        self.counts = found;
        Ok(())
    }
}

fn is_dma32(dump: &ZoneInfo) -> bool {
    dump.kind == ZoneKind::Dma32
}

/// The counts of a node (C3.13).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct OfNode {
    miss: u64,
    foreign: u64,
    interleave: u64,
    other: u64,
}

/// See [`OfNode`].
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    of_node: [OfNode; 4],
    pub(crate) is_known: bool,
}

impl Counts {
    fn of(&mut self, node: NodeId) -> &mut OfNode {
        &mut self.of_node[node.get()]
    }
}
