//! The schedule checker: executes all ranks' schedules symbolically, and proves what tests on numbers only sample.
//!
//! A value is the *expression* that produced it, so a missing, doubled or misplaced contribution cannot cancel out.
//! [`check`] proves, for one collective over one communicator:
//! - Within a step nothing is overwritten that the step reads, or written twice, even where buffers share memory.
//! - The n-th send from a to b matches the n-th receive of b from a: as many elements, in the same form.
//! - There is no cycle of waits, even if each send waits for its receiver (no buffering anywhere).
//! - Partial values are never used as finished ones, finished values are never reduced further, and nothing is rounded
//!   before every contribution is included.
//! - At the end every rank has each element that it should have, finished, with every contribution exactly once, and
//!   all ranks have the same expression of it.
//!
//! It needs no element type: elements that all schedules treat alike are one symbol, so its cost does not depend on the
//! count. Of each schedule it holds the step that its rank is in, as the executor does. HCCL's verifier also checks
//! task graphs without devices.

mod error;
mod expression;
mod goal;
mod memory;
mod simulation;
#[cfg(test)]
mod tests;

pub use error::CheckError;
pub use expression::{ExprId, Expressions};
pub use goal::Goal;

use super::tree::Tree;
use super::{Algorithm, Place, Problem, Recv, Region, Schedule, Send, Shape, Span, Step, StepBuffer};
use memory::Memory;
use simulation::Simulation;
use std::collections::BTreeMap;
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Costs of a proved schedule, and the expressions that it computes.
#[derive(Debug)]
pub struct Report {
    /// The largest number of steps with messages of a rank: the alpha term if ranks do not wait for each other's steps.
    pub steps: usize,
    /// The elements that the busiest sender sends.
    pub sent_elements_max: u64,
    /// The messages of all ranks together. What a rank sends to another in one step is one message.
    pub messages: u64,
    /// The elements that all ranks together send.
    pub moved_elements: u64,
    /// The largest number of messages of a rank, in one direction, beyond one for each step.
    pub extra_messages: u64,
    /// The largest number of pieces that a rank sends beyond one for each message.
    pub extra_pieces: u64,
    /// The largest number of elements that a rank combines: the gamma term.
    pub reduced_elements_max: u64,
    /// The elements on the longest path through the collective: the beta term. A message starts when both ends have
    /// reached its step, and a rank sends as much at a time as one message, and receives as much; messages of a step
    /// share that in whatever way ends the step first.
    pub path_elements: u64,
    /// The expressions of `blocks`.
    pub expressions: Expressions,
    /// For each run of elements of a reduction that is treated alike, its expression (identical on every rank).
    pub blocks: Vec<(Span, ExprId)>,
}

/// Prove that `schedules`, one for each rank in rank order, reach `goal`.
///
/// # Errors
/// [`CheckError`] names the first violation, and where it is.
pub fn check(goal: Goal<'_>, schedules: &[Schedule]) -> Result<Report, CheckError> {
    goal.fits(schedules)?;
    let mut counts = Counts::default();
    for schedule in schedules {
        well_formed(schedule, &mut counts)?;
    }
    let mut simulation = Simulation::new(schedules, goal == Goal::Barrier);
    if let Err(error) = simulation.run() {
        // Whatever follows from ends that do not match, they are the cause.
        return Err(matched(schedules).err().unwrap_or(error));
    }
    let blocks = goal.check_postconditions(&simulation)?;
    Ok(Report {
        steps: counts.steps,
        sent_elements_max: counts.sent_elements_max,
        messages: counts.messages,
        moved_elements: counts.moved_elements,
        extra_messages: counts.extra_messages,
        extra_pieces: counts.extra_pieces,
        reduced_elements_max: simulation.reduced_elements_max(),
        path_elements: simulation.finish_time(),
        expressions: simulation.into_expressions(),
        blocks,
    })
}

/// What the steps of all ranks add up to.
#[derive(Debug, Default)]
struct Counts {
    steps: usize,
    sent_elements_max: u64,
    messages: u64,
    moved_elements: u64,
    extra_messages: u64,
    extra_pieces: u64,
    /// The peers of a step in one direction.
    peers: Vec<Rank>,
}

