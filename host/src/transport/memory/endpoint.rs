//! A rank's side of the protocol by reference, sans I/O: which run of chunks is submitted next, and what answers mean.
//!
//! The numbering of chunks, and who gives and takes what, are those of the endpoint for packets (`endpoint/ops.rs`);
//! there is no window and no retransmission here, because a ring loses nothing and the device takes an entry when its
//! window allows.
//!
//! Invariants:
//! - each chunk is submitted once, in the order of seqs, and no more are in flight than answers have places for;
//! - each byte of an input is named in one chunk, each byte of an output is written by one;
//! - `have` passes a chunk only when its result is in the caller's buffer;
//! - an error that the tree tells at chunk k ends the group when every chunk below k has landed, as for packets; a
//!   refusal of this rank's own entry, and an answer that makes no sense, end it at once;
//! - no chunk lands by an answer that came while its memory was taken from the device.

mod answers;
mod remains;

use super::bounce::Bounce;
use crate::transport::packets::{
    Buffers, EndpointError, EndpointStats, Event, Keep, MAX_OPS, Op, OpId, Ops, Part, PostError, Seat, Verdict,
};
use std::collections::VecDeque;
use std::ops::Range;
use sumac_hal::dma::{Address, RegionKey, Span};
use sumac_hal::ids::{ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::mmio::{COMPLETION_WORDS, Contribution, OperationLimit};
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::shard::RUN;
use sumac_hal::wire::{Limit, RankMask};

/// Where bounced chunks begin at least: whole cache lines, so that no two runs share one.
const BOUNCE_ALIGNMENT_BYTES: u64 = 64;

/// How much is copied before the device is told of it, in bytes: so that it has work while the next is copied.
const BOUNCED_RUN_BYTES: u64 = 256 << 10;

/// The bounce buffer, as the device knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BounceConfig {
    /// Its region.
    pub region: RegionKey,
    /// Its length in bytes: of two chunks at least, and a multiple of 64 and of the device's alignment.
    pub len_bytes: u64,
}

/// What a rank knows of its group and its device.
#[derive(Debug, Clone)]
pub struct ReferenceConfig {
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// Which rank of the group this is.
    pub rank: Rank,
    /// How many there are; more than `rank`.
    pub ranks: u32,
    /// The payload limit of a packet in this group in bytes: what a chunk is.
    pub chunk_len_bytes: u16,
    /// The most chunks that the device takes in ahead of the oldest: no run is longer.
    pub window_max: u16,
    /// The version of the cost table, part of every signature.
    pub table_version: u32,
    /// The most chunks that are submitted and not yet answered: what the completion ring has places for.
    pub in_flight_max: u32,
    /// What addresses have to be multiples of, for the device's engine.
    pub alignment_bytes: u32,
    /// The bounce buffer.
    pub bounce: BounceConfig,
    /// Whether results land in the bounce buffer only, and are kept here until they are stable: where nobody can read the
    /// device's redo slots.
    pub lands_apart: bool,
}

/// Where an operation's buffers are in registered memory; `None` if they are not, or there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Places {
    /// What the rank contributes.
    pub input: Option<Address>,
    /// Where its result goes.
    pub output: Option<Address>,
    /// Of the output's region, what the device itself may write to: whole pages that hold nothing else than this output,
    /// so that they can be taken away from the device while others write beside them. `None`: all of the output.
    pub writable: Option<Span>,
}

/// Bytes of an input that belong into the bounce buffer before their run is submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fill {
    /// Whose input.
    pub op: OpId,
    /// Which bytes of it.
    pub from: Range<usize>,
    /// Where they go in the bounce buffer.
    pub to: usize,
}

/// A result in the bounce buffer that belongs into an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// Whose output.
    pub op: OpId,
    /// Which bytes of the bounce buffer.
    pub from: Range<usize>,
    /// Where they go in the output.
    pub to: usize,
}

/// Chunks to submit in one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// What the device has to know first: how long the operation that begins here waits for ranks.
    pub limit: Option<OperationLimit>,
    /// The entry.
    pub contribution: Contribution,
    /// What to copy first.
    pub fill: Option<Fill>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Submitted,
    Landed,
    Refused,
    /// Its memory was taken from the device, which has answered meanwhile: it holds the input, the result, or a mixture.
    Unknown,
}

