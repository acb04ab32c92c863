//! Started operations: their buffers, which the communicator owns meanwhile, and how they are put on their way, looked
//! at and waited for.
//!
//! Schedules run in the order of posting, when one of them is waited for.

use super::core::{Core, Mark, premultiply};
use super::element::OwnedBuffer;
use super::error::{Error, Fresh};
use super::extent::Extent;
use super::progress::Deadline;
use super::{CallOptions, Outcome};
use crate::choice::Algo;
use crate::endpoint::OpId;
use crate::exec::Buffers;
use crate::reference::Transfer;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::Limit;

/// Buffers that the communicator owns while their operation is on its way.
pub(super) struct Owned {
    /// The input, and, without an output of its own, that too.
    pub(super) memory: Box<dyn OwnedBuffer>,
    pub(super) output: Option<Box<dyn OwnedBuffer>>,
}

impl Owned {
    fn lend(&mut self) -> Buffers<'_> {
        match &mut self.output {
            Some(output) => Buffers::Separate { input: self.memory.bytes(), output: output.bytes_mut() },
            None => Buffers::InPlace(self.memory.bytes_mut()),
        }
    }

    /// Return the buffer with the result.
    pub(super) fn into_result(self) -> Box<dyn OwnedBuffer> {
        self.output.unwrap_or(self.memory)
    }
}

/// A started operation's buffers in the tree.
pub(super) struct InTree {
    buffers: Owned,
    extent: Extent,
}

impl InTree {
    pub(super) fn into_buffers(self) -> Owned {
        self.buffers
    }

    pub(super) fn input(&self) -> &[u8] {
        let bytes = self.buffers.memory.bytes();
        if self.buffers.output.is_some() { bytes } else { &bytes[self.extent.input.clone()] }
    }

    pub(super) fn output(&mut self) -> &mut [u8] {
        match &mut self.buffers.output {
            Some(output) => output.bytes_mut(),
            None => &mut self.buffers.memory.bytes_mut()[self.extent.output.clone()],
        }
    }
}

/// An operation that was started and not yet waited for.
pub(super) struct Started {
    pub(super) desc: OpDesc,
    /// Its number among all calls.
    pub(super) call: u64,
    /// The algorithm that was asked for.
    pub(super) algo: Algo,
    pub(super) path: Path,
    pub(super) fallback: Option<String>,
    /// In the tree's endpoint: the operation itself, or, for a schedule, what tells the tree of it.
    pub(super) tree_op: Option<OpId>,
    /// How long it waits for ranks to come to it.
    limit: Option<Limit>,
    pub(super) transfer: Option<Transfer>,
    pub(super) begun: Mark,
    /// When it was first tested: who only tests it waits from then on.
    tested: Option<Instant>,
    /// A schedule's buffers; `None` for the tree's, which the endpoint works on.
    pub(super) buffers: Option<Owned>,
    pub(super) finished: Option<Result<Outcome, Error>>,
}

impl Core {
    /// Start an operation in buffers that the communicator owns until it is waited for.
    pub(super) fn start(&mut self, desc: OpDesc, mut owned: Owned, options: &CallOptions) -> Result<u64, Error> {
        self.usable()?;
        let extent = Extent::of(&desc, self.place)?;
        extent.check(&desc, &owned.lend())?;
        let (deadline, before) = (self.deadline(options), self.mark());
        // A tree that is known to be lost takes nothing.
        let lost = self.tree_error().filter(|error| self.is_repairable(error));
        let ready = lost.map_or(Ok(()), |error| self.change_view(None, &error, deadline).map(|_| ()));
        let ready = ready.and_then(|()| self.begin_call(deadline));
        let call = self.calling.take();
        ready.map_err(|error| self.end(error, &desc, before))?;
        let (path, fallback) = self.choose(&desc, options)?;
        let mut scaled = Vec::new();
        premultiply(&desc, &extent, &mut owned.lend(), options, &mut scaled)?;
        if !scaled.is_empty() && owned.output.is_some() {
            owned.memory.bytes_mut().copy_from_slice(&scaled);
        }
        let handle = self.next_handle;
        let mut started = Started {
            desc,
            call: call.unwrap_or_default(),
            algo: options.algo.unwrap_or(self.config.algo),
            path,
            fallback,
            tree_op: None,
            limit: self.limit(options),
            transfer: None,
            begun: self.mark(),
            tested: None,
            buffers: None,
            finished: None,
        };
        self.launch(handle, &mut started, owned)?;
        self.next_handle += 1;
        self.started.insert(handle, started);
        self.pump(None);
        Ok(handle)
    }

    /// Put a started operation on its way.
    pub(super) fn launch(&mut self, handle: u64, started: &mut Started, mut owned: Owned) -> Result<(), Error> {
        let (desc, path, limit) = (started.desc, started.path, started.limit);
        if path == Path::Tree {
            let extent = Extent::of(&desc, self.place)?;
            extent.keep_own(&desc, &mut owned.lend());
            if let Some((op, transfer)) = self.post(&desc, path, limit, Some((&extent, &mut owned.lend())))? {
                (started.tree_op, started.transfer) = (Some(op), Some(transfer));
                self.owned.insert(op, InTree { buffers: owned, extent });
            }
        } else {
            (started.tree_op, started.transfer) = (self.tell_tree(&desc, path, limit)?, None);
            started.buffers = Some(owned);
            // In the order of posting, also where an operation has lost its tree.
            let at = self.schedules.partition_point(|&other| other < handle);
            self.schedules.insert(at, handle);
        }
        Ok(())
    }

