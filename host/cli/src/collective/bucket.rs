//! Gradient-style bucketing: which tensors share an operation, and where each lies in its buffers.
//!
//! Tensors of one element type are coalesced into buckets of up to [`BUCKET_BYTES`], as data-parallel trainers do with
//! gradients (Li et al., "PyTorch Distributed", VLDB 2020, on gradient bucketing: 25 MB). A larger tensor is an
//! operation of its own. A rank reads a tensor directly into its place in the bucket, so coalescing copies nothing
//! where blocks are whole.
//!
//! A buffer consists of *parts*: one per rank if ranks own blocks of it, else a single one. A part holds one block of
//! each tensor, in order. Gathered tensors may differ in length between ranks. Their blocks then have the length of the
//! longest, and the padding of shorter ones does not reach the output.
//!
//! Invariant: all ranks form the same buckets, because they start from the same list.

use crate::job::Piece;
use sumac_hal::op::{Collective, Dtype};

/// The maximum size of a bucket of several tensors, in bytes of all blocks that a rank holds.
pub(crate) const BUCKET_BYTES: usize = 25 << 20;

impl Piece {
    /// Return the length of one rank's block in bytes.
    fn block_len_bytes(&self, collective: Collective) -> usize {
        let longest = self.counts.iter().max().copied().unwrap_or(0) as usize;
        let parts = if collective == Collective::ReduceScatter { self.counts.len() } else { 1 };
        longest / parts * self.dtype.size_bytes()
    }
}

/// Tensors that share an operation.
#[derive(Debug)]
pub(crate) struct Bucket<'a> {
    collective: Collective,
    ranks: usize,
    /// Their common element type.
    pub(crate) dtype: Dtype,
    /// The tensors.
    pub(crate) pieces: Vec<&'a Piece>,
    /// The offset of each tensor's block in a part, in bytes.
    starts: Vec<usize>,
    part_len_bytes: usize,
}

impl<'a> Bucket<'a> {
    /// Distribute tensors to buckets, in order.
    pub(crate) fn all(collective: Collective, ranks: usize, pieces: &'a [Piece]) -> Vec<Self> {
        let mut buckets: Vec<Self> = Vec::new();
        for piece in pieces {
            let same = buckets.iter().rposition(|bucket| bucket.dtype == piece.dtype);
            // Only the last bucket of a type is filled; earlier ones are closed.
            match same.filter(|&at| buckets[at].has_room_for(piece)) {
                Some(at) => buckets[at].push(piece),
                None => {
                    let mut bucket = Self {
                        collective,
                        ranks,
                        dtype: piece.dtype,
                        pieces: Vec::new(),
                        starts: Vec::new(),
                        part_len_bytes: 0,
                    };
                    bucket.push(piece);
                    buckets.push(bucket);
                }
            }
        }
        buckets
    }

    /// Return the length of a rank's input in bytes.
    pub(crate) const fn input_len_bytes(&self) -> usize {
        self.part_len_bytes * self.input_parts()
    }

    /// Return the length of a rank's output in bytes.
    pub(crate) const fn output_len_bytes(&self) -> usize {
        self.part_len_bytes * self.output_parts()
    }

