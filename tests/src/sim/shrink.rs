//! From a failing run to a short script: which of the faults it takes.
//!
//! A run is repeated with fewer and fewer of the faults that its links had, by delta debugging (Zeller and Hildebrandt
//! 2002, "ddmin"), as long as it fails in the same way; then with fewer and fewer of the zero-copy mishaps. What is
//! left prints as a test.

use super::cluster::{record, run};
use super::options::Options;
use super::report::Violation;
use super::wiring::{Owner, owner};
use std::fmt;
use std::mem::discriminant;
use std::time::Duration;
use sumac_hal::emu::{NthPacket, Verdict};
use sumac_hal::port::Addr;

/// A failing run with a minimal set of faults. Its text is a test that can be pasted.
#[derive(Debug, Clone)]
pub struct Shrunk {
    /// The run, with its faults as a script.
    pub options: Options,
    /// How it fails.
    pub violation: Violation,
    /// Number of faults of the original run.
    pub recorded: usize,
    /// The zero-copy mishaps that remain, by index as drawn; `None` if the run has none.
    pub mishaps: Option<Vec<usize>>,
    /// Number of runs used.
    pub runs: usize,
}

/// Shrink the faults of a run, in at most `runs_max` runs; `None` if it passes.
pub fn shrink(options: &Options, runs_max: usize) -> Option<Shrunk> {
    let (outcome, recorded) = record(options);
    let mut violation = outcome.err()?;
    let scripted = |faults: &[NthPacket]| {
        let mut options = options.clone();
        options.faults.script = Some(faults.to_vec());
        options
    };
    let mut runs = 1;
    let mut fails = |options: &Options| {
        if runs >= runs_max {
            return false;
        }
        runs += 1;
        let found = run(options).err().filter(|found| discriminant(found) == discriminant(&violation));
        found.map(|found| violation = found).is_some()
    };
    let faults = fewest(&recorded, |faults| fails(&scripted(faults)));
    let mut shrunk = scripted(&faults);
    let mishaps = options.zero_copy().map(|by| {
        let all: Vec<usize> = (0..by.mishaps.len()).collect();
        fewest(&all, |kept| {
            let mut fewer = shrunk.clone();
            fewer.keep_mishaps(kept);
            fails(&fewer)
        })
    });
    mishaps.iter().for_each(|kept| shrunk.keep_mishaps(kept));
    Some(Shrunk { options: shrunk, violation, recorded: recorded.len(), mishaps, runs })
}

/// Return a subset of `items` that still fails, but passes if any single item is removed. `fails` is first called with
/// no item, and never with all.
pub(super) fn fewest<T: Clone>(items: &[T], mut fails: impl FnMut(&[T]) -> bool) -> Vec<T> {
    if items.is_empty() || fails(&[]) {
        return Vec::new();
    }
    let mut left = items.to_vec();
    let mut parts = 2;
    while left.len() > 1 {
        let len = left.len().div_ceil(parts);
        let one = left.chunks(len).find(|part| parts == 2 && fails(part)).map(<[T]>::to_vec);
        let rest = |start: usize| [&left[..start], &left[(start + len).min(left.len())..]].concat();
        let fewer = one.or_else(|| (0..left.len()).step_by(len).map(rest).find(|rest| fails(rest)));
        match fewer {
            Some(fewer) => {
                parts = (parts - 1).max(2).min(fewer.len());
                left = fewer;
            }
            None if len == 1 => break,
            None => parts = (2 * parts).min(left.len()),
        }
    }
    left
}

impl fmt::Display for Shrunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { options, violation, recorded, mishaps, runs } = self;
        let script = options.faults.script.as_deref().unwrap_or_default();
        let kind = options.scenario.kind();
        let name = format!("{kind:?}").to_lowercase();
        let why = violation.to_string().replace('\n', " ");
        writeln!(f, "/// {} of {recorded} faults, found in {runs} runs: {why}.", script.len())?;
        writeln!(f, "#[test]\nfn {name}_{}() {{", options.seed)?;
        writeln!(f, "    let mut options = Options::draw({}, ScenarioKind::{kind:?});", options.seed)?;
        writeln!(f, "    options.faults.script = Some(vec![")?;
        for NthPacket { from, to, nth, verdict } in script {
            let (from, to) = (Name(*from), Name(*to));
            writeln!(f, "        // {from:#} to {to:#}")?;
            writeln!(f, "        NthPacket {{ from: {from}, to: {to}, nth: {nth}, verdict: {} }},", Code(*verdict))?;
        }
        writeln!(f, "    ]);")?;
        if let Some(mishaps) = mishaps {
            writeln!(f, "    options.keep_mishaps(&{mishaps:?});")?;
        }
        if let Some(bug) = options.planted.code() {
            writeln!(f, "    options.planted = {bug};")?;
        }
        writeln!(f, "    run(&options).unwrap();\n}}")
    }
}

/// An address as code, or (`#`) as text.
struct Name(Addr);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (f.alternate(), self.0, owner(self.0)) {
            (false, Addr::Emu(number), _) => write!(f, "Addr::Emu({number})"),
            (_, _, Owner::Node { device, shard }) => write!(f, "device {device} shard {shard}"),
            (_, _, Owner::Rank { rank, group }) => write!(f, "rank {rank} group {group}"),
            (_, _, Owner::Attacker) => f.write_str("the attacker"),
        }
    }
}

/// A verdict as code.
pub(super) struct Code(pub(super) Verdict);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = |delay: Duration| format!("{{ delay: Duration::from_nanos({}) }}", delay.as_nanos());
        match self.0 {
            Verdict::Deliver { delay } => write!(f, "Verdict::Deliver {}", ns(delay)),
            Verdict::Duplicate { delay } => write!(f, "Verdict::Duplicate {}", ns(delay)),
            other => write!(f, "Verdict::{other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::weight;

    /// Failures caused by one, two or five of a thousand items, far apart: exactly these remain, in few runs.
    #[test]
    fn fewest_returns_exactly_the_items_that_fail() {
        let all: Vec<u64> = (0..1000).collect();
        for (seed, count) in [(1, 0), (2, 1), (3, 2), (4, 5), (5, 5)] {
            let mut needed: Vec<u64> = (0..count).map(|i| weight(&[seed, i]) % 1000).collect();
            needed.sort_unstable();
            needed.dedup();
            let mut tries = 0;
            let left = fewest(&all, |some| {
                tries += 1;
                needed.iter().all(|item| some.contains(item))
            });
            assert_eq!(left, needed);
            assert!(tries < 60 * (count + 1), "{tries} tries for {count}");
        }
        assert_eq!(fewest(&all, |some| some.len() >= 3).len(), 3);
        assert_eq!(fewest(&all[..1], |_| false), [0]);
    }
}
