//! Applies the device's answers to the chunks that they name.

use super::{StageOut, State, ZeroCopyEndpoint};
use crate::transport::memory::ProtocolViolation;
use crate::transport::packets::{EndpointError, Slowest};
use std::ops::Range;
use sumac_hal::ids::ChunkNo;
use sumac_hal::mmio::{COMPLETION_WORDS, CompletionEntry, EntryStatus};
use sumac_hal::wire::{RankMask, unpack_op};

/// Half of the set of ranks that missed an operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartialRankMask {
    decision: u16,
    seq: ChunkNo,
    ranks: [u64; 2],
}

impl ZeroCopyEndpoint {
    pub(super) fn apply(
        &mut self,
        words: &[u64; COMPLETION_WORDS],
        stage_out: impl FnMut(&StageOut),
    ) -> Result<(), ProtocolViolation> {
        match CompletionEntry::parse(words)? {
            CompletionEntry::Operations { first, other } => {
                // Descriptors that this version cannot read name nothing; the answer that follows is then a violation.
                self.named = unpack_op(first).zip(unpack_op(other));
                Ok(())
            }
            CompletionEntry::Missing { decision, second, seq, ranks } => {
                let half = PartialRankMask { decision, seq, ranks };
                self.apply_missing(half, second).ok_or(ProtocolViolation::InvalidDecision { decision, first: seq })
            }
            CompletionEntry::Answer { status, group, epoch, seq, count, stable, slowest, .. } => {
                let landed = matches!(status, EntryStatus::Result | EntryStatus::Done);
                // A device refuses with its own epoch, or none, if it does not know ours.
                if group != self.config.group || landed && epoch != self.config.epoch {
                    return Err(ProtocolViolation::WrongGroup);
                }
                let unasked = ProtocolViolation::Unsolicited { first: seq, count };
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
                    self.land(from as usize..end as usize, status, stage_out)?;
                    self.stable = self.stable.max(stable);
                } else {
                    self.refuse(from as usize..end as usize, status)?;
                }
                self.settle();
                Ok(())
            }
            _ => Err(ProtocolViolation::UnexpectedEntry { queue: 1 }),
        }
    }

    /// Process half of a rank set; `None` if it does not follow the protocol.
    fn apply_missing(&mut self, half: PartialRankMask, second: bool) -> Option<()> {
        if !second {
            return self.half.replace(half).is_none().then_some(());
        }
        let first = self.half.take().filter(|first| (first.decision, first.seq) == (half.decision, half.seq))?;
        let ranks = RankMask::from_halves([first.ranks, half.ranks]);
        match half.decision.checked_sub(self.ops.exclusions.count()) {
            _ if half.decision == 0 => self.missing = ranks,
            // An empty set would decide nothing, and there could be any number of those.
            Some(1) if self.excluded_ranks().union(&ranks) != self.excluded_ranks() => {
                self.ops.exclusions.push(half.seq.0, &ranks)
            }
            _ => return None,
        }
        if half.decision > 0 && ranks.contains(self.config.rank) {
            // Chunks below may still land.
            self.end_at(half.seq.0, EndpointError::Excluded);
            self.settle();
        }
        Some(())
    }

    /// Mark chunks as landed: their results are at their destinations.
    fn land(
        &mut self,
        range: Range<usize>,
        status: EntryStatus,
        mut stage_out: impl FnMut(&StageOut),
    ) -> Result<(), ProtocolViolation> {
        for index in range {
            let chunk = &mut self.chunks[index];
            let seq = self.have + index as u64;
            if status == EntryStatus::Done && (chunk.dst.is_some() || chunk.stage_out.is_some()) {
                return Err(ProtocolViolation::NoResult { chunk: ChunkNo(seq) });
            }
            chunk.state = State::Landed;
            if let Some(result) = &chunk.stage_out {
                stage_out(result);
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

    /// Mark chunks as refused: they will have no result.
    fn refuse(&mut self, range: Range<usize>, status: EntryStatus) -> Result<(), ProtocolViolation> {
        let seq = self.have + range.start as u64;
        let chunk = ChunkNo(seq);
        for index in range {
            self.chunks[index].state = State::Refused;
        }
        let error = match (status, self.named) {
            (EntryStatus::Mismatch, Some((first, other))) => EndpointError::Mismatch { first, other },
            (EntryStatus::Unsupported, Some((first, _))) => EndpointError::Unsupported(first),
            (EntryStatus::Mismatch | EntryStatus::Unsupported, None) => {
                return Err(ProtocolViolation::MissingDetails { status, chunk });
            }
            (EntryStatus::PathLost, _) => EndpointError::PathLost,
            (EntryStatus::Stragglers, _) if self.missing.is_empty() => {
                return Err(ProtocolViolation::MissingDetails { status, chunk });
            }
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

    /// Fail with the pending error once every chunk below has landed.
    fn settle(&mut self) {
        if let Some((at, error)) = self.ending
            && self.have >= at
        {
            self.fail(error);
        }
    }
}
