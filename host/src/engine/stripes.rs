//! A communicator on several trees.
//!
//! Each further tree belongs to a **stripe**: a job of the same ranks with its own group, epochs, connections and
//! recovery ([`Core`]). A large operation is divided into contiguous shares ([`super::shares`]), one a tree, which run
//! at the same time, each on a thread of its own. Everything else takes the communicator's own tree.
//!
//! ```text
//!   all-reduce of 4 MiB                        a tree dies: its stripe alone changes its view,
//!     |  0..1 MiB   own tree     device 0      and the share is recovered or started again;
//!     |  1..2 MiB   stripe 1     device 1      the other stripes do not notice
//!     |  2..3 MiB   stripe 2     device 2
//!     +- 3..4 MiB   stripe 3     device 3
//! ```
//!
//! Invariants:
//! - whether and how an operation is divided follows from the call and from what all ranks know: what the controller
//!   handed out when they joined, and which path each share of earlier operations took. So it is the same on all ranks;
//! - a stripe sees the same operations in the same order on all ranks;
//! - the stripes end with the communicator, and it ends with any of them.

use super::config::{JoinConfig, JoinError};
use super::core::Core;
use super::departure::Departure;
use super::error::{Error, OutputState};
use super::extent::Extent;
use super::join::{PartOf, join_as};
use super::notices::Notices;
use super::options::{CallOptions, Outcome, Progress, Recoveries, Straggler};
use super::shared::SharedCore;
use super::shares::{Share, ShareWeight, combine_outputs, divide, divide_buffers, error_of_whole, is_divisible};
use crate::controller::TREES_MAX;
use crate::controller::proto::{RailGrant, StripeOf, Striping, stripe_name};
use crate::deadline::after;
use crate::exec::Buffers;
use crate::select::{Algo, SelectionContext, explain};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};

/// How long a rank waits for the others in a stripe: they are joining it, too.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a rank waits for the others when it leaves a stripe that not all of them could join.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// How many divided operations a tree is left out of after its share took a host collective. The next one tries again:
/// the stripe may have been offered another tree.
const REST_CALLS: u8 = 16;

/// How many of the latest calls of a stripe are known by their numbers in the communicator. A failed call is the last
/// one or, if this rank needed nothing more of it, the one before.
const CALLS_KNOWN: usize = 8;

/// The trees that a communicator's operations are spread over.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trees {
    /// The relative rate of each tree, the communicator's own first.
    pub shares: Vec<u16>,
    /// Why there are no more trees, if more were requested.
    pub reason: Option<String>,
}

/// A further tree.
#[derive(Debug)]
struct Stripe {
    core: SharedCore,
    share: u16,
    chunk_len_bytes: u32,
}

/// A communicator's further trees.
#[derive(Debug)]
pub(crate) struct Stripes {
    further: Vec<Stripe>,
    own: ShareWeight,
    reason: Option<String>,
    /// What operations are selected by, as of joining. Later trees differ between ranks that migrate.
    context: SelectionContext,
    /// Locked while the communicator's own core is.
    state: Mutex<StripesState>,
}

/// What has happened to the trees. The same on all ranks after the same calls.
#[derive(Debug, Default)]
struct StripesState {
    /// For how many divided operations each tree is left out, its own first.
    resting: Vec<u8>,
    /// A call had a straggler limit: ranks may be excluded from the own tree, and all calls take that.
    had_limit: bool,
    /// The latest calls of each stripe: their numbers there, and in the communicator.
    calls: Vec<VecDeque<(u64, u64)>>,
    /// The last operation that was left to the cost model, and whether it is divided.
    selected: Option<(OpDesc, bool)>,
}

impl StripesState {
    /// The operation ran with these shares, which took these paths.
    fn note_paths(&mut self, shares: &[Share], outcomes: &[Outcome]) {
        self.resting.iter_mut().for_each(|calls| *calls = calls.saturating_sub(1));
        for (share, outcome) in shares.iter().zip(outcomes) {
            if outcome.path != Path::Tree {
                self.resting[share.tree] = REST_CALLS;
            }
        }
    }

