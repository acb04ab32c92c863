//! What is left of a tree at this rank, however it was attached.

use super::ledger::{Class, Ledger, OpEntry};
use crate::transport::packets::{Buffers, Keep, Kept, Op, OpId, Ops};
use std::ops::Range;

/// A rank's side of a group that is over: it takes in nothing more, and nobody writes to its buffers any more.
pub(crate) trait Remains {
    /// The operations.
    fn ops(&self) -> &Ops;

    /// Tell whether this rank has its answer to a chunk of an operation in flight.
    fn is_answered(&self, seq: u64) -> bool;

    /// Read the whole result of a chunk from where its device had published it; false, and anything in `result`, if
    /// that is not to be had.
    fn published(&self, seq: u64, result: &mut [u8]) -> bool;

    /// Tell whether nobody knows what this rank's memory holds of a chunk that it has no answer to: the device may have
    /// written to it while it was taken away. It is neither a result nor a contribution.
    fn is_unknown(&self, _seq: u64) -> bool {
        false
    }
}

/// Describe what this rank has.
pub(crate) fn ledger(remains: &dyn Remains) -> Ledger {
    let ops = remains.ops();
    let kept = ops.kept().map(|kept| (&kept.op, kept.from.min(kept.op.end() - 1), Some(kept.has_bytes())));
    let mut parts = kept.chain(ops.in_flight().map(|op| (op, op.first(), None))).peekable();
    let mut ledger = Ledger::new(parts.peek().map_or(ops.end(), |(_, from, _)| *from));
    let mut published = Vec::new();
    for (op, from, bytes) in parts {
        let (has_returned, has_bytes) = (bytes.is_some(), bytes.unwrap_or(false));
        ledger.skip_to(from);
        let entry = OpEntry { first: op.first(), end: op.end(), desc: op.desc, moves: op.moves() };
        ledger.push(entry, from, |seq| {
            let is_answered = has_returned || remains.is_answered(seq);
            if !op.moves() {
                // What it waits for is the word that all have entered it.
                return Class { needs: !is_answered, holds: is_answered, gives: !is_answered };
            }
            let keep = op.keep(seq);
            // A result in place has overwritten it.
            let overwritten = is_answered && matches!(keep, Keep::Result(_));
            let part = op.part(seq);
            // What is only received is in nobody's way.
            let spoilt = part.gives.is_some() && remains.is_unknown(seq);
            let intact = !overwritten && !spoilt;
            let gives = if has_returned { matches!(keep, Keep::Contribution(_)) && has_bytes } else { intact };
            let holds = match keep {
                Keep::Result(_) if is_answered && (has_bytes || !has_returned) => true,
                Keep::Own(_) if has_bytes || !has_returned => true,
                _ => {
                    published.resize(op.result_len(seq), 0);
                    remains.published(seq, &mut published)
                }
            };
            Class { needs: !is_answered && part.takes.is_some(), holds, gives }
        });
    }
    ledger.skip_to(ops.end());
    ledger
}

/// Append the result of a chunk that this rank holds.
pub(crate) fn give_result(remains: &dyn Remains, seq: u64, buffers: &mut dyn Buffers, to: &mut Vec<u8>) {
    if let Some(op) = remains.ops().of_seq(seq) {
        match op.keep(seq) {
            Keep::Result(range) if remains.is_answered(seq) => {
                return to.extend_from_slice(&buffers.output(op.id)[range]);
            }
            Keep::Own(range) => return to.extend_from_slice(&buffers.input(op.id)[range]),
            _ => return give_published(remains, &op, seq, to),
        }
    }
    let Some(kept) = kept_of(remains, seq) else { return };
    match kept.op.keep(seq) {
        Keep::Result(_) | Keep::Own(_) if kept.has_bytes() => remains.ops().give_kept(kept, seq, to),
        _ => give_published(remains, &kept.op, seq, to),
    }
}

fn kept_of(remains: &dyn Remains, seq: u64) -> Option<&Kept> {
    remains.ops().kept().find(|kept| (kept.from..kept.op.end()).contains(&seq))
}

