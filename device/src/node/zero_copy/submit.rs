//! Submissions and answers: the node's interface to the rings of zero-copy ranks.
//!
//! A rank has a ring of its own, so the submitter is known; every other field of an entry is untrusted. A run of chunks
//! is taken whole or not at all, so that a refused entry is answered at once and leaves nothing behind.

use super::{BufferRef, GroupCtx, Node};
use crate::node::child::same_operation;
use crate::node::group::{AnnouncedLimit, Failure};
use crate::node::supported;
use crate::slot::State;
use sumac_hal::dma::{Address, RegionError, RegionTable};
use sumac_hal::ids::{ChunkNo, FunctionId};
use sumac_hal::mmio::{CompletionEntry, Contribution, EntryStatus, OperationLimit};
use sumac_hal::op::OpDesc;
use sumac_hal::planted;
use sumac_hal::shard::RUN;
use sumac_hal::time::Instant;
use sumac_hal::wire::{NakReason, RankMask};

/// An answer for a function's completion ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The function whose ring it goes to.
    pub function: FunctionId,
    /// The completion entry.
    pub entry: CompletionEntry,
    /// For a mismatch or an unsupported operation: the first operation that arrived here, and the other one.
    pub operations: Option<(OpDesc, OpDesc)>,
    /// For [`EntryStatus::Stragglers`]: the missing ranks.
    pub missing: Option<RankMask>,
}

/// A run of chunks that one child submitted, validated.
struct Submitted {
    child: usize,
    op: OpDesc,
    /// Local number of the first chunk.
    local: u64,
    /// Bytes per element in the child's memory; 0 if the entry names no memory.
    element_bytes: usize,
    /// Elements per full chunk.
    limit: usize,
}

impl Submitted {
    /// Return the number of elements in chunk `next` of the run.
    fn elements(&self, entry: &Contribution, next: usize) -> usize {
        (entry.elements as usize - next * self.limit).min(self.limit)
    }

    /// Return the address of chunk `next` of the run, which starts at `base`.
    fn address(&self, base: Address, next: usize) -> Option<Address> {
        let skip = (next * self.limit * self.element_bytes) as u64;
        Some(Address { offset_bytes: base.offset_bytes.checked_add(skip)?, ..base })
    }
}

impl Node<'_> {
    /// Accept what `owner` submitted through its ring at `now`. Its regions are held until [`Node::poll_answer`] has
    /// answered it, chunk by chunk.
    ///
    /// # Errors
    /// The status to complete the entry with; no chunk was taken. `have` and the lease may have been updated.
    pub fn submit<const N: usize>(
        &mut self,
        owner: FunctionId,
        entry: &Contribution,
        regions: &mut RegionTable<N>,
        now: Instant,
    ) -> Result<(), EntryStatus> {
        let index = self.find(entry.group).ok_or(EntryStatus::UnknownGroup)?;
        let mut ctx = self.group_ctx(index).ok_or(EntryStatus::UnknownGroup)?;
        let child = ctx.children.iter().position(|child| child.owner == Some(owner));
        let child = child.ok_or(EntryStatus::UnknownGroup)?;
        if entry.epoch != ctx.group.config.epoch {
            return Err(EntryStatus::StaleEpoch);
        }
        if ctx.group.view.excluded.contains(child) {
            let waits = ctx.group.zero_copy.as_ref().is_some_and(|by| by.to_notify.contains(child));
            return Err(if waits { EntryStatus::Window } else { EntryStatus::Excluded });
        }
        if ctx.group.zero_copy.as_ref().is_some_and(|by| by.withdrawn.contains(child)) {
            return Err(EntryStatus::Fenced);
        }
        ctx.group.lease_until = now + ctx.group.lease();
        let submitted = ctx.check_entry(child, entry)?;
        let have = entry.seq.0.checked_sub(u64::from(entry.lag)).map(ChunkNo).ok_or(EntryStatus::Malformed)?;
        if ctx.shard().below(have) > ctx.group.answered_below {
            return Err(EntryStatus::Malformed);
        }
        ctx.note_have(child, have);
        for next in 0..usize::from(entry.count) {
            ctx.check_chunk(&submitted, entry, next)?;
        }
        if !planted!(ctx.common, RegionNotHeld) {
            hold(owner, entry, &submitted, regions)?;
        }
        for next in 0..usize::from(entry.count) {
            ctx.take_chunk(&submitted, entry, next, now);
        }
        ctx.note_output();
        Ok(())
    }

    /// Record the straggler limit of an operation that `owner` contributes to next. Errors are reported with the
    /// contributions, which repeat them.
    pub fn announce(&mut self, owner: FunctionId, entry: &OperationLimit) {
        let Some(ctx) = self.find(entry.group).and_then(|index| self.group_ctx(index)) else { return };
        if entry.epoch != ctx.group.config.epoch {
            return;
        }
        let (first, limit) = (entry.seq.0, entry.limit);
        if let Some(child) = ctx.children.iter_mut().find(|child| child.owner == Some(owner)) {
            child.announced = Some(AnnouncedLimit { first, end: first.saturating_add(entry.chunks), limit });
        }
    }

    /// Return the next completion for a ring: an answer, or an exclusion decision that its owner has to know first
    /// ([`CompletionEntry::Missing`]). An answer releases the child's regions, and advances its `have` if the result
    /// was delivered.
    #[must_use]
    pub fn poll_answer<const N: usize>(&mut self, regions: &mut RegionTable<N>) -> Option<Answer> {
        for index in 0..self.groups_end {
            let Some(mut ctx) = self.group_ctx(index) else { continue };
            if let Some(decision) = ctx.next_decision() {
                return Some(decision);
            }
            let Some((child, answer, buffer)) = ctx.next_answer() else { continue };
            let is_held = !planted!(ctx.common, RegionNotHeld);
            for address in [buffer.src, buffer.dst].into_iter().flatten().filter(|_| is_held) {
                regions.release(address.region);
            }
            ctx.note_answered(child);
            ctx.note_output();
            if self.storage.groups[index].as_ref().is_some_and(|group| group.is_closing()) {
                self.free_if_quiet(index);
            }
            return Some(answer);
        }
        None
    }
}

