//! Joining rails ([`super::rail`]).
//!
//! Ranks join their rail after their communicator, and agree on what they select by: each property is the worst that
//! any rail's tree has. So it is the same on all ranks, and if a rail has no tree, no rank takes `hybrid`.
//!
//! For `rab` the leaders of servers join the first rail alone, and the other ranks none.
//!
//! Invariant: there are rails on all ranks that are to join one, if each has joined one with a tree, or on none, and
//! then all ranks have a reason.

use super::config::{JoinConfig, JoinError};
use super::core::Core;
use super::departure::Departure;
use super::error::Error;
use super::join::{PartOf, join_as};
use super::options::{CallOptions, Outcome, Progress, Recoveries, Straggler};
use super::rail::{Rail, RailCore};
use super::shared::SharedCore;
use crate::controller::TREES_MAX;
use crate::controller::proto::{RailJobs, RailOf, rail_name};
use crate::exec::Buffers;
use crate::schedule::{Place, hybrid, rab};
use crate::select::{Algo, LinkFacts, PathTimes, TreeFacts};
use std::sync::Arc;
use std::time::Duration;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};

/// How long a rank waits for the others of its rail: they are joining it, too.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a rank waits for the others when it leaves a rail that not all ranks could join.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

impl RailCore for SharedCore {
    fn reduce(&self, part: OpDesc, block: &mut [u8], options: &CallOptions) -> Result<Outcome, Error> {
        self.lock()?.run_share(part, &mut Buffers::InPlace(block), options)
    }

    fn start_at_once(&self, part: OpDesc, block: &[u8], options: &CallOptions) -> Option<u64> {
        self.lock().ok()?.start_at_once(part, block, options)
    }

    fn drive_briefly(&self, handle: u64, options: &CallOptions) -> bool {
        self.lock().is_ok_and(|mut core| core.drive_briefly(handle, options))
    }

    fn finish_block(&self, handle: u64, block: &mut [u8], options: &CallOptions) -> Result<Outcome, Error> {
        self.lock()?.finish_block(handle, block, options)
    }

    fn end(&self, error: &Error) {
        if let Ok(mut core) = self.lock() {
            core.note_end(error);
        }
    }

    fn leave(&self, limit: Duration) -> Departure {
        self.lock().map_or_else(Departure::Failed, |mut core| core.leave(limit))
    }

    fn recoveries(&self) -> Recoveries {
        self.lock().map(|core| core.recoveries()).unwrap_or_default()
    }
}

/// Join the rails of a communicator, if its configuration asks for them.
pub(crate) fn join_rails(main: &SharedCore) -> Result<(), JoinError> {
    let ended = |error: Error| JoinError::Membership(error.to_string());
    let mut core = main.lock().map_err(ended)?;
    let config = core.config().clone();
    let joins = config.rail_jobs();
    if joins == RailJobs::None {
        return Ok(());
    }
    let (shape, place) = (core.selection_context().shape, core.place());
    let is_all = joins == RailJobs::All;
    let joined = match hybrid::servers(shape, place.ranks()) {
        Some([_, each]) if is_all && each > TREES_MAX.into() => Err(format!("{each} rails, of at most {TREES_MAX}")),
        Some([servers, each]) => {
            let has_rail = is_all || rab::is_leader(place.rank(), each);
            let joined = has_rail.then(|| join_rail(&config, place, [servers, each])).transpose();
            agree(&mut core, joined).map_err(ended)?
        }
        None => Err(format!("{} ranks of shape {shape} are not on servers of several", place.ranks())),
    };
    let (job, rank, rails) = (&config.job, config.rank, joins);
    match &joined {
        Ok(_) => crate::log::info!(job, rank, %rails, "the rails have trees"),
        Err(why) => crate::log::warn!(job, rank, %rails, why, "no rails: no operation takes hybrid or rab"),
    }
    let (rail, facts) = match joined {
        Ok((rail, facts)) => (rail, Ok(facts)),
        Err(why) => (None, Err(why)),
    };
    core.set_rail(joins, rail, facts);
    Ok(())
}

/// Join this rank's rail. Fails with the reason if there is no tree for it.
fn join_rail(config: &JoinConfig, place: Place, [servers, each]: [u32; 2]) -> Result<(Rail, TreeFacts), String> {
    let (index, server) = (place.rank().0 % each, place.rank().0 / each);
    let mut config = config.clone();
    let of = RailOf { job: std::mem::take(&mut config.job), index };
    config.job = rail_name(&of.job, index);
    config.become_rank(server, servers);
    (config.trees, config.hybrid, config.rab, config.algo) = (1, false, false, Algo::Auto);
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
            let notices = Arc::clone(core.notices());
            Ok((Rail::new(Box::new(core), notices, each), facts))
        }
        Err(why) => {
            core.leave(LEAVE_TIMEOUT);
            Err(none(why))
        }
    }
}

/// This rank's rail, if it has one, and what operations by rails are selected by; or why there are none.
type Joined = Result<(Option<Arc<Rail>>, TreeFacts), String>;

/// Agree with all ranks on whether every rail has a tree, and on what is selected by. Those that join none agree
/// with the others.
fn agree(main: &mut Core, joined: Result<Option<(Rail, TreeFacts)>, String>) -> Result<Joined, Error> {
    let (rail, own) = match joined {
        Ok(Some((rail, facts))) => (Ok(Some(rail)), Worst::of(&facts)),
        Ok(None) => (Ok(None), Worst([u64::MAX; WORST_LEN])),
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
        (Ok(rail), Some(facts)) => Ok((rail.map(Arc::new), facts)),
        (Ok(rail), None) => {
            rail.into_iter().for_each(|rail| _ = rail.leave(LEAVE_TIMEOUT));
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
