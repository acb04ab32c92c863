//! Symbolic execution of all ranks' schedules with rendezvous sends.
//!
//! A rank runs its step's local moves, then posts all its messages at once. A message is transferred when both ends
//! have posted it; a step ends when all its messages have been transferred. Invariants: a message reads values from
//! before its sender's step (the well-formedness check has excluded that they are overwritten), and is transferred
//! once.

use super::error::CheckError;
use super::expression::{Expressions, RankSet};
use super::memory::{Memory, Run, Value};
use crate::schedule::{Buffer, Landing, Region, Schedule, Side, StepBuffer};
use std::collections::VecDeque;
use sumac_hal::ids::Rank;

/// A rank's progress.
#[derive(Debug)]
struct RankState {
    /// The index of its step, and the step.
    index: usize,
    step: StepBuffer,
    /// When the last message of the step ends, in elements of the beta term.
    end_time: u64,
    /// When the step begins.
    begin_time: u64,
    /// The step's messages in each direction: when both ends are ready for it, and its length.
    sent: Vec<(u64, u64)>,
    received: Vec<(u64, u64)>,
    /// The step's messages in each direction that are not transferred yet.
    sends: Open,
    recvs: Open,
    /// Their number.
    waiting: usize,
    memory: Memory,
    reduced_elements: u64,
    reached_by: RankSet,
    /// The set before the step began, which its sends carry.
    reached_by_before: RankSet,
}

/// Messages of a step in one direction that are not transferred yet.
#[derive(Debug, Default)]
struct Open {
    /// Their peers and indices, in order.
    messages: Vec<(Rank, usize)>,
    /// For each peer, in order, which of them come next, up to an end.
    next: Vec<(Rank, usize, usize)>,
}

impl Open {
    /// Open all messages of a step, given by their peers.
    fn open(&mut self, peers: impl Iterator<Item = Rank>) {
        self.messages.clear();
        self.messages.extend(peers.enumerate().map(|(index, peer)| (peer, index)));
        self.messages.sort_unstable();
        self.next.clear();
        let mut start = 0;
        for of_peer in self.messages.chunk_by(|a, b| a.0 == b.0) {
            self.next.push((of_peer[0].0, start, start + of_peer.len()));
            start += of_peer.len();
        }
    }

    fn find(&self, peer: Rank) -> Option<usize> {
        self.next.binary_search_by_key(&peer, |&(peer, ..)| peer).ok()
    }

    /// Return the index of the next message with a peer.
    fn next(&self, peer: Rank) -> Option<usize> {
        let (_, next, end) = self.next[self.find(peer)?];
        (next < end).then(|| self.messages[next].1)
    }

    /// The next message with a peer is transferred.
    fn close(&mut self, peer: Rank) {
        if let Some(at) = self.find(peer) {
            self.next[at].1 += 1;
        }
    }
}

/// A message that can be transferred: its ends, and its index in the step of each.
struct Transfer {
    from: usize,
    to: usize,
    sent: usize,
    received: usize,
}

pub(super) struct Simulation<'a> {
    schedules: &'a [Schedule],
    states: Vec<RankState>,
    expressions: Expressions,
    /// Whether it matters which ranks have reached which.
    is_barrier: bool,
}

/// When a rank is done with messages in one direction, taken as early as they are ready; forgets them.
fn finished(messages: &mut Vec<(u64, u64)>) -> u64 {
    messages.sort_unstable();
    messages.drain(..).fold(0, |done, (ready, len)| done.max(ready) + len)
}

impl<'a> Simulation<'a> {
    pub(super) fn new(schedules: &'a [Schedule], is_barrier: bool) -> Self {
        let ranks = schedules.len();
        let state = |(rank, schedule): (usize, &Schedule)| {
            let reached_by = RankSet::of(rank, ranks);
            RankState {
                index: 0,
                step: StepBuffer::default(),
                end_time: 0,
                begin_time: 0,
                sent: Vec::new(),
                received: Vec::new(),
                sends: Open::default(),
                recvs: Open::default(),
                waiting: 0,
                memory: Memory::new(Rank(rank as u32), schedule.layout()),
                reduced_elements: 0,
                reached_by_before: reached_by.clone(),
                reached_by,
            }
        };
        Self {
            schedules,
            states: schedules.iter().enumerate().map(state).collect(),
            expressions: Expressions::new(ranks),
            is_barrier,
        }
    }