/// Hold every region of a run, or none.
fn hold<const N: usize>(
    owner: FunctionId,
    entry: &Contribution,
    submitted: &Submitted,
    regions: &mut RegionTable<N>,
) -> Result<(), EntryStatus> {
    let bases = || [entry.src, entry.dst].into_iter().flatten();
    let each = (0..usize::from(entry.count)).flat_map(|next| bases().map(move |base| (next, base)));
    for (held, (next, base)) in each.clone().enumerate() {
        let len_bytes = (submitted.elements(entry, next) * submitted.element_bytes) as u64;
        let address = submitted.address(base, next).ok_or(EntryStatus::OutOfBounds);
        let taken = address.and_then(|address| {
            regions.hold(owner, address, len_bytes).map_err(|error| match error {
                RegionError::OutOfBounds { .. } => EntryStatus::OutOfBounds,
                RegionError::Stale { .. } => EntryStatus::StaleRegion,
                _ => EntryStatus::BadRegion,
            })
        });
        if let Err(status) = taken {
            each.take(held).for_each(|(_, base)| {
                regions.release(base.region);
            });
            return Err(status);
        }
    }
    Ok(())
}

/// Return the status that reports a group's failure to a ring.
fn status_of(reason: NakReason) -> EntryStatus {
    match reason {
        NakReason::Mismatch => EntryStatus::Mismatch,
        NakReason::Unsupported => EntryStatus::Unsupported,
        NakReason::Stragglers => EntryStatus::Stragglers,
        NakReason::Excluded => EntryStatus::Excluded,
        _ => EntryStatus::PathLost,
    }
}

