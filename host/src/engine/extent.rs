//! Buffer lengths of an operation at one rank, and where input and output lie if they share one buffer: the table in
//! [`crate::comm`], in bytes.

use super::error::Error;
use crate::exec::Buffers;
use crate::schedule::{Buffer, Layout, Place, Span};
use std::ops::Range;
use sumac_hal::op::{Collective, OpDesc};

/// The byte ranges of an operation's buffers at one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extent {
    /// The length of a buffer for both input and output.
    pub(super) whole: usize,
    /// The input's range in it. If the input is a separate buffer, only its length matters.
    pub(super) input: Range<usize>,
    /// The output's range, likewise.
    pub(super) output: Range<usize>,
}

impl Extent {
    /// No bytes.
    pub(super) const NONE: Self = Self { whole: 0, input: 0..0, output: 0..0 };

    /// Compute the buffers of an operation at `place`.
    ///
    /// # Errors
    /// [`Error::Argument`] if the root is not a rank, or the buffers exceed the address space.
    pub(super) fn of(desc: &OpDesc, place: Place) -> Result<Self, Error> {
        let (rank, ranks) = (place.rank(), place.ranks());
        if desc.collective.is_rooted() && desc.root.0 >= ranks {
            return Err(Error::Argument(format!(
                "root {} is not a rank: the communicator has {ranks}, counted from 0",
                desc.root.0
            )));
        }
        let each = desc.element_bytes();
        let too_large = || Error::Argument(format!("{desc}: {} elements exceed the address space", desc.count));
        let count = usize::try_from(desc.count).map_err(|_| too_large())?;
        count.checked_mul(each.max(1)).ok_or_else(too_large)?;
        let all = 0..count * each;
        let own = Span::of_blocks(count, ranks, rank.0, rank.0 + 1);
        let own = own.start * each..own.end() * each;
        let alone = 0..own.len();
        let at_root = rank == desc.root;
        let (input, output) = match desc.collective {
            Collective::Reduce => (all.clone(), if at_root { all } else { 0..0 }),
            Collective::Broadcast => (if at_root { all.clone() } else { 0..0 }, all),
            Collective::ReduceScatter => (all, own),
            Collective::AllGather => (own, all),
            Collective::Gather if at_root => (own, all),
            Collective::Gather => (alone, 0..0),
            Collective::Scatter if at_root => (all, own),
            Collective::Scatter => (0..0, alone),
            Collective::Barrier => (0..0, 0..0),
            Collective::AllToAll => (all, 0..ranks as usize * own.len()),
            _ => (all.clone(), all),
        };
        Ok(Self { whole: input.end.max(output.end), input, output })
    }

    /// Return the separate buffers of a schedule that was made for them.
    pub(super) fn of_layout(layout: &Layout, desc: &OpDesc) -> Self {
        let len = |buffer| layout.len(buffer).saturating_mul(desc.element_bytes());
        Self { whole: 0, input: 0..len(Buffer::Input), output: 0..len(Buffer::Output) }
    }

    /// Check the lengths of the caller's buffers.
    ///
    /// # Errors
    /// [`Error::Argument`] names both lengths.
    pub(super) fn check(&self, desc: &OpDesc, buffers: &Buffers<'_>) -> Result<(), Error> {
        match buffers {
            Buffers::InPlace(buffer) => self.check_lens(desc, buffer.len(), None),
            Buffers::Separate { input, output } => self.check_lens(desc, input.len(), Some(output.len())),
        }
    }

    /// Check the lengths of an input and a separate output, or of a buffer for both.
    ///
    /// # Errors
    /// [`Error::Argument`] names both lengths.
    pub(super) fn check_lens(&self, desc: &OpDesc, memory: usize, output: Option<usize>) -> Result<(), Error> {
        let check = |what, found: usize, expected: usize| match found == expected {
            true => Ok(()),
            false => {
                Err(Error::Argument(format!("{what} of {found} bytes for {desc}, which needs {expected} at this rank")))
            }
        };
        match output {
            None => check("a buffer", memory, self.whole),
            Some(output) => {
                check("an input", memory, self.input.len())?;
                check("an output", output, self.output.len())
            }
        }
    }

