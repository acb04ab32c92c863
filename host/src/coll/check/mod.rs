//! The schedule checker: runs all ranks' schedules on symbols and proves what a test on numbers only samples.
//!
//! A value is the *expression* that made it, so a contribution that is missing, doubled or in another place
//! can't cancel out. [`check`] proves, for one collective over one communicator:
//! - within a step nothing is overwritten that the step reads, or written twice;
//! - the n-th send from a to b is the n-th receive of b from a: same elements, same action;
//! - no cycle of waits, even if each send waits for its receiver (no buffering anywhere);
//! - partial values are never taken for finished ones, nor finished ones reduced further;
//! - at the end every rank that should have a block has it, finished, with every contribution exactly once.
//!
//! It needs no element type: elements that all schedules treat alike are one symbol, so its cost does not
//! depend on the count. The idea of verifying task graphs without devices is also that of HCCL's verifier.

mod error;
mod expression;
mod simulation;
#[cfg(test)]
mod tests;

pub use error::CheckError;
pub use expression::{ExprId, Expressions};

use super::{Schedule, Span};
use simulation::Simulation;
use sumac_hal::ids::Rank;

/// What a collective owes its callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Goal {
    /// Every rank ends with every rank's contribution to every element.
    AllReduce,
    /// Every rank ends knowing that every rank has entered.
    Barrier,
}

/// What a proved schedule costs, and the expressions it computes.
#[derive(Debug)]
pub struct Report {
    /// The steps of the rank that has most: the alpha term where ranks do not wait for each other's steps.
    pub steps: usize,
    /// The elements that the busiest sender sends.
    pub sent_elements_max: u64,
    /// The elements on the longest path through the collective: the beta term. A transfer starts when both
    /// ends have reached its step.
    pub path_elements: u64,
    /// The expressions of `blocks`.
    pub expressions: Expressions,
    /// For each run of elements that is treated alike, its expression (the same one on every rank).
    pub blocks: Vec<(Span, ExprId)>,
}

/// Prove that `schedules`, one for each rank in rank order, reach `goal`.
///
/// # Errors
/// [`CheckError`] names the first thing that is wrong, and where.
pub fn check(goal: Goal, schedules: &[Schedule]) -> Result<Report, CheckError> {
    well_formed(schedules)?;
    matched(schedules)?;
    let mut simulation = Simulation::new(schedules);
    simulation.run()?;
    let blocks = match goal {
        Goal::AllReduce => simulation.all_reduced()?,
        Goal::Barrier => simulation.all_heard().map(|()| Vec::new())?,
    };
    Ok(Report {
        steps: schedules.iter().map(Schedule::len).max().unwrap_or(0),
        sent_elements_max: schedules.iter().map(|schedule| schedule.sent_bytes(1, 1)).max().unwrap_or(0),
        path_elements: simulation.finish_time(),
        expressions: simulation.into_expressions(),
        blocks,
    })
}

/// Check what each schedule shows on its own.
fn well_formed(schedules: &[Schedule]) -> Result<(), CheckError> {
    let count = schedules.first().map_or(0, Schedule::count);
    for (index, schedule) in schedules.iter().enumerate() {
        let rank = schedule.place().rank();
        if rank.0 as usize != index || schedule.place().ranks() as usize != schedules.len() || schedule.count() != count
        {
            return Err(CheckError::NotOneCollective { index });
        }
        for (step, transfers) in schedule.steps().enumerate() {
            for transfer in transfers.sends.iter().chain(transfers.recvs) {
                if transfer.peer == rank || transfer.peer.0 as usize >= schedules.len() {
                    return Err(CheckError::BadPeer { rank, step, peer: transfer.peer });
                }
                if transfer.span.end() > count {
                    return Err(CheckError::OutOfBounds { rank, step, span: transfer.span, count });
                }
            }
            for (nth, recv) in transfers.recvs.iter().enumerate() {
                let others = transfers.sends.iter().chain(&transfers.recvs[..nth]);
                if let Some(other) = others.into_iter().find(|other| other.span.overlaps(recv.span)) {
                    return Err(CheckError::Overlap { rank, step, written: recv.span, other: other.span });
                }
            }
        }
    }
    Ok(())
}

/// Check that the transfers between each two ranks are the same list at both ends.
fn matched(schedules: &[Schedule]) -> Result<(), CheckError> {
    let ranks = schedules.len();
    let mut sends = vec![Vec::new(); ranks * ranks];
    let mut recvs = vec![Vec::new(); ranks * ranks];
    for (rank, schedule) in schedules.iter().enumerate() {
        for (step, transfers) in schedule.steps().enumerate() {
            for transfer in transfers.sends {
                sends[rank * ranks + transfer.peer.0 as usize].push((step, transfer));
            }
            for transfer in transfers.recvs {
                recvs[transfer.peer.0 as usize * ranks + rank].push((step, transfer));
            }
        }
    }
    for (pair, (sends, recvs)) in sends.iter().zip(&recvs).enumerate() {
        let (from, to) = (Rank((pair / ranks) as u32), Rank((pair % ranks) as u32));
        for (&(step, send), &(_, recv)) in sends.iter().zip(recvs) {
            if send.span != recv.span {
                return Err(CheckError::SpanMismatch { from, to, step, sent: send.span, received: recv.span });
            }
            if send.action != recv.action {
                return Err(CheckError::ActionMismatch { from, to, step });
            }
        }
        if let Some(&(step, _)) = sends.get(recvs.len()) {
            return Err(CheckError::UnmatchedSend { from, to, step });
        }
        if let Some(&(step, _)) = recvs.get(sends.len()) {
            return Err(CheckError::UnmatchedReceive { from, to, step });
        }
    }
    Ok(())
}
