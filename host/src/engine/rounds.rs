//! Short calls on the board of one machine's ranks, decided before ([`crate::exec::round`]).
//!
//! Where nothing else is under way, such a call posts, reads and combines, and touches nothing else. Invariant: for the
//! other ranks it is the same as any other call of the same operation.

use super::connections::Collective;
use super::core::Core;
use super::decided::{Decided, Settled};
use super::error::Error;
use super::operations::number_of;
use super::options::{CallOptions, Outcome};
use crate::exec::board::is_for_board;
use crate::exec::round::{Attempt, Begun, Round};
use crate::exec::{Buffers, Execution, Mesh};
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path, ReduceOp};
use sumac_hal::wire::RankMask;

/// One of so many calls takes the way of all others, which drives the tree, too.
const OTHER_WAY_INTERVAL: u64 = 1024;

impl Core {
    /// Return how this operation was decided when it was last called, if it is a short one.
    pub(super) fn decided_before(
        &mut self,
        (desc, options): (&OpDesc, &CallOptions),
        is_in_place: bool,
    ) -> Option<Arc<Decided>> {
        if !self.is_for_ranks_alone((desc, options)) {
            return None;
        }
        let algo = self.data.algo(desc, options).ok()?;
        self.data.selection.decided.find(&(*desc, algo, is_in_place))
    }

    /// Keep how a call was decided, if it is for the board, for the next call of the operation.
    pub(super) fn keep_decided(&mut self, (desc, path): (&OpDesc, Path), options: &CallOptions, is_in_place: bool) {
        if !is_for_board(desc, path, self.data.place.ranks()) || !self.is_for_ranks_alone((desc, options)) {
            return;
        }
        let Some(decided) = self.decide(desc, options, is_in_place) else { return };
        if let (true, Ok(algo)) = (decided.round.is_some(), self.data.algo(desc, options)) {
            self.data.selection.decided.keep((*desc, algo, is_in_place), Arc::new(decided));
        }
    }

    /// Lay out an operation that runs on the board, as `decided` without the round says.
    pub(super) fn round(
        &self,
        (desc, options): (&OpDesc, &CallOptions),
        decided: &Decided,
        is_in_place: bool,
    ) -> Option<Arc<Round>> {
        if !self.is_for_ranks_alone((desc, options)) {
            return None;
        }
        let (operation, kernel) = ((desc, decided.chosen.path), super::connections::kernel(desc));
        let table_version = self.data.selection.context().table.version;
        Round::new(operation, table_version, &decided.schedule, kernel, is_in_place).ok()?.map(Arc::new)
    }

    /// Return whether no tree has to know of a short operation, and nothing is done to its input before.
    fn is_for_ranks_alone(&self, (desc, options): (&OpDesc, &CallOptions)) -> bool {
        let is_unscaled = options.scalar.is_none() && desc.op != Some(ReduceOp::PremulSum);
        is_unscaled && self.data.policy(options).limit().is_none() && self.data.selection.is_on_one_machine()
    }

    /// Run a call as it was decided, if the buffers have the right lengths, the board can be used and nothing else is
    /// under way. `None`: it has not begun. The next call may be settled if nothing but this one is done under the
    /// core's lock, and `changes` is what [`Notices::changes`](super::notices::Notices::changes) returned before the
    /// communicator was found to be usable.
    #[inline]
    pub(super) fn run_round(
        &mut self,
        call: (&OpDesc, &CallOptions),
        (decided, changes): (&Decided, Option<u64>),
        buffers: Buffers<'_>,
    ) -> Option<Result<Outcome, Error>> {
        let round = decided.round.as_deref()?;
        let (generation, missing) = self.data.generation();
        if !decided.is_of(generation) || !self.is_quiet(missing) || !round.fits(&buffers) {
            return None;
        }
        let number = self.count_short_call()?;
        if !self.data.host.mesh().is_some_and(Mesh::can_attempt) {
            self.uncount_call(number);
            return None;
        }
        let settled = changes.filter(|_| missing.is_empty()).map(|changes| Settled { generation, changes });
        self.attempt((call, number), (decided, round), buffers, (settled, missing))
    }

