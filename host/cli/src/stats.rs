//! The figures of a row: the bandwidths of nccl-tests, and median and 99th percentile of the slowest rank's time.

use sumac_hal::op::Collective;

/// Return, per iteration, the time of the slowest rank; `times_ns[rank][iteration]`.
///
/// Only iterations that all ranks report count.
pub(crate) fn slowest_ns(times_ns: &[Vec<u64>]) -> Vec<u64> {
    let iterations = times_ns.iter().map(Vec::len).min().unwrap_or(0);
    (0..iterations).map(|i| times_ns.iter().map(|rank| rank[i]).max().unwrap_or(0)).collect()
}

/// Return the median in nanoseconds, the mean of the middle two for an even number; 0 without values.
pub(crate) fn median_ns(times_ns: &[u64]) -> f64 {
    let mut sorted = times_ns.to_vec();
    sorted.sort_unstable();
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2] as f64,
        n => (sorted[n / 2 - 1] as f64 + sorted[n / 2] as f64) / 2.0,
    }
}

/// Return the 99th percentile by the nearest-rank rule: the smallest value that at least 99 % do not exceed; 0 without
/// values. For fewer than 100 values it is the maximum.
pub(crate) fn p99_ns(times_ns: &[u64]) -> u64 {
    let mut sorted = times_ns.to_vec();
    sorted.sort_unstable();
    let nearest_rank = (sorted.len() * 99).div_ceil(100);
    sorted.get(nearest_rank.saturating_sub(1)).copied().unwrap_or(0)
}

/// Return the algorithm bandwidth in GB/s (1e9 bytes): size over time; 0 if no time passed.
pub(crate) fn algbw_gbytes_s(size_bytes: u64, time_ns: f64) -> f64 {
    if time_ns > 0.0 { size_bytes as f64 / time_ns } else { 0.0 }
}

/// Return the factor by which nccl-tests multiplies the algorithm bandwidth to get the bus bandwidth
/// (`doc/PERFORMANCE.md` there), whatever the path: 2 (N-1) / N for an all-reduce, (N-1) / N where each rank owns a
/// block, 1 where one rank sends or receives the whole buffer, and 0 for a barrier.
pub(crate) fn bus_factor(collective: Collective, ranks: u32) -> f64 {
    let share = (f64::from(ranks) - 1.0) / f64::from(ranks.max(1));
    match collective {
        Collective::AllReduce => 2.0 * share,
        Collective::Reduce | Collective::Broadcast => 1.0,
        Collective::Barrier => 0.0,
        _ => share,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowest_takes_the_maximum_over_ranks_of_each_iteration() {
        assert_eq!(slowest_ns(&[vec![1, 9, 3], vec![5, 2, 4]]), [5, 9, 4]);
        assert_eq!(slowest_ns(&[vec![1, 9], vec![5]]), [5]);
        assert_eq!(slowest_ns(&[]), [0_u64; 0]);
    }

    #[test]
    fn median_of_odd_even_and_no_values() {
        assert_eq!(median_ns(&[3, 1, 2]), 2.0);
        assert_eq!(median_ns(&[4, 1, 2, 3]), 2.5);
        assert_eq!(median_ns(&[]), 0.0);
    }

    #[test]
    fn p99_is_a_measured_value() {
        let values: Vec<u64> = (1..=200).rev().collect();
        assert_eq!(p99_ns(&values), 198);
        assert_eq!(p99_ns(&values[..100]), 199);
        assert_eq!(p99_ns(&[7, 5]), 7);
        assert_eq!(p99_ns(&[]), 0);
    }

    #[test]
    fn bandwidths_match_nccl_tests() {
        // 16 MiB in 1 ms over 4 ranks.
        let algbw = algbw_gbytes_s(16 << 20, 1e6);
        assert!((algbw - 16.777_216).abs() < 1e-9);
        assert_eq!(bus_factor(Collective::AllReduce, 4), 1.5);
        assert_eq!(bus_factor(Collective::AllReduce, 1), 0.0);
        assert_eq!(bus_factor(Collective::AllGather, 4), 0.75);
        assert_eq!(bus_factor(Collective::Broadcast, 4), 1.0);
        assert_eq!(bus_factor(Collective::Barrier, 4), 0.0);
        assert_eq!(algbw_gbytes_s(8, 0.0), 0.0);
    }
}
