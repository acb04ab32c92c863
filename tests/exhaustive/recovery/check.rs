//! The expected contents of buffers.

use crate::rank::Memory;
use crate::scope::{Data, ELEMENTS, Scope};

/// Compare an operation's buffer at `rank` of `ranks` with the expected contents: the result where `is_new`, the rank's
/// input elsewhere. Describes the first element that differs.
pub(super) fn compare(
    scope: &Scope,
    (rank, ranks): (usize, usize),
    memory: &Memory,
    op: u64,
    is_new: impl Fn(u64) -> bool,
) -> Option<String> {
    let data = Data::new(ranks, 1);
    let (desc, seqs) = scope.ops().swap_remove(op as usize);
    (0..).zip(memory.0[op as usize].chunks_exact(8)).find_map(|(i, bytes)| {
        let seq = seqs.start + i / ELEMENTS;
        let found = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let expected = if is_new(i) { data.after(&desc, rank, seq) } else { data.before(&desc, rank, seq) };
        (found != expected).then(|| format!("element {i}, of chunk {seq}: {found:#x} in place of {expected:#x}"))
    })
}

/// Return the wrapping sum of the contributions.
pub(super) fn sum(given: &[&[u8]]) -> Vec<u8> {
    let words = |bytes: &[u8]| -> Vec<u64> {
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))).collect()
    };
    let parts: Vec<Vec<u64>> = given.iter().map(|bytes| words(bytes)).collect();
    let len = parts.iter().map(Vec::len).min().unwrap_or(0);
    let sums = (0..len).map(|i| parts.iter().fold(0_u64, |sum, part| sum.wrapping_add(part[i])));
    sums.flat_map(u64::to_le_bytes).collect()
}
