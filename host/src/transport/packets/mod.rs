//! Packet endpoint of a rank, sans I/O: slot window, chunk accounting, retransmission.
//!
//! Methods of an [`Endpoint`] are in groups, like those of a device's node: see there. Buffers stay with the caller and
//! are accessed through [`Buffers`].
//!
//! Invariants (PROTOCOL 1 and 3):
//! - Chunk j is sent only if `j < have + W`: a contiguous window, not a count of packets in flight.
//! - `have` passes a chunk only once its result is in the caller's buffer.
//! - An input byte is overwritten only by the result of its own chunk, after which that input is no longer needed.
//! - Payload is retransmitted only when the node reports it missing.
//! - An error that the tree reports at chunk k ends the group once every chunk below k has landed, not before: until
//!   then other ranks may need this one's contributions, and all ranks end at the same chunk with the same error.
//! - Packets that do not come from the node, or do not match what was requested, are dropped and counted.

mod completion;
mod driver;
mod error;
mod op;
mod ops;
mod receive;
#[cfg(feature = "snapshot")]
mod snapshot;
#[cfg(test)]
mod tests;
mod train;
mod transmit;

pub use completion::{CompletionInfo, Slowest};
pub use driver::TreeDriver;
pub use error::{EndpointError, PostError};
pub use op::{Buffers, OpId};
pub(crate) use op::{Op, Part, RankInfo, Retention};
pub(crate) use ops::{MAX_OPS, Ops, RetainedOp};
#[cfg(feature = "snapshot")]
pub use snapshot::Progress;

use crate::transport::RecoverySource;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::path_mtu::{PathSearch, needs_probes};
use sumac_hal::planted;
use sumac_hal::port::Addr;
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::uplink::{HopTimers, MAX_WINDOW, SharedResults, Uplink};
use sumac_hal::wire::{HEADER_LEN, Kind, RankMask, Repr, StragglerLimit, packet_len_max};

/// Parameters of a rank in a group.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub struct EndpointConfig {
    /// The group.
    pub group: GroupId,
    /// The group's epoch.
    pub epoch: Epoch,
    /// This rank.
    pub rank: Rank,
    /// Number of ranks; greater than `rank`.
    pub ranks: u32,
    /// The rank's child index at its leaf node.
    pub child: ChildIndex,
    /// The key of the link to the leaf node.
    pub key: u64,
    /// The key of packets that the leaf node sends to all its children at once, if the port has joined the shared
    /// address.
    pub shared_key: Option<u64>,
    /// The receive addresses of the leaf node's shards, in order of shard.
    pub parents: Vec<Addr>,
    /// The maximum window: contributions in flight.
    pub window_max: u16,
    /// The window before the node has granted one.
    pub window_start: u16,
    /// The payload limit of a packet in this group in bytes.
    pub chunk_len_bytes: u16,
    /// Timers of the hop.
    pub timers: HopTimers,
    /// Version of the cost table, part of every signature.
    pub table_version: u32,
    /// Chosen at random by the rank for this incarnation of the group; its tokens derive from it.
    pub salt: u32,
}

/// An event of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The operation is complete: its result is in the caller's buffer.
    Completed(OpId),
    /// This and every other operation in flight failed.
    Failed(EndpointError),
}

/// Counters of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct EndpointStats {
    /// Packets sent.
    pub packets_out: u64,
    /// Bytes sent, headers included.
    pub bytes_out: u64,
    /// Packets received.
    pub packets_in: u64,
    /// Those of the packets received that had a congestion mark (ECN's CE, RFC 3168).
    pub marked: u64,
    /// Contributions retransmitted.
    pub retransmits: u64,
    /// Probes sent.
    pub probes: u64,
    /// Results received through the shared address.
    pub shared_results: u64,
    /// Packets dropped: foreign, damaged, stale or duplicate.
    pub dropped: u64,
}

/// A rank's side of one group.
///
/// | input | then call, until it returns `None` |
/// |---|---|
/// | [`post`](Endpoint::post): an operation | [`poll_transmit`](Endpoint::poll_transmit) |
/// | [`handle`](Endpoint::handle): a packet | [`poll_event`](Endpoint::poll_event), `poll_transmit` |
/// | [`handle_timeout`](Endpoint::handle_timeout): time has passed | `poll_event`, `poll_transmit` |
///
/// After any of them, [`poll_timeout`](Endpoint::poll_timeout) returns the next deadline. [`TreeDriver`] does this for
/// the packets of a port.
#[derive(Debug)]
#[cfg_attr(feature = "snapshot", derive(Clone, PartialEq, Eq, Hash))]
pub struct Endpoint {
    config: EndpointConfig,
    /// One hop for each shard of the leaf node.
    hops: Vec<Uplink>,
    /// The searches of their paths, of hops that have stalled.
    paths: Vec<Option<PathSearch>>,
    ops: Ops,
    /// The first sequence number that has not been sent.
    next: u64,
    /// The window that the node granted last.
    window: u16,
    stable: ChunkNo,
    /// Whether contributions request shared results.
    shared_results: SharedResults,
    /// Packets to send that have no payload but padding.
    replies: VecDeque<(Addr, Repr)>,
    /// Sequence numbers to retransmit.
    again: VecDeque<u64>,
    /// The lowest chunk at which the tree reported an error, and that error, while chunks below are still open.
    ending: Option<(u64, EndpointError)>,
    /// An answer carried a congestion mark that the node has not been told about.
    congested: bool,
    failed: Option<EndpointError>,
    is_path_narrow: bool,
    failure_reported: bool,
    stats: EndpointStats,
    #[cfg(feature = "planted")]
    bug: Option<sumac_hal::planted::Bug>,
}