    fn note_call(&mut self, stripe: usize, there: u64, here: u64) {
        let calls = &mut self.calls[stripe];
        calls.truncate(CALLS_KNOWN - 1);
        calls.push_front((there, here));
    }
}

/// The result of a share.
type ShareResult = Result<Outcome, Error>;

impl Stripes {
    /// Join the stripes that the controller has planned, and agree with the other ranks on those that all have joined.
    pub(crate) fn join(main: &SharedCore, striping: Striping) -> Result<Self, JoinError> {
        let ended = |error: Error| JoinError::Membership(error.to_string());
        let mut core = main.lock().map_err(ended)?;
        let (config, context) = (core.config().clone(), core.selection_context());
        let shares = striping.shares;
        let own = shares.first().copied().unwrap_or(1).max(1);
        let own = ShareWeight { weight: own.into(), chunk_len_bytes: chunk_of(&context) };
        let mut reason = striping.reason;
        let joined = join_all(&config, &striping.rails, shares.get(1..).unwrap_or_default());
        let mut all_have = u64::MAX;
        if !joined.is_empty() {
            let has = (0..).zip(&joined).fold(0, |mask, (bit, stripe)| mask | u64::from(stripe.is_ok()) << bit);
            all_have = agree(&mut core, has).map_err(ended)?;
        }
        drop(core);
        let mut further = Vec::new();
        for (bit, stripe) in joined.into_iter().enumerate() {
            let number = bit + 2;
            match stripe {
                Ok(stripe) if all_have & 1 << bit != 0 => further.push(stripe),
                Ok(stripe) => {
                    reason.get_or_insert_with(|| format!("tree {number}: not all ranks could join it"));
                    if let Ok(mut core) = stripe.core.lock() {
                        core.leave(LEAVE_TIMEOUT);
                    }
                }
                Err(why) => _ = reason.get_or_insert_with(|| format!("tree {number}: {why}")),
            }
        }
        let trees = further.len() + 1;
        if trees > 1 || reason.is_some() {
            let (job, rank, why) = (&config.job, config.rank, reason.as_deref());
            crate::log::info!(job, rank, trees, why, "operations are spread over trees");
        }
        let calls = further.iter().map(|_| VecDeque::with_capacity(CALLS_KNOWN)).collect();
        let state = StripesState { resting: vec![0; trees], calls, ..StripesState::default() };
        Ok(Self { further, own, reason, context, state: Mutex::new(state) })
    }

    /// The trees, and why there are no more.
    pub(crate) fn trees(&self) -> Trees {
        let own = u16::try_from(self.own.weight).unwrap_or(u16::MAX);
        let shares = std::iter::once(own).chain(self.further.iter().map(|stripe| stripe.share)).collect();
        Trees { shares, reason: self.reason.clone() }
    }

