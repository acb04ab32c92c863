//! Translates the schedules of all ranks into stream operations: landings in order, and the waits between them.
//!
//! All ranks of a program share one address space, so there are no messages: a landing reads the sender's memory in
//! place, as one fused pass. What schedules order by steps is ordered by events here:
//! - A rank's landings run in the order of its stream.
//! - A landing waits for every conflicting access of another stream: before it reads what another has written, or
//!   writes what another has read or written ([`Op::waits`]). Nothing else waits, so ranks drift apart as far as their
//!   data allows.
//!
//! Long landings are split into pieces, each with its own waits: the next rank starts on the first piece while the
//! others are in flight, which pipelines chunks. Splitting changes no expression, and so no bit.
//!
//! Invariant, proved for each program of the tests: two operations that access the same bytes, at least one of them
//! writing, are ordered by streams and waits ([`Program::races`]).

use super::error::GpuError;
use crate::exec::memory_layout::{MemoryLayout, Store};
use crate::schedule::{Buffer, Landing, Region, Schedule, Span, StepBuffer};
use std::collections::VecDeque;
use std::ops::Range;
use sumac_hal::reduce::Kernel;

/// A byte range of one rank's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) rank: usize,
    pub(super) store: Store,
    pub(super) bytes: Range<usize>,
}

/// Kind of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OpKind {
    /// Copy bytes unchanged.
    Copy,
    /// A fused receive, reduce and copy of `count` elements.
    Land { is_partial: bool, own: Option<(Piece, bool)>, is_finished: bool, count: usize },
}

/// An operation on the stream of the rank that it writes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Op {
    pub(super) from: Piece,
    pub(super) to: Piece,
    pub(super) kind: OpKind,
    /// Operations of other streams that must be done before; each comes earlier in the program.
    pub(super) waits: Vec<usize>,
    /// Whether another stream waits for it.
    pub(super) is_awaited: bool,
}

impl Op {
    /// Return its stream: that of the rank whose memory it writes.
    pub(super) const fn stream(&self) -> usize {
        self.to.rank
    }

    /// Return its name in a trace.
    pub(super) const fn name(&self) -> &'static str {
        match &self.kind {
            OpKind::Copy => "copy",
            OpKind::Land { own: None, .. } => "convert",
            OpKind::Land { .. } => "reduce",
        }
    }

    fn reads(&self) -> impl Iterator<Item = &Piece> {
        let own = match &self.kind {
            OpKind::Land { own: Some((own, _)), .. } => Some(own),
            _ => None,
        };
        std::iter::once(&self.from).chain(own)
    }
}

/// Stream operations of all ranks for one collective, in a valid order of enqueueing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    pub(super) ranks: usize,
    pub(super) ops: Vec<Op>,
    /// Length of partial values for each rank, in bytes.
    pub(super) work_bytes: Vec<usize>,
}

/// A message that was sent and not yet received.
struct Posted {
    step: usize,
    from: Region,
}

/// Accesses to one rank's memory that later ones may have to wait for.
#[derive(Default)]
struct Accesses(Vec<(Store, Range<usize>, usize, bool)>);

impl Accesses {
    /// Return the operations that an access must come after.
    fn before(&self, piece: &Piece, is_write: bool) -> impl Iterator<Item = usize> {
        let touches = move |(store, range, _, wrote): &&(Store, Range<usize>, usize, bool)| {
            *store == piece.store && (is_write || *wrote) && overlap(range, &piece.bytes)
        };
        self.0.iter().filter(touches).map(|&(_, _, op, _)| op)
    }

    /// Record an access. A write replaces all accesses within it, as it comes after them.
    fn note(&mut self, piece: &Piece, op: usize, is_write: bool) {
        if is_write {
            let Range { start, end } = piece.bytes;
            self.0.retain(|(store, range, ..)| *store != piece.store || range.start < start || range.end > end);
        }
        self.0.push((piece.store, piece.bytes.clone(), op, is_write));
    }
}

const fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

/// A program under construction.
struct Builder<'a> {
    schedules: &'a [Schedule],
    layouts: Vec<MemoryLayout>,
    /// The step that each rank is in.
    steps: Vec<StepBuffer>,
    piece_bytes: usize,
    ops: Vec<Op>,
    accesses: Vec<Accesses>,
    /// For each stream, up to which operation (exclusive) of every stream it is known to be behind.
    behind: Vec<Vec<usize>>,
    /// The same at the end of each operation.
    clocks: Vec<Vec<usize>>,
    /// Messages in flight, from rank to rank.
    posted: Vec<VecDeque<Posted>>,
}

