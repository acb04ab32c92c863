//! Zero-copy endpoint, sans I/O: which run of chunks to submit next, and how to apply answers.
//!
//! Chunk numbering, and which rank contributes and receives which bytes, are shared with the packet endpoint
//! (`packets/ops.rs`). There is no window and no retransmission here: rings lose nothing, and the device accepts
//! entries as its window allows.
//!
//! Invariants:
//! - Each chunk is submitted once, in order of sequence number, and no more are in flight than the completion ring can
//!   answer.
//! - Each input byte is covered by exactly one chunk, and each output byte is written by exactly one.
//! - `have` passes a chunk only once its result is in the caller's buffer.
//! - An error that the tree reports at chunk k ends the group once every chunk below k has landed, as for packets. A
//!   refusal of this rank's own entry and an invalid answer end it at once.
//! - No chunk lands because of an answer that arrived after its memory was revoked.

mod answers;
mod salvage;
mod types;

pub use types::{BounceConfig, Places, Run, StageIn, StageOut, ZeroCopyConfig};

use super::bounce::Bounce;
use crate::transport::packets::{
    Buffers, CompletionInfo, EndpointError, EndpointStats, Event, MAX_OPS, Op, OpId, Ops, Part, PostError, RankInfo,
    Retention,
};
use std::collections::VecDeque;
use sumac_hal::dma::{Address, Span};
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::{COMPLETION_WORDS, Contribution, OperationLimit};
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::shard::RUN;
use sumac_hal::wire::{RankMask, StragglerLimit};

/// Minimum alignment of runs in the bounce buffer: whole cache lines, so that no two runs share one.
const BOUNCE_ALIGNMENT_BYTES: u64 = 64;

/// Bytes staged per submission, so that the device works while the next run is copied.
const BOUNCED_RUN_BYTES: u64 = 256 << 10;

/// How many runs a window has at least. A device takes a run once all of it fits into its window: with one run a
/// window, a device and its parent would take turns instead of working at the same time.
const RUNS_PER_WINDOW: u16 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Submitted,
    Landed,
    Refused,
    /// The memory was revoked and the device has answered since: it holds the input, the result, or a mixture.
    Unknown,
}

/// A submitted chunk.
#[derive(Debug, Clone)]
struct Chunk {
    state: State,
    /// Address and length that the device writes to, if that is the caller's own memory.
    dst: Option<(Address, usize)>,
    stage_out: Option<StageOut>,
    /// The offset in the bounce buffer at which the whole result lands, if it does.
    bounce_offset: Option<u64>,
    /// The bounce buffer is free up to this position once this chunk and all before have landed.
    bounce_end: Option<u64>,
}

/// A chunk that can be submitted next.
struct PlannedChunk {
    part: Part,
    /// Its length in bytes in the caller's buffers.
    len: usize,
    bounce: Option<super::bounce::Place>,
    src: Option<Address>,
    dst: Option<Address>,
    bounces_src: bool,
    bounces_dst: bool,
}

/// A rank's side of one group.
#[derive(Debug)]
pub struct ZeroCopyEndpoint {
    config: ZeroCopyConfig,
    ops: Ops,
    /// Places of the operations from `places_from` on.
    places: VecDeque<Places>,
    places_from: u64,
    chunks: VecDeque<Chunk>,
    /// The sequence number of the first of `chunks`: all below have landed.
    have: u64,
    /// Number of answered chunks, in any order.
    answered: u64,
    stable: ChunkNo,
    bounce: Bounce,
    /// The pair of mismatched operations that the device reported last.
    named: Option<(OpDesc, OpDesc)>,
    /// The first half of a rank set whose second half is due.
    half: Option<answers::PartialRankMask>,
    /// The ranks that the device last reported as missing from an operation that failed without them.
    missing: RankMask,
    /// The first chunk that was refused because this rank is excluded.
    excluded_at: Option<u64>,
    /// The chunk at which the tree ends, and the error that it reports.
    ending: Option<(u64, EndpointError)>,
    failed: Option<EndpointError>,
    failure_reported: bool,
    stats: EndpointStats,
}

