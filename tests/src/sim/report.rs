//! What a run did, and what can go wrong with it.

use super::coverage::{DROPS_UNREACHABLE, Mark, Seen};
use std::time::Duration;
use sumac::transport::packets::EndpointError;
use sumac_hal::ctrl::{Counters, DropReason};
use thiserror::Error;

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A rank has another result than the oracle.
    #[error("group {group} rank {rank} operation {op}: byte {byte} is {found:#04x}, expected {expected:#04x}")]
    Wrong {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// The operation's index.
        op: usize,
        /// The first wrong byte, of the output or, if that is as it should be, of the input.
        byte: usize,
        /// What it is.
        found: u8,
        /// The oracle's.
        expected: u8,
    },
    /// A chunk of an operation that failed is neither as it was nor a whole result.
    #[error("group {group} rank {rank} operation {op}: chunk {chunk} is torn")]
    Torn {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// The operation's index.
        op: usize,
        /// The chunk's index in the operation.
        chunk: usize,
    },
    /// Nothing happens any more, or it takes too long, and somebody still waits.
    #[error("hang at {at:?}: {waiting} ranks wait, the first is rank {rank} in group {group} after {done} operations")]
    Hang {
        /// The virtual time.
        at: Duration,
        /// Ranks, counted once a group, without an end.
        waiting: usize,
        /// The group's index of the first.
        group: usize,
        /// The first.
        rank: usize,
        /// Its completed operations.
        done: u64,
    },
    /// A rank ended otherwise than the scenario calls for.
    #[error("group {group} rank {rank} ended after {done} operations with {error:?}; expected {expected}")]
    End {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// Its completed operations.
        done: u64,
        /// What it was told.
        error: Option<EndpointError>,
        /// What should have been.
        expected: String,
    },
    /// A rank that ranks died around ended otherwise than it may.
    #[error("group {group} rank {rank} ended after {done} operations with {end}")]
    RankEnd {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// Its completed operations.
        done: u64,
        /// How.
        end: String,
    },
    /// A rank that depends on a dead device was not told within the limit.
    #[error("group {group} rank {rank} was not told of the dead device by {at:?}")]
    Late {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// The limit.
        at: Duration,
    },
    /// An operation completed twice or out of order.
    #[error("group {group} rank {rank}: completion {found} came where {expected} was due")]
    Completion {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// What came.
        found: u64,
        /// What was due.
        expected: u64,
    },
    /// An operation completed that a rank has not called yet: a barrier would have let somebody through.
    #[error("group {group} rank {rank}: operation {op} completed when {called} ranks had called it")]
    Early {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// The operation's index.
        op: usize,
        /// How many had.
        called: usize,
    },
    /// An operation returned, and a chunk that other ranks may still lack is not kept.
    #[error("group {group} rank {rank} operation {op}: returned without keeping the result of chunk {chunk}")]
    NotKept {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// The operation's index.
        op: usize,
        /// The chunk's index in the operation.
        chunk: usize,
    },
    /// A device refused a valid request.
    #[error("device {device} refused: {response}")]
    Refused {
        /// The device's index.
        device: usize,
        /// What it said.
        response: String,
    },
    /// A repair that ought to be possible is not.
    #[error("group {group} rank {rank} can't repair: {why}")]
    Unrepairable {
        /// The group's index.
        group: usize,
        /// The rank that found out.
        rank: usize,
        /// Why not.
        why: String,
    },
    /// A rank has taken something in after it had told the others what it has.
    #[error("group {group} rank {rank} view {view}: what it has is no longer what it told the others")]
    NotFenced {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// The view.
        view: u32,
    },
    /// A device's engine has written where it may not: beside a chunk's place, or to memory that was fenced or given back.
    #[error(
        "rank {rank} life {life}: the engine writes {len_bytes} bytes at {offset_bytes}, which is not its to write"
    )]
    StrayWrite {
        /// The rank.
        rank: usize,
        /// The life of the group.
        life: u64,
        /// Where in its region.
        offset_bytes: u64,
        /// How much.
        len_bytes: u64,
    },
    /// Registered memory has changed, and nobody has said so.
    #[error("rank {rank} operation {op}: its registered memory is not what was written to it")]
    Strayed {
        /// The rank.
        rank: usize,
        /// The operation's index.
        op: usize,
    },
    /// Two that work at the same time touch the same memory.
    #[error("{what}")]
    Quarrel {
        /// Who, and whom.
        what: String,
    },
    /// Ranks have decided different things about a lost tree.
    #[error("group {group} view {view}: ranks decide different things")]
    Disagreement {
        /// The group's index.
        group: usize,
        /// The view.
        view: u32,
    },
    /// A chunk is computed that some rank has, or a second time.
    #[error("group {group} view {view}: chunk {seq} is computed again")]
    Again {
        /// The group's index.
        group: usize,
        /// The view.
        view: u32,
        /// The chunk.
        seq: u64,
    },
    /// Numbers that have to be equal are not.
    #[error("{what}: {found}, expected {expected}")]
    Conservation {
        /// What was counted.
        what: &'static str,
        /// The count.
        found: u64,
        /// What it should be.
        expected: u64,
    },
    /// A queue grew past its limit.
    #[error("{what}: {found}, more than {limit}")]
    Limit {
        /// Which.
        what: &'static str,
        /// Its length.
        found: u64,
        /// Its limit.
        limit: u64,
    },
    /// The code under test panicked.
    #[error("panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
    /// Somebody has something to send or waits for something when all is over.
    #[error("{who} is not quiet at the end")]
    NotQuiet {
        /// Who.
        who: String,
    },
}

