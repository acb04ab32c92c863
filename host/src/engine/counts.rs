//! Operations on blocks of any length. They take pairwise exchange, which keeps every declared order; an all-to-all may
//! go through relays instead, if asked to by name or by an override ([`super::relayed`]).

use super::error::Error;
use crate::schedule::tree::Tree;
use crate::schedule::{Place, Schedule, pairwise};
use crate::select::Algo;
use sumac_hal::op::{Collective, OpDesc};

/// How many elements the blocks of ranks have, in an operation on blocks of any length. Blocks lie one behind the other
/// in rank order.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Counts {
    /// Of an all-to-all: what goes to each rank, and what comes from it, which must be what that rank sends.
    Exchange {
        /// The number of elements for each rank.
        send: Vec<usize>,
        /// The number of elements from each rank.
        recv: Vec<usize>,
    },
    /// Of an all-gather, what each rank contributes; of a reduce-scatter, what it gets. Must be the same on all ranks.
    Blocks(Vec<usize>),
}

impl Counts {
    /// Describe an operation with these counts: `desc` without its count, which the counts say.
    pub(crate) fn describe(&self, desc: &OpDesc) -> Result<OpDesc, Error> {
        let (collective, count) = match (self, desc.collective) {
            (Self::Exchange { .. }, Collective::AllToAll | Collective::AllToAllV) => (Collective::AllToAllV, 0),
            (Self::Blocks(counts), Collective::AllGather | Collective::ReduceScatter) => {
                let count = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
                let too_many = || Error::Argument("the counts of all ranks exceed the address space".into());
                (desc.collective, count.ok_or_else(too_many)? as u64)
            }
            _ => {
                let what = "an all-to-all takes counts to send and to receive; all-gather and reduce-scatter those of \
                            blocks; others none";
                return Err(Error::Argument(format!("{desc} with counts: {what}")));
            }
        };
        Ok(OpDesc { collective, count, ..*desc })
    }

    /// Return the algorithm that an operation described with these counts asks for: `call` is that of the call, if it
    /// names one, and `job` that of the job, which counts only where it takes these counts.
    ///
    /// # Errors
    /// [`Error::Argument`] if the call names one that takes no counts.
    pub(super) fn algo(&self, desc: &OpDesc, call: Option<Algo>, job: Algo) -> Result<Algo, Error> {
        match (self, call.unwrap_or(job), call) {
            (Self::Exchange { .. }, Algo::HierarchicalPairwise, _) => Ok(Algo::HierarchicalPairwise),
            (_, Algo::Auto, _) => Ok(Algo::Auto),
            (_, _, None | Some(Algo::Pairwise)) => Ok(Algo::Pairwise),
            (_, _, Some(other)) => Err(Error::Argument(format!(
                "{desc} with counts by {other}: takes {}, {} for an all-to-all, or {}",
                Algo::Pairwise,
                Algo::HierarchicalPairwise,
                Algo::Auto
            ))),
        }
    }

    /// Return the schedule of an operation that was described with these counts, by pairwise exchange.
    pub(super) fn schedule(&self, desc: &OpDesc, place: Place, tree: &Tree) -> Result<Schedule, Error> {
        let schedule = match self {
            Self::Exchange { send, recv } => pairwise::all_to_all_v(place, send, recv),
            Self::Blocks(counts) if desc.collective == Collective::AllGather => pairwise::all_gather_v(place, counts),
            Self::Blocks(counts) => pairwise::reduce_scatter_v(place, counts, tree),
        };
        schedule.map_err(|error| Error::Argument(error.to_string()))
    }
}
