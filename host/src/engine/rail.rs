//! A rank's rail: the ranks with the same place on their servers, as a job of their own ([`super::hybrid`]).
//!
//! Ranks join it after their communicator, and agree on what they select by: each property is the worst that any rail's
//! tree has. So it is the same on all ranks, and if a rail has no tree, no rank takes `hybrid`.
//!
//! Invariants:
//! - there are rails on all ranks, if every rank has joined one with a tree, or on none, and then each has a reason;
//! - a rail's ranks are numbered by their servers.

use super::config::{JoinConfig, JoinError};
use super::core::Core;
use super::error::{Error, OutputState};
use super::join::{PartOf, join_as};
use super::leave::Departure;
use super::notices::Notices;
use super::options::{CallOptions, Progress, Recoveries, Straggler};
use super::shared::SharedCore;
use super::shares::error_of_whole;
use crate::controller::TREES_MAX;
use crate::controller::proto::{RailOf, rail_name};
use crate::exec::Buffers;
use crate::schedule::{Place, Schedule, Span, hybrid};
use crate::select::{Algo, LinkFacts, PathTimes, TreeFacts};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// How long a rank waits for the others of its rail: they are joining it, too.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a rank waits for the others when it leaves a rail that not all ranks could join.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// Why there are no rails unless the configuration asks for them.
pub(crate) const NOT_ASKED: &str =
    "the ranks have not joined rails; set SUMAC_HYBRID=1 alike on all of them, or join with the algorithm hybrid";

/// A rank's rail.
#[derive(Debug)]
pub(crate) struct Rail {
    core: SharedCore,
    /// The number of ranks on each server.
    each: u32,
    /// The schedules inside servers of the last operation, and its number of elements.
    phases: Mutex<Option<(usize, Arc<Phases>)>>,
}

/// The reduce-scatter and the all-gather inside servers.
type Phases = [Schedule; 2];

impl Rail {
    /// Join the rails of a communicator, if its configuration asks for them.
    pub(crate) fn join(main: &SharedCore) -> Result<(), JoinError> {
        let ended = |error: Error| JoinError::Membership(error.to_string());
        let mut core = main.lock().map_err(ended)?;
        let config = core.config().clone();
        if !config.joins_rails() {
            return Ok(());
        }
        let (shape, place) = (core.selection_context().shape, core.place());
        let joined = match hybrid::servers(shape, place.ranks()) {
            Some([_, each]) if each > TREES_MAX.into() => Err(format!("{each} rails, of at most {TREES_MAX}")),
            Some(servers) => {
                let joined = join_rail(&config, place, servers);
                agree(&mut core, joined).map_err(ended)?
            }
            None => Err(format!("{} ranks of shape {shape} are not on servers of several", place.ranks())),
        };
        let (job, rank) = (&config.job, config.rank);
        match &joined {
            Ok(_) => crate::log::info!(job, rank, "all rails have trees"),
            Err(why) => crate::log::warn!(job, rank, why, "no rails: no operation takes hybrid"),
        }
        core.set_rail(joined);
        Ok(())
    }

    /// Lock the rail's core.
    pub(super) fn lock(&self) -> Result<MutexGuard<'_, Core>, Error> {
        self.core.lock()
    }

    /// Return the notices of the rail.
    pub(crate) fn notices(&self) -> &Arc<Notices> {
        self.core.notices()
    }

    /// Return the block of this rank.
    pub(super) fn block(&self, place: Place, count: usize) -> Span {
        hybrid::block_of(place, count, self.each)
    }

    /// Return the schedules inside servers.
    pub(super) fn phases(&self, place: Place, count: usize) -> Arc<Phases> {
        let mut kept = self.phases.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, phases)) = kept.as_ref().filter(|(of, _)| *of == count) {
            return Arc::clone(phases);
        }
        let make = [hybrid::reduce_scatter_inside, hybrid::all_gather_inside];
        let phases = Arc::new(make.map(|make| make(place, count, self.each)));
        *kept = Some((count, Arc::clone(&phases)));
        phases
    }

    /// The communicator's operation has failed: the rail's, which runs, need not wait.
    pub(super) fn interrupt(&self, error: &Error) {
        match error.abort_reason() {
            Some(reason) => self.notices().job_aborted(reason),
            None => self.notices().cancel(),
        }
    }

    /// End the rail with the error that ends the communicator.
    pub(super) fn end(&self, error: &Error) {
        self.interrupt(error);
        if let Ok(mut core) = self.core.lock() {
            core.note_end(error);
        }
    }

    /// Leave the rail; returns how.
    pub(super) fn leave(&self, limit: Duration) -> Departure {
        self.core.lock().map_or_else(Departure::Failed, |mut core| core.leave(limit))
    }

    /// Add the recoveries of the rail.
    pub(super) fn recoveries(&self, own: Recoveries) -> Recoveries {
        let of = self.core.lock().map(|core| core.recoveries()).unwrap_or_default();
        Recoveries { count: own.count + of.count, time: own.time + of.time, bytes: own.bytes + of.bytes }
    }

    /// Return the error of a block as one of the whole operation. Which call a lost rank fails, the communicator's
    /// ranks agree on: here is only a rank of theirs.
    pub(super) fn error_of_whole(&self, error: Error, descs: (&OpDesc, &OpDesc), place: Place) -> Error {
        let whole = |rank: Rank| Rank(rank.0 * self.each + place.rank().0 % self.each);
        match error.ending() {
            Error::Ended(error) => self.error_of_whole(*error, descs, place),
            Error::RanksFailed { ranks, .. } if !ranks.is_empty() => Error::RankLost { rank: whole(ranks[0]) },
            Error::RankLost { rank } => Error::RankLost { rank: whole(rank) },
            // It is out of reach for the communicator, too.
            Error::Partitioned { .. } => {
                let server = place.rank().0 / self.each;
                Error::RankLost { rank: whole(Rank(u32::from(server == 0))) }
            }
            error => error_of_whole(error, descs, |call| call).with_output(OutputState::Unspecified),
        }
    }
}

