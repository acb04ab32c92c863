//! Buckets: many small tensors as few large operations, as PyTorch's DistributedDataParallel coalesces gradients
//! (Li et al., "PyTorch Distributed", VLDB 2020; 25 MB there too).
//!
//! A tensor is copied into the bucket that is being filled; a bucket that is full is started, and goes its way while
//! the next is filled. A tensor that is larger than a bucket goes alone.

use super::{CallOptions, Communicator, Element, Error, Handle, Outcome};
use sumac_hal::op::ReduceOp;

/// The size of a bucket unless the caller wants another, in bytes.
pub const BUCKET_BYTES: usize = 25_000_000;

/// The most buckets on their way; then the oldest is waited for.
const IN_FLIGHT: usize = 4;

/// A bucket on its way, and the tensors that it is made of.
struct Bucket<T> {
    handle: Handle<Vec<T>>,
    tensors: std::ops::Range<usize>,
}

impl Communicator {
    /// Combine each of `tensors` element by element over all ranks, in place, in buckets of at most `bucket_bytes`
    /// ([`BUCKET_BYTES`] is the usual). All ranks pass tensors of the same lengths in the same order. Returns what
    /// became of each bucket.
    ///
    /// # Errors
    /// [`Error`]; tensors of buckets that were through before hold results, the others their input. What is harmless
    /// ([`Error::is_harmless`]) is said of the first bucket alone, before anything is sent: a later one that is refused
    /// ends the communicator.
    pub fn all_reduce_bucketed<T: Element>(
        &self,
        tensors: &mut [&mut [T]],
        op: ReduceOp,
        bucket_bytes: usize,
    ) -> Result<Vec<Outcome>, Error> {
        let mut outcomes = Vec::new();
        let mut flying = std::collections::VecDeque::new();
        for bucket in buckets(tensors.iter().map(|tensor| size_of_val::<[T]>(*tensor)), bucket_bytes) {
            if flying.len() == IN_FLIGHT {
                outcomes.extend(flying.pop_front().map(|oldest| land(oldest, tensors)).transpose()?);
            }
            let mut values = Vec::with_capacity(tensors[bucket.clone()].iter().map(|tensor| tensor.len()).sum());
            tensors[bucket.clone()].iter().for_each(|tensor| values.extend_from_slice(tensor));
            let started = self.start_all_reduce_with(values, op, &CallOptions::default());
            let handle = started.map_err(|error| if bucket.start > 0 { self.end_by(error) } else { error })?;
            flying.push_back(Bucket { handle, tensors: bucket });
        }
        for bucket in flying {
            outcomes.push(land(bucket, tensors)?);
        }
        Ok(outcomes)
    }
}

impl Communicator {
    /// End the communicator with an error that came too late to be harmless.
    fn end_by(&self, error: Error) -> Error {
        let error = error.ending();
        // A forked process has nothing to end.
        if let Ok(mut core) = self.lock() {
            core.note_end(&error);
        }
        error
    }
}

/// Wait for a bucket, and put its results where they belong.
fn land<T: Element>(bucket: Bucket<T>, tensors: &mut [&mut [T]]) -> Result<Outcome, Error> {
    let (values, outcome) = bucket.handle.wait()?;
    let mut rest = values.as_slice();
    for tensor in &mut tensors[bucket.tensors] {
        let (part, behind) = rest.split_at(tensor.len());
        tensor.copy_from_slice(part);
        rest = behind;
    }
    Ok(outcome)
}

/// Part tensors of these lengths into runs of at most `limit` bytes, or of one tensor.
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
    fn large_tensors_go_alone() {
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
            // No two neighbours would fit one.
            for pair in found.windows(2) {
                prop_assert!(lens[pair[0].start..pair[1].start + 1].iter().sum::<usize>() > limit);
            }
        }
    }
}
