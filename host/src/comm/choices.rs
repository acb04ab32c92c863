//! What was chosen lately: a program calls the same few operations again and again, and to weigh all paths anew takes
//! longer than a short one of them.
//!
//! Invariant: a choice depends on the operation, what is asked for and the communicator's situation, which is fixed for
//! its life; so what was chosen once is what would be chosen again.

use crate::select::Algo;
use sumac_hal::op::{OpDesc, Path};

/// How many are kept: the operations of a program's inner loop.
const KEPT: usize = 8;

/// A path, and why it is not the tree if that was open.
type Chosen = (Path, Option<String>);

/// The latest choices.
#[derive(Debug, Default)]
pub(super) struct Choices {
    kept: Vec<(OpDesc, Algo, Chosen)>,
    /// The one that goes next.
    oldest: usize,
}

impl Choices {
    /// Return what was chosen for this.
    pub(super) fn find(&self, desc: &OpDesc, algo: Algo) -> Option<Chosen> {
        let kept = self.kept.iter().find(|(kept, asked, _)| kept == desc && *asked == algo);
        kept.map(|(_, _, chosen)| chosen.clone())
    }

    /// Keep what was chosen, in the place of the oldest.
    pub(super) fn keep(&mut self, desc: OpDesc, algo: Algo, chosen: &Chosen) {
        let new = (desc, algo, chosen.clone());
        if self.kept.len() < KEPT {
            self.kept.push(new);
        } else {
            self.kept[self.oldest] = new;
            self.oldest = (self.oldest + 1) % KEPT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::op::{Dtype, ReduceOp};

    #[test]
    fn the_latest_are_kept_and_told_apart_by_all_that_matters() {
        let mut choices = Choices::default();
        let desc = |count| OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count);
        for count in 0..=KEPT as u64 {
            assert_eq!(choices.find(&desc(count), Algo::Auto), None);
            choices.keep(desc(count), Algo::Auto, &(Path::Tree, Some(count.to_string())));
        }
        assert_eq!(choices.find(&desc(0), Algo::Auto), None, "the oldest has gone");
        for count in 1..=KEPT as u64 {
            assert_eq!(choices.find(&desc(count), Algo::Auto), Some((Path::Tree, Some(count.to_string()))));
            assert_eq!(choices.find(&desc(count), Algo::Ring), None);
        }
        let other = OpDesc { op: Some(ReduceOp::Max), ..desc(1) };
        assert_eq!(choices.find(&other, Algo::Auto), None);
    }
}
