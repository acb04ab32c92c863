//! The rings' side: submissions are checked and kept, answers handed out.
//!
//! A rank's ring is its own, so who submits is known; everything else in an entry is its word. A run of chunks is taken
//! whole or not at all, so that what is refused can be told at once and has left nothing behind.

use super::{Live, Node, Reference};
use crate::group::{Announced, Failure};
use crate::node::child::agree;
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

/// What a function's completion ring is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Whose ring.
    pub function: FunctionId,
    /// The entry.
    pub entry: CompletionEntry,
    /// For a mismatch and what is not supported: the first operation that came here, and the other.
    pub operations: Option<(OpDesc, OpDesc)>,
    /// For [`EntryStatus::Stragglers`]: the ranks that were missing.
    pub missing: Option<RankMask>,
}

/// A run of chunks as one child submitted it, once it was found well-formed.
struct Submitted {
    child: usize,
    op: OpDesc,
    /// The first chunk's local number.
    local: u64,
    /// Bytes of an element in the child's memory; 0 where nothing is said about memory.
    element_bytes: usize,
    /// Elements of a full chunk.
    limit: usize,
}

impl Submitted {
    /// Return the elements of chunk `next` of the run.
    fn elements(&self, entry: &Contribution, next: usize) -> usize {
        (entry.elements as usize - next * self.limit).min(self.limit)
    }

    /// Return where chunk `next` of the run is, behind `base`.
    fn address(&self, base: Address, next: usize) -> Option<Address> {
        let skip = (next * self.limit * self.element_bytes) as u64;
        Some(Address { offset_bytes: base.offset_bytes.checked_add(skip)?, ..base })
    }
}