    /// Return the place of a tensor's elements in the input, if they are contiguous there.
    pub(crate) fn whole<'b>(&self, nth: usize, len_bytes: usize, input: &'b mut [u8]) -> Option<&'b mut [u8]> {
        (self.input_parts() == 1).then(|| &mut input[self.starts[nth]..][..len_bytes])
    }

    /// Copy a tensor's elements to their blocks in the input.
    pub(crate) fn pack(&self, nth: usize, elements: &[u8], input: &mut [u8]) {
        let block = elements.len() / self.input_parts();
        for part in 0..self.input_parts() {
            let to = part * self.part_len_bytes + self.starts[nth];
            input[to..][..block].copy_from_slice(&elements[part * block..][..block]);
        }
    }

    /// Return the slices of the output that make up a tensor's result, in order.
    pub(crate) fn unpack<'b>(&'b self, nth: usize, output: &'b [u8]) -> impl Iterator<Item = &'b [u8]> {
        let piece = self.pieces[nth];
        (0..self.output_parts()).map(move |part| {
            let len_bytes = match self.collective {
                Collective::AllGather => piece.counts[part] as usize * piece.dtype.size_bytes(),
                collective => piece.block_len_bytes(collective),
            };
            &output[part * self.part_len_bytes + self.starts[nth]..][..len_bytes]
        })
    }

    const fn input_parts(&self) -> usize {
        if matches!(self.collective, Collective::ReduceScatter) { self.ranks } else { 1 }
    }

    const fn output_parts(&self) -> usize {
        if matches!(self.collective, Collective::AllGather) { self.ranks } else { 1 }
    }

    fn has_room_for(&self, piece: &Piece) -> bool {
        let parts = self.input_parts().max(self.output_parts());
        (self.part_len_bytes + piece.block_len_bytes(self.collective)) * parts <= BUCKET_BYTES
    }

    fn push(&mut self, piece: &'a Piece) {
        self.starts.push(self.part_len_bytes);
        self.part_len_bytes += piece.block_len_bytes(self.collective);
        self.pieces.push(piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(name: usize, dtype: Dtype, counts: Vec<u64>) -> Piece {
        Piece { name: name.to_string(), dtype, fortran_order: false, counts, offset: 0 }
    }

    #[test]
    fn small_tensors_of_one_type_share_a_bucket() {
        let mib = (1 << 20) / 4;
        let of = |nth, dtype, mibs: u64| piece(nth, dtype, vec![mibs * mib; 2]);
        let pieces = [
            of(0, Dtype::F32, 10),
            of(1, Dtype::I32, 1),
            of(2, Dtype::F32, 15),
            of(3, Dtype::F32, 1),
            of(4, Dtype::F32, 30),
            of(5, Dtype::I32, 0),
        ];
        let buckets = Bucket::all(Collective::AllReduce, 2, &pieces);
        let names: Vec<String> =
            buckets.iter().map(|bucket| bucket.pieces.iter().map(|piece| piece.name.as_str()).collect()).collect();
        assert_eq!(names, ["02", "15", "3", "4"]);
        assert_eq!(buckets[0].input_len_bytes(), BUCKET_BYTES);
        // The limit applies to what a rank receives, which is twice as much here.
        assert_eq!(Bucket::all(Collective::AllGather, 2, &pieces).len(), 5);
    }

    /// Return the value of element `index` of a tensor on a rank.
    fn element(rank: usize, nth: usize, index: usize) -> u8 {
        (rank * 89 + nth * 31 + index * 7) as u8
    }

    fn elements(bucket: &Bucket<'_>, rank: usize, nth: usize) -> Vec<u8> {
        let len = bucket.pieces[nth].counts[rank] as usize * bucket.dtype.size_bytes();
        (0..len).map(|index| element(rank, nth, index)).collect()
    }

    fn inputs(bucket: &Bucket<'_>, ranks: usize) -> Vec<Vec<u8>> {
        let input = |rank| {
            let mut input = vec![0; bucket.input_len_bytes()];
            for nth in 0..bucket.pieces.len() {
                bucket.pack(nth, &elements(bucket, rank, nth), &mut input);
            }
            input
        };
        (0..ranks).map(input).collect()
    }

    proptest! {
        /// The oracle is concatenation, tensor by tensor.
        #[test]
        fn gathered_bucket_unpacks_to_concatenated_tensors(
            counts in prop::collection::vec(prop::collection::vec(0_u64..9, 3), 1..5),
        ) {
            let pieces: Vec<_> =
                counts.into_iter().enumerate().map(|(nth, counts)| piece(nth, Dtype::F16, counts)).collect();
            let buckets = Bucket::all(Collective::AllGather, 3, &pieces);
            let bucket = &buckets[0];
            let gathered = inputs(bucket, 3).concat();
            prop_assert_eq!(gathered.len(), bucket.output_len_bytes());
            for nth in 0..pieces.len() {
                let joined: Vec<u8> = (0..3).flat_map(|rank| elements(bucket, rank, nth)).collect();
                prop_assert_eq!(bucket.unpack(nth, &gathered).collect::<Vec<_>>().concat(), joined);
            }
        }

        /// The oracle is one rank's array in equal parts; the reduction does not affect placement.
        #[test]
        fn scattered_bucket_unpacks_to_equal_parts_of_tensors(blocks in prop::collection::vec(0_u64..9, 1..5)) {
            let pieces: Vec<_> =
                blocks.iter().enumerate().map(|(nth, block)| piece(nth, Dtype::F16, vec![block * 4; 4])).collect();
            let buckets = Bucket::all(Collective::ReduceScatter, 4, &pieces);
            let bucket = &buckets[0];
            let input = &inputs(bucket, 1)[0];
            for rank in 0..4 {
                let len = bucket.output_len_bytes();
                let output = &input[rank * len..][..len];
                for (nth, block) in blocks.iter().enumerate() {
                    let all = elements(bucket, 0, nth);
                    let len = *block as usize * 2;
                    prop_assert_eq!(bucket.unpack(nth, output).collect::<Vec<_>>().concat(), &all[rank * len..][..len]);
                }
            }
        }
    }
}
