//! All-reduces of a communicator on servers, with a tree for each rail.
//!
//! The ranks with the same place on their servers form a **rail**: a job of their own with its group, epochs,
//! connections and recovery ([`Core`]), which is joined after the communicator ([`super::rail`]). An operation by
//! [`Path::Hybrid`] is one call of the communicator, in three parts:
//!
//! ```text
//!   reduce-scatter inside the server     over the communicator's connections
//!   all-reduce of this rank's block      by the tree of its rail, all rails at once
//!   all-gather inside the server         over the communicator's connections
//! ```
//!
//! [`crate::schedule::hybrid`] has the schedules inside, and the proof that the three parts are an all-reduce.
//!
//! [`Path::Rab`] has the same three parts: a reduction to the server's first rank, its leader; an all-reduce of
//! everything by the leaders' rail; and a broadcast from the leader ([`crate::schedule::rab`]). The other ranks need no
//! rail, and go from the first part to the last.
//!
//! While a rail reduces, on a thread, this rank's caller drives the communicator beside it: other ranks may have to
//! change its view before they come to the call. A short block that its tree reduces at once needs no thread
//! ([`super::short_block`]). Blocks of a rail whose tree is lost are recovered there; later ones take host collectives
//! of the rail until it has another tree.
//!
//! Invariants:
//! - nothing but the caller's buffers holds elements: blocks are reduced in place;
//! - an error is one of the whole operation, with the ranks and the call number of the communicator;
//! - a rail ends with the communicator, and the communicator with an error of a rail.

use super::connections::{HostWork, interrupted};
use super::core::Core;
use super::data_path::Deadline;
use super::decided::Chosen;
use super::error::{Error, OutputState};
use super::inside::Inside;
use super::options::{CallOptions, Outcome, Straggler};
use super::rail::Rail;
use crate::exec::{Buffers, ExecError, Execution, Interrupt, Mesh, Status};
use crate::schedule::Schedule;
use crate::schedule::hybrid::servers;
use crate::select::{RuledOut, part_of};
use crate::transport::packets::OpId;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;

/// Whether a rail has reduced its block.
struct Done {
    is_done: AtomicBool,
    bell: OwnedFd,
}

impl Done {
    fn new() -> io::Result<Self> {
        Ok(Self { is_done: AtomicBool::new(false), bell: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)? })
    }
}

/// Reports the end of a rail's thread, also if it panics.
struct ReportEnd<'d>(&'d Done);

impl Drop for ReportEnd<'_> {
    fn drop(&mut self) {
        self.0.is_done.store(true, Ordering::Release);
        // A bell that is full has been rung.
        let _ = rustix::io::write(&self.0.bell, &1_u64.to_ne_bytes());
    }
}

/// The wait for a rail. It is paused, as all host work is, if the communicator's view is in question.
struct AwaitRail<'a> {
    mesh: &'a mut Mesh,
    done: &'a Done,
}

impl HostWork for AwaitRail<'_> {
    fn drive(&mut self, interrupt: &mut dyn Interrupt) -> Result<Status, ExecError> {
        while !self.done.is_done.load(Ordering::Acquire) {
            if interrupt.check()?.is_break() {
                return Ok(Status::Paused);
            }
            let left = interrupt.wake_at().map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = left.map(|left| Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            });
            let (tree, bell) = (interrupt.poll_fd(), interrupt.bell());
            let own = PollFd::new(&self.done.bell, PollFlags::IN);
            let others = tree.iter().chain(&bell).map(|fd| PollFd::new(fd, PollFlags::IN));
            let mut fds: Vec<PollFd<'_>> = std::iter::once(own).chain(others).collect();
            // An interrupted poll is one that has ended early.
            let _ = poll(&mut fds, timeout.as_ref());
        }
        Ok(Status::Done)
    }

    /// The rail's thread is told by whoever waits for it.
    fn cancel(&mut self, _: ExecError) {}

    fn mesh(&mut self) -> &mut Mesh {
        self.mesh
    }
}

impl Core {
    /// Run an all-reduce by the rails. Earlier started operations run first. Returns the outcome of this rank's block,
    /// if it has one.
    pub(super) fn run_by_rails(
        &mut self,
        (desc, options): (&OpDesc, &CallOptions),
        chosen: &Chosen,
        buffers: Buffers<'_>,
        deadline: Deadline,
    ) -> Result<Option<Outcome>, Error> {
        let announced = self.announce_call((desc, options), chosen, deadline)?;
        self.run_parts((desc, chosen.path), buffers, announced, deadline)
    }

