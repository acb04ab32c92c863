//! Completion of operations between GPUs of several processes: success, or a named error by the deadline.

use super::group::{PeerGroup, PeerInFlight, PeerOutcome, PeerWork, Shared};
use super::select::PeerTransport;
use super::{Bootstrap, PeerError, Peered, page};
use crate::gpu::GpuError;
use crate::gpu::group::SpinWait;
use crate::gpu::nccl::Nccl;
use crate::gpu::staged::Staging;
use crate::select::Algo;
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};

impl<G: Peered + Nccl, B: Bootstrap> PeerGroup<G, B> {
    /// Return whether an operation is complete on all ranks.
    ///
    /// # Errors
    /// The error that it ended with; the error of the GPU.
    pub fn is_done(&mut self, work: &PeerWork<G>) -> Result<bool, PeerError> {
        self.retire_done()?;
        match &self.ended {
            Some((from, error)) if work.number >= *from => Err(error.clone()),
            _ => Ok(self.in_flight.iter().all(|flight| flight.number != work.number)),
        }
    }

    /// Wait for an operation until `deadline` and, if it must be stopped, for the grace period.
    ///
    /// # Errors
    /// [`PeerError`]: after any of them the group is unusable.
    pub fn wait(&mut self, work: PeerWork<G>, deadline: Instant) -> Result<(), PeerError> {
        let mut spin = SpinWait::default();
        loop {
            if self.is_done(&work)? {
                return Ok(());
            }
            let flight = self.in_flight.iter().find(|flight| flight.number == work.number);
            let why = match flight {
                _ if self.canceller.take() => GpuError::Cancelled.into(),
                Some(flight) if Instant::now() >= deadline => {
                    PeerError::Deadline { desc: flight.desc, missing: self.missing(flight) }
                }
                _ => {
                    spin.wait();
                    continue;
                }
            };
            return Err(self.give_up(why));
        }
    }

    /// All-reduce shared memory in place over the selected transport; begins when the events `after` have completed.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn all_reduce(
        &mut self,
        shared: &Shared<G>,
        (dtype, op, algo): (Dtype, ReduceOp, Algo),
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerOutcome, PeerError> {
        let each = OpDesc::all_reduce(dtype, op, 1).element_bytes();
        let range = self.gpu.addresses(&shared.own);
        let desc = OpDesc::all_reduce(dtype, op, (range.end - range.start) / each as u64);
        self.check_process()?;
        let transport = self.explain(shared, &desc, algo).transport;
        if let Ok(PeerTransport::Staged(_)) = &transport {
            return self.staged(shared, (&desc, transport.unwrap_or(PeerTransport::Nccl)), after, deadline);
        }
        let work = self.start(shared, (&desc, algo), after, deadline)?;
        let transport = if work.path == Path::Nccl { PeerTransport::Nccl } else { PeerTransport::Direct(work.path) };
        self.wait(work, deadline)?;
        Ok(PeerOutcome { transport, chunks: Vec::new(), fallback: None, direct_bytes: 0 })
    }

