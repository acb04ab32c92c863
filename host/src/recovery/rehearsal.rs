//! A repair step by step, without connections: for a simulator whose ranks carry messages of their own.
//!
//! What is decided here is what [`crate::comm`] decides: the same ledgers, the same plan, the same pieces. How chunks
//! travel, who waits for whom, and when all agree is the caller's; who agrees on what with whom, where ranks die, is a
//! [`Change`]'s.

mod change;
mod left;

use super::plan::{Ledgers, Plan, plan};
pub use super::view::Flaw;
use super::{Ledger, Remains, Source, give_contribution, give_result, land, ledger, result_lens};
use crate::transport::packets::{Buffers, Endpoint, OpId};
pub use change::{Attempt, Change, End, Landed, Outcome, Promise, Promises, Said, Settlement, Step};
pub use left::{Left, ReadRedo, RedoPlace, RedoSlots};
use sumac_hal::ids::Rank;
use sumac_hal::op::OpDesc;

/// What one rank has of the chunks that are not settled, as it tells the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account(Ledger);

/// Where the result of a chunk comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A rank has it.
    Held(Rank),
    /// Nobody has it, and all contributions are intact.
    Recompute,
}

/// A chunk whose result somebody waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Its number.
    pub seq: u64,
    /// The operation that it belongs to.
    pub desc: OpDesc,
    /// The length of its whole result in bytes.
    pub len_bytes: usize,
    /// Where that comes from.
    pub origin: Origin,
}

/// What is done about a lost tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Operations that end here or below are complete afterwards; those behind begin again.
    pub cut: u64,
    /// The chunks to be moved or computed, in order.
    pub chunks: Vec<Chunk>,
}

impl Account {
    /// Describe what is left at a rank whose endpoint is [frozen](Endpoint::freeze).
    pub fn of(endpoint: &Endpoint) -> Self {
        Self(ledger(endpoint))
    }
}

impl Decision {
    /// Work out what is to be done; `accounts` holds every rank's, in order of rank. `endpoint` is any of theirs.
    ///
    /// # Errors
    /// Why nothing can be done, in words.
    pub fn of(accounts: &[Account], endpoint: &Endpoint) -> Result<Self, String> {
        let ledgers: Ledgers = (0..).map(Rank).zip(accounts.iter().map(|account| account.0.clone())).collect();
        let ranks = ledgers.len() as u32;
        let lens = |desc: &OpDesc| endpoint.chunks(desc);
        if let Some((rank, _)) = ledgers.iter().find(|(_, ledger)| !ledger.is_sound(ranks, lens)) {
            return Err(format!("the ledger of {rank} makes no sense"));
        }
        let plan = plan(&ledgers, ranks).map_err(|why| why.to_string())?;
        Ok(Self { cut: plan.cut, chunks: chunks_of(&plan, endpoint) })
    }

    /// Return the first of a rank's operations that are not complete afterwards.
    pub fn completed_below(&self, endpoint: &Endpoint) -> OpId {
        endpoint.first_behind(self.cut)
    }
}

/// Return the chunks of a plan's pieces.
fn chunks_of(plan: &Plan, remains: &dyn Remains) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for piece in &plan.pieces {
        let len_of = result_lens(remains, &piece.op);
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
    /// Return what a rank gives: the result, if it is the holder, else its contribution.
    pub fn give(&self, endpoint: &Endpoint, rank: Rank, buffers: &mut dyn Buffers) -> Vec<u8> {
        self.give_of(endpoint, rank, buffers)
    }

    fn give_of(&self, remains: &dyn Remains, rank: Rank, buffers: &mut dyn Buffers) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self.origin {
            Origin::Held(holder) if holder == rank => give_result(remains, self.seq, buffers, &mut bytes),
            Origin::Held(_) => {}
            Origin::Recompute => give_contribution(remains, self.seq, buffers, &mut bytes),
        }
        bytes
    }

    /// Land the whole result, if the rank waits for it.
    pub fn land(&self, endpoint: &Endpoint, result: &[u8], buffers: &mut dyn Buffers) {
        land(endpoint, self.seq, result, buffers);
    }
}