/// The same of one rank.
#[derive(Debug, Default)]
struct RankCounts {
    steps: usize,
    sent_elements: u64,
    extra_messages: u64,
    extra_pieces: u64,
}

impl Counts {
    /// Count a step of a rank.
    fn add(&mut self, of_rank: &mut RankCounts, step: Step<'_>) {
        let receivers = self.distinct(step.sends.iter().map(|send| send.peer));
        let senders = self.distinct(step.recvs.iter().map(|recv| recv.peer));
        self.messages += receivers;
        of_rank.steps += usize::from(step.has_messages());
        of_rank.sent_elements += step.sends.iter().map(|send| send.from.span.len as u64).sum::<u64>();
        // The peers beyond one, in the direction that has more.
        of_rank.extra_messages += receivers.max(senders).saturating_sub(1);
        of_rank.extra_pieces += step.sends.len() as u64 - receivers;
    }

    fn distinct(&mut self, peers: impl Iterator<Item = Rank>) -> u64 {
        self.peers.clear();
        self.peers.extend(peers);
        self.peers.sort_unstable();
        self.peers.dedup();
        self.peers.len() as u64
    }

    /// A rank's steps are counted.
    fn end(&mut self, of_rank: &RankCounts) {
        self.steps = self.steps.max(of_rank.steps);
        self.sent_elements_max = self.sent_elements_max.max(of_rank.sent_elements);
        self.moved_elements += of_rank.sent_elements;
        self.extra_messages = self.extra_messages.max(of_rank.extra_messages);
        self.extra_pieces = self.extra_pieces.max(of_rank.extra_pieces);
    }
}

/// Why an algorithm does not evaluate a tree's expression.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Difference {
    /// It evaluates another expression.
    #[error("{name} computes {computed} for elements {}..{} of {count}; declared is {declared}", span.start, span.end())]
    Expression {
        /// The algorithm.
        name: &'static str,
        /// The first elements that differ.
        span: Span,
        /// The number of elements.
        count: usize,
        /// What it computes for them.
        computed: String,
        /// What is declared.
        declared: String,
    },
    /// It is not a correct reduction.
    #[error("{name}: {error}")]
    Wrong {
        /// The algorithm.
        name: &'static str,
        /// The violation.
        error: CheckError,
    },
}

/// Check whether an algorithm evaluates the tree's expression for every element, and so gives the same bits.
///
/// One element of each block is examined, as schedules treat all elements of a block alike. In several dimensions a
/// block has a share for each way along each of them. An algorithm that reduces nothing evaluates every expression.
///
/// # Errors
/// [`Difference`] shows the first elements that differ, and both expressions.
pub fn evaluates(algorithm: &Algorithm, tree: &Tree, shape: Shape) -> Result<(), Difference> {
    let (name, ranks) = (algorithm.name, tree.ranks());
    let shares = if shape.is_multidimensional(ranks) { 2 * shape.dims(ranks).as_slice().len() } else { 1 };
    let count = ranks as usize * shares;
    // Expressions may depend on the root; those that match for some usually match for all.
    let roots = if algorithm.pattern.is_rooted() { vec![0, 1, ranks / 2, ranks - 1] } else { vec![0] };
    for root in roots.into_iter().filter(|&root| root < ranks).map(Rank) {
        let part = |place| (algorithm.schedule)(&Problem { place, count, root, tree, shape });
        let schedules: Vec<_> = Place::all(ranks).map(part).collect();
        let goal = Goal::of(algorithm.pattern, root);
        let mut report = check(goal, &schedules).map_err(|error| Difference::Wrong { name, error })?;
        if !algorithm.pattern.collective().reduces() {
            return Ok(());
        }
        let declared = report.expressions.of_tree(tree);
        if let Some(&(span, computed)) = report.blocks.iter().find(|&&(_, computed)| Some(computed) != declared) {
            let computed = report.expressions.to_text(computed);
            let declared = tree.evaluate(|rank| rank.0.to_string(), |left, right| format!("({left}+{right})"));
            return Err(Difference::Expression { name, span, count, computed, declared });
        }
    }
    Ok(())
}

