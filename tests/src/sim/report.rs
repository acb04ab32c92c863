//! The report of a run, and its possible violations.

use super::coverage::{Coverage, DROPS_UNREACHABLE, Mark};
use std::time::Duration;
use sumac::transport::packets::EndpointError;
use sumac_hal::ctrl::{Counters, DropReason};
use thiserror::Error;

/// A violation found by a check.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A rank's result differs from the oracle's.
    #[error("group {group} rank {rank} operation {op}: byte {byte} is {found:#04x}, expected {expected:#04x}")]
    Wrong {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// Index of the operation.
        op: usize,
        /// Position of the first wrong byte: of the output, or of the input if the output is right.
        byte: usize,
        /// The byte found.
        found: u8,
        /// The byte expected.
        expected: u8,
    },
    /// A chunk of a failed operation is neither unchanged nor a complete result.
    #[error("group {group} rank {rank} operation {op}: chunk {chunk} is torn")]
    Torn {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// Index of the operation.
        op: usize,
        /// Index of the chunk in the operation.
        chunk: usize,
    },
    /// The run stalled or takes too long, and ranks still wait.
    #[error("hang at {at:?}: {waiting} ranks wait, the first is rank {rank} in group {group} after {done} operations")]
    Hang {
        /// The virtual time.
        at: Duration,
        /// Ranks without an end, counted once per group.
        waiting: usize,
        /// Group of the first.
        group: usize,
        /// The first such rank.
        rank: usize,
        /// Number of its completed operations.
        done: u64,
    },
    /// A rank's end differs from what the scenario requires.
    #[error("group {group} rank {rank} ended after {done} operations with {error:?}; expected {expected}")]
    End {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// Number of its completed operations.
        done: u64,
        /// The error found.
        error: Option<EndpointError>,
        /// What was expected.
        expected: String,
    },
    /// A survivor of dead ranks ended in a way that is not allowed.
    #[error("group {group} rank {rank} ended after {done} operations with {end}")]
    RankEnd {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// Number of its completed operations.
        done: u64,
        /// How it ended.
        end: String,
    },
    /// A rank that depends on a dead device got no error within the limit.
    #[error("group {group} rank {rank} got no error for the dead device by {at:?}")]
    Late {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// The limit.
        at: Duration,
    },
    /// An operation completed twice or out of order.
    #[error("group {group} rank {rank}: completion {found}, expected {expected}")]
    Completion {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// The completion found.
        found: u64,
        /// The completion expected.
        expected: u64,
    },
    /// An operation completed before every rank had called it: a barrier would have let a rank through.
    #[error("group {group} rank {rank}: operation {op} completed when {called} ranks had called it")]
    Early {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// Index of the operation.
        op: usize,
        /// How many ranks had called it.
        called: usize,
    },
    /// An operation returned without keeping a chunk that other ranks may lack.
    #[error("group {group} rank {rank} operation {op}: returned without keeping the result of chunk {chunk}")]
    NotKept {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// Index of the operation.
        op: usize,
        /// Index of the chunk in the operation.
        chunk: usize,
    },
    /// The controller does what it must not do.
    #[error("the controller {what}")]
    Controller {
        /// What it does.
        what: String,
    },
    /// A device refused a valid request.
    #[error("device {device} refused: {response}")]
    Refused {
        /// Index of the device.
        device: usize,
        /// Its response.
        response: String,
    },
    /// A recovery that should be possible failed.
    #[error("group {group} rank {rank} cannot recover: {why}")]
    Unrecoverable {
        /// Index of the group.
        group: usize,
        /// The rank that found it.
        rank: usize,
        /// The reason.
        why: String,
    },
    /// A rank accepted data after it had sent its report.
    #[error("group {group} rank {rank} view {view}: its state changed after its report to the others")]
    NotFenced {
        /// Index of the group.
        group: usize,
        /// The rank.
        rank: usize,
        /// The view.
        view: u32,
    },
    /// A device's engine wrote where it must not: outside a chunk's place, or to memory that was fenced or returned.
    #[error(
        "rank {rank} incarnation {incarnation}: the engine writes {len_bytes} bytes at {offset_bytes}, which is not its to write"
    )]
    StrayWrite {
        /// The rank.
        rank: usize,
        /// Incarnation of the group.
        incarnation: u64,
        /// Offset in its region.
        offset_bytes: u64,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// Registered memory changed without an announced write.
    #[error("rank {rank} operation {op}: its registered memory differs from what was written to it")]
    UnexpectedChange {
        /// The rank.
        rank: usize,
        /// Index of the operation.
        op: usize,
    },
    /// Two concurrent operations access the same memory.
    #[error("{what}")]
    Conflict {
        /// Which ones.
        what: String,
    },
    /// Ranks made different decisions about a lost tree.
    #[error("group {group} view {view}: ranks make different decisions")]
    Disagreement {
        /// Index of the group.
        group: usize,
        /// The view.
        view: u32,
    },
    /// A chunk was computed that some rank has, or a second time.
    #[error("group {group} view {view}: chunk {seq} is computed again")]
    Recomputed {
        /// Index of the group.
        group: usize,
        /// The view.
        view: u32,
        /// The chunk.
        seq: u64,
    },
    /// Counts that must be equal are not.
    #[error("{what}: {found}, expected {expected}")]
    Conservation {
        /// What was counted.
        what: &'static str,
        /// The count.
        found: u64,
        /// The expected count.
        expected: u64,
    },
    /// A queue exceeded its limit.
    #[error("{what}: {found}, more than {limit}")]
    Limit {
        /// Which queue.
        what: &'static str,
        /// Its length.
        found: u64,
        /// Its limit.
        limit: u64,
    },
    /// The code under test panicked.
    #[error("panicked: {message}")]
    Panicked {
        /// The panic message.
        message: String,
    },
    /// A component has something to send or wait for at the end.
    #[error("{who} is not quiet at the end")]
    NotQuiet {
        /// Which one.
        who: String,
    },
}

