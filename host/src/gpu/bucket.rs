//! Bucketing: many small tensors combined into few large operations, on the GPU.
//!
//! Tensors are copied into a bucket on the GPU, the bucket is reduced, and its parts are copied back. All of it is
//! enqueued at once, without waiting for the host.

use super::error::GpuError;
use super::group::{Group, Request};
use super::in_flight::Work;
use super::{Gpu, GpuBuffers, Part};
use crate::comm::buckets;
use crate::select::Algo;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

impl<G: Gpu> Group<G> {
    /// Combine tensors element by element over all ranks, in place, in buckets of at most `bucket_bytes`.
    ///
    /// `tensors[rank]` are the tensors of a rank; all ranks have equally many of the same lengths. All of them are
    /// complete when the last bucket is.
    ///
    /// # Errors
    /// As for [`Group::start`]; [`GpuError::Invalid`] if the ranks' tensors differ in number or length.
    pub fn start_bucketed(
        &mut self,
        tensors: &[Vec<G::Memory>],
        (dtype, op): (Dtype, ReduceOp),
        bucket_bytes: usize,
        after: &[&G::Event],
    ) -> Result<Vec<Work<G>>, GpuError> {
        let lens =
            |tensors: &Vec<G::Memory>| -> Vec<usize> { tensors.iter().map(|tensor| self.len_bytes(tensor)).collect() };
        let wanted = tensors.first().map(lens).unwrap_or_default();
        if tensors.len() != self.ranks() as usize || tensors.iter().any(|each| lens(each) != wanted) {
            return Err(GpuError::Invalid("the ranks' tensors differ in number or length".into()));
        }
        let each = OpDesc::all_reduce(dtype, op, 1).element_bytes();
        if let Some(len) = wanted.iter().find(|len| !len.is_multiple_of(each)) {
            return Err(GpuError::Invalid(format!("a tensor of {len} bytes does not hold whole {dtype} elements")));
        }
        let mut works = Vec::new();
        for bucket in buckets(wanted.iter().copied(), bucket_bytes) {
            let parts = |rank: usize| &tensors[rank][bucket.clone()];
            let len_bytes = wanted[bucket.clone()].iter().sum::<usize>();
            let desc = OpDesc::all_reduce(dtype, op, (len_bytes / each) as u64);
            let whole: Vec<G::Memory> = if bucket.len() == 1 {
                (0..tensors.len()).map(|rank| parts(rank)[0].clone()).collect()
            } else {
                (0..tensors.len()).map(|_| self.gpu().alloc(len_bytes)).collect::<Result<_, _>>()?
            };
            let buffers: Vec<_> = whole.iter().map(|memory| GpuBuffers::InPlace(memory.clone())).collect();
            let request = Request { desc, algo: Algo::Auto, buffers: &buffers, scalars: &[] };
            let copies = if bucket.len() == 1 {
                Vec::new()
            } else {
                (0..tensors.len()).flat_map(|rank| pairs(&whole[rank], parts(rank), &wanted[bucket.clone()])).collect()
            };
            works.push(self.start_between(&request, after, &copies)?);
        }
        Ok(works)
    }
}

/// Pair each tensor with its place in the bucket.
fn pairs<'a, M>(bucket: &'a M, tensors: &'a [M], lens: &[usize]) -> Vec<(Part<'a, M>, Part<'a, M>)> {
    let mut at = 0;
    let mut pair = |(memory, &len_bytes): (&'a M, &usize)| {
        let inside = Part { memory: bucket, at, len_bytes };
        at += len_bytes;
        (inside, Part { memory, at: 0, len_bytes })
    };
    tensors.iter().zip(lens).map(&mut pair).collect()
}