/// A chunk that is submitted, from the oldest that has not landed on.
#[derive(Debug, Clone)]
struct Chunk {
    state: State,
    /// Where the device writes, and how much, if it writes to the caller's own memory.
    dst: Option<(Address, usize)>,
    drain: Option<Drain>,
    /// Where the whole result lands in the bounce buffer, if it does.
    lands: Option<u64>,
    /// What of the bounce buffer is free when this and all before have landed.
    bounce_end: Option<u64>,
}

/// A chunk that may be submitted next.
struct Planned {
    part: Part,
    /// Its length as it lies in buffers.
    len: usize,
    bounce: Option<super::bounce::Place>,
    src: Option<Address>,
    dst: Option<Address>,
    bounces_src: bool,
    bounces_dst: bool,
}

/// A rank's side of one group by reference.
#[derive(Debug)]
pub struct ReferenceEndpoint {
    config: ReferenceConfig,
    ops: Ops,
    /// Of operations from `places_from` on.
    places: VecDeque<Places>,
    places_from: u64,
    chunks: VecDeque<Chunk>,
    /// The seq of the first of `chunks`: all below have landed.
    have: u64,
    /// Chunks that were answered, in whatever order.
    answered: u64,
    stable: ChunkNo,
    bounce: Bounce,
    /// The operations that the device named last.
    named: Option<(OpDesc, OpDesc)>,
    /// The first half of a set of ranks, of which the other follows.
    half: Option<answers::Half>,
    /// The ranks that the device named last, for an operation that has no result without them.
    missing: RankMask,
    /// The first chunk that was refused because this rank has left, if one was.
    excluded_at: Option<u64>,
    /// The tree's word that it ends at this seq.
    ending: Option<(u64, EndpointError)>,
    failed: Option<EndpointError>,
    failure_told: bool,
    stats: EndpointStats,
}

impl ReferenceEndpoint {
    /// Return an endpoint that has posted nothing.
    ///
    /// # Panics
    /// If the rank is none of the group's, the alignment no power of two, or the bounce buffer too short.
    pub fn new(config: ReferenceConfig) -> Self {
        assert!(config.rank.0 < config.ranks, "{} of {}", config.rank, config.ranks);
        assert!(config.alignment_bytes.is_power_of_two(), "an alignment of {}", config.alignment_bytes);
        let (alignment, bounce) = (alignment(&config), config.bounce);
        let fits = bounce.len_bytes >= 2 * u64::from(config.chunk_len_bytes).next_multiple_of(alignment);
        assert!(fits && bounce.len_bytes.is_multiple_of(alignment), "a bounce buffer of {} bytes", bounce.len_bytes);
        Self {
            ops: Ops::new(usize::from(config.chunk_len_bytes), Seat { rank: config.rank.0, ranks: config.ranks }),
            places: VecDeque::with_capacity(MAX_OPS),
            places_from: 0,
            chunks: VecDeque::with_capacity(config.in_flight_max as usize),
            have: 0,
            answered: 0,
            stable: ChunkNo(0),
            bounce: Bounce::new(bounce),
            named: None,
            half: None,
            missing: RankMask::EMPTY,
            excluded_at: None,
            ending: None,
            failed: None,
            failure_told: false,
            stats: EndpointStats::default(),
            config,
        }
    }

    /// Post an operation, as [`Endpoint::post`](crate::transport::packets::Endpoint::post) does; its buffers lie at `places`.
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post(&mut self, desc: OpDesc, path: Path, places: Places) -> Result<OpId, PostError> {
        self.post_within(desc, path, None, places)
    }

    /// The same for an operation that does not wait longer than a limit for ranks to come to it. All ranks have to give
    /// the same.
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post_within(
        &mut self,
        desc: OpDesc,
        path: Path,
        limit: Option<Limit>,
        places: Places,
    ) -> Result<OpId, PostError> {
        if let Some(error) = self.failed {
            return Err(error.into());
        }
        let signature = desc.tree_signature(path, self.config.table_version, ChunkNo(self.ops.end()));
        let signature = limit.map_or(signature, |limit| limit.sign(signature));
        let id = self.ops.post_within(desc, signature, path == Path::Tree, limit)?;
        self.places.push_back(places);
        Ok(id)
    }

