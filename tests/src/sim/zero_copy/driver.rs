//! A zero-copy rank: its rings, registered memory and bounce buffer, driven like `sumac::transport::memory`'s driver
//! does, and the end of its group.
//!
//! Registered memory is a copy of the caller's buffers: the engine's writes are mirrored to the buffers at once, and
//! the caller's writes to the copy. So an unannounced write shows as a difference.

use super::board::{Completions, Submissions};
use crate::sim::coverage::{Coverage, Mark};
use crate::sim::memory::Memory;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use sumac::harness::RedoSlots;
use sumac::transport::memory::{Places, ZeroCopyEndpoint};
use sumac::transport::packets::{Buffers, EndpointError, OpId};
use sumac_hal::dma::{Address, DmaMemory, RegionKey};
use sumac_hal::emu::dma::HeapMemory;
use sumac_hal::ids::FunctionId;
use sumac_hal::mmio::{COMPLETION_WORDS, SUBMISSION_WORDS, SubmissionEntry};
use sumac_hal::op::OpDesc;
use sumac_hal::ring::{Consumer, Producer};

/// A registered buffer.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) memory: Arc<HeapMemory>,
    /// The operation, numbered over all incarnations.
    pub(super) op: usize,
    /// Input (0) or output (1).
    pub(super) buffer: usize,
    /// Offset of the buffer.
    pub(super) base: usize,
}

/// Why the device cannot write any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fence {
    /// It had nothing in flight.
    Nothing,
    /// It confirmed the fence.
    Confirmed,
    /// Its process has ended.
    Ended,
    /// This rank's memory was severed from it.
    Severed,
}

/// A severing in progress.
#[derive(Debug)]
struct Severing {
    /// Answers of the device before.
    early: Vec<[u64; COMPLETION_WORDS]>,
    /// Pieces still to copy.
    pieces: VecDeque<(RegionKey, Range<usize>)>,
    copies: BTreeMap<RegionKey, Vec<u8>>,
}

/// The driver of a zero-copy rank.
pub(super) struct Driver {
    pub(super) endpoint: ZeroCopyEndpoint,
    pub(super) redo: RedoSlots,
    pub(super) device: usize,
    /// The device's incarnation.
    pub(super) device_incarnation: u64,
    pub(super) function: FunctionId,
    submissions: Producer<Submissions, SUBMISSION_WORDS>,
    completions: Consumer<Completions, COMPLETION_WORDS>,
    bounce: Arc<HeapMemory>,
    pub(super) bounce_key: RegionKey,
    pub(super) regions: BTreeMap<RegionKey, Registered>,
    /// The connection has hung up.
    pub(super) gone: bool,
    /// The device's runtime has stalled.
    pub(super) is_stalled: bool,
    pub(super) fence: Option<Fence>,
    severing: Option<Severing>,
    pub(super) in_flight_max: u32,
}

impl Driver {
    pub(super) fn new(
        (endpoint, redo): (ZeroCopyEndpoint, RedoSlots),
        ((device, function), device_incarnation): ((usize, FunctionId), u64),
        (submissions, completions): (Submissions, Completions),
        (bounce, bounce_key): (Arc<HeapMemory>, RegionKey),
    ) -> Self {
        let completions = Consumer::new(completions);
        Self {
            endpoint,
            redo,
            device,
            device_incarnation,
            function,
            submissions: Producer::new(submissions),
            in_flight_max: completions.capacity() - 1,
            completions,
            bounce,
            bounce_key,
            regions: BTreeMap::new(),
            gone: false,
            is_stalled: false,
            fence: None,
            severing: None,
        }
    }

    /// Return the addresses of an operation's buffers in registered memory; values must be aligned.
    pub(super) fn places(&self, memory: &Memory, op: usize, desc: &OpDesc) -> Places {
        let value_bytes = desc.dtype.map_or(1, |dtype| dtype.size_bytes()) as u64;
        let [input, output] = memory.ops[op].places().map(|(buffer, start)| {
            let mut here = self.regions.iter().filter(|(_, registered)| registered.op == op);
            let (&region, found) = here.find(|(_, registered)| registered.buffer == buffer)?;
            let offset_bytes = (found.base + start) as u64;
            Some(Address { region, offset_bytes }).filter(|at| at.offset_bytes.is_multiple_of(value_bytes))
        });
        Places { input, output, writable: None }
    }

