//! Ranks that do not come to an operation within its limit (PROTOCOL 10).
//!
//! ```text
//! a node whose oldest chunk waits too long     its parent                       the root
//!   holds back whom it misses         Late ->    holds back, asks its     Late ->  decides once
//!                                                other nodes (Late down)
//!   leaves them out, for good         <- Cut     the same                <- Cut    from here on without them,
//!   or: fails                         <- Nak     the same                <- Nak    or: no result without them
//! ```
//!
//! Invariants:
//! - The root decides, once an operation, before its first result: only while its first chunk is the oldest without one.
//! - A child is there if it has contributed to anything from the operation's first chunk on. What a child that is not
//!   there sends while it is held back is dropped, so that what was told upwards stays true until the root has decided.
//! - Who is left out counts as `Empty` with everything landed, in this and every later chunk. So nothing of it is in any
//!   result from the decision on, and no slot and no window waits for it.
//! - Decisions are numbered. Whoever gets an answer that says of a decision that it does not know drops the answer and
//!   asks: no rank takes a result without knowing whose it is.
//! - Only an operation that says so has a limit; all others wait, and lose nobody.
//!
//! By reference, what is held back waits in its ring, as behind a window, and a decision reaches a rank by its ring, before
//! any answer. The entries of who is left out end with an error once no chain touches its memory.
//!
//! Larger groups than a [`RankMask`] holds and devices of several shards are not held back: their ranks do not post such
//! operations.

mod said;

use super::Live;
use crate::group::{Child, Failure, Group, Seat};
use crate::sets::ChildSet;
use crate::slot::{Slot, State};
use crate::trace::Trace;
use core::time::Duration;
use sumac_hal::ctrl::{DropReason, TreeConfig};
use sumac_hal::ids::ChunkNo;
use sumac_hal::op::{Collective, OpDesc};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, Limit, NakReason, RankMask, Repr};

/// Decisions that a node can tell of again. The root decides no other before every rank that is left knows the oldest.
const DECISIONS_KEPT: usize = 4;

/// A decision to go on without ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Decision {
    /// From which seq on.
    first: u64,
    ranks: RankMask,
}

/// What a node does while it waits for a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Hold {
    /// The operation: where it begins, what it is, how long it waits.
    first: u64,
    op: OpDesc,
    limit: Limit,
    /// Children that may go on.
    here: ChildSet,
    /// Nodes below that have yet to say who is missing there.
    asked: ChildSet,
    /// Ranks that are missing, as far as is known.
    missing: RankMask,
    /// When to say or ask it again.
    again_at: Instant,
    /// When something was last heard of those that are asked, and of the parent.
    heard_at: Instant,
}

/// Who has left a group, and who may be about to.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "snapshot", derive(PartialEq, Eq, Hash))]
pub(crate) struct View {
    /// Children that have left, with all below them.
    pub(crate) out: ChildSet,
    /// Who is to be told of the latest decision.
    pub(crate) tell: ChildSet,
    /// How many decisions there were.
    number: u16,
    /// The latest, by number.
    decisions: [Decision; DECISIONS_KEPT],
    /// All ranks that have left.
    gone: RankMask,
    /// Ranks without which the group has failed.
    missed: RankMask,
    hold: Option<Hold>,
    /// Nobody was found missing at this moment: no use looking again at once.
    looked_at: Option<Instant>,
    /// A node that has yet to make itself known to its parent, which could not ask it otherwise: when, and until when.
    greets: Option<(Instant, Instant)>,
}

impl View {
    pub(crate) fn new(tree: &TreeConfig, shard: Shard, now: Instant) -> Self {
        let greets = tree.parent.is_some() && !tree.ranks.is_empty() && shard.shards() == 1;
        Self {
            out: ChildSet::EMPTY,
            tell: ChildSet::EMPTY,
            number: 0,
            decisions: [Decision { first: 0, ranks: RankMask::EMPTY }; DECISIONS_KEPT],
            gone: RankMask::EMPTY,
            missed: RankMask::EMPTY,
            hold: None,
            looked_at: None,
            greets: greets.then_some((now, now + GREETING)),
        }
    }

    pub(crate) const fn number(&self) -> u16 {
        self.number
    }

    /// Return the ranks without which the group has failed.
    pub(super) const fn missed(&self) -> RankMask {
        self.missed
    }

    /// Return what decision `number` says, if it is still kept: from which seq on the group goes on without whom.
    pub(super) fn told(&self, number: u16) -> Option<(ChunkNo, RankMask)> {
        self.decision(number).map(|Decision { first, ranks }| (ChunkNo(first), ranks))
    }