    /// Tell whether a started operation has ended, with a result or an error; drives what can be driven without
    /// waiting. A schedule is run, which takes as long as it takes.
    pub(super) fn test(&mut self, handle: u64, options: &CallOptions) -> bool {
        let (at, limit) = self.deadline(options);
        if self.schedules.contains(&handle) {
            self.wait_for(handle, (at, limit));
            return true;
        }
        self.settle(handle);
        if let Some(started) = self.started.get_mut(&handle).filter(|started| started.finished.is_none()) {
            let (desc, begun) = (started.desc, started.begun);
            let waited = started.tested.get_or_insert_with(Instant::now).elapsed();
            // What ends a wait ends this, too: nobody else may ever look.
            let advanced = self.advance(None, (at - waited, limit)).map(|_| ());
            if let Err(error) = self.get_over(advanced, (at, limit)) {
                self.end(error, &desc, begun);
            }
            self.settle(handle);
        }
        self.started.get(&handle).is_none_or(|started| started.finished.is_some())
    }

    /// Wait for a started operation, and give its buffers back.
    pub(super) fn finish(&mut self, handle: u64, options: &CallOptions) -> (Option<Owned>, Result<Outcome, Error>) {
        let deadline = self.deadline(options);
        self.wait_for(handle, deadline);
        let Some(started) = self.started.remove(&handle) else {
            return (None, Err(Error::Argument("the handle is not of this communicator".into())));
        };
        let in_tree = started.tree_op.and_then(|op| self.owned.remove(&op)).map(|in_tree| in_tree.buffers);
        let ended = self.ended.clone().unwrap_or(Error::PathLost);
        (started.buffers.or(in_tree), started.finished.unwrap_or(Err(ended)))
    }

    fn wait_for(&mut self, handle: u64, deadline: Deadline) {
        loop {
            while self.schedules.contains(&handle) {
                if self.run_next_schedule(deadline).is_err() {
                    break;
                }
            }
            self.settle(handle);
            let Some(started) = self.started.get(&handle).filter(|started| started.finished.is_none()) else { return };
            let (desc, begun) = (started.desc, started.begun);
            let stepped = self.step(None, deadline);
            if let Err(error) = self.get_over(stepped, deadline) {
                let error = self.end(error, &desc, begun);
                self.settle(handle);
                if let Some(started) = self.started.get_mut(&handle) {
                    started.finished.get_or_insert(Err(error));
                }
            }
        }
    }

    /// Repair what can be.
    fn get_over(&mut self, result: Result<(), Error>, deadline: Deadline) -> Result<(), Error> {
        match result {
            Err(error) if self.is_repairable(&error) => self.change_view(None, &error, deadline).map(|_| ()),
            other => other,
        }
    }

    /// Note the end of a started operation in the tree, if it has come.
    pub(super) fn settle(&mut self, handle: u64) {
        let Some(started) = self.started.get(&handle).filter(|started| started.finished.is_none()) else { return };
        if started.path == Path::Tree && started.tree_op.is_none_or(|op| op.0 < self.completed_below) {
            let (way, fallback, begun) = ((started.path, started.transfer), started.fallback.clone(), started.begun);
            let op = started.tree_op;
            let outcome = self.outcome(way, fallback, begun);
            let outcome = self.with_verdict(op, outcome);
            if let Some(started) = self.started.get_mut(&handle) {
                started.finished = Some(Ok(outcome));
            }
        } else if let Some(error) = &self.ended {
            let in_tree = started.tree_op.filter(|_| started.path == Path::Tree);
            let fresh = in_tree.map_or(Fresh::Elements(Vec::new()), |op| self.fresh(op));
            let error = error.clone().with_fresh(fresh);
            if let Some(started) = self.started.get_mut(&handle) {
                started.finished = Some(Err(error));
            }
        }
    }

    /// Run all started schedules, in the order of posting.
    pub(super) fn run_started(&mut self, deadline: Deadline) -> Result<(), Error> {
        while !self.schedules.is_empty() {
            self.run_next_schedule(deadline)?;
        }
        Ok(())
    }

    fn run_next_schedule(&mut self, deadline: Deadline) -> Result<(), Error> {
        let Some(handle) = self.schedules.pop_front() else { return Ok(()) };
        let Some(mut started) = self.started.remove(&handle) else { return Ok(()) };
        let (desc, path) = (started.desc, started.path);
        // A number that the tree may not have any more when this has run.
        let told = started.tree_op.take();
        self.scheduling = Some(started.call);
        let result = started.buffers.as_mut().map_or(Ok(()), |owned| {
            let buffers = owned.lend();
            let schedule = self.schedule(&desc, path, &buffers)?;
            self.run_told((&desc, path), &schedule, buffers, told, deadline)
        });
        let result = result.map_err(|error| self.end(error, &desc, started.begun));
        self.scheduling = None;
        let outcome = self.outcome((path, None), started.fallback.clone(), started.begun);
        started.finished = Some(result.clone().map(|()| outcome));
        self.started.insert(handle, started);
        result
    }

    pub(super) const fn has_ended(&self) -> bool {
        self.ended.is_some()
    }
}