    /// Execute every step of every rank.
    pub(super) fn run(&mut self) -> Result<(), CheckError> {
        let ranks = self.schedules.len();
        let mut posted = VecDeque::new();
        for rank in 0..ranks {
            self.post(rank, &mut posted)?;
        }
        while let Some((from, to)) = posted.pop_front() {
            let sent = self.states[from].sends.next(Rank(to as u32));
            let received = self.states[to].recvs.next(Rank(from as u32));
            if let (Some(sent), Some(received)) = (sent, received) {
                self.transfer(&Transfer { from, to, sent, received }, &mut posted)?;
                posted.push_back((from, to));
            }
        }
        for (rank, (state, schedule)) in self.states.iter().zip(self.schedules).enumerate() {
            if state.index < schedule.len() {
                let unmet = |peer: &Rank| state.sends.next(*peer).is_some() || state.recvs.next(*peer).is_some();
                let sent_to = state.step.sends.iter().map(|send| send.peer);
                let peers = sent_to.chain(state.step.recvs.iter().map(|recv| recv.peer));
                let peer = peers.into_iter().find(unmet).unwrap_or(Rank(0));
                return Err(CheckError::Deadlock { rank: Rank(rank as u32), step: state.index, peer });
            }
        }
        Ok(())
    }

    /// Run the local moves of `rank`'s step and post its messages, passing over steps without any.
    fn post(&mut self, rank: usize, posted: &mut VecDeque<(usize, usize)>) -> Result<(), CheckError> {
        let schedule = &self.schedules[rank];
        let mut step = std::mem::take(&mut self.states[rank].step);
        while schedule.read(self.states[rank].index, &mut step) {
            for local in &step.locals {
                let moved = self.read(rank, local.from)?;
                self.land(rank, local.from.buffer, &moved, &local.landing)?;
            }
            if step.step().has_messages() {
                break;
            }
            self.states[rank].index += 1;
        }
        let state = &mut self.states[rank];
        if self.is_barrier {
            state.reached_by_before = state.reached_by.clone();
        }
        state.waiting = step.sends.len() + step.recvs.len();
        state.sends.open(step.sends.iter().map(|send| send.peer));
        state.recvs.open(step.recvs.iter().map(|recv| recv.peer));
        posted.extend(step.sends.iter().map(|send| (rank, send.peer.0 as usize)));
        posted.extend(step.recvs.iter().map(|recv| (recv.peer.0 as usize, rank)));
        state.step = step;
        Ok(())
    }

    /// Transfer one message that both ends have posted.
    fn transfer(&mut self, ends: &Transfer, posted: &mut VecDeque<(usize, usize)>) -> Result<(), CheckError> {
        let &Transfer { from, to, sent, received } = ends;
        let send = self.states[from].step.sends[sent];
        let recv = self.states[to].step.recvs[received];
        let (sender, receiver) = (Rank(from as u32), Rank(to as u32));
        self.states[from].sends.close(receiver);
        self.states[to].recvs.close(sender);
        if send.from.span.len != recv.landing.to.span.len {
            let (step, received) = (self.states[from].index, recv.landing.to);
            return Err(CheckError::LengthMismatch { from: sender, to: receiver, step, sent: send.from, received });
        }
        if send.from.buffer != recv.sent_from {
            let (step, sent) = (self.states[from].index, send.from.buffer);
            return Err(CheckError::FormMismatch { from: sender, to: receiver, step, sent });
        }
        let ready = self.states[from].begin_time.max(self.states[to].begin_time);
        let timed = (ready, send.from.span.len as u64);
        self.states[from].sent.push(timed);
        self.states[to].received.push(timed);
        if self.is_barrier {
            let sender_set = self.states[from].reached_by_before.clone();
            self.states[to].reached_by.add_all(&sender_set);
        }
        let sent = self.read(from, send.from)?;
        self.land(to, send.from.buffer, &sent, &recv.landing)?;
        for rank in [from, to] {
            let state = &mut self.states[rank];
            state.waiting -= 1;
            if state.waiting == 0 {
                state.index += 1;
                state.end_time = finished(&mut state.sent).max(finished(&mut state.received)).max(state.end_time);
                state.begin_time = state.end_time;
                self.post(rank, posted)?;
            }
        }
        Ok(())
    }

    /// Read a rank's memory, in the form of the region's buffer.
    fn read(&self, rank: usize, region: Region) -> Result<Vec<Run>, CheckError> {
        let state = &self.states[rank];
        state.memory.read(region).map_err(|unfit| CheckError::WrongForm {
            rank: Rank(rank as u32),
            step: state.index,
            element: unfit.element,
            held: unfit.held,
            expected: region.buffer,
        })
    }

