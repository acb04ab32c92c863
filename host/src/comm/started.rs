//! Started operations: their buffers, which the communicator owns meanwhile, and how they are put on their way, looked
//! at and waited for.
//!
//! Schedules run in the order of posting, when one of them is waited for.

use super::core::{Core, Mark, premultiply};
use super::element::OwnedBuffer;
use super::error::{Error, Fresh};
use super::extent::Extent;
use super::progress::Deadline;
use super::{CallOptions, Outcome, Outstanding};
use crate::exec::Buffers;
use crate::schedule::Schedule;
use crate::select::Algo;
use crate::transport::memory::Transfer;
use crate::transport::packets::OpId;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::Limit;

/// Buffers that the communicator owns while their operation is on its way.
pub(super) struct Owned {
    /// The input, and, without an output of its own, that too.
    pub(super) memory: Box<dyn OwnedBuffer>,
    pub(super) output: Option<Box<dyn OwnedBuffer>>,
    /// What is contributed instead of the input: that, multiplied.
    scaled: Option<Vec<u8>>,
    extent: Extent,
}

impl Owned {
    fn lend(&mut self) -> Buffers<'_> {
        match (&self.scaled, &mut self.output) {
            (Some(input), Some(output)) => Buffers::Separate { input, output: output.bytes_mut() },
            (Some(input), None) => {
                Buffers::Separate { input, output: &mut self.memory.bytes_mut()[self.extent.output.clone()] }
            }
            (None, Some(output)) => Buffers::Separate { input: self.memory.bytes(), output: output.bytes_mut() },
            (None, None) => Buffers::InPlace(self.memory.bytes_mut()),
        }
    }

    fn len_bytes(&self) -> usize {
        let output = self.output.as_ref().map_or(0, |output| output.bytes().len());
        self.memory.bytes().len() + output + self.scaled.as_ref().map_or(0, Vec::len)
    }

    /// Return the buffer with the result.
    pub(super) fn into_result(self) -> Box<dyn OwnedBuffer> {
        self.output.unwrap_or(self.memory)
    }
}

/// A started operation's buffers in the tree.
pub(super) struct InTree {
    handle: u64,
    buffers: Owned,
}

impl InTree {
    pub(super) fn into_buffers(self) -> Owned {
        self.buffers
    }

    pub(super) fn input(&self) -> &[u8] {
        let Owned { memory, output, scaled, extent } = &self.buffers;
        match (scaled, output) {
            (Some(scaled), _) => scaled,
            (None, Some(_)) => memory.bytes(),
            (None, None) => &memory.bytes()[extent.input.clone()],
        }
    }

