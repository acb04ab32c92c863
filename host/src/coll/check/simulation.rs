//! All ranks' schedules, executed on symbols under rendezvous sends.
//!
//! A rank posts all transfers of its step at once; a transfer happens when both ends have posted it; a step
//! ends when all its transfers have happened. Invariants: a transfer reads the values from before its sender's
//! step (the well-formedness check has ruled out that the step overwrites them), and happens once.

use super::error::CheckError;
use super::expression::{ExprId, Expressions, RankSet};
use crate::coll::{Action, Schedule, Side, Span, Transfer};
use std::collections::VecDeque;
use sumac_hal::ids::Rank;

/// What a rank holds of one run of elements.
#[derive(Debug, Clone, Copy)]
struct Value {
    expression: ExprId,
    form: Form,
}

/// In which form a value is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The rank's own input: exact in both forms.
    Input,
    /// In the accumulator only.
    Partial,
    /// In the caller's buffer only.
    Finished,
}

impl Form {
    const fn name(self) -> &'static str {
        match self {
            Self::Input => "an input",
            Self::Partial => "partial",
            Self::Finished => "finished",
        }
    }
}

/// A rank's progress.
#[derive(Debug)]
struct RankState {
    step: usize,
    /// When the step began, in elements of the beta term.
    began: u64,
    /// When the last transfer of the step ends.
    ends: u64,
    /// Transfers of the step that have not happened.
    waiting: usize,
    /// One value for each segment.
    values: Vec<Value>,
    heard: RankSet,
    /// What was heard before the step began: that is what its sends tell.
    heard_before: RankSet,
}

pub(super) struct Simulation<'a> {
    schedules: &'a [Schedule],
    /// Where the runs of elements that all schedules treat alike begin, and the end.
    bounds: Vec<usize>,
    states: Vec<RankState>,
    /// Sends posted and not yet received, for each (from, to).
    sends: Vec<VecDeque<Transfer>>,
    /// Receives posted and not yet fed, for each (from, to).
    recvs: Vec<VecDeque<Transfer>>,
    expressions: Expressions,
}

