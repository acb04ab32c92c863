//! From the first pull to the last write: a slot's chains, and what the processor does between them.
//!
//! The processor combines what the engine can't: contributions that came inline, and everything where the engine only
//! copies (then through the bounce). Where an engine would round at every step what the contract rounds once
//! (PROTOCOL 9), it counts as one that can't.

use super::chain::{Draft, Place};
use super::redo::nothing_at;
use super::{Live, Node, Plan, RedoSlot};
use crate::order::{Input, take};
use crate::sets::ChildSet;
use crate::slot::State;
use sumac_hal::ctrl::{DropReason, Order};
use sumac_hal::dma::{Chain, Completion, Engine, LocalMemory, Scope, Span, Status, SubmitError, Tag};
use sumac_hal::reduce::Kernel;
use sumac_hal::time::Instant;

/// How far a slot came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing to do until something arrives or completes.
    Idle,
    /// There may be more to do at once.
    Again,
    /// The engine has no room.
    Full,
}

/// What is next to be combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// What a child refers to.
    Reference(usize),
    /// What a child sent, in the stage of its own.
    Inline(usize),
    /// What all inline children sent, combined as it came.
    InlineTogether,
}

impl Node<'_> {
    /// Submit what chains there are to submit, and do what the processor has to do between them. Call it after
    /// [`Node::submit`], [`Node::handle`], [`Node::handle_timeout`], [`Node::handle_completion`] and control requests; false if the engine had no
    /// room for all: then again after a completion.
    ///
    /// The engine is an argument as the time is: nothing of it is kept.
    pub fn poll_dma<E: Engine + LocalMemory>(&mut self, engine: &mut E, now: Instant) -> bool {
        let groups = self.groups_end;
        for turn in 0..groups {
            let index = (self.dma_turn + turn) % groups;
            let Some(mut live) = self.live(index) else { continue };
            let done = live.work(engine, now);
            live.note_output();
            if !done {
                // It goes on where it stopped when its turn comes again: a group with more chunks than the engine has
                // room for would else take every place that gets free.
                self.dma_turn = (index + 1) % groups;
                return false;
            }
        }
        true
    }

    /// Take in the end of a chain.
    pub fn handle_completion(&mut self, completion: &Completion) {
        let slot = completion.tag.slot as usize;
        let owns = |index: &usize| {
            let group = self.storage.groups[*index].as_ref();
            group.is_some_and(|group| group.by_reference.is_some() && group.slots.range().contains(&slot))
        };
        let Some(group) = (0..self.groups_end).find(owns) else {
            return self.common.drop_packet(DropReason::Unexpected);
        };
        let Some(mut live) = self.live(group) else { return };
        let index = slot - live.group.slots.start;
        live.on_completion(index, completion);
        self.free_if_quiet_and_closing(group);
    }

    fn free_if_quiet_and_closing(&mut self, index: usize) {
        if self.storage.groups[index].as_ref().is_some_and(|group| group.is_closing()) {
            self.free_if_quiet(index);
        }
    }
}

