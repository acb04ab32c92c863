//! What nodes say to each other of ranks that are missing, and of decisions to go on without them.

use super::{Decision, can_hold};
use crate::group::{Failure, Seat};
use crate::node::Live;
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::ChunkNo;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, NakReason, RankMask, Repr};

impl Live<'_> {
    /// A child says who is missing below it, or asks for a decision.
    pub(in crate::node) fn on_late(&mut self, child: usize, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(to) = self.children[child].addr else { return };
        let Some(missing) = RankMask::from_bytes(payload) else { return self.on_view_asked(child, to, repr) };
        if self.children[child].seat != Seat::Node {
            // A rank speaks for nobody else.
            return self.common.drop_packet(DropReason::BadKind);
        }
        self.children[child].token = repr.token;
        if let Some(failure) = self.group.failed.filter(|failure| repr.seq >= failure.from) {
            return self.reply_failure(to, child, &failure, repr);
        }
        let view = &self.group.view;
        let decided = (1..=view.number)
            .rev()
            .find(|&number| view.decision(number).is_some_and(|decision| decision.first == repr.seq.0));
        if let Some(number) = decided {
            return self.tell_view(child, to, number, repr.token);
        }
        let asked = repr.op_desc().zip(repr.limit()).filter(|(_, (_, distance))| *distance == 0);
        let near =
            (self.group.answered_below..self.group.answered_below + self.group.window_local).contains(&repr.seq.0);
        let Some((op, (limit, _))) = asked.filter(|_| near && can_hold(self.children, self.shard())) else {
            return self.common.drop_packet(DropReason::Unexpected);
        };
        if self.group.view.hold.is_none() && !missing.is_empty() {
            self.hold(repr.seq.0, op, limit, now);
        }
        if let Some(hold) = self.group.view.hold.as_mut().filter(|hold| hold.first == repr.seq.0) {
            hold.asked.remove(child);
            hold.missing = hold.missing.union(&missing);
            hold.heard_at = now;
            if repr.count > 0 {
                hold.here.insert(child);
            } else {
                hold.here.remove(child);
            }
            let ack = self.down_header(Kind::Late, child, repr.seq, repr.token);
            self.common.reply(to, ack);
            self.settle(now);
        }
    }

    /// A child does not know decision `repr.view`; or it only makes itself known.
    fn on_view_asked(&mut self, child: usize, to: Addr, repr: &Repr) {
        if self.group.view.decision(repr.view).is_some() {
            return self.tell_view(child, to, repr.view, repr.token);
        }
        let ack = self.down_header(Kind::Late, child, repr.seq, repr.token);
        self.common.reply(to, ack);
    }

    fn tell_view(&mut self, child: usize, to: Addr, number: u16, token: u32) {
        if let Some((repr, mask)) = self.cut_header(child, number, token) {
            self.common.reply_with(to, repr, Some(mask));
        }
    }

    /// Return what tells `child` of decision `number`.
    pub(in crate::node) fn cut_header(&self, child: usize, number: u16, token: u32) -> Option<(Repr, RankMask)> {
        let Decision { first, ranks } = self.group.view.decision(number)?;
        Some((Repr { view: number, ..self.down_header(Kind::Cut, child, ChunkNo(first), token) }, ranks))
    }

    /// Tell whether the parent knows of decisions that this node does not.
    pub(in crate::node) fn lags(&self, view: u16) -> bool {
        view > self.group.view.number
    }

    /// Ask the parent for the next decision; also what a node says first.
    pub(in crate::node) fn ask_view(&mut self) {
        let header = self.up_header(Kind::Late, ChunkNo(self.group.answered_below), self.group.token);
        self.send_up(Repr { view: self.group.view.number + 1, ..header });
    }

    /// The parent asks who is missing, or says that it has heard.
    pub(in crate::node) fn on_asked(&mut self, repr: &Repr, now: Instant) {
        self.group.view.greets = None;
        if let Some(hold) = &mut self.group.view.hold {
            hold.heard_at = now;
        }
        if !repr.flags.contains(Flags::WANT) || self.group.failed.is_some() {
            return;
        }
        let Some((op, (limit, _))) = repr.op_desc().zip(repr.limit()) else {
            return self.common.drop_packet(DropReason::BadKind);
        };
        let first = repr.seq.0;
        if self.group.view.is_decided(first) || first < self.group.answered_below {
            // Asked before the decision; this came late.
            return self.common.drop_packet(DropReason::Stale);
        }
        let can = can_hold(self.children, self.shard());
        if self.group.view.hold.is_none() && can {
            // Says so by itself if anybody is missing.
            self.hold(first, op, limit, now);
        } else {
            self.settle(now);
        }
        if self.group.view.hold.is_none() {
            let header = self.up_header(Kind::Late, repr.seq, self.group.token);
            let mut none = Repr { count: 1, ..header };
            none.set_op(&op);
            none.set_limit(limit, 0);
            self.send_up_with(none, Some(RankMask::EMPTY));
        }
    }

    /// The root has decided.
    pub(in crate::node) fn on_cut(&mut self, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(ranks) = RankMask::from_bytes(payload) else {
            return self.common.drop_packet(DropReason::BadShape);
        };
        if repr.view == self.group.view.number + 1 {
            return self.cut(repr.seq.0, ranks, now);
        }
        let lags = self.lags(repr.view);
        self.common.drop_packet(if lags { DropReason::Unexpected } else { DropReason::Duplicate });
        if lags {
            self.ask_view();
        }
    }

    /// The group does not go on without ranks, or without this node.
    pub(in crate::node) fn on_left(&mut self, reason: NakReason, repr: &Repr, payload: &[u8], now: Instant) {
        self.group.view.missed = RankMask::from_bytes(payload).unwrap_or_default();
        self.group.view.hold = None;
        self.fail(Failure { from: repr.seq, reason, ops: None }, now);
    }

    /// Tell a child why there is no answer.
    pub(in crate::node) fn reply_failure(&mut self, to: Addr, child: usize, failure: &Failure, repr: &Repr) {
        let nak = self.failure_nak(failure, child, repr.seq, repr.token);
        self.common.reply_with(to, nak, self.missed(failure));
    }

    /// Return the ranks that a failure is about.
    pub(in crate::node) fn missed(&self, failure: &Failure) -> Option<RankMask> {
        (failure.reason == NakReason::Stragglers).then_some(self.group.view.missed)
    }
}
