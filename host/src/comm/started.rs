//! Started operations: their buffers, which the communicator owns, and how they are launched, tested, waited for and
//! detached.
//!
//! Host collectives run in the order of posting, when one of them is waited for.

use super::core::{Core, CounterSnapshot, premultiply};
use super::element::ErasedBuffer;
use super::error::{Error, OutputState, StartError};
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
use sumac_hal::wire::StragglerLimit;

/// Buffers that the communicator owns while their operation is in flight.
pub(super) struct Owned {
    /// The input, and also the output unless that is separate.
    pub(super) memory: Box<dyn ErasedBuffer>,
    pub(super) output: Option<Box<dyn ErasedBuffer>>,
    /// The scaled input, which is contributed instead.
    scaled: Option<Vec<u8>>,
    extent: Extent,
}

impl Owned {
    fn borrow_buffers(&mut self) -> Buffers<'_> {
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

    /// Return the buffer that holds the result.
    pub(super) fn into_result(self) -> Box<dyn ErasedBuffer> {
        self.output.unwrap_or(self.memory)
    }
}

/// The buffers of a started operation in the tree.
pub(super) struct TreeBuffers {
    handle: u64,
    buffers: Owned,
}

impl TreeBuffers {
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

/// An operation that has been started, and not waited for.
pub(super) struct Started {
    pub(super) desc: OpDesc,
    /// Its number among all calls.
    pub(super) call: u64,
    /// The requested algorithm.
    pub(super) algo: Algo,
    pub(super) path: Path,
    pub(super) fallback: Option<String>,
    /// The operation in the tree's endpoint, or the announcement of a host collective.
    pub(super) tree_op: Option<OpId>,
    /// Its straggler limit.
    limit: Option<StragglerLimit>,
    pub(super) transfer: Option<Transfer>,
    pub(super) begun: CounterSnapshot,
    /// When it was first tested. A caller that only tests has waited since then.
    tested: Option<Instant>,
    /// The buffers of a host collective; `None` in the tree, where [`TreeBuffers`] has them.
    pub(super) buffers: Option<Owned>,
    /// The schedule of a host collective. It is made at the start, so that nothing is rejected later.
    schedule: Option<Schedule>,
    pub(super) finished: Option<Result<Outcome, Error>>,
    /// Its handle was dropped: free its buffers when it has ended.
    is_detached: bool,
}

impl Core {
    /// Start an operation on buffers that the communicator owns until it is waited for. An error returns `memory`,
    /// unchanged.
    pub(super) fn start(
        &mut self,
        desc: OpDesc,
        memory: Box<dyn ErasedBuffer>,
        output: Option<Box<dyn ErasedBuffer>>,
        options: &CallOptions,
    ) -> Result<u64, StartError<Box<dyn ErasedBuffer>>> {
        let extent = match self.check_usable().and_then(|()| Extent::of(&desc, self.place)) {
            Ok(extent) => extent,
            Err(error) => return Err(StartError { error, buffer: memory }),
        };
        let mut owned = Owned { memory, output, scaled: None, extent: extent.clone() };
        let checked = extent.check(&desc, &owned.borrow_buffers());
        match checked.and_then(|()| premultiply(&desc, &extent, &owned.borrow_buffers(), options)) {
            Ok(scaled) => owned.scaled = scaled,
            Err(error) => return Err(StartError { error, buffer: owned.memory }),
        }
        let (deadline, before) = (self.deadline(options), self.snapshot());
        let result = match self.make_room(deadline).and_then(|()| self.begin_call(deadline)) {
            Ok(()) => self.start_call(desc, owned, options, deadline),
            Err(error) => Err(Box::new((error, owned))),
        };
        let result = result.map_err(|refused| {
            let (error, owned) = *refused;
            let error = self.end(error, &desc, before);
            StartError { error: self.release_rejected_call(error), buffer: owned.memory }
        });
        self.calling = None;
        if result.is_ok() {
            self.pump(None);
        }
        result
    }

    /// Start a counted operation. If the tree turns out to be lost and is recovered, start it again.
    fn start_call(
        &mut self,
        desc: OpDesc,
        mut owned: Owned,
        options: &CallOptions,
        deadline: Deadline,
    ) -> Result<u64, Box<(Error, Owned)>> {
        let handle = self.next_handle;
        loop {
            let (path, fallback) = match self.choose(&desc, options) {
                Ok(chosen) => chosen,
                Err(error) => return Err(Box::new((error, owned))),
            };
            let mut started = Started {
                desc,
                call: self.calling.unwrap_or_default(),
                algo: options.algo.unwrap_or(self.config.algo),
                path,
                fallback,
                tree_op: None,
                limit: self.limit(options),
                transfer: None,
                begun: self.snapshot(),
                tested: None,
                buffers: None,
                schedule: None,
                finished: None,
                is_detached: false,
            };
            let Err(refused) = self.launch(handle, &mut started, owned) else {
                self.next_handle += 1;
                self.started.insert(handle, started);
                return Ok(handle);
            };
            let error;
            (error, owned) = *refused;
            if let Err(error) = self.recover_from(Err(error), deadline) {
                return Err(Box::new((error, owned)));
            }
        }
    }

