//! What an endpoint is made from, and what it asks for: runs to submit and bytes to stage.

use crate::transport::packets::OpId;
use std::ops::Range;
use sumac_hal::dma::{Address, RegionKey, Span};
use sumac_hal::ids::{Epoch, GroupId, Rank};
use sumac_hal::mmio::{Contribution, OperationLimit};

/// The registered bounce buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BounceConfig {
    /// Its region.
    pub region: RegionKey,
    /// Its length in bytes: at least two chunks, and a multiple of 64 and of the device's alignment.
    pub len_bytes: u64,
}

/// Parameters of the group and the device.
#[derive(Debug, Clone)]
pub struct ZeroCopyConfig {
    /// The group.
    pub group: GroupId,
    /// Its epoch.
    pub epoch: Epoch,
    /// This rank.
    pub rank: Rank,
    /// Number of ranks; greater than `rank`.
    pub ranks: u32,
    /// The payload limit of a packet in this group in bytes, which is the chunk length.
    pub chunk_len_bytes: u16,
    /// The maximum number of chunks that the device accepts ahead of the oldest open one; no run is longer.
    pub window_max: u16,
    /// Version of the cost table, part of every signature.
    pub table_version: u32,
    /// The maximum number of submitted and unanswered chunks: the places of the completion ring.
    pub in_flight_max: u32,
    /// Alignment in bytes that the device's engine requires of addresses.
    pub alignment_bytes: u32,
    /// The bounce buffer.
    pub bounce: BounceConfig,
    /// Whether all results land in the bounce buffer and are retained here until they are stable: for devices whose
    /// redo slots cannot be read.
    pub lands_in_bounce: bool,
}

/// Addresses of an operation's buffers in registered memory; `None` for one that is elsewhere, or absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Places {
    /// The rank's contribution.
    pub input: Option<Address>,
    /// The destination of its result.
    pub output: Option<Address>,
    /// The part of the output's region that the device itself may write to: whole pages that hold nothing but this
    /// output, so that they can be revoked while others write beside them. `None`: all of the output.
    pub writable: Option<Span>,
}

/// Input bytes to copy into the bounce buffer before their run is submitted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageIn {
    /// The operation.
    pub op: OpId,
    /// The range of its input.
    pub from: Range<usize>,
    /// The offset in the bounce buffer.
    pub to: usize,
}

/// A result to copy from the bounce buffer to an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageOut {
    /// The operation.
    pub op: OpId,
    /// The range of the bounce buffer.
    pub from: Range<usize>,
    /// The offset in its output.
    pub to: usize,
}

/// Chunks submitted in one entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// An entry to submit first, if the operation that begins here limits how long it waits for ranks.
    pub limit: Option<OperationLimit>,
    /// The contribution entry.
    pub contribution: Contribution,
    /// A copy to make first.
    pub stage_in: Option<StageIn>,
}
