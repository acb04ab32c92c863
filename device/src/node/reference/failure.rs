//! Chains that failed: what they did before, and what follows (PROTOCOL 7).
//!
//! The record decides. Published: the result is whole, and is written again to whom it did not reach. Unpublished: every
//! input is as it was, and all of them are pulled again, as a new attempt, a few times.

use super::Live;
use super::Plan;
use super::gather::Turn;
use crate::group::Failure;
use crate::sets::ChildSet;
use crate::slot::State;
use sumac_hal::dma::LocalMemory;
use sumac_hal::planted;
use sumac_hal::time::Instant;
use sumac_hal::wire::NakReason;

/// Chains of a slot that may fail one after the other before the chunk is given up.
const FAILURES_MAX: u16 = 4;

impl Live<'_> {
    /// A chain of slot `index` failed: find out what it did before.
    pub(super) fn judge_chain<E: LocalMemory>(&mut self, index: usize, engine: &mut E, now: Instant) -> Turn {
        let rounds = self.refs.as_ref().is_some_and(|refs| refs.redo[index].plan.rounds);
        let record = self.record(index, rounds);
        let found = self.read_record(index, engine);
        let state = self.slots[index].state;
        let is_ignored = planted!(self.common, RecordIgnored);
        let Some(redo) = self.redo(index) else { return Turn::Idle };
        redo.bounced = None;
        let (plan, failures) = (redo.plan, redo.failures);
        if state == State::Answered {
            redo.plan = Plan::NOTHING;
            // Destinations may hold a part of the result already: it is not published, nor its record cleared, again.
            redo.published |= plan.publishes && found == Ok(record);
            if failures >= FAILURES_MAX {
                redo.failures = 0;
                self.give_up_writing(index, &plan.writes);
            }
            return Turn::Again;
        }
        if plan.publishes && found == Ok(record) && !is_ignored {
            // All of the result is there; whom it did not reach is written to again.
            redo.plan.writes = ChildSet::EMPTY;
            self.commit(index);
            return Turn::Again;
        }
        redo.plan = Plan::NOTHING;
        self.poison(index);
        if found.is_err() || failures >= FAILURES_MAX { self.give_up(index, now) } else { Turn::Again }
    }

    /// The accumulators of slot `index` are spoilt: a new attempt begins (PROTOCOL 7).
    fn poison(&mut self, index: usize) {
        let by_reference = self.by_reference();
        if planted!(self.common, AccumulatorsKept) {
            return;
        }
        let Some(redo) = self.redo(index) else { return };
        redo.reached = redo.reached.max(redo.pulled.len() as u16);
        redo.pulled = ChildSet::EMPTY;
        redo.finished = false;
        let slot = &mut self.slots[index];
        slot.attempt = slot.attempt.wrapping_add(1);
        slot.bits = slot.bits.without(&by_reference);
        slot.data = slot.data.without(&by_reference);
        slot.want = slot.want.without(&by_reference);
    }

    /// The chunk can't be had, or not be delivered: say so to whom it concerns.
    pub(super) fn give_up(&mut self, index: usize, now: Instant) -> Turn {
        if self.slots[index].state == State::Answered {
            let left = self.refs.as_ref().map_or(ChildSet::EMPTY, |refs| refs.redo[index].to_write);
            self.give_up_writing(index, &left);
        } else {
            let (from, op) = (self.shard().global(self.slots[index].local), self.slots[index].op);
            // The one reason by which a subtree can say that it is its own fault.
            self.refuse(index, Failure { from, reason: NakReason::Unsupported, ops: Some((op, op)) }, now);
        }
        Turn::Idle
    }

    fn give_up_writing(&mut self, index: usize, children: &ChildSet) {
        let Some(redo) = self.redo(index) else { return };
        redo.to_write = redo.to_write.without(children);
        redo.broken = redo.broken.union(children);
        self.owe(index, children);
    }
}
