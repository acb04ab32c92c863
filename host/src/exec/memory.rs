//! The memory of one operation: the caller's buffers, and room for partial values.
//!
//! Invariant: partial values have the accumulator's type, everything else the operation's. Where the two types are
//! one and the schedule allows it, `Work` lies in the caller's output.

use super::error::ExecError;
use crate::coll::{Buffer, Landing, Layout, Local, Recv, Region, Schedule, Span};
use std::ops::Range;
use sumac_hal::reduce::Kernel;

/// The caller's memory for one operation, as bytes of whole elements.
#[derive(Debug)]
pub enum Buffers<'a> {
    /// One buffer, as long as the longer of input and output; [`Layout::in_place_at`] says where the shorter lies.
    InPlace(&'a mut [u8]),
    /// The input stays as it is.
    Separate {
        /// The rank's contribution; empty if it has none.
        input: &'a [u8],
        /// Where its result goes; empty if it gets none.
        output: &'a mut [u8],
    },
}

impl<'a> From<&'a mut [u8]> for Buffers<'a> {
    fn from(buffer: &'a mut [u8]) -> Self {
        Self::InPlace(buffer)
    }
}

pub(super) struct Memory<'a> {
    /// The input, where it has memory of its own.
    input: Option<&'a [u8]>,
    /// The output, or, in place, both.
    user: &'a mut [u8],
    /// Where input and output begin in `user`.
    input_at: usize,
    output_at: usize,
    /// `Work`, unless it lies in the output.
    work: &'a mut [u8],
    work_in_output: bool,
    kernel: Option<&'a Kernel>,
    /// How many ranks the operation is over.
    ranks: u32,
    element_bytes: usize,
    partial_bytes: usize,
}

/// Which memory a region lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Store {
    Input,
    User,
    Work,
}

impl<'a> Memory<'a> {
    /// Lay out the memory. `work` grows to what the largest operation so far needed.
    pub(super) fn new(
        schedule: &Schedule,
        element_bytes: usize,
        kernel: Option<&'a Kernel>,
        buffers: Buffers<'a>,
        work: &'a mut Vec<u8>,
    ) -> Result<Self, ExecError> {
        let layout = schedule.layout();
        let kernel = if schedule.reduces() { Some(checked(kernel, element_bytes)?) } else { None };
        let partial_bytes = kernel.map_or(element_bytes, |kernel| kernel.accumulator_bytes());
        let ranks = schedule.place().ranks();
        let work_in_output = layout.work_in_output && partial_bytes == element_bytes;
        let work_len = if work_in_output { 0 } else { layout.work };
        let Some(work_bytes) = work_len.checked_mul(partial_bytes) else {
            let what = format!("{work_len} accumulators of {partial_bytes} bytes are beyond the address space");
            return Err(ExecError::Invalid { what });
        };
        let (input, user, [input_at, output_at]) = split(layout, element_bytes, buffers)?;
        if work.len() < work_bytes {
            work.resize(work_bytes, 0);
        }
        let work = &mut work[..work_bytes];
        let (input_at, output_at) = (input_at * element_bytes, output_at * element_bytes);
        Ok(Self { input, user, input_at, output_at, work, work_in_output, kernel, ranks, element_bytes, partial_bytes })
    }

    /// Return no memory, for a run without a schedule.
    pub(super) const fn none() -> Self {
        let (input_at, output_at, element_bytes, partial_bytes) = (0, 0, 0, 0);
        let (user, work) = (&mut [], &mut []);
        let (input, kernel, work_in_output) = (None, None, false);
        let ranks = 1;
        Self { input, user, input_at, output_at, work, work_in_output, kernel, ranks, element_bytes, partial_bytes }
    }

    /// Return the size of an element as it travels from a buffer.
    pub(super) const fn bytes_each(&self, from: Buffer) -> usize {
        match from {
            Buffer::Input | Buffer::Output => self.element_bytes,
            Buffer::Work => self.partial_bytes,
        }
    }