impl Violation {
    /// Return what found it, in a word or a few.
    pub fn oracle(&self) -> &'static str {
        match self {
            Self::Wrong { .. } => "wrong result",
            Self::Torn { .. } => "torn chunk",
            Self::Hang { .. } => "hang",
            Self::End { .. } | Self::RankEnd { .. } => "wrong end",
            Self::Late { .. } => "told late",
            Self::Completion { .. } => "order of completions",
            Self::Early { .. } => "early completion",
            Self::NotKept { .. } => "retention",
            Self::Refused { .. } => "refused request",
            Self::Unrepairable { .. } => "unrepairable",
            Self::NotFenced { .. } => "not fenced",
            Self::StrayWrite { .. } | Self::Strayed { .. } => "stray write",
            Self::Quarrel { .. } => "quarrel",
            Self::Disagreement { .. } => "disagreement",
            Self::Again { .. } => "computed again",
            Self::Conservation { what, .. } | Self::Limit { what, .. } => what,
            Self::Panicked { .. } => "panic",
            Self::NotQuiet { .. } => "not quiet",
        }
    }
}

/// How large something was, at least and at most.
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
    /// What is in `of`, and how far each has to reach where everything is met.
    pub const LIMITS: [(&'static str, [u64; 2]); 4] =
        [("devices", [1, 64]), ("levels", [1, 4]), ("ranks", [1, 256]), ("tenants", [1, 4])];

    /// Of one run, with these levels of trees.
    pub(super) const fn of(devices: u64, levels: [u64; 2], ranks: u64, tenants: u64) -> Self {
        Self { of: [[devices, devices], levels, [ranks, ranks], [tenants, tenants]] }
    }

    /// Note how many levels a tree has.
    pub(super) fn note_levels(&mut self, levels: u64) {
        self.of[1] = [self.of[1][0].min(levels), self.of[1][1].max(levels)];
    }

    /// Add another run's.
    pub fn merge(&mut self, other: &Self) {
        for ([least, most], [other_least, other_most]) in self.of.iter_mut().zip(other.of) {
            (*least, *most) = ((*least).min(other_least), (*most).max(other_most));
        }
    }
}

/// What a run did; of several runs, added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// Hash over everything that happened on the links: equal for equal seeds.
    pub log_hash: u64,
    /// Virtual time until the last rank had its last answer or error.
    pub took: Duration,
    /// Packets sent by all.
    pub packets: u64,
    /// The most packets on their way at any time.
    pub in_flight_most: u64,
    /// Packets lost because a receiver's queue was full.
    pub incast_drops: u64,
    /// Packets marked because a receiver's queue was filling.
    pub marked: u64,
    /// The devices' counters, added up.
    pub counters: Counters,
    /// Contributions that ranks sent again.
    pub retransmits: u64,
    /// Probes that ranks sent.
    pub probes: u64,
    /// Results that came to ranks at a shared address.
    pub shared_results: u64,
    /// Packets that ranks dropped.
    pub rank_drops: u64,
    /// Ranks that got every result, counted once a group.
    pub completed: u64,
    /// Ranks that were told `Mismatch`.
    pub mismatches: u64,
    /// Ranks that were told `Unsupported`.
    pub unsupported: u64,
    /// Ranks that were told `PathLost`.
    pub paths_lost: u64,
    /// Ranks that were told `GroupLost`.
    pub groups_lost: u64,
    /// Ranks that were told that others are dead.
    pub ranks_failed: u64,
    /// Ranks that were told that they are a minority.
    pub partitioned: u64,
    /// Ranks that were told that a view change took too long.
    pub undecided: u64,
    /// Ranks that have died.
    pub killed: u64,
    /// Packets that an attacker sent.
    pub attacks: u64,
    /// Repairs: trees that a group has lost, counted once a group and view.
    pub view_changes: u64,
    /// Operations that repairs have completed, counted once a rank.
    pub repairs: u64,
    /// What ranks have sent each other to repair, in bytes.
    pub repair_bytes: u64,
    /// What the state machines went through.
    pub seen: Seen,
    /// How large clusters were.
    pub extents: Extents,
}

impl Report {
    /// Add another run's numbers.
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

    /// Note how a rank ended.
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
            ("repaired operations", &mut self.repairs),
            ("repair bytes", &mut self.repair_bytes),
        ]
    }

    /// Return every count by name: what a swarm has covered.
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

    /// Return every step of a state machine by name, and how often it was seen; and why one is never seen.
    pub fn transitions(&self) -> Vec<(&'static str, u64, Option<&'static str>)> {
        let why = |mark: Mark| Mark::UNREACHABLE.iter().find(|(other, _)| *other == mark).map(|(_, why)| *why);
        Mark::ALL.iter().map(|&mark| (mark.name(), self.seen.count(mark), why(mark))).collect()
    }

    /// Return every reason to drop a packet, and how often it was met at a device; and why one is never met.
    pub fn drops(&self) -> Vec<(&'static str, u64, Option<&'static str>)> {
        let why = |reason| DROPS_UNREACHABLE.iter().find(|(other, _)| *other == reason).map(|(_, why)| *why);
        DropReason::ALL.map(|reason| (reason.name(), self.counters.dropped(reason), why(reason))).to_vec()
    }
}
