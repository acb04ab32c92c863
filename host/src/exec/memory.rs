//! Memory of one operation in this process: the caller's buffers, and room for partial values.
//!
//! [`MemoryLayout`] determines where elements lie and what landing does; this module applies it to slices.

use super::error::ExecError;
use super::memory_layout::{Fused, MemoryLayout, Store, check_lengths};
use crate::schedule::{Buffer, Landing, Local, Recv, Region, Schedule, Span};
use std::ops::Range;
use sumac_hal::reduce::Kernel;

/// The caller's memory for one operation, as bytes of whole elements.
#[derive(Debug)]
pub enum Buffers<'a> {
    /// One buffer, as long as the longer of input and output;
    /// [`Layout::in_place_at`](crate::schedule::Layout::in_place_at) gives the place of the shorter.
    InPlace(&'a mut [u8]),
    /// Separate buffers; the input is not modified.
    Separate {
        /// The rank's contribution; empty if it has none.
        input: &'a [u8],
        /// Destination of its result; empty if it receives none.
        output: &'a mut [u8],
    },
}

impl Buffers<'_> {
    /// Borrow them again, for a part of the time.
    pub const fn reborrow(&mut self) -> Buffers<'_> {
        match self {
            Self::InPlace(buffer) => Buffers::InPlace(buffer),
            Self::Separate { input, output } => Buffers::Separate { input, output },
        }
    }
}

impl<'a> Buffers<'a> {
    /// Return the input, if it has a buffer of its own, and the output, or the buffer of both.
    #[inline]
    pub(super) fn into_slices(self) -> (&'a [u8], &'a mut [u8]) {
        match self {
            Self::Separate { input, output } => (input, output),
            Self::InPlace(buffer) => (&[], buffer),
        }
    }
}

impl<'a> From<&'a mut [u8]> for Buffers<'a> {
    fn from(buffer: &'a mut [u8]) -> Self {
        Self::InPlace(buffer)
    }
}

pub(super) struct Memory<'a> {
    /// The input, if it has a buffer of its own.
    input: &'a [u8],
    /// The output, or both in place.
    user: &'a mut [u8],
    /// `Work`, unless it lies in the output.
    pub(super) work: Vec<u8>,
    kernel: Option<&'a Kernel>,
    /// Number of ranks.
    ranks: u32,
    layout: MemoryLayout,
}

impl<'a> Memory<'a> {
    /// Lay out the memory. Takes `work`, which grows to the need of the largest operation so far.
    pub(super) fn new(
        schedule: &Schedule,
        element_bytes: usize,
        kernel: Option<&'a Kernel>,
        buffers: Buffers<'a>,
        work: &mut Vec<u8>,
    ) -> Result<Self, ExecError> {
        let layout = MemoryLayout::new(schedule, element_bytes, kernel, matches!(buffers, Buffers::InPlace(_)))?;
        let (input_bytes, output_bytes) = match &buffers {
            Buffers::Separate { input, output } => (Some(input.len()), output.len()),
            Buffers::InPlace(buffer) => (None, buffer.len()),
        };
        check_lengths(schedule.layout(), layout.element_bytes, input_bytes, output_bytes)?;
        Ok(Self::fitting(layout, schedule, kernel, buffers, work))
    }

    /// Use a layout that was made for the schedule, the kernel, and buffers of this kind, which have the right lengths.
    #[inline]
    pub(super) fn fitting(
        layout: MemoryLayout,
        schedule: &Schedule,
        kernel: Option<&'a Kernel>,
        buffers: Buffers<'a>,
        work: &mut Vec<u8>,
    ) -> Self {
        let (input, user) = buffers.into_slices();
        if work.len() < layout.work_bytes {
            work.resize(layout.work_bytes, 0);
        }
        let work = std::mem::take(work);
        let kernel = if schedule.reduces() { kernel } else { None };
        Self { input, user, work, kernel, ranks: schedule.place().ranks(), layout }
    }

    /// Return empty memory, for a run without a schedule.
    pub(super) const fn none() -> Self {
        Self { input: &[], user: &mut [], work: Vec::new(), kernel: None, ranks: 1, layout: MemoryLayout::none() }
    }

    /// Return the size of an element in transfers from a buffer.
    pub(super) const fn bytes_each(&self, from: Buffer) -> usize {
        self.layout.bytes_each(from)
    }

    /// Return the length of a transfer in bytes.
    pub(super) const fn len_bytes(&self, recv: &Recv) -> usize {
        self.layout.len_bytes(recv)
    }

    /// Return a region's bytes.
    pub(super) fn outgoing(&self, region: Region) -> &[u8] {
        let (store, range) = self.layout.locate(region);
        self.bytes(store, range)
    }

    /// Return the destination of a transfer's bytes, if they can be stored unprocessed.
    pub(super) fn direct(&mut self, recv: &Recv) -> Option<&mut [u8]> {
        let (store, range) = self.layout.locate(recv.landing.to);
        self.layout.is_plain(recv.sent_from, &recv.landing).then(|| self.target(store, range))
    }

