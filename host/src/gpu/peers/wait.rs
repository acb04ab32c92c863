//! How operations between GPUs of several processes end: well, in a named error, and never by hanging.

use super::choose::Way;
use super::group::{PeerFlight, PeerGroup, PeerOutcome, PeerWork, Shared};
use super::{Bootstrap, PeerError, Peered, page};
use crate::gpu::GpuError;
use crate::gpu::group::Patience;
use crate::gpu::nccl::Nccl;
use crate::gpu::staged::Staging;
use crate::select::Algo;
use std::time::Instant;
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};

impl<G: Peered + Nccl, B: Bootstrap> PeerGroup<G, B> {
    /// Tell whether an operation is done at all ranks.
    ///
    /// # Errors
    /// What became of it instead; what went wrong on the GPU.
    pub fn is_done(&mut self, work: &PeerWork<G>) -> Result<bool, PeerError> {
        self.land()?;
        match &self.ended {
            Some((from, error)) if work.number >= *from => Err(error.clone()),
            _ => Ok(self.flights.iter().all(|flight| flight.number != work.number)),
        }
    }

    /// Wait for an operation, until `deadline` and, if it has to be given up, the time that this takes.
    ///
    /// # Errors
    /// [`PeerError`]: after any of them the group is of no use.
    pub fn wait(&mut self, work: PeerWork<G>, deadline: Instant) -> Result<(), PeerError> {
        let mut patience = Patience::default();
        loop {
            if self.is_done(&work)? {
                return Ok(());
            }
            let flight = self.flights.iter().find(|flight| flight.number == work.number);
            let why = match flight {
                _ if self.canceller.take() => GpuError::Cancelled.into(),
                Some(flight) if Instant::now() >= deadline => {
                    PeerError::Deadline { desc: flight.desc, missing: self.missing(flight) }
                }
                _ => {
                    patience.wait();
                    continue;
                }
            };
            return Err(self.give_up(why));
        }
    }

