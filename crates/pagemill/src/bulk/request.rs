//! What a bulk request says, and what it brings.
//!
//! A caller builds a [`Bulk`]; its types say which forms take it (ADR 39). The engine works on the [`Request`] inside, which is the
//! same for all.
use crate::account::Account;
use crate::allocator::Allocator;
use crate::context::{AllocContext, Effort};
use crate::error::{Error, InvalidRequest};
use crate::handle::{Block, Owned, Page};
use crate::shared::Lack;
use crate::wait::{Cancel, Patience};
use crate::zones::Zones;
use core::fmt;
use core::marker::PhantomData;
use pagemill_core::{Exhausted, Gfp, Level, NodeId, NodeMask, Order, PageCount, Policy, Shortfall};
use pagemill_os::Batch;
use std::time::{Duration, Instant};

/// A bulk request: how many, of what order, and what it may do for them.
///
/// Counts are of blocks of the request's order. In the array form they are of *occupied slots* among the first n, as in the kernel's
/// array form.
///
/// The types say what a form may rely on, so that no form refuses what its types allow. `N` is the kind of count: [`UpTo`],
/// [`AtLeast`] or [`Exact`]. `T` is what the request brings: [`Page`]s, or [`Block`]s, which alone can have an [order](Self::order).
/// Both follow from the call.
///
/// ```
/// use pagemill::{Allocator, BlockList, Bulk, Gfp, Order};
/// let request = Bulk::at_least(16, 64).gfp(Gfp::NOWAIT).order(Order::new(2)?);
/// let mut blocks = BlockList::new();
/// assert!(Allocator::global().alloc_pages_bulk_list(request, &mut blocks)?.blocks >= 16);
/// # Ok::<(), pagemill::Error>(())
/// ```
///
/// Pages are blocks of order 0:
/// ```compile_fail,E0308
/// # use pagemill::{Allocator, Bulk, Order, PageList};
/// # let order = Order::new(2).unwrap();
/// Allocator::global().alloc_pages_bulk_list(Bulk::up_to(16).order(order), &mut PageList::new());
/// ```
pub struct Bulk<'a, N = UpTo, T = Page> {
    pub(crate) request: Request<'a>,
    kinds: PhantomData<fn() -> (N, T)>,
}

/// The count of a request for as many as there are, up to a number: [`Bulk::up_to`].
#[derive(Clone, Copy, Debug)]
pub enum UpTo {}
/// The count of a request with a least number: [`Bulk::at_least`].
#[derive(Clone, Copy, Debug)]
pub enum AtLeast {}
/// The count of a request for all or nothing: [`Bulk::exact`].
#[derive(Clone, Copy, Debug)]
pub enum Exact {}

impl<N, T> Clone for Bulk<'_, N, T> {
    #[inline]
    fn clone(&self) -> Self {
        *self
    }
}
impl<N, T> Copy for Bulk<'_, N, T> {}

impl<N, T> fmt::Debug for Bulk<'_, N, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.request.fmt(f)
    }
}

impl Bulk<'_> {
    /// The most blocks that one request names, as in the kernel's interface.
    pub const COUNT_MAX: usize = i32::MAX as usize;
}

impl<T> Bulk<'_, UpTo, T> {
    /// Up to `n`; fewer are no error.
    ///
    /// The request takes what is free above the low watermarks, and keeps it. Once it has one block it neither reclaims nor waits for
    /// the rest, as Linux's `alloc_pages_bulk` (C3.4). If nothing is free it tries for one block as a single request does: by reclaim
    /// and by waiting, as its flags, its timeout and its cancel token allow (C3.8).
    ///
    /// With [`Gfp::RETRY_MAYFAIL`] it tries for all blocks in that way, one by one, until its timeout if it has one. It keeps what came
    /// while it waits for more, so two such requests can wait for each other's pages until they give up. A request that fewer blocks
    /// do not serve uses [`at_least`](Bulk::at_least) or [`exact`](Bulk::exact).
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Gfp, PageList};
    /// use std::time::Duration;
    /// let allocator = Allocator::builder().pages(5).build()?;
    /// let request = Bulk::up_to(8).timeout(Duration::from_millis(20));
    /// let mut list = PageList::new();
    /// assert_eq!(allocator.alloc_pages_bulk_list(request, &mut list)?.blocks, 5);
    /// assert_eq!(allocator.stats().waits, 0); // It has some.
    /// assert_eq!(allocator.alloc_pages_bulk_list(request, &mut list)?.blocks, 0);
    /// assert_eq!(allocator.stats().waits, 1); // It had none, and waited for one.
    /// list.clear();
    /// let request = request.gfp(Gfp::KERNEL | Gfp::RETRY_MAYFAIL);
    /// assert_eq!(allocator.alloc_pages_bulk_list(request, &mut list)?.blocks, 5);
    /// assert_eq!(allocator.stats().waits, 2); // It has some, and waited for the others.
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    pub const fn up_to(n: usize) -> Self {
        Self::of(Request::new(0, n))
    }
}