    /// Process the device's answers; true if there were any.
    pub(super) fn collect(&mut self, memory: &mut Memory, seen: &mut Coverage) -> bool {
        let answers = self.answers();
        self.take_in(&answers, memory, seen);
        !answers.is_empty()
    }

    /// Drain the completion ring.
    fn answers(&mut self) -> Vec<[u64; COMPLETION_WORDS]> {
        std::iter::from_fn(|| self.completions.pop().expect("a ring of this version")).collect()
    }

    fn take_in(&mut self, answers: &[[u64; COMPLETION_WORDS]], memory: &mut Memory, seen: &mut Coverage) {
        for words in answers {
            let (bounce, regions) = (&self.bounce, &self.regions);
            let first = memory.first;
            self.endpoint.handle(words, |drain| {
                seen.note(Mark::RefDrained);
                let output = &mut memory.output(drain.op)[drain.to..][..drain.from.len()];
                bounce.read(drain.from.start, output);
                sync(regions, memory, first + drain.op.0 as usize);
            });
        }
        self.redo.keep(&mut self.endpoint, memory);
    }

    /// Submit what is possible; true if there was anything.
    pub(super) fn submit(&mut self, memory: &Memory, seen: &mut Coverage) -> bool {
        let mut any = false;
        loop {
            let room = self.submissions.room().expect("a ring of this version");
            // A run may need a second entry, for its operation's limit.
            if room < 2 {
                seen.note(Mark::RefRingFull);
                return any;
            }
            let Some(run) = self.endpoint.next_run() else { return any };
            if let Some(stage_in) = run.stage_in {
                seen.note(Mark::RefFilled);
                self.bounce.write(stage_in.to, &memory.input(stage_in.op)[stage_in.from]);
            }
            seen.note(Mark::RefSubmitted);
            let entry = SubmissionEntry::Contribution(run.contribution).emit();
            assert_eq!(self.submissions.push(&entry), Ok(true), "there is room");
            any = true;
        }
    }

    /// Return whether the device may write these bytes now: the place of a submitted chunk, or the bounce buffer.
    pub(super) fn may_write(&self, to: Address, len_bytes: u64) -> bool {
        if self.fence.is_some_and(|fence| fence != Fence::Severed) {
            return false;
        }
        let inside = |(_, at, len): (_, Address, usize)| {
            let end = at.offset_bytes + len as u64;
            at.region == to.region && at.offset_bytes <= to.offset_bytes && to.offset_bytes + len_bytes <= end
        };
        to.region == self.bounce_key && self.endpoint.is_in_flight() || self.endpoint.exposed().any(inside)
    }

    /// Mirror an engine write to the caller's buffer.
    pub(super) fn mirror_write(&self, to: Address, len_bytes: u64, memory: &mut Memory) {
        let Some(Registered { memory: heap, op, buffer, base }) = self.regions.get(&to.region) else { return };
        let mut bytes = vec![0; len_bytes as usize];
        heap.read(to.offset_bytes as usize, &mut bytes);
        memory.ops[*op].write(*buffer, to.offset_bytes as usize - base, &bytes);
    }

    /// Return the first operation whose registered memory differs from the caller's buffers.
    pub(super) fn stray_write(&self, memory: &Memory) -> Option<usize> {
        let differs = |registered: &&Registered| {
            let expected = memory.ops[registered.op].buffers()[registered.buffer];
            let mut found = vec![0; expected.len()];
            registered.memory.read(registered.base, &mut found);
            found != expected
        };
        self.regions.values().find(differs).map(|registered| registered.op)
    }

    pub(super) fn is_severing(&self) -> bool {
        self.severing.is_some()
    }

    /// Start severing the memory of open chunks: each region is copied in this many pieces.
    pub(super) fn begin_severing(&mut self, pieces_each: usize) {
        let early = self.answers();
        let exposed: BTreeSet<RegionKey> = self.endpoint.exposed().map(|(_, address, _)| address.region).collect();
        let (mut pieces, mut copies) = (VecDeque::new(), BTreeMap::new());
        for key in exposed {
            let Some(registered) = self.regions.get(&key) else { continue };
            let len = registered.memory.len_bytes();
            let cut = |nth: usize| len * nth / pieces_each;
            pieces.extend((0..pieces_each).map(|nth| (key, cut(nth)..cut(nth + 1))));
            copies.insert(key, vec![0; len]);
        }
        self.severing = Some(Severing { early, pieces, copies });
    }

