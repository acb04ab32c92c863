//! What is left at this rank when its device writes nothing any more: what was published, and perhaps not delivered.

use super::{Drain, ReferenceEndpoint, Run, State};
use crate::transport::packets::{Buffers, OpId, Part};
use std::ops::Range;
use sumac_hal::dma::Address;
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::{COMPLETION_WORDS, CompletionEntry, EntryStatus};

impl ReferenceEndpoint {
    /// Write each chunk that was published and perhaps not delivered to where the device may have written a part of it;
    /// returns how many. `write` returns false for memory that it does not know. These chunks have landed then: in the
    /// caller's own memory there is nothing left to copy, and the record may be gone when it is looked at again.
    pub(crate) fn recover(
        &mut self,
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
                self.salvaged(seq.0);
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

    /// Take in an answer that came before memory was taken from the device, where no output is at hand: what the device
    /// itself has written to the caller's memory is there.
    pub(in crate::transport::memory) fn note_landed(&mut self, words: &[u64; COMPLETION_WORDS]) {
        let Some((true, chunks)) = self.answered_by(words) else { return };
        for chunk in self.chunks.range_mut(chunks) {
            if chunk.state == State::Submitted && chunk.dst.is_some() {
                chunk.state = State::Landed;
            }
        }
    }

    /// Take in an answer that may have come while memory was taken from the device. Of chunks that lie there it says
    /// nothing: what was written after the copy is not here. Nobody knows of them what is not published: an answer of any
    /// kind lets the device use a redo slot again. So look there before, and for answers after.
    pub(crate) fn doubt(&mut self, words: &[u64; COMPLETION_WORDS]) {
        match (self.answered_by(words), CompletionEntry::parse(words)) {
            (Some((_, chunks)), _) => self.doubt_chunks(chunks),
            (None, Ok(CompletionEntry::Operations { .. } | CompletionEntry::Missing { .. })) => {}
            // Whatever it was.
            (None, _) => self.doubt_all(),
        }
    }

    /// The same where answers can't be read.
    pub(crate) fn doubt_all(&mut self) {
        self.doubt_chunks(0..self.chunks.len());
    }

    fn doubt_chunks(&mut self, chunks: Range<usize>) {
        for chunk in self.chunks.range_mut(chunks) {
            if chunk.state != State::Landed && chunk.dst.is_some() {
                chunk.state = State::Unknown;
            }
        }
    }

    /// Land what such an answer says to be in the bounce buffer, which is not taken away; `drain` copies it.
    pub(crate) fn land_late(&mut self, words: &[u64; COMPLETION_WORDS], mut drain: impl FnMut(&Drain)) {
        let Some((true, chunks)) = self.answered_by(words) else { return };
        let own_end = self.own_end();
        for (chunk, seq) in self.chunks.iter_mut().zip(self.have..).skip(chunks.start).take(chunks.len()) {
            if let Some(result) = &chunk.drain
                && chunk.state == State::Submitted
                && seq < own_end
            {
                drain(result);
                chunk.state = State::Landed;
            }
        }
    }

    /// Return which of the open chunks an entry answers, and whether it says that their results have landed; `None` if it
    /// answers none of this group, or chunks that are not open.
    fn answered_by(&self, words: &[u64; COMPLETION_WORDS]) -> Option<(bool, Range<usize>)> {
        let Ok(CompletionEntry::Answer { status, group, epoch, seq, count, .. }) = CompletionEntry::parse(words) else {
            return None;
        };
        let landed = status == EntryStatus::Result;
        let from = usize::try_from(seq.0.checked_sub(self.have)?).ok()?;
        let end = from.checked_add(usize::from(count)).filter(|&end| end <= self.chunks.len())?;
        let is_ours = group == self.config.group && (!landed || epoch == self.config.epoch);
        is_ours.then_some((landed, from..end))
    }

    /// Return the chunks whose results may be looked for in redo slots, and the length of each: of operations that have
    /// returned, as far as others may lack them, and of those in flight, as far as they are submitted.
    pub(crate) fn looked_up(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let kept = self.ops.kept().map(|kept| (kept.op, kept.from));
        let all = kept.chain(self.ops.in_flight().map(|op| (*op, op.first())));
        all.flat_map(|(op, from)| (from..op.end().min(self.next())).map(move |seq| (seq, op.result_len(seq))))
    }

    /// Tell whether nobody knows what the memory of a chunk holds.
    pub(crate) fn is_unknown(&self, seq: u64) -> bool {
        let index = seq.checked_sub(self.have).and_then(|index| usize::try_from(index).ok());
        index.and_then(|index| self.chunks.get(index)).is_some_and(|chunk| chunk.state == State::Unknown)
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
    pub(in crate::transport::memory) fn landing(&self, seq: u64) -> Option<u64> {
        let index = seq.checked_sub(self.have)?;
        self.chunks.get(usize::try_from(index).ok()?).filter(|chunk| chunk.state != State::Landed)?.lands
    }

    /// Return where in the bounce buffer ends what a run lands there, whose first chunk lands where it does.
    pub(in crate::transport::memory) fn landing_end(&self, run: &Run) -> u64 {
        let (first, start) = (run.contribution.seq.0, run.contribution.dst.map_or(0, |dst| dst.offset_bytes));
        let last = self.landing(first + u64::from(run.contribution.count) - 1);
        // Behind the last one's first byte, by which it is announced.
        last.map_or(start, |last| last + 1)
    }

    /// Return the chunks that are submitted and have not all landed.
    pub(in crate::transport::memory) fn open_seqs(&self) -> Range<u64> {
        self.have..self.next()
    }
}