impl<T> Bulk<'_, AtLeast, T> {
    /// Up to `n`, at least `k`. Fewer than `k` are an error, and then nothing is delivered. The request reclaims and waits for `k`
    /// blocks, not for more.
    #[inline]
    pub const fn at_least(k: usize, n: usize) -> Self {
        Self::of(Request::new(k, n))
    }
}

impl<T> Bulk<'_, Exact, T> {
    /// All `n`, or an error and nothing. (A pool's array keeps what came until the error: C5.2.)
    ///
    /// The request takes all or waits with nothing in hand (C3.20), as [`at_least`](Bulk::at_least) does: two such requests never wait
    /// for each other. Two threads that ask page by page can: each keeps its pages while it waits for more.
    #[inline]
    pub const fn exact(n: usize) -> Self {
        Self::of(Request::new(n, n))
    }
}

impl<N> Bulk<'_, N, Block> {
    /// The order of its blocks; 0 by default.
    #[inline]
    #[must_use]
    pub const fn order(self, order: Order) -> Self {
        Self::of(Request { order, ..self.request })
    }
}

impl<'a, N, T> Bulk<'a, N, T> {
    pub(crate) const fn of(request: Request<'a>) -> Self {
        Self { request, kinds: PhantomData }
    }

    /// Flags; [`Gfp::KERNEL`] by default.
    #[inline]
    #[must_use]
    pub const fn gfp(self, gfp: Gfp) -> Self {
        Self::of(Request { gfp, ..self.request })
    }