/// Check each schedule on its own, and count its steps.
fn well_formed(schedule: &Schedule, counts: &mut Counts) -> Result<(), CheckError> {
    let rank = schedule.place().rank();
    let layout = schedule.layout();
    let (shorter, longer) = (layout.input.min(layout.output), layout.input.max(layout.output));
    let sticks_out = layout.in_place_at.is_some_and(|at| at.checked_add(shorter).is_none_or(|end| end > longer));
    if sticks_out || (layout.work_in_output && layout.work > layout.output) {
        return Err(CheckError::Layout { rank });
    }
    let memory = Memory::new(rank, layout);
    let (mut steps, mut of_rank) = (schedule.steps(), RankCounts::default());
    for index in 0..schedule.len() {
        let Some(step) = steps.next() else { break };
        for peer in step.sends.iter().map(|send| send.peer).chain(step.recvs.iter().map(|recv| recv.peer)) {
            if peer == rank || peer.0 >= schedule.place().ranks() {
                return Err(CheckError::BadPeer { rank, step: index, peer });
            }
        }
        inside(schedule, index, &step)?;
        disjoint(rank, index, &step, &memory)?;
        counts.add(&mut of_rank, step);
    }
    counts.end(&of_rank);
    Ok(())
}

/// Check that a step's regions are inside their buffers, that operands are as long as what they combine with, and
/// that only a reduction combines.
fn inside(schedule: &Schedule, index: usize, step: &Step<'_>) -> Result<(), CheckError> {
    let (rank, layout) = (schedule.place().rank(), schedule.layout());
    let landings = step.recvs.iter().map(|recv| recv.landing).chain(step.locals.iter().map(|local| local.landing));
    let mut regions: Vec<Region> = step.sends.iter().map(|send| send.from).collect();
    regions.extend(step.locals.iter().map(|local| local.from));
    for landing in landings {
        regions.push(landing.to);
        if let Some(operand) = landing.with {
            regions.push(operand.own);
            if operand.own.span.len != landing.to.span.len || !schedule.reduces() {
                return Err(CheckError::BadOperand { rank, step: index });
            }
        }
        if landing.to.buffer == super::Buffer::Input {
            return Err(CheckError::WritesInput { rank, step: index });
        }
    }
    if step.locals.iter().any(|local| local.from.span.len != local.landing.to.span.len) {
        return Err(CheckError::BadOperand { rank, step: index });
    }
    let is_outside = |region: &Region| {
        let end = region.span.start.checked_add(region.span.len);
        end.is_none_or(|end| end > layout.len(region.buffer))
    };
    match regions.into_iter().find(is_outside) {
        Some(region) => Err(CheckError::OutOfBounds { rank, step: index, region, len: layout.len(region.buffer) }),
        None => Ok(()),
    }
}

/// Check that nothing in use is overwritten. An operand may be replaced by its combination, in place; the source of a
/// local move must not be, unless it stays where it is.
fn disjoint(rank: Rank, index: usize, step: &Step<'_>, memory: &Memory) -> Result<(), CheckError> {
    let overlap = |written: Region, other: Region| Err(CheckError::Overlap { rank, step: index, written, other });
    let is_replaced = |to: Region, own: Region| memory.address(to) == memory.address(own);
    for local in step.locals {
        let to = local.landing.to;
        let stays = local.landing.with.is_none() && is_replaced(to, local.from);
        if memory.overlap(to, local.from) && !stays {
            return overlap(to, local.from);
        }
        if let Some(operand) = local.landing.with
            && memory.overlap(to, operand.own)
            && !is_replaced(to, operand.own)
        {
            return overlap(to, operand.own);
        }
    }
    // What is written, in the order of addresses; then each is apart from its neighbours, and others are looked up.
    let mut written: Vec<(usize, Region, usize)> = Vec::with_capacity(step.recvs.len());
    let targets = step.recvs.iter().map(|recv| recv.landing.to).enumerate();
    written.extend(targets.filter(|(_, to)| to.span.len > 0).map(|(nth, to)| (memory.address(to), to, nth)));
    written.sort_unstable_by_key(|&(address, ..)| address);
    if let Some(pair) = written.windows(2).find(|pair| memory.overlap(pair[0].1, pair[1].1)) {
        return overlap(pair[1].1, pair[0].1);
    }
    // The first target that a region overlaps, but that of receive `own`.
    let hit = |region: Region, own: Option<usize>| {
        let first = written.partition_point(|&(address, to, _)| address + to.span.len <= memory.address(region));
        let mut near = written[first..].iter().take_while(|&&(_, to, _)| memory.overlap(to, region));
        near.find(|&&(_, _, nth)| Some(nth) != own).map(|&(_, to, _)| to)
    };
    for send in step.sends {
        if let Some(to) = hit(send.from, None) {
            return overlap(to, send.from);
        }
    }
    for (nth, recv) in step.recvs.iter().enumerate() {
        let (to, Some(operand)) = (recv.landing.to, recv.landing.with) else { continue };
        if let Some(to) = hit(operand.own, Some(nth)) {
            return overlap(to, operand.own);
        }
        if memory.overlap(to, operand.own) && !is_replaced(to, operand.own) {
            return overlap(to, operand.own);
        }
    }
    Ok(())
}

