//! The driver of a communicator: it takes up what the data path stops for ([`Stop`](super::data_path::Stop)), hands the
//! question of the view to [`crate::recovery`], and carries out what that decides.
//!
//! The files of the driver build on each other in this order: this one; [`super::change`], the view change;
//! [`super::host`], work on the connections between ranks; [`super::migrate`], where calls begin; and the calls
//! themselves ([`super::calls`], [`super::started`], [`super::messages`], [`super::leave`]).

use super::config::JoinConfig;
use super::data_path::{DataPath, Deadline};
use super::decided::Settled;
use super::element::Element;
use super::error::{Error, OutputState};
use super::inside::Inside;
use super::membership::MembershipChannel;
use super::notices::Notices;
use super::operations::CounterSnapshot;
use super::options::{CallOptions, Outstanding, Recoveries};
use super::rail::Rail;
use super::thread_progress::ThreadProgress;
use super::tree::Tree;
use crate::controller::proto::RailJobs;
use crate::controller::{ClientError, Controller, Session};
use crate::deadline::after;
use crate::exec::{ExecError, JobSecret};
use crate::schedule::Place;
use crate::select::{Explanation, JobFacts, SelectionContext, TreeFacts};
use crate::transport::local::HostDevice;
use crate::transport::memory::{Buffer as RegisteredBuffer, RegisterError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, OpDesc};

/// Why there are no rails unless the configuration asks for them.
pub(super) const NO_RAILS_ASKED: &str =
    "the ranks have not joined rails; set SUMAC_HYBRID=1 alike on all of them, or join with the algorithm hybrid";

/// Why the leaders of servers have no tree unless the configuration asks for one.
pub(super) const NO_LEADERS_ASKED: &str =
    "the leaders of servers have not joined a tree; set SUMAC_RAB=1 alike on all ranks, or join with the algorithm rab";

/// A communicator: its data path, and its membership in the job.
pub(crate) struct Core {
    pub(super) data: DataPath,
    pub(super) members: Members,
    /// The communicator ended outside of a call, so the next one reports the error.
    is_end_unreported: bool,
    /// The number of successful recoveries, and their total time.
    pub(super) recoveries: (u32, Duration),
    /// This rank's rail, if it has joined one.
    pub(super) rail: Option<Arc<Rail>>,
    /// The parts inside servers of the last operation that had some.
    pub(super) inside: Option<Arc<Inside>>,
    splits: u64,
    /// What the next short call need not look at again ([`super::rounds`]).
    pub(super) settled: Option<Settled>,
}

/// A rank's membership in its job.
pub(super) struct Members {
    /// The connection to the controller, until this rank leaves.
    pub(super) session: Option<Session>,
    /// The membership channel; `None` without recovery.
    pub(super) channel: Option<MembershipChannel>,
    /// The secret that connections between ranks are authenticated by.
    pub(super) secret: JobSecret,
    /// The number of ranks with this one's IP address.
    pub(super) ranks_here: usize,
    /// The job's controller, if this rank runs it. Dropped after the connection to it.
    pub(super) embedded: Option<Arc<Controller>>,
    /// The device of this host's ranks, if this rank runs it.
    pub(super) host_device: Option<HostDevice>,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (config, selection) = (&self.data.config, self.data.selection.context());
        f.debug_struct("Core").field("config", config).field("selection", selection).finish_non_exhaustive()
    }
}

impl Core {
    pub(super) const fn new(data: DataPath, members: Members) -> Self {
        Self {
            data,
            members,
            is_end_unreported: false,
            recoveries: (0, Duration::ZERO),
            rail: None,
            inside: None,
            splits: 0,
            settled: None,
        }
    }

    /// Whatever the next short call depends on may change now.
    pub(super) const fn unsettle(&mut self) {
        self.settled = None;
    }

    /// Leave progress to a thread.
    pub(super) fn set_progress(&mut self, progress: Option<ThreadProgress>) {
        self.data.progress = progress;
    }

    pub(super) const fn notices(&self) -> &Arc<Notices> {
        &self.data.watch.notices
    }

    /// Process dropped handles.
    pub(super) fn reclaim_dropped(&mut self) {
        self.data.reclaim_dropped();
    }

    /// Return the started operations and messages that the communicator holds.
    pub(crate) fn outstanding(&mut self) -> Outstanding {
        self.data.outstanding()
    }

