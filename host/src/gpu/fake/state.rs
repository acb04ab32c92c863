//! State of a machine of fake GPUs, and its execution.

use super::machine::Machine;
use super::{Gate, Place};
use crate::gpu::GpuError;
use crate::gpu::graveyard::Graveyard;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use sumac_hal::reduce::Kernel;

#[derive(Debug, Clone)]
pub(super) enum Task {
    Copy {
        to: Place,
        from: Place,
    },
    Land(Box<LandTask>),
    Scale {
        kernel: Kernel,
        to: Place,
        from: Place,
        scalar: f64,
    },
    Bulk {
        kernel: Kernel,
        to: Place,
        from: Place,
    },
    Publish {
        to: Place,
        words: [u64; 2],
    },
    Record(usize, u64),
    Wait(usize, u64),
    Gate(Gate),
    Graph(Arc<Vec<(usize, Task)>>),
    Signal {
        to: Place,
        value: u32,
    },
    Await {
        at: Place,
        value: u32,
    },
    /// One rank's part in a collective of NCCL.
    Nccl {
        comm: usize,
        rank: usize,
        call: usize,
        share: Box<NcclShare>,
    },
}

#[derive(Debug, Clone)]
pub(super) struct LandTask {
    pub(super) kernel: Kernel,
    pub(super) from: Place,
    pub(super) is_partial: bool,
    pub(super) own: Option<(Place, bool)>,
    pub(super) to: Place,
    pub(super) is_finished: bool,
    pub(super) count: usize,
    pub(super) ranks: u32,
}

/// One rank's input and output of an NCCL collective.
#[derive(Debug, Clone)]
pub(super) struct NcclShare {
    pub(super) kernel: Kernel,
    pub(super) from: Place,
    pub(super) to: Place,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct EventState {
    pub(super) recorded: u64,
    pub(super) done: u64,
    /// Time on the clock of the stream that recorded it.
    pub(super) at_ns: u64,
}

/// A stream: its queued tasks, each with the host's time of enqueueing.
#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) process: u64,
    pub(super) queue: VecDeque<(u64, Task)>,
    pub(super) clock_ns: u64,
}

/// Memory, and the process that allocated it.
#[derive(Debug)]
pub(super) struct BlockState {
    pub(super) bytes: Vec<u8>,
    pub(super) process: u64,
}

/// Memory that a process gives up: its own, or another's that it has opened.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dead {
    pub(super) id: u64,
    pub(super) is_opened: bool,
}

#[derive(Debug, Default)]
pub(super) struct State {
    draws: u64,
    pub(super) memory: BTreeMap<u64, BlockState>,
    /// How often a process has opened another's memory.
    pub(super) opened: BTreeMap<(u64, u64), usize>,
    next_id: u64,
    room_bytes: usize,
    pub(super) streams: Vec<StreamState>,
    pub(super) events: Vec<EventState>,
    /// Processes whose passes are disabled.
    pub(super) stopped: BTreeSet<u64>,
    /// What each process captures, and from which stream on.
    pub(super) captures: BTreeMap<u64, (usize, Vec<(usize, Task)>)>,
    /// The error that ended a process.
    pub(super) faults: BTreeMap<u64, GpuError>,
    /// Passes that ran, and those that were disabled.
    pub(super) passes: (usize, usize),
    /// Launches of captured work.
    pub(super) launches: usize,
    /// The host's clock: the latest event seen complete.
    pub(super) host_ns: u64,
    /// Times at which words were signalled.
    signalled_ns: BTreeMap<(u64, usize), u64>,
    pub(super) machine: Machine,
    /// What each process frees later.
    pub(super) graveyards: BTreeMap<u64, Graveyard<Dead>>,
    /// Calls that on hardware would not have returned.
    pub(super) blocked: Vec<String>,
    /// Copies to other processes' memory that have not arrived.
    late: Vec<(Place, Vec<u8>)>,
    pub(super) reads_of_killed: usize,
}

impl State {
    pub(super) fn new(seed: u64, room_bytes: usize) -> Self {
        Self { draws: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, room_bytes, ..Self::default() }
    }

