//! An emulated DMA engine: threads of its own that copy and reduce between mapped memory, one queue each.
//!
//! It plays every [`Profile`](crate::dma::Profile). Descriptors go through the same rings as to hardware, and are checked
//! where they run. The arithmetic is `reduce`'s SIMD kernels; a chain is done tile by tile wherever that is the same (`run`), so that
//! accumulators stay in the nearest caches, each source is read once and each destination written once.
//!
//! A chain goes to the queue that is at home where it fetches from, piece by piece in turn, unless another has much less
//! to do: so the part of everybody's buffers that a core serves is the same in each operation, and stays in its caches.
//! (By slots it would be another in every operation of an odd number of chunks, and each line of memory that fits the
//! caches would come from the other core's: half as fast where those are far from each other.)
//!
//! *Strict* mode is pickier than hardware ([`Strictness`]).
//!
//! Invariants: a chain that was taken completes once; nothing is allocated and no lock taken between submission and
//! completion, except to wake who sleeps.

mod config;
mod heap;
mod map;
mod own;
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
use crate::ring::{Consumer, OwnedRing, Patience, Producer};
use map::Map;
use own::Own;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use strict::InFlight;
use worker::{COMPLETION_WORDS, Farewell, Shared, Sleeper, Worker};

/// How many chains more than others a queue may have before others take those that are at home with it.
const AFFINITY_CHAINS: usize = 2;

/// The user's side of one thread.
struct Queue {
    sleeper: Arc<Sleeper>,
    submissions: Producer<OwnedRing<DESCRIPTOR_WORDS>, DESCRIPTOR_WORDS>,
    completions: Consumer<OwnedRing<COMPLETION_WORDS>, COMPLETION_WORDS>,
    in_flight: InFlight,
    thread: Option<JoinHandle<()>>,
}

/// The engine.
pub struct EmuEngine {
    /// The process that has its threads.
    pid: u32,
    /// What its user does.
    own: Own,
    shared: Arc<Shared>,
    queues: Vec<Queue>,
    capabilities: Capabilities,
    strictness: Strictness,
    patience: Patience,
    /// The device's own memory.
    local: Vec<(RegionKey, Arc<dyn DmaMemory>)>,
    /// Descriptors of the chain that is being submitted.
    staged: Vec<[u64; DESCRIPTOR_WORDS]>,
    /// Chains that have ended here: short ones, and those that strict mode has not let through.
    ended: VecDeque<Completion>,
    stats: DmaStats,
}

