//! A harness for recovery, for simulators that carry messages themselves: the production code, one step at a time and
//! without connections.
//!
//! [`Change`] is a rank's part in a view change, as a communicator drives it: it agrees, plans and decides. The caller
//! decides how messages and chunks travel, and what happens meanwhile.

mod calls;
mod change;
mod source;

pub use super::call_paths::CallPaths;
pub use super::migration::CallStart;
use super::plan::{Inventories, Piece, plan};
pub use super::view::Flaw;
use super::{ChunkInventory, RecoverySource, Source, append_contribution, append_result, inventory, land, result_lens};
use crate::transport::packets::{Buffers, Endpoint, OpId};
pub use calls::Calls;
pub use change::{Action, Attempt, Change, End, Landed, Outcome, Plan, Promise, Promises, Settlement, ViewMessage};
pub use source::{ReadRedo, RedoPlace, RedoSlots, TreeSource};
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;

/// What a rank has of the chunks that are not complete on all ranks, as it reports it to the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankReport(ChunkInventory);

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

/// The plan of recovery from a lost tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Operations that end here or below are complete afterwards; later ones start again.
    pub cut: u64,
    /// The chunks to move or recompute, in order.
    pub chunks: Vec<Chunk>,
}

impl RankReport {
    /// Describe a rank whose endpoint is [frozen](Endpoint::freeze).
    pub fn of(endpoint: &Endpoint) -> Self {
        Self(inventory(endpoint))
    }
}

impl Decision {
    /// Compute the plan from every rank's report, in order of rank. `endpoint` is any of theirs.
    ///
    /// # Errors
    /// Why recovery is not possible, as text.
    pub fn of(reports: &[RankReport], endpoint: &Endpoint) -> Result<Self, String> {
        let inventories: Inventories = (0..).map(Rank).zip(reports.iter().map(|report| report.0.clone())).collect();
        let ranks = inventories.len() as u32;
        let lens = |desc: &OpDesc| endpoint.chunks(desc);
        if let Some((rank, _)) = inventories.iter().find(|(_, inventory)| !inventory.is_valid(ranks, lens)) {
            return Err(format!("the chunk inventory of {rank} is invalid"));
        }
        let plan = plan(&inventories, ranks).map_err(|why| why.to_string())?;
        Ok(Self { cut: plan.cut, chunks: chunks_of(&plan.pieces, endpoint) })
    }

    /// Return the first of a rank's operations that is not complete afterwards.
    pub fn completed_below(&self, endpoint: &Endpoint) -> OpId {
        endpoint.first_behind(self.cut)
    }
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
    /// Return what a rank contributes: the result if it is the holder, otherwise its contribution.
    pub fn give(&self, endpoint: &Endpoint, rank: Rank, buffers: &mut dyn Buffers) -> Vec<u8> {
        self.give_of(endpoint, rank, buffers)
    }

    fn give_of(&self, source: &dyn RecoverySource, rank: Rank, buffers: &mut dyn Buffers) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.origin {
            Origin::Held(holder) if holder == rank => append_result(source, self.seq, buffers, &mut bytes),
            Origin::Held(_) => {}
            Origin::Recompute => append_contribution(source, self.seq, buffers, &mut bytes),
        }
        bytes
    }

    /// Write the result, if the rank waits for it.
    pub fn land(&self, endpoint: &Endpoint, result: &[u8], buffers: &mut dyn Buffers) {
        land(endpoint, self.seq, result, buffers);
    }
}
