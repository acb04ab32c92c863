//! Gradient bucketing: coalesces many small tensors into few large operations, as PyTorch's DistributedDataParallel
//! does (Li et al., "PyTorch Distributed", VLDB 2020; 25 MB there too).
//!
//! Tensors are copied into a bucket. A full bucket is started, and the next one fills while it is in flight. A tensor
//! that is larger than a bucket is sent alone.

use super::{CallOptions, Communicator, Element, Error, Handle, Outcome};
use sumac_hal::op::ReduceOp;

/// The usual bucket size in bytes.
pub const BUCKET_BYTES: usize = 25_000_000;

/// Maximum number of buckets in flight; at the limit, the oldest is waited for.
const IN_FLIGHT: usize = 4;

/// A bucket in flight, and the tensors in it.
struct Bucket<T> {
    handle: Handle<Vec<T>>,
    tensors: std::ops::Range<usize>,
}

impl Communicator {
    /// All-reduce each of `tensors` in place, coalesced into buckets of at most `bucket_bytes` ([`BUCKET_BYTES`] is the
    /// usual size). All ranks pass tensors of the same lengths in the same order. Returns the outcome of each bucket.
    ///
    /// # Errors
    /// [`Error`]. Tensors of completed buckets hold results, the others their input. Only the first bucket can be
    /// rejected without effect ([`Error::is_rejection`]); a rejection of a later one ends the communicator.
    pub fn all_reduce_bucketed<T: Element>(
        &self,
        tensors: &mut [&mut [T]],
        op: ReduceOp,
        bucket_bytes: usize,
    ) -> Result<Vec<Outcome>, Error> {
        let mut outcomes = Vec::new();
        let mut in_flight = std::collections::VecDeque::new();
        for bucket in buckets(tensors.iter().map(|tensor| size_of_val::<[T]>(*tensor)), bucket_bytes) {
            if in_flight.len() == IN_FLIGHT {
                outcomes.extend(in_flight.pop_front().map(|oldest| finish_bucket(oldest, tensors)).transpose()?);
            }
            let mut values = Vec::with_capacity(tensors[bucket.clone()].iter().map(|tensor| tensor.len()).sum());
            tensors[bucket.clone()].iter().for_each(|tensor| values.extend_from_slice(tensor));
            let started = self.start_all_reduce_with(values, op, &CallOptions::default());
            let handle = started.map_err(|error| if bucket.start > 0 { self.end_with(error) } else { error })?;
            in_flight.push_back(Bucket { handle, tensors: bucket });
        }
        for bucket in in_flight {
            outcomes.push(finish_bucket(bucket, tensors)?);
        }
        Ok(outcomes)
    }
}

impl Communicator {
    /// End the communicator with an error that came too late to be a mere rejection.
    fn end_with(&self, error: Error) -> Error {
        let error = error.ending();
        // A forked process has nothing to end.
        if let Ok(mut core) = self.lock() {
            core.note_end(&error);
        }
        error
    }
}

/// Wait for a bucket and copy its results back to the tensors.
fn finish_bucket<T: Element>(bucket: Bucket<T>, tensors: &mut [&mut [T]]) -> Result<Outcome, Error> {
    let (values, outcome) = bucket.handle.wait()?;
    let mut rest = values.as_slice();
    for tensor in &mut tensors[bucket.tensors] {
        let (part, behind) = rest.split_at(tensor.len());
        tensor.copy_from_slice(part);
        rest = behind;
    }
    Ok(outcome)
}

/// Group tensors of these lengths into runs of at most `limit` bytes, or of a single tensor.
pub(crate) fn buckets(lens: impl Iterator<Item = usize>, limit: usize) -> Vec<std::ops::Range<usize>> {
    let mut buckets: Vec<std::ops::Range<usize>> = Vec::new();
    let mut filled = 0_usize;
    for (index, len) in lens.enumerate() {
        match buckets.last_mut() {
            Some(last) if filled.saturating_add(len) <= limit => {
                last.end = index + 1;
                filled += len;
            }
            _ => {
                buckets.push(index..index + 1);
                filled = len;
            }
        }
    }
    buckets
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tensor_larger_than_a_bucket_gets_its_own() {
        assert_eq!(buckets([3, 4, 9, 1, 1].into_iter(), 8), [0..2, 2..3, 3..5]);
        assert_eq!(buckets([].into_iter(), 8), []);
    }

    proptest! {
        #[test]
        fn buckets_tile_the_tensors(lens in prop::collection::vec(0_usize..50, 0..40), limit in 0_usize..100) {
            let found = buckets(lens.iter().copied(), limit);
            let mut end = 0;
            for bucket in &found {
                prop_assert_eq!(bucket.start, end);
                end = bucket.end;
                let total: usize = lens[bucket.clone()].iter().sum();
                prop_assert!(total <= limit || bucket.len() == 1);
            }
            prop_assert_eq!(end, lens.len());
            // No two neighbouring buckets would fit into one.
            for pair in found.windows(2) {
                prop_assert!(lens[pair[0].start..pair[1].start + 1].iter().sum::<usize>() > limit);
            }
        }
    }
}