    /// Land elements that were in `form`.
    fn land(&mut self, rank: usize, form: Buffer, arrived: &[Run], landing: &Landing) -> Result<(), CheckError> {
        let (at, step) = (Rank(rank as u32), self.states[rank].index);
        let landed = match landing.with {
            None => arrived.to_vec(),
            Some(operand) => {
                let own = self.read(rank, operand.own)?;
                self.states[rank].reduced_elements += landing.to.span.len as u64;
                self.combine(at, step, arrived, &own, operand.received)?
            }
        };
        if self.schedules[rank].reduces() {
            let is_refined = form == Buffer::Output && (landing.with.is_some() || landing.to.buffer != Buffer::Output)
                || landing.with.is_some_and(|operand| operand.own.buffer == Buffer::Output);
            for run in &landed {
                let contributions = self.expressions.ranks(run.value.expression).len();
                let element = run.value.element;
                if is_refined {
                    return Err(CheckError::FinishedOperand { rank: at, step, element });
                }
                if landing.to.buffer == Buffer::Output && contributions != self.schedules.len() {
                    return Err(CheckError::RoundedEarly { rank: at, step, element, contributions });
                }
            }
        }
        self.states[rank].memory.land(landing.to, &landed);
        Ok(())
    }

    /// Combine two values, run by run.
    fn combine(
        &mut self,
        rank: Rank,
        step: usize,
        arrived: &[Run],
        own: &[Run],
        received: Side,
    ) -> Result<Vec<Run>, CheckError> {
        let mut combined = Vec::with_capacity(arrived.len().max(own.len()));
        let (mut a, mut b) = (arrived.iter(), own.iter());
        let (mut next_a, mut next_b) = (a.next(), b.next());
        let mut start = 0;
        while let (Some(x), Some(y)) = (next_a, next_b) {
            let (x_end, y_end) = (x.start + x.len, y.start + y.len);
            let end = x_end.min(y_end);
            let (element, own) = (x.value.element + (start - x.start), y.value.element + (start - y.start));
            if element != own {
                return Err(CheckError::ElementMismatch { rank, step, own, other: element });
            }
            let (left, right) = match received {
                Side::Left => (x.value.expression, y.value.expression),
                Side::Right => (y.value.expression, x.value.expression),
            };
            let expression = self.expressions.combine(left, right);
            let expression = expression.map_err(|twice| CheckError::Doubled { rank, step, element, twice })?;
            combined.push(Run { start, len: end - start, value: Value { expression, element } });
            start = end;
            if x_end == end {
                next_a = a.next();
            }
            if y_end == end {
                next_b = b.next();
            }
        }
        Ok(combined)
    }

    /// Check that every rank has been reached by every rank.
    pub(super) fn check_barrier(&self) -> Result<(), CheckError> {
        for (rank, state) in self.states.iter().enumerate() {
            if let Some(missing) = state.reached_by.first_missing(self.schedules.len()) {
                return Err(CheckError::BarrierNotSynchronized { rank: Rank(rank as u32), missing });
            }
        }
        Ok(())
    }

    /// Read what a rank end_time with.
    pub(super) fn output(&self, rank: Rank, region: Region) -> Result<Vec<Run>, CheckError> {
        let unfinished =
            |unfit: super::memory::ReadError| CheckError::Unfinished { rank, element: unfit.element, held: unfit.held };
        self.states[rank.0 as usize].memory.read(region).map_err(unfinished)
    }

    /// Return the contributors of an expression.
    pub(super) fn contributors(&self, expression: super::ExprId) -> &RankSet {
        self.expressions.ranks(expression)
    }

    pub(super) const fn schedules(&self) -> &'a [Schedule] {
        self.schedules
    }

    pub(super) const fn ranks(&self) -> usize {
        self.schedules.len()
    }

    /// Return when the last rank has finished, in elements of the beta term.
    pub(super) fn finish_time(&self) -> u64 {
        self.states.iter().map(|state| state.end_time).max().unwrap_or(0)
    }

    /// Return the largest number of elements that a rank combines.
    pub(super) fn reduced_elements_max(&self) -> u64 {
        self.states.iter().map(|state| state.reduced_elements).max().unwrap_or(0)
    }

    pub(super) fn into_expressions(self) -> Expressions {
        self.expressions
    }
}
