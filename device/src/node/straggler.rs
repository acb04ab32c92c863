//! Stragglers: ranks that do not contribute to an operation within its limit (PROTOCOL 10).
//!
//! ```text
//! a node whose oldest chunk waits too long     its parent                       the root
//!   holds back missing children       Late ->    holds back, asks its     Late ->  decides once
//!                                                other nodes (Late down)
//!   excludes them for good            <- Cut     the same                <- Cut    continues without them,
//!   or: fails                         <- Nak     the same                <- Nak    or: fails the group
//! ```
//!
//! Invariants:
//! - The root decides at most once per operation, before its first result: only while the operation's first chunk is
//!   the oldest without one.
//! - A child has arrived if it contributed to any chunk from the operation's first on. Packets of other children are
//!   dropped during the hold, so that what was reported upwards stays true until the root has decided.
//! - An excluded child counts as `Empty` with everything delivered, in this and every later chunk. So no result
//!   contains anything of it after the decision, and no slot and no window waits for it.
//! - Decisions are numbered. A receiver of an answer made under a later decision than it knows drops the answer and
//!   requests the decision: no rank takes a result without knowing which ranks are in it.
//! - Only operations with a limit can exclude ranks; all others wait.
//!
//! For zero-copy children, contributions held back stay in the ring, as if the window were closed. A decision reaches
//! such a rank through its ring, before any answer. Entries of an excluded rank end with an error once no chain touches
//! its memory.
//!
//! Groups larger than a [`RankMask`] and devices with several shards do not support exclusion: their ranks do not post
//! operations with a limit.

mod messages;

use super::GroupCtx;
use crate::node::group::{Child, ChildKind, Failure, Group};
use crate::sets::ChildSet;
use crate::slot::{Slot, State};
use crate::trace::Trace;
use core::time::Duration;
use sumac_hal::ctrl::{DropReason, TreeConfig};
use sumac_hal::ids::ChunkNo;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, NakReason, RankMask, Repr, StragglerLimit};

/// Decisions kept for children that ask. The root decides again only after every remaining rank knows the oldest.
const DECISIONS_KEPT: usize = 4;

/// A decision to exclude ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Decision {
    /// The first chunk without them.
    first: u64,
    ranks: RankMask,
}

/// A hold: contributions of missing children are dropped while the root has yet to decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Hold {
    /// The operation: its first chunk, its description and its limit.
    first: u64,
    op: OpDesc,
    limit: StragglerLimit,
    /// Children that have arrived and may continue.
    arrived: ChildSet,
    /// Child nodes that have yet to report which ranks are missing below them.
    awaiting: ChildSet,
    /// Ranks known to be missing.
    missing: RankMask,
    /// When to repeat the report or the queries.
    retry_at: Instant,
    /// When a queried node or the parent last replied.
    last_reply_at: Instant,
}

/// Excluded members of a group, and a hold in progress.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct View {
    /// Excluded children, with all ranks below them.
    pub(crate) excluded: ChildSet,
    /// Children that the latest decision has yet to be sent to.
    pub(crate) to_notify: ChildSet,
    /// Number of decisions so far.
    number: u16,
    /// The latest decisions, by number modulo the array length.
    decisions: [Decision; DECISIONS_KEPT],
    /// All excluded ranks.
    excluded_ranks: RankMask,
    /// Ranks whose absence failed the group.
    missing_ranks: RankMask,
    hold: Option<Hold>,
    /// When the last check found nobody missing; the next one waits for a retry interval.
    checked_at: Option<Instant>,
    /// Set while a node introduces itself to its parent, which could not query it otherwise: when to repeat, and until
    /// when.
    introduction: Option<(Instant, Instant)>,
}