    /// Tell whether it is decided who has a part in an operation that begins at `first`, or in a later one.
    fn is_decided(&self, first: u64) -> bool {
        self.decision(self.number).is_some_and(|decision| decision.first >= first)
    }

    /// Return decision `number`, if it is still kept.
    fn decision(&self, number: u16) -> Option<Decision> {
        let kept = number > 0 && number <= self.number && usize::from(self.number - number) < DECISIONS_KEPT;
        kept.then(|| self.decisions[usize::from(number) % DECISIONS_KEPT])
    }
}

/// For how long a node greets a parent that does not answer.
const GREETING: Duration = Duration::from_secs(5);

/// Tell whether a group's ranks can be named and held back.
fn can_hold(children: &[Child], shard: Shard) -> bool {
    let known = |child: &Child| match child.seat {
        Seat::Unknown => false,
        Seat::Rank(rank) => (rank.0 as usize) < RankMask::RANKS,
        Seat::Node => true,
    };
    shard.shards() == 1 && children.iter().all(known)
}

/// Return the children that have contributed to something from `first` on, and have not left.
fn here(children: &[Child], out: &ChildSet, first: u64) -> ChildSet {
    let mut here = ChildSet::EMPTY;
    let came = children.iter().enumerate().filter(|(index, child)| child.top > first && !out.contains(*index));
    came.for_each(|(index, _)| here.insert(index));
    here
}

/// Return when the oldest chunk without an answer has waited long enough, if children are missing there.
fn limit_at(group: &Group, children: &[Child], slots: &[Slot], shard: Shard) -> Option<Instant> {
    let first = group.answered_below;
    let slot = &slots[(first % slots.len() as u64) as usize];
    let waits =
        !group.view.is_decided(first) && slot.holds(first) && slot.state == State::Filling && slot.op_first == first;
    let limit = slot.limit.filter(|_| waits && can_hold(children, shard))?;
    let all = here(children, &group.view.out, first).len() + group.view.out.len() == children.len();
    let at = slot.first_at? + Duration::from_micros(limit.us.into());
    let again = group.view.looked_at.map_or(at, |looked| at.max(looked + again(group)));
    (!all).then_some(again)
}

/// How long to wait before something is said again.
fn again(group: &Group) -> Duration {
    Duration::from_micros(group.config.timers.probe_max_us.into())
}

impl super::Node<'_> {
    /// Return when a group has to look after who is missing.
    pub(super) fn straggler_timeout(&self, group: &Group) -> Option<Instant> {
        if group.failed.is_some() {
            return None;
        }
        let children = &self.storage.children[group.children.range()];
        let slots = &self.storage.slots[group.slots.range()];
        let due = match &group.view.hold {
            Some(hold) => Some(hold.again_at),
            None => limit_at(group, children, slots, self.common.config.shard),
        };
        let greets = group.view.greets.map(|(at, _)| at);
        due.into_iter().chain(greets).min()
    }
}