    /// Run a call as it was decided, if nothing has changed since the last call was an attempt that was complete.
    /// `None`: it has not begun.
    #[inline]
    pub(super) fn run_settled(
        &mut self,
        call: (&OpDesc, &CallOptions),
        (decided, settled): (&Decided, Settled),
        buffers: Buffers<'_>,
    ) -> Option<Result<Outcome, Error>> {
        let round = decided.round.as_deref()?;
        let now = Settled { generation: decided.generation, changes: self.notices().changes() };
        if settled != now || !round.fits(&buffers) {
            return None;
        }
        let number = self.count_short_call()?;
        self.attempt((call, number), (decided, round), buffers, (Some(settled), RankMask::EMPTY))
    }

    /// Count a call, unless it takes the way of all others.
    #[inline]
    fn count_short_call(&mut self) -> Option<u64> {
        let number = self.notices().migration.count_open_call()?;
        if number % OTHER_WAY_INTERVAL == 0 {
            self.uncount_call(number);
            return None;
        }
        Some(number)
    }

    /// Attempt a call that was counted, and finish it. If it is complete at once, the next one finds things as
    /// `settled` says.
    #[inline]
    fn attempt(
        &mut self,
        (call, number): ((&OpDesc, &CallOptions), u64),
        (decided, round): (&Decided, &Round),
        mut buffers: Buffers<'_>,
        (settled, missing): (Option<Settled>, RankMask),
    ) -> Option<Result<Outcome, Error>> {
        let Some(connections) = self.data.host.connections() else {
            self.uncount_call(number);
            return None;
        };
        let told = number_of(number);
        match connections.attempt((round, told), buffers.reborrow()) {
            (Attempt::Complete, _) => {
                self.settled = settled;
                Some(Ok(Outcome {
                    path: decided.chosen.path,
                    trees: 0,
                    transfer: None,
                    fallback: decided.chosen.fallback.clone(),
                    wire_bytes: round.sent_bytes(),
                    retransmits: 0,
                    recovered: false,
                    slowest: None,
                    missing,
                }))
            }
            (Attempt::Begun(begun), op_index) => {
                self.data.operations.calling = Some(number);
                let result = self.finish_round(call, (decided, round), (begun, (op_index, told)), buffers);
                self.data.operations.calling = None;
                Some(result)
            }
        }
    }

    /// Finish a call that an attempt has begun.
    fn finish_round(
        &mut self,
        (desc, options): (&OpDesc, &CallOptions),
        (decided, round): (&Decided, &Round),
        (attempted, numbers): (Begun, (u64, u32)),
        buffers: Buffers<'_>,
    ) -> Result<Outcome, Error> {
        let now = Instant::now();
        let (deadline, begun) = (self.deadline_from(now, options), self.data.snapshot(now));
        let result = self.with_connections(|core, connections| {
            let mesh = &mut connections.mesh;
            let execution = Execution::continued(mesh, (round, attempted), buffers, (numbers, deadline.0));
            core.drive_host(&mut Collective::begun(execution), deadline)
        });
        // Other ranks know of it, so no error is a rejection.
        let result = result.map_err(|error| self.agreed_loss_error(error.ending(), deadline));
        match result {
            Ok(()) => Ok(self.data.outcome(&decided.chosen, None, begun)),
            Err(error) => Err(self.end(error, desc, begun)),
        }
    }

    /// Return whether no operation is under way, and nothing has been reported that calls must handle.
    #[inline]
    pub(super) fn is_quiet(&self, excluded: RankMask) -> bool {
        let watch = &self.data.watch;
        self.data.operations.is_idle() && !watch.notices.dropped.is_any() && !watch.needs_view_change(excluded)
    }
}
