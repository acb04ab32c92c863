//! A rank's side of the protocol, sans I/O: slot window, chunk ledger, retransmission.
//!
//! An [`Endpoint`] is driven by the five verbs, like a device's node: [`Endpoint::handle`],
//! [`Endpoint::handle_timeout`], [`Endpoint::poll_transmit`], [`Endpoint::poll_timeout`] and
//! [`Endpoint::poll_event`]. The caller's buffers stay with the caller and are lent through [`Buffers`].
//!
//! Invariants (PROTOCOL 1 and 3):
//! - chunk j is sent only if `j < have + W`: a contiguous window, never a count of packets in flight;
//! - `have` is moved past a chunk only when its result is in the caller's buffer;
//! - an input byte is overwritten only by its own chunk's result, after which that input is not needed any more;
//! - payload is sent a second time only when the node says that it is missing;
//! - an error that the tree tells at chunk k ends the group when every chunk below k has landed, not before: until
//!   then other ranks may need this one's contributions, and all ranks end at the same chunk with the same error;
//! - what comes from elsewhere than the node, or does not match what was asked, is dropped and counted.

mod driver;
mod ops;
mod receive;
#[cfg(feature = "snapshot")]
mod snapshot;
#[cfg(test)]
mod tests;
mod verdict;

pub use driver::TreeDriver;
pub use ops::{Buffers, OpId};
pub(crate) use ops::{Keep, Kept, MAX_OPS, Op, Ops, Part, Seat};
#[cfg(feature = "snapshot")]
pub use snapshot::Progress;
pub use verdict::{Slowest, Verdict};

use crate::recovery::Remains;
use crate::transport::memory::Breach;
use std::collections::VecDeque;
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::mmio::EntryStatus;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::{RUN, Shard};
use sumac_hal::time::Instant;
use sumac_hal::uplink::{HopTimers, Listening, MAX_WINDOW, Uplink};
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, Limit, Packet, RankMask, Repr, payload_crc};
use thiserror::Error;

/// What a rank is told when it joins a group.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct EndpointConfig {
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// Which rank of the group this is.
    pub rank: Rank,
    /// How many there are; more than `rank`.
    pub ranks: u32,
    /// Which child of its leaf node the rank is.
    pub child: ChildIndex,
    /// The key of that link.
    pub key: u64,
    /// The key of what the leaf node sends to all its children at once, if the port listens to the shared address.
    pub shared_key: Option<u64>,
    /// Where the leaf node's shards receive, in order of shard.
    pub parents: Vec<Addr>,
    /// The most contributions in flight.
    pub window_max: u16,
    /// How many to begin with, before the node has granted a window.
    pub window_start: u16,
    /// The payload limit of a packet in this group in bytes.
    pub chunk_len_bytes: u16,
    /// The timers of the hop.
    pub timers: HopTimers,
    /// The version of the cost table, part of every signature.
    pub table_version: u32,
    /// Drawn by the rank for this life of the group: what its tokens are made of.
    pub salt: u32,
}

/// Why an operation ended without a result. The group is at its end then: its ranks no longer agree on numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// Ranks called different things.
    #[error(
        "ranks called different operations: one {first}, another {other}; all ranks must make the same calls in the same order"
    )]
    Mismatch {
        /// What the first to arrive called.
        first: OpDesc,
        /// What another called.
        other: OpDesc,
    },
    /// A device on the way does not know the operation.
    #[error("a device of the tree can't do {0}")]
    Unsupported(OpDesc),
    /// The way to the root is dead.
    #[error("the path to the tree's root is lost: no answer within the limit for dead hops")]
    PathLost,
    /// The device has no such group.
    #[error("the device no longer knows the group: it restarted, or the lease ran out")]
    GroupLost,
    /// The device refused a contribution by reference.
    #[error("the device refused the contribution to {chunk} by reference: {status:?}")]
    Device {
        /// What it said.
        status: EntryStatus,
        /// The chunk.
        chunk: ChunkNo,
    },
    /// The device that memory is shared with is gone.
    #[error("the device that reads and writes this rank's memory is gone")]
    DeviceLost,
    /// Ranks did not come to an operation within its limit.
    #[error("ranks {missing} had not come to the operation within its limit, and it has no result without them")]
    Stragglers {
        /// Who.
        missing: RankMask,
    },
    /// This rank did not come in time.
    #[error("the group goes on without this rank, which had not come to an operation within its limit")]
    Excluded,
    /// What the device answered by reference makes no sense.
    #[error("the device has broken the protocol: {0}")]
    Broken(#[from] Breach),
}

