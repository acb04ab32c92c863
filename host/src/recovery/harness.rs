//! A harness for recovery, for simulators that carry messages themselves: the production code, one step at a time and
//! without connections.
//!
//! [`Change`] is a rank's part in a view change, as a communicator drives it: it agrees, plans and decides. The caller
//! decides how messages and chunks travel, and what happens meanwhile.

mod calls;
mod change;
mod source;

pub use super::migration::CallStart;
pub use super::migration_vote::{MigrationVote, Verdict};
use super::plan::Piece;
pub use super::view::Flaw;
use super::{RecoverySource, Source, append_contribution, append_result, land, result_lens};
use crate::transport::packets::{Buffers, Endpoint};
pub use calls::{CallPaths, Calls};
pub use change::{Action, Attempt, Change, End, Landed, Outcome, Plan, RankReport, ViewMessage};
pub use source::{ReadRedo, RedoPlace, RedoSlots, TreeSource};
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;

/// Where the result of a chunk comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// This rank has it.
    Held(Rank),
    /// No rank has it, and all contributions are intact.
    Recompute,
}

/// A chunk whose result some rank waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Its sequence number.
    pub seq: u64,
    /// Its operation.
    pub desc: OpDesc,
    /// The length of its whole result in bytes.
    pub len_bytes: usize,
    /// Where the result comes from.
    pub origin: Origin,
}

/// Return the chunks of a plan's pieces.
fn chunks_of(pieces: &[Piece], source: &dyn RecoverySource) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for piece in pieces {
        let len_of = result_lens(source, &piece.op);
        let origin = match piece.source {
            Source::Held(rank) => Origin::Held(rank),
            Source::Recompute => Origin::Recompute,
        };
        let chunk = |seq| Chunk { seq, desc: piece.op.desc, len_bytes: len_of(seq), origin };
        chunks.extend((piece.first..piece.end).map(chunk));
    }
    chunks
}

impl Chunk {
    /// Return what a rank contributes, including chunks that recovery has written: the result if it is the holder,
    /// otherwise its contribution.
    pub fn give<'r>(
        &self,
        source: impl Into<TreeSource<'r>>,
        landed: &Landed,
        rank: Rank,
        buffers: &mut dyn Buffers,
    ) -> Vec<u8> {
        let (source, mut bytes) = (source.into(), Vec::new());
        let source = landed.0.over(&source);
        match self.origin {
            Origin::Held(holder) if holder == rank => append_result(&source, self.seq, buffers, &mut bytes),
            Origin::Held(_) => {}
            Origin::Recompute => append_contribution(&source, self.seq, buffers, &mut bytes),
        }
        bytes
    }

    /// Write the result, if the rank still waits for it, and record that.
    pub fn land_once<'r>(
        &self,
        source: impl Into<TreeSource<'r>>,
        landed: &mut Landed,
        result: &[u8],
        buffers: &mut dyn Buffers,
    ) {
        land(&landed.0.over(&source.into()), self.seq, result, buffers);
        landed.note(self.seq);
    }

    /// Write the result, if the rank waits for it, without recording that: later attempts do not know of it.
    pub fn land(&self, endpoint: &Endpoint, result: &[u8], buffers: &mut dyn Buffers) {
        land(endpoint, self.seq, result, buffers);
    }
}