impl Endpoint {
    /// Create an endpoint.
    ///
    /// # Panics
    /// If `config.parents` is empty or longer than a node can have shards, or `rank` is not below `ranks`.
    pub fn new(config: EndpointConfig) -> Self {
        let shards = config.parents.len() as u16;
        assert!(Shard::new(0, shards).is_some(), "{shards} shards");
        assert!(config.rank.0 < config.ranks, "{} of {}", config.rank, config.ranks);
        let hops = (0..shards).map(|i| Uplink::new(config.timers, config.salt.rotate_left(u32::from(i) + 1))).collect();
        Self {
            window: config.window_start.clamp(1, config.window_max),
            hops,
            paths: vec![None; config.parents.len()],
            ops: Ops::new(usize::from(config.chunk_len_bytes), RankInfo { rank: config.rank.0, ranks: config.ranks }),
            next: 0,
            stable: ChunkNo(0),
            shared_results: SharedResults::new(config.shared_key.is_some()),
            replies: VecDeque::new(),
            again: VecDeque::with_capacity(MAX_WINDOW as usize),
            ending: None,
            congested: false,
            failed: None,
            is_path_narrow: false,
            failure_reported: false,
            stats: EndpointStats::default(),
            #[cfg(feature = "planted")]
            bug: None,
            config,
        }
    }

