//! One rank's symbolic memory: which value lies where, in which form.
//!
//! A value is an expression over one element: "element 7 of (0+1)". Memory is a list of runs of neighbouring elements
//! with the same expression, so its cost does not depend on the count. Buffers that may share memory do share it here,
//! which is the harder case: a read names the form that the value must have, and a value overwritten through another
//! buffer has another form. What passes with shared memory is therefore also correct without.

use super::expression::{ExprId, Expressions};
use crate::schedule::{Buffer, Layout, Region};
use sumac_hal::ids::Rank;

/// A run of elements with one expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The first address or, outside memory, the offset in what was read.
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) value: Value,
}

/// The value of a run's first element; the following ones are its expression's next elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) expression: ExprId,
    /// The element of the inputs.
    pub(super) element: usize,
}

impl Run {
    const fn end(&self) -> usize {
        self.start + self.len
    }

    /// Return the part of the run in `start..end`, which it overlaps, shifted by `start` to 0.
    fn part(&self, start: usize, end: usize) -> Self {
        let (first, last) = (self.start.max(start), self.end().min(end));
        let value = Value { element: self.value.element + (first - self.start), ..self.value };
        Self { start: first - start, len: last - first, value }
    }
}

/// Why a read fails: the element of the region, and the form found there (`None`: nothing).
pub(super) struct ReadError {
    pub(super) element: usize,
    pub(super) held: Option<Buffer>,
}

/// One rank's memory.
#[derive(Debug)]
pub(super) struct Memory {
    bases: [usize; 3],
    /// Sorted, disjoint, none empty; each with the buffer through which it was written.
    runs: Vec<(Buffer, Run)>,
}

impl Memory {
    /// Lay out the buffers, and fill the input.
    pub(super) fn new(rank: Rank, layout: &Layout) -> Self {
        let (input, output, end) = match layout.in_place_at {
            Some(at) if layout.input >= layout.output => (0, at, layout.input),
            Some(at) => (at, 0, layout.output),
            None => (0, layout.input, layout.input + layout.output),
        };
        let work = if layout.work_in_output { output } else { end };
        let value = Value { expression: Expressions::input(rank), element: 0 };
        let mut memory = Self { bases: [input, work, output], runs: Vec::new() };
        if layout.input != 0 {
            memory.write(Buffer::Input, input, &[Run { start: 0, len: layout.input, value }]);
        }
        memory
    }

    /// Return the address of a region.
    pub(super) const fn address(&self, region: Region) -> usize {
        self.bases[region.buffer as usize] + region.span.start
    }

    /// Return whether two regions share memory.
    pub(super) const fn overlap(&self, a: Region, b: Region) -> bool {
        let (from, to) = (self.address(a), self.address(b));
        a.span.len != 0 && b.span.len != 0 && from < to + b.span.len && to < from + a.span.len
    }

    /// Return a region's runs, from offset 0 on without gaps.
    pub(super) fn read(&self, region: Region) -> Result<Vec<Run>, ReadError> {
        if region.span.len == 0 {
            return Ok(Vec::new());
        }
        let start = self.address(region);
        let end = start + region.span.len;
        let first = self.runs.partition_point(|(_, run)| run.end() <= start);
        let mut parts = Vec::new();
        let mut at = start;
        for (held, run) in self.runs[first..].iter().take_while(|(_, run)| run.start < end) {
            if run.start > at {
                break;
            }
            if *held != region.buffer {
                return Err(ReadError { element: region.span.start + (at - start), held: Some(*held) });
            }
            parts.push(run.part(start, end));
            at = run.end();
        }
        if at < end {
            return Err(ReadError { element: region.span.start + (at - start), held: None });
        }
        Ok(parts)
    }

    /// Write runs, whose starts are offsets, to a region.
    pub(super) fn land(&mut self, region: Region, runs: &[Run]) {
        self.write(region.buffer, self.address(region), runs);
    }

    fn write(&mut self, buffer: Buffer, address: usize, runs: &[Run]) {
        let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return };
        let (start, end) = (address + first.start, address + last.end());
        let from = self.runs.partition_point(|(_, run)| run.end() <= start);
        // Few, if any.
        let to = from + self.runs[from..].iter().take_while(|(_, run)| run.start < end).count();
        let mut new = Vec::with_capacity(runs.len() + 2);
        if let Some((held, run)) = self.runs[from..to].first()
            && run.start < start
        {
            new.push((*held, Run { start: run.start, ..run.part(run.start, start) }));
        }
        new.extend(runs.iter().map(|run| (buffer, Run { start: address + run.start, ..*run })));
        if let Some((held, run)) = self.runs[from..to].last()
            && run.end() > end
        {
            new.push((*held, Run { start: end, ..run.part(end, run.end()) }));
        }
        self.runs.splice(from..to, new);
        self.join(from.saturating_sub(1), from + runs.len() + 2);
    }

    /// Merge neighbours that continue each other, among runs `first..=last`.
    fn join(&mut self, first: usize, last: usize) {
        let mut index = first;
        let mut left = last.min(self.runs.len().saturating_sub(1));
        while index < left {
            let ((held, a), (next, b)) = (self.runs[index], self.runs[index + 1]);
            let value = Value { element: a.value.element + a.len, ..a.value };
            if held == next && a.end() == b.start && value == b.value {
                self.runs[index].1.len += b.len;
                self.runs.remove(index + 1);
                left -= 1;
            } else {
                index += 1;
            }
        }
    }
}
