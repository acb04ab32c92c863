//! Where a schedule's elements lie in memory, and what a landing does to them: pure arithmetic over bytes.
//!
//! Both executors start here: the one over connections, whose memory are slices ([`super::memory`]), and the one over a
//! GPU's memory ([`super::gpu`]), which this process can't look at.
//!
//! Invariant: partial values have the accumulator's type, everything else the operation's. Where the two types are
//! one and the schedule allows it, `Work` lies in the caller's output.

use super::error::ExecError;
use crate::schedule::{Buffer, Landing, Layout, Recv, Region, Schedule, Span};
use std::ops::Range;
use sumac_hal::reduce::Kernel;

/// Which memory a region lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Store {
    /// The input, where it has memory of its own.
    Input,
    /// The output, or, in place, both.
    User,
    /// Partial values, where they don't lie in the output.
    Work,
}

/// The lay-out of one operation's memory at one rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    input_is_apart: bool,
    /// Where input and output begin in [`Store::User`], in bytes.
    input_at: usize,
    output_at: usize,
    work_in_output: bool,
    reduces: bool,
    pub(crate) element_bytes: usize,
    pub(crate) partial_bytes: usize,
    /// The bytes of [`Store::Work`].
    pub(crate) work_bytes: usize,
}

/// What becomes of elements that arrive, in one pass over them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fused {
    /// Whether they are accumulators.
    pub(crate) is_partial: bool,
    /// With what they combine, and whether that is accumulators.
    pub(crate) own: Option<(Store, Range<usize>, bool)>,
    /// Where they go.
    pub(crate) to: (Store, Range<usize>),
    /// Whether they are rounded there; if not, they stay accumulators.
    pub(crate) is_finished: bool,
    /// How many there are.
    pub(crate) count: usize,
}

impl Places {
    /// Lay out the memory of a schedule, with input and output apart or in one buffer.
    pub(crate) fn new(
        schedule: &Schedule,
        element_bytes: usize,
        kernel: Option<&Kernel>,
        is_in_place: bool,
    ) -> Result<Self, ExecError> {
        let layout = schedule.layout();
        let partial_bytes = if schedule.reduces() { checked(kernel, element_bytes)? } else { element_bytes };
        let work_in_output = layout.work_in_output && partial_bytes == element_bytes;
        let work_len = if work_in_output { 0 } else { layout.work };
        let Some(work_bytes) = work_len.checked_mul(partial_bytes) else {
            let what = format!("{work_len} accumulators of {partial_bytes} bytes are beyond the address space");
            return Err(ExecError::Invalid { what });
        };
        let [input_at, output_at] = match (is_in_place, layout.in_place_at) {
            (false, _) => [0, 0],
            (true, Some(at)) if layout.input >= layout.output => [0, at],
            (true, Some(at)) => [at, 0],
            (true, None) => {
                let what = "this schedule can't run in place: it needs an input and an output apart";
                return Err(ExecError::Invalid { what: what.into() });
            }
        };
        Ok(Self {
            input_is_apart: !is_in_place,
            input_at: input_at * element_bytes,
            output_at: output_at * element_bytes,
            work_in_output,
            reduces: schedule.reduces(),
            element_bytes,
            partial_bytes,
            work_bytes,
        })
    }

    /// The lay-out of no memory, for a run without a schedule.
    pub(crate) const fn none() -> Self {
        Self {
            input_is_apart: false,
            input_at: 0,
            output_at: 0,
            work_in_output: false,
            reduces: false,
            element_bytes: 0,
            partial_bytes: 0,
            work_bytes: 0,
        }
    }

    /// Return the size of an element as it travels from a buffer.
    pub(crate) const fn bytes_each(&self, from: Buffer) -> usize {
        match from {
            Buffer::Input | Buffer::Output => self.element_bytes,
            Buffer::Work => self.partial_bytes,
        }
    }

    /// Return the bytes of a message on the wire.
    pub(crate) const fn len_bytes(&self, recv: &Recv) -> usize {
        recv.landing.to.span.len * self.bytes_each(recv.sent_from)
    }

    /// Return whether elements land as they are: no operand, no other type, no rounding.
    pub(crate) fn is_plain(&self, from: Buffer, landing: &Landing) -> bool {
        let to = landing.to.buffer;
        let is_loaded_as_is = to == Buffer::Work && self.partial_bytes == self.element_bytes;
        landing.with.is_none() && (!self.reduces || from == to || is_loaded_as_is)
    }

    /// Return where a region lies.
    pub(crate) fn locate(&self, Region { buffer, span }: Region) -> (Store, Range<usize>) {
        let range = |at: usize, each: usize| at + span.start * each..at + span.end() * each;
        match buffer {
            Buffer::Input if self.input_is_apart => (Store::Input, range(0, self.element_bytes)),
            Buffer::Input => (Store::User, range(self.input_at, self.element_bytes)),
            Buffer::Work if !self.work_in_output => (Store::Work, range(0, self.partial_bytes)),
            Buffer::Work | Buffer::Output => (Store::User, range(self.output_at, self.element_bytes)),
        }
    }

    /// Return what `len` elements do that begin `at` elements into a landing, in the form of buffer `from`.
    ///
    /// What is received goes to the right of the operator, whatever the schedule says: operators commute to the bit.
    pub(crate) fn fused(&self, from: Buffer, landing: &Landing, at: usize, len: usize) -> Fused {
        let part = |region: Region| region.buffer.at(Span { start: region.span.start + at, len });
        let own = landing.with.map(|operand| {
            let (store, range) = self.locate(part(operand.own));
            (store, range, operand.own.buffer == Buffer::Work)
        });
        Fused {
            is_partial: from == Buffer::Work,
            own,
            to: self.locate(part(landing.to)),
            is_finished: landing.to.buffer == Buffer::Output,
            count: len,
        }
    }
}

/// Check buffers of these lengths against a layout: an input and an output, or one for both.
pub(crate) fn check_lengths(
    layout: &Layout,
    element_bytes: usize,
    input_bytes: Option<usize>,
    output_bytes: usize,
) -> Result<(), ExecError> {
    let fits = |what: &str, count: usize, len_bytes: usize| match count.checked_mul(element_bytes) {
        Some(wanted) if wanted == len_bytes => Ok(()),
        _ => {
            let what = format!("{what} of {len_bytes} bytes for {count} elements of {element_bytes}");
            Err(ExecError::Invalid { what })
        }
    };
    match input_bytes {
        Some(input_bytes) => {
            fits("an input", layout.input, input_bytes)?;
            fits("an output", layout.output, output_bytes)
        }
        None => fits("a buffer", layout.input.max(layout.output), output_bytes),
    }
}

/// Check that there is a kernel, for elements of this size; return the size of its accumulators.
fn checked(kernel: Option<&Kernel>, element_bytes: usize) -> Result<usize, ExecError> {
    let Some(kernel) = kernel else {
        return Err(ExecError::Invalid { what: "a schedule that reduces, and no kernel".into() });
    };
    if kernel.element_bytes() != element_bytes {
        let what = format!("a kernel for {} and elements of {element_bytes} bytes", kernel.dtype());
        return Err(ExecError::Invalid { what });
    }
    Ok(kernel.accumulator_bytes())
}