    fn state(&self) -> MutexGuard<'_, StripesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Run a blocking operation, on several trees if it is large enough.
    pub(crate) fn run(
        &self,
        main: &mut Core,
        desc: OpDesc,
        buffers: &mut Buffers<'_>,
        options: &CallOptions,
    ) -> ShareResult {
        let straggler = options.straggler.unwrap_or(main.config().straggler);
        let run_whole = |main: &mut Core, buffers: &mut Buffers<'_>| {
            let result = main.run(desc, buffers, options);
            result.as_ref().err().filter(|error| !error.is_rejection()).inspect(|error| self.end(error));
            result
        };
        if self.further.is_empty() {
            return main.run(desc, buffers, options);
        }
        if straggler != Straggler::Wait {
            self.state().had_limit = true;
        }
        let shares = self.shares(&desc, options.algo.unwrap_or(main.config().algo));
        if shares.is_empty() {
            return run_whole(main, buffers);
        }
        main.check_usable()?;
        Extent::of(&desc, main.place())?.check(&desc, buffers)?;
        // A rejection must come before any tree has the operation.
        main.reserve_room(&desc, options)?;
        self.run_shares(main, (desc, options), &shares, buffers)
    }

    /// Return whether the communicator has no further trees.
    pub(crate) const fn is_single(&self) -> bool {
        self.further.is_empty()
    }

    /// Divide an operation among the trees; empty if it takes one tree, or none.
    fn shares(&self, desc: &OpDesc, algo: Algo) -> Vec<Share> {
        if !is_divisible(desc.collective) || !matches!(algo, Algo::Auto | Algo::Tree) {
            return Vec::new();
        }
        let mut state = self.state();
        if state.had_limit {
            return Vec::new();
        }
        let further = self
            .further
            .iter()
            .map(|stripe| ShareWeight { weight: stripe.share.into(), chunk_len_bytes: stripe.chunk_len_bytes });
        let weights = std::iter::once(self.own).chain(further).zip(&state.resting);
        let weights = weights.map(|(tree, &resting)| match resting {
            0 => tree,
            _ => ShareWeight { weight: 0, ..tree },
        });
        let shares = divide(desc, &weights.collect::<Vec<_>>());
        if shares.is_empty() || algo == Algo::Tree {
            return shares;
        }
        let is_divided = match state.selected {
            Some((of, is_divided)) if of == *desc => is_divided,
            _ => self.beats_hosts(desc, &shares),
        };
        state.selected = Some((*desc, is_divided));
        if is_divided { shares } else { Vec::new() }
    }

    /// Whether the largest share takes its tree less time than the whole takes the hosts, or the tree is preferred
    /// anyway.
    fn beats_hosts(&self, desc: &OpDesc, shares: &[Share]) -> bool {
        let whole = explain(&self.context, desc, Algo::Auto);
        if whole.overridden.is_some() || whole.chosen == Some(Path::Tree) {
            return whole.chosen == Some(Path::Tree);
        }
        let largest = shares.iter().map(|share| share.elements.end - share.elements.start).max().unwrap_or(0);
        let part = explain(&self.context, &OpDesc { count: largest, ..*desc }, Algo::Tree);
        let cost = |found: &crate::select::Explanation, is_tree: bool| {
            let costs = found.candidates.iter().filter(|candidate| (candidate.path == Path::Tree) == is_tree);
            costs.filter_map(|candidate| candidate.cost_s.as_ref().ok().copied()).min_by(f64::total_cmp)
        };
        let in_trees = cost(&part, true);
        in_trees.is_some_and(|in_trees| cost(&whole, false).is_none_or(|by_hosts| in_trees <= by_hosts))
    }

    /// Run the shares of an operation at the same time.
    fn run_shares(
        &self,
        main: &mut Core,
        (desc, options): (OpDesc, &CallOptions),
        shares: &[Share],
        buffers: &mut Buffers<'_>,
    ) -> ShareResult {
        let call = main.calls_begun();
        let part = |share: &Share| OpDesc { count: share.elements.end - share.elements.start, ..desc };
        let mut parts = divide_buffers(&desc, shares, buffers).into_iter();
        let (own, further) = (parts.next(), &shares[1..]);
        // Taken by the thread of the share or, if there can be none, by this one.
        let parts: Vec<_> = parts.map(|buffers| Mutex::new(Some(buffers))).collect();
        let run = |nth: usize| {
            let buffers = parts[nth].lock().unwrap_or_else(PoisonError::into_inner).take();
            buffers.map(|buffers| self.run_stripe(call, &further[nth], part(&further[nth]), buffers, options))
        };
        let results = thread::scope(|scope| {
            let spawn = |nth| thread::Builder::new().spawn_scoped(scope, move || run(nth)).ok();
            let threads: Vec<_> = (0..further.len()).map(spawn).collect();
            let own = own.map(|mut buffers| main.run_share(part(&shares[0]), &mut buffers, options));
            if let Some(Err(error)) = &own {
                self.interrupt(error);
            }
            let join = |(nth, thread): (usize, Option<thread::ScopedJoinHandle<'_, Option<ShareResult>>>)| match thread
            {
                Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // In the same order on all ranks, so that those without threads wait for each other in turn.
                None => run(nth),
            };
            std::iter::once(own).chain(threads.into_iter().enumerate().map(join)).collect::<Vec<_>>()
        });
        let results: Vec<ShareResult> = results.into_iter().flatten().collect();
        match results.iter().all(Result::is_ok) {
            true => {
                let outcomes: Vec<Outcome> = results.into_iter().flatten().collect();
                self.state().note_paths(shares, &outcomes);
                Ok(combine(shares, outcomes))
            }
            false => Err(self.fail(main, (&desc, call), shares, results)),
        }
    }

    fn run_stripe(
        &self,
        call: u64,
        share: &Share,
        desc: OpDesc,
        mut buffers: Buffers<'_>,
        options: &CallOptions,
    ) -> ShareResult {
        let stripe = share.tree - 1;
        let mut core = self.further[stripe].core.lock()?;
        self.state().note_call(stripe, core.calls_begun(), call);
        core.run_share(desc, &mut buffers, options)
    }

    /// Shares have failed: return the error of the operation, and end all trees, unless it was rejected on all of them.
    fn fail(
        &self,
        main: &mut Core,
        (desc, call): (&OpDesc, u64),
        shares: &[Share],
        results: Vec<ShareResult>,
    ) -> Error {
        let was_rejected = |result: &ShareResult| result.as_ref().is_err_and(Error::is_rejection);
        let is_rejection = results.iter().all(was_rejected);
        let receives = main.receives(desc);
        let outputs = shares.iter().zip(&results).map(|(share, result)| match result {
            Ok(_) if receives => (share, None),
            Ok(_) => (share, Some(OutputState::Elements(Vec::new()))),
            Err(error) => (share, Some(error.output())),
        });
        let output = combine_outputs(outputs);
        let errors = shares.iter().zip(results).filter_map(|(share, result)| Some((share, result.err()?)));
        let errors = errors.map(|(share, error)| {
            let part = OpDesc { count: share.elements.end - share.elements.start, ..*desc };
            error_of_whole(error, (&part, desc), |number| self.call_of(share, number, call))
        });
        // An error that all ranks agree on comes first; a rejected share has no effect, so it says least.
        let rank = |error: &Error| match error {
            _ if error.is_rejection() => 3,
            Error::Ended(_) | Error::Cancelled | Error::Left => 2,
            Error::Mismatch { .. } | Error::RanksFailed { .. } => 0,
            _ => 1,
        };
        let Some(error) = errors.min_by_key(rank) else { return Error::Cancelled };
        if is_rejection {
            return error;
        }
        let error = error.ending().with_output(output);
        main.note_end(&error);
        self.end(&error);
        error
    }

    /// Return the communicator's number of a call of a tree.
    fn call_of(&self, share: &Share, number: u64, call: u64) -> u64 {
        let Some(stripe) = share.tree.checked_sub(1) else { return number };
        let state = self.state();
        state.calls[stripe].iter().find(|(there, _)| *there == number).map_or(call, |(_, here)| *here)
    }

    /// End all stripes with the error that ends the communicator.
    fn end(&self, error: &Error) {
        for stripe in &self.further {
            if let Ok(mut core) = stripe.core.lock() {
                core.note_end(error);
            }
        }
    }

    /// The own tree reported an error of all ranks: the stripes, which are in their shares, need not wait for it.
    fn interrupt(&self, error: &Error) {
        for stripe in &self.further {
            error.abort_reason().into_iter().for_each(|reason| stripe.core.notices().job_aborted(reason));
        }
    }

    /// Leave all stripes; returns how.
    pub(crate) fn leave(&self, limit: Duration) -> Departure {
        let until = after(Instant::now(), limit);
        let mut departure = Departure::Clean;
        for stripe in &self.further {
            let left = until.saturating_duration_since(Instant::now());
            let how = stripe.core.lock().map_or_else(Departure::Failed, |mut core| core.leave(left));
            if departure == Departure::Clean {
                departure = how;
            }
        }
        departure
    }

    /// Add up the recoveries of all trees.
    pub(crate) fn recoveries(&self, own: Recoveries) -> Recoveries {
        let cores = self.further.iter().filter_map(|stripe| stripe.core.lock().ok());
        cores.map(|core| core.recoveries()).fold(own, |sum, of| Recoveries {
            count: sum.count + of.count,
            time: sum.time + of.time,
            bytes: sum.bytes + of.bytes,
        })
    }

    /// The notices of all stripes.
    pub(crate) fn notices(&self) -> impl Iterator<Item = &Arc<Notices>> {
        self.further.iter().map(|stripe| stripe.core.notices())
    }
}

