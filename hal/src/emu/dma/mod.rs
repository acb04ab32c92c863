//! An emulated DMA engine: threads that copy and reduce between mapped regions, each with its own queue.
//!
//! It emulates every [`Profile`](crate::dma::Profile). Descriptors pass through the same rings as to hardware and are
//! checked where they run. The arithmetic uses the SIMD kernels of `reduce`. Where the result is the same, a chain runs
//! tile by tile (`run`), so that accumulators stay in the nearest caches, and each source is read and each destination
//! written only once.
//!
//! Each queue has an affinity to every n-th piece of memory. A chain goes to the queue with affinity to the piece that
//! it reads first, unless another queue is much less busy. A core thus serves the same parts of all buffers in every
//! operation, and they stay in its caches. (If slots determined the queue, an operation with an odd number of chunks
//! would shift the assignment, and data would come from another core's caches, at half the speed if they are far
//! apart.)
//!
//! *Strict* mode checks more than hardware does ([`Strictness`]).
//!
//! Invariants: an accepted chain completes once. Nothing is allocated and no lock is taken between submission and
//! completion, except to wake a sleeping thread.

mod config;
mod heap;
mod inline;
mod map;
mod run;
mod strict;
#[cfg(test)]
mod tests;
mod worker;

pub use config::{DmaConfig, DmaStats, Notify, StartError, Strictness};
pub use heap::HeapMemory;
pub use map::MapError;

use crate::dma::{
    Address, Capabilities, Chain, Completion, DESCRIPTOR_WORDS, Descriptor, DmaMemory, Engine, LocalMemory, RegionKey,
    Scope, Span, Status, Step, SubmitError, WaitEngine,
};
use crate::ring::{Consumer, OwnedRing, Producer, SpinPolicy};
use inline::InlineRunner;
use map::Map;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use strict::InFlight;
use worker::{COMPLETION_WORDS, ExitNotice, Shared, Sleeper, Worker};

/// How many chains more than others a queue may have before other queues take those with affinity to it.
const AFFINITY_CHAINS: usize = 2;

/// The user's end of one thread's queue.
struct Queue {
    sleeper: Arc<Sleeper>,
    submissions: Producer<OwnedRing<DESCRIPTOR_WORDS>, DESCRIPTOR_WORDS>,
    completions: Consumer<OwnedRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    in_flight: InFlight,
    thread: Option<JoinHandle<()>>,
}

/// An emulated DMA engine.
pub struct EmuEngine {
    /// The process that owns the threads.
    pid: u32,
    /// Chains that run on the user's thread.
    inline: InlineRunner,
    shared: Arc<Shared>,
    queues: Vec<Queue>,
    capabilities: Capabilities,
    strictness: Strictness,
    spin: SpinPolicy,
    /// The device's local memory.
    local: Vec<(RegionKey, Arc<dyn DmaMemory>)>,
    /// Descriptors of the chain that is being submitted.
    staged: Vec<[u64; DESCRIPTOR_WORDS]>,
    /// Completions of short chains, and of chains that strict mode has refused.
    completed: VecDeque<Completion>,
    stats: DmaStats,
}

impl EmuEngine {
    /// Start an engine.
    ///
    /// # Errors
    /// [`StartError`] if the configuration is invalid or a thread cannot be started.
    pub fn start(config: DmaConfig) -> Result<Self, StartError> {
        Self::start_notifying(config, None)
    }

    /// Start an engine that calls `notify` from its threads after each completion, with the number of chains that the
    /// threads still have. This is for a user that waits on something other than [`WaitEngine::wait`]. The function
    /// must be fast, and cheap if no thread waits. It suffices to wake the user when the number is 0 or small.
    ///
    /// # Errors
    /// [`StartError`] if the configuration is invalid or a thread cannot be started.
    pub fn start_notifying(config: DmaConfig, notify: Option<Notify>) -> Result<Self, StartError> {
        let fits = (usize::from(!config.shares_work)..=DmaConfig::THREADS_MAX).contains(&config.threads)
            && (1..=config.queue_depth).contains(&config.max_steps)
            // A completion holds the step's index in 16 bits.
            && config.max_steps <= u32::from(u16::MAX)
            && config.queue_depth <= crate::ring::CAPACITY_MAX
            && config.queue_depth.is_power_of_two()
            && config.alignment_bytes.is_power_of_two();
        if !fits {
            return Err(StartError::Config { config: Box::new(config) });
        }
        let shared = Arc::new(Shared {
            map: Map::new(config.regions),
            stop: AtomicBool::new(false),
            scopes: [const { AtomicU16::new(0) }; 1 << u8::BITS],
            in_flight: AtomicU32::new(0),
            user: Sleeper::default(),
            notify,
        });
        let capabilities = Capabilities::new(config.profile, config.max_steps, config.queue_depth)
            .with_alignment(config.alignment_bytes);
        let depth = config.queue_depth as usize;
        let mut engine = Self {
            pid: std::process::id(),
            inline: InlineRunner::new(&shared, capabilities, &config),
            shared,
            queues: Vec::with_capacity(config.threads),
            capabilities,
            strictness: config.strictness,
            spin: config.spin,
            local: Vec::new(),
            staged: Vec::with_capacity(config.max_steps as usize),
            completed: VecDeque::with_capacity(depth),
            stats: DmaStats::default(),
        };
        for number in 0..config.threads {
            // If a thread cannot be started, `drop` stops the earlier ones.
            let queue = engine.start_queue(&config, number)?;
            engine.queues.push(queue);
        }
        Ok(engine)
    }

