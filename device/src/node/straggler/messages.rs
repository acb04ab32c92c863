//! Messages between nodes about missing ranks and exclusion decisions.

use super::{Decision, ONLY_HOP, supports_exclusion};
use crate::node::GroupCtx;
use crate::node::group::{ChildKind, Failure};
use sumac_hal::ctrl::DropReason;
use sumac_hal::ids::ChunkNo;
use sumac_hal::port::Addr;
use sumac_hal::time::Instant;
use sumac_hal::wire::{Flags, Kind, NakReason, RankMask, Repr};

impl GroupCtx<'_> {
    /// Handle a child's report of missing ranks, or its request for a decision.
    pub(in crate::node) fn on_late(&mut self, child: usize, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(to) = self.children[child].addr else { return };
        let Some(missing) = RankMask::from_bytes(payload) else { return self.on_decision_request(child, to, repr) };
        if self.children[child].kind != ChildKind::Node {
            // A rank cannot report others.
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
            return self.send_decision(child, to, number, repr.token);
        }
        let request = repr.op_desc().zip(repr.limit()).filter(|(_, (_, distance))| *distance == 0);
        let near =
            (self.group.answered_below..self.group.answered_below + self.group.window_local).contains(&repr.seq.0);
        let Some((op, (limit, _))) =
            request.filter(|_| near && supports_exclusion(self.group, self.children, self.shard()))
        else {
            return self.common.drop_packet(DropReason::Unexpected);
        };
        if self.group.view.hold.is_none() && !missing.is_empty() {
            self.start_hold(repr.seq.0, op, limit, now);
        }
        if let Some(hold) = self.group.view.hold.as_mut().filter(|hold| hold.first == repr.seq.0) {
            hold.awaiting.remove(child);
            hold.missing = hold.missing.union(&missing);
            hold.last_reply_at = now;
            if repr.count > 0 {
                hold.arrived.insert(child);
            } else {
                hold.arrived.remove(child);
            }
            let ack = self.down_header(Kind::Late, child, repr.seq, repr.token);
            self.common.reply(to, ack);
            self.report_or_decide(now);
        }
    }

    /// A child requests decision `repr.view`, or only introduces itself.
    fn on_decision_request(&mut self, child: usize, to: Addr, repr: &Repr) {
        if self.group.view.decision(repr.view).is_some() {
            return self.send_decision(child, to, repr.view, repr.token);
        }
        let ack = self.down_header(Kind::Late, child, repr.seq, repr.token);
        self.common.reply(to, ack);
    }

    fn send_decision(&mut self, child: usize, to: Addr, number: u16, token: u32) {
        if let Some((repr, mask)) = self.decision_header(child, number, token) {
            self.common.reply_with(to, repr, Some(mask));
        }
    }

    /// Return the packet that sends decision `number` to `child`.
    pub(in crate::node) fn decision_header(&self, child: usize, number: u16, token: u32) -> Option<(Repr, RankMask)> {
        let Decision { first, ranks } = self.group.view.decision(number)?;
        Some((Repr { view: number, ..self.down_header(Kind::Cut, child, ChunkNo(first), token) }, ranks))
    }

    /// Return whether the parent knows of later decisions than this node.
    pub(in crate::node) fn is_behind(&self, view: u16) -> bool {
        view > self.group.view.number
    }

    /// Request the next decision from the parent. Also serves as a node's introduction.
    pub(in crate::node) fn request_decision(&mut self) {
        let header = self.up_header(Kind::Late, ChunkNo(self.group.answered_below), self.group.token);
        self.send_up(ONLY_HOP, Repr { view: self.group.view.number + 1, ..header });
    }

    /// Handle the parent's query for missing ranks, or its acknowledgement of a report.
    pub(in crate::node) fn on_late_query(&mut self, repr: &Repr, now: Instant) {
        self.group.view.introduction = None;
        if let Some(hold) = &mut self.group.view.hold {
            hold.last_reply_at = now;
        }
        if !repr.flags.contains(Flags::WANT) || self.group.failed.is_some() {
            return;
        }
        let Some((op, (limit, _))) = repr.op_desc().zip(repr.limit()) else {
            return self.common.drop_packet(DropReason::BadKind);
        };
        let first = repr.seq.0;
        if self.group.view.is_decided(first) || first < self.group.answered_below {
            // A query from before the decision, delivered late.
            return self.common.drop_packet(DropReason::Stale);
        }
        let can = supports_exclusion(self.group, self.children, self.shard());
        if self.group.view.hold.is_none() && can {
            // Reports by itself if anybody is missing.
            self.start_hold(first, op, limit, now);
        } else {
            self.report_or_decide(now);
        }
        if self.group.view.hold.is_none() {
            let header = self.up_header(Kind::Late, repr.seq, self.group.token);
            let mut none = Repr { count: 1, ..header };
            none.set_op(&op);
            none.set_limit(limit, 0);
            self.send_up_with(ONLY_HOP, none, Some(RankMask::EMPTY));
        }
    }

    /// Handle the root's decision.
    pub(in crate::node) fn on_cut(&mut self, repr: &Repr, payload: &[u8], now: Instant) {
        let Some(ranks) = RankMask::from_bytes(payload) else {
            return self.common.drop_packet(DropReason::BadShape);
        };
        if repr.view == self.group.view.number + 1 {
            return self.exclude(repr.seq.0, ranks, now);
        }
        let is_behind = self.is_behind(repr.view);
        self.common.drop_packet(if is_behind { DropReason::Unexpected } else { DropReason::Duplicate });
        if is_behind {
            self.request_decision();
        }
    }

    /// The group failed because ranks are missing, or this node was excluded.
    pub(in crate::node) fn on_stragglers_nak(&mut self, reason: NakReason, repr: &Repr, payload: &[u8], now: Instant) {
        self.group.view.missing_ranks = RankMask::from_bytes(payload).unwrap_or_default();
        self.group.view.hold = None;
        self.fail(Failure { from: repr.seq, reason, ops: None }, now);
    }

    /// Report a failure to a child.
    pub(in crate::node) fn reply_failure(&mut self, to: Addr, child: usize, failure: &Failure, repr: &Repr) {
        let nak = self.failure_nak(failure, child, repr.seq, repr.token);
        self.common.reply_with(to, nak, self.missing_in(failure));
    }

    /// Return the missing ranks to report with a failure.
    pub(in crate::node) fn missing_in(&self, failure: &Failure) -> Option<RankMask> {
        (failure.reason == NakReason::Stragglers).then_some(self.group.view.missing_ranks)
    }
}
