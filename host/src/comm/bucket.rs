//! Gradient bucketing: coalesces many small tensors into few large operations, as PyTorch's DistributedDataParallel
//! does (Li et al., "PyTorch Distributed", VLDB 2020; 25 MB there too).
//!
//! Tensors are copied into a bucket. A full bucket is started, and the next one fills while it is in flight. A tensor
//! that is larger than a bucket is sent alone.
//!
//! Buckets are registered memory where the rank shares memory with its leaf device, so that the device works on them
//! directly. Registering takes the device, so a communicator keeps its buckets for the next call.

use super::owned_buffer::sealed::Sealed;
use super::{Buffer, Communicator, Element, Error, Handle, Outcome, OwnedBuffer, StartError, Transfer};
use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Mutex, PoisonError};
use sumac_hal::op::ReduceOp;

/// The usual bucket size in bytes.
pub const BUCKET_BYTES: usize = 25_000_000;

/// Maximum number of buckets in flight; at the limit, the oldest is waited for.
const IN_FLIGHT: usize = 4;

/// The largest page of any machine. An output of less than a page is copied, though the device can reach it.
const PAGE_MAX_BYTES: usize = 64 << 10;

/// Memory that every element type is aligned in.
type Words = Buffer<u64>;

/// The memory of buckets, which a communicator keeps between calls: at most [`IN_FLIGHT`] buffers.
#[derive(Default)]
pub(super) struct BucketPool(Mutex<Vec<Words>>);

impl BucketPool {
    /// Return memory of at least `len_bytes`, with any contents.
    fn take(&self, comm: &Communicator, len_bytes: usize) -> Result<Words, Error> {
        let words = len_bytes.div_ceil(size_of::<u64>());
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match kept.filter(|kept| kept.len() >= words) {
            Some(kept) => Ok(kept),
            None => match comm.alloc(words) {
                // The device has no room. Other memory works as well, through a bounce buffer.
                Err(Error::Memory { .. }) => Ok(Buffer::plain(words)),
                allocated => allocated,
            },
        }
    }

    /// Keep the memory of a bucket, unless its operation on `used_bytes` of it shows that the leaf device cannot reach
    /// it (any more).
    fn put(&self, words: Words, used_bytes: usize, transfer: Option<Transfer>) {
        let shows_nothing = transfer.is_none() || used_bytes < PAGE_MAX_BYTES;
        let is_useful = words.is_registered() && (shows_nothing || transfer == Some(Transfer::ZeroCopy));
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if is_useful && kept.len() < IN_FLIGHT {
            kept.push(words);
        }
    }
}

impl fmt::Debug for BucketPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BucketPool")
    }
}

/// The memory of a bucket, and how many elements it holds.
struct Staged<T> {
    words: Words,
    len: usize,
    elements: PhantomData<T>,
}

impl<T> Sealed for Staged<T> {}

impl<T: Element> OwnedBuffer for Staged<T> {
    type Element = T;

    fn values(&self) -> &[T] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn values_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }

    fn zeroed(comm: &Communicator, len: usize) -> Result<Self, Error> {
        let words = comm.alloc((len * size_of::<T>()).div_ceil(size_of::<u64>()))?;
        Ok(Self { words, len, elements: PhantomData })
    }
}

/// A bucket in flight, and the tensors in it.
struct Bucket<T> {
    handle: Handle<Staged<T>>,
    tensors: std::ops::Range<usize>,
}

impl Communicator {
    /// All-reduce each of `tensors` in place, coalesced into buckets of at most `bucket_bytes` ([`BUCKET_BYTES`] is the
    /// usual size). All ranks pass tensors of the same lengths in the same order. Returns the outcome of each bucket.
    ///
    /// Buckets are zero-copy where this rank shares memory with its leaf device. The communicator keeps their memory
    /// for the next call, up to four buckets.
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
        let mut in_flight = VecDeque::new();
        let lens: Vec<usize> = tensors.iter().map(|tensor| size_of_val::<[T]>(*tensor)).collect();
        let buckets = buckets(lens.iter().copied(), bucket_bytes);
        // All have the size of the largest, so that any of them can be used again.
        let len_bytes = |bucket: &std::ops::Range<usize>| lens[bucket.clone()].iter().sum();
        let most_bytes: usize = buckets.iter().map(len_bytes).max().unwrap_or(0);
        for bucket in buckets {
            if in_flight.len() == IN_FLIGHT {
                let oldest = in_flight.pop_front();
                outcomes.extend(oldest.map(|oldest| self.finish_bucket(oldest, tensors)).transpose()?);
            }
            let started = self.start_bucket(&tensors[bucket.clone()], op, most_bytes);
            let handle = started.map_err(|error| if bucket.start > 0 { self.end_with(error) } else { error })?;
            in_flight.push_back(Bucket { handle, tensors: bucket });
        }
        for bucket in in_flight {
            outcomes.push(self.finish_bucket(bucket, tensors)?);
        }
        Ok(outcomes)
    }

    /// Copy tensors into a bucket and start its operation.
    fn start_bucket<T: Element>(
        &self,
        tensors: &[&mut [T]],
        op: ReduceOp,
        most_bytes: usize,
    ) -> Result<Handle<Staged<T>>, Error> {
        let words = self.buckets.take(self, most_bytes)?;
        let len = tensors.iter().map(|tensor| tensor.len()).sum();
        let mut staged = Staged { words, len, elements: PhantomData };
        let mut rest = staged.values_mut();
        for tensor in tensors {
            let (part, behind) = rest.split_at_mut(tensor.len());
            part.copy_from_slice(tensor);
            rest = behind;
        }
        self.start_all_reduce(staged, op).map_err(|StartError { error, buffer }| {
            self.buckets.put(buffer.words, 0, None);
            error
        })
    }

    /// Wait for a bucket and copy its results back to the tensors.
    fn finish_bucket<T: Element>(&self, bucket: Bucket<T>, tensors: &mut [&mut [T]]) -> Result<Outcome, Error> {
        let (staged, outcome) = bucket.handle.wait()?;
        let mut rest = staged.values();
        for tensor in &mut tensors[bucket.tensors] {
            let (part, behind) = rest.split_at(tensor.len());
            tensor.copy_from_slice(part);
            rest = behind;
        }
        let used_bytes = size_of_val(staged.values());
        self.buckets.put(staged.words, used_bytes, outcome.transfer);
        Ok(outcome)
    }

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
        assert!(buckets([].into_iter(), 8).is_empty());
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