impl Violation {
    /// Return a short name of the check that found it.
    pub fn oracle(&self) -> &'static str {
        match self {
            Self::Wrong { .. } => "wrong result",
            Self::Torn { .. } => "torn chunk",
            Self::Hang { .. } => "hang",
            Self::End { .. } | Self::RankEnd { .. } => "wrong end",
            Self::Late { .. } => "late error",
            Self::Completion { .. } => "order of completions",
            Self::Early { .. } => "early completion",
            Self::NotKept { .. } => "retention",
            Self::Controller { .. } => "controller",
            Self::Refused { .. } => "refused request",
            Self::Unrecoverable { .. } => "unrecoverable",
            Self::NotFenced { .. } => "not fenced",
            Self::StrayWrite { .. } | Self::UnexpectedChange { .. } => "stray write",
            Self::Conflict { .. } => "conflict",
            Self::Disagreement { .. } => "disagreement",
            Self::Recomputed { .. } => "recomputed",
            Self::Conservation { what, .. } | Self::Limit { what, .. } => what,
            Self::Panicked { .. } => "panic",
            Self::NotQuiet { .. } => "not quiet",
        }
    }
}

/// The range of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Devices, levels of trees, ranks, tenants.
    pub of: [[u64; 2]; 4],
}

impl Default for Extents {
    fn default() -> Self {
        Self { of: [[u64::MAX, 0]; 4] }
    }
}

impl Extents {
    /// The names in `of`, and the range that each must reach in full coverage.
    pub const LIMITS: [(&'static str, [u64; 2]); 4] =
        [("devices", [1, 64]), ("levels", [1, 4]), ("ranks", [1, 256]), ("tenants", [1, 4])];

    /// The extents of one run, with these levels of trees.
    pub(super) const fn of(devices: u64, levels: [u64; 2], ranks: u64, tenants: u64) -> Self {
        Self { of: [[devices, devices], levels, [ranks, ranks], [tenants, tenants]] }
    }

    /// Record the levels of a tree.
    pub(super) fn note_levels(&mut self, levels: u64) {
        self.of[1] = [self.of[1][0].min(levels), self.of[1][1].max(levels)];
    }

    /// Merge another run's extents.
    pub fn merge(&mut self, other: &Self) {
        for ([least, most], [other_least, other_most]) in self.of.iter_mut().zip(other.of) {
            (*least, *most) = ((*least).min(other_least), (*most).max(other_most));
        }
    }
}

/// Counts of one run, or the sum of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// Hash over all link events: equal for equal seeds.
    pub log_hash: u64,
    /// Virtual time until the last rank had its last answer or error.
    pub took: Duration,
    /// Packets sent in total.
    pub packets: u64,
    /// Maximum number of packets in flight, without duplicates made on the way: those stay for as long as a rule says.
    pub in_flight_most: u64,
    /// Packets lost to full receive queues.
    pub incast_drops: u64,
    /// Packets marked because a receive queue was filling.
    pub marked: u64,
    /// Sum of all device counters.
    pub counters: Counters,
    /// Contributions that ranks resent.
    pub retransmits: u64,
    /// Probes that ranks sent.
    pub probes: u64,
    /// Results received by ranks at shared addresses.
    pub shared_results: u64,
    /// Packets that ranks dropped.
    pub rank_drops: u64,
    /// Ranks with every result, counted once per group.
    pub completed: u64,
    /// Ranks that ended with `Mismatch`.
    pub mismatches: u64,
    /// Ranks that ended with `Unsupported`.
    pub unsupported: u64,
    /// Ranks that ended with `PathLost`.
    pub paths_lost: u64,
    /// Ranks that ended with `GroupLost`.
    pub groups_lost: u64,
    /// Ranks that ended because others are dead.
    pub ranks_failed: u64,
    /// Ranks that ended as part of a minority.
    pub partitioned: u64,
    /// Ranks that ended because a view change took too long.
    pub undecided: u64,
    /// Ranks that have died.
    pub killed: u64,
    /// Packets that an attacker sent.
    pub attacks: u64,
    /// Lost trees, counted once per group and view.
    pub view_changes: u64,
    /// Operations completed by recoveries, counted once per rank.
    pub recoveries: u64,
    /// Bytes that ranks sent each other for recoveries.
    pub recovery_bytes: u64,
    /// Covered transitions.
    pub seen: Coverage,
    /// Sizes of the clusters.
    pub extents: Extents,
}

impl Report {
    /// Add another run's counts.
    pub fn merge(&mut self, other: &Self) {
        self.log_hash = crate::oracle::weight(&[self.log_hash, other.log_hash]);
        self.took += other.took;
        self.in_flight_most = self.in_flight_most.max(other.in_flight_most);
        self.counters.merge(&other.counters);
        self.seen.merge(&other.seen);
        self.extents.merge(&other.extents);
        for ((_, sum), (_, n)) in self.marks().into_iter().zip(other.clone().marks()) {
            *sum += *n;
        }
    }

