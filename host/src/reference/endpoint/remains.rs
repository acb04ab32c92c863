//! What is left at this rank when its device writes nothing any more: what was published, and perhaps not delivered.

use super::{ReferenceEndpoint, Run, State};
use crate::endpoint::{Buffers, OpId, Part};
use std::ops::Range;
use sumac_hal::dma::Address;
use sumac_hal::ids::ChunkNo;

impl ReferenceEndpoint {
    /// Write each chunk that was published and perhaps not delivered to where the device may have written a part of it;
    /// returns how many. `write` returns false for memory that it does not know.
    pub(crate) fn recover(
        &self,
        published: impl Fn(u64, &mut [u8]) -> bool,
        mut write: impl FnMut(Address, &[u8]) -> bool,
    ) -> usize {
        let end = self.own_end();
        let open: Vec<(ChunkNo, Address, usize)> = self.exposed().filter(|(seq, ..)| seq.0 < end).collect();
        let mut result = vec![0; usize::from(self.config.chunk_len_bytes)];
        let mut recovered = 0;
        for (seq, address, len) in open {
            let Some(result) = result.get_mut(..len) else { continue };
            if published(seq.0, result) && write(address, result) {
                recovered += 1;
            }
        }
        recovered
    }

    /// Land in `buffers` each chunk that was published and that this rank has no answer to, be it by way of the bounce
    /// buffer.
    pub(crate) fn land_published(
        &mut self,
        published: impl Fn(u64, &mut [u8]) -> bool,
        buffers: &mut (impl Buffers + ?Sized),
    ) {
        let mut result = vec![0; usize::from(self.config.chunk_len_bytes)];
        for (seq, op, part) in self.open() {
            let Some(landing) = part.takes.filter(|_| seq < self.own_end()) else { continue };
            if published(seq, &mut result[..landing.result_len]) {
                let part = &result[landing.part];
                buffers.output(op)[landing.at..][..part.len()].copy_from_slice(part);
                self.salvaged(seq);
            }
        }
    }

    /// Return each chunk that is submitted and has not landed, with what this rank has to do with it.
    fn open(&self) -> Vec<(u64, OpId, Part)> {
        let open = self.chunks.iter().zip(self.have..).filter(|(chunk, _)| chunk.state != State::Landed);
        open.filter_map(|(_, seq)| self.ops.of_seq(seq).map(|op| (seq, op.id, op.part(seq)))).collect()
    }

    /// The result of a chunk was copied to the caller's buffer, as the device had not said so.
    fn salvaged(&mut self, seq: u64) {
        self.chunks[(seq - self.have) as usize].state = State::Landed;
    }

    /// Return where in the bounce buffer the whole result of a chunk that is open lands, if it does.
    pub(in crate::reference) fn landing(&self, seq: u64) -> Option<u64> {
        let index = seq.checked_sub(self.have)?;
        self.chunks.get(usize::try_from(index).ok()?).filter(|chunk| chunk.state != State::Landed)?.lands
    }

    /// Return where in the bounce buffer ends what a run lands there, whose first chunk lands where it does.
    pub(in crate::reference) fn landing_end(&self, run: &Run) -> u64 {
        let (first, start) = (run.contribution.seq.0, run.contribution.dst.map_or(0, |dst| dst.offset_bytes));
        let last = self.landing(first + u64::from(run.contribution.count) - 1);
        // Behind the last one's first byte, by which it is announced.
        last.map_or(start, |last| last + 1)
    }

    /// Return the chunks that are submitted and have not all landed.
    pub(in crate::reference) fn open_seqs(&self) -> Range<u64> {
        self.have..self.next()
    }
}