/// Join this rank's rail. Fails with the reason if there is no tree for it.
fn join_rail(config: &JoinConfig, place: Place, [servers, each]: [u32; 2]) -> Result<(Rail, TreeFacts), String> {
    let (index, server) = (place.rank().0 % each, place.rank().0 / each);
    let mut config = config.clone();
    let of = RailOf { job: std::mem::take(&mut config.job), index };
    config.job = rail_name(&of.job, index);
    config.become_rank(server, servers);
    (config.trees, config.hybrid, config.algo) = (1, false, Algo::Auto);
    config.join_timeout = config.join_timeout.min(JOIN_TIMEOUT);
    (config.embedded_controller, config.hierarchical) = (false, false);
    // Whoever drives the communicator drives its rail.
    config.progress = Some(Progress::Caller);
    (config.wait_for_tree, config.straggler) = (Duration::ZERO, Straggler::Wait);
    let none = |why: String| format!("rail {index}: {why}");
    let (mut core, _) = join_as(config, Some(PartOf::Rail(of))).map_err(|error| none(error.to_string()))?;
    match core.selection_context().tree {
        Ok(facts) => {
            let core = SharedCore::new(core).map_err(|error| none(error.to_string()))?;
            Ok((Rail { core, each, phases: Mutex::default() }, facts))
        }
        Err(why) => {
            core.leave(LEAVE_TIMEOUT);
            Err(none(why))
        }
    }
}

/// Agree with all ranks on whether every rail has a tree, and on what is selected by.
fn agree(
    main: &mut Core,
    joined: Result<(Rail, TreeFacts), String>,
) -> Result<Result<(Arc<Rail>, TreeFacts), String>, Error> {
    let (rail, own) = match joined {
        Ok((rail, facts)) => (Ok(rail), Worst::of(&facts)),
        Err(why) => (Err(why), Worst([0; WORST_LEN])),
    };
    let mut worst = own.0;
    let options = CallOptions { algo: Some(Algo::Auto), straggler: Some(Straggler::Wait), ..CallOptions::default() };
    let mut run = |op: ReduceOp, values: &mut [u64]| {
        let desc = OpDesc::all_reduce(Dtype::U64, op, values.len() as u64);
        main.run(desc, &mut Buffers::InPlace(bytemuck::cast_slice_mut(values)), &options)
    };
    let (masks, least) = worst.split_at_mut(MASKS);
    run(ReduceOp::Band, masks)?;
    run(ReduceOp::Min, least)?;
    let agreed = Worst(worst).facts();
    Ok(match (rail, agreed) {
        (Ok(rail), Some(facts)) => Ok((Arc::new(rail), facts)),
        (Ok(rail), None) => {
            rail.leave(LEAVE_TIMEOUT);
            Err("another rail has no tree; the log of its ranks says why".into())
        }
        (Err(why), _) => Err(why),
    })
}

/// How many of the numbers are bit masks, which come first.
const MASKS: usize = 3;

const WORST_LEN: usize = MASKS + 11;

/// Properties of trees as numbers: of masks the bits that all have, of the others the least is the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Worst([u64; WORST_LEN]);

impl Worst {
    fn of(facts: &TreeFacts) -> Self {
        let most = |value: u64| u64::MAX - value;
        let links = facts.links.unwrap_or_default();
        Self([
            facts.dtypes.into(),
            facts.ops.into(),
            facts.collectives.into(),
            1,
            most(facts.levels.into()),
            most(facts.max_children.into()),
            facts.chunk_len_bytes.into(),
            facts.zero_copy_ranks.into(),
            facts.rdma_ranks.into(),
            facts.over_verbs.into(),
            most(facts.shards.into()),
            facts.links.is_some().into(),
            most(links.tree_byte_ps),
            most(links.others_byte_ps),
        ])
    }

    /// The facts; `None` if a rail has no tree.
    fn facts(self) -> Option<TreeFacts> {
        let Self(
            [
                dtypes,
                ops,
                collectives,
                has_tree,
                levels,
                children,
                chunk,
                zero_copy,
                rdma,
                verbs,
                shards,
                linked,
                rest @ ..,
            ],
        ) = self;
        let small = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let most = |value: u64| u64::MAX - value;
        let [tree_byte_ps, others_byte_ps] = rest.map(most);
        // Rails are priced by their trees.
        let links = LinkFacts { tree_byte_ps, schedule_byte_ps: PathTimes::default(), others_byte_ps };
        (has_tree == 1).then_some(TreeFacts {
            levels: small(most(levels)),
            max_children: small(most(children)),
            chunk_len_bytes: small(chunk),
            dtypes: small(dtypes),
            ops: small(ops),
            collectives: small(collectives),
            zero_copy_ranks: small(zero_copy),
            rdma_ranks: small(rdma),
            over_verbs: verbs == 1,
            shards: u16::try_from(most(shards)).unwrap_or(u16::MAX),
            links: (linked == 1).then_some(links),
        })
    }
}
