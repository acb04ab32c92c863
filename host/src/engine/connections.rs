//! The connections between ranks, and the work on them: host collectives and messages.

use super::error::Error;
use crate::exec::message::{self, Ticket, Transfer};
use crate::exec::round::{Attempt, Round};
use crate::exec::{Buffers, Context, ExecError, Execution, Interrupt, Mesh, Status, execute};
use crate::region_exports::RegionExports;
use crate::schedule::Schedule;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::reduce::Kernel;

/// Connections between ranks, and the number of host collectives that have run over them.
pub(super) struct Connections {
    pub(super) mesh: Mesh,
    scheduled: u64,
}

impl Connections {
    pub(super) const fn new(mesh: Mesh) -> Self {
        Self { mesh, scheduled: 0 }
    }

    /// Number the next operation, which is that of call `number` ([`Context::number`]).
    pub(super) fn next(
        &mut self,
        (desc, path, number): (&OpDesc, Path, u32),
        table_version: u32,
        deadline: Instant,
    ) -> Context {
        self.scheduled += 1;
        let signature = desc.signature(path, table_version);
        Context { op_index: self.scheduled - 1, number, signature, desc: *desc, path, deadline }
    }

    /// Attempt a round as the next operation, that of call `number`; returns its index, too. See [`Mesh::attempt`].
    #[inline]
    pub(super) fn attempt(&mut self, (round, number): (&Round, u32), buffers: Buffers<'_>) -> (Attempt, u64) {
        let op_index = self.scheduled;
        self.scheduled += 1;
        (self.mesh.attempt(round, (op_index, number), buffers), op_index)
    }

    /// Run a schedule to completion.
    pub(super) fn run(
        &mut self,
        (desc, path): (&OpDesc, Path),
        table_version: u32,
        schedule: &Schedule,
        buffers: Buffers<'_>,
        (deadline, interrupt): (Instant, &mut dyn Interrupt),
    ) -> Result<(), ExecError> {
        let ctx = self.next((desc, path, 0), table_version, deadline);
        execute(&mut self.mesh, schedule, kernel(desc).as_ref(), buffers, &ctx, interrupt)
    }
}

/// Return what reduces an operation's elements, if it does.
pub(super) fn kernel(desc: &OpDesc) -> Option<Kernel> {
    desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op))
}

/// The connections of a communicator's calls, which are lent to one at a time. Invariant: what was sent counts while
/// they are lent, too.
pub(super) struct HostPath {
    connections: Option<Box<Connections>>,
    /// Bytes that had been sent when the connections were lent.
    sent_before_bytes: u64,
    /// Registered memory that ranks of this machine may map.
    exports: Arc<RegionExports>,
    /// Bytes sent to other ranks for recovery, over connections of its own.
    pub(super) recovery_bytes: u64,
}

impl HostPath {
    pub(super) fn new(connections: Connections) -> Self {
        let exports = Arc::clone(connections.mesh.exports());
        Self { connections: Some(Box::new(connections)), sent_before_bytes: 0, exports, recovery_bytes: 0 }
    }

    /// Return the registered memory that ranks of this machine may map.
    pub(super) const fn exports(&self) -> &Arc<RegionExports> {
        &self.exports
    }

    /// Lend the connections.
    ///
    /// # Errors
    /// An earlier call panicked while it used them.
    pub(super) fn take(&mut self) -> Result<Box<Connections>, Error> {
        let missing = || ExecError::Invalid {
            what: "the connections to other ranks were lost when an earlier call panicked".into(),
        };
        let connections = self.connections.take().ok_or_else(|| Error::Schedule(missing()))?;
        self.sent_before_bytes = connections.mesh.sent_bytes();
        Ok(connections)
    }

    /// Wait until other ranks have received what was sent to them, at most until `until`; returns whether they have.
    pub(super) fn flush(&mut self, until: Instant) -> bool {
        self.connections.as_mut().is_none_or(|connections| connections.mesh.flush(until))
    }

    /// Drop the connections: an operation on them panicked.
    pub(super) fn lose(&mut self) {
        self.connections = None;
    }

    pub(super) fn give_back(&mut self, connections: Box<Connections>) {
        self.connections = Some(connections);
    }

    /// Return the bytes sent directly to other ranks.
    pub(super) fn sent_bytes(&self) -> u64 {
        let calls = self.connections.as_ref().map_or(self.sent_before_bytes, |of| of.mesh.sent_bytes());
        calls + self.recovery_bytes
    }