/// How many messages one end of a pair of ranks has, and a hash of their lengths and forms.
#[derive(Default, PartialEq)]
struct Tally {
    messages: u64,
    hash: u64,
}

impl Tally {
    fn add(&mut self, len: usize, form: super::Buffer) {
        self.messages += 1;
        // FNV-1a, word by word.
        self.hash = (self.hash ^ (len as u64) << 2 ^ form as u64).wrapping_mul(0x100_0000_01b3);
    }
}

/// Check that both ends of each pair of ranks have the same list of messages.
///
/// The first pair, in order, whose ends differ is found by their tallies; only its messages are compared one by one.
fn matched(schedules: &[Schedule]) -> Result<(), CheckError> {
    let mut pairs: BTreeMap<(Rank, Rank), [Tally; 2]> = BTreeMap::new();
    for schedule in schedules {
        let rank = schedule.place().rank();
        schedule.steps().for_each(|step| {
            for send in step.sends {
                pairs.entry((rank, send.peer)).or_default()[0].add(send.from.span.len, send.from.buffer);
            }
            for recv in step.recvs {
                pairs.entry((recv.peer, rank)).or_default()[1].add(recv.landing.to.span.len, recv.sent_from);
            }
        });
    }
    let differs = pairs.iter().find(|(_, [sent, received])| sent != received);
    differs.map_or(Ok(()), |(&(from, to), _)| matched_pair(schedules, from, to))
}

/// Check that a pair of ranks has the same list of messages at both ends.
fn matched_pair(schedules: &[Schedule], from: Rank, to: Rank) -> Result<(), CheckError> {
    // With their steps.
    let mut sends: Vec<(usize, Send)> = Vec::new();
    let mut recvs: Vec<(usize, Recv)> = Vec::new();
    let mut buffer = StepBuffer::default();
    for (rank, peer) in [(from, to), (to, from)] {
        let schedule = &schedules[rank.0 as usize];
        for index in 0..schedule.len() {
            let Some(step) = schedule.step(index, &mut buffer) else { break };
            if rank == from {
                sends.extend(step.sends.iter().filter(|send| send.peer == peer).map(|send| (index, *send)));
            } else {
                recvs.extend(step.recvs.iter().filter(|recv| recv.peer == peer).map(|recv| (index, *recv)));
            }
        }
    }
    for (&(step, send), (_, recv)) in sends.iter().zip(&recvs) {
        let received = recv.landing.to;
        if send.from.span.len != received.span.len {
            return Err(CheckError::LengthMismatch { from, to, step, sent: send.from, received });
        }
        if send.from.buffer != recv.sent_from {
            return Err(CheckError::FormMismatch { from, to, step, sent: send.from.buffer });
        }
    }
    if let Some(&(step, _)) = sends.get(recvs.len()) {
        return Err(CheckError::UnmatchedSend { from, to, step });
    }
    match recvs.get(sends.len()) {
        Some(&(step, _)) => Err(CheckError::UnmatchedReceive { from, to, step }),
        None => Ok(()),
    }
}
