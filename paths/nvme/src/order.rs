//! Numbers in the order of their arrival. Adding one, removing any, and finding the oldest each take constant time.
//!
//! The numbers form a doubly linked ring, in one array. Its last entry is no number: it joins the newest and the oldest.

/// An order of numbers below a limit.
pub(crate) struct Order {
    links: Box<[Link]>,
}

#[derive(Clone, Copy)]
struct Link {
    before: u16,
    after: u16,
}

impl Order {
    /// An empty order for the numbers below `count`.
    pub(crate) fn new(count: u16) -> Self {
        Self { links: (0..=count).map(|id| Link { before: id, after: id }).collect() }
    }

    fn ends(&self) -> u16 {
        (self.links.len() - 1) as u16
    }

    fn join(&mut self, before: u16, after: u16) {
        self.links[usize::from(before)].after = after;
        self.links[usize::from(after)].before = before;
    }

    /// The oldest number.
    pub(crate) fn first(&self) -> Option<u16> {
        let ends = self.ends();
        let first = self.links[usize::from(ends)].after;
        (first != ends).then_some(first)
    }

    /// Adds a number as the newest. It must not be in.
    pub(crate) fn push(&mut self, id: u16) {
        let ends = self.ends();
        self.join(self.links[usize::from(ends)].before, id);
        self.join(id, ends);
    }

    /// Removes a number. It must be in.
    pub(crate) fn remove(&mut self, id: u16) {
        let Link { before, after } = self.links[usize::from(id)];
        self.join(before, after);
    }

    /// Removes all numbers.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.ends());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Each step adds a number, or removes it if it is in; the model is a vector in the order of arrival.
        #[test]
        fn first_is_the_oldest_number_whatever_is_removed(steps in prop::collection::vec(0..9u16, 0..200)) {
            let (mut order, mut model) = (Order::new(9), Vec::new());
            for id in steps {
                match model.iter().position(|&other| other == id) {
                    Some(at) => {
                        order.remove(id);
                        model.remove(at);
                    }
                    None => {
                        order.push(id);
                        model.push(id);
                    }
                }
                prop_assert_eq!(order.first(), model.first().copied());
            }
            order.clear();
            prop_assert_eq!(order.first(), None);
        }
    }
}