    /// Copy the next piece; false if there is none.
    pub(super) fn copy_piece(&mut self) -> bool {
        let Some(severing) = &mut self.severing else { return false };
        let Some((key, range)) = severing.pieces.pop_front() else { return false };
        if let (Some(registered), Some(copy)) = (self.regions.get(&key), severing.copies.get_mut(&key)) {
            registered.memory.read(range.start, &mut copy[range]);
        }
        true
    }

    /// Install the copies in place of the memory; the device keeps the original.
    fn put_copies(&mut self, copies: BTreeMap<RegionKey, Vec<u8>>, memory: &mut Memory) {
        for (key, bytes) in copies {
            let Some(Registered { memory: heap, op, buffer, base }) = self.regions.get_mut(&key) else { continue };
            *heap = Arc::new(HeapMemory::new(bytes.len()));
            heap.write(0, &bytes);
            memory.ops[*op].write(*buffer, 0, &bytes[*base..]);
        }
    }

    /// The device has stopped writing: process its answers, and results that it published but perhaps did not deliver.
    /// Of the answers given while memory was being severed, accept only those published or in the bounce buffer, or all
    /// if `takes_late`.
    pub(super) fn salvage(&mut self, memory: &mut Memory, seen: &mut Coverage, takes_late: bool) {
        let severing = self.severing.take();
        let has_severed = severing.is_some();
        let mut answers = Vec::new();
        if let Some(Severing { early, copies, .. }) = severing {
            self.put_copies(copies, memory);
            answers = early;
        }
        if !has_severed || takes_late {
            answers.extend(self.answers());
        }
        self.redo.reopen(&mut self.endpoint);
        for words in &answers {
            self.redo.reopen(&mut self.endpoint);
            self.take_in(std::slice::from_ref(words), memory, seen);
        }
        if !answers.is_empty() {
            seen.note(Mark::RefSalvagedRing);
        }
        let (regions, before) = (&self.regions, self.open());
        let written = self.redo.recover(&mut self.endpoint, |at, result| {
            let Some(Registered { op, buffer, base, .. }) = regions.get(&at.region) else { return false };
            memory.ops[*op].write(*buffer, at.offset_bytes as usize - base, result);
            true
        });
        let late = if has_severed { self.answers() } else { Vec::new() };
        for words in &late {
            seen.note(Mark::RefAnsweredSevered);
            self.redo.doubt(&mut self.endpoint, words);
        }
        self.redo.land(&mut self.endpoint, memory);
        for words in &late {
            let bounce = &self.bounce;
            self.redo.land_late(&mut self.endpoint, words, |drain| {
                bounce.read(drain.from.start, &mut memory.output(drain.op)[drain.to..][..drain.from.len()]);
            });
        }
        if written > 0 || self.open() < before {
            seen.note(Mark::RefSalvagedRedo);
        }
        let ops: std::collections::BTreeSet<usize> = self.regions.values().map(|registered| registered.op).collect();
        ops.into_iter().for_each(|op| sync(&self.regions, memory, op));
    }

    /// Return the number of undelivered chunks.
    fn open(&self) -> usize {
        self.endpoint.exposed().count()
    }

    /// Mirror the caller's writes to registered memory.
    pub(super) fn sync(&self, memory: &Memory, op: usize) {
        sync(&self.regions, memory, op);
    }

    /// Fail the endpoint if the device is gone or stalled, as its driver would see it.
    pub(super) fn check_device(&mut self, has_more: bool) {
        if self.gone && !has_more {
            self.endpoint.fail(EndpointError::DeviceLost);
        } else if self.is_stalled && self.endpoint.is_in_flight() {
            self.endpoint.fail(EndpointError::PathLost);
        }
    }
}

/// Copy the caller's buffers of an operation to registered memory.
fn sync(regions: &BTreeMap<RegionKey, Registered>, memory: &Memory, op: usize) {
    for registered in regions.values().filter(|registered| registered.op == op) {
        registered.memory.write(registered.base, memory.ops[op].buffers()[registered.buffer]);
    }
}

/// Return the operation with this id at the endpoint.
pub(super) fn op_of(memory: &Memory, id: OpId) -> usize {
    memory.first + id.0 as usize
}