impl Program {
    /// Combine the schedules of all ranks, in rank order, with landings of at most `piece_bytes` bytes.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] if these are not schedules of the same collective.
    pub(super) fn new(
        schedules: &[Schedule],
        element_bytes: usize,
        kernel: Option<&Kernel>,
        is_in_place: bool,
        piece_bytes: usize,
    ) -> Result<Self, GpuError> {
        let ranks = schedules.len();
        let fits = |(index, schedule): (usize, &Schedule)| {
            let place = schedule.place();
            place.rank().0 as usize == index && place.ranks() as usize == ranks
        };
        if !schedules.iter().enumerate().all(fits) {
            return Err(GpuError::Invalid(format!("the {ranks} schedules are not those of {ranks} ranks in order")));
        }
        let layout = |schedule| MemoryLayout::new(schedule, element_bytes, kernel, is_in_place);
        let mut builder = Builder {
            schedules,
            layouts: schedules.iter().map(layout).collect::<Result<_, _>>()?,
            steps: schedules.iter().map(|_| StepBuffer::default()).collect(),
            piece_bytes,
            ops: Vec::new(),
            accesses: schedules.iter().map(|_| Accesses::default()).collect(),
            behind: vec![vec![0; ranks]; ranks],
            clocks: Vec::new(),
            posted: (0..ranks * ranks).map(|_| VecDeque::new()).collect(),
        };
        builder.run()?;
        let work_bytes = builder.layouts.iter().map(|layout| layout.work_bytes).collect();
        Ok(Self { ranks, ops: builder.ops, work_bytes })
    }

    /// Return the number of bytes that its operations read and write.
    pub(super) fn moved_bytes(&self) -> u64 {
        let touched = |op: &Op| op.reads().chain([&op.to]).map(|piece| piece.bytes.len() as u64).sum::<u64>();
        self.ops.iter().map(touched).sum()
    }

    /// Return the first unordered pair of operations that access the same bytes, at least one of them writing.
    #[cfg(test)]
    pub(super) fn races(&self) -> Option<(usize, usize)> {
        // behind[op]: operations that are complete before it starts.
        let mut behind: Vec<Vec<bool>> = Vec::with_capacity(self.ops.len());
        let mut last = vec![None; self.ranks];
        for (index, op) in self.ops.iter().enumerate() {
            let mut done = vec![false; self.ops.len()];
            for &before in op.waits.iter().chain(&last[op.stream()]) {
                done[before] = true;
                for (done, &earlier) in done.iter_mut().zip(&behind[before]) {
                    *done |= earlier;
                }
            }
            last[op.stream()] = Some(index);
            behind.push(done);
        }
        let same = |a: &Piece, b: &Piece| a.rank == b.rank && a.store == b.store && overlap(&a.bytes, &b.bytes);
        let clash = |a: &Op, b: &Op| {
            b.reads().chain([&b.to]).any(|piece| same(&a.to, piece)) || a.reads().any(|piece| same(piece, &b.to))
        };
        let pairs = (0..self.ops.len()).flat_map(|later| (0..later).map(move |earlier| (earlier, later)));
        let mut races = pairs.filter(|&(a, b)| clash(&self.ops[a], &self.ops[b]) && !behind[b][a]);
        races.next()
    }
}