impl<'a> Simulation<'a> {
    pub(super) fn new(schedules: &'a [Schedule]) -> Self {
        let ranks = schedules.len();
        let count = schedules.first().map_or(0, Schedule::count);
        let spans = schedules.iter().flat_map(Schedule::steps).flat_map(|step| step.sends).map(|send| send.span);
        let mut bounds: Vec<_> = spans.flat_map(|span| [span.start, span.end()]).chain([0, count]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let segments = bounds.len() - 1;
        let state = |rank: usize| {
            let input = Value { expression: Expressions::input(Rank(rank as u32)), form: Form::Input };
            let heard = RankSet::of(rank, ranks);
            let (values, heard_before) = (vec![input; segments], heard.clone());
            RankState { step: 0, began: 0, ends: 0, waiting: 0, values, heard, heard_before }
        };
        Self {
            schedules,
            bounds,
            states: (0..ranks).map(state).collect(),
            sends: vec![VecDeque::new(); ranks * ranks],
            recvs: vec![VecDeque::new(); ranks * ranks],
            expressions: Expressions::new(ranks),
        }
    }

    /// Execute every step of every rank.
    pub(super) fn run(&mut self) -> Result<(), CheckError> {
        let ranks = self.schedules.len();
        let mut posted = Vec::new();
        (0..ranks).for_each(|rank| self.post(rank, &mut posted));
        while let Some((from, to)) = posted.pop() {
            let pair = from * ranks + to;
            if let (Some(_), Some(&recv)) = (self.sends[pair].front(), self.recvs[pair].front()) {
                self.sends[pair].pop_front();
                self.recvs[pair].pop_front();
                self.transfer(from, to, recv, &mut posted)?;
                posted.push((from, to));
            }
        }
        for (rank, schedule) in self.schedules.iter().enumerate() {
            if let Some(step) = schedule.step(self.states[rank].step) {
                let unmet = |peer: &&Transfer| {
                    !self.sends[rank * ranks + peer.peer.0 as usize].is_empty()
                        || !self.recvs[peer.peer.0 as usize * ranks + rank].is_empty()
                };
                let peer = step.sends.iter().chain(step.recvs).find(unmet).map_or(Rank(0), |transfer| transfer.peer);
                return Err(CheckError::Deadlock { rank: Rank(rank as u32), step: self.states[rank].step, peer });
            }
        }
        Ok(())
    }

    /// Post the transfers of `rank`'s step, passing over steps without any.
    fn post(&mut self, rank: usize, posted: &mut Vec<(usize, usize)>) {
        let ranks = self.schedules.len();
        let state = &mut self.states[rank];
        while let Some(step) = self.schedules[rank].step(state.step) {
            state.heard_before = state.heard.clone();
            state.waiting = step.sends.len() + step.recvs.len();
            if state.waiting == 0 {
                state.step += 1;
                continue;
            }
            for send in step.sends {
                self.sends[rank * ranks + send.peer.0 as usize].push_back(*send);
                posted.push((rank, send.peer.0 as usize));
            }
            for recv in step.recvs {
                self.recvs[recv.peer.0 as usize * ranks + rank].push_back(*recv);
                posted.push((recv.peer.0 as usize, rank));
            }
            return;
        }
    }

    /// Let one matched transfer happen.
    fn transfer(
        &mut self,
        from: usize,
        to: usize,
        recv: Transfer,
        posted: &mut Vec<(usize, usize)>,
    ) -> Result<(), CheckError> {
        let end = self.states[from].began.max(self.states[to].began) + recv.span.len as u64;
        let told = self.states[from].heard_before.clone();
        self.states[to].heard.add_all(&told);
        for segment in self.segments(recv.span) {
            let value = self.land(from, to, segment, recv.action)?;
            self.states[to].values[segment] = value;
        }
        for rank in [from, to] {
            let state = &mut self.states[rank];
            state.ends = state.ends.max(end);
            state.waiting -= 1;
            if state.waiting == 0 {
                state.step += 1;
                state.began = state.ends;
                self.post(rank, posted);
            }
        }
        Ok(())
    }

    /// Return what `to` holds of a segment after receiving it from `from`.
    fn land(&mut self, from: usize, to: usize, segment: usize, action: Action) -> Result<Value, CheckError> {
        let (sent, own) = (self.states[from].values[segment], self.states[to].values[segment]);
        let element = self.bounds[segment];
        let stale = |rank: usize, step, held: Form, wanted: Form| CheckError::Stale {
            rank: Rank(rank as u32),
            step,
            element,
            held: held.name(),
            wanted: wanted.name(),
        };
        let (from_step, step) = (self.states[from].step, self.states[to].step);
        let Action::Reduce { received, completes } = action else {
            if sent.form == Form::Partial {
                return Err(stale(from, from_step, sent.form, Form::Finished));
            }
            return Ok(Value { expression: sent.expression, form: Form::Finished });
        };
        if sent.form == Form::Finished {
            return Err(stale(from, from_step, sent.form, Form::Partial));
        }
        if own.form == Form::Finished {
            return Err(stale(to, step, own.form, Form::Partial));
        }
        let (left, right) = match received {
            Side::Left => (sent.expression, own.expression),
            Side::Right => (own.expression, sent.expression),
        };
        let rank = Rank(to as u32);
        let combined = self.expressions.combine(left, right);
        let expression = combined.map_err(|twice| CheckError::Doubled { rank, step, element, twice })?;
        let contributions = self.expressions.ranks(expression).len();
        if completes != (contributions == self.schedules.len()) {
            return Err(CheckError::Completion { rank, step, element, contributions });
        }
        Ok(Value { expression, form: if completes { Form::Finished } else { Form::Partial } })
    }

    /// Check that every rank has every contribution to every element.
    ///
    /// Then all ranks hold the same expression: take the first reduction, of S into R. Were there two different
    /// results, the one that does not go through it would need R's input from before, hence an earlier reduction.
    /// So both go through it, and with R and S taken for one input the argument repeats. The assertion is for
    /// forms of schedule that would break it (receives into scratch memory).
    pub(super) fn all_reduced(&self) -> Result<Vec<(Span, ExprId)>, CheckError> {
        let ranks = self.schedules.len();
        for (rank, state) in self.states.iter().enumerate() {
            let rank = Rank(rank as u32);
            for (segment, value) in state.values.iter().enumerate() {
                let element = self.bounds[segment];
                if let Some(missing) = self.expressions.ranks(value.expression).first_missing(ranks) {
                    return Err(CheckError::Missing { rank, element, missing });
                }
                debug_assert_eq!(value.expression, self.states[0].values[segment].expression);
            }
        }
        let span =
            |segment: usize| Span { start: self.bounds[segment], len: self.bounds[segment + 1] - self.bounds[segment] };
        let blocks = self.states.first().into_iter().flat_map(|state| state.values.iter().enumerate());
        Ok(blocks.map(|(segment, value)| (span(segment), value.expression)).collect())
    }

    /// Check that every rank has heard of every rank.
    pub(super) fn all_heard(&self) -> Result<(), CheckError> {
        for (rank, state) in self.states.iter().enumerate() {
            if let Some(unheard) = state.heard.first_missing(self.schedules.len()) {
                return Err(CheckError::NotHeard { rank: Rank(rank as u32), unheard });
            }
        }
        Ok(())
    }

    /// Return when the last rank has finished, in elements of the beta term.
    pub(super) fn finish_time(&self) -> u64 {
        self.states.iter().map(|state| state.began).max().unwrap_or(0)
    }

    pub(super) fn into_expressions(self) -> Expressions {
        self.expressions
    }

    fn segments(&self, span: Span) -> std::ops::Range<usize> {
        // Spans without elements cover no segment; the ends of all others are bounds.
        let index_of = |element| self.bounds.partition_point(|&bound| bound < element);
        if span.len == 0 { 0..0 } else { index_of(span.start)..index_of(span.end()) }
    }
}