impl Live<'_> {
    /// Let every slot that may go on do so. False: the engine is full.
    fn work<E: Engine + LocalMemory>(&mut self, engine: &mut E, now: Instant) -> bool {
        let oldest = self.slot_index(self.shard().below(self.group.min_have));
        let Some(by_reference) = &mut self.group.by_reference else { return true };
        if by_reference.is_closing() {
            if !by_reference.aborted {
                by_reference.aborted = true;
                engine.abort(Scope(by_reference.scope));
            }
            return true;
        }
        // A slot leaves the set before it is worked on, and comes back only by what arrives: this ends.
        while let Some(index) = self.group.by_reference.as_ref().and_then(|by| by.work.first_from(oldest)) {
            if let Some(by_reference) = &mut self.group.by_reference {
                by_reference.work.remove(index);
            }
            loop {
                match self.advance(index, engine, now) {
                    Turn::Again => {}
                    Turn::Idle => break,
                    Turn::Full => {
                        self.stir(index);
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

    pub(in crate::node) fn by_reference(&self) -> ChildSet {
        self.group.by_reference.as_ref().map_or(ChildSet::EMPTY, |by| by.children)
    }

    /// Return whose turn in slot `index` need not be waited for, by reference: who has submitted, and who has left the
    /// group and counts as one that brings nothing (its entry names no memory).
    fn there(&self, index: usize) -> ChildSet {
        let present = self.refs.as_ref().map_or(ChildSet::EMPTY, |refs| refs.redo[index].present);
        present.union(&self.group.view.out.both(&self.by_reference()))
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
            redo.judging = true;
        }
        self.stir(index);
    }

    /// A chain of slot `index` has succeeded. What was done before an earlier failure too is no progress: else an attempt
    /// that begins well would be followed by others for ever.
    fn note_progress(&mut self, index: usize) {
        let is_answered = self.slots[index].state == State::Answered;
        if let Some(redo) = self.redo(index)
            && (is_answered || redo.pulled.len() > usize::from(redo.reached))
        {
            redo.failures = 0;
        }
    }

    /// The plan of slot `index` has come true.
    pub(super) fn commit(&mut self, index: usize) {
        let Some(redo) = self.redo(index) else { return };
        let plan = core::mem::replace(&mut redo.plan, Plan::NOTHING);
        redo.bounced = plan.bounces.or(redo.bounced);
        redo.published |= plan.publishes;
        redo.rounded |= plan.rounds;
        redo.written = redo.written.union(&plan.writes);
        redo.to_write = redo.to_write.without(&plan.writes);
        (0..self.children.len())
            .filter(|&child| plan.pulls.contains(child))
            .for_each(|child| self.pulled(index, child));
        if self.slots[index].state == State::Answered {
            self.owe(index, &plan.writes);
        }
    }

    /// Note that a child's contribution is in the accumulators: by reference, that is what sets its bit.
    fn pulled(&mut self, index: usize, child: usize) {
        let place = index * self.children.len() + child;
        let is_reference = self.by_reference().contains(child);
        let Some(refs) = &mut self.refs else { return };
        refs.redo[index].pulled.insert(child);
        if is_reference {
            let wants = refs.references[place].dst.is_some();
            self.slots[index].mark(child, refs.redo[index].data.contains(child), wants);
        }
    }

    pub(super) fn owe(&mut self, index: usize, children: &ChildSet) {
        let (Some(refs), Some(by_reference)) = (&mut self.refs, &mut self.group.by_reference) else { return };
        let redo = &mut refs.redo[index];
        redo.owed = redo.owed.union(&children.both(&redo.present));
        if !redo.owed.is_empty() {
            by_reference.owed.insert(index);
        }
    }

    fn advance<E: Engine + LocalMemory>(&mut self, index: usize, engine: &mut E, now: Instant) -> Turn {
        let (slot, children) = (self.slots[index], self.children.len());
        let seq = self.shard().global(slot.local);
        let failed = self.group.failed.is_some_and(|failure| seq >= failure.from);
        if self.redo(index).is_none_or(|redo| redo.in_flight.is_some()) {
            return Turn::Idle;
        }
        if slot.state != State::Answered && failed {
            return Turn::Idle;
        }
        if slot.state == State::Filling && self.is_everybody_there(index) && self.fails_without(index, now) {
            return Turn::Idle;
        }
        let Some(redo) = self.redo(index) else { return Turn::Idle };
        if core::mem::take(&mut redo.judging) {
            return self.judge_chain(index, engine, now);
        }
        let complete = redo.pulled.len() == children;
        let ready = complete && (redo.published || self.brought(index).is_empty() || self.group.parent.is_some());
        let done = match slot.state {
            State::Filling if ready => self.complete_by_reference(index, engine),
            State::Filling => self.gather(index, engine),
            State::Answered => self.deliver(index, engine),
            _ => return Turn::Idle,
        };
        // Its own memory fails a device only where it is broken, or the engine gone: no use trying again.
        done.unwrap_or_else(|_| self.give_up(index, now))
    }

    /// When everybody has contributed, pull in order; at the root, publish and write back in the same chain.
    ///
    /// To pull what is there while others are missing would gain the time of a few chunks, and cost a chain and another
    /// pass over the accumulators for each child that comes later than the one before: which is all of them.
    fn gather<E: Engine + LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<Turn, Status> {
        if !self.is_everybody_there(index) {
            return Ok(Turn::Idle);
        }
        let Some(refs) = &self.refs else { return Ok(Turn::Idle) };
        let mut draft = Draft::new(refs.capabilities);
        let combines = self.engine_combines(index);
        loop {
            let Some(refs) = &self.refs else { return Ok(Turn::Idle) };
            let redo = &refs.redo[index];
            let (bounced, pulled) = (redo.bounced, redo.pulled.union(&draft.plan.pulls));
            let Some(next) = self.next(index, &pulled) else { break };
            let place = self.place(index, next, &pulled);
            match next {
                Next::Reference(child) if combines => {
                    if !self.draft_pull(index, child, place, &mut draft) {
                        break;
                    }
                }
                Next::Reference(child) if self.brings(index, child) && bounced.is_none() => {
                    self.draft_bounce(index, child, &mut draft);
                    break;
                }
                // What comes behind a chain, or behind the empty, waits for its turn.
                _ if !draft.steps.is_empty() || !draft.plan.pulls.is_empty() => break,
                _ => {
                    self.combine_here(index, next, place, engine)?;
                    return Ok(Turn::Again);
                }
            }
        }
        let all = self.refs.as_ref().is_some_and(|refs| {
            refs.redo[index].pulled.union(&draft.plan.pulls).len() == self.children.len()
                && draft.plan.bounces.is_none()
        });
        if all && self.group.parent.is_none() && !self.brought(index).is_empty() {
            let stores = self.draft_store(index, &mut draft);
            if !stores && draft.steps.is_empty() {
                self.finish_here(index, engine)?;
                return Ok(Turn::Again);
            }
        }
        self.submit_draft(index, draft, engine)
    }

    /// Tell whether every child has contributed to slot `index`: by reference or inline.
    fn is_everybody_there(&self, index: usize) -> bool {
        let Some(refs) = &self.refs else { return false };
        let redo = &refs.redo[index];
        // Who has withdrawn after it was pulled is in the accumulators.
        let there = self.there(index).union(&self.slots[index].bits).union(&redo.pulled);
        there.len() == self.children.len()
    }

    /// Tell what is next to be combined, if it is there.
    fn next(&self, index: usize, pulled: &ChildSet) -> Option<Next> {
        let (refs, slot) = (self.refs.as_ref()?, &self.slots[index]);
        let (there, by_reference) = (self.there(index), self.by_reference());
        if let Some(child) = refs.redo[index].bounced {
            return Some(Next::Reference(usize::from(child)));
        }
        let children = self.children.len();
        if matches!(self.group.config.order, Order::TreeFold | Order::TreePairwise) {
            let child = pulled.len();
            // Behind the last child there is nobody to ask for: a set of 256 has no place for child 256.
            if child == children {
                return None;
            }
            let reference = by_reference.contains(child);
            let is_there = if reference { there.contains(child) } else { slot.bits.contains(child) };
            return is_there.then_some(if reference { Next::Reference(child) } else { Next::Inline(child) });
        }
        let inline = children - by_reference.len();
        there.without(pulled).first().map(Next::Reference).or_else(|| {
            let came = slot.bits.without(&by_reference);
            let waiting = !came.without(pulled).is_empty();
            (waiting && came.len() == inline && pulled.both(&by_reference) == by_reference)
                .then_some(Next::InlineTogether)
        })
    }

    fn place(&self, index: usize, next: Next, pulled: &ChildSet) -> Place {
        let data = self.brought(index).both(pulled);
        let child = match next {
            Next::Reference(child) | Next::Inline(child) => child,
            Next::InlineTogether => 0,
        };
        Place::of(self.group.config.order, self.children.len(), &data, child, !data.is_empty())
    }

    /// Return who brought data: inline or by reference, pulled or not.
    pub(in crate::node) fn brought(&self, index: usize) -> ChildSet {
        let references = self.refs.as_ref().map_or(ChildSet::EMPTY, |refs| refs.redo[index].data);
        self.slots[index].data.union(&references)
    }

    /// Tell whether somebody wants the result of slot `index`: inline or by reference, pulled or not.
    pub(in crate::node) fn is_wanted(&self, index: usize) -> bool {
        let children = self.children.len();
        let by_reference = self.refs.as_ref().is_some_and(|refs| {
            refs.references[index * children..][..children].iter().any(|reference| reference.dst.is_some())
        });
        by_reference || !self.slots[index].want.is_empty()
    }

    pub(super) fn brings(&self, index: usize, child: usize) -> bool {
        self.refs.as_ref().is_some_and(|refs| refs.redo[index].data.contains(child))
    }

    /// Write the answer to the children by reference that still want it; first, where it came from the parent, publish
    /// it.
    fn deliver<E: Engine + LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<Turn, Status> {
        let Some(refs) = &self.refs else { return Ok(Turn::Idle) };
        let redo = refs.redo[index];
        if redo.to_write.is_empty() {
            return Ok(Turn::Idle);
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
        // After a failure one at a time, so that memory that can't be written to is in nobody's way.
        let most = if redo.failures > 0 { 1 } else { self.children.len() };
        let wants = (0..self.children.len()).filter(|&child| redo.to_write.contains(child)).take(most);
        self.draft_writes(index, redo.rounded, wants, &mut draft);
        self.submit_draft(index, draft, engine)
    }

    /// Hand a chain over; what needs no steps is done.
    fn submit_draft<E: Engine>(&mut self, index: usize, draft: Draft, engine: &mut E) -> Result<Turn, Status> {
        let first = self.group.slots.start;
        let seq = self.shard().global(self.slots[index].local).0;
        let scope = Scope(self.group.by_reference.as_ref().map_or(0, |by| by.scope));
        let Some(redo) = self.redo(index) else { return Ok(Turn::Idle) };
        let empties = !draft.plan.pulls.is_empty();
        if draft.steps.is_empty() {
            redo.plan = draft.plan;
            self.commit(index);
            return Ok(if empties { Turn::Again } else { Turn::Idle });
        }
        let tag = Tag { seq, slot: (first + index) as u32, attempt: redo.chains };
        match engine.submit(Chain { tag, scope, steps: &draft.steps }) {
            Ok(()) => {
                redo.chains = redo.chains.wrapping_add(1);
                redo.plan = draft.plan;
                redo.in_flight = Some(tag);
                Ok(Turn::Idle)
            }
            Err(SubmitError::Full { .. }) => Ok(Turn::Full),
            Err(_) => Err(Status::Hardware),
        }
    }

    /// Keep what came inline until its turn: in a stage of its own where the order is declared, else all in one.
    pub(in crate::node) fn stage_inline(
        &mut self,
        index: usize,
        child: usize,
        kernel: Kernel,
        input: Option<Input<'_>>,
    ) {
        let Some(input) = input else { return };
        let apart = matches!(self.group.config.order, Order::TreeFold | Order::TreePairwise);
        let mut others = self.slots[index].data.without(&self.by_reference());
        others.remove(child);
        let mut stages = self.stages(index);
        let acc = stages.stage(if apart { child } else { 0 });
        take(kernel, acc, input, !apart && !others.is_empty());
    }

    /// Combine what the processor has to, while no chain of the slot is in flight.
    fn combine_here<E: LocalMemory>(
        &mut self,
        index: usize,
        next: Next,
        place: Place,
        engine: &mut E,
    ) -> Result<(), Status> {
        if !self.has_begun(index) {
            self.clear_record(index, engine)?;
        }
        let slot = self.slots[index];
        let (target, len) = (self.accumulator(index, place.target), self.value_len(index));
        let acc = Span { address: target, len_bytes: len as u64 };
        let inline = slot.data.without(&self.by_reference());
        let moved = slot.kernel().is_none();
        match next {
            Next::Reference(child) if self.brings(index, child) => {
                let len_bytes = u64::from(slot.elements.unwrap_or(0)) * slot.element_bytes(false).unwrap_or(0) as u64;
                let bounce = Span { address: self.bounce(index), len_bytes };
                engine.with_local(acc, bounce, |acc, payload| put(slot.kernel(), acc, payload, false, place.first))?;
            }
            Next::Inline(child) if inline.contains(child) => {
                let stage = self.stage_range(index, if moved { 0 } else { child }, len);
                let payload = &self.bytes[stage];
                engine.with_local(acc, nothing_at(target), |acc, _| {
                    put(slot.kernel(), acc, payload, true, place.first)
                })?;
            }
            Next::InlineTogether if !inline.is_empty() => {
                let payload = &self.bytes[self.stage_range(index, 0, len)];
                engine.with_local(acc, nothing_at(target), |acc, _| {
                    put(slot.kernel(), acc, payload, true, place.first)
                })?;
            }
            _ => {}
        }
        for (dst, src) in place.merging() {
            let span = |n| Span { address: self.accumulator(index, n), len_bytes: len as u64 };
            engine.with_local(span(dst), span(src), |acc, right| put(slot.kernel(), acc, right, true, false))?;
        }
        if let Some(redo) = self.redo(index) {
            redo.bounced = None;
        }
        match next {
            Next::Reference(child) | Next::Inline(child) => self.pulled(index, child),
            Next::InlineTogether => {
                let came = slot.bits.without(&self.by_reference());
                (0..self.children.len())
                    .filter(|&child| came.contains(child))
                    .for_each(|child| self.pulled(index, child));
            }
        }
        Ok(())
    }

    /// Make the result where the accumulators are.
    fn finish_here<E: LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<(), Status> {
        let (slot, ranks) = (self.slots[index], self.members());
        let address = self.accumulator(index, 0);
        if let Some(kernel) = slot.kernel() {
            let span = Span { address, len_bytes: self.value_len(index) as u64 };
            let count = slot.elements.unwrap_or(0) as usize;
            engine.with_local(span, nothing_at(address), |acc, _| kernel.finish(acc, count, ranks))?;
        }
        if let Some(redo) = self.redo(index) {
            redo.finished = true;
        }
        Ok(())
    }

    /// Everybody is in, and at the root the result is published: fetch what goes on as packets, and answer or send up.
    fn complete_by_reference<E: LocalMemory>(&mut self, index: usize, engine: &mut E) -> Result<Turn, Status> {
        let slot = self.slots[index];
        let is_root = self.group.parent.is_none();
        let has_value = !slot.data.is_empty();
        let size = slot.element_bytes(!is_root).unwrap_or(0);
        let len = if has_value { slot.elements.unwrap_or(0) as usize * size } else { 0 };
        let inline_wants = !slot.want.without(&self.by_reference()).is_empty();
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
        self.slots[index].value_len = len as u16;
        if is_root {
            self.answer(index);
            return Ok(Turn::Again);
        }
        self.slots[index].state = State::Up;
        self.group.up.insert(index);
        Ok(Turn::Idle)
    }
}

/// Combine, or copy what comes first; what is only moved is always first.
fn put(kernel: Option<Kernel>, acc: &mut [u8], payload: &[u8], partial: bool, first: bool) {
    match kernel {
        Some(kernel) => take(kernel, acc, Input { payload, partial }, !first),
        None => acc.copy_from_slice(payload),
    }
}
