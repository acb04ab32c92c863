//! Execution of a recovery plan: its pieces run one after the other, each as a host collective between the survivors,
//! over connections of the attempt only.

use super::connections::Connections;
use super::core::Core;
use super::data_path::Deadline;
use super::error::Error;
use super::in_flight::InFlight;
use super::membership::Inbox;
use super::notices::Notices;
use super::tree::Tree;
use crate::exec::{Buffers, ExecError, Interrupt, JobSecret, Mesh};
use crate::recovery::{self, Attempt, Ballot, Dead, Landed, Piece, Source};
use crate::schedule::Place;
use crate::select::{Algo, explain};
use crate::transport::packets::OpId;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc};

/// How often the execution of a plan checks whether it is still wanted.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum number of bytes moved or computed at a time, which a rank holds in memory twice.
const BATCH_BYTES: usize = 8 << 20;

/// This rank's pending operations in the tree: what it can supply of them, and where results go.
pub(super) struct PendingOps<'t, 'c, 'b> {
    pub(super) tree: Option<&'t Tree>,
    pub(super) buffers: &'t mut InFlight<'c, 'b>,
    pub(super) landed: &'t mut Landed,
    /// The call numbers of operations in the tree.
    pub(super) calls: BTreeMap<OpId, u64>,
    /// The first incomplete call that is not there.
    pub(super) open: u64,
    /// The number of calls that have begun.
    pub(super) begun: u64,
}

/// Connections between the surviving ranks for one attempt. They stay open until all ranks have executed the plan: a
/// socket that closes with unread bytes resets its connection, and a reset discards what a slower peer has yet to read.
pub(super) struct Survivors {
    connections: Connections,
    /// The surviving ranks, in the order of their ranks in the mesh.
    live: Vec<Rank>,
}

impl Core {
    /// Execute the pieces of a plan: move and compute what is missing. Returns the connections, if it needed any.
    pub(super) fn run_pieces(
        &mut self,
        pending: &mut PendingOps<'_, '_, '_>,
        (ballot, attempt, listener): (Ballot, &Attempt, Option<TcpListener>),
        (dead, inbox): (&Dead, &Inbox),
        deadline: Deadline,
    ) -> Result<Option<Survivors>, Error> {
        if attempt.pieces.is_empty() {
            return Ok(None);
        }
        let listener = listener.ok_or_else(|| Error::Argument("a recovery attempt has no listener".into()))?;
        let notices = Arc::clone(self.notices());
        let mut interrupt = PlanInterrupt::new(&notices, inbox, dead, Rank(self.data.config.rank));
        let mut survivors = self.connect_survivors(ballot, &attempt.live, listener)?;
        let ran = attempt
            .pieces
            .iter()
            .try_for_each(|piece| self.run_piece(pending, piece, &mut survivors, deadline, &mut interrupt));
        self.data.host.recovery_bytes += survivors.connections.mesh.sent_bytes();
        ran.map(|()| Some(survivors))
    }

    /// Connect the surviving ranks for an attempt.
    fn connect_survivors(
        &self,
        ballot: Ballot,
        live: &BTreeMap<Rank, SocketAddr>,
        listener: TcpListener,
    ) -> Result<Survivors, Error> {
        let (live, addresses): (Vec<Rank>, _) = live.iter().map(|(&rank, &address)| (rank, address)).unzip();
        let own = live.iter().position(|&rank| rank == Rank(self.data.config.rank)).unwrap_or(0);
        let broken = |what: String| Error::Argument(format!("cannot connect ranks for recovery: {what}"));
        let place = Place::new(Rank(own as u32), live.len() as u32).map_err(|error| broken(error.to_string()))?;
        let memory = self.data.config.shared_memory();
        let mesh = Mesh::new(place, self.secret_of(ballot), listener, addresses, memory)
            .map_err(|error| broken(error.to_string()))?
            .with_wait_policy(self.data.config.wait_policy);
        Ok(Survivors { connections: Connections::new(mesh), live })
    }

