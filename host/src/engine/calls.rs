//! Blocking calls.

use super::core::Core;
use super::counts::Counts;
use super::data_path::{Deadline, Stop};
use super::decided::{Chosen, Decided};
use super::error::{Error, OutputState};
use super::extent::Extent;
use super::in_flight::BorrowedBuffers;
use super::operations::{Awaited, CounterSnapshot, NextStep};
use super::options::{CallOptions, Outcome};
use super::task::check_scalar;
use crate::exec::Buffers;
use crate::exec::board::is_for_board;
use crate::schedule::Schedule;
use crate::schedule::hierarchical_pairwise::relayed;
use crate::select::{Algo, RuledOut, is_by_rails};
use crate::transport::memory::Transfer;
use crate::transport::packets::{MAX_OPS, OpId};
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::wire::StragglerLimit;

/// The result of running a blocking call's operation in the tree.
enum TreeRun {
    /// The result is in the call's buffers.
    Done(Option<OpId>, Transfer),
    /// The tree was lost before all ranks had entered the operation; start it again.
    Restart,
}

impl Core {
    /// Run an operation to completion.
    pub(crate) fn run(
        &mut self,
        desc: OpDesc,
        buffers: &mut Buffers<'_>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let result = self.run_to_end(desc, buffers, options);
        self.data.operations.calling = None;
        result
    }

    /// Run a share of an operation in this communicator's tree or, if that is lost, between the ranks.
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub(super) fn run_share(
        &mut self,
        desc: OpDesc,
        buffers: &mut Buffers<'_>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        let by = |algo| CallOptions { algo: Some(algo), ..*options };
        match self.run(desc, buffers, &by(Algo::Tree)) {
            Err(Error::NotPossible(_)) => self.run(desc, buffers, &by(Algo::Auto)),
            done => done,
        }
    }

    fn run_to_end(&mut self, desc: OpDesc, buffers: &mut Buffers<'_>, options: &CallOptions) -> Result<Outcome, Error> {
        self.check_usable()?;
        let is_in_place = matches!(buffers, Buffers::InPlace(_));
        let is_short = is_for_board(&desc, Path::OneShot, self.data.place.ranks());
        let decided = if is_short { self.decided_before((&desc, options), is_in_place) } else { None };
        let run =
            |core: &mut Self, decided: &Decided, buffers| core.run_round((&desc, options), (decided, None), buffers);
        if let Some(result) = decided.as_ref().and_then(|decided| run(self, decided, buffers.reborrow())) {
            return result;
        }
        let extent = Extent::of(&desc, self.data.place)?;
        extent.check(&desc, buffers)?;
        let result = self.run_checked((desc, options), &extent, buffers, decided.as_deref());
        if let (true, None, Ok(outcome)) = (is_short, decided, &result) {
            self.keep_decided((&desc, outcome.path), options, is_in_place);
        }
        result
    }

    /// Run an operation whose buffers have the right lengths, as `decided` if that still applies.
    pub(super) fn run_checked(
        &mut self,
        (desc, options): (OpDesc, &CallOptions),
        extent: &Extent,
        buffers: &mut Buffers<'_>,
        decided: Option<&Decided>,
    ) -> Result<Outcome, Error> {
        let scaled = premultiply(&desc, extent, buffers, options)?;
        let now = Instant::now();
        let (deadline, before) = (self.deadline_from(now, options), self.data.snapshot(now));
        let ready = self.make_room(deadline).and_then(|()| self.begin_call(deadline));
        ready.map_err(|error| self.end(error, &desc, before))?;
        let begun = self.data.snapshot(now);
        let buffers = match (&scaled, buffers) {
            // Scale into a separate input, so that the caller's buffer receives only results: the call may still be
            // rejected, or report which elements are results.
            (Some(input), Buffers::InPlace(buffer)) => {
                Buffers::Separate { input, output: &mut buffer[extent.output.clone()] }
            }
            (Some(input), Buffers::Separate { output, .. }) => Buffers::Separate { input, output },
            (None, Buffers::InPlace(buffer)) => Buffers::InPlace(buffer),
            (None, Buffers::Separate { input, output }) => Buffers::Separate { input, output },
        };
        let result = self.run_call((desc, options, decided), extent, buffers, (deadline, begun));
        result.map_err(|error| {
            let error = self.end(error, &desc, begun);
            self.release_rejected_call(error)
        })
    }