    /// Run the parts of an all-reduce by the rails, which was announced to the tree.
    pub(super) fn run_parts(
        &mut self,
        (desc, path): (&OpDesc, Path),
        mut buffers: Buffers<'_>,
        announced: Option<OpId>,
        deadline: Deadline,
    ) -> Result<Option<Outcome>, Error> {
        let view = self.data.tree.view();
        let inside = self.inside(path, desc)?;
        let [first, last] = &inside.phases;
        let rail = inside.block.map(|block| self.rail.clone().map(|rail| (rail, block)).ok_or_else(|| no_rail(path)));
        let rail = rail.transpose()?;
        self.run_announced((desc, path), first, buffers.reborrow(), announced, deadline)?;
        // A new tree does not know the announcement.
        let announced_in = |core: &Self| announced.filter(|_| core.data.tree.view() == view);
        let mut outcome = None;
        if let Some((rail, block)) = rail {
            let part = OpDesc { count: block.len as u64, ..part_of(desc) };
            let each = desc.element_bytes();
            let bytes = block.start * each..block.end() * each;
            match self.run_rail(&rail, part, block_of(&mut buffers, bytes.clone()), deadline)? {
                Ok(reduced) => outcome = Some(reduced),
                Err(error) => {
                    let error = rail.error_of_whole(error, (&part, desc), self.data.place);
                    return Err(self.end_parts((desc, path, last), buffers, error, (announced_in(self), deadline)));
                }
            }
            if desc.op == Some(ReduceOp::Avg) {
                let kernel = desc.dtype.and_then(|dtype| Kernel::new(dtype, ReduceOp::Avg));
                let (block, ranks) = (block_of(&mut buffers, bytes), self.data.place.ranks());
                kernel.into_iter().for_each(|kernel| _ = kernel.finish(block, part.count as usize, ranks));
            }
        }
        let announced = announced_in(self);
        self.run_announced((desc, path), last, buffers, announced, deadline)?;
        Ok(outcome)
    }

    /// Return the parts of an operation inside servers: those of the last one, if it was alike.
    fn inside(&mut self, path: Path, desc: &OpDesc) -> Result<Arc<Inside>, Error> {
        let count = usize::try_from(desc.count).map_err(|_| Error::Argument(format!("{} elements", desc.count)))?;
        let place = self.data.place;
        let shape = self.data.selection.context().shape_of(place.ranks());
        let [_, each] = servers(shape, place.ranks()).ok_or_else(|| no_rail(path))?;
        let count = (count, Inside::is_short(desc, each));
        if let Some(inside) = self.inside.as_ref().filter(|inside| inside.is_of(path, count)) {
            return Ok(Arc::clone(inside));
        }
        let inside = Arc::new(Inside::new(path, place, count, each));
        self.inside = Some(Arc::clone(&inside));
        Ok(inside)
    }

    /// Reduce a block by this rank's rail: a short one at once, if possible, any other on a thread, while this one
    /// drives the communicator. Returns its result.
    ///
    /// # Errors
    /// Those of the communicator, not of the rail.
    fn run_rail(
        &mut self,
        rail: &Rail,
        part: OpDesc,
        block: &mut [u8],
        deadline: Deadline,
    ) -> Result<Result<Outcome, Error>, Error> {
        let options = CallOptions {
            deadline: Some(deadline.0.saturating_duration_since(Instant::now())),
            straggler: Some(Straggler::Wait),
            ..CallOptions::default()
        };
        let begun = match rail.reduce_briefly(part, block, &options) {
            Ok(reduced) => return Ok(reduced),
            Err(begun) => begun,
        };
        // Taken by the rail's thread or, if there can be none, by this one.
        let block = Mutex::new(Some(block));
        let run = || {
            let block = block.lock().unwrap_or_else(PoisonError::into_inner).take();
            let block = block.ok_or_else(|| Error::Argument("a block is reduced once".into()))?;
            rail.finish(begun, part, block, &options)
        };
        let Ok(done) = Done::new() else { return Ok(run()) };
        thread::scope(|scope| {
            let report = || {
                let _end = ReportEnd(&done);
                run()
            };
            let Ok(thread) = thread::Builder::new().name("rail".into()).spawn_scoped(scope, report) else {
                return Ok(run());
            };
            let driven = self.with_connections(|core, connections| {
                core.drive_host(&mut AwaitRail { mesh: &mut connections.mesh, done: &done }, deadline)
            });
            // The rail need not wait for what has ended.
            driven.as_ref().err().into_iter().for_each(|error| rail.interrupt(error));
            let reduced = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            driven.map(|()| reduced)
        })
    }

    /// A rail has failed: return the error of the operation. All ranks get the same one for a lost rank, and for a
    /// mismatch that the tree knows of; the other ranks of the server, which wait for this one, are told of others.
    fn end_parts(
        &mut self,
        (desc, path, last): (&OpDesc, Path, &Schedule),
        buffers: Buffers<'_>,
        error: Error,
        (announced, deadline): (Option<OpId>, Deadline),
    ) -> Error {
        let error = self.wait_for_group_error(announced, error, deadline);
        let error = self.agreed_loss_error(error, deadline);
        let is_known = error.abort_reason().is_some() || error.describes_output();
        if !is_known && self.data.ended.is_none() {
            let number = self.data.operations.scheduled_number();
            let version = self.data.selection.context().table.version;
            let rank = Rank(self.data.config.rank);
            let reason = match error {
                Error::Cancelled => ExecError::RankLost { rank },
                _ => interrupted(rank, &error),
            };
            // The error says what happened; what telling the others of it meets says nothing more.
            let _ = self.with_connections(|_, connections| {
                let ctx = connections.next((desc, path, number), version, deadline.0);
                Execution::new(&mut connections.mesh, last, None, buffers, &ctx)?.cancel(reason);
                Ok(())
            });
        }
        error.with_output(OutputState::Unspecified)
    }
}

/// The error of a rank without the rail that the operation needs.
fn no_rail(path: Path) -> Error {
    Error::NotPossible(RuledOut::Rails { path: path.name(), why: "this rank has no rail".into() }).ending()
}

/// A block of the output.
fn block_of<'b>(buffers: &'b mut Buffers<'_>, bytes: Range<usize>) -> &'b mut [u8] {
    match buffers {
        Buffers::InPlace(all) => &mut all[bytes],
        Buffers::Separate { output, .. } => &mut output[bytes],
    }
}