    /// Return the input within the caller's buffers.
    pub(super) fn input<'b>(&self, buffers: &'b Buffers<'_>) -> &'b [u8] {
        match buffers {
            Buffers::InPlace(buffer) => &buffer[self.input.clone()],
            Buffers::Separate { input, .. } => input,
        }
    }

    /// Return the output within the caller's buffers.
    pub(super) fn output<'b>(&self, buffers: &'b mut Buffers<'_>) -> &'b mut [u8] {
        match buffers {
            Buffers::InPlace(buffer) => &mut buffer[self.output.clone()],
            Buffers::Separate { output, .. } => output,
        }
    }

    /// Copy a rank's own contribution to a broadcast or an all-gather into its output: the tree does not send it back.
    /// Done after the rest has arrived, because a rejected or failed operation leaves everything but results unchanged.
    pub(super) fn copy_own(&self, desc: &OpDesc, buffers: &mut Buffers<'_>) {
        if let (Buffers::Separate { input, output }, Collective::Broadcast | Collective::AllGather) =
            (buffers, desc.collective)
        {
            // An all-gather's own block begins at the same offset as in a buffer for both.
            output[self.input.start..][..input.len()].copy_from_slice(input);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::tree::Tree;
    use crate::schedule::{ALGORITHMS, Pattern, Problem, Shape};
    use sumac_hal::ctrl::Order;
    use sumac_hal::ids::Rank;
    use sumac_hal::op::{Dtype, ReduceOp};

    /// Communicator and schedules agree on the buffers of every collective.
    #[test]
    fn extents_match_the_layout_of_every_schedule() {
        for algorithm in ALGORITHMS {
            for (ranks, count) in [(1, 5), (2, 0), (3, 7), (4, 8), (7, 3), (8, 100)] {
                let tree = Tree::flat(ranks, Order::TreeFold).expect("a tree");
                for place in Place::all(ranks) {
                    for root in (0..ranks).map(Rank) {
                        let schedule =
                            (algorithm.schedule)(&Problem { place, count, root, tree: &tree, shape: Shape::Line });
                        let collective = algorithm.pattern.collective();
                        let op = collective.reduces().then_some(ReduceOp::Sum);
                        let dtype = (algorithm.pattern != Pattern::Barrier).then_some(Dtype::I16);
                        let desc = OpDesc { collective, dtype, op, root, count: count as u64 };
                        let extent = Extent::of(&desc, place).expect("a root that is a rank");
                        let layout = schedule.layout();
                        let lens =
                            [Buffer::Input, Buffer::Output].map(|buffer| layout.len(buffer) * desc.element_bytes());
                        assert_eq!([extent.input.len(), extent.output.len()], lens, "{algorithm:?} {desc} {place:?}");
                        assert_eq!(Some(&extent.whole), lens.iter().max(), "{algorithm:?} {desc} {place:?}");
                        if let Some(at) = layout.in_place_at {
                            let offset = extent.input.start.max(extent.output.start);
                            assert_eq!(offset, at * desc.element_bytes(), "{algorithm:?} {desc} {place:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn wrong_length_is_rejected_with_both_lengths() {
        let desc = OpDesc::reduce_scatter(Dtype::F32, ReduceOp::Sum, 8);
        let extent = Extent::of(&desc, Place::new(Rank(1), 4).expect("inside")).expect("fits");
        let (input, mut output) = ([0; 32], [0; 4]);
        let error = extent.check(&desc, &Buffers::Separate { input: &input, output: &mut output });
        let text = error.expect_err("too short").to_string();
        assert!(text.contains("4 bytes") && text.contains("needs 8"), "{text}");
        let too_large = OpDesc { count: u64::MAX, ..desc };
        assert!(Extent::of(&too_large, Place::new(Rank(1), 4).expect("inside")).is_err());
        let invalid_root = OpDesc::broadcast(Dtype::F32, Rank(4), 8);
        assert!(Extent::of(&invalid_root, Place::new(Rank(1), 4).expect("inside")).is_err());
    }
}