    /// Run a counted operation. A rejection has had no effect.
    fn run_call(
        &mut self,
        (desc, options, decided): (OpDesc, &CallOptions, Option<&Decided>),
        extent: &Extent,
        mut buffers: Buffers<'_>,
        (deadline, begun): (Deadline, CounterSnapshot),
    ) -> Result<Outcome, Error> {
        let limit = self.data.policy(options).limit();
        loop {
            let generation = self.data.generation().0;
            let (chosen, schedule) = match decided.filter(|decided| decided.is_of(generation)) {
                Some(decided) => (decided.chosen.clone(), Some(Arc::clone(&decided.schedule))),
                None => (self.data.choose(&desc, options)?, None),
            };
            if is_by_rails(chosen.path) {
                let block = self.run_by_rails((&desc, options), &chosen, buffers, deadline)?;
                return Ok(self.data.outcome(&chosen, None, begun).with_block(block));
            }
            if chosen.path != Path::Tree {
                self.run_by_schedule((&desc, options), (&chosen, schedule), buffers, deadline)?;
                return Ok(self.data.outcome(&chosen, None, begun));
            }
            if self.data.operations.has_schedules() {
                // Ranks that wait in one of these have not come to this call. The view may change meanwhile.
                self.run_next_schedule(deadline)?;
                continue;
            }
            if let TreeRun::Done(op, transfer) = self.run_in_tree((desc, limit), extent, &mut buffers, deadline)? {
                extent.copy_own(&desc, &mut buffers);
                let outcome = self.data.outcome(&chosen, Some(transfer), begun);
                return Ok(self.data.tree.with_completion(op, outcome));
            }
        }
    }

    /// Run an operation in the tree.
    fn run_in_tree(
        &mut self,
        (desc, limit): (OpDesc, Option<StragglerLimit>),
        extent: &Extent,
        buffers: &mut Buffers<'_>,
        deadline: Deadline,
    ) -> Result<TreeRun, Error> {
        let posted = match self.data.post(&desc, limit, (extent, &mut *buffers)) {
            Err(Stop::ViewInQuestion(cause)) => {
                let changed = self.change_view(None, &cause, deadline);
                changed.map_err(|error| error.with_output(OutputState::Elements(Vec::new())))?;
                return Ok(TreeRun::Restart);
            }
            Err(Stop::Failed(error)) => return Err(error),
            Ok(posted) => posted,
        };
        let Some((op, transfer)) = posted else { return Ok(TreeRun::Restart) };
        while !self.data.tree.is_complete(op) {
            let borrowed = BorrowedBuffers { op, extent, buffers: &mut *buffers };
            self.data.operations.calling_in_tree = Some(desc);
            let stepped = self.data.step(Some(borrowed), deadline);
            // A change of the view may let the same call run by another path.
            self.data.operations.calling_in_tree = None;
            match stepped {
                Err(Stop::ViewInQuestion(cause)) => {
                    let borrowed = BorrowedBuffers { op, extent, buffers: &mut *buffers };
                    return match self.change_view(Some(borrowed), &cause, deadline) {
                        Ok(completed_below) if op < completed_below => Ok(TreeRun::Done(None, transfer)),
                        Ok(_) => Ok(TreeRun::Restart),
                        Err(error) if self.data.tree.is_complete(op) => {
                            self.note_unreported_end(error);
                            Ok(TreeRun::Done(None, transfer))
                        }
                        Err(error) => Err(error.with_output(self.data.tree.output_state(op))),
                    };
                }
                Err(Stop::Failed(error)) => return Err(error),
                Ok(()) => {}
            }
        }
        Ok(TreeRun::Done(Some(op), transfer))
    }

    /// Wait until another operation may be posted: the number of operations in an endpoint and of started host
    /// collectives is bounded. Nothing has been sent for the call.
    ///
    /// Runs a started host collective if all ranks have started it, because a rank that waits for it may be the one
    /// that must make room.
    ///
    /// # Errors
    /// [`Error::TooManyInFlight`] if the deadline passes, or an error that ends the communicator.
    pub(super) fn make_room(&mut self, deadline: Deadline) -> Result<(), Error> {
        self.data.reclaim_dropped();
        while !self.data.has_room() {
            if self.data.next_step(Awaited::Room) == NextStep::RunSchedule {
                self.run_next_schedule(deadline)?;
                continue;
            }
            match self.data.step(None, deadline) {
                Err(Stop::Failed(Error::Deadline { waited, .. })) if !self.data.has_room() => {
                    return Err(Error::TooManyInFlight { limit: MAX_OPS, waited });
                }
                Err(Stop::Failed(Error::Deadline { .. })) => {}
                stepped => _ = self.resume(stepped, deadline)?,
            }
        }
        Ok(())
    }

    /// Wait until an operation may be posted, before other trees get their shares of it.
    ///
    /// # Errors
    /// As those of [`Core::make_room`].
    pub(super) fn reserve_room(&mut self, desc: &OpDesc, options: &CallOptions) -> Result<(), Error> {
        let now = Instant::now();
        let (deadline, begun) = (self.deadline_from(now, options), self.data.snapshot(now));
        self.make_room(deadline).map_err(|error| self.end(error, desc, begun))
    }