impl ZeroCopyEndpoint {
    /// Create an endpoint.
    ///
    /// # Panics
    /// If `rank` is not below `ranks`, the alignment is no power of two, or the bounce buffer is too short.
    pub fn new(config: ZeroCopyConfig) -> Self {
        assert!(config.rank.0 < config.ranks, "{} of {}", config.rank, config.ranks);
        assert!(config.alignment_bytes.is_power_of_two(), "an alignment of {}", config.alignment_bytes);
        let (alignment, bounce) = (alignment(&config), config.bounce);
        let fits = bounce.len_bytes >= 2 * u64::from(config.chunk_len_bytes).next_multiple_of(alignment);
        assert!(fits && bounce.len_bytes.is_multiple_of(alignment), "a bounce buffer of {} bytes", bounce.len_bytes);
        Self {
            ops: Ops::new(usize::from(config.chunk_len_bytes), RankInfo { rank: config.rank.0, ranks: config.ranks }),
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
            failure_reported: false,
            stats: EndpointStats::default(),
            config,
        }
    }

    /// Post an operation whose buffers lie at `places`; see
    /// [`Endpoint::post`](crate::transport::packets::Endpoint::post).
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post(
        &mut self,
        desc: OpDesc,
        path: Path,
        limit: Option<StragglerLimit>,
        places: Places,
    ) -> Result<OpId, PostError> {
        if let Some(error) = self.failed {
            return Err(error.into());
        }
        let signature = desc.tree_signature(path, self.config.table_version, ChunkNo(self.ops.end()));
        let signature = limit.map_or(signature, |limit| limit.sign(signature));
        let id = self.ops.post(desc, signature, path == Path::Tree, limit)?;
        self.places.push_back(places);
        Ok(id)
    }