    /// All-reduce shared memory in place, whichever way is chosen; it begins when the events `after` have come.
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
        let way = self.explain(shared, &desc, algo).way;
        if let Ok(Way::Staged(_)) = &way {
            return self.staged(shared, (&desc, way.unwrap_or(Way::Nccl)), after, deadline);
        }
        let work = self.start(shared, (&desc, algo), after, deadline)?;
        let way = if work.path == Path::Nccl { Way::Nccl } else { Way::Direct(work.path) };
        self.wait(work, deadline)?;
        Ok(PeerOutcome { way, chunks: Vec::new(), fallback: None, direct_bytes: 0 })
    }

    /// Go through pinned memory and the network; directly from where the network has no tree any more, if it may.
    fn staged(
        &mut self,
        shared: &Shared<G>,
        (desc, way): (&OpDesc, Way),
        after: &[&G::Event],
        deadline: Instant,
    ) -> Result<PeerOutcome, PeerError> {
        self.usable()?;
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
        let may_leave = self.options.network_first && shared.seen.is_ok();
        let mut outcome = PeerOutcome { way, chunks: Vec::new(), fallback: None, direct_bytes: 0 };
        let mut through = 0;
        let ran = staging.run(gpu, &shared.own, &ready, deadline, |bytes| {
            if may_leave && outcome.fallback.is_some() {
                return Err(Leaving::Directly);
            }
            let part = OpDesc { count: (bytes.len() / each) as u64, ..*desc };
            let reduced = bootstrap.all_reduce(&part, bytes, deadline)?;
            through += bytes.len();
            outcome.chunks.push(reduced.path);
            // While one is repaired ranks may see different ways; the next one is chosen alike by all.
            if !reduced.repaired && reduced.path != Path::Tree {
                outcome.fallback = outcome.fallback.take().or(reduced.fallback);
            }
            Ok(())
        });
        self.staging = Some(staging);
        match ran {
            Ok(()) => return Ok(outcome),
            Err(Leaving::Error(error)) => {
                self.ended.get_or_insert((self.started + 1, error.clone()));
                return Err(error);
            }
            Err(Leaving::Directly) => {}
        }
        let left = desc.count as usize * each - through;
        let rest = OpDesc { count: (left / each) as u64, ..*desc };
        let choice = self.explain_direct(shared, &rest)?;
        let work = self.start_direct((shared, through), (&rest, choice), &[], deadline)?;
        self.wait(work, deadline)?;
        outcome.direct_bytes = left;
        Ok(outcome)
    }

    /// Return the cheapest schedule for what the network has left over.
    fn explain_direct(&self, shared: &Shared<G>, desc: &OpDesc) -> Result<Path, PeerError> {
        let explanation = self.explain(shared, desc, Algo::Auto).direct;
        let cost = |candidate: &crate::select::Candidate| candidate.cost_s.clone().unwrap_or(f64::INFINITY);
        let schedules = explanation.candidates.iter().filter(|candidate| !matches!(candidate.path, Path::Nccl));
        let best = schedules.filter(|candidate| candidate.cost_s.is_ok()).min_by(|a, b| cost(a).total_cmp(&cost(b)));
        let none = || GpuError::Invalid(format!("{desc}: no schedule is possible"));
        Ok(best.ok_or_else(none)?.path)
    }

    /// Wait until nothing is on its way.
    pub(super) fn all_landed(&mut self, deadline: Instant) -> Result<(), PeerError> {
        let mut patience = Patience::default();
        loop {
            self.usable()?;
            match self.flights.first() {
                None => return Ok(()),
                Some(flight) if Instant::now() >= deadline => {
                    let why = PeerError::Deadline { desc: flight.desc, missing: self.missing(flight) };
                    return Err(self.give_up(why));
                }
                Some(_) => patience.wait(),
            }
        }
    }

    /// Check that the group is of use.
    pub(super) fn usable(&mut self) -> Result<(), PeerError> {
        self.land()?;
        if self.ended.is_some() { Err(PeerError::Ended) } else { Ok(()) }
    }

    /// Let go of what is done, and note the first operation that has not become what it should.
    fn land(&mut self) -> Result<(), PeerError> {
        self.check_process()?;
        if let (Ok(comm), true) = (&self.nccl, self.flights.iter().any(|flight| flight.path == Path::Nccl))
            && self.ended.is_none()
            && let Err(error) = self.gpu.nccl_is_ready(comm)
        {
            self.give_up(error.into());
        }
        let mut index = 0;
        while let Some(flight) = self.flights.get(index) {
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
            let mut flight = self.flights.remove(index);
            if let (Err(error), None) = (self.verdict(&mut flight), &self.ended) {
                self.ended = Some((flight.number, error));
            }
            self.pins.extend(flight.page);
            if self.ended.is_some() {
                // Who has come to another operation may still read it.
                self.kept.append(&mut flight.held);
            }
        }
        Ok(())
    }

    /// Read what each rank took part in.
    fn verdict(&self, flight: &mut PeerFlight<G>) -> Result<(), PeerError> {
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

    /// Return the ranks that have not come to an operation.
    fn missing(&self, flight: &PeerFlight<G>) -> Vec<u32> {
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

    /// End everything that is on its way, tell the others, and return `why`, or that it can't be ended.
    pub(super) fn give_up(&mut self, why: PeerError) -> PeerError {
        let first = self.flights.iter().map(|flight| flight.number).min().unwrap_or(self.started);
        self.ended.get_or_insert((first, why.clone()));
        match self.end_all() {
            Ok(()) => why,
            Err(error) => error,
        }
    }

    fn end_all(&mut self) -> Result<(), PeerError> {
        if let Ok(comm) = &self.nccl {
            self.gpu.nccl_abort(comm);
        }
        if let Ok(words) = &self.direct {
            // First what the others will read, then what lets the stream go there.
            self.gpu.set_now(page::given_up(&words.banner), &[page::GIVEN_UP])?;
        }
        self.gpu.stop(true)?;
        let (until, mut patience) = (Instant::now() + self.options.group.grace, Patience::default());
        loop {
            // Again and again: others still count in this page.
            if let (Ok(words), Some(flight)) = (&self.direct, self.flights.first()) {
                let ahead = flight.base.wrapping_add(page::FAR_AHEAD);
                for rank in 0..self.facts.len() {
                    self.gpu.set_now(page::counter(&words.pages[self.me], rank), &[ahead])?;
                }
            }
            self.land()?;
            if self.flights.is_empty() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(GpuError::Stuck.into());
            }
            patience.wait();
        }
    }
}

/// Why staging stopped before its end.
enum Leaving {
    Error(PeerError),
    /// What is left goes directly.
    Directly,
}

impl From<GpuError> for Leaving {
    fn from(error: GpuError) -> Self {
        Self::Error(error.into())
    }
}

impl From<PeerError> for Leaving {
    fn from(error: PeerError) -> Self {
        Self::Error(error)
    }
}

impl<G: Peered + Nccl, B: Bootstrap> Drop for PeerGroup<G, B> {
    fn drop(&mut self) {
        if self.check_process().is_err() {
            return self.forget();
        }
        if self.land().is_err() || !self.flights.is_empty() {
            self.give_up(GpuError::Cancelled.into());
        }
        for flight in self.flights.drain(..) {
            flight.held.into_iter().for_each(std::mem::forget);
            std::mem::forget(flight.page);
        }
        // Who has not left in good order can't say until when others read and write these.
        self.kept.drain(..).for_each(std::mem::forget);
        self.work[self.me].take().into_iter().for_each(std::mem::forget);
        if let Ok(words) = &self.direct {
            std::mem::forget(words.pages[self.me].clone());
        }
    }
}