    /// Run an operation on blocks of any length. Ranks compare what [`Counts::describe`] says, not the counts; the
    /// executor detects lengths that do not match.
    pub(crate) fn run_uneven(
        &mut self,
        desc: OpDesc,
        counts: &Counts,
        buffers: Buffers<'_>,
        options: &CallOptions,
    ) -> Result<Outcome, Error> {
        self.check_usable()?;
        let (path, schedule) = self.uneven_schedule((&desc, options), counts)?;
        let extent = Extent::of_layout(schedule.layout(), &desc);
        extent.check(&desc, &buffers)?;
        let scaled = premultiply(&desc, &extent, &buffers, options)?;
        let buffers = match (&scaled, buffers) {
            (Some(input), Buffers::Separate { output, .. }) => Buffers::Separate { input, output },
            (_, buffers) => buffers,
        };
        let limit = self.data.policy(options).limit();
        let now = Instant::now();
        let (deadline, begun) = (self.deadline_from(now, options), self.data.snapshot(now));
        let begins = self.make_room(deadline).and_then(|()| self.begin_call(deadline));
        let begins = begins.and_then(|()| self.finish_started(deadline));
        let result = begins.and_then(|()| {
            let chosen = self.uneven_choice(path);
            let announced = self.data.announce(&desc, &chosen, limit)?;
            self.run_by_counts((&desc, path, counts), &schedule, buffers, announced, deadline)?;
            Ok(chosen)
        });
        let result = result.map_err(|error| {
            let error = self.end(error, &desc, begun);
            self.release_rejected_call(error)
        });
        self.data.operations.calling = None;
        Ok(self.data.outcome(&result?, None, begun))
    }

    /// Run an operation on uneven blocks, which was announced to the tree.
    pub(super) fn run_by_counts(
        &mut self,
        (desc, path, counts): (&OpDesc, Path, &Counts),
        schedule: &Schedule,
        buffers: Buffers<'_>,
        announced: Option<OpId>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        match counts {
            Counts::Exchange { send, recv } if path == Path::HierarchicalPairwise => {
                self.run_relayed((desc, send, recv), buffers, announced, deadline)
            }
            _ => self.run_announced((desc, path), schedule, buffers, announced, deadline),
        }
    }

    /// Return the path of an operation on uneven blocks, and the schedule that it has by pairwise exchange, which tells
    /// the lengths of its buffers for every path.
    pub(super) fn uneven_schedule(
        &self,
        (desc, options): (&OpDesc, &CallOptions),
        counts: &Counts,
    ) -> Result<(Path, Schedule), Error> {
        let (place, context) = (self.data.place, self.data.selection.context());
        let schedule = counts.schedule(desc, place, context.declared.tree())?;
        let (path, shape, ranks) = (Path::HierarchicalPairwise, context.shape_of(place.ranks()), place.ranks());
        let is_overridden = context.table.overridden(desc) == Some(path);
        let (requested, has_servers) =
            (counts.algo(desc, options.algo, self.data.config.algo)?, relayed::servers(shape, ranks).is_some());
        let algo = match requested {
            Algo::Auto if is_overridden && has_servers => Algo::HierarchicalPairwise,
            Algo::HierarchicalPairwise if ranks > 1 => requested,
            _ => Algo::Pairwise,
        };
        self.data.policy(&CallOptions { algo: Some(algo), ..*options }).algo(desc)?;
        match algo {
            Algo::HierarchicalPairwise if has_servers => Ok((path, schedule)),
            Algo::HierarchicalPairwise => Err(Error::NotPossible(RuledOut::Shape { path: path.name(), shape, ranks })),
            _ => Ok((Path::Pairwise, schedule)),
        }
    }

    /// Return how the call that is running works on uneven blocks.
    pub(super) fn uneven_choice(&self, path: Path) -> Chosen {
        let call = self.data.operations.calling.unwrap_or_default();
        let is_announced = self.data.selection.is_announced(call);
        Chosen { path, fallback: None, is_announced }
    }
}

/// Return a rank's scaled contribution to a premultiplied sum; `None` for any other operation. The caller's buffers are
/// not changed.
pub(super) fn premultiply(
    desc: &OpDesc,
    extent: &Extent,
    buffers: &Buffers<'_>,
    options: &CallOptions,
) -> Result<Option<Vec<u8>>, Error> {
    check_scalar(desc, options)?;
    if desc.op != Some(ReduceOp::PremulSum) {
        return Ok(None);
    }
    let scalar = options.scalar.unwrap_or(1.0);
    let Some(kernel) = desc.dtype.and_then(|dtype| Kernel::new(dtype, ReduceOp::PremulSum)) else { return Ok(None) };
    let mut scaled = vec![0; extent.input.len()];
    let input = extent.input(buffers);
    kernel.scale(&mut scaled, input, scalar).map_err(|error| Error::Argument(format!("{desc}: {error}")))?;
    Ok(Some(scaled))
}
