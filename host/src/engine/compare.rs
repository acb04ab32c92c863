//! Comparing calls with those of ranks that do not announce theirs to the tree.
//!
//! A host collective is announced to the tree, whose nodes compare it with what the other ranks call. That costs the
//! devices as much as an operation, and on one machine they take it from the processors on which the ranks work. There,
//! an operation is not announced if no rank can end it before all have begun it: whoever calls something else leaves
//! the others waiting. Each of them has sent or announced its call to the rank that it waits for ([`crate::exec`]), and
//! a rank that waits in the tree looks now and then at what has arrived from the others: the number of their call tells
//! whether it should be the same.
//!
//! On any number of machines, it looks whether another rank has ended an earlier call with an error. This rank's part
//! of that call may have been complete before; the other one never comes to the operation in the tree.
//!
//! Invariants:
//! - What is announced follows from the operation and the job, so all ranks announce the same operations.
//! - A rank that finds another call under its own call's number ends the job's communicator on all ranks, as a node
//!   would.

use super::connections::HostPath;
use super::error::Error;
use super::operations::Operations;
use crate::exec::board::is_for_board;
use crate::exec::{NoInterrupt, end_different, other_calls};
use crate::transport::packets::OpId;
use std::time::{Duration, Instant};
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::wire::StragglerLimit;

/// How often a rank that waits in the tree looks at the others' calls.
const INTERVAL: Duration = Duration::from_millis(20);

/// Return whether a host collective of ranks on one machine is left to them to compare. Straggler limits are the tree's
/// to watch.
pub(super) fn is_left_to_ranks(desc: &OpDesc, path: Path, limit: Option<StragglerLimit>, ranks: u32) -> bool {
    limit.is_none() && (is_for_board(desc, path, ranks) || is_for_all(desc, path))
}

/// Return whether no rank ends a host collective before all have begun it: what each receives depends on all of them.
/// That of blocks of any length may not, as these may be empty; they are described like the others of their algorithm.
const fn is_for_all(desc: &OpDesc, path: Path) -> bool {
    let is_for_all = match desc.collective {
        Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather => {
            !matches!(path, Path::Pairwise | Path::Hybrid | Path::Rab)
        }
        Collective::AllToAll => !matches!(path, Path::Hybrid),
        _ => false,
    };
    is_for_all && desc.count > 0
}

/// When a rank that waits in the tree looks at the others' calls next.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    /// `None` while nothing waits.
    due_at: Option<Instant>,
}

impl Comparison {
    /// Something is complete, so nobody has waited long.
    pub(super) const fn put_off(&mut self) {
        self.due_at = None;
    }

    /// Look at the others' calls if it is time and an operation waits in the tree, where those below a number are
    /// complete. Returns when to look next. On one machine, `one_machine` is the version of the cost table.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if another rank called something else, or the error that has ended an earlier call.
    pub(super) fn compare(
        &mut self,
        now: Instant,
        host: &mut HostPath,
        (operations, completed_below): (&Operations, OpId),
        one_machine: Option<u32>,
    ) -> Result<Option<Duration>, Error> {
        if !operations.waits_in_tree(completed_below) {
            self.due_at = None;
            return Ok(None);
        }
        match self.due_at {
            Some(due_at) if due_at > now => return Ok(Some(due_at - now)),
            Some(_) => compare_now(host, (operations, completed_below), one_machine)?,
            None => {}
        }
        self.due_at = Some(now + INTERVAL);
        Ok(Some(INTERVAL))
    }
}

fn compare_now(
    host: &mut HostPath,
    (operations, completed_below): (&Operations, OpId),
    one_machine: Option<u32>,
) -> Result<(), Error> {
    let Some(mesh) = host.mesh() else { return Ok(()) };
    let calls = match other_calls(mesh, &mut NoInterrupt) {
        Ok(calls) => calls,
        Err(error) => {
            let waiting = operations.first_in_tree(completed_below);
            let is_earlier = mesh.aborted_call().zip(waiting).is_some_and(|(aborted, first)| is_before(aborted, first));
            return match Error::from(error) {
                // Another rank has noticed it first. Between hosts, where all calls are announced, the tree's root
                // tells all ranks the same error.
                error @ Error::Mismatch { .. } if one_machine.is_some() => Err(error),
                error @ Error::Schedule(_) if is_earlier => Err(error),
                // Of a later call, so that this one can still end; or what the controller tells, as the loss of a rank.
                _ => Ok(()),
            };
        }
    };
    let Some(table_version) = one_machine else { return Ok(()) };
    let in_tree = |number| operations.in_tree_by_number(number, completed_below);
    let different = calls.into_iter().find_map(|(number, theirs)| Some((in_tree(number)?, theirs)));
    different.map_or(Ok(()), |(desc, theirs)| {
        Err(end_different(mesh, (&desc, desc.signature(Path::Tree, table_version)), theirs).into())
    })
}

/// Return whether one call's number is before another's, modulo 2^32.
const fn is_before(one: u32, other: u32) -> bool {
    one.wrapping_sub(other).cast_signed() < 0
}
