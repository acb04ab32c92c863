//! Symbolic execution of all ranks' schedules with rendezvous sends.
//!
//! A rank runs its step's local moves, then posts all its messages at once. A message is transferred when both ends
//! have posted it; a step ends when all its messages have been transferred. Invariants: a message reads values from
//! before its sender's step (the well-formedness check has excluded that they are overwritten), and is transferred
//! once.

use super::error::CheckError;
use super::expression::{Expressions, RankSet};
use super::memory::{Memory, Run, Value};
use crate::schedule::{Buffer, Landing, Recv, Region, Schedule, Send, Side, Step};
use std::collections::{HashMap, VecDeque};
use sumac_hal::ids::Rank;

/// A rank's progress.
#[derive(Debug)]
struct RankState {
    step: usize,
    /// When the last message of the step ends, in elements of the beta term.
    end_time: u64,
    /// When the step begins.
    begin_time: u64,
    /// The step's messages in each direction: when both ends are ready for it, and its length.
    sent: Vec<(u64, u64)>,
    received: Vec<(u64, u64)>,
    /// Messages of the step not yet transferred.
    waiting: usize,
    memory: Memory,
    reduced_elements: u64,
    reached_by: RankSet,
    /// The set before the step began, which its sends carry.
    reached_by_before: RankSet,
}

pub(super) struct Simulation<'a> {
    schedules: &'a [Schedule],
    states: Vec<RankState>,
    /// Sends posted and not yet received, for each (from, to) that has any.
    sends: HashMap<(usize, usize), VecDeque<Send>>,
    /// Receives posted and not yet matched, for each (from, to) that has any.
    recvs: HashMap<(usize, usize), VecDeque<Recv>>,
    expressions: Expressions,
}

/// When a rank is done with messages in one direction, taken as early as they are ready; forgets them.
fn finished(messages: &mut Vec<(u64, u64)>) -> u64 {
    messages.sort_unstable();
    messages.drain(..).fold(0, |done, (ready, len)| done.max(ready) + len)
}

impl<'a> Simulation<'a> {
    pub(super) fn new(schedules: &'a [Schedule]) -> Self {
        let ranks = schedules.len();
        let state = |(rank, schedule): (usize, &Schedule)| {
            let reached_by = RankSet::of(rank, ranks);
            RankState {
                step: 0,
                end_time: 0,
                begin_time: 0,
                sent: Vec::new(),
                received: Vec::new(),
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
            sends: HashMap::new(),
            recvs: HashMap::new(),
            expressions: Expressions::new(ranks),
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
            let pair = (from, to);
            if let (Some(sends), Some(recvs)) = (self.sends.get_mut(&pair), self.recvs.get_mut(&pair))
                && let (Some(&send), Some(&recv)) = (sends.front(), recvs.front())
            {
                sends.pop_front();
                recvs.pop_front();
                self.message(from, to, &send, &recv, &mut posted)?;
                posted.push_back((from, to));
            }
        }
        for (rank, schedule) in self.schedules.iter().enumerate() {
            if let Some(step) = schedule.step(self.states[rank].step) {
                let unmet = |peer: &Rank| {
                    let peer = peer.0 as usize;
                    self.sends.get(&(rank, peer)).is_some_and(|sends| !sends.is_empty())
                        || self.recvs.get(&(peer, rank)).is_some_and(|recvs| !recvs.is_empty())
                };
                let sent_to = step.sends.iter().map(|send| send.peer);
                let peer = sent_to.chain(step.recvs.iter().map(|recv| recv.peer)).find(unmet).unwrap_or(Rank(0));
                return Err(CheckError::Deadlock { rank: Rank(rank as u32), step: self.states[rank].step, peer });
            }
        }
        Ok(())
    }

    /// Run the local moves of `rank`'s step and post its messages, passing over steps without any.
    fn post(&mut self, rank: usize, posted: &mut VecDeque<(usize, usize)>) -> Result<(), CheckError> {
        let schedules = self.schedules;
        while let Some(Step { locals, sends, recvs }) = schedules[rank].step(self.states[rank].step) {
            for local in locals {
                let moved = self.read(rank, local.from)?;
                self.land(rank, local.from.buffer, &moved, &local.landing)?;
            }
            let state = &mut self.states[rank];
            state.reached_by_before = state.reached_by.clone();
            state.waiting = sends.len() + recvs.len();
            if state.waiting == 0 {
                state.step += 1;
                continue;
            }
            for send in sends {
                self.sends.entry((rank, send.peer.0 as usize)).or_default().push_back(*send);
                posted.push_back((rank, send.peer.0 as usize));
            }
            for recv in recvs {
                self.recvs.entry((recv.peer.0 as usize, rank)).or_default().push_back(*recv);
                posted.push_back((recv.peer.0 as usize, rank));
            }
            return Ok(());
        }
        Ok(())
    }

    /// Transfer one matched message.
    fn message(
        &mut self,
        from: usize,
        to: usize,
        send: &Send,
        recv: &Recv,
        posted: &mut VecDeque<(usize, usize)>,
    ) -> Result<(), CheckError> {
        let ready = self.states[from].begin_time.max(self.states[to].begin_time);
        let timed = (ready, send.from.span.len as u64);
        self.states[from].sent.push(timed);
        self.states[to].received.push(timed);
        let sender_set = self.states[from].reached_by_before.clone();
        self.states[to].reached_by.add_all(&sender_set);
        let sent = self.read(from, send.from)?;
        self.land(to, send.from.buffer, &sent, &recv.landing)?;
        for rank in [from, to] {
            let state = &mut self.states[rank];
            state.waiting -= 1;
            if state.waiting == 0 {
                state.step += 1;
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
            step: state.step,
            element: unfit.element,
            held: unfit.held,
            expected: region.buffer,
        })
    }

    /// Land elements that were in `form`.
    fn land(&mut self, rank: usize, form: Buffer, arrived: &[Run], landing: &Landing) -> Result<(), CheckError> {
        let (at, step) = (Rank(rank as u32), self.states[rank].step);
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
