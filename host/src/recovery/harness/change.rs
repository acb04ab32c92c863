//! The public face of a rank's part in a view change, without connections. Messages are opaque to the caller that
//! carries them.

use super::super::ballot::Message;
use super::super::change;
use super::super::{self as recovery, Ballot, ChunkInventory, Dead, inventory};
use super::{Calls, Chunk, Flaw, TreeSource, chunks_of};
use crate::transport::packets::OpId;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// One attempt to change a view. Later attempts are higher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(Ballot);

impl Attempt {
    /// Return its number, from 1.
    pub fn number(self) -> u32 {
        self.0.attempt
    }
}

/// A message from one rank to another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ViewMessage(Message<recovery::RankReport, recovery::Decision>);

/// What a rank has, as it reports it to the others.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RankReport(recovery::RankReport);

/// The chunks that recovery attempts have written, beside those that came from the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Landed(pub(super) recovery::Landed);

/// The outcome that all surviving ranks have committed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// The dead ranks, in order.
    pub dead: Vec<Rank>,
    /// Operations in the tree that end here or below are complete.
    pub cut: u64,
    /// If ranks are dead: the first call that fails on all survivors that had not returned from it.
    pub operation: u64,
    /// The number of calls that any rank had begun.
    pub begun: u64,
    /// The vote of all ranks in [`Change::executed`]; 0 if votes differed.
    pub vote: u64,
}

/// How a view change ends for a rank that is not part of the outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Too few ranks are left, or the others continue without this one.
    Partitioned,
    /// The deadline passed, and nothing was committed.
    Deadline,
    /// The deadline passed, and other ranks may have committed.
    Unknown,
}

/// What the driver must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Freeze, and report by [`Change::report`] what the rank has. Stop executing any earlier plan.
    Report(Attempt),
    /// Execute this plan, and report that by [`Change::executed`] or [`Change::failed`].
    Execute(Attempt, Plan),
    /// This rank sent an invalid chunk inventory. The attempt has failed.
    Unsound(Rank),
    /// All surviving ranks have executed the plan.
    Commit(Outcome),
    /// This rank is not part of the outcome.
    End(End),
}

/// The plan of an attempt, and the decision that follows from it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Plan {
    /// The surviving ranks, in order.
    pub live: Vec<Rank>,
    /// The chunks to move or recompute, in order; empty at a rank without a tree.
    pub chunks: Vec<Chunk>,
    /// The number of chunks, also at a rank without a tree.
    pub len: u64,
    /// Whether to ask for another tree then.
    pub finds_tree: bool,
    decision: recovery::Decision,
}

/// One rank's part in the change of one view.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Change(pub(super) change::Change);

impl ViewMessage {
    /// Return the reply of a rank that takes no further part.
    pub fn answer_after_end(&self) -> Option<Self> {
        let asks = matches!(self.0, Message::Call { .. } | Message::Prepare { .. } | Message::Promise { .. });
        asks.then_some(Self(Message::Farewell))
    }
}

impl fmt::Display for ViewMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |ballot: &Ballot| format!("{} of {}", ballot.attempt, ballot.coordinator);
        let out = |dead: &Dead| format!("{:?}", dead.keys().map(|rank| rank.0).collect::<Vec<_>>());
        match &self.0 {
            Message::Call { dead } => write!(f, "Call without {}", out(dead)),
            Message::Prepare { ballot, dead } => write!(f, "Prepare {} without {}", name(ballot), out(dead)),
            Message::Promise { ballot, done, .. } => {
                let done = done.as_ref().map_or("nothing".into(), |done| name(&done.ballot));
                write!(f, "Promise {}, done {done}", name(ballot))
            }
            Message::Refuse { ballot } => write!(f, "Refuse for {}", name(ballot)),
            Message::Plan { ballot, reports, .. } => write!(f, "Plan {} for {} ranks", name(ballot), reports.len()),
            Message::Done { ballot, vote } => write!(f, "Done {} with {vote}", name(ballot)),
            Message::Failed { ballot } => write!(f, "Failed {}", name(ballot)),
            Message::Commit { outcome, .. } => write!(f, "Commit {outcome:?}"),
            Message::Farewell => f.write_str("Farewell"),
            Message::Excluded => f.write_str("Excluded"),
        }
    }
}

