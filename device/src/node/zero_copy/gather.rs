//! A slot from the first pull to the last write: its chains, and the processor's work between them.
//!
//! The processor combines what the engine cannot: inline contributions, and everything if the engine only copies
//! (through the bounce buffer). An engine that would round at every step, where the contract rounds once (PROTOCOL 9),
//! is treated as unable to combine.

mod processor;

use super::chain::{Draft, Place};
use super::redo::nothing_at;
use super::{GroupCtx, Node, Plan, RedoSlot};
use crate::sets::ChildSet;
use crate::slot::State;
use sumac_hal::ctrl::{DropReason, Order};
use sumac_hal::dma::{Chain, Completion, Engine, LocalMemory, Scope, Span, Status, SubmitError, Tag};
use sumac_hal::time::Instant;

/// What a slot waits for next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// Nothing to do until something arrives or completes.
    Idle,
    /// There may be more to do at once.
    Continue,
    /// The engine has no room.
    EngineFull,
}

/// The next contribution to combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The data that a zero-copy child submitted.
    ZeroCopy(usize),
    /// The data that an inline child sent, in its own stage.
    Inline(usize),
    /// The data of all inline children, combined on arrival.
    InlineTogether,
}

impl Node<'_> {
    /// Submit chains, and do the processor's work between them. Call it after [`Node::submit`], [`Node::handle`],
    /// [`Node::handle_timeout`], [`Node::handle_completion`] and control requests. Returns false if the engine is full:
    /// call it again after a completion.
    ///
    /// The engine is an argument, like the time; the node keeps nothing of it.
    pub fn poll_dma<E: Engine + LocalMemory>(&mut self, engine: &mut E, now: Instant) -> bool {
        let groups = self.groups_end;
        for turn in 0..groups {
            let index = (self.dma_turn + turn) % groups;
            let Some(mut ctx) = self.group_ctx(index) else { continue };
            let done = ctx.advance_slots(engine, now);
            ctx.note_output();
            if !done {
                // This group continues when its turn comes again. Otherwise a group with more chunks than the engine
                // has room for would take every place that becomes free.
                self.dma_turn = (index + 1) % groups;
                return false;
            }
        }
        true
    }

    /// Handle the completion of a chain.
    pub fn handle_completion(&mut self, completion: &Completion) {
        let slot = completion.tag.slot as usize;
        let owns = |index: &usize| {
            let group = self.storage.groups[*index].as_ref();
            group.is_some_and(|group| group.zero_copy.is_some() && group.slots.range().contains(&slot))
        };
        let Some(group) = (0..self.groups_end).find(owns) else {
            return self.common.drop_packet(DropReason::Unexpected);
        };
        let Some(mut ctx) = self.group_ctx(group) else { return };
        let index = slot - ctx.group.slots.start;
        ctx.on_completion(index, completion);
        self.free_if_quiet_and_closing(group);
    }

    fn free_if_quiet_and_closing(&mut self, index: usize) {
        if self.storage.groups[index].as_ref().is_some_and(|group| group.is_closing()) {
            self.free_if_quiet(index);
        }
    }
}