    fn start_queue(&self, config: &DmaConfig, number: usize) -> Result<Queue, StartError> {
        let invalid = |_| StartError::Config { config: Box::new(*config) };
        let submissions = OwnedRing::new(config.queue_depth).map_err(invalid)?;
        let completions = OwnedRing::new(config.queue_depth).map_err(invalid)?;
        let sleeper = Arc::new(Sleeper::default());
        let strict = config.strictness != Strictness::Hardware;
        let worker = Worker {
            shared: self.shared.clone(),
            sleeper: sleeper.clone(),
            submissions: Consumer::new(submissions.clone()),
            completions: Producer::new(completions.clone()),
            capabilities: self.capabilities,
            strict,
            spin: config.spin,
        };
        let on_start = config.on_start;
        let exit_notice = ExitNotice { shared: self.shared.clone(), sleeper: sleeper.clone() };
        let thread = thread::Builder::new().name(format!("dma-{number}")).spawn(move || {
            let _exit_notice = exit_notice;
            if let Some(on_start) = on_start {
                on_start(number);
            }
            worker.run();
        })?;
        let depth = config.queue_depth as usize;
        Ok(Queue {
            sleeper,
            submissions: Producer::new(submissions),
            completions: Consumer::new(completions),
            in_flight: InFlight::new(depth),
            thread: Some(thread),
        })
    }

