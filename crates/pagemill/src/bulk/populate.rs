//! Requests whose pages are committed before they are delivered. The engine gathers the blocks on a list, each run of neighbours is
//! committed with one call, and only then does the form get them. Blocks that the system does not commit go back.
use crate::allocator::Allocator;
use crate::bulk::request::{Commit, Request};
use crate::handle::{Block, Owned, sealed::Word};
use crate::list::List;

impl Allocator {
    /// Takes a request's blocks and commits them. If the system refuses some, the request remembers it.
    #[cold]
    #[inline(never)]
    pub(super) fn populated<T: Owned>(&self, request: &mut Request<'_>) -> List<T> {
        let mut gathered = List::of_order(request.order);
        self.bulk(request, request.most, true, |zone, batch| gathered.push_batch_in_order(zone, batch));
        let mut committed = List::of_order(request.order);
        while let Some((zone, first, blocks)) = gathered.first_run() {
            let done = zone.populate(first, blocks, request.order);
            committed.join(gathered.split_run(done));
            if done < blocks {
                break;
            }
        }
        let refused = gathered.clear();
        if refused > 0 {
            request.commit = Commit::Refused;
            request.refund(refused);
        }
        committed
    }

    /// [`fill`](Self::fill) for a request whose pages are committed.
    #[cold]
    #[inline(never)]
    pub(super) fn fill_populated(&self, request: &mut Request<'_>, words: &mut [usize]) -> (usize, usize) {
        let missing = words.iter().filter(|&&word| word == 0).count();
        let occupied = words.len() - missing;
        let least = request.least.saturating_sub(occupied);
        let mut rest = Request { least, most: missing, ..*request };
        let mut list = self.populated::<Block>(&mut rest);
        request.commit = rest.commit;
        let added = list.len();
        if added >= least {
            for (slot, block) in words.iter_mut().filter(|word| **word == 0).zip(&mut list) {
                *slot = block.into_word();
            }
        }
        (added, words.iter().position(|&word| word == 0).unwrap_or(words.len()))
    }
}