    /// Launch a started operation.
    ///
    /// # Errors
    /// The reason, and the operation's buffers, which are unchanged; nothing was posted.
    pub(super) fn launch(
        &mut self,
        handle: u64,
        started: &mut Started,
        mut owned: Owned,
    ) -> Result<(), Box<(Error, Owned)>> {
        let (desc, path, limit) = (started.desc, started.path, started.limit);
        if path == Path::Tree {
            let extent = owned.extent.clone();
            match self.post(&desc, path, limit, Some((&extent, &mut owned.borrow_buffers()))) {
                Ok(Some((op, transfer))) => {
                    (started.tree_op, started.transfer) = (Some(op), Some(transfer));
                    self.owned.insert(op, TreeBuffers { handle, buffers: owned });
                    return Ok(());
                }
                // The tree was lost since it was selected.
                Ok(None) => return Err(Box::new((Error::PathLost, owned))),
                Err(error) => return Err(Box::new((error, owned))),
            }
        }
        let schedule = self.schedule(&desc, path, &owned.borrow_buffers());
        let announced = schedule.and_then(|schedule| Ok((self.announce_to_tree(&desc, path, limit)?, schedule)));
        let (announced, schedule) = match announced {
            Ok(announced) => announced,
            Err(error) => return Err(Box::new((error, owned))),
        };
        (started.tree_op, started.transfer, started.schedule) = (announced, None, Some(schedule));
        started.buffers = Some(owned);
        // Keep the order of posting, also for an operation that has lost its tree.
        let at = self.schedules.partition_point(|&other| other < handle);
        self.schedules.insert(at, handle);
        Ok(())
    }

    /// Detach a started operation. It continues, because other ranks need it, and its buffers are freed when it has
    /// ended.
    fn detach(&mut self, handle: u64) {
        self.try_finish(handle);
        let Some(started) = self.started.get_mut(&handle) else { return };
        started.is_detached = true;
        if started.finished.is_some() {
            self.reclaim(handle);
        }
    }

    fn reclaim(&mut self, handle: u64) {
        let Some(started) = self.started.remove(&handle) else { return };
        if let Some(op) = started.tree_op.filter(|_| started.path == Path::Tree) {
            self.owned.remove(&op);
            self.forget_completion(op);
        }
    }

    /// Free the buffers of a completed operation in the tree if it is detached. Returns whether it was.
    pub(super) fn reclaim_completed(&mut self, op: OpId) -> bool {
        let Some(handle) = self.owned.get(&op).map(|in_tree| in_tree.handle) else { return false };
        if self.started.get(&handle).is_none_or(|started| !started.is_detached) {
            return false;
        }
        self.reclaim(handle);
        true
    }

    /// Free the buffers of detached operations that have ended; of all detached ones if the communicator has.
    pub(super) fn reclaim_detached(&mut self) {
        let is_over = self.has_ended();
        let over = |started: &Started| started.is_detached && (is_over || started.finished.is_some());
        let handles: Vec<u64> = self.started.iter().filter(|(_, started)| over(started)).map(|(&of, _)| of).collect();
        handles.into_iter().for_each(|handle| self.reclaim(handle));
        self.schedules.retain(|handle| self.started.contains_key(handle));
        self.owned.retain(|_, in_tree| self.started.contains_key(&in_tree.handle));
    }

    /// Process dropped handles.
    pub(super) fn reclaim_dropped(&mut self) {
        if !self.notices.dropped.is_any() {
            return;
        }
        let notices = std::sync::Arc::clone(&self.notices);
        let (handles, tickets) = notices.dropped.take();
        handles.into_iter().for_each(|handle| self.detach(handle));
        for ticket in tickets {
            match &mut self.connections {
                Some(connections) => connections.mesh.abandon(ticket),
                // In use: the next call processes it.
                None => notices.dropped.push_message(ticket),
            }
        }
    }

    /// Return the started operations and messages that the communicator holds.
    pub(super) fn outstanding(&mut self) -> Outstanding {
        self.reclaim_dropped();
        let in_tree = self.owned.values().map(|in_tree| &in_tree.buffers);
        let elsewhere = self.started.values().filter_map(|started| started.buffers.as_ref());
        let (messages, message_bytes) =
            self.connections.as_ref().map_or((0, 0), |connections| connections.mesh.owned_by_messages());
        Outstanding {
            operations: self.started.len(),
            messages,
            bytes: message_bytes + in_tree.chain(elsewhere).map(Owned::len_bytes).sum::<usize>(),
        }
    }