/// Join all stripes, with these shares, at the same time: each waits for the other ranks and for its devices.
fn join_all(config: &JoinConfig, rails: &[RailGrant], shares: &[u16]) -> Vec<Result<Stripe, String>> {
    let join = |index: u8, share: u16| {
        join_stripe(config, index, rails).and_then(|core| {
            let chunk_len_bytes = chunk_of(&core.selection_context());
            let core = SharedCore::new(core).map_err(|error| error.to_string())?;
            Ok(Stripe { core, share: share.max(1), chunk_len_bytes })
        })
    };
    let stripes = || (1..TREES_MAX).zip(shares);
    thread::scope(|scope| {
        let spawn = |(index, &share)| thread::Builder::new().spawn_scoped(scope, move || join(index, share)).ok();
        let threads: Vec<_> = stripes().map(spawn).collect();
        let joined = |((index, &share), thread): (_, Option<thread::ScopedJoinHandle<'_, _>>)| match thread {
            Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => join(index, share),
        };
        stripes().zip(threads).map(joined).collect()
    })
}

/// The chunk of a job's tree; 0 if there is none.
fn chunk_of(context: &SelectionContext) -> u32 {
    context.tree.as_ref().map_or(0, |facts| facts.chunk_len_bytes)
}

/// Join a stripe, at the adapter that was planned for it. Fails with the reason if there is no tree for it.
fn join_stripe(config: &JoinConfig, index: u8, rails: &[RailGrant]) -> Result<Core, String> {
    let mut config = config.clone();
    if let (Some(own), Some(grant)) = (rails.first(), rails.get(usize::from(index))) {
        config.enter_at(grant, own)?;
    }
    let of = StripeOf { job: config.job.clone(), index };
    config.job = stripe_name(&config.job, index);
    config.join_timeout = config.join_timeout.min(JOIN_TIMEOUT);
    (config.embedded_controller, config.hierarchical) = (false, false);
    // Whoever drives the job's own tree drives this one.
    config.progress = Some(Progress::Caller);
    (config.wait_for_tree, config.straggler) = (Duration::ZERO, Straggler::Wait);
    let (mut core, _) = join_as(config, Some(PartOf::Stripe(of))).map_err(|error| error.to_string())?;
    match core.selection_context().tree {
        Ok(_) => Ok(core),
        Err(why) => {
            core.leave(LEAVE_TIMEOUT);
            Err(why)
        }
    }
}