impl Live<'_> {
    /// Do what is due about ranks that are missing.
    pub(super) fn poll_stragglers(&mut self, now: Instant) {
        if self.group.failed.is_some() {
            return;
        }
        if let Some((at, until)) = self.group.view.greets.filter(|(at, _)| *at <= now) {
            let again = at.max(now) + again(self.group);
            self.group.view.greets = (again < until).then_some((again, until));
            self.ask_view();
        }
        match self.group.view.hold {
            Some(hold) if hold.again_at <= now => self.go_on_holding(hold, now),
            None => {
                let at = limit_at(self.group, self.children, self.slots, self.shard());
                if at.is_some_and(|at| at <= now) {
                    let slot = self.slots[self.slot_index(self.group.answered_below)];
                    if let Some(limit) = slot.limit {
                        self.hold(self.group.answered_below, slot.op, limit, now);
                    }
                }
            }
            Some(_) => {}
        }
    }

    fn go_on_holding(&mut self, hold: Hold, now: Instant) {
        let dead = Duration::from_micros(self.group.config.timers.dead_us.into());
        let waits = self.group.parent.is_some() || !hold.asked.is_empty();
        if waits && now - hold.heard_at >= dead {
            let from = ChunkNo(hold.first);
            return self.fail(Failure { from, reason: NakReason::PathLost, ops: None }, now);
        }
        let again_at = now + again(self.group);
        if let Some(hold) = &mut self.group.view.hold {
            hold.again_at = again_at;
        }
        self.ask_nodes(&hold);
        self.settle(now);
    }

    /// Nobody who has not come to the operation that begins at `first` comes to it any more, unless the root says that
    /// the group does not go on at all: find out who that is.
    fn hold(&mut self, first: u64, op: OpDesc, limit: Limit, now: Instant) {
        let here = here(self.children, &self.group.view.out, first);
        let (mut asked, mut missing) = (ChildSet::EMPTY, RankMask::EMPTY);
        for (index, child) in self.children.iter().enumerate() {
            match child.seat {
                _ if here.contains(index) || self.group.view.out.contains(index) => {}
                Seat::Rank(rank) => missing.insert(rank),
                _ => asked.insert(index),
            }
        }
        let again_at = now + again(self.group);
        let hold = Hold { first, op, limit, here, asked, missing, again_at, heard_at: now };
        self.group.view.hold = Some(hold);
        self.ask_nodes(&hold);
        self.settle(now);
    }

    /// Ask the nodes below that have not said who is missing there.
    fn ask_nodes(&mut self, hold: &Hold) {
        for child in 0..self.children.len() {
            let Child { addr: Some(to), token, .. } = self.children[child] else { continue };
            if hold.asked.contains(child) {
                let header = self.down_header(Kind::Late, child, ChunkNo(hold.first), token);
                let mut ask = describe(header, hold);
                ask.flags |= Flags::WANT;
                self.common.reply(to, ask);
            }
        }
    }

    /// If everybody below has been heard, tell the parent, or, at the root, decide.
    fn settle(&mut self, now: Instant) {
        let Some(hold) = self.group.view.hold.filter(|hold| hold.asked.is_empty()) else { return };
        if hold.missing.is_empty() {
            // It is on its way.
            self.group.view.hold = None;
            self.group.view.looked_at = Some(now);
            return;
        }
        if self.group.parent.is_some() {
            let header = self.up_header(Kind::Late, ChunkNo(hold.first), self.group.token);
            let repr = Repr { count: hold.here.len() as u16, ..describe(header, &hold) };
            self.send_up_with(repr, Some(hold.missing));
        } else {
            self.decide(&hold, now);
        }
    }

    /// The root's word on an operation. Its ranks are known to all who are left, or it fails.
    fn decide(&mut self, hold: &Hold, now: Instant) {
        let view = &self.group.view;
        let next = u64::from(view.number) + 1;
        let oldest = view.decisions[next as usize % DECISIONS_KEPT];
        if next > DECISIONS_KEPT as u64 && self.group.min_have.0 <= oldest.first {
            // Said again later: some rank may still have to ask for the oldest.
            return;
        }
        let without = view.gone.union(&hold.missing);
        if hold.limit.cuts && !lacks(&hold.op, &without) && !hold.here.is_empty() {
            return self.cut(hold.first, hold.missing, now);
        }
        self.fail_without(hold.first, without, now);
    }

    /// There is no result at `first` and behind, as these ranks are missing.
    fn fail_without(&mut self, first: u64, missing: RankMask, now: Instant) {
        self.group.view.missed = missing;
        let failure = Failure { from: ChunkNo(first), reason: NakReason::Stragglers, ops: None };
        self.fail(failure, now);
        self.group.view.hold = None;
        // Nodes below that hold back have contributed nothing that could be answered.
        for child in 0..self.children.len() {
            let Child { addr: Some(to), token, seat: Seat::Node, .. } = self.children[child] else { continue };
            let nak = self.failure_nak(&failure, child, failure.from, token);
            self.common.reply_with(to, nak, Some(missing));
        }
    }

    /// From `first` on, the group goes on without these ranks.
    fn cut(&mut self, first: u64, ranks: RankMask, now: Instant) {
        let hold = self.group.view.hold.take_if(|hold| hold.first == first);
        let view = &mut self.group.view;
        view.number += 1;
        view.decisions[usize::from(view.number) % DECISIONS_KEPT] = Decision { first, ranks };
        view.gone = view.gone.union(&ranks);
        self.common.counters.cuts += 1;
        self.common.trace.record(now, Trace::Cut(self.group.config.group, ChunkNo(first), ranks.len()));
        for child in 0..self.children.len() {
            let stays = hold.as_ref().is_none_or(|hold| hold.here.contains(child));
            if self.group.view.out.contains(child) {
                continue;
            }
            if stays {
                if self.children[child].addr.is_some() {
                    self.group.view.tell.insert(child);
                } else if let Some(by_reference) = &mut self.group.by_reference
                    && self.children[child].owner.is_some()
                {
                    by_reference.untold.insert(child);
                }
                continue;
            }
            self.group.view.out.insert(child);
            self.group.view.tell.remove(child);
            self.forget(child);
            if self.children[child].owner.is_some() {
                self.withdraw(child);
            }
            if let Some(by_reference) = &mut self.group.by_reference
                && self.children[child].owner.is_some()
            {
                // From which chunk on: it may look up for itself what came before.
                by_reference.untold.insert(child);
            }
        }
        let out = self.group.view.out;
        let left = self.children.iter().enumerate().filter(|(child, _)| !out.contains(*child));
        self.group.min_have = left.map(|(_, child)| child.have).min().unwrap_or(self.group.min_have);
        for index in 0..self.slots.len() {
            if self.slots[index].state == State::Filling && self.slots[index].local >= first {
                self.leave_out(index);
                if self.refs.is_some() {
                    self.stir(index);
                } else if self.slots[index].bits.len() == self.children.len() {
                    self.complete(index, now);
                }
            }
        }
    }

    /// Nothing is owed to a child that has left, and it is told so.
    fn forget(&mut self, child: usize) {
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

    /// Answer a child that has left.
    pub(super) fn tell_excluded(&mut self, child: usize, repr: &Repr) {
        self.common.drop_packet(DropReason::Late);
        let Some(to) = self.children[child].addr.filter(|_| repr.kind != Kind::Nak) else { return };
        let nak = self.down_header(Kind::Nak, child, repr.seq, repr.token);
        self.common.reply(to, Repr { reason: Some(NakReason::Excluded), ..nak });
    }

    /// Enter an `Empty` for each child that has left into slot `index`; by reference, that is done when it is its turn.
    pub(super) fn leave_out(&mut self, index: usize) {
        if self.group.view.out.is_empty() {
            return;
        }
        let inline = self.group.view.out.without(&self.by_reference());
        for child in 0..self.children.len() {
            if inline.contains(child) && !self.slots[index].bits.contains(child) {
                self.slots[index].mark(child, false, false);
                self.combine_input(index, child, None);
            }
        }
    }

    /// Return how many ranks the results are of: what averages are divided by.
    pub(super) fn members(&self) -> u32 {
        self.group.config.ranks.get().saturating_sub(self.group.view.gone.len()).max(1)
    }

    /// Fail the group at the root if the operation of slot `index`, which is complete, needs a rank that has left. True
    /// if it does.
    pub(super) fn fails_without(&mut self, index: usize, now: Instant) -> bool {
        let (slot, gone) = (self.slots[index], self.group.view.gone);
        if gone.is_empty() || self.group.parent.is_some() {
            return false;
        }
        // What brings nothing and wants nothing runs by a schedule.
        let runs_here = self.is_wanted(index) || !self.brought(index).is_empty();
        let fails = runs_here && lacks(&slot.op, &gone);
        if fails {
            self.fail_without(slot.local, gone, now);
        }
        fails
    }

    /// Tell whether what a child sends to `seq` has to wait for a decision.
    pub(super) fn is_held_back(&self, child: usize, seq: u64) -> bool {
        let has_failed = self.group.failed.is_some_and(|failure| seq >= failure.from.0);
        let hold = self.group.view.hold.as_ref().filter(|_| !has_failed);
        hold.is_some_and(|hold| seq >= hold.first && !hold.here.contains(child))
    }

    /// Keep what the first contribution to slot `index` says of its operation's limit.
    pub(super) fn note_limit(&mut self, index: usize, repr: &Repr) {
        let Some((limit, distance)) = repr.limit() else { return };
        if let Some(first) = repr.seq.0.checked_sub(distance.into()) {
            (self.slots[index].limit, self.slots[index].op_first) = (Some(limit), first);
        }
    }

    /// The same of the first by reference, from what its child has announced.
    pub(super) fn note_announced(&mut self, index: usize, child: usize) {
        let slot = &mut self.slots[index];
        let announced = self.children[child].announced;
        if let Some(announced) = announced.filter(|op| (op.first..op.end).contains(&slot.local)) {
            (slot.limit, slot.op_first) = (Some(announced.limit), announced.first);
        }
    }
}

/// Write the operation that is waited for into a header.
fn describe(header: Repr, hold: &Hold) -> Repr {
    let mut repr = header;
    repr.set_op(&hold.op);
    repr.set_limit(hold.limit, 0);
    repr
}

/// Tell whether an operation needs one of these ranks: its root, or, where each owns what only it can bring, any.
fn lacks(op: &OpDesc, ranks: &RankMask) -> bool {
    match op.collective {
        Collective::AllGather => !ranks.is_empty(),
        collective => collective.is_rooted() && ranks.contains(op.root),
    }
}