impl GroupCtx<'_> {
    /// Validate a run, as far as that needs no slots.
    fn check_entry(&self, child: usize, entry: &Contribution) -> Result<Submitted, EntryStatus> {
        let Contribution { seq, count, collective, dtype, op, root, total, .. } = *entry;
        let in_run = (1..=RUN - seq.0 % RUN).contains(&u64::from(count));
        let local = self.shard().local(seq).filter(|_| in_run).ok_or(EntryStatus::Malformed)?;
        let op = OpDesc { collective, dtype, op, root, count: total };
        let nothing = Submitted { child, op, local, element_bytes: 0, limit: 0 };
        let bases = [entry.src, entry.dst];
        if bases == [None, None] {
            return Ok(nothing);
        }
        let limit = usize::from(self.group.config.chunk_len_bytes).checked_div(op.partial_bytes()).unwrap_or(0);
        let elements = entry.elements as usize;
        if limit == 0 || elements == 0 || elements.div_ceil(limit) != usize::from(count) {
            return Err(EntryStatus::Malformed);
        }
        let submitted = Submitted { element_bytes: op.element_bytes(), limit, ..nothing };
        let mask = self.refs.as_ref().map_or(0, |refs| u64::from(refs.capabilities.alignment_bytes) - 1);
        let step = if count > 1 { (limit * submitted.element_bytes) as u64 } else { 0 };
        if bases.into_iter().flatten().any(|base| (base.offset_bytes | step) & mask != 0) {
            return Err(EntryStatus::Misaligned);
        }
        Ok(submitted)
    }

    /// Check that chunk `next` of a run can be taken.
    fn check_chunk(&self, submitted: &Submitted, entry: &Contribution, next: usize) -> Result<(), EntryStatus> {
        let local = submitted.local + next as u64;
        if self.is_held_back(submitted.child, self.shard().global(local).0) {
            // It waits for the root's decision, as if the window were closed.
            return Err(EntryStatus::Window);
        }
        let have = self.shard().below(self.children[submitted.child].have);
        if local >= have + self.group.window_local {
            return Err(EntryStatus::Window);
        }
        let index = self.slot_index(local);
        let slot = &self.slots[index];
        if !slot.holds(local) {
            let behind = slot.state != State::Free && slot.local > local;
            let status = if behind { EntryStatus::Malformed } else { EntryStatus::Window };
            return if self.is_reusable(index) && !behind { Ok(()) } else { Err(status) };
        }
        let Some(refs) = &self.refs else { return Err(EntryStatus::UnknownGroup) };
        let redo = &refs.redo[index];
        let twice = redo.present.contains(submitted.child) || slot.bits.contains(submitted.child);
        if twice || !matches!(slot.state, State::Filling | State::Refused) {
            return Err(EntryStatus::Malformed);
        }
        // If the operations differ, shapes may too: taking the chunk detects and reports that.
        if entry.signature != slot.signature {
            return Ok(());
        }
        let moved_twice =
            slot.kernel().is_none() && entry.src.is_some() && !(redo.data.is_empty() && slot.data.is_empty());
        let elements = (submitted.limit > 0).then(|| submitted.elements(entry, next));
        let differs = elements.zip(slot.elements).is_some_and(|(ours, theirs)| ours != theirs as usize);
        if moved_twice || differs { Err(EntryStatus::Malformed) } else { Ok(()) }
    }

    /// Take chunk `next` of a run. All checks that could refuse it have passed.
    fn take_chunk(&mut self, submitted: &Submitted, entry: &Contribution, next: usize, now: Instant) {
        let Submitted { child, op, .. } = *submitted;
        let local = submitted.local + next as u64;
        let index = self.slot_index(local);
        let seq = self.shard().global(local);
        if !self.slots[index].holds(local) {
            self.begin(index, local, op, entry.signature);
            self.note_announced_limit(index, child);
        }
        self.children[child].top = self.children[child].top.max(local + 1);
        self.common.counters.contributions += 1;
        self.common.counters.zero_copy_contributions += 1;
        let place = index * self.children.len() + child;
        let (Some(refs), Some(zero_copy)) = (&mut self.refs, &mut self.group.zero_copy) else { return };
        let at = |base: Option<Address>| base.and_then(|base| submitted.address(base, next));
        refs.buffers[place] = BufferRef { src: at(entry.src), dst: at(entry.dst) };
        let redo = &mut refs.redo[index];
        redo.present.insert(child);
        if self.group.failed.is_some_and(|failure| seq >= failure.from) {
            redo.to_answer.insert(child);
            zero_copy.to_answer.insert(index);
            return;
        }
        let slot = &mut self.slots[index];
        let (first, refused) = (slot.op, slot.state == State::Refused);
        let uses_memory = submitted.limit > 0;
        let reason = if entry.signature != slot.signature || !same_operation(&op, &first) {
            Some((NakReason::Mismatch, first, op))
        } else if uses_memory && !supported(&op) {
            Some((NakReason::Unsupported, op, op))
        } else {
            None
        };
        if let Some((reason, first, other)) = reason {
            return self.refuse(index, Failure { from: seq, reason, ops: Some((first, other)) }, now);
        }
        if refused {
            return;
        }
        slot.note_time(self.children[child].kind.rank(), 0, now);
        if uses_memory {
            slot.elements = Some(submitted.elements(entry, next) as u32);
        }
        if entry.src.is_some() {
            redo.data.insert(child);
        }
        zero_copy.work.insert(index);
    }

    /// Return the next answer that may be given, lowest chunk first.
    fn next_answer(&mut self) -> Option<(usize, Answer, BufferRef)> {
        let oldest = self.slot_index(self.shard().below(self.group.min_have));
        let (refs, zero_copy) = (self.refs.as_mut()?, self.group.zero_copy.as_mut()?);
        if zero_copy.to_answer.is_empty() {
            return None;
        }
        let (index, child) = zero_copy.to_answer.iter_from(oldest).find_map(|index| {
            let redo = &refs.redo[index];
            // An answer returns the memory to the rank, so it waits for chains that may touch it.
            let child = match redo.in_flight {
                None => redo.to_answer.first(),
                Some(_) if planted!(self.common, AnsweredInFlight) => redo.to_answer.first(),
                Some(_) if self.slots[index].state == State::Answered => {
                    redo.to_answer.difference(&redo.plan.writes).first()
                }
                Some(_) => None,
            };
            child.map(|child| (index, child))
        })?;
        let redo = &mut refs.redo[index];
        let slot = &self.slots[index];
        let seq = self.common.config.shard.global(slot.local);
        let mut operations = None;
        let status = if redo.written.contains(child) {
            EntryStatus::Result
        } else if let Some(status) = zero_copy.closing {
            status
        } else if self.group.view.excluded.contains(child) {
            EntryStatus::Excluded
        } else if zero_copy.withdrawn.contains(child) {
            EntryStatus::Fenced
        } else if redo.unwritable.contains(child) {
            EntryStatus::Hardware
        } else if slot.state == State::Answered {
            EntryStatus::Done
        } else {
            operations = self.group.failed.and_then(|failure| failure.ops);
            self.group.failed.map_or(EntryStatus::PathLost, |failure| status_of(failure.reason))
        };
        redo.to_answer.remove(child);
        redo.present.remove(child);
        if redo.to_answer.is_empty() {
            zero_copy.to_answer.remove(index);
        }
        let place = index * self.children.len() + child;
        let buffer = core::mem::replace(&mut refs.buffers[place], BufferRef::EMPTY);
        let config = &self.group.config;
        // The slowest rank is reported with an operation's first chunk: the chunk before it, if still here, has another
        // signature.
        let before = slot.local.checked_sub(1).map(|local| &self.slots[(local % self.slots.len() as u64) as usize]);
        let begins = before.is_none_or(|before| before.signature != slot.signature);
        let slowest = slot.slowest.filter(|_| begins && slot.state == State::Answered);
        let entry = CompletionEntry::Answer {
            slowest: slowest.map(|rank| (rank, slot.late_us)),
            status,
            group: config.group,
            epoch: config.epoch,
            seq,
            count: 1,
            window: self.group.granted(),
            stable: self.group.stable(),
        };
        let missing = (status == EntryStatus::Stragglers).then(|| self.group.view.missing_ranks());
        Some((child, Answer { function: self.children[child].owner?, entry, operations, missing }, buffer))
    }

    /// Return the next half of an exclusion decision to send to a zero-copy child: before any answer, so that no rank
    /// takes a result without knowing which ranks are in it.
    fn next_decision(&mut self) -> Option<Answer> {
        loop {
            let zero_copy = self.group.zero_copy.as_mut().filter(|by| !by.is_closing())?;
            let index = zero_copy.to_notify.first()?;
            let child = &mut self.children[index];
            let halves = child.decision_halves_sent;
            if halves / 2 == self.group.view.number() {
                zero_copy.to_notify.remove(index);
                continue;
            }
            child.decision_halves_sent += 1;
            let (number, owner) = (halves / 2 + 1, child.owner);
            let exclusion = self.group.view.exclusion(number);
            if let Some((function, (seq, ranks))) = owner.zip(exclusion) {
                let entry = CompletionEntry::missing(number, seq, &ranks)[usize::from(halves % 2)];
                return Some(Answer { function, entry, operations: None, missing: None });
            }
        }
    }

    /// Advance a child's `have` past its answered chunks. The engine has delivered a zero-copy result before the answer
    /// is given, so the rank need not report it. With several shards the rank has to: `have` counts over all shards, of
    /// which a node knows one.
    ///
    /// A result that was not delivered stops it, so that its redo slot stays for the rank to read.
    fn note_answered(&mut self, child: usize) {
        let (shard, Some(refs), Some(zero_copy)) = (self.shard(), &self.refs, &self.group.zero_copy) else {
            return;
        };
        if shard.shards() != 1 {
            return;
        }
        let has_withdrawn = zero_copy.withdrawn.contains(child);
        let mut local = shard.below(self.children[child].have);
        let holds = |local: u64| {
            let index = self.slot_index(local);
            let (slot, redo) = (&self.slots[index], &refs.redo[index]);
            let is_answered = slot.state == State::Answered && !redo.present.contains(child);
            let is_delivered = redo.written.contains(child) || !(has_withdrawn || redo.unwritable.contains(child));
            slot.holds(local) && is_answered && is_delivered
        };
        while holds(local) {
            local += 1;
        }
        self.note_have(child, shard.global(local));
    }
}