impl RankReport {
    /// Make the report of a rank after this many trees; `first_call` is the number of the call that was posted first in
    /// the last one.
    pub fn of<'r>(source: impl Into<TreeSource<'r>>, landed: &Landed, first_call: u64, trees: u32) -> Self {
        let source = source.into();
        let source = landed.0.over(&source);
        let ops = recovery::RecoverySource::ops(&source);
        let calls = ops.in_flight().map(|op| (op.end(), first_call + op.id.0)).collect();
        Self::new(inventory(&source), calls, first_call + ops.next_id().0, trees)
    }

    /// Make the report of a rank that has no tree after this many; `open` is the number of its first incomplete call.
    pub fn without_tree(open: u64, trees: u32) -> Self {
        Self::new(ChunkInventory::new(0), Vec::new(), open, trees)
    }

    /// Set the number of calls that the rank has begun, if it is not that of its first incomplete call.
    #[must_use]
    pub fn with_begun(mut self, begun: u64) -> Self {
        self.0.begun = begun;
        self
    }

    /// Set what the rank has promised a controller that offered a tree, and what it was told.
    #[must_use]
    pub fn with_offer(mut self, calls: &Calls) -> Self {
        self.0.offered = calls.offered();
        self
    }

    /// Set the call numbers of operations in the tree, and the number of the first incomplete call that is not there.
    #[must_use]
    pub fn with_calls<'r>(mut self, source: impl Into<TreeSource<'r>>, calls: &(BTreeMap<OpId, u64>, u64)) -> Self {
        let source = source.into();
        let in_flight = recovery::RecoverySource::ops(&source).in_flight();
        self.0.calls = in_flight.filter_map(|op| Some((op.end(), *calls.0.get(&op.id)?))).collect();
        self.0.open = calls.1;
        self
    }

    /// Return whether a rank that has reported `earlier` still has all of that, and nothing of its own has changed. It
    /// may read more from redo slots by now, because its device continues for other ranks until they freeze, too.
    pub fn keeps(&self, earlier: &Self) -> bool {
        let (now, then) = (&self.0.inventory, &earlier.0.inventory);
        let is_kept = |seq: u64| {
            let ((now, _), (then, _)) = (now.state(seq), then.state(seq));
            (now.needs, now.gives) == (then.needs, then.gives) && (now.holds || !then.holds)
        };
        let same = (&self.0.calls, self.0.open) == (&earlier.0.calls, earlier.0.open) && now.ops == then.ops;
        same && (now.from, now.posted()) == (then.from, then.posted()) && (now.from..now.posted()).all(is_kept)
    }

    fn new(inventory: ChunkInventory, calls: Vec<(u64, u64)>, open: u64, trees: u32) -> Self {
        // There are no connections.
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        Self(recovery::RankReport { inventory, calls, open, begun: open, address, trees, offered: None })
    }
}

impl Landed {
    /// Record that a chunk was written.
    pub fn note(&mut self, seq: u64) {
        self.0.note(seq..seq + 1);
    }

    /// Return which elements of an operation's output hold results, as an error would report it.
    pub fn completed_elements<'r>(&self, source: impl Into<TreeSource<'r>>, op: OpId) -> Vec<Range<u64>> {
        recovery::completed_elements(&self.0.over(&source.into()), op)
    }
}

impl Plan {
    fn new(attempt: &change::Attempt, source: Option<TreeSource<'_>>, decision: recovery::Decision) -> Self {
        Self {
            live: attempt.live.keys().copied().collect(),
            chunks: source.map_or_else(Vec::new, |source| chunks_of(&attempt.pieces, &source)),
            len: attempt.pieces.iter().map(|piece| piece.end - piece.first).sum(),
            finds_tree: attempt.finds_tree,
            decision,
        }
    }

    /// Return where the tree is cut: operations that end there or below are complete.
    pub fn cut(&self) -> u64 {
        self.decision.cut
    }

    /// Return why recovery is not possible, as text.
    pub fn failure(&self) -> Option<String> {
        self.decision.failure.map(|why| why.to_string())
    }
}