fn give_published(remains: &dyn Remains, op: &Op, seq: u64, to: &mut Vec<u8>) {
    let at = to.len();
    to.resize(at + op.result_len(seq), 0);
    // It was there when the ledger was made, and the device is fenced since.
    let found = remains.published(seq, &mut to[at..]);
    debug_assert!(found, "a result that was held: chunk {seq}");
}

/// Append this rank's contribution to a chunk.
pub(crate) fn give_contribution(remains: &dyn Remains, seq: u64, buffers: &dyn Buffers, to: &mut Vec<u8>) {
    if let Some(op) = remains.ops().of_seq(seq) {
        to.extend_from_slice(op.part(seq).gives.map_or(&[], |range| &buffers.input(op.id)[range]));
    } else if let Some(kept) = kept_of(remains, seq) {
        remains.ops().give_kept(kept, seq, to);
    }
}

/// Land the whole result of a chunk, if this rank waits for it.
pub(crate) fn land(remains: &dyn Remains, seq: u64, result: &[u8], buffers: &mut dyn Buffers) {
    let Some(op) = remains.ops().of_seq(seq).filter(|_| !remains.is_answered(seq)) else { return };
    if let Some(landing) = op.part(seq).takes {
        let part = &result[landing.part];
        buffers.output(op.id)[landing.at..][..part.len()].copy_from_slice(part);
    }
}

/// Return the length of a piece's chunks' results in bytes; all ranks have the same, whatever they know of the operation.
pub(crate) fn result_lens(remains: &dyn Remains, entry: &OpEntry) -> impl Fn(u64) -> usize + use<> {
    let op = remains.ops().describe(entry.desc, (entry.first, entry.end));
    move |seq| op.result_len(seq)
}

/// Chunks that a repair has landed, beside what was there.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Landed(Vec<Range<u64>>);

impl Landed {
    /// Note that chunks have landed.
    pub(crate) fn note(&mut self, seqs: Range<u64>) {
        match self.0.last_mut() {
            Some(last) if last.end == seqs.start => last.end = seqs.end,
            _ => self.0.push(seqs),
        }
    }

    /// Describe a rank that has these, too.
    pub(crate) const fn over<'r>(&'r self, remains: &'r dyn Remains) -> Over<'r> {
        Over { remains, landed: self }
    }
}

/// What is left of a tree, with what a repair has landed.
#[derive(Clone, Copy)]
pub(crate) struct Over<'r> {
    remains: &'r dyn Remains,
    landed: &'r Landed,
}

impl Remains for Over<'_> {
    fn ops(&self) -> &Ops {
        self.remains.ops()
    }

    fn is_answered(&self, seq: u64) -> bool {
        self.remains.is_answered(seq) || self.landed.0.iter().any(|seqs| seqs.contains(&seq))
    }

    fn published(&self, seq: u64, result: &mut [u8]) -> bool {
        self.remains.published(seq, result)
    }

    fn is_unknown(&self, seq: u64) -> bool {
        !self.is_answered(seq) && self.remains.is_unknown(seq)
    }
}

/// Tell whether nobody knows what the output of an operation in flight holds.
pub(crate) fn is_unknown(remains: &dyn Remains, op: OpId) -> bool {
    let op = remains.ops().in_flight().find(|other| other.id == op);
    op.is_some_and(|op| (op.first()..op.end()).any(|seq| remains.is_unknown(seq)))
}

/// Return which elements of the output of an operation in flight are results by now, as runs in rising order; all others
/// are as they were.
pub(crate) fn fresh(remains: &dyn Remains, op: OpId) -> Vec<Range<u64>> {
    let Some(op) = remains.ops().in_flight().find(|other| other.id == op) else { return Vec::new() };
    let mut runs: Vec<Range<u64>> = Vec::new();
    for seq in (op.first()..op.end()).filter(|&seq| remains.is_answered(seq)) {
        let Some(landing) = op.part(seq).takes else { continue };
        let element = op.desc.element_bytes().max(1);
        let (start, len) = ((landing.at / element) as u64, (landing.part.len() / element) as u64);
        match runs.last_mut() {
            Some(last) if last.end == start => last.end += len,
            _ => runs.push(start..start + len),
        }
    }
    runs
}