    /// Map memory under a key. The generation must be newer than any before at that index.
    ///
    /// # Errors
    /// [`MapError`]: the index is out of range or in use, or the memory overlaps local memory.
    pub fn map(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapError> {
        let is_part = |(_, local): &&(RegionKey, Arc<dyn DmaMemory>)| {
            local.backing().overlaps(local.len_bytes(), &memory.backing(), memory.len_bytes())
        };
        if let Some((other, _)) = self.local.iter().find(is_part) {
            return Err(MapError::Overlap { index: key.index, other: other.index });
        }
        self.shared.map.map(key, memory)
    }

    /// Unmap a region. When this returns true, the engine no longer accesses it, and descriptors that refer to it fail
    /// with [`Status::StaleRegion`]. Returns false if the region was not mapped.
    pub fn unmap(&mut self, key: RegionKey) -> bool {
        self.local.retain(|(local, _)| *local != key);
        self.shared.map.unmap(key)
    }

    /// Allocate local memory and map it under a key. The device's processor can access it as well ([`LocalMemory`]).
    /// The generation must be newer than any before at that index.
    ///
    /// # Errors
    /// [`MapError`]: the index is out of range or in use.
    pub fn map_local(&mut self, key: RegionKey, len_bytes: usize) -> Result<(), MapError> {
        self.map_local_memory(key, Arc::new(HeapMemory::new(len_bytes)))
    }

    /// Map existing memory as local memory. It may outlive the engine, and others may read it, but nothing else may
    /// write it: this process must not access it otherwise, and mappings in other processes must be sealed against
    /// writing.
    ///
    /// # Errors
    /// [`MapError`]: the index is out of range or in use, or the memory overlaps another region.
    pub fn map_local_memory(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapError> {
        if let Some(other) = self.shared.map.find_overlap(&*memory) {
            return Err(MapError::Overlap { index: key.index, other });
        }
        self.shared.map.map(key, memory.clone())?;
        self.local.push((key, memory));
        Ok(())
    }

    /// Return the address of local memory, if the access does not conflict with a chain in flight.
    fn local(&self, address: Address, len_bytes: u64, written: bool) -> Result<NonNull<u8>, Status> {
        let found = self.local.iter().find(|(key, _)| *key == address.region);
        let (_, memory) = found.ok_or(Status::BadRegion)?;
        let end = address.offset_bytes.checked_add(len_bytes).ok_or(Status::OutOfBounds)?;
        if end > memory.len_bytes() as u64 {
            return Err(Status::OutOfBounds);
        }
        if self.all_in_flight().any(|in_flight| in_flight.conflicts_with(address, len_bytes, written)) {
            return Err(Status::Overlap);
        }
        // SAFETY: the offset is within the memory.
        Ok(unsafe { memory.base().add(address.offset_bytes as usize) })
    }

    /// Return whether there are completions to poll.
    pub fn has_completions(&mut self) -> bool {
        !self.completed.is_empty() || self.queues.iter_mut().any(Queue::has_completions)
    }

    /// Return the engine's statistics.
    pub fn stats(&self) -> DmaStats {
        self.stats
    }

    /// Return the index of the queue to submit to; the user's own queue comes after the others. This is the queue with
    /// affinity to what the chain reads first, unless another is much less busy, or it has no room, or its thread has
    /// exited.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`] if all threads have exited, [`SubmitError::Full`] if no running thread has room.
    fn choose(&self, chain: &Chain<'_>) -> Result<usize, SubmitError> {
        let (queues, steps) = (self.queues.len() + usize::from(self.inline.shares_work()), chain.steps.len());
        let is_local = |region| self.local.iter().any(|(local, _)| *local == region);
        let mut fetches = chain.steps.iter().filter_map(|step| Some((step.src()?, step.src_len_bytes())));
        let fetched = fetches.find(|(src, _)| !is_local(src.region));
        let piece = fetched.map_or(chain.tag.slot.into(), |(src, len_bytes)| src.offset_bytes / len_bytes.max(1));
        // The first piece has affinity to the user's queue, if it shares the work. A single piece then wakes no thread.
        let preferred = queues - 1 - (piece % queues as u64) as usize;
        let depth = self.capabilities.queue_depth as usize;
        let (mut best, mut all_gone): (Option<(usize, usize)>, _) = (None, true);
        for turn in 0..queues {
            let index = (preferred + turn) % queues;
            // Others take the chains with affinity to a thread that has exited.
            if self.queues.get(index).is_some_and(Queue::dead) {
                continue;
            }
            all_gone = false;
            let in_flight = self.queues.get(index).map_or(&self.inline.in_flight, |queue| &queue.in_flight);
            let chains = in_flight.len() + if index == preferred { 0 } else { AFFINITY_CHAINS };
            // The rings and lists have room for everything in flight.
            let room = in_flight.steps() + steps <= depth;
            if room && best.is_none_or(|(_, fewest)| chains < fewest) {
                best = Some((index, chains));
            }
        }
        let full = SubmitError::Full { depth: self.capabilities.queue_depth };
        best.map(|(index, _)| index).ok_or(if all_gone { SubmitError::Stopped } else { full })
    }

    fn stage(&mut self, chain: Chain<'_>) {
        let generation = self.shared.generation(chain.scope);
        self.staged.clear();
        self.staged.extend(chain.steps.iter().enumerate().map(|(at, &step)| {
            let more = at + 1 < chain.steps.len();
            Descriptor { tag: chain.tag, scope: chain.scope, scope_generation: generation, more, step }.emit()
        }));
    }

    fn count(&mut self, steps: usize) {
        self.stats.chains += 1;
        self.stats.steps += steps as u64;
    }

    /// Run one chain of the user's share. Returns false if there is none. It completes through [`Engine::poll`].
    pub fn work(&mut self) -> bool {
        let completed = self.inline.work();
        self.completed.extend(completed);
        completed.is_some()
    }

    /// Return whether [`EmuEngine::work`] has a chain to run.
    pub fn has_work(&self) -> bool {
        !self.inline.is_empty()
    }

    fn conflict(&self, steps: &[Step]) -> Option<usize> {
        self.all_in_flight().find_map(|in_flight| in_flight.conflict(steps))
    }

    fn all_in_flight(&self) -> impl Iterator<Item = &InFlight> {
        self.queues.iter().map(|queue| &queue.in_flight).chain([&self.inline.in_flight])
    }

    /// Take one completion from any queue.
    fn take(&mut self) -> Option<Completion> {
        if let Some(completed) = self.completed.pop_front() {
            return Some(completed);
        }
        for queue in &mut self.queues {
            if let Some(words) = queue.completions.pop().expect("the engine's own ring") {
                queue.in_flight.pop();
                return Some(worker::from_words(words));
            }
            // A thread that has exited completes nothing more. Its ring was checked after it had exited.
            if queue.dead()
                && let Ok(0) = queue.completions.available()
                && let Some(tag) = queue.in_flight.pop()
            {
                // Keep the count that other threads pass to `notify` correct.
                self.shared.in_flight.fetch_sub(1, Ordering::Relaxed);
                return Some(Completion { tag, status: Status::Hardware, step: 0 });
            }
        }
        None
    }
}

impl Queue {
    fn has_completions(&mut self) -> bool {
        self.completions.available().expect("the engine's own ring") > 0 || self.in_flight.len() > 0 && self.dead()
    }

    fn dead(&self) -> bool {
        self.sleeper.is_gone()
    }
}

impl Engine for EmuEngine {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&mut self, chain: Chain<'_>) -> Result<(), SubmitError> {
        let steps = chain.steps.len();
        if steps == 0 || steps > self.capabilities.max_steps as usize {
            return Err(SubmitError::Length { steps, max: self.capabilities.max_steps });
        }
        // There must be room for completions of chains that run on this thread, now or in `work`.
        if self.completed.len() + self.inline.in_flight.len() >= self.capabilities.queue_depth as usize {
            return Err(SubmitError::Full { depth: self.capabilities.queue_depth });
        }
        if self.strictness != Strictness::Hardware
            && let Some(step) = self.conflict(chain.steps)
        {
            self.stats.chains += 1;
            self.completed.push_back(Completion { tag: chain.tag, status: Status::Overlap, step: step as u16 });
            return Ok(());
        }
        if let Some(completion) = self.inline.run_short(&chain) {
            self.count(steps);
            self.completed.push_back(completion);
            return Ok(());
        }
        let index = self.choose(&chain)?;
        if index == self.queues.len() {
            let local = (self.strictness == Strictness::Hardware).then_some(&self.local[..]);
            self.inline.push(&chain, local.map(|local| local.iter().map(|(key, _)| *key)));
            self.count(steps);
            return Ok(());
        }
        self.stage(chain);
        let queue = &mut self.queues[index];
        match self.strictness {
            Strictness::Hardware => {
                queue.in_flight.push_local(chain.tag, chain.steps, self.local.iter().map(|(key, _)| *key))
            }
            _ => queue.in_flight.push(chain.tag, chain.steps),
        }
        self.shared.in_flight.fetch_add(1, Ordering::Relaxed);
        let pushed = queue.submissions.push_batch(&self.staged).expect("the engine's own ring");
        assert_eq!(pushed, steps, "the ring has room for everything in flight");
        queue.sleeper.ring();
        self.count(steps);
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let mut taken = 0;
        while taken < completions.len() {
            let Some(completion) = self.take() else { break };
            self.stats.completed[completion.status as usize] += 1;
            let is_expected = matches!(completion.status, Status::Done | Status::Aborted | Status::Hardware);
            assert!(
                is_expected || self.strictness != Strictness::Assert,
                "step {} of chain {:?} failed: {}",
                completion.step,
                completion.tag,
                completion.status
            );
            completions[taken] = completion;
            taken += 1;
        }
        taken
    }

    fn abort(&mut self, scope: Scope) {
        self.shared.scopes[usize::from(scope.0)].fetch_add(1, Ordering::AcqRel);
    }
}

impl WaitEngine for EmuEngine {
    fn wait(&mut self, timeout: Option<Duration>) -> bool {
        if self.has_completions() || self.work() {
            return true;
        }
        // A timeout beyond the range of the clock means no timeout.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (shared, queues, completed) = (&self.shared, &mut self.queues, &self.completed);
        shared.user.wait(self.spin, deadline, || !completed.is_empty() || queues.iter_mut().any(Queue::has_completions))
    }
}

impl LocalMemory for EmuEngine {
    fn with_local<R>(&mut self, dst: Span, src: Span, work: impl FnOnce(&mut [u8], &[u8]) -> R) -> Result<R, Status> {
        let to = self.local(dst.address, dst.len_bytes, true)?;
        let from = self.local(src.address, src.len_bytes, false)?;
        let (to_end, from_end) = (to.addr().get() + dst.len_bytes as usize, from.addr().get() + src.len_bytes as usize);
        if to.addr().get() < from_end && from.addr().get() < to_end {
            return Err(Status::Overlap);
        }
        // SAFETY: both lie in local memory, which stays while it is mapped, and are disjoint. No chain in flight
        // conflicts, through this region or another (`map` refuses overlapping regions), and none can be submitted
        // while `work` runs, because submitting needs `self`. Nothing else writes local memory, as `map_local_memory`
        // requires; for other processes the file is sealed against writing (`Region::read_only_file`), so that not even
        // a misbehaving peer can.
        let (to, from) = unsafe {
            (
                NonNull::slice_from_raw_parts(to, dst.len_bytes as usize).as_mut(),
                NonNull::slice_from_raw_parts(from, src.len_bytes as usize).as_ref(),
            )
        };
        Ok(work(to, from))
    }
}

impl std::fmt::Debug for EmuEngine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmuEngine").field("capabilities", &self.capabilities).finish_non_exhaustive()
    }
}

impl Drop for EmuEngine {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child has none of the threads.
            self.queues.iter_mut().for_each(|queue| std::mem::forget(queue.thread.take()));
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        for queue in &mut self.queues {
            queue.sleeper.ring();
            queue.sleeper.wake();
            if let Some(thread) = queue.thread.take() {
                // A panic of the thread has already been reported.
                let _ = thread.join();
            }
        }
    }
}
