//! Cache of recent path selections: a program repeats the same few operations, and evaluating all paths takes longer
//! than a short operation.
//!
//! Invariant: a selection depends only on the operation, the requested algorithm and the communicator's selection
//! context. The owner clears the cache when the context changes.

use crate::select::Algo;
use sumac_hal::op::{OpDesc, Path};

/// The capacity: enough for the operations of a program's inner loop.
const CAPACITY: usize = 8;

/// A path, and why it is not the tree if the algorithm was left open.
type Selected = (Path, Option<String>);

/// The most recent selections.
#[derive(Debug, Default)]
pub(super) struct SelectionCache {
    cached: Vec<(OpDesc, Algo, Selected)>,
    /// Index of the entry that is replaced next.
    oldest: usize,
}

impl SelectionCache {
    /// Return the cached selection.
    pub(super) fn find(&self, desc: &OpDesc, algo: Algo) -> Option<Selected> {
        let cached = self.cached.iter().find(|(cached, requested, _)| cached == desc && *requested == algo);
        cached.map(|(_, _, selected)| selected.clone())
    }

    /// Add a selection, in place of the oldest one if the cache is full.
    pub(super) fn keep(&mut self, desc: OpDesc, algo: Algo, selected: &Selected) {
        let new = (desc, algo, selected.clone());
        if self.cached.len() < CAPACITY {
            self.cached.push(new);
        } else {
            self.cached[self.oldest] = new;
            self.oldest = (self.oldest + 1) % CAPACITY;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::op::{Dtype, ReduceOp};

    #[test]
    fn cache_keeps_the_latest_by_operation_and_algorithm() {
        let mut selection_cache = SelectionCache::default();
        let desc = |count| OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count);
        for count in 0..=CAPACITY as u64 {
            assert_eq!(selection_cache.find(&desc(count), Algo::Auto), None);
            selection_cache.keep(desc(count), Algo::Auto, &(Path::Tree, Some(count.to_string())));
        }
        assert_eq!(selection_cache.find(&desc(0), Algo::Auto), None, "the oldest has gone");
        for count in 1..=CAPACITY as u64 {
            assert_eq!(selection_cache.find(&desc(count), Algo::Auto), Some((Path::Tree, Some(count.to_string()))));
            assert_eq!(selection_cache.find(&desc(count), Algo::Ring), None);
        }
        let other = OpDesc { op: Some(ReduceOp::Max), ..desc(1) };
        assert_eq!(selection_cache.find(&other, Algo::Auto), None);
    }
}