/// Why an operation can't be posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PostError {
    /// An earlier operation failed.
    #[error("the group is at its end: {0}")]
    Failed(#[from] EndpointError),
    /// Too many at once.
    #[error("{limit} operations are in flight already; wait for one first")]
    TooMany {
        /// The limit.
        limit: usize,
    },
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The operation is complete: its result is in the caller's buffer.
    Completed(OpId),
    /// This and every other operation in flight ended without a result.
    Failed(EndpointError),
}

/// A packet to send: the first `len_bytes` of the buffer given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transmit {
    /// To whom.
    pub to: Addr,
    /// How long it is.
    pub len_bytes: usize,
}

/// A packet to send whose payload is still in the caller's buffer.
#[derive(Debug, Clone)]
pub struct Outgoing<'b> {
    /// To whom.
    pub to: Addr,
    /// The packet's header.
    pub header: [u8; HEADER_LEN],
    /// The rest.
    pub payload: &'b [u8],
}

impl<'b> Outgoing<'b> {
    fn new(to: Addr, repr: &Repr, payload: &'b [u8]) -> Self {
        let mut header = [0; HEADER_LEN];
        repr.emit(&mut Packet::new_unchecked(&mut header[..]), payload_crc(payload));
        Self { to, header, payload }
    }
}

/// What an endpoint counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct EndpointStats {
    /// Packets sent.
    pub packets_out: u64,
    /// Their bytes, headers too.
    pub bytes_out: u64,
    /// Packets taken in.
    pub packets_in: u64,
    /// Contributions sent again.
    pub retransmits: u64,
    /// Probes sent.
    pub probes: u64,
    /// Results that came to all children at once.
    pub shared_results: u64,
    /// Packets dropped: foreign, damaged, stale or doubled.
    pub dropped: u64,
}

/// A rank's side of one group.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub struct Endpoint {
    config: EndpointConfig,
    /// One hop a shard of the leaf node.
    hops: Vec<Uplink>,
    ops: Ops,
    /// The first seq that was not sent yet.
    next: u64,
    /// What the node granted last.
    window: u16,
    stable: ChunkNo,
    /// Whether contributions ask for shared results.
    listening: Listening,
    /// Headers to send.
    replies: VecDeque<(Addr, Repr)>,
    /// Seqs to send again.
    again: VecDeque<u64>,
    /// The tree's word that it ends at this seq, the lowest that was heard of, while chunks below are still open.
    ending: Option<(u64, EndpointError)>,
    /// An answer met congestion, which the node has yet to be told.
    congested: bool,
    failed: Option<EndpointError>,
    failure_told: bool,
    stats: EndpointStats,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

impl Endpoint {
    /// Return an endpoint that has posted nothing.
    ///
    /// # Panics
    /// If `config.parents` is empty or longer than a node can have shards, or the rank is none of the group's.
    pub fn new(config: EndpointConfig) -> Self {
        let shards = config.parents.len() as u16;
        assert!(Shard::new(0, shards).is_some(), "{shards} shards");
        assert!(config.rank.0 < config.ranks, "{} of {}", config.rank, config.ranks);
        let hops = (0..shards).map(|i| Uplink::new(config.timers, config.salt.rotate_left(u32::from(i) + 1))).collect();
        Self {
            window: config.window_start.clamp(1, config.window_max),
            hops,
            ops: Ops::new(usize::from(config.chunk_len_bytes), Seat { rank: config.rank.0, ranks: config.ranks }),
            next: 0,
            stable: ChunkNo(0),
            listening: Listening::new(config.shared_key.is_some()),
            replies: VecDeque::new(),
            again: VecDeque::with_capacity(MAX_WINDOW as usize),
            ending: None,
            congested: false,
            failed: None,
            failure_told: false,
            stats: EndpointStats::default(),
            #[cfg(feature = "planted")]
            bug: None,
            config,
        }
    }