    /// Takes memory from these nodes alone; from every node by default. One node and `THISNODE` are the node-exact form (C3.12).
    #[inline]
    #[must_use]
    pub const fn nodes(self, nodes: NodeMask) -> Self {
        Self::of(Request { nodes, ..self.request })
    }
    /// The order in which nodes are tried; the allocator's policy by default.
    #[inline]
    #[must_use]
    pub const fn policy(self, policy: Policy) -> Self {
        Self::of(Request { policy: Some(policy), ..self.request })
    }
    /// Takes memory from this node alone: fewer blocks if it has fewer (C3.12, the node-exact form).
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, NodeId, PageList};
    /// let mut list = PageList::new();
    /// Allocator::global().alloc_pages_bulk_list(Bulk::up_to(64).exact_node(NodeId::ZERO), &mut list)?;
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    #[must_use]
    pub const fn exact_node(self, node: NodeId) -> Self {
        self.policy(Policy::Preferred(node)).nodes(NodeMask::only(node))
    }
    /// Lets a request that may wait do so for this long at most, counted from the start of each call, and also where nothing promises
    /// that memory comes back. It does not make the request wait for more blocks than [`up_to`](Bulk::up_to) and
    /// [`at_least`](Bulk::at_least) say. Without a timeout a request waits a bounded number of rounds, and only if a
    /// [`Shrinker`](crate::Shrinker) is registered or another request waits for the same memory.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Gfp, PageList, Shortfall, Why};
    /// use std::time::Duration;
    /// let allocator = Allocator::builder().pages(1).build()?;
    /// let page = allocator.alloc_page(Gfp::KERNEL)?;
    /// let request = Bulk::up_to(1).timeout(Duration::from_millis(1));
    /// for _ in 0..2 {
    ///     let delivered = allocator.alloc_pages_bulk_list(request, &mut PageList::new())?;
    ///     assert_eq!(delivered.shortfall, Some(Shortfall { missing: 1, why: Why::TimedOut }));
    /// }
    /// # drop(page);
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    #[must_use]
    pub const fn timeout(self, timeout: Duration) -> Self {
        Self::of(Request { timeout: Some(timeout), ..self.request })
    }
    /// Ends the request's wait when `cancel` is cancelled.
    #[inline]
    #[must_use]
    pub const fn cancel(self, cancel: &'a Cancel) -> Self {
        Self::of(Request { cancel: Some(cancel), ..self.request })
    }
    /// Charges the request to an account. [`Gfp::ACCOUNT`] demands an account; without the flag an account is charged as well.
    #[inline]
    #[must_use]
    pub const fn account(self, account: &'a Account) -> Self {
        Self::of(Request { account: Some(account), ..self.request })
    }

    /// A request for up to `n` pages or blocks with this one's flags, timeout, account and nodes: a [`Source`](crate::Source) asks for
    /// the memory of its elements so.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, Error, Exact, Gfp, Mempool, Page, Source};
    /// struct Packets(Allocator);
    /// struct Packet(Page);
    /// impl Source for Packets {
    ///     type Item = Packet;
    ///     fn alloc(&self, request: Bulk<'_, Exact, Packet>) -> Result<Option<Packet>, Error> {
    ///         let mut slot = [None];
    ///         self.0.alloc_pages_bulk_array(request.for_up_to::<Page>(1), &mut slot)?;
    ///         Ok(slot[0].take().map(Packet))
    ///     }
    ///     fn free(&self, packet: Packet) {
    ///         drop(packet.0);
    ///     }
    /// }
    /// let pool = Mempool::new(Packets(Allocator::builder().pages(64).build()?), 4)?;
    /// let packet = pool.alloc(Gfp::NOIO)?;
    /// drop(packet); // It goes back to the pool.
    /// # Ok::<(), Error>(())
    /// ```
    #[inline]
    #[must_use]
    pub const fn for_up_to<U: Owned>(self, n: usize) -> Bulk<'a, UpTo, U> {
        Bulk::of(self.request.up_to_again(n, Order::ZERO))
    }

    /// Has the system commit all pages before they are delivered, each run of neighbours in one call, so that the first access to a
    /// page does not fault. Pages that the system does not commit are not delivered: [`Why::Uncommitted`](crate::Why::Uncommitted). Linux
    /// before 5.14 cannot commit pages, and delivers them as they are.
    ///
    /// The system kills a process that commits more than the memory limit of its control groups has room for. If there was a limit
    /// when the allocator was built, the request first looks for room. Another process may take that room in between.
    ///
    /// ```
    /// use pagemill::{Allocator, Bulk, PageList};
    /// let mut list = PageList::new();
    /// Allocator::global().alloc_pages_bulk_list(Bulk::up_to(64).populated(), &mut list)?;
    /// # Ok::<(), pagemill::Error>(())
    /// ```
    #[inline]
    #[must_use]
    pub const fn populated(self) -> Self {
        Self::of(Request { commit: Commit::Now, ..self.request })
    }
}

/// What a request says, whatever its form.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    /// The caller made it by [`Bulk::up_to`]. `least` may become 0 later, where slots are full already.
    pub(super) is_up_to: bool,
    pub(crate) least: usize,
    pub(crate) most: usize,
    pub(crate) gfp: Gfp,
    pub(super) order: Order,
    pub(super) nodes: NodeMask,
    pub(super) policy: Option<Policy>,
    /// How long each call may wait, and when this call's wait ends.
    pub(crate) timeout: Option<Duration>,
    pub(crate) deadline: Option<Instant>,
    pub(crate) cancel: Option<&'a Cancel>,
    pub(crate) account: Option<&'a Account>,
    pub(super) commit: Commit,
    /// How far one attempt goes: a request that must have several blocks does not wait with blocks in hand.
    pub(super) effort: Effort,
}

/// When pages are committed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Commit {
    /// At their first access.
    Lazily,
    /// Before it is delivered.
    Now,
    /// Before, but the system refused some.
    Refused,
}

