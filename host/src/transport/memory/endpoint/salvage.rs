//! Salvages results after the device has stopped writing: those that were published and perhaps not delivered.

use super::{Run, StageOut, State, ZeroCopyEndpoint};
use crate::transport::packets::{Buffers, OpId, Part};
use std::ops::Range;
use sumac_hal::dma::Address;
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::{COMPLETION_WORDS, CompletionEntry, EntryStatus};

impl ZeroCopyEndpoint {
    /// Write each published result whose delivery is uncertain to the destination that the device may have partly
    /// written; returns how many. `write` returns false for memory that it does not know. Afterwards these chunks count
    /// as landed: the caller's memory is complete, and the record may be gone when it is read again.
    pub(crate) fn recover(
        &mut self,
        published: impl Fn(u64, &mut [u8]) -> bool,
        mut write: impl FnMut(Address, &[u8]) -> bool,
    ) -> usize {
        let end = self.participation_end();
        let open: Vec<(ChunkNo, Address, usize)> = self.exposed().filter(|(seq, ..)| seq.0 < end).collect();
        let mut result = vec![0; usize::from(self.config.chunk_len_bytes)];
        let mut recovered = 0;
        for (seq, address, len) in open {
            let Some(result) = result.get_mut(..len) else { continue };
            if published(seq.0, result) && write(address, result) {
                recovered += 1;
                self.mark_salvaged(seq.0);
            }
        }
        recovered
    }

    /// Copy each published result that this rank has no answer for to `buffers`, including results that were bound for
    /// the bounce buffer.
    pub(crate) fn land_published(
        &mut self,
        published: impl Fn(u64, &mut [u8]) -> bool,
        buffers: &mut (impl Buffers + ?Sized),
    ) {
        let mut result = vec![0; usize::from(self.config.chunk_len_bytes)];
        for (seq, op, part) in self.open() {
            let Some(landing) = part.landing.filter(|_| seq < self.participation_end()) else { continue };
            if published(seq, &mut result[..landing.result_len]) {
                let part = &result[landing.part];
                buffers.output(op)[landing.at..][..part.len()].copy_from_slice(part);
                self.mark_salvaged(seq);
            }
        }
    }

    /// Apply an answer that arrived before memory was revoked, where no output is at hand: results that the device
    /// wrote to the caller's memory have landed.
    pub(in crate::transport::memory) fn note_landed(&mut self, words: &[u64; COMPLETION_WORDS]) {
        let Some((true, chunks)) = self.answered_chunks(words) else { return };
        for chunk in self.chunks.range_mut(chunks) {
            if chunk.state == State::Submitted && chunk.dst.is_some() {
                chunk.state = State::Landed;
            }
        }
    }

    /// Apply an answer that arrived while or after memory was revoked. It proves nothing about chunks in that memory,
    /// since later writes did not reach the copy. Unless published, their contents are unknown: any answer allows the
    /// device to reuse the redo slot. Therefore read the redo slots first, and apply such answers after.
    pub(crate) fn mark_unknown(&mut self, words: &[u64; COMPLETION_WORDS]) {
        match (self.answered_chunks(words), CompletionEntry::parse(words)) {
            (Some((_, chunks)), _) => self.mark_chunks_unknown(chunks),
            (None, Ok(CompletionEntry::Operations { .. } | CompletionEntry::Missing { .. })) => {}
            // Unreadable: it may have concerned any chunk.
            (None, _) => self.mark_all_unknown(),
        }
    }

    /// The same where answers could not be read.
    pub(crate) fn mark_all_unknown(&mut self) {
        self.mark_chunks_unknown(0..self.chunks.len());
    }

    fn mark_chunks_unknown(&mut self, chunks: Range<usize>) {
        for chunk in self.chunks.range_mut(chunks) {
            if chunk.state != State::Landed && chunk.dst.is_some() {
                chunk.state = State::Unknown;
            }
        }
    }