    /// Stage through pinned memory and the network; if the network loses its tree and the options allow, transfer the
    /// rest directly.
    fn staged(
        &mut self,
        shared: &Shared<G>,
        (desc, transport): (&OpDesc, PeerTransport),
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerOutcome, PeerError> {
        self.check_usable()?;
        let each = desc.element_bytes();
        if !self.options.chunk_bytes.is_multiple_of(each) {
            let what = format!("chunks of {} bytes cut elements of {each}", self.options.chunk_bytes);
            return Err(GpuError::Invalid(what).into());
        }
        let mut staging = match self.staging.take() {
            Some(staging) => staging,
            None => Staging::new(&self.gpu, self.options.chunk_bytes)?,
        };
        let (gpu, bootstrap, ready) = (&self.gpu, &self.bootstrap, self.gpu.event()?);
        after.iter().try_for_each(|event| gpu.wait(&self.stream, event))?;
        gpu.record(&ready, &self.stream)?;
        let may_leave = self.options.network_first && shared.opened_memory.is_ok();
        let mut outcome = PeerOutcome { transport, chunks: Vec::new(), fallback: None, direct_bytes: 0 };
        let mut through = 0;
        let ran = staging.run(gpu, &shared.own, &ready, deadline, |bytes| {
            if may_leave && outcome.fallback.is_some() {
                return Err(StagedExit::Directly);
            }
            let part = OpDesc { count: (bytes.len() / each) as u64, ..*desc };
            let reduced = bootstrap.all_reduce(&part, bytes, deadline)?;
            through += bytes.len();
            outcome.chunks.push(reduced.path);
            // During recovery ranks may see different paths; the next chunk is selected alike by all.
            if !reduced.recovered && reduced.path != Path::Tree {
                outcome.fallback = outcome.fallback.take().or(reduced.fallback);
            }
            Ok(())
        });
        self.staging = Some(staging);
        match ran {
            Ok(()) => return Ok(outcome),
            Err(StagedExit::Error(error)) => {
                self.ended.get_or_insert((self.started + 1, error.clone()));
                return Err(error);
            }
            Err(StagedExit::Directly) => {}
        }
        let left = desc.count as usize * each - through;
        let rest = OpDesc { count: (left / each) as u64, ..*desc };
        let choice = self.explain_direct(shared, &rest)?;
        let work = self.start_direct((shared, through), (&rest, choice), &[], deadline)?;
        self.wait(work, deadline)?;
        outcome.direct_bytes = left;
        Ok(outcome)
    }

    /// Return the cheapest direct schedule for the rest.
    fn explain_direct(&self, shared: &Shared<G>, desc: &OpDesc) -> Result<Path, PeerError> {
        let explanation = self.explain(shared, desc, Algo::Auto).direct;
        let cost = |candidate: &crate::select::Candidate| candidate.cost_s.clone().unwrap_or(f64::INFINITY);
        let schedules = explanation.candidates.iter().filter(|candidate| !matches!(candidate.path, Path::Nccl));
        let best = schedules.filter(|candidate| candidate.cost_s.is_ok()).min_by(|a, b| cost(a).total_cmp(&cost(b)));
        let none = || GpuError::Invalid(format!("{desc}: no schedule is possible"));
        Ok(best.ok_or_else(none)?.path)
    }

    /// Wait until no operation is in flight.
    pub(super) fn wait_all(&mut self, deadline: Instant) -> Result<(), PeerError> {
        let mut spin = SpinWait::default();
        loop {
            self.check_usable()?;
            match self.in_flight.first() {
                None => return Ok(()),
                Some(flight) if Instant::now() >= deadline => {
                    let why = PeerError::Deadline { desc: flight.desc, missing: self.missing(flight) };
                    return Err(self.give_up(why));
                }
                Some(_) => spin.wait(),
            }
        }
    }

    /// Check that the group is usable.
    pub(super) fn check_usable(&mut self) -> Result<(), PeerError> {
        self.retire_done()?;
        if self.ended.is_some() { Err(PeerError::Ended) } else { Ok(()) }
    }

    /// Retire complete operations, and record the first one that failed.
    fn retire_done(&mut self) -> Result<(), PeerError> {
        self.check_process()?;
        if let (Ok(comm), true) = (&self.nccl, self.in_flight.iter().any(|flight| flight.path == Path::Nccl))
            && self.ended.is_none()
            && let Err(error) = self.gpu.nccl_is_ready(comm)
        {
            self.give_up(error.into());
        }
        let mut index = 0;
        while let Some(flight) = self.in_flight.get(index) {
            let is_done = match self.gpu.is_done(&flight.done) {
                Ok(is_done) => is_done,
                Err(error) => {
                    let error = PeerError::from(error);
                    self.ended.get_or_insert((flight.number, error.clone()));
                    return Err(error);
                }
            };
            if !is_done {
                index += 1;
                continue;
            }
            let mut flight = self.in_flight.remove(index);
            if let (Err(error), None) = (self.check_result(&mut flight), &self.ended) {
                self.ended = Some((flight.number, error));
            }
            self.pins.extend(flight.page.take());
            if self.ended.is_some() {
                // Ranks at another operation may still read it.
                self.retained.append(&mut flight.held);
            }
            drop(flight);
            self.gpu.release_frees();
        }
        Ok(())
    }

    /// Check the signature and given-up word of each rank.
    fn check_result(&self, flight: &mut PeerInFlight<G>) -> Result<(), PeerError> {
        let Some(page) = &mut flight.page else { return Ok(()) };
        let words = self.gpu.host(page)?;
        let (desc, path) = (flight.desc, flight.path.name());
        let mut mismatch = None;
        for (rank, entry) in words.chunks(page::ENTRY_BYTES).take(self.facts.len()).enumerate() {
            let (words, _) = entry.as_chunks::<4>();
            let [_, signature, given_up, _] = words else { continue };
            let rank = rank as u32;
            if u32::from_le_bytes(*given_up) != 0 {
                return Err(PeerError::GivenUp { rank, desc });
            }
            if u32::from_le_bytes(*signature) != flight.signature {
                mismatch = mismatch.or(Some(PeerError::Mismatch { rank, desc, path }));
            }
        }
        mismatch.map_or(Ok(()), Err)
    }

    /// Return the ranks that have not entered an operation.
    fn missing(&self, flight: &PeerInFlight<G>) -> Vec<u32> {
        let Ok(words) = &self.direct else { return Vec::new() };
        if flight.page.is_none() {
            return Vec::new();
        }
        let page = self.gpu.get_now(page::whole(&words.pages[self.me], self.facts.len())).unwrap_or_default();
        let entry = flight.base.wrapping_add(1);
        let counters = page.chunks(page::ENTRY_BYTES / 4).map(|words| words[0]).enumerate();
        let late = counters.filter(|(_, counter)| (counter.wrapping_sub(entry) as i32) < 0);
        late.map(|(rank, _)| rank as u32).collect()
    }

    /// Stop everything in flight and notify the other ranks; returns `why`, or the error if that failed.
    pub(super) fn give_up(&mut self, why: PeerError) -> PeerError {
        let first = self.in_flight.iter().map(|flight| flight.number).min().unwrap_or(self.started);
        self.ended.get_or_insert((first, why.clone()));
        match self.end_all() {
            Ok(()) => why,
            Err(error) => error,
        }
    }

    fn end_all(&mut self) -> Result<(), PeerError> {
        if let Ok(words) = &self.direct {
            // First what the other ranks will read, then what releases the stream.
            self.gpu.set_now(page::given_up(&words.banner), &[page::GIVEN_UP])?;
        }
        self.gpu.stop(true)?;
        let (until, mut spin) = (Instant::now() + self.options.group.grace, SpinWait::default());
        let mut is_aborted = self.nccl.is_err();
        loop {
            // Repeatedly, as other ranks still count in this page.
            if let (Ok(words), Some(flight)) = (&self.direct, self.in_flight.first()) {
                let ahead = flight.base.wrapping_add(page::FAR_AHEAD);
                for rank in 0..self.facts.len() {
                    self.gpu.set_now(page::counter(&words.pages[self.me], rank), &[ahead])?;
                    self.gpu.set_now(page::published(&words.pages[self.me], rank), &[ahead])?;
                }
            }
            // After the own waits: an abort waits for all streams of the process.
            is_aborted = is_aborted || self.nccl.as_ref().is_ok_and(|comm| self.gpu.nccl_abort(comm, Instant::now()));
            self.retire_done()?;
            if self.in_flight.is_empty() && is_aborted {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(GpuError::Stuck.into());
            }
            spin.wait();
        }
    }
}

/// Why staging stopped early.
enum StagedExit {
    Error(PeerError),
    /// Transfer the rest directly.
    Directly,
}

impl From<GpuError> for StagedExit {
    fn from(error: GpuError) -> Self {
        Self::Error(error.into())
    }
}

impl From<PeerError> for StagedExit {
    fn from(error: PeerError) -> Self {
        Self::Error(error)
    }
}

impl<G: Peered + Nccl, B: Bootstrap> Drop for PeerGroup<G, B> {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            return self.forget();
        }
        if self.retire_done().is_err() || !self.in_flight.is_empty() {
            self.give_up(GpuError::Cancelled.into());
        }
        for flight in self.in_flight.drain(..) {
            flight.held.into_iter().for_each(std::mem::forget);
            std::mem::forget(flight.page);
        }
        // Without an orderly leave nobody knows how long other ranks access these.
        self.retained.drain(..).for_each(std::mem::forget);
        self.work[self.me].take().into_iter().for_each(std::mem::forget);
        if let Ok(words) = &self.direct {
            std::mem::forget(words.pages[self.me].clone());
        }
    }
}
