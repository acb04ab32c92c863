//! Recovery from failed chains (PROTOCOL 7).
//!
//! The record decides. Published: the result is complete, and is written again to the children it did not reach.
//! Unpublished: every input is intact, and all are pulled again as a new attempt, a limited number of times.

use super::GroupCtx;
use super::Plan;
use super::gather::Progress;
use crate::node::group::Failure;
use crate::sets::ChildSet;
use crate::slot::State;
use sumac_hal::dma::LocalMemory;
use sumac_hal::planted;
use sumac_hal::time::Instant;
use sumac_hal::wire::NakReason;

/// Consecutive failed chains after which a chunk is given up.
const FAILURES_MAX: u16 = 4;

impl GroupCtx<'_> {
    /// Find out from the record what the failed chain of slot `index` did, and continue accordingly.
    pub(super) fn inspect_failed_chain<E: LocalMemory>(
        &mut self,
        index: usize,
        engine: &mut E,
        now: Instant,
    ) -> Progress {
        let rounds = self.refs.as_ref().is_some_and(|refs| refs.redo[index].plan.rounds);
        let record = self.record(index, rounds);
        let found = self.read_record(index, engine);
        let state = self.slots[index].state;
        let is_ignored = planted!(self.common, RecordIgnored);
        let Some(redo) = self.redo(index) else { return Progress::Idle };
        redo.bounced = None;
        let (plan, failures) = (redo.plan, redo.failures);
        if state == State::Answered {
            redo.plan = Plan::NOTHING;
            // Destinations may already hold a part of the result: never publish it again or clear its record.
            redo.published |= plan.publishes && found == Ok(record);
            if failures >= FAILURES_MAX {
                redo.failures = 0;
                self.give_up_writing(index, &plan.writes);
            }
            return Progress::Continue;
        }
        if plan.publishes && found == Ok(record) && !is_ignored {
            // The result is complete; children that it did not reach are written to again.
            redo.plan.writes = ChildSet::EMPTY;
            self.commit(index);
            return Progress::Continue;
        }
        redo.plan = Plan::NOTHING;
        self.poison(index);
        if found.is_err() || failures >= FAILURES_MAX { self.give_up(index, now) } else { Progress::Continue }
    }

    /// Start a new attempt at slot `index`: its accumulators are invalid (PROTOCOL 7).
    fn poison(&mut self, index: usize) {
        let zero_copy = self.zero_copy_children();
        if planted!(self.common, AccumulatorsKept) {
            return;
        }
        let Some(redo) = self.redo(index) else { return };
        redo.reached = redo.reached.max(redo.pulled.len() as u16);
        redo.pulled = ChildSet::EMPTY;
        redo.finished = false;
        let slot = &mut self.slots[index];
        slot.attempt = slot.attempt.wrapping_add(1);
        slot.bits = slot.bits.difference(&zero_copy);
        slot.data = slot.data.difference(&zero_copy);
        slot.want = slot.want.difference(&zero_copy);
    }

    /// Give up: the chunk cannot be computed, or not be delivered. Report it to the children concerned.
    pub(super) fn give_up(&mut self, index: usize, now: Instant) -> Progress {
        if self.slots[index].state == State::Answered {
            let left = self.refs.as_ref().map_or(ChildSet::EMPTY, |refs| refs.redo[index].to_write);
            self.give_up_writing(index, &left);
        } else {
            let (from, op) = (self.shard().global(self.slots[index].local), self.slots[index].op);
            // The only reason with which a subtree can report a failure of its own.
            self.refuse(index, Failure { from, reason: NakReason::Unsupported, ops: Some((op, op)) }, now);
        }
        Progress::Idle
    }

    fn give_up_writing(&mut self, index: usize, children: &ChildSet) {
        let Some(redo) = self.redo(index) else { return };
        redo.to_write = redo.to_write.difference(children);
        redo.unwritable = redo.unwritable.union(children);
        self.mark_to_answer(index, children);
    }
}
