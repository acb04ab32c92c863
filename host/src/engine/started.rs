//! Started calls: how they are started, tested and waited for.
//!
//! Host collectives run in the order of posting, when one of them or a later operation is waited for.

use super::calls::premultiply;
use super::core::Core;
use super::counts::Counts;
use super::data_path::Deadline;
use super::error::{Error, StartError};
use super::extent::Extent;
use super::operations::{Awaited, NextStep, Started};
use super::options::{CallOptions, Outcome};
use super::owned::Owned;
use super::task::{Operation, Refused, Work};
use crate::schedule::Schedule;
use crate::select::Algo;
use std::sync::Arc;
use std::time::Instant;
use sumac_hal::op::{OpDesc, Path};

/// How an operation on uneven blocks runs.
struct Uneven {
    path: Path,
    schedule: Arc<Schedule>,
    counts: Counts,
}

impl Core {
    /// Start an operation on buffers that the communicator owns until it is waited for. An error returns it, with its
    /// buffers unchanged.
    pub(crate) fn start(&mut self, operation: Operation) -> Result<u64, Refused> {
        let Operation { desc, counts, memory, output, options } = operation;
        let refused = |error, owned: Owned, counts| {
            let (memory, output) = owned.into_parts();
            let work = Work::Operation(Operation { desc, counts, memory, output, options });
            Box::new(StartError { error, buffer: work })
        };
        let planned = self.check_usable().and_then(|()| match (&counts, &output) {
            (Some(_), None) => Err(Error::Argument(format!("{desc} needs separate input and output buffers"))),
            _ => self.plan(&desc, counts.as_ref(), &options),
        });
        let (extent, uneven, refusal) = match planned {
            Ok((extent, uneven)) => (extent, uneven, None),
            Err(error) => (Extent::NONE, None, Some(error)),
        };
        let mut owned = Owned { memory, output, scaled: None, extent: extent.clone() };
        if let Some(error) = refusal {
            return Err(refused(error, owned, counts));
        }
        let checked = extent.check(&desc, &owned.borrow_buffers());
        match checked.and_then(|()| premultiply(&desc, &extent, &owned.borrow_buffers(), &options)) {
            Ok(scaled) => owned.scaled = scaled,
            Err(error) => return Err(refused(error, owned, counts)),
        }
        let now = Instant::now();
        let (deadline, before) = (self.deadline_from(now, &options), self.data.snapshot(now));
        let result = match self.make_room(deadline).and_then(|()| self.begin_call(deadline)) {
            Ok(()) => self.start_call((desc, uneven), owned, &options, deadline),
            Err(error) => Err(Box::new((error, owned))),
        };
        let result = result.map_err(|stopped| {
            let (error, owned) = *stopped;
            let error = self.end(error, &desc, before);
            refused(self.release_rejected_call(error), owned, counts)
        });
        self.data.operations.calling = None;
        if result.is_ok() {
            self.data.pump(None);
        }
        result
    }

    /// Return the extents of an operation, and how one on uneven blocks runs.
    fn plan(
        &self,
        desc: &OpDesc,
        counts: Option<&Counts>,
        options: &CallOptions,
    ) -> Result<(Extent, Option<Uneven>), Error> {
        let Some(counts) = counts else { return Ok((Extent::of(desc, self.data.place)?, None)) };
        let (path, schedule) = self.uneven_schedule((desc, options), counts)?;
        let extent = Extent::of_layout(schedule.layout(), desc);
        Ok((extent, Some(Uneven { path, schedule: Arc::new(schedule), counts: counts.clone() })))
    }

    /// Start a counted operation. If the tree turns out to be lost and is recovered, start it again.
    fn start_call(
        &mut self,
        (desc, uneven): (OpDesc, Option<Uneven>),
        mut owned: Owned,
        options: &CallOptions,
        deadline: Deadline,
    ) -> Result<u64, Box<(Error, Owned)>> {
        let handle = self.data.operations.next_handle();
        loop {
            let chosen = match &uneven {
                Some(uneven) => Ok((Algo::Pairwise, self.uneven_choice(uneven.path))),
                None => self.data.algo(&desc, options).and_then(|algo| Ok((algo, self.data.choose(&desc, options)?))),
            };
            let (algo, chosen) = match chosen {
                Ok(chosen) => chosen,
                Err(error) => return Err(Box::new((error, owned))),
            };
            let call = self.data.operations.calling.unwrap_or_default();
            let (limit, begun) = (self.data.policy(options).limit(), self.data.snapshot(Instant::now()));
            let mut started = Started {
                schedule: uneven.as_ref().map(|uneven| Arc::clone(&uneven.schedule)),
                counts: uneven.as_ref().map(|uneven| uneven.counts.clone()),
                ..Started::new((desc, call), (algo, chosen), limit, begun)
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
        let unknown = || (None, Err(Error::Argument("the handle belongs to another communicator".into())));
        self.data.take_started(handle).unwrap_or_else(unknown)
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