impl Change {
    /// Take part as `rank` of `ranks`, which has recovered or migrated from this many trees, until `deadline`.
    pub fn new(own: (Rank, u32), trees: u32, has_controller: bool, deadline: Instant) -> Self {
        Self(change::Change::new(own, trees, has_controller, deadline))
    }

    /// Break a rule from the start, to check what it is for.
    #[must_use]
    pub fn with_flaw(mut self, flaw: Option<Flaw>) -> Self {
        self.0.set_flaw(flaw);
        self
    }

    /// Normalize time: timers count as if they had been started at [`Instant::ZERO`].
    pub fn normalize_time(&mut self) {
        self.0.normalize_time();
    }

    /// Return the highest attempt that this rank takes part in.
    pub fn attempt(&self) -> Option<Attempt> {
        self.0.promised().map(Attempt)
    }

    /// The view must change.
    pub fn begin(&mut self) {
        self.0.begin();
    }

    /// Ranks are dead for certain, and there may be no controller any more. Returns whether that is news.
    pub fn report_deaths(&mut self, lost: &[Rank], has_controller: bool) -> bool {
        self.0.report_deaths(lost, has_controller)
    }

    /// A rank's process has ended, or it does not respond: with a controller, the rank is dead for certain.
    pub fn rank_died(&mut self, rank: Rank, has_controller: bool) {
        self.0.rank_died(rank, recovery::authority(has_controller));
    }

    /// Process a message from another rank.
    pub fn handle(&mut self, from: Rank, message: ViewMessage, now: Instant) {
        self.0.handle(from, message.0, now);
    }

    /// Process timeouts.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.0.handle_timeout(now);
    }

    /// Return when [`Change::handle_timeout`] must be called.
    pub fn poll_timeout(&self) -> Instant {
        self.0.poll_timeout()
    }

    /// Return the next message to send, and its receiver.
    pub fn poll_transmit(&mut self) -> Option<(Rank, ViewMessage)> {
        self.0.poll_transmit().map(|(to, message)| (to, ViewMessage(message)))
    }

    /// Return what the driver must do next. `source` is the rank's lost tree.
    pub fn poll_action<'r>(&mut self, source: Option<impl Into<TreeSource<'r>>>, now: Instant) -> Option<Action> {
        let source: Option<TreeSource<'r>> = source.map(Into::into);
        let chunks = |desc: &_| source.map_or(0, |source| source.chunks(desc));
        Some(match self.0.poll_action(source.is_some().then_some(&chunks), now)? {
            change::Action::Report(ballot) => Action::Report(Attempt(ballot)),
            change::Action::Execute(ballot, attempt) => {
                let decision = self.0.decision().expect("it was just made").clone();
                Action::Execute(Attempt(ballot), Plan::new(&attempt, source, decision))
            }
            change::Action::Unsound(rank) => Action::Unsound(rank),
            change::Action::Commit(commit) => {
                let recovery::Outcome { dead, decision, vote } = commit.outcome;
                let recovery::Decision { cut, operation, begun, .. } = decision;
                Action::Commit(Outcome { dead, cut, operation, begun, vote })
            }
            change::Action::End(recovery::End::Partitioned) => Action::End(End::Partitioned),
            change::Action::End(recovery::End::Deadline) => Action::End(End::Deadline),
            change::Action::End(recovery::End::Unknown) => Action::End(End::Unknown),
        })
    }

    /// Return how many trees the ranks have recovered or migrated from, from the commit on.
    pub fn agreed_trees(&self) -> u32 {
        self.0.agreed().0
    }

    /// Report what this rank has, in reply to [`Action::Report`].
    pub fn report(&mut self, attempt: Attempt, report: RankReport) {
        self.0.report(attempt.0, report.0);
    }

    /// An attempt's plan has been executed here; `vote` is a value that is committed if all ranks agree on it.
    pub fn executed(&mut self, attempt: Attempt, vote: u64) {
        self.0.executed(attempt.0, vote);
    }

    /// An attempt's plan failed here.
    pub fn failed(&mut self, attempt: Attempt, now: Instant) {
        self.0.failed(attempt.0, now);
    }
}