    /// Allocate memory for operations, registered with the leaf device if there is one. If the communicator has ended,
    /// its next call reports that.
    pub(crate) fn alloc<T: Element>(&mut self, len: usize) -> Result<RegisteredBuffer<T>, Error> {
        let is_active = self.data.ended.is_none() && !self.notices().is_cancelled();
        let may_recover = self.data.config.recover;
        let Some(Tree::ZeroCopy(driver)) = self.data.tree.get_mut().filter(|_| is_active) else {
            return Ok(RegisteredBuffer::plain(len));
        };
        driver.export_to(self.data.host.exports());
        match driver.alloc(len) {
            // The next operation notices this too, and recovers. Without the device, ordinary memory will do.
            Err(RegisterError::DeviceLost) if may_recover => Ok(RegisteredBuffer::plain(len)),
            allocated => allocated.map_err(|reason| Error::Memory {
                device: driver.device().into(),
                len_bytes: len.saturating_mul(size_of::<T>()),
                reason,
            }),
        }
    }

    #[cfg(test)]
    pub(crate) fn mapped_regions(&mut self) -> usize {
        self.data.host.mesh().map_or(0, |mesh| mesh.mapped_regions())
    }

    /// Return the configuration that a sub-communicator inherits, and the number of this split.
    pub(crate) fn next_split(&mut self) -> (JoinConfig, u64) {
        self.splits += 1;
        (self.data.config.clone(), self.splits - 1)
    }

    /// Return the controller that this rank runs for the job, if it does.
    pub(crate) fn embedded_controller(&self) -> Option<Arc<Controller>> {
        self.members.embedded.clone()
    }

    /// Keep the controller of the communicator that this one comes from.
    pub(crate) fn keep_controller(&mut self, controller: Option<Arc<Controller>>) {
        self.members.embedded = controller;
    }

    /// Return the recoveries so far, with those of this rank's rail.
    pub(crate) fn recoveries(&self) -> Recoveries {
        let own =
            Recoveries { count: self.recoveries.0, time: self.recoveries.1, bytes: self.data.host.recovery_bytes };
        self.rail.as_ref().map_or(own, |rail| rail.recoveries(own))
    }

    /// Continue with this rank's rail, if it has one, and with what rails are selected by, or why there are none.
    pub(super) fn set_rail(&mut self, joins: RailJobs, rail: Option<Arc<Rail>>, facts: Result<TreeFacts, String>) {
        self.rail = rail;
        let context = self.selection_context();
        let rails = if joins == RailJobs::All { facts.clone() } else { context.rails.clone() };
        self.data.selection.install(SelectionContext { rails, leaders: facts, ..context });
    }

    /// Return this rank's rail, if it has one.
    pub(crate) const fn rail(&self) -> Option<&Arc<Rail>> {
        self.rail.as_ref()
    }

    /// Return the configuration.
    pub(crate) const fn config(&self) -> &JoinConfig {
        &self.data.config
    }

    /// Return which ranks survive, as the controller reports it until `deadline`; `None` if this rank is no member.
    pub(crate) fn survivors(&self, deadline: Instant) -> Option<Result<(u32, Vec<Rank>), ClientError>> {
        self.members.session.as_ref().map(|session| session.survivors(deadline))
    }

    pub(crate) fn explain(&self, desc: &OpDesc, options: &CallOptions) -> Explanation {
        let algo = options.algo.unwrap_or(self.data.config.algo);
        let found = self.data.selection.explain(desc, algo, self.notices().queue_position());
        self.data.policy(options).apply(desc, found)
    }

    /// Return what the costs of operations depend on.
    pub(crate) fn facts(&self) -> JobFacts {
        self.data.selection.context().facts()
    }

    /// Return what operations are selected by.
    pub(super) fn selection_context(&self) -> SelectionContext {
        self.data.selection.context().clone()
    }

    /// Return this rank's place among the ranks.
    pub(super) const fn place(&self) -> Place {
        self.data.place
    }

    /// Return how many calls have begun: the number of the next one.
    pub(super) fn calls_begun(&self) -> u64 {
        self.notices().migration.begun()
    }

    /// Return whether this rank receives results of an operation of which all elements go the same way.
    pub(super) fn receives(&self, desc: &OpDesc) -> bool {
        match desc.collective {
            Collective::Reduce => self.data.place.rank() == desc.root,
            Collective::Broadcast => self.data.place.rank() != desc.root,
            _ => true,
        }
    }

    pub(super) fn deadline(&self, options: &CallOptions) -> Deadline {
        self.deadline_from(Instant::now(), options)
    }

    /// Return the deadline of a call that begins now.
    pub(super) fn deadline_from(&self, now: Instant, options: &CallOptions) -> Deadline {
        let limit = self.data.policy(options).timeout();
        (after(now, limit), limit)
    }

    #[inline]
    pub(super) fn check_usable(&mut self) -> Result<(), Error> {
        match self.data.ended.is_none() && !self.notices().is_cancelled() {
            true => Ok(()),
            false => self.check_ended(),
        }
    }