/// Agree on the stripes that all ranks have joined, as a bit mask.
fn agree(main: &mut Core, has: u64) -> Result<u64, Error> {
    let mut bytes = has.to_le_bytes();
    let options = CallOptions { algo: Some(Algo::Auto), straggler: Some(Straggler::Wait), ..CallOptions::default() };
    let desc = OpDesc::all_reduce(Dtype::U64, ReduceOp::Band, 1);
    main.run(desc, &mut Buffers::InPlace(&mut bytes), &options)?;
    Ok(u64::from_le_bytes(bytes))
}

/// Combine the outcomes of an operation's shares.
fn combine(shares: &[Share], outcomes: Vec<Outcome>) -> Outcome {
    let all = outcomes.len();
    let mut outcomes = shares.iter().zip(outcomes);
    let Some((_, mut whole)) = outcomes.next() else { unreachable!("an operation has a share") };
    for (share, part) in outcomes {
        if let Some(why) = part.fallback {
            whole.fallback.get_or_insert(format!("tree {} of {all}: {why}", share.tree + 1).into());
        }
        if part.path == Path::Tree {
            whole.path = Path::Tree;
        }
        whole.trees += part.trees;
        whole.transfer = whole.transfer.or(part.transfer);
        whole.wire_bytes += part.wire_bytes;
        whole.retransmits += part.retransmits;
        whole.recovered |= part.recovered;
        whole.slowest = whole.slowest.into_iter().chain(part.slowest).max_by_key(|slowest| slowest.late_us);
    }
    whole
}