    /// Count how a rank ended.
    pub(super) fn count_end(&mut self, error: Option<EndpointError>) {
        *match error {
            None => &mut self.completed,
            Some(EndpointError::Mismatch { .. }) => &mut self.mismatches,
            Some(EndpointError::Unsupported(_)) => &mut self.unsupported,
            Some(EndpointError::PathLost) => &mut self.paths_lost,
            Some(_) => &mut self.groups_lost,
        } += 1;
    }

    /// Return the counts besides the devices' counters, by name.
    fn marks(&mut self) -> [(&'static str, &mut u64); 20] {
        [
            ("packets", &mut self.packets),
            ("incast drops", &mut self.incast_drops),
            ("marked", &mut self.marked),
            ("rank retransmits", &mut self.retransmits),
            ("rank probes", &mut self.probes),
            ("rank shared results", &mut self.shared_results),
            ("rank drops", &mut self.rank_drops),
            ("ends: complete", &mut self.completed),
            ("ends: mismatch", &mut self.mismatches),
            ("ends: unsupported", &mut self.unsupported),
            ("ends: path lost", &mut self.paths_lost),
            ("ends: group lost", &mut self.groups_lost),
            ("ends: ranks failed", &mut self.ranks_failed),
            ("ends: partitioned", &mut self.partitioned),
            ("ends: undecided", &mut self.undecided),
            ("ranks killed", &mut self.killed),
            ("attacks", &mut self.attacks),
            ("view changes", &mut self.view_changes),
            ("recovered operations", &mut self.recoveries),
            ("recovery bytes", &mut self.recovery_bytes),
        ]
    }

    /// Return every count by name, for the coverage of a swarm.
    pub fn coverage(&self) -> Vec<(String, u64)> {
        let counters = &self.counters;
        let named = [
            ("contributions", counters.contributions),
            ("answers shared", counters.answers_shared),
            ("answers resent", counters.answers_resent),
            ("contributions resent", counters.contributions_resent),
            ("naks", counters.naks),
            ("probes in", counters.probes_in),
            ("probes out", counters.probes_out),
            ("window cuts", counters.window_cuts),
        ];
        let drops = DropReason::ALL.map(|reason| (format!("drop: {reason}"), counters.dropped(reason)));
        let mut own = *self;
        let own = own.marks().map(|(name, n)| (name.to_owned(), *n));
        named.map(|(name, n)| (name.to_owned(), n)).into_iter().chain(drops).chain(own).collect()
    }

    /// Return every transition by name, its count, and the reason if it is unreachable.
    pub fn transitions(&self) -> Vec<(&'static str, u64, Option<&'static str>)> {
        let why = |mark: Mark| Mark::UNREACHABLE.iter().find(|(other, _)| *other == mark).map(|(_, why)| *why);
        Mark::ALL.iter().map(|&mark| (mark.name(), self.seen.count(mark), why(mark))).collect()
    }

    /// Return every drop reason, its count on devices, and the reason if it is unreachable.
    pub fn drops(&self) -> Vec<(&'static str, u64, Option<&'static str>)> {
        let why = |reason| DROPS_UNREACHABLE.iter().find(|(other, _)| *other == reason).map(|(_, why)| *why);
        DropReason::ALL.map(|reason| (reason.name(), self.counters.dropped(reason), why(reason))).to_vec()
    }
}