    /// Give this endpoint a bug.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.bug = Some(bug);
    }

    /// Post an operation. On [`Path::Tree`] it runs through the tree; on any other path it only tells the tree
    /// what this rank calls, so that ranks which call different things find out (PROTOCOL 2).
    ///
    /// An operation without elements is one `Empty`, like a barrier: ranks that call it and ranks that call
    /// something else find out (PROTOCOL 1 gives it no seq at all, which lets one rank go on where another waits).
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post(&mut self, desc: OpDesc, path: Path) -> Result<OpId, PostError> {
        self.post_within(desc, path, None)
    }

    /// The same for an operation that does not wait longer than a limit for ranks to come to it. All ranks have to give
    /// it the same one. Devices of several shards, and groups of more than 256 ranks, take no notice of it.
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post_within(&mut self, desc: OpDesc, path: Path, limit: Option<Limit>) -> Result<OpId, PostError> {
        if let Some(error) = self.failed {
            return Err(error.into());
        }
        let signature = desc.tree_signature(path, self.config.table_version, ChunkNo(self.ops.end()));
        let signature = limit.map_or(signature, |limit| limit.sign(signature));
        self.ops.post_within(desc, signature, path == Path::Tree, limit)
    }

    /// Write the next packet to `buffer`, which has room for a chunk and its header; `None` if there is none to
    /// send now.
    ///
    /// Call it after `post`, `handle` and `handle_timeout` until it returns `None`.
    pub fn poll_transmit(&mut self, buffers: &impl Buffers, buffer: &mut [u8], now: Instant) -> Option<Transmit> {
        let Outgoing { to, header, payload } = self.poll_outgoing(buffers, now)?;
        buffer[..HEADER_LEN].copy_from_slice(&header);
        buffer[HEADER_LEN..][..payload.len()].copy_from_slice(payload);
        Some(Transmit { to, len_bytes: HEADER_LEN + payload.len() })
    }

    /// Return the next packet without copying its payload out of the caller's buffer, for ports that gather. The
    /// packet counts as sent.
    pub fn poll_outgoing<'b>(&mut self, buffers: &'b impl Buffers, now: Instant) -> Option<Outgoing<'b>> {
        let out = self.next_packet(buffers, now)?;
        self.stats.packets_out += 1;
        self.stats.bytes_out += (HEADER_LEN + out.payload.len()) as u64;
        Some(out)
    }

    /// Return where the next packet goes, if there is one, without sending it.
    pub fn poll_destination(&mut self) -> Option<Addr> {
        if self.failed.is_some() {
            return None;
        }
        if let Some((to, _)) = self.replies.front() {
            return Some(*to);
        }
        self.drop_answered();
        let seq = self.again.front().copied().or_else(|| self.next_in_window())?;
        Some(self.config.parents[self.shard_of(seq)])
    }

    /// Do what is due at `now`: probe, or give the path up.
    pub fn handle_timeout(&mut self, now: Instant) {
        for index in 0..self.hops.len() {
            if !self.waits_for(index) {
                continue;
            }
            let hop = &mut self.hops[index];
            if hop.is_dead(now) && !planted!(self, DeadHopUnnoticed) {
                return self.fail(EndpointError::PathLost);
            }
            if let Some(probe) = hop.poll_probe(now) {
                let seq = self.shard(index).global(probe.from);
                let header = self.header(Kind::Probe, seq, probe.token);
                self.stats.probes += 1;
                self.replies
                    .push_back((self.config.parents[index], Repr { count: probe.count, bits: probe.held, ..header }));
            }
        }
    }

    /// Return when [`Endpoint::handle_timeout`] is to be called next, if nothing arrives before.
    pub fn poll_timeout(&self) -> Option<Instant> {
        if self.failed.is_some() {
            return None;
        }
        (0..self.hops.len()).filter(|&index| self.waits_for(index)).filter_map(|index| self.hops[index].timeout()).min()
    }

    /// Return the next event: completions in the order of completion, a failure once and last.
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(id) = self.ops.pop_completed() {
            return Some(Event::Completed(id));
        }
        let error = self.failed.filter(|_| !self.failure_told)?;
        self.failure_told = true;
        Some(Event::Failed(error))
    }

    /// Return what is known of the operation whose completion [`Endpoint::poll_event`] has told last.
    pub const fn verdict(&self) -> Verdict {
        self.ops.verdict()
    }

    /// Return how many shards the leaf device has.
    pub const fn shards(&self) -> usize {
        self.hops.len()
    }

    /// Return the ranks that have left the group.
    pub fn gone(&self) -> RankMask {
        self.ops.cuts.gone()
    }

    /// Return the first chunk whose result has not landed: all below have.
    pub fn have(&self) -> ChunkNo {
        let shards = 0..self.hops.len();
        let first = shards.map(|i| self.shard(i).global(self.hops[i].answered_below())).min();
        ChunkNo(first.map_or(0, |seq| seq.0).min(self.ops.end()))
    }

    /// Tell whether another operation can be posted.
    pub fn has_room(&self) -> bool {
        self.ops.has_room()
    }

    /// Return the chunk below which every rank has every result, as far as this rank was told.
    pub const fn stable(&self) -> ChunkNo {
        self.stable
    }

    /// Return what this rank keeps of a chunk of an operation that has returned: the chunk's result, or its own
    /// contribution where it does not get that. `None` for a chunk that every rank is known to have, or that belongs
    /// to an operation in flight.
    pub fn kept(&self, seq: ChunkNo) -> Option<Vec<u8>> {
        let kept = self.ops.kept().find(|kept| (kept.from..kept.op.end()).contains(&seq.0))?;
        let mut bytes = Vec::new();
        self.ops.give_kept(kept, seq.0, &mut bytes);
        Some(bytes)
    }

    /// Return why the group is at its end, if it is.
    pub const fn error(&self) -> Option<EndpointError> {
        self.failed
    }

    /// Return what was counted since the endpoint began.
    pub const fn stats(&self) -> &EndpointStats {
        &self.stats
    }

    /// Return the window in force, in chunks.
    pub fn window(&self) -> u16 {
        if planted!(self, WindowUnclamped) {
            return self.window.max(1);
        }
        self.window.clamp(1, self.config.window_max)
    }

    /// End the group, for what its user found out.
    pub(crate) fn close(&mut self) {
        if planted!(self, MissingFence) {
            return;
        }
        self.fail(EndpointError::PathLost);
    }

    fn next_packet<'b>(&mut self, buffers: &'b impl Buffers, now: Instant) -> Option<Outgoing<'b>> {
        if self.failed.is_some() {
            return None;
        }
        if let Some((to, repr)) = self.replies.pop_front() {
            return Some(Outgoing::new(to, &repr, &[]));
        }
        self.drop_answered();
        if let Some(seq) = self.again.pop_front() {
            self.stats.retransmits += 1;
            return Some(self.contribute(seq, seq + 1, buffers, now));
        }
        let seq = self.next_in_window()?;
        let run_end = (seq / RUN + 1) * RUN;
        let end = run_end.min(self.end()).min(self.window_end());
        Some(self.contribute(seq, end, buffers, now))
    }

    /// Forget what was to be sent again but has its answer by now, or will have none.
    fn drop_answered(&mut self) {
        while let Some(&seq) = self.again.front() {
            let index = self.shard_of(seq);
            let local = self.shard(index).below(ChunkNo(seq));
            if seq < self.end() && !self.hops[index].is_answered(local) {
                return;
            }
            self.again.pop_front();
        }
    }

    /// Return the seq before which answers are to be had: the end of what was posted, or where the tree ends.
    fn end(&self) -> u64 {
        self.ending.map_or(self.ops.end(), |(at, _)| at)
    }

    /// Tell whether a shard still owes answers that are to be had.
    fn waits_for(&self, index: usize) -> bool {
        let first = self.shard(index).global(self.hops[index].answered_below());
        self.ending.is_none_or(|(at, _)| first.0 < at)
    }

    /// Return the next seq to send for the first time, if the window allows it.
    fn next_in_window(&self) -> Option<u64> {
        let limit = self.end().min(self.window_end());
        (self.next < limit).then_some(self.next)
    }

    /// Return the seq before which contributions may be sent.
    fn window_end(&self) -> u64 {
        let have = self.have().0;
        if planted!(self, CountedWindow) {
            let answered = (have..self.next).filter(|&seq| Remains::is_answered(self, seq)).count();
            return have + answered as u64 + u64::from(self.window());
        }
        have + u64::from(self.window())
    }

    /// Return the contribution to `seq`; if that is Empty, also to those that follow below `end`, as far as they are
    /// Empty of the same operation too.
    fn contribute<'b>(&mut self, seq: u64, end: u64, buffers: &'b impl Buffers, now: Instant) -> Outgoing<'b> {
        let op = self.ops.of_seq(seq).expect("only posted seqs of unfinished operations are sent");
        let part = op.part(seq);
        let payload = part.gives.map_or(&[][..], |range| &buffers.input(op.id)[range]);
        let kind = if payload.is_empty() { Kind::Empty } else { Kind::Data };
        let wants = part.takes.is_some();
        let mut repr = self.header(kind, ChunkNo(seq), self.config.salt);
        repr.set_op(&op.desc);
        repr.signature = op.signature;
        repr.slowest = Some(self.config.rank);
        if let Some(limit) = op.limit {
            // An operation has fewer chunks than that: what is said of it would not fit its elements' number.
            repr.set_limit(limit, (seq - op.first()) as u32);
        }
        repr.flags.set(Flags::WANT, wants);
        repr.flags.set(Flags::CONGESTED, std::mem::take(&mut self.congested));
        repr.flags.set(Flags::SHARED, wants && self.listening.asks());
        repr.payload_len_bytes = payload.len() as u16;
        if kind == Kind::Empty {
            repr.count = empty_run(&op, seq, end, wants);
        }
        let index = self.shard_of(seq);
        let local = self.shard(index).below(ChunkNo(seq));
        (0..u64::from(repr.count)).for_each(|next| self.hops[index].on_sent(local + next, now));
        self.next = self.next.max(seq + u64::from(repr.count));
        Outgoing::new(self.config.parents[index], &repr, payload)
    }

    fn header(&self, kind: Kind, seq: ChunkNo, token: u32) -> Repr {
        let config = &self.config;
        Repr {
            seq,
            count: 1,
            token,
            mark: self.have(),
            ..Repr::new(kind, config.group, config.epoch, config.child, config.key)
        }
    }

    fn shard_of(&self, seq: u64) -> usize {
        usize::from(Shard::of(ChunkNo(seq), self.hops.len() as u16))
    }

    fn shard(&self, index: usize) -> Shard {
        Shard::new(index as u16, self.hops.len() as u16).expect("checked in new")
    }

    fn fail(&mut self, error: EndpointError) {
        self.failed.get_or_insert(error);
        self.replies.clear();
        self.again.clear();
    }
}

impl Remains for Endpoint {
    fn ops(&self) -> &Ops {
        &self.ops
    }

    fn is_answered(&self, seq: u64) -> bool {
        if planted!(self, ComputedTwice) && self.failed.is_some() {
            return false;
        }
        let index = self.shard_of(seq);
        self.hops[index].is_answered(self.shard(index).below(ChunkNo(seq)))
    }

    /// Packets bring results to their own place; nobody else has them.
    fn published(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
}

/// Return how many seqs from `seq` on, below `end`, are Empty of `op` and want results as `wants` says.
fn empty_run(op: &Op, seq: u64, end: u64, wants: bool) -> u16 {
    let alike = |next: &u64| {
        let part = op.part(*next);
        part.gives.is_none() && part.takes.is_some() == wants
    };
    1 + (seq + 1..end.min(op.end())).take_while(alike).count() as u16
}
