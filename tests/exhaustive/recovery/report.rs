//! The size of a search.

use super::violation::ViolationKind;
use std::fmt;
use std::time::Duration;

/// The size of a search.
#[derive(Debug, Clone, Copy)]
pub(super) struct Report {
    pub(super) roots: usize,
    pub(super) states: usize,
    pub(super) transitions: usize,
    pub(super) depth: usize,
    /// The number of states in which nothing is pending: all ranks continue; some report dead ranks; all remaining
    /// ranks are excluded.
    pub(super) ends: [usize; 3],
    pub(super) parts: usize,
    pub(super) runs: usize,
    pub(super) took: Duration,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { roots, states, transitions, depth, ends, parts, runs, took } = self;
        let seconds = took.as_secs_f64();
        let [on, failed, out] = ends;
        write!(f, "{states} states ({roots} beginnings; ends: {on} go on, {failed} without dead ranks, {out} out), ")?;
        write!(f, "{transitions} transitions, depth {depth}, ")?;
        write!(f, "{parts} states of ranks, {runs} runs of theirs, {seconds:.1} s")
    }
}

/// A violation, with the shortest trace to it.
#[derive(Debug)]
pub(super) struct Violation {
    pub(super) wrong: ViolationKind,
    pub(super) text: String,
    pub(super) trace: Vec<String>,
    pub(super) report: Report,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}: {} (found after {})", self.wrong, self.text, self.report)?;
        self.trace.iter().zip(1..).try_for_each(|(step, i)| writeln!(f, "  {i:3}. {step}"))
    }
}