    /// Return whether a started operation has ended, with a result or an error. Drives the tree without blocking; runs
    /// a host collective to completion.
    pub(super) fn test(&mut self, handle: u64, options: &CallOptions) -> bool {
        let (at, limit) = self.deadline(options);
        if self.schedules.contains(&handle) {
            self.wait_for(handle, (at, limit));
            return true;
        }
        self.try_finish(handle);
        if let Some(started) = self.started.get_mut(&handle).filter(|started| started.finished.is_none()) {
            let (desc, begun) = (started.desc, started.begun);
            let waited = started.tested.get_or_insert_with(Instant::now).elapsed();
            // Apply the same limits as a wait: the caller may never do more than test.
            let advanced = self.advance(None, (at - waited, limit)).map(|_| ());
            if let Err(error) = self.recover_from(advanced, (at, limit)) {
                self.end(error, &desc, begun);
            }
            self.try_finish(handle);
        }
        self.started.get(&handle).is_none_or(|started| started.finished.is_some())
    }

    /// Wait for a started operation, and return its buffers.
    pub(super) fn finish(&mut self, handle: u64, options: &CallOptions) -> (Option<Owned>, Result<Outcome, Error>) {
        let deadline = self.deadline(options);
        self.wait_for(handle, deadline);
        let Some(started) = self.started.remove(&handle) else {
            return (None, Err(Error::Argument("the handle belongs to another communicator".into())));
        };
        let in_tree = started.tree_op.and_then(|op| self.owned.remove(&op)).map(|in_tree| in_tree.buffers);
        let ended = self.ended.clone().unwrap_or(Error::PathLost);
        let (mut buffers, result) = (started.buffers.or(in_tree), started.finished.unwrap_or(Err(ended)));
        if let (Some(owned), Ok(_), Path::Tree) = (&mut buffers, &result, started.path) {
            let extent = owned.extent.clone();
            extent.copy_own(&started.desc, &mut owned.borrow_buffers());
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
            self.try_finish(handle);
            let Some(started) = self.started.get(&handle).filter(|started| started.finished.is_none()) else { return };
            let (desc, begun) = (started.desc, started.begun);
            let stepped = self.step(None, deadline);
            if let Err(error) = self.recover_from(stepped, deadline) {
                let error = self.end(error, &desc, begun);
                self.try_finish(handle);
                if let Some(started) = self.started.get_mut(&handle) {
                    started.finished.get_or_insert(Err(error));
                }
            }
        }
    }

    /// Recover from an error, if it can be recovered from.
    pub(super) fn recover_from(&mut self, result: Result<(), Error>, deadline: Deadline) -> Result<(), Error> {
        match result {
            Err(error) if self.is_recoverable(&error) => self.change_view(None, &error, deadline).map(|_| ()),
            other => other,
        }
    }

    /// Record the end of a started operation in the tree, if it has ended.
    pub(super) fn try_finish(&mut self, handle: u64) {
        let Some(started) = self.started.get(&handle).filter(|started| started.finished.is_none()) else { return };
        if started.path == Path::Tree && started.tree_op.is_none_or(|op| op.0 < self.completed_below) {
            let (operation, fallback, begun) =
                ((started.path, started.transfer), started.fallback.clone(), started.begun);
            let op = started.tree_op;
            let outcome = self.outcome(operation, fallback, begun);
            let outcome = self.with_completion(op, outcome);
            if let Some(started) = self.started.get_mut(&handle) {
                started.finished = Some(Ok(outcome));
            }
        } else if let Some(error) = &self.ended {
            let in_tree = started.tree_op.filter(|_| started.path == Path::Tree);
            let output = in_tree.map_or(OutputState::Elements(Vec::new()), |op| self.output_state(op));
            let error = error.clone().with_output(output);
            if let Some(started) = self.started.get_mut(&handle) {
                started.finished = Some(Err(error));
            }
        }
    }

    /// Run all started host collectives, in the order of posting.
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
        // The tree of this number may be gone when the schedule has run.
        let announced = started.tree_op.take();
        self.scheduling = Some(started.call);
        let result = started.buffers.as_mut().map_or(Ok(()), |owned| {
            let none = || Error::Argument(format!("{desc} was started without a schedule")).ending();
            let schedule = started.schedule.as_ref().ok_or_else(none)?;
            self.run_announced((&desc, path), schedule, owned.borrow_buffers(), announced, deadline)
        });
        let result = result.map_err(|error| self.end(error, &desc, started.begun));
        self.scheduling = None;
        let outcome = self.outcome((path, None), started.fallback.clone(), started.begun);
        started.finished = Some(result.clone().map(|()| outcome));
        started.schedule = None;
        if !started.is_detached {
            self.started.insert(handle, started);
        }
        result
    }

    pub(super) const fn has_ended(&self) -> bool {
        self.ended.is_some()
    }
}