impl Builder<'_> {
    fn run(&mut self) -> Result<(), GpuError> {
        let ranks = self.schedules.len();
        let mut at = vec![0; ranks];
        // The number of messages of its step that each rank has received, and of its own that were received.
        let (mut received, mut taken) = (vec![0; ranks], vec![0; ranks]);
        (0..ranks).for_each(|rank| self.enter(rank, 0));
        loop {
            let mut moved = false;
            for rank in 0..ranks {
                while at[rank] < self.schedules[rank].len() {
                    let (sends, recvs) = (self.steps[rank].sends.len(), self.steps[rank].recvs.len());
                    while received[rank] < recvs && self.receive(rank, received[rank], &at, &mut taken)? {
                        received[rank] += 1;
                        moved = true;
                    }
                    // As over connections, a step is done once its messages are received in both directions.
                    if received[rank] < recvs || taken[rank] < sends {
                        break;
                    }
                    at[rank] += 1;
                    (received[rank], taken[rank]) = (0, 0);
                    self.enter(rank, at[rank]);
                    moved = true;
                }
            }
            if (0..ranks).all(|rank| at[rank] == self.schedules[rank].len()) {
                return Ok(());
            }
            if !moved {
                let what = "some schedules wait for messages that none sends: they are not of the same collective";
                return Err(GpuError::Invalid(what.into()));
            }
        }
    }

    /// Begin a step: run its local moves and post its messages.
    fn enter(&mut self, rank: usize, index: usize) {
        let mut step = std::mem::take(&mut self.steps[rank]);
        self.schedules[rank].read(index, &mut step);
        for local in &step.locals {
            self.land((rank, local.from), rank, &local.landing);
        }
        for send in &step.sends {
            let to = send.peer.0 as usize;
            self.posted[rank * self.schedules.len() + to].push_back(Posted { step: index, from: send.from });
        }
        self.steps[rank] = step;
    }

    /// Receive message `slot` of a rank's step, if it has been sent.
    fn receive(&mut self, rank: usize, slot: usize, at: &[usize], taken: &mut [usize]) -> Result<bool, GpuError> {
        let recv = self.steps[rank].recvs[slot];
        let sender = recv.peer.0 as usize;
        let queue = sender * self.schedules.len() + rank;
        let Some(Posted { step, from }) = self.posted.get_mut(queue).and_then(VecDeque::pop_front) else {
            return Ok(false);
        };
        if from.span.len != recv.landing.to.span.len || from.buffer != recv.sent_from {
            let what = format!(
                "rank {sender} sends {} elements of {:?} where rank {rank} expects {} of {:?}",
                from.span.len, from.buffer, recv.landing.to.span.len, recv.sent_from
            );
            return Err(GpuError::Invalid(what));
        }
        debug_assert_eq!(step, at[sender], "a sender waits until its messages are received");
        self.land((sender, from), rank, &recv.landing);
        taken[sender] += 1;
        Ok(true)
    }

    /// Append the operations that land elements of one rank at another, or at the same.
    fn land(&mut self, (sender, from): (usize, Region), rank: usize, landing: &Landing) {
        let each = self.layouts[rank].bytes_each(from.buffer).max(1);
        // Use pieces of whole vectors, so that all begin at multiples of 16 bytes if the first does.
        let per_piece = (self.piece_bytes / each).max(1).next_multiple_of(PIECE_ELEMENTS);
        for start in (0..from.span.len).step_by(per_piece) {
            let len = per_piece.min(from.span.len - start);
            self.land_piece((sender, from), rank, landing, Span { start, len });
        }
    }

    fn land_piece(&mut self, (sender, from): (usize, Region), rank: usize, landing: &Landing, part: Span) {
        let source = from.buffer.at(Span { start: from.span.start + part.start, len: part.len });
        let piece = |rank, (store, bytes)| Piece { rank, store, bytes };
        let fused = self.layouts[rank].fused(from.buffer, landing, part.start, part.len);
        let from_piece = piece(sender, self.layouts[sender].locate(source));
        let to = piece(rank, fused.to);
        let kind = if self.layouts[rank].is_plain(from.buffer, landing) {
            if from_piece == to {
                return;
            }
            OpKind::Copy
        } else {
            let own = fused.own.map(|(store, bytes, is_partial)| (piece(rank, (store, bytes)), is_partial));
            debug_assert!(!matches!(landing.to.buffer, Buffer::Input), "an input is never written");
            OpKind::Land { is_partial: fused.is_partial, own, is_finished: fused.is_finished, count: fused.count }
        };
        self.push(Op { from: from_piece, to, kind, waits: Vec::new(), is_awaited: false });
    }

    /// Append an operation with its waits.
    fn push(&mut self, mut op: Op) {
        let (index, stream) = (self.ops.len(), op.stream());
        let mut before: Vec<usize> =
            op.reads().flat_map(|piece| self.accesses[piece.rank].before(piece, false)).collect();
        before.extend(self.accesses[op.to.rank].before(&op.to, true));
        // Latest first: what it has waited for itself need not be waited for again.
        before.sort_unstable_by(|a, b| b.cmp(a));
        for earlier in before {
            let other = self.ops[earlier].stream();
            if other == stream || self.behind[stream][other] > earlier {
                continue;
            }
            op.waits.push(earlier);
            self.ops[earlier].is_awaited = true;
            let clock = &self.clocks[earlier];
            for (known, &theirs) in self.behind[stream].iter_mut().zip(clock) {
                *known = (*known).max(theirs);
            }
        }
        for piece in op.reads() {
            self.accesses[piece.rank].note(piece, index, false);
        }
        self.accesses[op.to.rank].note(&op.to, index, true);
        self.behind[stream][stream] = index + 1;
        self.clocks.push(self.behind[stream].clone());
        self.ops.push(op);
    }
}

/// A multiple of the elements in 16 bytes, for every type.
const PIECE_ELEMENTS: usize = 16;