    fn draw(&mut self, below: usize) -> usize {
        // xorshift64*: any order will do, as long as it is reproducible.
        self.draws ^= self.draws >> 12;
        self.draws ^= self.draws << 25;
        self.draws ^= self.draws >> 27;
        (self.draws.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % below.max(1)
    }

    pub(super) fn push(&mut self, stream: usize, task: Task) -> Result<(), GpuError> {
        let process = self.streams[stream].process;
        if let Some(fault) = self.faults.get(&process) {
            return Err(fault.clone());
        }
        let host_ns = self.host_ns;
        let Some((origin, captured)) = self.captures.get_mut(&process) else {
            self.streams[stream].queue.push_back((host_ns, task));
            return Ok(());
        };
        let records = |captured: &[(usize, Task)], event: usize| {
            captured.iter().any(|(_, task)| matches!(task, Task::Record(other, _) if *other == event))
        };
        let is_in = stream == *origin || captured.iter().any(|(other, _)| *other == stream);
        match &task {
            Task::Wait(event, _) if !is_in && !records(captured, *event) => {
                self.streams[stream].queue.push_back((host_ns, task));
            }
            _ if !is_in && !matches!(task, Task::Wait(..)) => {
                return Err(GpuError::Driver { what: "a capture", why: format!("stream {stream} was not forked off") });
            }
            _ => captured.push((stream, task)),
        }
        Ok(())
    }

    /// Run some tasks.
    pub(super) fn run_some(&mut self) {
        for _ in 0..self.draw(8) + 1 {
            let ready: Vec<usize> = (0..self.streams.len()).filter(|&stream| self.is_ready(stream)).collect();
            if !self.late.is_empty() && (ready.is_empty() || self.draw(8) == 0) {
                self.arrive();
                continue;
            }
            if ready.is_empty() {
                return;
            }
            let stream = ready[self.draw(ready.len())];
            if let Some((issued_ns, task)) = self.streams[stream].queue.pop_front() {
                let clock_ns = &mut self.streams[stream].clock_ns;
                *clock_ns = issued_ns.max(*clock_ns);
                if let Err(fault) = self.run(stream, task) {
                    let process = self.streams[stream].process;
                    self.faults.insert(process, fault);
                }
            }
        }
    }

    /// Let one late copy arrive; they keep their order.
    fn arrive(&mut self) {
        let (to, bytes) = self.late.remove(0);
        let block = self.memory.get_mut(&to.id);
        block.and_then(|block| block.bytes.get_mut(to.bytes)).into_iter().for_each(|to| to.copy_from_slice(&bytes));
    }

    fn is_ready(&self, stream: usize) -> bool {
        let StreamState { process, queue, .. } = &self.streams[stream];
        match queue.front() {
            _ if self.faults.contains_key(process) => false,
            None => false,
            Some((_, Task::Wait(event, version))) => self.events[*event].done >= *version,
            Some((_, Task::Gate(gate))) => gate.0.load(Ordering::Relaxed),
            // Unreadable words are errors, which surface when the task runs.
            Some((_, Task::Await { at, value })) => self.word(*process, at).is_none_or(|word| has_come(word, *value)),
            Some((_, Task::Nccl { comm, rank, call, .. })) => self.nccl_is_ready(*comm, *rank, *call),
            Some(_) => true,
        }
    }

    /// Return whether a stream of a process has to wait for another process.
    pub(super) fn waits_for_peer(&self, process: u64) -> bool {
        let of_process = |stream: &usize| self.streams[*stream].process == process;
        !self.faults.contains_key(&process)
            && (0..self.streams.len()).filter(of_process).any(|stream| {
                let front = self.streams[stream].queue.front();
                matches!(front, Some((_, Task::Await { .. } | Task::Nccl { .. }))) && !self.is_ready(stream)
            })
    }

    fn word(&self, process: u64, at: &Place) -> Option<u32> {
        let word = self.read(process, at).ok()?;
        Some(u32::from_le_bytes(word.try_into().ok()?))
    }

    fn run(&mut self, stream: usize, task: Task) -> Result<(), GpuError> {
        let process = self.streams[stream].process;
        let is_stopped = self.stopped.contains(&process);
        self.streams[stream].clock_ns += cost_ns(&task);
        match task {
            Task::Land(..) | Task::Scale { .. } | Task::Bulk { .. } if is_stopped => self.passes.1 += 1,
            Task::Record(event, version) => {
                let at_ns = self.streams[stream].clock_ns;
                self.events[event] = EventState { done: version, at_ns, ..self.events[event] };
            }
            Task::Wait(event, _) => self.behind(stream, self.events[event].at_ns),
            Task::Await { at, .. } => {
                self.read(process, &at)?;
                self.behind(stream, self.signalled_ns.get(&(at.id, at.bytes.start)).copied().unwrap_or(0));
            }
            Task::Signal { to, value } => {
                self.write(process, &to)?.copy_from_slice(&value.to_le_bytes());
                self.signalled_ns.insert((to.id, to.bytes.start), self.streams[stream].clock_ns);
            }
            Task::Gate(_) => {}
            Task::Graph(tasks) => self.run_graph(stream, &tasks)?,
            Task::Nccl { comm, rank, share, .. } => self.nccl_run(process, comm, rank, &share)?,
            other => self.pass(process, other)?,
        }
        Ok(())
    }

    /// Advance a stream's clock to that of another.
    fn behind(&mut self, stream: usize, at_ns: u64) {
        let clock_ns = &mut self.streams[stream].clock_ns;
        *clock_ns = at_ns.max(*clock_ns);
    }

    /// Move or reduce bytes.
    fn pass(&mut self, process: u64, task: Task) -> Result<(), GpuError> {
        match task {
            Task::Copy { to, from } => {
                let bytes = self.read(process, &from)?.to_vec();
                let owner = |place: &Place| self.memory.get(&place.id).map(|block| block.process);
                let (reads_killed, is_remote) =
                    (owner(&from).is_some_and(|of| self.machine.killed.contains(&of)), owner(&to) != Some(process));
                self.reads_of_killed += usize::from(reads_killed && self.stopped.contains(&process));
                if self.machine.delays_copies && is_remote {
                    self.write(process, &to)?;
                    self.late.push((to, bytes));
                } else {
                    self.write(process, &to)?.copy_from_slice(&bytes);
                }
            }
            Task::Land(land) => {
                self.passes.0 += 1;
                self.land(process, &land)?;
            }
            Task::Scale { kernel, to, from, scalar } => {
                self.passes.0 += 1;
                let bytes = self.read(process, &from)?.to_vec();
                let scaled = kernel.scale(self.write(process, &to)?, &bytes, scalar);
                scaled.map_err(|error| GpuError::Invalid(error.to_string()))?;
            }
            Task::Bulk { kernel, to, from } => {
                self.passes.0 += 1;
                self.bulk(process, kernel, &to, &from)?;
            }
            Task::Publish { to, words } => {
                let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
                self.write(process, &to)?.copy_from_slice(&bytes);
            }
            _ => {}
        }
        Ok(())
    }

    fn land(&mut self, process: u64, land: &LandTask) -> Result<(), GpuError> {
        let kernel = land.kernel;
        let mut accumulators = vec![0; land.count * kernel.accumulator_bytes()];
        if let Some((own, is_partial)) = &land.own {
            kernel.load(&mut accumulators, self.read(process, own)?, *is_partial);
            kernel.combine(&mut accumulators, self.read(process, &land.from)?, land.is_partial);
        } else {
            kernel.load(&mut accumulators, self.read(process, &land.from)?, land.is_partial);
        }
        let to = self.write(process, &land.to)?;
        if land.is_finished {
            kernel.store(to, &accumulators, land.ranks);
        } else {
            to.copy_from_slice(&accumulators);
        }
        Ok(())
    }

    /// Reduce in the element type, which rounds.
    fn bulk(&mut self, process: u64, kernel: Kernel, to: &Place, from: &Place) -> Result<(), GpuError> {
        let bytes = self.read(process, from)?.to_vec();
        let to = self.write(process, to)?;
        let mut accumulators = vec![0; bytes.len() / kernel.element_bytes() * kernel.accumulator_bytes()];
        kernel.load(&mut accumulators, to, false);
        kernel.combine(&mut accumulators, &bytes, false);
        kernel.store(to, &accumulators, 1);
        Ok(())
    }

    /// Run captured work in any order that its streams and events allow.
    fn run_graph(&mut self, on: usize, tasks: &[(usize, Task)]) -> Result<(), GpuError> {
        let mut queues: BTreeMap<usize, VecDeque<&Task>> = BTreeMap::new();
        for (stream, task) in tasks {
            queues.entry(*stream).or_default().push_back(task);
        }
        let mut recorded = Vec::new();
        loop {
            let can_run = |task: &Task| match task {
                Task::Wait(event, version) => recorded.contains(&(*event, *version)),
                _ => true,
            };
            let ready: Vec<usize> = queues
                .iter()
                .filter(|(_, queue)| queue.front().is_some_and(|task| can_run(task)))
                .map(|(&at, _)| at)
                .collect();
            let Some(&stream) = ready.get(self.draw(ready.len())) else { break };
            match queues.get_mut(&stream).and_then(VecDeque::pop_front) {
                Some(&Task::Record(event, version)) => recorded.push((event, version)),
                Some(Task::Wait(..)) | None => {}
                Some(task) => self.run(on, task.clone())?,
            }
        }
        match queues.values().all(VecDeque::is_empty) {
            true => Ok(()),
            false => Err(GpuError::Lost("a captured operation waits for an event that never completes".into())),
        }
    }

    /// Return bytes that a process may access: its own, or another's that it has opened.
    pub(super) fn read(&self, process: u64, place: &Place) -> Result<&[u8], GpuError> {
        let block = self.memory.get(&place.id).filter(|block| self.may(process, place.id, block));
        let bytes = block.and_then(|block| block.bytes.get(place.bytes.clone()));
        bytes.ok_or_else(|| GpuError::IllegalAddress(format!("a read of {place:?}")))
    }

    pub(super) fn write(&mut self, process: u64, place: &Place) -> Result<&mut [u8], GpuError> {
        let illegal = || GpuError::IllegalAddress(format!("a write of {place:?}"));
        self.memory.get(&place.id).filter(|block| self.may(process, place.id, block)).ok_or_else(illegal)?;
        let block = self.memory.get_mut(&place.id);
        block.and_then(|block| block.bytes.get_mut(place.bytes.clone())).ok_or_else(illegal)
    }

    fn may(&self, process: u64, id: u64, block: &BlockState) -> bool {
        block.process == process || self.opened.contains_key(&(process, id))
    }

    pub(super) fn add(&mut self, process: u64, len_bytes: usize) -> Result<u64, GpuError> {
        if let Some(fault) = self.faults.get(&process) {
            return Err(fault.clone());
        }
        let used: usize = self.memory.values().map(|block| block.bytes.len()).sum();
        if len_bytes > self.room_bytes.saturating_sub(used) {
            return Err(GpuError::OutOfMemory { len_bytes });
        }
        // Arbitrary contents, as in real memory.
        let fill = self.draw(256) as u8;
        self.next_id += 1;
        self.memory.insert(self.next_id, BlockState { bytes: vec![fill; len_bytes], process });
        Ok(self.next_id)
    }

    /// Free memory, or close another process's.
    pub(super) fn release(&mut self, process: u64, dead: Dead) {
        match dead.is_opened {
            true => self.close(process, dead.id),
            false => drop(self.memory.remove(&dead.id)),
        }
    }

    fn close(&mut self, process: u64, id: u64) {
        if let Some(times) = self.opened.get_mut(&(process, id)) {
            *times -= 1;
            if *times == 0 {
                self.opened.remove(&(process, id));
            }
        }
    }
}

/// Return whether a word, which counts up and wraps around, has reached a value.
pub(super) const fn has_come(word: u32, value: u32) -> bool {
    word.wrapping_sub(value) as i32 >= 0
}

/// Duration of a task on its stream's clock.
fn cost_ns(task: &Task) -> u64 {
    let bytes = |places: &[&Place]| places.iter().map(|place| place.bytes.len() as u64).sum::<u64>();
    let moved = match task {
        Task::Copy { to, from } | Task::Scale { to, from, .. } | Task::Bulk { to, from, .. } => bytes(&[to, from]),
        Task::Land(land) => bytes(&[&land.from, &land.to]) + land.own.as_ref().map_or(0, |(own, _)| bytes(&[own])),
        Task::Nccl { share, .. } => bytes(&[&share.from, &share.to]),
        _ => return 0,
    };
    LAUNCH_NS + moved
}

/// Latency of a copy or a pass.
const LAUNCH_NS: u64 = 1_000;