    /// Return the next run, which then counts as submitted; `None` if there is none, or no room for it.
    pub fn next_run(&mut self) -> Option<Run> {
        let seq = self.next();
        let room = u64::from(self.config.in_flight_max).saturating_sub(self.chunks.len() as u64);
        let op = self.ops.of_seq(seq).filter(|_| self.failed.is_none())?;
        let longest = room.min(u64::from(self.config.window_max / RUNS_PER_WINDOW).max(1));
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
        let mut stage_in = first.bounces_src.then(|| first.stage_in(op.id)).flatten();
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
            if let (Some(stage_in), Some(input)) = (&mut stage_in, &chunk.part.input) {
                stage_in.from.end = input.end;
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
        Some(Run { limit, contribution, stage_in })
    }

    /// Process an entry of the completion ring. `stage_out` is called for each result in the bounce buffer, and must
    /// copy it to the output before it returns.
    pub fn handle(&mut self, words: &[u64; COMPLETION_WORDS], stage_out: impl FnMut(&StageOut)) {
        if self.failed.is_none()
            && let Err(violation) = self.apply(words, stage_out)
        {
            self.fail(violation.into());
        }
    }

    /// End the group with an error that the caller detected.
    pub fn fail(&mut self, error: EndpointError) {
        self.failed.get_or_insert(error);
    }

    /// Process answers again although the group has failed; not if the device broke the protocol.
    pub(crate) fn reopen(&mut self) {
        self.failed = self.failed.filter(|error| matches!(error, EndpointError::Protocol(_)));
    }

    /// Close the group: nothing is submitted or processed any more, and no failure is reported.
    pub(crate) fn close(&mut self) {
        self.fail(EndpointError::GroupLost);
        self.failure_reported = true;
    }

    /// Return the next event: completions in order, and last, once, the failure.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(id) = self.ops.pop_completed() {
            self.places.pop_front();
            self.places_from = id.0 + 1;
            return Some(Event::Completed(id));
        }
        let error = self.failed.filter(|_| !self.failure_reported)?;
        self.failure_reported = true;
        Some(Event::Failed(error))
    }

    /// Return details of the operation whose completion [`ZeroCopyEndpoint::poll_event`] returned last.
    pub const fn completion_info(&self) -> CompletionInfo {
        self.ops.completion_info()
    }

    /// Return the ranks that are known to be excluded from the group.
    pub(crate) fn excluded_ranks(&self) -> RankMask {
        self.ops.exclusions.ranks()
    }

    /// Return the first chunk in which this rank has no part: results from there on must not reach its memory.
    pub(super) fn participation_end(&self) -> u64 {
        self.ops.exclusions.first_without(self.config.rank).or(self.excluded_at).unwrap_or(u64::MAX)
    }

    /// Return the first chunk whose result has not landed.
    pub const fn have(&self) -> ChunkNo {
        ChunkNo(self.have)
    }

    /// Return whether another operation can be posted.
    pub fn has_room(&self) -> bool {
        self.ops.has_room()
    }

    /// Return the error that ended the group, if it has failed.
    pub const fn error(&self) -> Option<EndpointError> {
        self.failed
    }

    /// Return the counters: bytes that the device was asked to fetch count as sent, and packets stay zero.
    pub const fn stats(&self) -> &EndpointStats {
        &self.stats
    }

    /// Return the total number of answered chunks at which this side has something to do: the oldest operation is
    /// complete or, where there is more to submit or to copy, half of what is in flight has been answered.
    pub fn wake_threshold(&self) -> u64 {
        let unanswered = self.unanswered();
        let oldest = self.ops.of_seq(self.have).map_or(self.next(), |op| op.end());
        let is_more = self.next() < self.end() || self.bounce.is_in_use();
        let half = if is_more { self.answered + unanswered.div_ceil(2) } else { u64::MAX };
        oldest.max(self.answered + 1).min(half).min(self.next())
    }

    /// Return the number of submitted and unanswered chunks.
    pub fn unanswered(&self) -> u64 {
        self.next() - self.answered
    }

    /// Return whether any chunk is submitted and has not landed.
    pub fn is_in_flight(&self) -> bool {
        !self.chunks.is_empty()
    }

    /// Return each chunk whose result the device may be writing to the caller's own memory, or has partly written, with
    /// its destination. An error answer is no proof that nothing was written: the write may have failed half-way.
    pub fn exposed(&self) -> impl Iterator<Item = (ChunkNo, Address, usize)> {
        let open = self.chunks.iter().zip(self.have..).filter(|(chunk, _)| chunk.state != State::Landed);
        open.filter_map(|(chunk, seq)| chunk.dst.map(|(address, len)| (ChunkNo(seq), address, len)))
    }

    /// Return the number of submitted chunks that have not landed, and the bytes retained of completed operations.
    #[cfg(feature = "snapshot")]
    pub fn queues(&self) -> (usize, usize) {
        (self.chunks.len(), self.ops.retained().map(crate::transport::packets::RetainedOp::len_bytes).sum())
    }

    /// Return the operations.
    pub(crate) const fn ops(&self) -> &Ops {
        &self.ops
    }

    /// Return whether the result of a chunk is in the caller's buffer.
    pub(crate) fn has_landed(&self, seq: u64) -> bool {
        let chunk = seq.checked_sub(self.have).map(|index| self.chunks.get(index as usize));
        chunk.is_none_or(|chunk| chunk.is_some_and(|chunk| chunk.state == State::Landed))
    }

    /// Retain what other ranks may still lack of the operations that are complete now (PROTOCOL 5), since their buffers
    /// return to the caller. A result stays in its redo slot. But a device that serves no receiver of a chunk never had
    /// the result (at a broadcast's root, or in a reduction to a rank below another device), so there the input is
    /// retained.
    pub(crate) fn retain_completed(&mut self, is_published: impl Fn(u64) -> bool, buffers: &mut impl Buffers) {
        let stable = self.stable.0;
        self.ops.forget_below(stable);
        let lands_in_bounce = self.config.lands_in_bounce;
        let is_available_elsewhere = |op: &Op, from| {
            let is_available = |seq| match op.retention(seq) {
                Retention::Nothing => true,
                Retention::Result(_) if !lands_in_bounce => true,
                _ => is_published(seq),
            };
            (from..op.end()).all(is_available)
        };
        self.ops
            .retain_new(stable, is_available_elsewhere, |op, retention, to| retention.append_to(op.id, buffers, to));
    }

    fn next(&self) -> u64 {
        self.have + self.chunks.len() as u64
    }

    /// Return the sequence number before which answers are still expected.
    fn end(&self) -> u64 {
        self.ending.map_or(self.ops.end(), |(at, _)| at)
    }

    /// Determine source and destination of chunk `seq`; `first` if it begins a run. `None` if the bounce buffer is
    /// full.
    fn plan(&self, op: &Op, seq: u64, first: bool) -> Option<PlannedChunk> {
        let part = op.part(seq);
        let places = self.places.get((op.id.0 - self.places_from) as usize).copied().unwrap_or_default();
        let mask = u64::from(self.config.alignment_bytes) - 1;
        let at = |base: Option<Address>, skip: usize| {
            let base = base?;
            let address = Address { offset_bytes: base.offset_bytes + skip as u64, region: base.region };
            (address.offset_bytes & mask == 0).then_some(address)
        };
        let mut src = part.input.as_ref().and_then(|input| at(places.input, input.start));
        // A result of which this rank owns only a part does not fit at that part's destination.
        let whole = part.landing.as_ref().filter(|landing| landing.part.len() == landing.result_len);
        let mut dst = whole.filter(|_| !self.config.lands_in_bounce).and_then(|landing| {
            let (dst, len_bytes) = (at(places.output, landing.at)?, landing.result_len as u64);
            places.writable.is_none_or(|pages| is_within(dst, len_bytes, pages)).then_some(dst)
        });
        let (bounces_src, bounces_dst) =
            (part.input.is_some() && src.is_none(), part.landing.is_some() && dst.is_none());
        let len =
            part.input.as_ref().map(ExactSizeIterator::len).or(part.landing.as_ref().map(|landing| landing.result_len));
        let len = len.unwrap_or(0);
        let mut bounce = None;
        if bounces_src || bounces_dst {
            let place = self.bounce.find(len as u64, if first { alignment(&self.config) } else { 1 })?;
            let address = self.bounce.address(place);
            // The device refuses unaligned chunks within a run: this one must begin a run of its own.
            if address.offset_bytes & mask != 0 {
                return None;
            }
            // A result may overwrite its own input.
            src = if bounces_src { Some(address) } else { src };
            dst = if bounces_dst { Some(address) } else { dst };
            bounce = Some(place);
        }
        Some(PlannedChunk { part, len, bounce, src, dst, bounces_src, bounces_dst })
    }

    fn submit(&mut self, op: OpId, planned: PlannedChunk) {
        let stage_out = planned.stage_out(op);
        let dst = planned.dst.filter(|_| !planned.bounces_dst).map(|address| (address, planned.len));
        if let Some(place) = planned.bounce {
            self.bounce.take(place);
        }
        let bounce_end = planned.bounce.map(|place| place.end);
        let bounce_offset = planned.bounce.filter(|_| planned.bounces_dst).map(|place| place.offset);
        self.chunks.push_back(Chunk { state: State::Submitted, dst, stage_out, bounce_offset, bounce_end });
    }
}

impl PlannedChunk {
    fn stage_in(&self, op: OpId) -> Option<StageIn> {
        Some(StageIn { op, from: self.part.input.clone()?, to: self.bounce?.offset as usize })
    }

    fn stage_out(&self, op: OpId) -> Option<StageOut> {
        let (landing, place) = (self.part.landing.as_ref().filter(|_| self.bounces_dst)?, self.bounce?);
        let at = place.offset as usize;
        Some(StageOut { op, from: at + landing.part.start..at + landing.part.end, to: landing.at })
    }
}

/// Return whether bytes lie within a span of the same region.
fn is_within(at: Address, len_bytes: u64, span: Span) -> bool {
    let skip = at.offset_bytes.checked_sub(span.address.offset_bytes);
    at.region == span.address.region && skip.is_some_and(|skip| skip + len_bytes <= span.len_bytes)
}

fn alignment(config: &ZeroCopyConfig) -> u64 {
    u64::from(config.alignment_bytes).max(BOUNCE_ALIGNMENT_BYTES)
}