impl<'a> Request<'a> {
    const fn new(least: usize, most: usize) -> Self {
        Self {
            is_up_to: least == 0,
            least,
            most,
            gfp: Gfp::KERNEL,
            order: Order::ZERO,
            nodes: NodeMask::ALL,
            policy: None,
            timeout: None,
            deadline: None,
            cancel: None,
            account: None,
            commit: Commit::Lazily,
            effort: if least == 0 { Effort::Wait } else { Effort::Reclaim },
        }
    }
    /// The same request for up to `n` blocks of an order.
    #[inline]
    pub(crate) const fn up_to_again(self, n: usize, order: Order) -> Self {
        Self { is_up_to: true, least: 0, most: n, order, effort: Effort::Wait, ..self }
    }
    /// The same request with other flags, and without a wait.
    #[inline]
    pub(crate) const fn at_once(self, gfp: Gfp) -> Self {
        Self { gfp, timeout: None, ..self }
    }

    /// Whether it asks for one page as a plain single request does. Does not look at its flags.
    #[inline(always)] // A call would take the whole request in memory.
    pub(super) fn is_one_page(&self) -> bool {
        self.most == 1
            && self.least <= 1
            && self.order == Order::ZERO
            && self.account.is_none()
            && !self.is_populated()
            && self.is_anywhere()
    }

    /// Whether it may be served in part, yet tries for all as its flags allow (C3.4).
    #[inline]
    pub(super) fn tries_for_all(&self) -> bool {
        self.is_up_to && self.gfp.contains(Gfp::RETRY_MAYFAIL)
    }

    /// Whether its pages are committed before they are delivered.
    #[inline]
    pub(super) fn is_populated(&self) -> bool {
        self.commit != Commit::Lazily
    }

    /// Whether it asks for at most one batch of pages, which one section can take. Does not look at its flags.
    #[inline]
    pub(super) fn is_one_batch(&self) -> bool {
        self.is_of_pages(Batch::CAPACITY)
    }

    /// The same for 2 to `most` pages.
    #[inline(always)] // A call would take the whole request in memory.
    pub(super) fn is_of_pages(&self, most: usize) -> bool {
        (2..=most).contains(&self.most)
            && self.least <= self.most
            && self.order == Order::ZERO
            && self.account.is_none()
            && !self.is_populated()
            && self.is_anywhere()
    }

    /// Whether it takes memory from wherever a plain request does.
    #[inline]
    pub(super) fn is_anywhere(&self) -> bool {
        self.policy.is_none() && self.nodes.as_bits() == NodeMask::ALL.as_bits() && self.gfp.is_anywhere()
    }

    pub(super) fn context(&self, zones: &Zones) -> AllocContext<'a> {
        AllocContext {
            gfp: self.gfp,
            order: self.order,
            run: 0,
            effort: self.effort,
            nodes: self.nodes,
            policy: self.policy.unwrap_or(zones.policy()),
            patience: Patience { deadline: self.deadline, cancel: self.cancel },
        }
    }

    /// Fixes the node that `THISNODE` means. A request that waits may go on on another CPU, and must look for memory where it
    /// stands in line for it.
    pub(super) fn stay_on_node(&mut self, zones: &Zones) {
        match self.policy.unwrap_or(zones.policy()) {
            Policy::Interleave(_) => {}
            policy if self.gfp.contains(Gfp::THISNODE) => {
                self.nodes = self.nodes.and(policy.nodes());
                self.policy = Some(Policy::Preferred(policy.first(zones.node())));
            }
            _ => {}
        }
    }

    /// The memory that it lacks when it must have so many blocks at once.
    pub(super) fn lack(&self, zones: &Zones, blocks: usize) -> Lack {
        let context = self.context(zones);
        context.lack(context.policy.first(zones.node()), blocks)
    }

    /// Whether its account, or a system that does not commit pages, refuses so many more blocks.
    pub(super) fn is_refused(&self, needed: usize) -> bool {
        let frames = needed * self.order.frames() as usize;
        self.commit == Commit::Refused || self.account.is_some_and(|account| account.is_full(frames))
    }

    /// Begins a call: its timeout counts from now. Refuses an invalid request.
    #[inline]
    pub(super) fn begin(&mut self, zones: &Zones) -> Result<(), Error> {
        if let Some(timeout) = self.timeout {
            self.deadline = Some(from_now(timeout));
        }
        let is_usual = self.least <= self.most
            && self.most <= Bulk::COUNT_MAX
            && self.order == Order::ZERO
            && self.is_anywhere()
            && self.gfp.is_plain();
        if is_usual { Ok(()) } else { self.check_each(zones) }
    }

    #[cold]
    #[inline(never)]
    fn check_each(&self, zones: &Zones) -> Result<(), Error> {
        if self.most > Bulk::COUNT_MAX {
            return Err(InvalidRequest::CountTooLarge { count: self.most, max: Bulk::COUNT_MAX }.into());
        }
        if self.least > self.most {
            return Err(InvalidRequest::AtLeastAboveUpTo { at_least: self.least, up_to: self.most }.into());
        }
        if self.policy.is_some_and(Policy::is_of_none) {
            return Err(InvalidRequest::NoSuchNode { nodes: 0 }.into());
        }
        zones.check_flags(self.gfp, self.account.is_some())?;
        if self.most == 0 {
            return Ok(()); // A request for nothing is valid on any node (C3.3).
        }
        if let Some(Policy::Interleave(among)) = self.policy
            && !zones.had_memory_on(among)
        {
            return Err(InvalidRequest::NoSuchNode { nodes: among.as_bits() }.into());
        }
        zones.check_lack(self.lack(zones, 1), self.gfp)
    }

    /// The error of a request that got `got` blocks, fewer than it must have, and gave them back.
    #[cold]
    pub(super) fn missed(&self, allocator: &Allocator, got: usize) -> Error {
        let zones = allocator.zones();
        let why = allocator.why(self, self.least - got, Level::Min);
        zones.count_shortfall(&self.context(zones), why);
        Exhausted { wanted: self.least, got, order: self.order.get(), why }.into()
    }
}

