//! What a rank can supply after its tree is lost, for packets and zero-copy alike.

use super::inventory::{ChunkInventory, ChunkState, OpEntry};
use crate::transport::RecoverySource;
use crate::transport::packets::{Buffers, Op, OpId, Ops, RetainedOp, Retention};
use std::ops::Range;

/// Take the inventory of a rank.
pub(crate) fn inventory(source: &dyn RecoverySource) -> ChunkInventory {
    let ops = source.ops();
    let retained = ops
        .retained()
        .map(|retained| (&retained.op, retained.from.min(retained.op.end() - 1), Some(retained.has_bytes())));
    let mut parts = retained.chain(ops.in_flight().map(|op| (op, op.first(), None))).peekable();
    let mut inventory = ChunkInventory::new(parts.peek().map_or(ops.end(), |(_, from, _)| *from));
    let mut published = Vec::new();
    for (op, from, bytes) in parts {
        let (has_returned, has_bytes) = (bytes.is_some(), bytes.unwrap_or(false));
        inventory.skip_to(from);
        let entry = OpEntry { first: op.first(), end: op.end(), desc: op.desc, moves: op.moves() };
        inventory.push(entry, from, |seq| {
            let is_answered = has_returned || source.is_answered(seq);
            if !op.moves() {
                // It waits for the confirmation that all ranks have entered it.
                return ChunkState { needs: !is_answered, holds: is_answered, gives: !is_answered };
            }
            let keep = op.retention(seq);
            // An in-place result has overwritten the contribution.
            let overwritten = is_answered && matches!(keep, Retention::Result(_));
            let part = op.part(seq);
            // Memory that is only received into holds no contribution.
            let unknown = part.input.is_some() && source.is_unknown(seq);
            let intact = !overwritten && !unknown;
            let gives = if has_returned { matches!(keep, Retention::Contribution(_)) && has_bytes } else { intact };
            let holds = match keep {
                Retention::Result(_) if is_answered && (has_bytes || !has_returned) => true,
                Retention::Own(_) if has_bytes || !has_returned => true,
                _ => {
                    published.resize(op.result_len(seq), 0);
                    source.published(seq, &mut published)
                }
            };
            ChunkState { needs: !is_answered && part.landing.is_some(), holds, gives }
        });
    }
    inventory.skip_to(ops.end());
    inventory
}

/// Append the result of a chunk that this rank holds to `to`.
pub(crate) fn append_result(source: &dyn RecoverySource, seq: u64, buffers: &mut dyn Buffers, to: &mut Vec<u8>) {
    if let Some(op) = source.ops().of_seq(seq) {
        match op.retention(seq) {
            Retention::Result(range) if source.is_answered(seq) => {
                return to.extend_from_slice(&buffers.output(op.id)[range]);
            }
            Retention::Own(range) => return to.extend_from_slice(&buffers.input(op.id)[range]),
            _ => return append_published(source, &op, seq, to),
        }
    }
    let Some(retained) = retained_op(source, seq) else { return };
    match retained.op.retention(seq) {
        Retention::Result(_) | Retention::Own(_) if retained.has_bytes() => {
            source.ops().copy_retained(retained, seq, to)
        }
        _ => append_published(source, &retained.op, seq, to),
    }
}

fn retained_op(source: &dyn RecoverySource, seq: u64) -> Option<&RetainedOp> {
    source.ops().retained().find(|retained| (retained.from..retained.op.end()).contains(&seq))
}

fn append_published(source: &dyn RecoverySource, op: &Op, seq: u64, to: &mut Vec<u8>) {
    let at = to.len();
    to.resize(at + op.result_len(seq), 0);
    // It was available when the inventory was taken, and the device has been fenced since.
    let found = source.published(seq, &mut to[at..]);
    debug_assert!(found, "a result that was held: chunk {seq}");
}

/// Append this rank's contribution to a chunk to `to`.
pub(crate) fn append_contribution(source: &dyn RecoverySource, seq: u64, buffers: &dyn Buffers, to: &mut Vec<u8>) {
    if let Some(op) = source.ops().of_seq(seq) {
        to.extend_from_slice(op.part(seq).input.map_or(&[], |range| &buffers.input(op.id)[range]));
    } else if let Some(retained) = retained_op(source, seq) {
        source.ops().copy_retained(retained, seq, to);
    }
}

/// Write the result of a chunk to this rank's buffer, if it waits for it.
pub(crate) fn land(source: &dyn RecoverySource, seq: u64, result: &[u8], buffers: &mut dyn Buffers) {
    let Some(op) = source.ops().of_seq(seq).filter(|_| !source.is_answered(seq)) else { return };
    if let Some(landing) = op.part(seq).landing {
        let part = &result[landing.part];
        buffers.output(op.id)[landing.at..][..part.len()].copy_from_slice(part);
    }
}

/// Return a function that computes the length of each result in a piece, in bytes. It is the same on all ranks,
/// whatever they know of the operation.
pub(crate) fn result_lens(source: &dyn RecoverySource, entry: &OpEntry) -> impl Fn(u64) -> usize + use<> {
    let op = source.ops().describe(entry.desc, (entry.first, entry.end));
    move |seq| op.result_len(seq)
}

/// The chunks that recovery has written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Landed(Vec<Range<u64>>);

impl Landed {
    /// Record that recovery has written these chunks.
    pub(crate) fn note(&mut self, seqs: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end == seqs.start => last.end = seqs.end,
            _ => self.0.push(seqs),
        }
    }

    /// Return a source that has these chunks, too.
    pub(crate) const fn over<'r>(&'r self, source: &'r dyn RecoverySource) -> LandedSource<'r> {
        LandedSource { source, landed: self }
    }
}

/// A source combined with the chunks that recovery has written.
#[derive(Clone, Copy)]
pub(crate) struct LandedSource<'r> {
    source: &'r dyn RecoverySource,
    landed: &'r Landed,
}

impl RecoverySource for LandedSource<'_> {
    fn ops(&self) -> &Ops {
        self.source.ops()
    }

    fn is_answered(&self, seq: u64) -> bool {
        self.source.is_answered(seq) || self.landed.0.iter().any(|seqs| seqs.contains(&seq))
    }

    fn published(&self, seq: u64, result: &mut [u8]) -> bool {
        self.source.published(seq, result)
    }

    fn is_unknown(&self, seq: u64) -> bool {
        !self.is_answered(seq) && self.source.is_unknown(seq)
    }
}

/// Return whether the output of an operation in flight is unknown.
pub(crate) fn is_unknown(source: &dyn RecoverySource, op: OpId) -> bool {
    let op = source.ops().in_flight().find(|other| other.id == op);
    op.is_some_and(|op| (op.first()..op.end()).any(|seq| source.is_unknown(seq)))
}

/// Return which elements of the output of an operation in flight hold results, as ascending ranges; all others are
/// unchanged.
pub(crate) fn completed_elements(source: &dyn RecoverySource, op: OpId) -> Vec<Range<u64>> {
    let Some(op) = source.ops().in_flight().find(|other| other.id == op) else { return Vec::new() };
    let mut runs: Vec<Range<u64>> = Vec::new();
    for seq in (op.first()..op.end()).filter(|&seq| source.is_answered(seq)) {
        let Some(landing) = op.part(seq).landing else { continue };
        let element = op.desc.element_bytes().max(1);
        let (start, len) = ((landing.at / element) as u64, (landing.part.len() / element) as u64);
        match runs.last_mut() {
            Some(last) if last.end == start => last.end += len,
            _ => runs.push(start..start + len),
        }
    }
    runs
}