    /// Plant a bug in this endpoint.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.bug = Some(bug);
    }

    /// Post an operation. On [`Path::Tree`] it runs through the tree. On any other path the tree carries only its
    /// signature, so that mismatched calls are detected (PROTOCOL 2).
    ///
    /// An operation without elements uses one `Empty`, like a barrier, so that mismatched calls are detected. (PROTOCOL
    /// 1 assigns it no sequence number at all, which lets one rank proceed where another waits.)
    ///
    /// `limit` is how long the operation waits for ranks. All ranks must pass the same limit. Devices with several
    /// shards, and groups of more than 256 ranks, ignore it.
    ///
    /// # Errors
    /// [`PostError`] if the group has failed or too much is in flight.
    pub fn post(&mut self, desc: OpDesc, path: Path, limit: Option<StragglerLimit>) -> Result<OpId, PostError> {
        if let Some(error) = self.failed {
            return Err(error.into());
        }
        let signature = desc.tree_signature(path, self.config.table_version, ChunkNo(self.ops.end()));
        let signature = limit.map_or(signature, |limit| limit.sign(signature));
        self.ops.post(desc, signature, path == Path::Tree, limit)
    }

    /// Handle timers due at `now`: send probes, or give up on the path.
    pub fn handle_timeout(&mut self, now: Instant) {
        for index in 0..self.hops.len() {
            if !self.waits_for(index) {
                continue;
            }
            let hop = &mut self.hops[index];
            if hop.is_dead(now) && !planted!(self, DeadHopUndetected) {
                return self.fail(EndpointError::PathLost);
            }
            if let Some(probe) = hop.poll_probe(now) {
                let seq = self.shard(index).global(probe.from);
                let header = self.header(Kind::Probe, seq, probe.token);
                self.stats.probes += 1;
                let probe = Repr { count: probe.count, bits: probe.held, bits2: probe.lost, ..header };
                self.replies.push_back((self.config.parents[index], probe));
                self.watch_path(index, now);
            }
            if self.poll_path(index, now).is_break() {
                return;
            }
        }
    }

    /// If a hop has stalled, find out whether its path has become narrower.
    fn watch_path(&mut self, index: usize, now: Instant) {
        let config = &self.config;
        if self.hops[index].is_stalled() && needs_probes(&config.parents[index]) {
            let longest = packet_len_max(config.chunk_len_bytes);
            let salt = config.salt.rotate_left(16 + index as u32);
            self.paths[index].get_or_insert_with(|| PathSearch::new(longest, salt, now)).search_again(now);
        }
    }

    /// Send the probes about a path that are due. Breaks if the path is too narrow, with which the group fails.
    fn poll_path(&mut self, index: usize, now: Instant) -> ControlFlow<()> {
        let Some(path) = &mut self.paths[index] else { return ControlFlow::Continue(()) };
        let mut due = Vec::new();
        due.extend(std::iter::from_fn(|| path.poll(now)));
        if path.is_narrow() && !planted!(self, NarrowingUnreported) {
            self.is_path_narrow = true;
            self.fail(EndpointError::PathLost);
            return ControlFlow::Break(());
        }
        // The answer names a seq of its shard, as every packet does.
        let first = self.shard(index).global(0);
        for probe in due {
            let header = self.header(Kind::Probe, first, probe.token);
            let payload_len_bytes = (probe.len_bytes - HEADER_LEN) as u16;
            self.stats.probes += 1;
            self.replies.push_back((self.config.parents[index], Repr { count: 0, payload_len_bytes, ..header }));
        }
        ControlFlow::Continue(())
    }

    /// Return whether the group has failed because its packets are longer than the path carries.
    pub const fn is_path_narrow(&self) -> bool {
        self.is_path_narrow
    }

    /// Return when to call [`Endpoint::handle_timeout`] next, unless a packet arrives before.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        if self.failed.is_some() {
            return None;
        }
        let due = |index: usize| {
            let path = self.paths[index].as_ref().and_then(PathSearch::timeout);
            self.hops[index].timeout().into_iter().chain(path).min()
        };
        (0..self.hops.len()).filter(|&index| self.waits_for(index)).filter_map(due).min()
    }

    /// Return the next event: completions in order, and last, once, the failure.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        if let Some(id) = self.ops.pop_completed() {
            return Some(Event::Completed(id));
        }
        let error = self.failed.filter(|_| !self.failure_reported)?;
        self.failure_reported = true;
        Some(Event::Failed(error))
    }

    /// Return details of the operation whose completion [`Endpoint::poll_event`] returned last.
    pub const fn completion_info(&self) -> CompletionInfo {
        self.ops.completion_info()
    }

    /// Return the number of shards of the leaf device.
    pub const fn shards(&self) -> usize {
        self.hops.len()
    }

    /// Return the ranks that have been excluded from the group.
    pub fn excluded_ranks(&self) -> RankMask {
        self.ops.exclusions.ranks()
    }

    /// Return the first chunk whose result has not landed.
    pub fn have(&self) -> ChunkNo {
        let shards = 0..self.hops.len();
        let first = shards.map(|i| self.shard(i).global(self.hops[i].answered_below())).min();
        ChunkNo(first.map_or(0, |seq| seq.0).min(self.ops.end()))
    }

    /// Return whether another operation can be posted.
    pub fn has_room(&self) -> bool {
        self.ops.has_room()
    }

    /// Return the chunk below which every rank is known to have every result.
    pub const fn stable(&self) -> ChunkNo {
        self.stable
    }

    /// Return the bytes that this rank retains of a chunk of a completed operation: the chunk's result, or its own
    /// contribution where it does not receive that. `None` for a chunk that every rank is known to have, or that
    /// belongs to an operation in flight.
    pub fn kept(&self, seq: ChunkNo) -> Option<Vec<u8>> {
        let kept = self.ops.retained().find(|kept| (kept.from..kept.op.end()).contains(&seq.0))?;
        let mut bytes = Vec::new();
        self.ops.copy_retained(kept, seq.0, &mut bytes);
        Some(bytes)
    }

    /// Return the error that ended the group, if it has failed.
    pub const fn error(&self) -> Option<EndpointError> {
        self.failed
    }

    /// Return the counters.
    pub const fn stats(&self) -> &EndpointStats {
        &self.stats
    }

    /// Return the current window in chunks.
    pub fn window(&self) -> u16 {
        if planted!(self, WindowUnclamped) {
            return self.window.max(1);
        }
        self.window.clamp(1, self.config.window_max)
    }

    /// Close the group, for a reason that the caller detected.
    pub(crate) fn close(&mut self) {
        if planted!(self, MissingFence) {
            return;
        }
        self.fail(EndpointError::PathLost);
    }

    /// Return the sequence number before which answers are still expected: the end of what was posted, or where the
    /// tree ends.
    fn end(&self) -> u64 {
        self.ending.map_or(self.ops.end(), |(at, _)| at)
    }

    /// Return whether a shard still owes expected answers.
    fn waits_for(&self, index: usize) -> bool {
        let first = self.shard(index).global(self.hops[index].answered_below());
        self.ending.is_none_or(|(at, _)| first.0 < at)
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

impl RecoverySource for Endpoint {
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

    /// Results in packets go straight to their destinations; nobody else holds them.
    fn published(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
}