    /// Return the next run to submit, which then counts as submitted; `None` if there is none, or no room for it.
    pub fn next_run(&mut self) -> Option<Run> {
        let seq = self.next();
        let room = u64::from(self.config.in_flight_max).saturating_sub(self.chunks.len() as u64);
        let op = self.ops.of_seq(seq).filter(|_| self.failed.is_none())?;
        let longest = room.min(u64::from(self.config.window_max.max(1)));
        let end = ((seq / RUN + 1) * RUN).min(op.end()).min(self.end()).min(seq + longest);
        if seq >= end {
            return None;
        }
        let first = self.plan(&op, seq, true)?;
        let copied = (BOUNCED_RUN_BYTES / u64::from(self.config.chunk_len_bytes)).max(1);
        let end = if first.bounce.is_some() { end.min(seq + copied) } else { end };
        let (src, dst) = (first.src, first.dst);
        let moves = src.is_some() || dst.is_some();
        let full = op.full_chunk_bytes();
        let mut fill = first.bounces_src.then(|| first.fill(op.id)).flatten();
        let (mut len, mut bytes) = (first.len, first.len);
        self.submit(op.id, first);
        for next in seq + 1..end {
            if moves && len != full {
                break;
            }
            let Some(chunk) = self.plan(&op, next, false) else { break };
            let skip = (next - seq) * full as u64;
            let behind = |base: Option<Address>| {
                base.map(|base| Address { offset_bytes: base.offset_bytes + skip, region: base.region })
            };
            if (chunk.src, chunk.dst) != (behind(src), behind(dst)) {
                break;
            }
            len = chunk.len;
            bytes += len;
            if let (Some(fill), Some(gives)) = (&mut fill, &chunk.part.gives) {
                fill.from.end = gives.end;
            }
            self.submit(op.id, chunk);
        }
        let element = op.desc.element_bytes().max(1);
        self.stats.bytes_out += if src.is_some() { bytes as u64 } else { 0 };
        let (group, epoch) = (self.config.group, self.config.epoch);
        let chunks = op.end() - op.first();
        let limit = op.limit.filter(|_| seq == op.first());
        let limit = limit.map(|limit| OperationLimit { group, epoch, seq: ChunkNo(seq), chunks, limit });
        let contribution = Contribution {
            group,
            epoch,
            seq: ChunkNo(seq),
            count: (self.next() - seq) as u16,
            elements: if moves { (bytes / element) as u32 } else { 0 },
            lag: u16::try_from(seq - self.have).unwrap_or(u16::MAX),
            collective: op.desc.collective,
            dtype: op.desc.dtype,
            op: op.desc.op,
            root: op.desc.root,
            total: op.desc.count,
            signature: op.signature,
            src,
            dst,
        };
        Some(Run { limit, contribution, fill })
    }

    /// Take in what the device has put into the completion ring; `drain` is called for each result that has to be
    /// copied out of the bounce buffer, and copies it before it returns.
    pub fn handle(&mut self, words: &[u64; COMPLETION_WORDS], drain: impl FnMut(&Drain)) {
        if self.failed.is_none()
            && let Err(breach) = self.take(words, drain)
        {
            self.fail(breach.into());
        }
    }

    /// End the group, for what its user found out.
    pub fn fail(&mut self, error: EndpointError) {
        self.failed.get_or_insert(error);
    }

    /// Take in again what a device answers, though the group is over; not from one whose answers made no sense.
    pub(crate) fn reopen(&mut self) {
        self.failed = self.failed.filter(|error| matches!(error, EndpointError::Broken(_)));
    }

    /// Submit nothing more and take in nothing more, as the group is over for its user.
    pub(crate) fn close(&mut self) {
        self.fail(EndpointError::GroupLost);
        self.failure_told = true;
    }