    #[cold]
    fn check_ended(&mut self) -> Result<(), Error> {
        match &self.data.ended {
            Some(error) if std::mem::take(&mut self.is_end_unreported) => Err(error.clone()),
            Some(Error::Left) => Err(Error::Left),
            // The call has not begun, so its output is unchanged.
            Some(error) => Err(Error::Ended(Box::new(error.clone().with_output(OutputState::Elements(Vec::new()))))),
            None if self.notices().is_cancelled() => {
                self.note_end(&Error::Cancelled);
                Err(Error::Cancelled)
            }
            None => Ok(()),
        }
    }

    /// End the communicator, unless the error is a rejection. Completes the error with what the call knows.
    pub(super) fn end(&mut self, error: Error, desc: &OpDesc, begun: CounterSnapshot) -> Error {
        let error = match error {
            Error::Schedule(ExecError::Deadline { .. }) => Error::Deadline { desc: *desc, waited: begun.at.elapsed() },
            Error::Deadline { waited, .. } => Error::Deadline { desc: *desc, waited },
            Error::TooManyInFlight { limit, .. } => Error::TooManyInFlight { limit, waited: begun.at.elapsed() },
            Error::OutcomeUnknown { waited, output, .. } => Error::OutcomeUnknown { desc: *desc, waited, output },
            other => other,
        };
        let had_ended = self.data.ended.is_some();
        self.note_end(&error);
        match &self.data.ended {
            Some(Error::OutcomeUnknown { output, .. })
                if !had_ended && !error.describes_output() && self.data.tree.is_output_unknown() =>
            {
                Error::OutcomeUnknown { desc: *desc, waited: begun.at.elapsed(), output: output.clone() }
            }
            _ => error,
        }
    }

    /// Record the error that ends the communicator, and stop all access to buffers, which go back to the caller.
    pub(crate) fn note_end(&mut self, error: &Error) {
        if !error.is_rejection() && self.data.ended.is_none() {
            let (job, rank) = (&self.data.config.job, self.data.config.rank);
            crate::log::warn!(job, rank, %error, "the communicator has ended");
            self.data.ended = Some(error.clone());
            if let (Some(session), Some(reason)) = (&self.members.session, error.abort_reason()) {
                session.abort(reason);
            }
            self.data.tree.retire();
            self.members.channel.iter().for_each(MembershipChannel::end);
            if self.data.tree.is_output_unknown() && !error.describes_output() {
                let (desc, waited, output) = (OpDesc::barrier(), Duration::ZERO, OutputState::Unspecified);
                self.data.ended = Some(Error::OutcomeUnknown { desc, waited, output });
            }
            // Nothing writes to their buffers any more.
            self.data.reclaim_detached();
            self.rail.iter().for_each(|rail| rail.end(error));
        }
        if matches!(error, Error::Cancelled) {
            // Drop the session without leaving, so that the controller reports this rank as lost.
            self.members.session = None;
        }
    }

    /// Return whether the communicator has ended outside of a call, and no call has returned the error.
    pub(super) const fn is_end_unreported(&self) -> bool {
        self.is_end_unreported
    }

    /// A call has returned the error that the communicator ended with.
    pub(super) const fn set_end_reported(&mut self) {
        self.is_end_unreported = false;
    }

    /// No call has returned the error that the communicator ended with: the next one does.
    pub(super) const fn set_end_unreported(&mut self) {
        self.is_end_unreported = self.data.ended.is_some();
    }

    /// Record an error that ends the communicator outside of a call. The next call returns it.
    pub(super) fn note_unreported_end(&mut self, error: Error) {
        self.note_end(&error.with_output(OutputState::Elements(Vec::new())));
        self.is_end_unreported = true;
    }

    /// If the call was rejected, take its number back: other ranks do not know of it, and numbers must agree. The
    /// corrected call gets the same number.
    pub(super) fn release_rejected_call(&mut self, error: Error) -> Error {
        if error.is_rejection()
            && let Some(call) = self.data.operations.calling.take()
        {
            self.uncount_call(call);
        }
        error
    }

    /// Take a call's number back; later calls move up.
    pub(super) fn uncount_call(&mut self, call: u64) {
        self.notices().migration.uncount_call();
        self.data.operations.uncount_call(call);
    }

    /// Reply to an offer that came while another migration was due.
    pub(super) fn reply_to_offer(&self, offered: Option<(u32, u64)>) {
        if let (Some((view, at)), Some(session)) = (offered, &self.members.session) {
            session.pause(view, at);
        }
    }
}

/// Lock a core.
pub(crate) fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    let mut core = lock_settled(core);
    core.unsettle();
    core
}

/// Lock a core for a call that unsettles it unless it changes nothing.
#[inline]
pub(super) fn lock_settled(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    // A thread that panicked left the protocol state as it was between two packets, which is consistent.
    core.lock().unwrap_or_else(PoisonError::into_inner)
}