    /// Land whole elements that begin `at` elements into a landing, in the form of buffer `from`. `spare` has room for
    /// a few accumulators.
    pub(super) fn land(&mut self, from: Buffer, landing: &Landing, at: usize, bytes: &[u8], spare: &mut [u8]) {
        let each = self.bytes_each(from);
        let largest = self.layout.partial_bytes.max(each).max(1);
        let pieces = bytes.chunks(spare.len().min(PASS_BYTES) / largest * each.max(1));
        let mut start = at;
        for piece in pieces {
            let len = piece.len() / each;
            self.land_piece(&self.layout.fused(from, landing, start, len), piece, spare);
            start += len;
        }
    }

    /// Move elements within the rank.
    pub(super) fn run_local(&mut self, local: &Local, scratch: &mut [u8], spare: &mut [u8]) {
        if self.layout.is_plain(local.from.buffer, &local.landing) {
            self.copy(self.layout.locate(local.from), self.layout.locate(local.landing.to));
            return;
        }
        let each = self.bytes_each(local.from.buffer).max(1);
        let per_piece = scratch.len() / each;
        for start in (0..local.from.span.len).step_by(per_piece) {
            let len = per_piece.min(local.from.span.len - start);
            let piece = local.from.buffer.at(Span { start: local.from.span.start + start, len });
            let bytes = &mut scratch[..len * each];
            copy_bytes(bytes, self.outgoing(piece));
            self.land(local.from.buffer, &local.landing, start, bytes, spare);
        }
    }

    fn land_piece(&mut self, fused: &Fused, piece: &[u8], spare: &mut [u8]) {
        let Fused { is_partial, is_finished, count, .. } = *fused;
        let (store, range) = fused.to.clone();
        let ranks = self.ranks;
        let Some(kernel) = self.kernel else {
            copy_bytes(self.target(store, range), piece);
            return;
        };
        // Accumulators are kept in the result's place if they fit there.
        if is_finished && self.layout.partial_bytes != self.layout.element_bytes {
            let accumulators = &mut spare[..count * self.layout.partial_bytes];
            if let Some((own_store, own, own_is_partial)) = fused.own.clone() {
                kernel.load(accumulators, self.bytes(own_store, own), own_is_partial);
                kernel.combine(accumulators, piece, is_partial);
            } else {
                kernel.load(accumulators, piece, is_partial);
            }
            kernel.store(self.target(store, range), accumulators, ranks);
            return;
        }
        if let Some(own) = fused.own.clone() {
            self.load(kernel, own, (store, range.clone()));
            let target = self.target(store, range.clone());
            if is_finished && kernel.combine_last(target, piece, is_partial) {
                return;
            }
            kernel.combine(target, piece, is_partial);
        } else {
            kernel.load(self.target(store, range.clone()), piece, is_partial);
        }
        if is_finished {
            kernel.finish(self.target(store, range), count, ranks);
        }
    }

    /// Load an operand into its accumulators, unless it is there.
    fn load(
        &mut self,
        kernel: &Kernel,
        (from, source, is_partial): (Store, Range<usize>, bool),
        to: (Store, Range<usize>),
    ) {
        if is_partial || self.layout.partial_bytes == self.layout.element_bytes {
            self.copy((from, source), to);
            return;
        }
        // The types differ, so `Work` has memory of its own, and only it holds accumulators.
        let source = if from == Store::Input { &self.input[source] } else { &self.user[source] };
        kernel.load(&mut self.work[to.1], source, false);
    }

    /// Copy bytes unchanged.
    fn copy(&mut self, (source, from): (Store, Range<usize>), (target, to): (Store, Range<usize>)) {
        match (source, target) {
            (Store::User, Store::Work) => copy_bytes(&mut self.work[to], &self.user[from]),
            (Store::Work, Store::Work) => self.work.copy_within(from, to.start),
            (Store::Input, Store::Work) => copy_bytes(&mut self.work[to], &self.input[from]),
            (Store::Work, _) => copy_bytes(&mut self.user[to], &self.work[from]),
            (Store::Input, _) => copy_bytes(&mut self.user[to], &self.input[from]),
            (Store::User, _) if from == to => {}
            (Store::User, _) => self.user.copy_within(from, to.start),
        }
    }

    pub(super) fn bytes(&self, store: Store, range: Range<usize>) -> &[u8] {
        match store {
            Store::Input => &self.input[range],
            Store::User => &self.user[range],
            Store::Work => &self.work[range],
        }
    }

    fn target(&mut self, store: Store, range: Range<usize>) -> &mut [u8] {
        if store == Store::Work { &mut self.work[range] } else { &mut self.user[range] }
    }
}

/// Copy bytes in pieces for which the C library uses vectors. It copies longer ones by `rep movsb`, which some
/// processors do byte by byte if the destination begins just after the source in its page (glibc, bug 30994).
pub(super) fn copy_bytes(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy fills its destination");
    let pieces = to.chunks_mut(PIECE_BYTES).zip(from.chunks(PIECE_BYTES));
    pieces.for_each(|(to, from)| to.copy_from_slice(from));
}

/// The bytes of operands that are loaded, combined and finished together, so that each pass finds them in the core's
/// first-level cache.
const PASS_BYTES: usize = 8 << 10;
/// Below the length from which glibc uses `rep movsb` (`x86_rep_movsb_threshold`, 2 KiB for the narrowest vectors).
const PIECE_BYTES: usize = 1024;