    /// Return the next event: completions in the order of completion, a failure once and last.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(id) = self.ops.pop_completed() {
            self.places.pop_front();
            self.places_from = id.0 + 1;
            return Some(Event::Completed(id));
        }
        let error = self.failed.filter(|_| !self.failure_told)?;
        self.failure_told = true;
        Some(Event::Failed(error))
    }

    /// Return what is known of the operation whose completion [`ReferenceEndpoint::poll_event`] has told last.
    pub const fn verdict(&self) -> Verdict {
        self.ops.verdict()
    }

    /// Return the ranks that have left the group, as far as this rank was told.
    pub(crate) fn gone(&self) -> RankMask {
        self.ops.cuts.gone()
    }

    /// Return the chunk from which on results are of others only: nothing of them belongs into this rank's memory.
    pub(super) fn own_end(&self) -> u64 {
        self.ops.cuts.first_without(self.config.rank).or(self.excluded_at).unwrap_or(u64::MAX)
    }

    /// Return the first chunk whose result has not landed: all below have.
    pub const fn have(&self) -> ChunkNo {
        ChunkNo(self.have)
    }

    /// Tell whether another operation can be posted.
    pub fn has_room(&self) -> bool {
        self.ops.has_room()
    }

    /// Return why the group is at its end, if it is.
    pub const fn error(&self) -> Option<EndpointError> {
        self.failed
    }

    /// Return what was counted since the endpoint began: the bytes that the device was told to fetch as sent bytes,
    /// and no packets.
    pub const fn stats(&self) -> &EndpointStats {
        &self.stats
    }

    /// Return how many chunks have to be answered, ever, before there is something to do here: the oldest operation is
    /// complete, or, where there is more to submit or to copy, half of what is on its way has come.
    pub fn wanted(&self) -> u64 {
        let on_its_way = self.on_its_way();
        let oldest = self.ops.of_seq(self.have).map_or(self.next(), |op| op.end());
        let is_more = self.next() < self.end() || self.bounce.is_in_use();
        let half = if is_more { self.answered + on_its_way.div_ceil(2) } else { u64::MAX };
        oldest.max(self.answered + 1).min(half).min(self.next())
    }

    /// Return how many chunks are on their way.
    pub fn on_its_way(&self) -> u64 {
        self.next() - self.answered
    }

    /// Tell whether the device may have anything in its hands.
    pub fn is_in_flight(&self) -> bool {
        !self.chunks.is_empty()
    }

    /// Return each chunk whose result the device may be writing to the caller's own memory, or has written a part of,
    /// and where. An error is no word that nothing was written: it may stand for a write that failed half-way.
    pub fn exposed(&self) -> impl Iterator<Item = (ChunkNo, Address, usize)> {
        let open = self.chunks.iter().zip(self.have..).filter(|(chunk, _)| chunk.state != State::Landed);
        open.filter_map(|(chunk, seq)| chunk.dst.map(|(address, len)| (ChunkNo(seq), address, len)))
    }

    /// Return how many chunks are submitted and have not landed, and how many bytes are kept of operations that have
    /// returned.
    #[cfg(feature = "snapshot")]
    pub fn queues(&self) -> (usize, usize) {
        (self.chunks.len(), self.ops.kept().map(crate::transport::packets::Kept::len_bytes).sum())
    }

    /// Return the operations.
    pub(crate) const fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Tell whether the result of a chunk is in the caller's buffer.
    pub(crate) fn has_landed(&self, seq: u64) -> bool {
        let chunk = seq.checked_sub(self.have).map(|index| self.chunks.get(index as usize));
        chunk.is_none_or(|chunk| chunk.is_some_and(|chunk| chunk.state == State::Landed))
    }

    /// Keep of the operations that are complete now what other ranks may lack (PROTOCOL 5): the caller's buffers are its
    /// own again. A result stays in its redo slot; but a device none of whose children wanted one never had it, and for
    /// such a chunk (of a broadcast's root, or a reduction to another device's rank) the input is kept.
    pub(crate) fn keep(&mut self, is_published: impl Fn(u64) -> bool, buffers: &mut impl Buffers) {
        let stable = self.stable.0;
        self.ops.forget_below(stable);
        let lands_apart = self.config.lands_apart;
        let is_elsewhere = |op: &Op, from| {
            let kept = |seq| match op.keep(seq) {
                Keep::Nothing => true,
                Keep::Result(_) if !lands_apart => true,
                _ => is_published(seq),
            };
            (from..op.end()).all(kept)
        };
        self.ops.keep_new(stable, is_elsewhere, |op, keep, to| keep.retain(op.id, buffers, to));
    }

    fn next(&self) -> u64 {
        self.have + self.chunks.len() as u64
    }

    /// Return the seq before which answers are to be had.
    fn end(&self) -> u64 {
        self.ending.map_or(self.ops.end(), |(at, _)| at)
    }

    /// Work out where chunk `seq` is fetched from and delivered to; `first` of a run, or behind another. `None` if the
    /// bounce buffer has no room.
    fn plan(&self, op: &Op, seq: u64, first: bool) -> Option<Planned> {
        let part = op.part(seq);
        let places = self.places.get((op.id.0 - self.places_from) as usize).copied().unwrap_or_default();
        let mask = u64::from(self.config.alignment_bytes) - 1;
        let at = |base: Option<Address>, skip: usize| {
            let base = base?;
            let address = Address { offset_bytes: base.offset_bytes + skip as u64, region: base.region };
            (address.offset_bytes & mask == 0).then_some(address)
        };
        let mut src = part.gives.as_ref().and_then(|gives| at(places.input, gives.start));
        // A result of which only a part is this rank's does not fit where the part goes.
        let whole = part.takes.as_ref().filter(|takes| takes.part.len() == takes.result_len);
        let mut dst = whole.filter(|_| !self.config.lands_apart).and_then(|takes| {
            let (dst, len_bytes) = (at(places.output, takes.at)?, takes.result_len as u64);
            places.writable.is_none_or(|pages| is_within(dst, len_bytes, pages)).then_some(dst)
        });
        let (bounces_src, bounces_dst) = (part.gives.is_some() && src.is_none(), part.takes.is_some() && dst.is_none());
        let len = part.gives.as_ref().map(ExactSizeIterator::len).or(part.takes.as_ref().map(|takes| takes.result_len));
        let len = len.unwrap_or(0);
        let mut bounce = None;
        if bounces_src || bounces_dst {
            let place = self.bounce.find(len as u64, if first { alignment(&self.config) } else { 1 })?;
            let address = self.bounce.address(place);
            // The device refuses a chunk behind the first at an odd address: it begins a run of its own.
            if address.offset_bytes & mask != 0 {
                return None;
            }
            // A result may lie where its own input was.
            src = if bounces_src { Some(address) } else { src };
            dst = if bounces_dst { Some(address) } else { dst };
            bounce = Some(place);
        }
        Some(Planned { part, len, bounce, src, dst, bounces_src, bounces_dst })
    }

    fn submit(&mut self, op: OpId, planned: Planned) {
        let drain = planned.drain(op);
        let dst = planned.dst.filter(|_| !planned.bounces_dst).map(|address| (address, planned.len));
        if let Some(place) = planned.bounce {
            self.bounce.take(place);
        }
        let bounce_end = planned.bounce.map(|place| place.end);
        let lands = planned.bounce.filter(|_| planned.bounces_dst).map(|place| place.offset);
        self.chunks.push_back(Chunk { state: State::Submitted, dst, drain, lands, bounce_end });
    }
}

impl Planned {
    fn fill(&self, op: OpId) -> Option<Fill> {
        Some(Fill { op, from: self.part.gives.clone()?, to: self.bounce?.offset as usize })
    }

    fn drain(&self, op: OpId) -> Option<Drain> {
        let (takes, place) = (self.part.takes.as_ref().filter(|_| self.bounces_dst)?, self.bounce?);
        let at = place.offset as usize;
        Some(Drain { op, from: at + takes.part.start..at + takes.part.end, to: takes.at })
    }
}

/// Tell whether bytes lie in a span of the same region.
fn is_within(at: Address, len_bytes: u64, span: Span) -> bool {
    let skip = at.offset_bytes.checked_sub(span.address.offset_bytes);
    at.region == span.address.region && skip.is_some_and(|skip| skip + len_bytes <= span.len_bytes)
}

fn alignment(config: &ReferenceConfig) -> u64 {
    u64::from(config.alignment_bytes).max(BOUNCE_ALIGNMENT_BYTES)
}
