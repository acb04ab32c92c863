//! The memory of one operation: the caller's buffer, and accumulators where they need room of their own.
//!
//! Invariant: partial values live in the accumulator type, finished ones in the caller's buffer in the
//! operation's type. Where the two types are one, both live in the caller's buffer.

use super::error::ExecError;
use crate::coll::{Action, Schedule, Span, Transfer};
use sumac_hal::reduce::Kernel;

pub(super) struct Memory<'a> {
    buf: &'a mut [u8],
    /// Accumulators for every element; empty where the caller's buffer holds them.
    work: &'a mut [u8],
    kernel: Option<&'a Kernel>,
    /// How many ranks the operation is over.
    ranks: u32,
    element_bytes: usize,
    partial_bytes: usize,
}

impl<'a> Memory<'a> {
    /// Lay out the memory and load the inputs. `work` grows to what the largest operation so far needed.
    pub(super) fn new(
        schedule: &Schedule,
        element_bytes: usize,
        kernel: Option<&'a Kernel>,
        buf: &'a mut [u8],
        work: &'a mut Vec<u8>,
    ) -> Result<Self, ExecError> {
        let invalid = |what: String| Err(ExecError::Invalid { what });
        let count = schedule.count();
        let ranks = schedule.place().ranks();
        if count.checked_mul(element_bytes) != Some(buf.len()) {
            return invalid(format!("a buffer of {} bytes for {count} elements of {element_bytes}", buf.len()));
        }
        let Some(kernel) = kernel else {
            if schedule.reduces() {
                return invalid("a schedule that reduces, and no kernel".into());
            }
            return Ok(Self { buf, work: &mut [], kernel, ranks, element_bytes, partial_bytes: element_bytes });
        };
        if kernel.element_bytes() != element_bytes {
            return invalid(format!("a kernel for {} and elements of {element_bytes} bytes", kernel.dtype()));
        }
        let partial_bytes = kernel.accumulator_bytes();
        let mut memory = Self { buf, work: &mut [], kernel: Some(kernel), ranks, element_bytes, partial_bytes };
        if kernel.accumulator() != kernel.dtype() {
            let Some(len) = count.checked_mul(partial_bytes) else {
                return invalid(format!("{count} accumulators of {partial_bytes} bytes are beyond the address space"));
            };
            if work.len() < len {
                work.resize(len, 0);
            }
            memory.work = &mut work[..len];
            kernel.load(memory.work, memory.buf, false);
        }
        if !schedule.reduces() {
            // A rank alone: its contribution is the result, rounded and with canonical NaNs like any other.
            memory.finish(Span { start: 0, len: count });
        }
        Ok(memory)
    }

    /// Return the bytes of a transfer on the wire.
    pub(super) const fn len_bytes(&self, transfer: &Transfer) -> usize {
        transfer.span.len * self.bytes_each(transfer.action)
    }

    /// Return the size of a partial element.
    pub(super) const fn partial_bytes(&self) -> usize {
        self.partial_bytes
    }

    /// Return what a send sends.
    pub(super) fn outgoing(&self, transfer: &Transfer) -> &[u8] {
        let range = range(transfer.span, self.bytes_each(transfer.action));
        match transfer.action {
            Action::Reduce { .. } if !self.work.is_empty() => &self.work[range],
            _ => &self.buf[range],
        }
    }

    /// Return where finished elements go.
    pub(super) fn landing(&mut self, span: Span) -> &mut [u8] {
        &mut self.buf[range(span, self.element_bytes)]
    }

    /// Combine whole partial elements, which begin `at_bytes` into `span`, with this rank's.
    ///
    /// The received operand goes to the right, whatever the schedule says: the operators commute to the bit.
    pub(super) fn reduce(&mut self, span: Span, at_bytes: usize, piece: &[u8], completes: bool) {
        let Some(kernel) = self.kernel else { return };
        let each = self.partial_bytes;
        let piece_span = Span { start: span.start + at_bytes / each, len: piece.len() / each };
        let accumulators = if self.work.is_empty() { &mut *self.buf } else { &mut *self.work };
        kernel.combine(&mut accumulators[range(piece_span, each)], piece, true);
        if completes {
            self.finish(piece_span);
        }
    }

    /// Round a span's accumulators to the operation's type.
    fn finish(&mut self, span: Span) {
        let Some(kernel) = self.kernel else { return };
        let result = &mut self.buf[range(span, self.element_bytes)];
        if self.work.is_empty() {
            kernel.finish(result, span.len, self.ranks);
        } else {
            kernel.store(result, &self.work[range(span, self.partial_bytes)], self.ranks);
        }
    }

    const fn bytes_each(&self, action: Action) -> usize {
        match action {
            Action::Copy => self.element_bytes,
            Action::Reduce { .. } => self.partial_bytes,
        }
    }
}

const fn range(span: Span, bytes_each: usize) -> std::ops::Range<usize> {
    span.start * bytes_each..span.end() * bytes_each
}