impl GroupCtx<'_> {
    /// Advance every slot that may make progress; false if the engine is full.
    fn advance_slots<E: Engine + LocalMemory>(&mut self, engine: &mut E, now: Instant) -> bool {
        let oldest = self.slot_index(self.shard().below(self.group.min_have));
        let Some(zero_copy) = &mut self.group.zero_copy else { return true };
        if zero_copy.is_closing() {
            if !zero_copy.aborted {
                zero_copy.aborted = true;
                engine.abort(Scope(zero_copy.scope));
            }
            return true;
        }
        // Terminates: a slot leaves the set before it is advanced, and only new arrivals put it back.
        while let Some(index) = self.group.zero_copy.as_ref().and_then(|by| by.work.first_from(oldest)) {
            if let Some(zero_copy) = &mut self.group.zero_copy {
                zero_copy.work.remove(index);
            }
            loop {
                match self.advance(index, engine, now) {
                    Progress::Continue => {}
                    Progress::Idle => break,
                    Progress::EngineFull => {
                        self.mark_runnable(index);
                        return false;
                    }
                }
            }
        }
        true
    }

    pub(super) fn redo(&mut self, index: usize) -> Option<&mut RedoSlot> {
        self.refs.as_mut().map(|refs| &mut refs.redo[index])
    }

    pub(in crate::node) fn zero_copy_children(&self) -> ChildSet {
        self.group.zero_copy.as_ref().map_or(ChildSet::EMPTY, |by| by.children)
    }

    /// Return the zero-copy children that slot `index` need not wait for: those that have submitted, and excluded ones,
    /// which count as empty.
    fn available(&self, index: usize) -> ChildSet {
        let present = self.refs.as_ref().map_or(ChildSet::EMPTY, |refs| refs.redo[index].present);
        present.union(&self.group.view.excluded.intersection(&self.zero_copy_children()))
    }

    fn on_completion(&mut self, index: usize, completion: &Completion) {
        let Some(redo) = self.redo(index).filter(|redo| redo.in_flight == Some(completion.tag)) else {
            return self.common.drop_packet(DropReason::Unexpected);
        };
        redo.in_flight = None;
        if completion.status == Status::Done {
            self.commit(index);
            self.note_progress(index);
        } else {
            redo.failures += 1;
            redo.needs_inspection = true;
        }
        self.mark_runnable(index);
    }

    /// Reset the failure count after a successful chain, if it got further than before: an attempt that starts well and
    /// then fails could otherwise repeat forever.
    fn note_progress(&mut self, index: usize) {
        let is_answered = self.slots[index].state == State::Answered;
        if let Some(redo) = self.redo(index)
            && (is_answered || redo.pulled.len() > usize::from(redo.reached))
        {
            redo.failures = 0;
        }
    }

    /// Apply the plan of slot `index`: its chain has succeeded.
    pub(super) fn commit(&mut self, index: usize) {
        let Some(redo) = self.redo(index) else { return };
        let plan = core::mem::replace(&mut redo.plan, Plan::NOTHING);
        redo.bounced = plan.bounces.or(redo.bounced);
        redo.published |= plan.publishes;
        redo.rounded |= plan.rounds;
        redo.written = redo.written.union(&plan.writes);
        redo.to_write = redo.to_write.difference(&plan.writes);
        (0..self.children.len())
            .filter(|&child| plan.pulls.contains(child))
            .for_each(|child| self.note_pulled(index, child));
        if self.slots[index].state == State::Answered {
            self.mark_to_answer(index, &plan.writes);
        }
    }

    /// Record that a child's contribution is in the accumulators. For a zero-copy child this sets its bit.
    fn note_pulled(&mut self, index: usize, child: usize) {
        let place = index * self.children.len() + child;
        let is_zero_copy = self.zero_copy_children().contains(child);
        let Some(refs) = &mut self.refs else { return };
        refs.redo[index].pulled.insert(child);
        if is_zero_copy {
            let wants = refs.buffers[place].dst.is_some();
            self.slots[index].mark(child, refs.redo[index].data.contains(child), wants);
        }
    }

    pub(super) fn mark_to_answer(&mut self, index: usize, children: &ChildSet) {
        let (Some(refs), Some(zero_copy)) = (&mut self.refs, &mut self.group.zero_copy) else { return };
        let redo = &mut refs.redo[index];
        redo.to_answer = redo.to_answer.union(&children.intersection(&redo.present));
        if !redo.to_answer.is_empty() {
            zero_copy.to_answer.insert(index);
        }
    }

    fn advance<E: Engine + LocalMemory>(&mut self, index: usize, engine: &mut E, now: Instant) -> Progress {
        let (slot, children) = (self.slots[index], self.children.len());
        let seq = self.shard().global(slot.local);
        let failed = self.group.failed.is_some_and(|failure| seq >= failure.from);
        if self.redo(index).is_none_or(|redo| redo.in_flight.is_some()) {
            return Progress::Idle;
        }
        if slot.state != State::Answered && failed {
            return Progress::Idle;
        }
        if slot.state == State::Filling && self.all_available(index) && self.fail_if_excluded_needed(index, now) {
            return Progress::Idle;
        }
        let Some(redo) = self.redo(index) else { return Progress::Idle };
        if core::mem::take(&mut redo.needs_inspection) {
            return self.inspect_failed_chain(index, engine, now);
        }
        let complete = redo.pulled.len() == children;
        let ready = complete && (redo.published || self.with_data(index).is_empty() || self.group.parent.is_some());
        let done = match slot.state {
            State::Filling if ready => self.complete_zero_copy(index, engine),
            State::Filling => self.gather(index, engine),
            State::Answered => self.deliver(index, engine),
            _ => return Progress::Idle,
        };
        // The device's own memory fails only if it is broken or the engine is gone: retrying is pointless.
        done.unwrap_or_else(|_| self.give_up(index, now))
    }

    /// Once every child has contributed, pull in order; at the root, publish and write back in the same chain.
    ///
    /// Pulling early would save the time of a few chunks, but cost a chain and another pass over the accumulators for
    /// each child that arrives later than the one before it, which is all of them.
    fn gather<E: Engine + LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<Progress, Status> {
        if !self.all_available(index) {
            return Ok(Progress::Idle);
        }
        let Some(refs) = &self.refs else { return Ok(Progress::Idle) };
        let mut draft = Draft::new(refs.capabilities);
        let combines = self.engine_combines(index);
        loop {
            let Some(refs) = &self.refs else { return Ok(Progress::Idle) };
            let redo = &refs.redo[index];
            let (bounced, pulled) = (redo.bounced, redo.pulled.union(&draft.plan.pulls));
            let Some(next) = self.next(index, &pulled) else { break };
            let place = self.place(index, next, &pulled);
            match next {
                Next::ZeroCopy(child) if combines => {
                    if !self.draft_pull(index, child, place, &mut draft) {
                        break;
                    }
                }
                Next::ZeroCopy(child) if self.has_data(index, child) && bounced.is_none() => {
                    self.draft_bounce(index, child, &mut draft);
                    break;
                }
                // Whatever follows steps or empty pulls waits for this chain.
                _ if !draft.steps.is_empty() || !draft.plan.pulls.is_empty() => break,
                _ => {
                    self.combine_here(index, next, place, engine)?;
                    return Ok(Progress::Continue);
                }
            }
        }
        let all = self.refs.as_ref().is_some_and(|refs| {
            refs.redo[index].pulled.union(&draft.plan.pulls).len() == self.children.len()
                && draft.plan.bounces.is_none()
        });
        if all && self.group.parent.is_none() && !self.with_data(index).is_empty() {
            let stores = self.draft_store(index, &mut draft);
            if !stores && draft.steps.is_empty() {
                self.finish_here(index, engine)?;
                return Ok(Progress::Continue);
            }
        }
        self.submit_draft(index, draft, engine)
    }

    /// Return whether every child has contributed to slot `index`, zero-copy or inline.
    fn all_available(&self, index: usize) -> bool {
        let Some(refs) = &self.refs else { return false };
        let redo = &refs.redo[index];
        // A child that withdrew after its pull is in the accumulators.
        let there = self.available(index).union(&self.slots[index].bits).union(&redo.pulled);
        there.len() == self.children.len()
    }

    /// Return the next contribution to combine, if it is available.
    fn next(&self, index: usize, pulled: &ChildSet) -> Option<Next> {
        let (refs, slot) = (self.refs.as_ref()?, &self.slots[index]);
        let (there, zero_copy) = (self.available(index), self.zero_copy_children());
        if let Some(child) = refs.redo[index].bounced {
            return Some(Next::ZeroCopy(usize::from(child)));
        }
        let children = self.children.len();
        if matches!(self.group.config.order, Order::TreeFold | Order::TreePairwise) {
            let child = pulled.len();
            // Checked here because a set of 256 has no place for child 256.
            if child == children {
                return None;
            }
            let is_zero_copy = zero_copy.contains(child);
            let is_there = if is_zero_copy { there.contains(child) } else { slot.bits.contains(child) };
            return is_there.then_some(if is_zero_copy { Next::ZeroCopy(child) } else { Next::Inline(child) });
        }
        let inline = children - zero_copy.len();
        there.difference(pulled).first().map(Next::ZeroCopy).or_else(|| {
            let came = slot.bits.difference(&zero_copy);
            let waiting = !came.difference(pulled).is_empty();
            (waiting && came.len() == inline && pulled.intersection(&zero_copy) == zero_copy)
                .then_some(Next::InlineTogether)
        })
    }

    fn place(&self, index: usize, next: Next, pulled: &ChildSet) -> Place {
        let data = self.with_data(index).intersection(pulled);
        let child = match next {
            Next::ZeroCopy(child) | Next::Inline(child) => child,
            Next::InlineTogether => 0,
        };
        Place::of(self.group.config.order, self.children.len(), &data, child, !data.is_empty())
    }

    /// Return the children with data: inline or zero-copy, pulled or not.
    pub(in crate::node) fn with_data(&self, index: usize) -> ChildSet {
        let zero_copy = self.refs.as_ref().map_or(ChildSet::EMPTY, |refs| refs.redo[index].data);
        self.slots[index].data.union(&zero_copy)
    }

    /// Return whether any child wants the result of slot `index`: inline or zero-copy, pulled or not.
    pub(in crate::node) fn is_wanted(&self, index: usize) -> bool {
        let children = self.children.len();
        let wanted = self
            .refs
            .as_ref()
            .is_some_and(|refs| refs.buffers[index * children..][..children].iter().any(|buffer| buffer.dst.is_some()));
        wanted || !self.slots[index].want.is_empty()
    }

    pub(super) fn has_data(&self, index: usize, child: usize) -> bool {
        self.refs.as_ref().is_some_and(|refs| refs.redo[index].data.contains(child))
    }

    /// Write the answer to the zero-copy children that still want it. An answer from the parent is published first.
    fn deliver<E: Engine + LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<Progress, Status> {
        let Some(refs) = &self.refs else { return Ok(Progress::Idle) };
        let redo = refs.redo[index];
        if redo.to_write.is_empty() {
            return Ok(Progress::Idle);
        }
        let mut draft = Draft::new(refs.capabilities);
        if !redo.published {
            self.clear_record(index, engine)?;
            let (value, to) = (self.value(index), self.accumulator(index, 0));
            let bytes = &self.bytes[value];
            let span = Span { address: to, len_bytes: bytes.len() as u64 };
            engine.with_local(span, nothing_at(to), |acc, _| acc.copy_from_slice(bytes))?;
            draft.push(self.publication(index, redo.rounded));
            draft.plan.publishes = true;
        }
        // After a failure write one at a time, so that memory that cannot be written delays nobody else.
        let most = if redo.failures > 0 { 1 } else { self.children.len() };
        let wants = (0..self.children.len()).filter(|&child| redo.to_write.contains(child)).take(most);
        self.draft_writes(index, redo.rounded, wants, &mut draft);
        self.submit_draft(index, draft, engine)
    }

    /// Submit a chain to the engine; a plan without steps is committed at once.
    fn submit_draft<E: Engine>(&mut self, index: usize, draft: Draft, engine: &mut E) -> Result<Progress, Status> {
        let first = self.group.slots.start;
        let seq = self.shard().global(self.slots[index].local).0;
        let scope = Scope(self.group.zero_copy.as_ref().map_or(0, |by| by.scope));
        let Some(redo) = self.redo(index) else { return Ok(Progress::Idle) };
        let empties = !draft.plan.pulls.is_empty();
        if draft.steps.is_empty() {
            redo.plan = draft.plan;
            self.commit(index);
            return Ok(if empties { Progress::Continue } else { Progress::Idle });
        }
        let tag = Tag { seq, slot: (first + index) as u32, attempt: redo.chains };
        match engine.submit(Chain { tag, scope, steps: &draft.steps }) {
            Ok(()) => {
                redo.chains = redo.chains.wrapping_add(1);
                redo.plan = draft.plan;
                redo.in_flight = Some(tag);
                Ok(Progress::Idle)
            }
            Err(SubmitError::Full { .. }) => Ok(Progress::EngineFull),
            Err(_) => Err(Status::Hardware),
        }
    }

    /// Every child has contributed, and at the root the result is published: fetch what is sent in packets, then answer
    /// or send up.
    fn complete_zero_copy<E: LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<Progress, Status> {
        let slot = self.slots[index];
        let is_root = self.group.parent.is_none();
        let has_value = !slot.data.is_empty();
        let size = slot.element_bytes(!is_root).unwrap_or(0);
        let len = if has_value { slot.elements.unwrap_or(0) as usize * size } else { 0 };
        let inline_wants = !slot.want.difference(&self.zero_copy_children()).is_empty();
        if len > 0 && (!is_root || inline_wants) {
            let rounded = self.refs.as_ref().is_some_and(|refs| refs.redo[index].rounded);
            let address = if rounded { self.bounce(index) } else { self.accumulator(index, 0) };
            let stage = self.stage_range(index, 0, len);
            let bytes = &mut self.bytes[stage];
            let value = Span { address, len_bytes: len as u64 };
            engine.with_local(nothing_at(address), value, |_, value| bytes.copy_from_slice(value))?;
        }
        self.common.counters.completed += 1;
        self.group.window.grow();
        let slot = &mut self.slots[index];
        slot.settle_time();
        slot.value_len = len as u16;
        if is_root {
            self.answer(index);
            return Ok(Progress::Continue);
        }
        self.slots[index].state = State::Up;
        self.group.up.insert(index);
        Ok(Progress::Idle)
    }
}