    /// Return the bytes of a message on the wire.
    pub(super) const fn len_bytes(&self, recv: &Recv) -> usize {
        recv.landing.to.span.len * self.bytes_each(recv.sent_from)
    }

    /// Return a region's bytes.
    pub(super) fn outgoing(&self, region: Region) -> &[u8] {
        let (store, range) = self.locate(region);
        match store {
            Store::Input => &self.input.unwrap_or(&[])[range],
            Store::User => &self.user[range],
            Store::Work => &self.work[range],
        }
    }

    /// Return where a message's bytes can go as they come, if nothing has to be done with them.
    pub(super) fn direct(&mut self, recv: &Recv) -> Option<&mut [u8]> {
        self.is_plain(recv.sent_from, &recv.landing).then(|| self.target(recv.landing.to))
    }

    /// Let whole elements land that begin `at` elements into a landing, in the form of buffer `from`.
    ///
    /// What is received goes to the right of the operator, whatever the schedule says: operators commute to the bit.
    /// `spare` holds a few accumulators.
    pub(super) fn land(&mut self, from: Buffer, landing: &Landing, at: usize, bytes: &[u8], spare: &mut [u8]) {
        let each = self.bytes_each(from);
        let pieces = bytes.chunks(spare.len() / self.partial_bytes.max(1) * each.max(1));
        let mut start = at;
        for piece in pieces {
            let len = piece.len() / each;
            let part = |region: Region| region.buffer.at(Span { start: region.span.start + start, len });
            let own = landing.with.map(|operand| part(operand.own));
            self.land_piece(from, part(landing.to), own, piece, spare);
            start += len;
        }
    }

    /// Move elements within the rank.
    pub(super) fn run_local(&mut self, local: &Local, scratch: &mut [u8], spare: &mut [u8]) {
        if self.is_plain(local.from.buffer, &local.landing) {
            self.copy(local.from, local.landing.to);
            return;
        }
        let each = self.bytes_each(local.from.buffer).max(1);
        let per_piece = scratch.len() / each;
        for start in (0..local.from.span.len).step_by(per_piece) {
            let len = per_piece.min(local.from.span.len - start);
            let piece = local.from.buffer.at(Span { start: local.from.span.start + start, len });
            let bytes = &mut scratch[..len * each];
            bytes.copy_from_slice(self.outgoing(piece));
            self.land(local.from.buffer, &local.landing, start, bytes, spare);
        }
    }

    fn land_piece(&mut self, from: Buffer, to: Region, own: Option<Region>, piece: &[u8], spare: &mut [u8]) {
        let Some(kernel) = self.kernel else {
            self.target(to).copy_from_slice(piece);
            return;
        };
        let (is_partial, ranks) = (from == Buffer::Work, self.ranks);
        let is_finished = to.buffer == Buffer::Output;
        // Accumulators lie where the result goes, if they fit there.
        if is_finished && self.partial_bytes != self.element_bytes {
            let accumulators = &mut spare[..to.span.len * self.partial_bytes];
            if let Some(own) = own {
                kernel.load(accumulators, self.outgoing(own), own.buffer == Buffer::Work);
                kernel.combine(accumulators, piece, is_partial);
            } else {
                kernel.load(accumulators, piece, is_partial);
            }
            kernel.store(self.target(to), accumulators, ranks);
            return;
        }
        if let Some(own) = own {
            self.load(kernel, own, to);
            kernel.combine(self.target(to), piece, is_partial);
        } else {
            kernel.load(self.target(to), piece, is_partial);
        }
        if is_finished {
            kernel.finish(self.target(to), to.span.len, ranks);
        }
    }

    /// Put an operand where its accumulators belong, unless it is there.
    fn load(&mut self, kernel: &Kernel, own: Region, to: Region) {
        if own.buffer == Buffer::Work || self.partial_bytes == self.element_bytes {
            self.copy(own, to);
            return;
        }
        // The types differ, so `Work` has memory of its own, and only it holds accumulators.
        let ((store, source), (_, target)) = (self.locate(own), self.locate(to));
        let source = if store == Store::Input { &self.input.unwrap_or(&[])[source] } else { &self.user[source] };
        kernel.load(&mut self.work[target], source, false);
    }

