//! Started calls: how they are started, tested and waited for.
//!
//! Host collectives run in the order of posting, when one of them or a later operation is waited for.

use super::calls::premultiply;
use super::core::Core;
use super::data_path::Deadline;
use super::element::ErasedBuffer;
use super::error::{Error, StartError};
use super::extent::Extent;
use super::operations::{Awaited, NextStep, Owned, Started};
use super::options::{CallOptions, Outcome};
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};

impl Core {
    /// Start an operation on buffers that the communicator owns until it is waited for. An error returns `memory`,
    /// unchanged.
    pub(crate) fn start(
        &mut self,
        desc: OpDesc,
        memory: Box<dyn ErasedBuffer>,
        output: Option<Box<dyn ErasedBuffer>>,
        options: &CallOptions,
    ) -> Result<u64, StartError<Box<dyn ErasedBuffer>>> {
        let extent = match self.check_usable().and_then(|()| Extent::of(&desc, self.data.place)) {
            Ok(extent) => extent,
            Err(error) => return Err(StartError { error, buffer: memory }),
        };
        let mut owned = Owned { memory, output, scaled: None, extent: extent.clone() };
        let checked = extent.check(&desc, &owned.borrow_buffers());
        match checked.and_then(|()| premultiply(&desc, &extent, &owned.borrow_buffers(), options)) {
            Ok(scaled) => owned.scaled = scaled,
            Err(error) => return Err(StartError { error, buffer: owned.memory }),
        }
        let (deadline, before) = (self.deadline(options), self.data.snapshot());
        let result = match self.make_room(deadline).and_then(|()| self.begin_call(deadline)) {
            Ok(()) => self.start_call(desc, owned, options, deadline),
            Err(error) => Err(Box::new((error, owned))),
        };
        let result = result.map_err(|refused| {
            let (error, owned) = *refused;
            let error = self.end(error, &desc, before);
            StartError { error: self.release_rejected_call(error), buffer: owned.memory }
        });
        self.data.operations.calling = None;
        if result.is_ok() {
            self.data.pump(None);
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
        let handle = self.data.operations.next_handle();
        loop {
            let chosen = self.data.algo(&desc, options).and_then(|algo| Ok((algo, self.data.choose(&desc, options)?)));
            let (algo, chosen) = match chosen {
                Ok(chosen) => chosen,
                Err(error) => return Err(Box::new((error, owned))),
            };
            let mut started = Started {
                desc,
                call: self.data.operations.calling.unwrap_or_default(),
                algo,
                chosen,
                tree_op: None,
                limit: self.data.policy(options).limit(),
                transfer: None,
                begun: self.data.snapshot(),
                tested: None,
                buffers: None,
                schedule: None,
                finished: None,
                is_detached: false,
            };
            let Err(refused) = self.data.launch(handle, &mut started, owned) else {
                return Ok(self.data.operations.start(started));
            };
            let stop;
            (stop, owned) = *refused;
            if let Err(error) = self.resume(Err::<(), _>(stop), deadline) {
                return Err(Box::new((error, owned)));
            }
        }
    }

    /// Return whether a started operation has ended, with a result or an error. Drives the tree without blocking; runs
    /// host collectives to completion, also those that were started before this operation: other ranks may wait for
    /// them before they start it.
    pub(crate) fn test(&mut self, handle: u64, options: &CallOptions) -> bool {
        let (at, limit) = self.deadline(options);
        while self.data.next_step(Awaited::Operation(handle)) == NextStep::RunSchedule {
            // An error has ended the communicator, and this operation with it.
            if self.run_next_schedule((at, limit)).is_err() {
                break;
            }
        }
        self.data.try_finish(handle);
        if let Some(started) = self.data.operations.get_mut(handle).filter(|started| started.finished.is_none()) {
            let (desc, begun) = (started.desc, started.begun);
            let waited = started.tested.get_or_insert_with(Instant::now).elapsed();
            // Apply the same limits as a wait: the caller may never do more than test.
            let advanced = self.data.advance(None, (at - waited, limit));
            if let Err(error) = self.resume(advanced, (at, limit)) {
                self.end(error, &desc, begun);
            }
            self.data.try_finish(handle);
        }
        self.data.operations.get(handle).is_none_or(|started| started.finished.is_some())
    }

    /// Wait for a started operation, and return its buffers.
    pub(crate) fn finish(&mut self, handle: u64, options: &CallOptions) -> (Option<Owned>, Result<Outcome, Error>) {
        let deadline = self.deadline(options);
        self.wait_for(handle, deadline);
        let Some(started) = self.data.operations.take(handle) else {
            return (None, Err(Error::Argument("the handle belongs to another communicator".into())));
        };
        let in_tree = started.tree_op.and_then(|op| self.data.operations.disown(op));
        let ended = self.data.ended.clone().unwrap_or(Error::PathLost);
        let (mut buffers, result) = (started.buffers.or(in_tree), started.finished.unwrap_or(Err(ended)));
        if let (Some(owned), Ok(_), Path::Tree) = (&mut buffers, &result, started.chosen.path) {
            let extent = owned.extent.clone();
            extent.copy_own(&started.desc, &mut owned.borrow_buffers());
        }
        (buffers, result)
    }

    fn wait_for(&mut self, handle: u64, deadline: Deadline) {
        loop {
            self.data.try_finish(handle);
            match self.data.next_step(Awaited::Operation(handle)) {
                NextStep::Return => return,
                // An error has ended the communicator, and is this operation's too.
                NextStep::RunSchedule if self.run_next_schedule(deadline).is_ok() || self.data.ended.is_some() => {
                    continue;
                }
                NextStep::RunSchedule | NextStep::DriveTree => {}
            }
            let Some(started) = self.data.operations.unfinished(handle) else { return };
            let (desc, begun) = (started.desc, started.begun);
            let stepped = self.data.step(None, deadline);
            if let Err(error) = self.resume(stepped, deadline) {
                let error = self.end(error, &desc, begun);
                self.data.try_finish(handle);
                if let Some(started) = self.data.operations.get_mut(handle) {
                    started.finished.get_or_insert(Err(error));
                }
            }
        }
    }
}
