//! What the device's answers mean for the chunks that they speak of.

use super::{Drain, ReferenceEndpoint, State};
use crate::transport::memory::Breach;
use crate::transport::packets::{EndpointError, Slowest};
use std::ops::Range;
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::{COMPLETION_WORDS, CompletionEntry, EntryStatus};
use sumac_hal::wire::{RankMask, unpack_op};

/// Half of a set of ranks that did not come to an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Half {
    decision: u16,
    seq: ChunkNo,
    ranks: [u64; 2],
}

impl ReferenceEndpoint {
    pub(super) fn take(&mut self, words: &[u64; COMPLETION_WORDS], drain: impl FnMut(&Drain)) -> Result<(), Breach> {
        match CompletionEntry::parse(words)? {
            CompletionEntry::Operations { first, other } => {
                // What this version can't read names nothing: the answer that follows will say so.
                self.named = unpack_op(first).zip(unpack_op(other));
                Ok(())
            }
            CompletionEntry::Missing { decision, second, seq, ranks } => {
                let half = Half { decision, seq, ranks };
                self.take_missing(half, second).ok_or(Breach::Undecided { decision, first: seq })
            }
            CompletionEntry::Answer { status, group, epoch, seq, count, stable, slowest, .. } => {
                let landed = matches!(status, EntryStatus::Result | EntryStatus::Done);
                // A device that knows another epoch, or none, says so with that.
                if group != self.config.group || landed && epoch != self.config.epoch {
                    return Err(Breach::Stranger);
                }
                let unasked = Breach::Unasked { first: seq, count };
                let from = seq.0.checked_sub(self.have).ok_or(unasked)?;
                let end = from.checked_add(u64::from(count)).filter(|&end| end > from).ok_or(unasked)?;
                let open = end <= self.chunks.len() as u64
                    && (from..end).all(|index| self.chunks[index as usize].state == State::Submitted);
                if !open {
                    return Err(unasked);
                }
                self.answered += u64::from(count);
                if landed {
                    self.ops.note_slowest(seq.0, slowest.map(|(rank, late_us)| Slowest { rank, late_us }));
                    self.land(from as usize..end as usize, status, drain)?;
                    self.stable = self.stable.max(stable);
                } else {
                    self.refuse(from as usize..end as usize, status)?;
                }
                self.settle();
                Ok(())
            }
            _ => Err(Breach::Misplaced { queue: 1 }),
        }
    }

    /// Take in half of a set of ranks that did not come; `None` if it makes no sense.
    fn take_missing(&mut self, half: Half, second: bool) -> Option<()> {
        if !second {
            return self.half.replace(half).is_none().then_some(());
        }
        let first = self.half.take().filter(|first| (first.decision, first.seq) == (half.decision, half.seq))?;
        let ranks = RankMask::from_halves([first.ranks, half.ranks]);
        match half.decision.checked_sub(self.ops.cuts.number()) {
            _ if half.decision == 0 => self.missing = ranks,
            // A set without ranks would be a decision for nothing, and there might be any number of those.
            Some(1) if self.gone().union(&ranks) != self.gone() => self.ops.cuts.push(half.seq.0, &ranks),
            _ => return None,
        }
        if half.decision > 0 && ranks.contains(self.config.rank) {
            // What is below may land still.
            self.end_at(half.seq.0, EndpointError::Excluded);
            self.settle();
        }
        Some(())
    }

    /// The results of these chunks are at their destinations.
    fn land(&mut self, range: Range<usize>, status: EntryStatus, mut drain: impl FnMut(&Drain)) -> Result<(), Breach> {
        for index in range {
            let chunk = &mut self.chunks[index];
            let seq = self.have + index as u64;
            if status == EntryStatus::Done && (chunk.dst.is_some() || chunk.drain.is_some()) {
                return Err(Breach::NoResult { chunk: ChunkNo(seq) });
            }
            chunk.state = State::Landed;
            if let Some(result) = &chunk.drain {
                drain(result);
            }
            self.ops.landed(seq);
        }
        while let Some(oldest) = self.chunks.pop_front_if(|chunk| chunk.state == State::Landed) {
            self.have += 1;
            if let Some(end) = oldest.bounce_end {
                self.bounce.free(end);
            }
        }
        if self.chunks.is_empty() {
            self.bounce.reset();
        }
        Ok(())
    }

    /// These chunks will have no result.
    fn refuse(&mut self, range: Range<usize>, status: EntryStatus) -> Result<(), Breach> {
        let seq = self.have + range.start as u64;
        let chunk = ChunkNo(seq);
        for index in range {
            self.chunks[index].state = State::Refused;
        }
        let error = match (status, self.named) {
            (EntryStatus::Mismatch, Some((first, other))) => EndpointError::Mismatch { first, other },
            (EntryStatus::Unsupported, Some((first, _))) => EndpointError::Unsupported(first),
            (EntryStatus::Mismatch | EntryStatus::Unsupported, None) => return Err(Breach::Unnamed { status, chunk }),
            (EntryStatus::PathLost, _) => EndpointError::PathLost,
            (EntryStatus::Stragglers, _) if self.missing.is_empty() => return Err(Breach::Unnamed { status, chunk }),
            (EntryStatus::Stragglers, _) => EndpointError::Stragglers { missing: self.missing },
            (EntryStatus::Excluded, _) => {
                self.excluded_at = Some(seq);
                self.fail(EndpointError::Excluded);
                return Ok(());
            }
            (EntryStatus::Fenced | EntryStatus::UnknownGroup | EntryStatus::StaleEpoch, _) => {
                self.fail(EndpointError::GroupLost);
                return Ok(());
            }
            (status, _) => {
                self.fail(EndpointError::Device { status, chunk });
                return Ok(());
            }
        };
        self.end_at(seq, error);
        Ok(())
    }

    fn end_at(&mut self, seq: u64, error: EndpointError) {
        if self.ending.is_none_or(|(earlier, _)| seq < earlier) {
            self.ending = Some((seq, error));
        }
    }

    /// Fail if the tree ends here: every chunk below has landed.
    fn settle(&mut self) {
        if let Some((at, error)) = self.ending
            && self.have >= at
        {
            self.fail(error);
        }
    }
}