impl View {
    pub(crate) fn new(tree: &TreeConfig, now: Instant) -> Self {
        let has_whole_parent = tree.parent.as_ref().is_some_and(|parent| parent.data_addrs.len() == 1);
        let introduction = has_whole_parent && !tree.ranks.is_empty();
        Self {
            excluded: ChildSet::EMPTY,
            to_notify: ChildSet::EMPTY,
            number: 0,
            decisions: [Decision { first: 0, ranks: RankMask::EMPTY }; DECISIONS_KEPT],
            excluded_ranks: RankMask::EMPTY,
            missing_ranks: RankMask::EMPTY,
            hold: None,
            checked_at: None,
            introduction: introduction.then_some((now, now + INTRODUCTION_TIMEOUT)),
        }
    }

    pub(crate) const fn number(&self) -> u16 {
        self.number
    }

    /// Return whether no child is excluded, and none may be about to be.
    pub(super) fn has_everybody(&self) -> bool {
        self.hold.is_none() && self.excluded.is_empty() && self.excluded_ranks.is_empty()
    }

    /// Return the ranks whose absence failed the group.
    pub(super) const fn missing_ranks(&self) -> RankMask {
        self.missing_ranks
    }

    /// Return decision `number`, if it is still kept: the first chunk that it concerns, and the ranks it excludes.
    pub(super) fn exclusion(&self, number: u16) -> Option<(ChunkNo, RankMask)> {
        self.decision(number).map(|Decision { first, ranks }| (ChunkNo(first), ranks))
    }

    /// Return whether the members of an operation that begins at `first`, or of a later one, are decided.
    fn is_decided(&self, first: u64) -> bool {
        self.decision(self.number).is_some_and(|decision| decision.first >= first)
    }

    /// Return decision `number`, if it is still kept.
    fn decision(&self, number: u16) -> Option<Decision> {
        let kept = number > 0 && number <= self.number && usize::from(self.number - number) < DECISIONS_KEPT;
        kept.then(|| self.decisions[usize::from(number) % DECISIONS_KEPT])
    }
}

/// Where ranks can be excluded, the parent has one shard.
const ONLY_HOP: usize = 0;

/// How long a node introduces itself to a parent that does not reply.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(5);

/// Return whether a group supports exclusion: its ranks are known and fit a mask, and neither this device nor its
/// parent has several shards.
fn supports_exclusion(group: &Group, children: &[Child], shard: Shard) -> bool {
    let known = |child: &Child| match child.kind {
        ChildKind::Unknown => false,
        ChildKind::Rank(rank) => (rank.0 as usize) < RankMask::RANKS,
        ChildKind::Node => true,
    };
    shard.shards() == 1 && group.hops().len <= 1 && children.iter().all(known)
}

/// Return the children that have contributed to any chunk from `first` on and are not excluded.
fn arrived(children: &[Child], excluded: &ChildSet, first: u64) -> ChildSet {
    let mut arrived = ChildSet::EMPTY;
    let came = children.iter().enumerate().filter(|(index, child)| child.top > first && !excluded.contains(*index));
    came.for_each(|(index, _)| arrived.insert(index));
    arrived
}

/// Return when the limit of the oldest unanswered chunk expires, if children are missing there.
fn limit_at(group: &Group, children: &[Child], slots: &[Slot], shard: Shard) -> Option<Instant> {
    let first = group.answered_below;
    let slot = &slots[(first % slots.len() as u64) as usize];
    let waits =
        !group.view.is_decided(first) && slot.holds(first) && slot.state == State::Filling && slot.op_first == first;
    let limit = slot.limit.filter(|_| waits && supports_exclusion(group, children, shard))?;
    let all = arrived(children, &group.view.excluded, first).len() + group.view.excluded.len() == children.len();
    let at = slot.first_at? + Duration::from_micros(limit.us.into());
    let due = group.view.checked_at.map_or(at, |looked| at.max(looked + retry_interval(group)));
    (!all).then_some(due)
}

/// Return how long to wait before repeating a report or query.
fn retry_interval(group: &Group) -> Duration {
    Duration::from_micros(group.config.timers.probe_max_us.into())
}