/// The result of a list, callback or runs request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delivered {
    /// Blocks delivered by this call (pages, for order 0).
    pub blocks: usize,
    /// Why they are fewer than asked for.
    pub shortfall: Option<Shortfall>,
}

/// The result of an array request (C3.2), over the array's first n slots.
///
/// ```
/// use pagemill::{Allocator, Bulk, Page};
/// let mut slots: [Option<Page>; 8] = [const { None }; 8];
/// slots[1] = Some(Allocator::global().alloc_page(pagemill::Gfp::KERNEL)?);
/// let filled = Allocator::global().alloc_pages_bulk_array(Bulk::up_to(6), &mut slots)?;
/// assert_eq!((filled.added, filled.occupied, filled.first_hole), (5, 6, 6)); // of six slots: full
/// # Ok::<(), pagemill::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Filled {
    /// Slots that this call filled.
    pub added: usize,
    /// Slots that are occupied now, before the call or by it.
    pub occupied: usize,
    /// The first empty slot; n if there is none. All slots before it are occupied.
    pub first_hole: usize,
    /// Why some slots are still empty.
    pub shortfall: Option<Shortfall>,
}

impl Request<'_> {
    #[cold]
    pub(super) fn charge(&self, missing: usize) -> usize {
        let frames = self.order.frames() as usize;
        let granted = self.account.map_or(0, |account| account.charge_up_to(missing * frames, frames) / frames);
        // The account does not pay for what the request must have: nothing is taken.
        let needed = self.least.saturating_sub(self.most - missing);
        if granted < needed {
            self.refund(granted);
            return 0;
        }
        granted
    }
    /// Whether an attempt keeps the blocks that it got. If they are fewer than it needs, it gives them back and is not charged.
    #[inline]
    pub(super) fn keeps(&self, got: usize, needed: usize) -> bool {
        if got < needed {
            self.refund(got);
        }
        got >= needed
    }
    #[cold]
    pub(super) fn refund(&self, blocks: usize) {
        if let Some(account) = self.account {
            account.uncharge(PageCount::new(blocks * self.order.frames() as usize));
        }
    }
}

/// The end of a wait. A wait that would end beyond the clock's range ends in thirty years, or when it is cancelled.
#[cold]
pub(crate) fn from_now(wait: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(wait).unwrap_or_else(|| now + Duration::from_secs(86_400 * 365 * 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_beyond_the_clocks_end_ends_in_years() {
        let year = Duration::from_secs(86_400 * 365);
        assert!(from_now(Duration::MAX) > Instant::now() + year);
        assert!(from_now(Duration::ZERO) <= Instant::now());
    }
}
