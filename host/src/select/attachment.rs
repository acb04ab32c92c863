//! How ranks reach their tree is a candidate, too: by packets, or zero-copy. A tree serves all sizes in one way, so the
//! ways are compared over all of them.

use super::fit::predict;
use super::{CostTable, JobFacts, Origin};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};

/// The largest operation that counts, in bytes; the smallest has 8, and each other one 8 times as many as the one
/// before.
const LARGEST_BYTES: u64 = 16 << 20;

/// By how much packets have to be faster: zero-copy leaves the processors to others, and predictions err.
const MARGIN: f64 = 0.9;

/// Whether all-reduces take less time in the tree of `packets` than in that of `zero_copy`, on the average over sizes
/// (geometric mean). Only a calibrated table may say so: what is measured is how well each host moves memory.
pub(crate) fn prefers_packets(table: &CostTable, zero_copy: &JobFacts, packets: &JobFacts) -> bool {
    if !matches!(table.origin, Origin::Calibrated { .. }) {
        return false;
    }
    let sizes = std::iter::successors(Some(8_u64), |size| Some(8 * size)).take_while(|&size| size <= LARGEST_BYTES);
    let ratio = |bytes: u64| {
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, bytes / 4);
        let time = |facts| predict(table, facts, &desc, Path::Tree).ok();
        Some((time(packets)? / time(zero_copy)?).ln())
    };
    let ratios: Option<Vec<f64>> = sizes.map(ratio).collect();
    ratios.is_some_and(|ratios| ratios.iter().sum::<f64>() / (ratios.len() as f64) < MARGIN.ln())
}