impl super::Node<'_> {
    /// Return when a group has to check for stragglers next.
    pub(super) fn straggler_timeout(&self, group: &Group) -> Option<Instant> {
        if group.failed.is_some() {
            return None;
        }
        let children = &self.storage.children[group.children.range()];
        let slots = &self.storage.slots[group.slots.range()];
        let due = match &group.view.hold {
            Some(hold) => Some(hold.retry_at),
            None => limit_at(group, children, slots, self.common.config.shard),
        };
        let introduction = group.view.introduction.map(|(at, _)| at);
        due.into_iter().chain(introduction).min()
    }
}

impl GroupCtx<'_> {
    /// Handle expired straggler timers.
    pub(super) fn poll_stragglers(&mut self, now: Instant) {
        if self.group.failed.is_some() {
            return;
        }
        if let Some((at, until)) = self.group.view.introduction.filter(|(at, _)| *at <= now) {
            let retry_at = at.max(now) + retry_interval(self.group);
            self.group.view.introduction = (retry_at < until).then_some((retry_at, until));
            self.request_decision();
        }
        match self.group.view.hold {
            Some(hold) if hold.retry_at <= now => self.retry_hold(hold, now),
            None => {
                let at = limit_at(self.group, self.children, self.slots, self.shard());
                if at.is_some_and(|at| at <= now) {
                    let slot = self.slots[self.slot_index(self.group.answered_below)];
                    if let Some(limit) = slot.limit {
                        self.start_hold(self.group.answered_below, slot.op, limit, now);
                    }
                }
            }
            Some(_) => {}
        }
    }

    fn retry_hold(&mut self, hold: Hold, now: Instant) {
        let dead = Duration::from_micros(self.group.config.timers.dead_us.into());
        let waits = self.group.parent.is_some() || !hold.awaiting.is_empty();
        if waits && now - hold.last_reply_at >= dead {
            let from = ChunkNo(hold.first);
            return self.fail(Failure { from, reason: NakReason::PathLost, ops: None }, now);
        }
        let retry_at = now + retry_interval(self.group);
        if let Some(hold) = &mut self.group.view.hold {
            hold.retry_at = retry_at;
        }
        self.ask_nodes(&hold);
        self.report_or_decide(now);
    }

    /// Hold back children that have not arrived at the operation that begins at `first`, and find out which ranks are
    /// missing. Ends with the root's decision.
    fn start_hold(&mut self, first: u64, op: OpDesc, limit: StragglerLimit, now: Instant) {
        let arrived = arrived(self.children, &self.group.view.excluded, first);
        let (mut awaiting, mut missing) = (ChildSet::EMPTY, RankMask::EMPTY);
        for (index, child) in self.children.iter().enumerate() {
            match child.kind {
                _ if arrived.contains(index) || self.group.view.excluded.contains(index) => {}
                ChildKind::Rank(rank) => missing.insert(rank),
                _ => awaiting.insert(index),
            }
        }
        let retry_at = now + retry_interval(self.group);
        let hold = Hold { first, op, limit, arrived, awaiting, missing, retry_at, last_reply_at: now };
        self.group.view.hold = Some(hold);
        self.ask_nodes(&hold);
        self.report_or_decide(now);
    }

    /// Query the child nodes that have yet to report their missing ranks.
    fn ask_nodes(&mut self, hold: &Hold) {
        for child in 0..self.children.len() {
            let Child { addr: Some(to), token, .. } = self.children[child] else { continue };
            if hold.awaiting.contains(child) {
                let header = self.down_header(Kind::Late, child, ChunkNo(hold.first), token);
                let mut ask = set_operation(header, hold);
                ask.flags |= Flags::WANT;
                self.common.reply(to, ask);
            }
        }
    }

    /// Once every child node has reported: report to the parent, or, at the root, decide.
    fn report_or_decide(&mut self, now: Instant) {
        let Some(hold) = self.group.view.hold.filter(|hold| hold.awaiting.is_empty()) else { return };
        if hold.missing.is_empty() {
            // Nobody is missing: the contribution is on its way.
            self.group.view.hold = None;
            self.group.view.checked_at = Some(now);
            return;
        }
        if self.group.parent.is_some() {
            let header = self.up_header(Kind::Late, ChunkNo(hold.first), self.group.token);
            let repr = Repr { count: hold.arrived.len() as u16, ..set_operation(header, &hold) };
            self.send_up_with(ONLY_HOP, repr, Some(hold.missing));
        } else {
            self.decide(&hold, now);
        }
    }

    /// Decide on an operation at the root: exclude the missing ranks, or fail. Deferred while some remaining rank may
    /// still need the oldest kept decision.
    fn decide(&mut self, hold: &Hold, now: Instant) {
        let view = &self.group.view;
        let next = u64::from(view.number) + 1;
        let oldest = view.decisions[next as usize % DECISIONS_KEPT];
        if next > DECISIONS_KEPT as u64 && self.group.min_have.0 <= oldest.first {
            // Retried later: some rank may still ask for the oldest decision.
            return;
        }
        let without = view.excluded_ranks.union(&hold.missing);
        if hold.limit.cuts && !needs_any_of(&hold.op, &without) && !hold.arrived.is_empty() {
            return self.exclude(hold.first, hold.missing, now);
        }
        self.fail_missing(hold.first, without, now);
    }

    /// Fail the group from `first` on because these ranks are missing.
    fn fail_missing(&mut self, first: u64, missing: RankMask, now: Instant) {
        self.group.view.missing_ranks = missing;
        let failure = Failure { from: ChunkNo(first), reason: NakReason::Stragglers, ops: None };
        self.fail(failure, now);
        self.group.view.hold = None;
        // Child nodes in a hold have not contributed anything that could be answered, so tell them directly.
        for child in 0..self.children.len() {
            let Child { addr: Some(to), token, kind: ChildKind::Node, .. } = self.children[child] else { continue };
            let nak = self.failure_nak(&failure, child, failure.from, token);
            self.common.reply_with(to, nak, Some(missing));
        }
    }

    /// Exclude these ranks from chunk `first` on.
    fn exclude(&mut self, first: u64, ranks: RankMask, now: Instant) {
        let hold = self.group.view.hold.take_if(|hold| hold.first == first);
        let view = &mut self.group.view;
        view.number += 1;
        view.decisions[usize::from(view.number) % DECISIONS_KEPT] = Decision { first, ranks };
        view.excluded_ranks = view.excluded_ranks.union(&ranks);
        self.common.counters.cuts += 1;
        self.common.trace.record(now, Trace::Cut(self.group.config.group, ChunkNo(first), ranks.len()));
        for child in 0..self.children.len() {
            let remains = hold.as_ref().is_none_or(|hold| hold.arrived.contains(child));
            if self.group.view.excluded.contains(child) {
                continue;
            }
            if remains {
                if self.children[child].addr.is_some() {
                    self.group.view.to_notify.insert(child);
                } else if let Some(zero_copy) = &mut self.group.zero_copy
                    && self.children[child].owner.is_some()
                {
                    zero_copy.to_notify.insert(child);
                }
                continue;
            }
            self.group.view.excluded.insert(child);
            self.group.view.to_notify.remove(child);
            self.stop_answering(child);
            if self.children[child].owner.is_some() {
                self.withdraw(child);
            }
            if let Some(zero_copy) = &mut self.group.zero_copy
                && self.children[child].owner.is_some()
            {
                // Tell it the first chunk without it: it may recover earlier results itself.
                zero_copy.to_notify.insert(child);
            }
        }
        let excluded = self.group.view.excluded;
        let remaining = self.children.iter().enumerate().filter(|(child, _)| !excluded.contains(*child));
        self.group.min_have = remaining.map(|(_, child)| child.have).min().unwrap_or(self.group.min_have);
        for index in 0..self.slots.len() {
            if self.slots[index].state == State::Filling && self.slots[index].local >= first {
                self.mark_excluded(index);
                if self.refs.is_some() {
                    self.mark_runnable(index);
                } else if self.slots[index].bits.len() == self.children.len() {
                    self.complete(index, now);
                }
            }
        }
    }

    /// Drop all pending answers of an excluded child, and notify it.
    fn stop_answering(&mut self, child: usize) {
        for index in 0..self.slots.len() {
            self.slots[index].pending.remove(child);
            if self.slots[index].pending.is_empty() {
                self.group.down.remove(index);
            }
        }
        let Child { addr: Some(to), token, have, .. } = self.children[child] else { return };
        let nak = self.down_header(Kind::Nak, child, have, token);
        self.common.reply(to, Repr { reason: Some(NakReason::Excluded), ..nak });
    }

    /// Answer a packet of an excluded child.
    pub(super) fn nak_excluded(&mut self, child: usize, repr: &Repr) {
        self.common.drop_packet(DropReason::Late);
        let Some(to) = self.children[child].addr.filter(|_| repr.kind != Kind::Nak) else { return };
        let nak = self.down_header(Kind::Nak, child, repr.seq, repr.token);
        self.common.reply(to, Repr { reason: Some(NakReason::Excluded), ..nak });
    }

    /// Mark each excluded inline child as `Empty` in slot `index`. Zero-copy children are skipped when it is their
    /// turn.
    pub(super) fn mark_excluded(&mut self, index: usize) {
        if self.group.view.excluded.is_empty() {
            return;
        }
        let inline = self.group.view.excluded.difference(&self.zero_copy_children());
        for child in 0..self.children.len() {
            if inline.contains(child) && !self.slots[index].bits.contains(child) {
                self.slots[index].mark(child, false, false);
                self.combine_input(index, child, None);
            }
        }
    }

    /// Return the number of ranks in a result: the divisor of averages.
    pub(super) fn active_ranks(&self) -> u32 {
        let (ranks, excluded) = (self.group.config.ranks.get(), &self.group.view.excluded_ranks);
        if excluded.is_empty() { ranks } else { ranks.saturating_sub(excluded.len()).max(1) }
    }

    /// Fail the group at the root if the operation of slot `index`, which is complete, needs an excluded rank. Returns
    /// true if it does.
    pub(super) fn fail_if_excluded_needed(&mut self, index: usize, now: Instant) -> bool {
        if self.group.view.excluded_ranks.is_empty() || self.group.parent.is_some() {
            return false;
        }
        let excluded_ranks = self.group.view.excluded_ranks;
        // Without data or a wanted result, the operation belongs to a host collective.
        let runs_here = self.is_wanted(index) || !self.with_data(index).is_empty();
        let fails = runs_here && needs_any_of(&self.slots[index].op, &excluded_ranks);
        if fails {
            self.fail_missing(self.slots[index].local, excluded_ranks, now);
        }
        fails
    }

    /// Return whether a child's contribution to `seq` has to wait for a decision.
    pub(super) fn is_held_back(&self, child: usize, seq: u64) -> bool {
        let has_failed = self.group.failed.is_some_and(|failure| seq >= failure.from.0);
        let hold = self.group.view.hold.as_ref().filter(|_| !has_failed);
        hold.is_some_and(|hold| seq >= hold.first && !hold.arrived.contains(child))
    }

    /// Record the operation's limit from what the first zero-copy child of slot `index` announced.
    pub(super) fn note_announced_limit(&mut self, index: usize, child: usize) {
        let slot = &mut self.slots[index];
        let announced = self.children[child].announced;
        if let Some(announced) = announced.filter(|op| (op.first..op.end).contains(&slot.local)) {
            (slot.limit, slot.op_first) = (Some(announced.limit), announced.first);
        }
    }
}

/// Write the operation of a hold into a header.
fn set_operation(header: Repr, hold: &Hold) -> Repr {
    let mut repr = header;
    repr.set_op(&hold.op);
    repr.set_limit(hold.limit, 0);
    repr
}

/// Return whether an operation needs one of these ranks: its root, or any rank if each contributes data of its own.
fn needs_any_of(op: &OpDesc, ranks: &RankMask) -> bool {
    match op.collective {
        Collective::AllGather => !ranks.is_empty(),
        collective => collective.is_rooted() && ranks.contains(op.root),
    }
}