    /// Deliver the results of a piece to the ranks that need them.
    fn run_piece(
        &self,
        pending: &mut PendingOps<'_, '_, '_>,
        piece: &Piece,
        survivors: &mut Survivors,
        deadline: Deadline,
        interrupt: &mut PlanInterrupt<'_>,
    ) -> Result<(), Error> {
        let Some(tree) = pending.tree.map(Tree::recovery_source) else {
            return Err(Error::Argument(format!("cannot recover {}: this rank has no tree", piece.op.desc)));
        };
        let len_of = recovery::result_lens(tree, &piece.op);
        let mut bytes = Vec::new();
        let mut first = piece.first;
        while first < piece.end {
            let (mut end, mut len) = (first, 0);
            while end < piece.end && (end == first || len + len_of(end) <= BATCH_BYTES) {
                len += len_of(end);
                end += 1;
            }
            let source = pending.landed.over(tree);
            bytes.clear();
            let desc = match piece.source {
                Source::Held(holder) => {
                    if holder.0 == self.data.config.rank {
                        (first..end).for_each(|seq| recovery::append_result(&source, seq, pending.buffers, &mut bytes));
                    } else {
                        bytes.resize(len, 0);
                    }
                    let root = survivors.live.iter().position(|&rank| rank == holder).unwrap_or(0);
                    OpDesc::broadcast(Dtype::U8, Rank(root as u32), len as u64)
                }
                Source::Recompute => {
                    (first..end)
                        .for_each(|seq| recovery::append_contribution(&source, seq, pending.buffers, &mut bytes));
                    let count = len / piece.op.desc.element_bytes().max(1);
                    OpDesc { collective: Collective::AllReduce, root: Rank(0), count: count as u64, ..piece.op.desc }
                }
            };
            if bytes.len() != len {
                let what = format!("cannot recover {}: got {} bytes, expected {len}", piece.op.desc, bytes.len());
                return Err(Error::Argument(what));
            }
            self.run_among_live(&desc, survivors, &mut bytes, deadline, interrupt)?;
            let mut at = 0;
            for seq in first..end {
                recovery::land(&source, seq, &bytes[at..at + len_of(seq)], pending.buffers);
                at += len_of(seq);
            }
            pending.landed.note(first..end);
            first = end;
        }
        Ok(())
    }

    /// Run an operation between the surviving ranks by the cheapest schedule; if all are alive, by one that evaluates
    /// the declared expression.
    fn run_among_live(
        &self,
        desc: &OpDesc,
        survivors: &mut Survivors,
        bytes: &mut [u8],
        deadline: Deadline,
        interrupt: &mut PlanInterrupt<'_>,
    ) -> Result<(), Error> {
        let place = survivors.connections.mesh.place();
        if place.ranks() == 1 {
            return Ok(());
        }
        let selection = self.data.selection.context().for_ranks(place.ranks());
        let explanation = explain(&selection, desc, Algo::Auto);
        let Some(path) = explanation.chosen else {
            let why = explanation.refusal().cloned();
            return Err(why.map_or_else(|| Error::Argument(format!("no schedule for {desc}")), Error::NotPossible));
        };
        let buffers = Buffers::InPlace(bytes);
        let schedule = self.data.schedule_at(place, desc, path, &buffers)?;
        let table_version = self.data.selection.context().table.version;
        Ok(survivors.connections.run((desc, path), table_version, &schedule, buffers, (deadline.0, interrupt))?)
    }

    /// Return the secret of an attempt's connections.
    fn secret_of(&self, ballot: Ballot) -> JobSecret {
        let numbers = [self.data.watch.epoch(), ballot.attempt.into(), ballot.coordinator.0.into()];
        self.members.secret.derive(b"sumac recovery\0\0", &numbers)
    }
}

/// Interrupts the execution of a plan that another attempt replaces.
struct PlanInterrupt<'c> {
    notices: &'c Notices,
    inbox: &'c Inbox,
    dead: &'c Dead,
    rank: Rank,
    checked: Instant,
}

impl<'c> PlanInterrupt<'c> {
    fn new(notices: &'c Notices, inbox: &'c Inbox, dead: &'c Dead, rank: Rank) -> Self {
        Self { notices, inbox, dead, rank, checked: Instant::now() }
    }
}

impl Interrupt for PlanInterrupt<'_> {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        self.checked = Instant::now();
        let has_died = self.notices.lost_ranks().iter().any(|rank| !self.dead.contains_key(rank));
        if has_died
            || self.notices.is_cancelled()
            || self.inbox.interrupts_plan(self.dead, self.notices.has_controller())
        {
            let reason = "replaced by another recovery attempt".into();
            return Err(ExecError::Interrupted { rank: self.rank, reason });
        }
        Ok(ControlFlow::Continue(()))
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.checked + CHECK_INTERVAL)
    }
}
