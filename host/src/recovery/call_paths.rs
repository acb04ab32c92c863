//! Which calls keep the path that was selected before a view change.
//!
//! Ranks select the path of a call by a context that is the same on all of them in a view. When the view changes, some
//! ranks may be in a call that others have not begun. If it runs between the ranks, those that are in it continue, and
//! some may have returned. So the others must join them: by the same path, though the next view may suggest another
//! one, and without an announcement in the next tree, where nobody else announces it.
//!
//! The view change agrees on the number of calls that any rank had begun. Below it, a call runs as a host collective
//! if the context of its view selected one; an operation of the lost tree starts again, and is selected anew.
//!
//! Invariant: in each tree, all ranks post the same operations in the same order.

use std::collections::VecDeque;

/// The number of views that are kept. A job changes its view this often without beginning a call only while no rank is
/// in one, when no call needs an earlier context.
const VIEWS_MAX: usize = 64;

/// How far calls may move up in number when earlier ones are rejected; more than can be in flight.
const MOVES_MAX: u64 = 4096;

/// The contexts of earlier views, for calls that some rank had begun in them.
#[derive(Debug)]
pub(crate) struct CallPaths<C> {
    /// For each view, in order: the number of calls that any rank had begun, and the context.
    earlier: VecDeque<(u64, C)>,
}

impl<C> Default for CallPaths<C> {
    fn default() -> Self {
        Self { earlier: VecDeque::new() }
    }
}

impl<C> CallPaths<C> {
    /// The view has changed. Any rank had begun at most `begun` calls, and `before` is the context that they selected
    /// by.
    pub(crate) fn view_changed(&mut self, begun: u64, before: C) {
        if self.earlier.len() == VIEWS_MAX {
            self.earlier.pop_front();
        }
        self.earlier.push_back((begun, before));
    }

    /// Return the path of a call that runs as in an earlier view; `None` if the present view selects it. `select`
    /// returns the path in a context, or `None` if that is the tree.
    pub(crate) fn select<P>(&mut self, call: u64, select: impl FnMut(&C) -> Option<P>) -> Option<P> {
        while self.earlier.front().is_some_and(|(begun, _)| begun.saturating_add(MOVES_MAX) <= call) {
            self.earlier.pop_front();
        }
        self.earlier.iter().filter(|(begun, _)| call < *begun).map(|(_, before)| before).find_map(select)
    }

    /// Return whether the present view selects the path of every call from this one on.
    pub(crate) fn is_past(&self, call: u64) -> bool {
        self.earlier.iter().all(|(begun, _)| *begun <= call)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Whether each call runs in the tree, by number, in a view.
    type Context = Vec<bool>;

    const CALLS: usize = 24;

    /// A rank that makes all calls in order. It may be ahead of the others as far as calls allow that.
    struct Model {
        begun: u64,
        /// Calls in the present tree, in the order of posting.
        posted: Vec<u64>,
        /// Operations of the tree that wait for the other ranks.
        in_tree: Vec<u64>,
        /// The view in which each call ran between the ranks.
        by_ranks: Vec<(u64, usize)>,
        paths: CallPaths<(usize, Context)>,
    }

    impl Model {
        fn new() -> Self {
            let (posted, in_tree, by_ranks) = (Vec::new(), Vec::new(), Vec::new());
            Self { begun: 0, posted, in_tree, by_ranks, paths: CallPaths::default() }
        }

        /// Begin the next call, which does not wait for other ranks.
        fn call(&mut self, view: usize, present: &Context) {
            let call = self.begun;
            self.begun += 1;
            self.launch(call, view, present);
        }

        fn launch(&mut self, call: u64, view: usize, present: &Context) {
            let by_ranks = |(view, context): &(usize, Context)| (!context[call as usize]).then_some(*view);
            match self.paths.select(call, by_ranks) {
                Some(view) => self.by_ranks.push((call, view)),
                None => {
                    // An announcement, if it does not run there.
                    self.posted.push(call);
                    match present[call as usize] {
                        true => self.in_tree.push(call),
                        false => self.by_ranks.push((call, view)),
                    }
                }
            }
        }
    }

    /// Return whether one rank's posts are the beginning of the other's.
    fn agree(a: &[u64], b: &[u64]) -> bool {
        a.iter().zip(b).all(|(a, b)| a == b)
    }

    proptest! {
        /// Between two view changes, each rank begins some calls. What all ranks have posted completes in the change.
        #[test]
        fn ranks_post_alike_in_every_tree_and_take_the_same_paths(
            views in proptest::collection::vec(
                (proptest::collection::vec(any::<bool>(), CALLS), proptest::collection::vec(0_usize..6, 3)),
                1..7,
            ),
        ) {
            let mut ranks = [Model::new(), Model::new(), Model::new()];
            for (view, (context, calls)) in views.iter().enumerate() {
                for (rank, &calls) in ranks.iter_mut().zip(calls) {
                    (0..calls.min(CALLS - rank.begun as usize)).for_each(|_| rank.call(view, context));
                }
                let posted = ranks.each_ref().map(|rank| rank.posted.clone());
                prop_assert!(posted.iter().all(|a| posted.iter().all(|b| agree(a, b))), "{posted:?}");
                let begun = ranks.iter().map(|rank| rank.begun).max().unwrap_or(0);
                let cut = posted.iter().map(Vec::len).min().unwrap_or(0);
                let next = views.get(view + 1).map_or(context, |(next, _)| next);
                for rank in &mut ranks {
                    rank.paths.view_changed(begun, (view, context.clone()));
                    let complete = rank.posted[..cut].to_vec();
                    rank.posted.clear();
                    let again = std::mem::take(&mut rank.in_tree);
                    let again = again.into_iter().filter(|call| !complete.contains(call));
                    again.for_each(|call| rank.launch(call, view + 1, next));
                }
            }
            let by_ranks = ranks.each_ref().map(|rank| {
                rank.by_ranks.iter().copied().collect::<std::collections::BTreeMap<u64, usize>>()
            });
            for (a, b) in [(0, 1), (0, 2), (1, 2)] {
                let differ = by_ranks[a].iter().find(|(call, view)| {
                    by_ranks[b].get(call).is_some_and(|other| other != *view)
                });
                prop_assert!(differ.is_none(), "{differ:?} of {by_ranks:?}");
            }
        }
    }

    #[test]
    fn call_is_past_once_no_earlier_view_selects_it() {
        let mut paths = CallPaths::default();
        assert!(paths.is_past(0));
        paths.view_changed(3, "before");
        assert!(!paths.is_past(2) && paths.is_past(3));
        assert_eq!(paths.select(2, |&before| Some(before)), Some("before"));
        assert_eq!(paths.select(3, |&before| Some(before)), None);
        // An operation of the lost tree.
        assert_eq!(paths.select(2, |_| None::<()>), None);
    }

    #[test]
    fn contexts_of_idle_views_are_bounded() {
        let mut paths = CallPaths::default();
        (0..10 * VIEWS_MAX).for_each(|view| paths.view_changed(0, view));
        assert_eq!(paths.earlier.len(), VIEWS_MAX);
        assert_eq!(paths.select(MOVES_MAX, |&view| Some(view)), None);
        assert_eq!(paths.earlier.len(), 0);
    }
}