    /// Return the connections, unless they are lent.
    #[inline]
    pub(super) fn connections(&mut self) -> Option<&mut Connections> {
        self.connections.as_deref_mut()
    }

    /// Return the connections to the other ranks, unless they are lent.
    pub(super) fn mesh(&mut self) -> Option<&mut Mesh> {
        self.connections.as_mut().map(|connections| &mut connections.mesh)
    }

    /// Return the number of messages that own memory, and its length in bytes.
    pub(super) fn owned_by_messages(&self) -> (usize, usize) {
        self.connections.as_ref().map_or((0, 0), |connections| connections.mesh.owned_by_messages())
    }

    /// Drop a message when it is complete. Returns false while the connections are lent.
    pub(super) fn abandon(&mut self, ticket: Ticket) -> bool {
        let Some(connections) = &mut self.connections else { return false };
        connections.mesh.abandon(ticket);
        true
    }
}

/// Work over the connections that pauses when the view is in question.
pub(super) trait HostWork {
    /// Drive the work until it is done or paused.
    ///
    /// # Errors
    /// The error that ended it on all ranks.
    fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError>;

    /// End paused work on all ranks with an error.
    fn cancel(&mut self, error: ExecError);

    /// Return the connections, while the work is paused.
    fn mesh(&mut self) -> &mut Mesh;

    /// Return whether the work gives way to other work, and is then taken up again by whoever drives it.
    fn yields(&self) -> bool {
        false
    }
}

/// Return the error of work that ended with an error of the communicator.
pub(super) fn interrupted(rank: Rank, error: &Error) -> ExecError {
    ExecError::Interrupted { rank, reason: error.to_string() }
}

/// A host collective that was announced to the tree: the announcement is sent before the schedule begins.
pub(super) struct Collective<'a> {
    execution: Execution<'a>,
    is_announced: bool,
    is_begun: bool,
}

impl<'a> Collective<'a> {
    pub(super) const fn new(execution: Execution<'a>) -> Self {
        Self { execution, is_announced: false, is_begun: false }
    }

    /// Other ranks know of it.
    pub(super) const fn begun(execution: Execution<'a>) -> Self {
        Self { execution, is_announced: true, is_begun: true }
    }
}

impl HostWork for Collective<'_> {
    fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
        if !std::mem::replace(&mut self.is_announced, true) && interrupt.check()?.is_break() {
            return Ok(Status::Paused);
        }
        self.is_begun = true;
        self.execution.drive(interrupt)
    }

    fn cancel(&mut self, error: ExecError) {
        if self.is_begun {
            self.execution.cancel(error);
        }
    }

    fn mesh(&mut self) -> &mut Mesh {
        self.execution.mesh()
    }
}

impl HostWork for Transfer<'_, '_> {
    fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
        Transfer::drive(self, interrupt)
    }

    fn cancel(&mut self, error: ExecError) {
        Transfer::cancel(self, error);
    }

    fn mesh(&mut self) -> &mut Mesh {
        Transfer::mesh(self)
    }
}

/// Posted messages: drive them until there is room for another, until one or any is complete, or as far as possible.
pub(super) struct Posted<'a> {
    pub(super) mesh: &'a mut Mesh,
    pub(super) until: PostedUntil,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum PostedUntil {
    Room(Instant),
    Complete(Ticket, Instant),
    /// Fewer than this many are incomplete.
    AnyComplete(usize, Instant),
    Blocked,
}

impl HostWork for Posted<'_> {
    fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
        match self.until {
            PostedUntil::Room(deadline) => message::make_room(self.mesh, deadline, interrupt),
            PostedUntil::Complete(ticket, deadline) => message::wait(self.mesh, ticket, deadline, interrupt),
            PostedUntil::AnyComplete(open, deadline) => message::wait_any(self.mesh, open, deadline, interrupt),
            PostedUntil::Blocked => message::poll(self.mesh, interrupt),
        }
    }

    fn cancel(&mut self, error: ExecError) {
        message::cancel(self.mesh, error);
    }

    fn mesh(&mut self) -> &mut Mesh {
        self.mesh
    }

    fn yields(&self) -> bool {
        matches!(self.until, PostedUntil::AnyComplete(..) | PostedUntil::Blocked)
    }
}
