//! Memory layout of a schedule: where elements lie, and what landing does to them. Pure arithmetic over bytes.
//!
//! Shared by the executor over connections, which works on slices ([`super::memory`]), and the one over GPU memory
//! ([`crate::gpu`]), which this process cannot access.
//!
//! Invariant: partial values have the accumulator's type, everything else the operation's. Where both types are the
//! same and the schedule allows it, `Work` lies in the caller's output.

use super::error::ExecError;
use crate::schedule::{Buffer, Landing, Layout, Local, Recv, Region, Schedule, Span};
use std::ops::Range;
use sumac_hal::reduce::Kernel;

/// The memory of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Store {
    /// The input, if it has a buffer of its own.
    Input,
    /// The output, or both in place.
    User,
    /// Partial values, if they do not lie in the output.
    Work,
}

/// Layout of one operation's memory at one rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryLayout {
    input_is_separate: bool,
    /// Offsets of input and output in [`Store::User`], in bytes.
    input_at: usize,
    output_at: usize,
    work_in_output: bool,
    reduces: bool,
    pub(crate) element_bytes: usize,
    pub(crate) partial_bytes: usize,
    /// Length of [`Store::Work`] in bytes.
    pub(crate) work_bytes: usize,
}

/// Fused processing of arriving elements in one pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fused {
    /// Whether they are accumulators.
    pub(crate) is_partial: bool,
    /// The operand that they combine with, and whether that is accumulators.
    pub(crate) own: Option<(Store, Range<usize>, bool)>,
    /// Their destination.
    pub(crate) to: (Store, Range<usize>),
    /// Whether they are rounded there; otherwise they stay accumulators.
    pub(crate) is_finished: bool,
    /// Their number.
    pub(crate) count: usize,
}

impl MemoryLayout {
    /// Lay out the memory of a schedule, with separate buffers or in place.
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
            let what = format!("{work_len} accumulators of {partial_bytes} bytes exceed the address space");
            return Err(ExecError::Invalid { what });
        };
        let [input_at, output_at] = match (is_in_place, layout.in_place_at) {
            (false, _) => [0, 0],
            (true, Some(at)) if layout.input >= layout.output => [0, at],
            (true, Some(at)) => [at, 0],
            (true, None) => {
                let what = "this schedule cannot run in place: pass separate input and output buffers";
                return Err(ExecError::Invalid { what: what.into() });
            }
        };
        Ok(Self {
            input_is_separate: !is_in_place,
            input_at: input_at * element_bytes,
            output_at: output_at * element_bytes,
            work_in_output,
            reduces: schedule.reduces(),
            element_bytes,
            partial_bytes,
            work_bytes,
        })
    }

    /// Empty layout, for a run without a schedule.
    pub(crate) const fn none() -> Self {
        Self {
            input_is_separate: false,
            input_at: 0,
            output_at: 0,
            work_in_output: false,
            reduces: false,
            element_bytes: 0,
            partial_bytes: 0,
            work_bytes: 0,
        }
    }

    /// Return the size of an element in transfers from a buffer.
    pub(crate) const fn bytes_each(&self, from: Buffer) -> usize {
        match from {
            Buffer::Input | Buffer::Output => self.element_bytes,
            Buffer::Work => self.partial_bytes,
        }
    }

    /// Return the length of a transfer in bytes.
    pub(crate) const fn len_bytes(&self, recv: &Recv) -> usize {
        recv.landing.to.span.len * self.bytes_each(recv.sent_from)
    }

    /// Return whether elements land unprocessed: no operand, no conversion, no rounding.
    pub(crate) fn is_plain(&self, from: Buffer, landing: &Landing) -> bool {
        let to = landing.to.buffer;
        let is_loaded_as_is = to == Buffer::Work && self.partial_bytes == self.element_bytes;
        landing.with.is_none() && (!self.reduces || from == to || is_loaded_as_is)
    }

    /// Return whether elements that move within the rank are where they should be, as they should be.
    pub(crate) fn is_in_place(&self, local: &Local) -> bool {
        self.is_plain(local.from.buffer, &local.landing) && self.locate(local.from) == self.locate(local.landing.to)
    }

    /// Return where a region lies.
    pub(crate) fn locate(&self, Region { buffer, span }: Region) -> (Store, Range<usize>) {
        let range = |at: usize, each: usize| at + span.start * each..at + span.end() * each;
        match buffer {
            Buffer::Input if self.input_is_separate => (Store::Input, range(0, self.element_bytes)),
            Buffer::Input => (Store::User, range(self.input_at, self.element_bytes)),
            Buffer::Work if !self.work_in_output => (Store::Work, range(0, self.partial_bytes)),
            Buffer::Work | Buffer::Output => (Store::User, range(self.output_at, self.element_bytes)),
        }
    }

    /// Return the processing of `len` elements that begin `at` elements into a landing, in the form of buffer `from`.
    ///
    /// Received elements are the right operand, whatever the schedule says: operators commute bit for bit.
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

/// Return the lengths in bytes of an input with a buffer of its own, and of the output or the buffer of both; `None` if
/// they exceed the address space.
pub(crate) fn lengths(layout: &Layout, element_bytes: usize, is_in_place: bool) -> Option<(Option<usize>, usize)> {
    let bytes = |count: usize| count.checked_mul(element_bytes);
    match is_in_place {
        true => Some((None, bytes(layout.input.max(layout.output))?)),
        false => Some((Some(bytes(layout.input)?), bytes(layout.output)?)),
    }
}

/// Check the lengths of buffers against a layout: an input and an output, or one for both.
pub(crate) fn check_lengths(
    layout: &Layout,
    element_bytes: usize,
    input_bytes: Option<usize>,
    output_bytes: usize,
) -> Result<(), ExecError> {
    let fits = |what: &str, count: usize, len_bytes: usize| match count.checked_mul(element_bytes) {
        Some(expected) if expected == len_bytes => Ok(()),
        _ => {
            let what = format!("{what} of {len_bytes} bytes for {count} elements of {element_bytes} bytes each");
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

/// Check that there is a kernel for elements of this size; returns the size of its accumulators.
fn checked(kernel: Option<&Kernel>, element_bytes: usize) -> Result<usize, ExecError> {
    let Some(kernel) = kernel else {
        return Err(ExecError::Invalid { what: "the schedule reduces, but no kernel was given".into() });
    };
    if kernel.element_bytes() != element_bytes {
        let what = format!("a kernel for {} and elements of {element_bytes} bytes", kernel.dtype());
        return Err(ExecError::Invalid { what });
    }
    Ok(kernel.accumulator_bytes())
}