    pub(super) fn output(&mut self) -> &mut [u8] {
        let Owned { memory, output, extent, .. } = &mut self.buffers;
        match output {
            Some(output) => output.bytes_mut(),
            None => &mut memory.bytes_mut()[extent.output.clone()],
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
    /// What a schedule does: made when it was started, so that nothing is refused later.
    schedule: Option<Schedule>,
    pub(super) finished: Option<Result<Outcome, Error>>,
    /// Nobody waits for it: its buffers go when it has ended.
    is_abandoned: bool,
}

impl Core {
    /// Start an operation in buffers that the communicator owns until it is waited for.
    pub(super) fn start(
        &mut self,
        desc: OpDesc,
        memory: Box<dyn OwnedBuffer>,
        output: Option<Box<dyn OwnedBuffer>>,
        options: &CallOptions,
    ) -> Result<u64, Error> {
        self.usable()?;
        let extent = Extent::of(&desc, self.place)?;
        let mut owned = Owned { memory, output, scaled: None, extent: extent.clone() };
        extent.check(&desc, &owned.lend())?;
        owned.scaled = premultiply(&desc, &extent, &owned.lend(), options)?;
        let (deadline, before) = (self.deadline(options), self.mark());
        let ready = self.make_room(deadline).and_then(|()| self.begin_call(deadline));
        let result = ready.and_then(|()| self.start_call(desc, owned, options, deadline));
        let result = result.map_err(|error| {
            let error = self.end(error, &desc, before);
            self.refuse(error)
        });
        self.calling = None;
        if result.is_ok() {
            self.pump(None);
        }
        result
    }

    /// Start an operation that is counted. A tree that is found to be lost takes nothing: where it is made good, the
    /// operation is started anew.
    fn start_call(
        &mut self,
        desc: OpDesc,
        mut owned: Owned,
        options: &CallOptions,
        deadline: Deadline,
    ) -> Result<u64, Error> {
        let handle = self.next_handle;
        loop {
            let (path, fallback) = self.choose(&desc, options)?;
            let mut started = Started {
                desc,
                call: self.calling.unwrap_or_default(),
                algo: options.algo.unwrap_or(self.config.algo),
                path,
                fallback,
                tree_op: None,
                limit: self.limit(options),
                transfer: None,
                begun: self.mark(),
                tested: None,
                buffers: None,
                schedule: None,
                finished: None,
                is_abandoned: false,
            };
            let Err(refused) = self.launch(handle, &mut started, owned) else {
                self.next_handle += 1;
                self.started.insert(handle, started);
                return Ok(handle);
            };
            let error;
            (error, owned) = *refused;
            self.get_over(Err(error), deadline)?;
        }
    }

    /// Put a started operation on its way.
    ///
    /// # Errors
    /// Why not, and its buffers, which are as they were; nothing was posted.
    pub(super) fn launch(
        &mut self,
        handle: u64,
        started: &mut Started,
        mut owned: Owned,
    ) -> Result<(), Box<(Error, Owned)>> {
        let (desc, path, limit) = (started.desc, started.path, started.limit);
        if path == Path::Tree {
            let extent = owned.extent.clone();
            match self.post(&desc, path, limit, Some((&extent, &mut owned.lend()))) {
                Ok(Some((op, transfer))) => {
                    (started.tree_op, started.transfer) = (Some(op), Some(transfer));
                    self.owned.insert(op, InTree { handle, buffers: owned });
                    return Ok(());
                }
                // It was lost since it was chosen.
                Ok(None) => return Err(Box::new((Error::PathLost, owned))),
                Err(error) => return Err(Box::new((error, owned))),
            }
        }
        let schedule = self.schedule(&desc, path, &owned.lend());
        let told = schedule.and_then(|schedule| Ok((self.tell_tree(&desc, path, limit)?, schedule)));
        let (told, schedule) = match told {
            Ok(told) => told,
            Err(error) => return Err(Box::new((error, owned))),
        };
        (started.tree_op, started.transfer, started.schedule) = (told, None, Some(schedule));
        started.buffers = Some(owned);
        // In the order of posting, also where an operation has lost its tree.
        let at = self.schedules.partition_point(|&other| other < handle);
        self.schedules.insert(at, handle);
        Ok(())
    }

    /// Nobody will wait for a started operation. It goes on, as other ranks need it; what it owns goes when it has ended.
    fn abandon(&mut self, handle: u64) {
        self.settle(handle);
        let Some(started) = self.started.get_mut(&handle) else { return };
        started.is_abandoned = true;
        if started.finished.is_some() {
            self.reclaim(handle);
        }
    }

    fn reclaim(&mut self, handle: u64) {
        let Some(started) = self.started.remove(&handle) else { return };
        if let Some(op) = started.tree_op.filter(|_| started.path == Path::Tree) {
            self.owned.remove(&op);
            self.forget_verdict(op);
        }
    }

    /// Take back what an operation in the tree owned that has completed, if nobody waits for it; returns whether.
    pub(super) fn reclaim_completed(&mut self, op: OpId) -> bool {
        let Some(handle) = self.owned.get(&op).map(|in_tree| in_tree.handle) else { return false };
        if self.started.get(&handle).is_none_or(|started| !started.is_abandoned) {
            return false;
        }
        self.reclaim(handle);
        true
    }

    /// Take back what abandoned operations own that have ended: all of them, if the communicator has.
    pub(super) fn reclaim_abandoned(&mut self) {
        let is_over = self.has_ended();
        let over = |started: &Started| started.is_abandoned && (is_over || started.finished.is_some());
        let handles: Vec<u64> = self.started.iter().filter(|(_, started)| over(started)).map(|(&of, _)| of).collect();
        handles.into_iter().for_each(|handle| self.reclaim(handle));
        self.schedules.retain(|handle| self.started.contains_key(handle));
        self.owned.retain(|_, in_tree| self.started.contains_key(&in_tree.handle));
    }

    /// See to handles that were dropped.
    pub(super) fn reclaim_dropped(&mut self) {
        if !self.lost.dropped.is_any() {
            return;
        }
        let lost = std::sync::Arc::clone(&self.lost);
        let (handles, tickets) = lost.dropped.take();
        handles.into_iter().for_each(|handle| self.abandon(handle));
        for ticket in tickets {
            match &mut self.calls {
                Some(lines) => lines.mesh.abandon(ticket),
                // They are at work: the next call sees to it.
                None => lost.dropped.push_message(ticket),
            }
        }
    }

    /// Return what the communicator owns for operations and messages that were started.
    pub(super) fn outstanding(&mut self) -> Outstanding {
        self.reclaim_dropped();
        let in_tree = self.owned.values().map(|in_tree| &in_tree.buffers);
        let elsewhere = self.started.values().filter_map(|started| started.buffers.as_ref());
        let (messages, message_bytes) = self.calls.as_ref().map_or((0, 0), |lines| lines.mesh.owned_by_messages());
        Outstanding {
            operations: self.started.len(),
            messages,
            bytes: message_bytes + in_tree.chain(elsewhere).map(Owned::len_bytes).sum::<usize>(),
        }
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
        let (mut buffers, result) = (started.buffers.or(in_tree), started.finished.unwrap_or(Err(ended)));
        if let (Some(owned), Ok(_), Path::Tree) = (&mut buffers, &result, started.path) {
            let extent = owned.extent.clone();
            extent.keep_own(&started.desc, &mut owned.lend());
        }
        (buffers, result)
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
    pub(super) fn get_over(&mut self, result: Result<(), Error>, deadline: Deadline) -> Result<(), Error> {
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

    pub(super) fn run_next_schedule(&mut self, deadline: Deadline) -> Result<(), Error> {
        let Some(handle) = self.schedules.pop_front() else { return Ok(()) };
        let Some(mut started) = self.started.remove(&handle) else { return Ok(()) };
        let (desc, path) = (started.desc, started.path);
        // A number that the tree may not have any more when this has run.
        let told = started.tree_op.take();
        self.scheduling = Some(started.call);
        let result = started.buffers.as_mut().map_or(Ok(()), |owned| {
            let none = || Error::Argument(format!("{desc} was started without a schedule")).ending();
            let schedule = started.schedule.as_ref().ok_or_else(none)?;
            self.run_told((&desc, path), schedule, owned.lend(), told, deadline)
        });
        let result = result.map_err(|error| self.end(error, &desc, started.begun));
        self.scheduling = None;
        let outcome = self.outcome((path, None), started.fallback.clone(), started.begun);
        started.finished = Some(result.clone().map(|()| outcome));
        started.schedule = None;
        if !started.is_abandoned {
            self.started.insert(handle, started);
        }
        result
    }

    pub(super) const fn has_ended(&self) -> bool {
        self.ended.is_some()
    }
}