    /// Copy bytes as they are.
    fn copy(&mut self, from: Region, to: Region) {
        let ((source, from), (target, to)) = (self.locate(from), self.locate(to));
        match (source, target) {
            (Store::User, Store::Work) => self.work[to].copy_from_slice(&self.user[from]),
            (Store::Work, Store::Work) => self.work.copy_within(from, to.start),
            (Store::Input, Store::Work) => self.work[to].copy_from_slice(&self.input.unwrap_or(&[])[from]),
            (Store::Work, _) => self.user[to].copy_from_slice(&self.work[from]),
            (Store::Input, _) => self.user[to].copy_from_slice(&self.input.unwrap_or(&[])[from]),
            (Store::User, _) if from == to => {}
            (Store::User, _) => self.user.copy_within(from, to.start),
        }
    }

    /// Return whether elements land as they are: no operand, no other type, no rounding.
    fn is_plain(&self, from: Buffer, landing: &Landing) -> bool {
        let to = landing.to.buffer;
        let is_loaded_as_is = to == Buffer::Work && self.partial_bytes == self.element_bytes;
        landing.with.is_none() && (self.kernel.is_none() || from == to || is_loaded_as_is)
    }

    fn target(&mut self, region: Region) -> &mut [u8] {
        let (store, range) = self.locate(region);
        if store == Store::Work { &mut self.work[range] } else { &mut self.user[range] }
    }

    fn locate(&self, Region { buffer, span }: Region) -> (Store, Range<usize>) {
        let range = |at: usize, each: usize| at + span.start * each..at + span.end() * each;
        match buffer {
            Buffer::Input if self.input.is_some() => (Store::Input, range(0, self.element_bytes)),
            Buffer::Input => (Store::User, range(self.input_at, self.element_bytes)),
            Buffer::Work if !self.work_in_output => (Store::Work, range(0, self.partial_bytes)),
            Buffer::Work | Buffer::Output => (Store::User, range(self.output_at, self.element_bytes)),
        }
    }
}

/// Check that there is a kernel, for elements of this size.
fn checked(kernel: Option<&Kernel>, element_bytes: usize) -> Result<&Kernel, ExecError> {
    let Some(kernel) = kernel else {
        return Err(ExecError::Invalid { what: "a schedule that reduces, and no kernel".into() });
    };
    if kernel.element_bytes() != element_bytes {
        let what = format!("a kernel for {} and elements of {element_bytes} bytes", kernel.dtype());
        return Err(ExecError::Invalid { what });
    }
    Ok(kernel)
}

/// The input, if it is apart; the rest; and at which elements of the rest input and output begin.
type Parts<'a> = (Option<&'a [u8]>, &'a mut [u8], [usize; 2]);

/// Check the caller's buffers against the layout.
fn split<'a>(layout: &Layout, element_bytes: usize, buffers: Buffers<'a>) -> Result<Parts<'a>, ExecError> {
    let fits = |what: &str, count: usize, len_bytes: usize| match count.checked_mul(element_bytes) {
        Some(wanted) if wanted == len_bytes => Ok(()),
        _ => {
            let what = format!("{what} of {len_bytes} bytes for {count} elements of {element_bytes}");
            Err(ExecError::Invalid { what })
        }
    };
    match (buffers, layout.in_place_at) {
        (Buffers::Separate { input, output }, _) => {
            fits("an input", layout.input, input.len())?;
            fits("an output", layout.output, output.len())?;
            Ok((Some(input), output, [0, 0]))
        }
        (Buffers::InPlace(buffer), Some(at)) => {
            fits("a buffer", layout.input.max(layout.output), buffer.len())?;
            Ok((None, buffer, if layout.input >= layout.output { [0, at] } else { [at, 0] }))
        }
        (Buffers::InPlace(_), None) => {
            let what = "this schedule can't run in place: it needs an input and an output apart";
            Err(ExecError::Invalid { what: what.into() })
        }
    }
}