impl Node<'_> {
    /// Take in what `owner` submitted through its ring at `now`. Its regions are held until [`Node::poll_answer`] has
    /// answered it, chunk by chunk.
    ///
    /// # Errors
    /// What to answer at once; no chunk was taken. (`have` and the lease were, if the entry got that far.)
    pub fn submit<const N: usize>(
        &mut self,
        owner: FunctionId,
        entry: &Contribution,
        regions: &mut RegionTable<N>,
        now: Instant,
    ) -> Result<(), EntryStatus> {
        let index = self.find(entry.group).ok_or(EntryStatus::UnknownGroup)?;
        let mut live = self.live(index).ok_or(EntryStatus::UnknownGroup)?;
        let child = live.children.iter().position(|child| child.owner == Some(owner));
        let child = child.ok_or(EntryStatus::UnknownGroup)?;
        if entry.epoch != live.group.config.epoch {
            return Err(EntryStatus::StaleEpoch);
        }
        if live.group.view.out.contains(child) {
            let waits = live.group.by_reference.as_ref().is_some_and(|by| by.untold.contains(child));
            return Err(if waits { EntryStatus::Window } else { EntryStatus::Excluded });
        }
        if live.group.by_reference.as_ref().is_some_and(|by| by.withdrawn.contains(child)) {
            return Err(EntryStatus::Fenced);
        }
        live.group.lease_until = now + live.group.lease();
        let submitted = live.check_entry(child, entry)?;
        let have = entry.seq.0.checked_sub(u64::from(entry.lag)).map(ChunkNo).ok_or(EntryStatus::Malformed)?;
        if live.shard().below(have) > live.group.answered_below {
            return Err(EntryStatus::Malformed);
        }
        live.note_have(child, have);
        for next in 0..usize::from(entry.count) {
            live.check_chunk(&submitted, entry, next)?;
        }
        if !planted!(live.common, RegionNotHeld) {
            hold(owner, entry, &submitted, regions)?;
        }
        for next in 0..usize::from(entry.count) {
            live.take_chunk(&submitted, entry, next, now);
        }
        live.note_output();
        Ok(())
    }

    /// Note how long an operation that `owner` contributes to next waits for ranks. What is wrong with it is wrong with
    /// the contributions too, and said of those.
    pub fn announce(&mut self, owner: FunctionId, entry: &OperationLimit) {
        let Some(live) = self.find(entry.group).and_then(|index| self.live(index)) else { return };
        if entry.epoch != live.group.config.epoch {
            return;
        }
        let (first, limit) = (entry.seq.0, entry.limit);
        if let Some(child) = live.children.iter_mut().find(|child| child.owner == Some(owner)) {
            child.announced = Some(Announced { first, end: first.saturating_add(entry.chunks), limit });
        }
    }

    /// Return the next answer for a ring, or what its owner has to know before ([`CompletionEntry::Missing`]). The child's regions are released, and it holds the chunk from now on if the
    /// chunk has landed.
    pub fn poll_answer<const N: usize>(&mut self, regions: &mut RegionTable<N>) -> Option<Answer> {
        for index in 0..self.groups_end {
            let Some(mut live) = self.live(index) else { continue };
            if let Some(decision) = live.next_decision() {
                return Some(decision);
            }
            let Some((child, answer, reference)) = live.next_answer() else { continue };
            let is_held = !planted!(live.common, RegionNotHeld);
            for address in [reference.src, reference.dst].into_iter().flatten().filter(|_| is_held) {
                regions.release(address.region);
            }
            live.note_answered(child);
            live.note_output();
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

/// Return what a ring is told of a group's failure.
fn status_of(reason: NakReason) -> EntryStatus {
    match reason {
        NakReason::Mismatch => EntryStatus::Mismatch,
        NakReason::Unsupported => EntryStatus::Unsupported,
        NakReason::Stragglers => EntryStatus::Stragglers,
        NakReason::Excluded => EntryStatus::Excluded,
        _ => EntryStatus::PathLost,
    }
}

impl Live<'_> {
    /// Check what can be checked of a run without looking at slots.
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
            // It waits for the root's decision as it would for its window.
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
        // Where operations differ, so may shapes: that is found out, and told to everybody, when it is taken.
        if entry.signature != slot.signature {
            return Ok(());
        }
        let moved_twice =
            slot.kernel().is_none() && entry.src.is_some() && !(redo.data.is_empty() && slot.data.is_empty());
        let elements = (submitted.limit > 0).then(|| submitted.elements(entry, next));
        let differs = elements.zip(slot.elements).is_some_and(|(ours, theirs)| ours != theirs as usize);
        if moved_twice || differs { Err(EntryStatus::Malformed) } else { Ok(()) }
    }

    /// Take chunk `next` of a run: everything that could be refused at once has been checked.
    fn take_chunk(&mut self, submitted: &Submitted, entry: &Contribution, next: usize, now: Instant) {
        let Submitted { child, op, .. } = *submitted;
        let local = submitted.local + next as u64;
        let index = self.slot_index(local);
        let seq = self.shard().global(local);
        if !self.slots[index].holds(local) {
            self.begin(index, local, op, entry.signature);
            self.note_announced(index, child);
        }
        self.children[child].top = self.children[child].top.max(local + 1);
        self.common.counters.contributions += 1;
        let place = index * self.children.len() + child;
        let (Some(refs), Some(by_reference)) = (&mut self.refs, &mut self.group.by_reference) else { return };
        let at = |base: Option<Address>| base.and_then(|base| submitted.address(base, next));
        refs.references[place] = Reference { src: at(entry.src), dst: at(entry.dst) };
        let redo = &mut refs.redo[index];
        redo.present.insert(child);
        if self.group.failed.is_some_and(|failure| seq >= failure.from) {
            redo.owed.insert(child);
            by_reference.owed.insert(index);
            return;
        }
        let slot = &mut self.slots[index];
        let (first, refused) = (slot.op, slot.state == State::Refused);
        let uses_memory = submitted.limit > 0;
        let reason = if entry.signature != slot.signature || !agree(&op, &first) {
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
        slot.note_time(self.children[child].seat.rank(), 0, now);
        if uses_memory {
            slot.elements = Some(submitted.elements(entry, next) as u32);
        }
        if entry.src.is_some() {
            redo.data.insert(child);
        }
        by_reference.work.insert(index);
    }

    /// Return the next answer that may be given, the lowest chunk's first.
    fn next_answer(&mut self) -> Option<(usize, Answer, Reference)> {
        let oldest = self.slot_index(self.shard().below(self.group.min_have));
        let (refs, by_reference) = (self.refs.as_mut()?, self.group.by_reference.as_mut()?);
        if by_reference.owed.is_empty() {
            return None;
        }
        let (index, child) = by_reference.owed.iter_from(oldest).find_map(|index| {
            let redo = &refs.redo[index];
            // An answer gives the memory back: it waits for what may touch it.
            let child = match redo.in_flight {
                None => redo.owed.first(),
                Some(_) if planted!(self.common, AnsweredInFlight) => redo.owed.first(),
                Some(_) if self.slots[index].state == State::Answered => redo.owed.without(&redo.plan.writes).first(),
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
        } else if let Some(status) = by_reference.closing {
            status
        } else if self.group.view.out.contains(child) {
            EntryStatus::Excluded
        } else if by_reference.withdrawn.contains(child) {
            EntryStatus::Fenced
        } else if redo.broken.contains(child) {
            EntryStatus::Hardware
        } else if slot.state == State::Answered {
            EntryStatus::Done
        } else {
            operations = self.group.failed.and_then(|failure| failure.ops);
            self.group.failed.map_or(EntryStatus::PathLost, |failure| status_of(failure.reason))
        };
        redo.owed.remove(child);
        redo.present.remove(child);
        if redo.owed.is_empty() {
            by_reference.owed.remove(index);
        }
        let place = index * self.children.len() + child;
        let reference = core::mem::replace(&mut refs.references[place], Reference::EMPTY);
        let config = &self.group.config;
        // Where the chunk before is another operation's, as far as it is still here.
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
        let missing = (status == EntryStatus::Stragglers).then(|| self.group.view.missed());
        Some((child, Answer { function: self.children[child].owner?, entry, operations, missing }, reference))
    }

    /// Return half of a decision that a child by reference has yet to be told of: before any answer, so that no rank
    /// takes a result without knowing whose it is.
    fn next_decision(&mut self) -> Option<Answer> {
        loop {
            let by_reference = self.group.by_reference.as_mut().filter(|by| !by.is_closing())?;
            let index = by_reference.untold.first()?;
            let child = &mut self.children[index];
            let halves = child.told_halves;
            if halves / 2 == self.group.view.number() {
                by_reference.untold.remove(index);
                continue;
            }
            child.told_halves += 1;
            let (number, owner) = (halves / 2 + 1, child.owner);
            let told = self.group.view.told(number);
            if let Some((function, (seq, ranks))) = owner.zip(told) {
                let entry = CompletionEntry::missing(number, seq, &ranks)[usize::from(halves % 2)];
                return Some(Answer { function, entry, operations: None, missing: None });
            }
        }
    }

    /// Move a child's `have` past what it was answered. By reference, landing is the engine's work, done before the
    /// answer is given: nobody needs to wait for the rank to come back and say so. (It is a number over all shards, of
    /// which a node knows one: where there are others, the rank has to say it.)
    ///
    /// A result that did not land stops it there, so that its redo slot stays for the rank to look it up.
    fn note_answered(&mut self, child: usize) {
        let (shard, Some(refs), Some(by_reference)) = (self.shard(), &self.refs, &self.group.by_reference) else {
            return;
        };
        if shard.shards() != 1 {
            return;
        }
        let has_withdrawn = by_reference.withdrawn.contains(child);
        let mut local = shard.below(self.children[child].have);
        let holds = |local: u64| {
            let index = self.slot_index(local);
            let (slot, redo) = (&self.slots[index], &refs.redo[index]);
            let is_answered = slot.state == State::Answered && !redo.present.contains(child);
            let has_landed = redo.written.contains(child) || !(has_withdrawn || redo.broken.contains(child));
            slot.holds(local) && is_answered && has_landed
        };
        while holds(local) {
            local += 1;
        }
        self.note_have(child, shard.global(local));
    }
}