    /// Land what such an answer reports in the bounce buffer, which is not revoked; `stage_out` copies it.
    pub(crate) fn land_late_answers(&mut self, words: &[u64; COMPLETION_WORDS], mut stage_out: impl FnMut(&StageOut)) {
        let Some((true, chunks)) = self.answered_chunks(words) else { return };
        let participation_end = self.participation_end();
        for (chunk, seq) in self.chunks.iter_mut().zip(self.have..).skip(chunks.start).take(chunks.len()) {
            if let Some(result) = &chunk.stage_out
                && chunk.state == State::Submitted
                && seq < participation_end
            {
                stage_out(result);
                chunk.state = State::Landed;
            }
        }
    }

    /// Return whether an entry reports landed results, and the open chunks that it answers. `None` if it does not
    /// answer this group, or names chunks that are not open.
    fn answered_chunks(&self, words: &[u64; COMPLETION_WORDS]) -> Option<(bool, Range<usize>)> {
        let Ok(CompletionEntry::Answer { status, group, epoch, seq, count, .. }) = CompletionEntry::parse(words) else {
            return None;
        };
        let landed = status == EntryStatus::Result;
        let from = usize::try_from(seq.0.checked_sub(self.have)?).ok()?;
        let end = from.checked_add(usize::from(count)).filter(|&end| end <= self.chunks.len())?;
        let is_ours = group == self.config.group && (!landed || epoch == self.config.epoch);
        is_ours.then_some((landed, from..end))
    }

    /// Return the chunks whose results may be read from redo slots, with the lengths of the results: of retained
    /// operations those that others may lack, of operations in flight those that are submitted.
    pub(crate) fn recoverable_chunks(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let kept = self.ops.retained().map(|kept| (kept.op, kept.from));
        let all = kept.chain(self.ops.in_flight().map(|op| (*op, op.first())));
        all.flat_map(|(op, from)| (from..op.end().min(self.next())).map(move |seq| (seq, op.result_len(seq))))
    }

    /// Return whether the contents of a chunk's memory are unknown.
    pub(crate) fn is_unknown(&self, seq: u64) -> bool {
        let index = seq.checked_sub(self.have).and_then(|index| usize::try_from(index).ok());
        index.and_then(|index| self.chunks.get(index)).is_some_and(|chunk| chunk.state == State::Unknown)
    }

    /// Return each submitted chunk that has not landed, with its operation and this rank's part in it.
    fn open(&self) -> Vec<(u64, OpId, Part)> {
        let open = self.chunks.iter().zip(self.have..).filter(|(chunk, _)| chunk.state != State::Landed);
        open.filter_map(|(_, seq)| self.ops.of_seq(seq).map(|op| (seq, op.id, op.part(seq)))).collect()
    }

    /// Mark a chunk as landed whose result was copied to the caller's buffer without an answer.
    fn mark_salvaged(&mut self, seq: u64) {
        self.chunks[(seq - self.have) as usize].state = State::Landed;
    }

    /// Return the offset in the bounce buffer at which the result of an open chunk lands, if it does.
    pub(in crate::transport::memory) fn landing(&self, seq: u64) -> Option<u64> {
        let index = seq.checked_sub(self.have)?;
        self.chunks.get(usize::try_from(index).ok()?).filter(|chunk| chunk.state != State::Landed)?.bounce_offset
    }

    /// Return the end of the offsets in the bounce buffer at which results of this run are announced.
    pub(in crate::transport::memory) fn landing_end(&self, run: &Run) -> u64 {
        let (first, start) = (run.contribution.seq.0, run.contribution.dst.map_or(0, |dst| dst.offset_bytes));
        let last = self.landing(first + u64::from(run.contribution.count) - 1);
        // A result is announced by the offset of its first byte.
        last.map_or(start, |last| last + 1)
    }

    /// Return the submitted chunks, from the oldest that has not landed.
    pub(in crate::transport::memory) fn open_seqs(&self) -> Range<u64> {
        self.have..self.next()
    }
}