impl EmuEngine {
    /// Start an engine.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: DmaConfig) -> Result<Self, StartError> {
        Self::start_notifying(config, None)
    }

    /// Start an engine that calls `notify`, from any of its threads, after each completion, with the number of chains
    /// that its threads still have: for a user that sleeps on something else than [`WaitEngine::wait`]. It has to be
    /// quick, and cheap where nobody sleeps. A user that is told of 0, or of few, misses nothing.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start_notifying(config: DmaConfig, notify: Option<Notify>) -> Result<Self, StartError> {
        let fits = (usize::from(!config.helps)..=DmaConfig::THREADS_MAX).contains(&config.threads)
            && (1..=config.queue_depth).contains(&config.max_steps)
            // A completion names the step in 16 bits.
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
            own: Own::new(&shared, capabilities, &config),
            shared,
            queues: Vec::with_capacity(config.threads),
            capabilities,
            strictness: config.strictness,
            patience: config.patience,
            local: Vec::new(),
            staged: Vec::with_capacity(config.max_steps as usize),
            ended: VecDeque::with_capacity(depth),
            stats: DmaStats::default(),
        };
        for number in 0..config.threads {
            // A thread that can't be had stops those before it, by `drop`.
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
            patience: config.patience,
        };
        let on_start = config.on_start;
        let farewell = Farewell { shared: self.shared.clone(), sleeper: sleeper.clone() };
        let thread = thread::Builder::new().name(format!("dma-{number}")).spawn(move || {
            let _farewell = farewell;
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

    /// Let the engine reach memory under a key. The generation must be later than any before at that index.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn map(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapError> {
        let is_part = |(_, local): &&(RegionKey, Arc<dyn DmaMemory>)| {
            local.backing().overlaps(local.len_bytes(), &memory.backing(), memory.len_bytes())
        };
        if let Some((other, _)) = self.local.iter().find(is_part) {
            return Err(MapError::Shared { index: key.index, other: other.index });
        }
        self.shared.map.map(key, memory)
    }

    /// Take a region away. When this returns true, the engine does not touch it any more; descriptors that name it
    /// fail as [`Status::StaleRegion`]. False if it was not mapped.
    pub fn unmap(&mut self, key: RegionKey) -> bool {
        self.local.retain(|(local, _)| *local != key);
        self.shared.map.unmap(key)
    }

    /// Let the engine reach memory of the device's own under a key, which its processor can work on as well
    /// ([`LocalMemory`]). The generation must be later than any before at that index.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn map_local(&mut self, key: RegionKey, len_bytes: usize) -> Result<(), MapError> {
        self.map_local_memory(key, Arc::new(HeapMemory::new(len_bytes)))
    }

    /// The same for memory that outlives the engine, which others may read, but nobody else writes: nothing in this
    /// process touches it any more, and where another process could, its mapping has to be sealed against writing.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn map_local_memory(&mut self, key: RegionKey, memory: Arc<dyn DmaMemory>) -> Result<(), MapError> {
        if let Some(other) = self.shared.map.find_overlap(&*memory) {
            return Err(MapError::Shared { index: key.index, other });
        }
        self.shared.map.map(key, memory.clone())?;
        self.local.push((key, memory));
        Ok(())
    }

    /// Return where bytes of local memory are, if no chain in flight gets in the way.
    fn local(&self, address: Address, len_bytes: u64, written: bool) -> Result<NonNull<u8>, Status> {
        let found = self.local.iter().find(|(key, _)| *key == address.region);
        let (_, memory) = found.ok_or(Status::BadRegion)?;
        let end = address.offset_bytes.checked_add(len_bytes).ok_or(Status::OutOfBounds)?;
        if end > memory.len_bytes() as u64 {
            return Err(Status::OutOfBounds);
        }
        if self.all_in_flight().any(|in_flight| in_flight.touches(address, len_bytes, written)) {
            return Err(Status::Overlap);
        }
        // SAFETY: the offset is within the memory.
        Ok(unsafe { memory.base().add(address.offset_bytes as usize) })
    }

    /// Tell whether there is something to poll.
    pub fn has_completions(&mut self) -> bool {
        !self.ended.is_empty() || self.queues.iter_mut().any(Queue::has_completions)
    }

    /// Return what the engine has done.
    pub fn stats(&self) -> DmaStats {
        self.stats
    }

    /// Return the queue to submit to, the user's own behind the others: the one that is at home where the chain fetches
    /// from, unless another is much less busy or it has no room, or its thread is gone.
    ///
    /// # Errors
    /// [`SubmitError::Stopped`] if all threads are gone, [`SubmitError::Full`] if none that is there has room.
    fn choose(&self, chain: &Chain<'_>) -> Result<usize, SubmitError> {
        let (queues, steps) = (self.queues.len() + usize::from(self.own.helps()), chain.steps.len());
        let is_local = |region| self.local.iter().any(|(local, _)| *local == region);
        let mut fetches = chain.steps.iter().filter_map(|step| Some((step.src()?, step.src_len_bytes())));
        let fetched = fetches.find(|(src, _)| !is_local(src.region));
        let place = fetched.map_or(chain.tag.slot.into(), |(src, len_bytes)| src.offset_bytes / len_bytes.max(1));
        // The first piece is at home with the user, if it helps: where there is only one, nobody has to be woken.
        let own = queues - 1 - (place % queues as u64) as usize;
        let depth = self.capabilities.queue_depth as usize;
        let (mut best, mut all_gone): (Option<(usize, usize)>, _) = (None, true);
        for turn in 0..queues {
            let index = (own + turn) % queues;
            // Others take what is at home with a thread that is gone.
            if self.queues.get(index).is_some_and(Queue::dead) {
                continue;
            }
            all_gone = false;
            let in_flight = self.queues.get(index).map_or(&self.own.in_flight, |queue| &queue.in_flight);
            let chains = in_flight.len() + if index == own { 0 } else { AFFINITY_CHAINS };
            // Everything in flight fits the rings, so they have room, and so has what is kept of it.
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

    /// Run one chain of the user's own share; false if there is none. Its completion comes as all others do.
    pub fn work(&mut self) -> bool {
        let ended = self.own.work();
        self.ended.extend(ended);
        ended.is_some()
    }

    /// Tell whether [`EmuEngine::work`] has something to do.
    pub fn has_work(&self) -> bool {
        !self.own.is_empty()
    }

    fn conflict(&self, steps: &[Step]) -> Option<usize> {
        self.all_in_flight().find_map(|in_flight| in_flight.conflict(steps))
    }

    fn all_in_flight(&self) -> impl Iterator<Item = &InFlight> {
        self.queues.iter().map(|queue| &queue.in_flight).chain([&self.own.in_flight])
    }

    /// Take one completion from anywhere.
    fn take(&mut self) -> Option<Completion> {
        if let Some(ended) = self.ended.pop_front() {
            return Some(ended);
        }
        for queue in &mut self.queues {
            if let Some(words) = queue.completions.pop().expect("the engine's own ring") {
                queue.in_flight.pop();
                return Some(worker::from_words(words));
            }
            // A thread that is gone completes nothing any more; its ring was looked at after it had gone.
            if queue.dead()
                && let Ok(0) = queue.completions.available()
                && let Some(tag) = queue.in_flight.pop()
            {
                // The others count what is left, and tell a user that sleeps when that is little.
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
        // Chains that end here, now or when the user works, have their places.
        if self.ended.len() + self.own.in_flight.len() >= self.capabilities.queue_depth as usize {
            return Err(SubmitError::Full { depth: self.capabilities.queue_depth });
        }
        if self.strictness != Strictness::Hardware
            && let Some(step) = self.conflict(chain.steps)
        {
            self.stats.chains += 1;
            self.ended.push_back(Completion { tag: chain.tag, status: Status::Overlap, step: step as u16 });
            return Ok(());
        }
        if let Some(completion) = self.own.run_short(&chain) {
            self.count(steps);
            self.ended.push_back(completion);
            return Ok(());
        }
        let index = self.choose(&chain)?;
        if index == self.queues.len() {
            let local = (self.strictness == Strictness::Hardware).then_some(&self.local[..]);
            self.own.push(&chain, local.map(|local| local.iter().map(|(key, _)| *key)));
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
        assert_eq!(pushed, steps, "the ring holds all that is in flight");
        queue.sleeper.ring();
        self.count(steps);
        Ok(())
    }

    fn poll(&mut self, completions: &mut [Completion]) -> usize {
        let mut taken = 0;
        while taken < completions.len() {
            let Some(completion) = self.take() else { break };
            self.stats.ended[completion.status as usize] += 1;
            let innocent = matches!(completion.status, Status::Done | Status::Aborted | Status::Hardware);
            assert!(
                innocent || self.strictness != Strictness::Assert,
                "step {} of the chain {:?} is wrong: {}",
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
        // A timeout beyond the clock's end is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let (shared, queues, ended) = (&self.shared, &mut self.queues, &self.ended);
        shared.user.wait(self.patience, deadline, || !ended.is_empty() || queues.iter_mut().any(Queue::has_completions))
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
        // SAFETY: both lie in memory that is the engine's own and stays while it is mapped. No chain in flight touches
        // them in a way that conflicts, by this key or by another (`map` lets no second region have any of it); none can be
        // submitted while `work` runs, because that takes `self`. Others may only read it: who maps it sees to that, for
        // other processes by the seal of what is handed over (`Region::read_only_file`), so that a peer that misbehaves
        // can't write here either. The two are disjoint.
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
                // It can only have panicked, which it has said.
                let _ = thread.join();
            }
        }
    }
}
