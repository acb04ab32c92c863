//! Path selection: an alpha-beta-gamma cost model, with constants from the controller.
//!
//! Ranks never decide from their own measurements (PROTOCOL 2). The table and its version come with the group, the
//! version is part of every operation's signature, and the same call yields the same choice on every rank. An
//! impossible path has a reason ([`RuledOut`]), never a silent infinite cost.
//!
//! Costs in seconds for n bytes over N ranks, h of them on the busiest host, in a tree of L levels with chunks of m
//! bytes, from the constants of [`Constants`], whose names are shortened here:
//!
//! | path | cost | source |
//! |---|---|---|
//! | tree | 2 L alpha_tree + (i + o) (k packet_node + n' beta_node) + r n (beta_tree + (h - 1) beta_tree_shared) + g n gamma | each of L levels up and down; a rank moves r n bytes; the node with most children, c, receives i n, combines g n and sends o n, and is the bottleneck of a pipeline of chunks |
//! | tree, all ranks zero-copy | 2 alpha_zero_copy + (i + o) (k chunk_zero_copy + n beta_zero_copy) or, if L > 1, what a tree of L - 1 levels above takes for its bytes, whichever is longer, + 2 (L - 1) alpha_tree | the leaf's engine reads i n, combines it on the way and writes o n; ranks move nothing; above the leaves there are only packets, while other chunks pass the leaf |
//! | host collectives | S alpha_step + max(h M / N - S, E) alpha_shared + B beta_step + (h T / N - B) beta_shared + R gamma | S, B and R are the steps, path and reduced bytes of the table in [`crate::schedule`], M and T the messages and bytes of all ranks, and E the messages of the busiest rank beyond one a step ([`Cost`](crate::schedule::Cost)); what the ranks of a host send beyond the path takes its processors, too |
//! | host collectives, all ranks on one host | the same, with alpha_shm_step, alpha_shm_shared, beta_shm_step and beta_shm_shared | steps are in shared memory |
//! | `one-shot`, all ranks on one host, at most 8 KiB; all-reduces by `ring`, and by `hd` and `rd` of 2^k ranks, with at most 8 KiB of partial values | S alpha_post + B beta_shm_step + R gamma | each rank posts once a step for all others ([`Board`](sumac_hal::shm::Board)) |
//! | `hybrid`, on G servers of m ranks | ring reduce-scatter and all-gather of n over the m ranks of a server, and the tree of a rail for n/m over G ranks | the rails run at once; its facts are the slowest rail's |
//! | `rab`, on G servers of m ranks | reduce and broadcast of n over the m ranks of a server, and the tree of the leaders for n over G ranks | what is inside a host is in shared memory |
//!
//! where k = max(1, ceil(n / m)) chunks; n' = n + (L - 1) min(n, m), as the first chunk fills the pipeline; and (r, i,
//! o, g) is (2, c, c, c) for all-reduce, (2, c, 1, c) for reduce, (1, 1, c, 0) for broadcast, (1 + 1/N, c, 1, c) for
//! reduce-scatter and (1 + 1/N, 1, c, 0) for all-gather.
//!
//! Where the rates of a fabric's cables are known ([`LinkFacts`]), what is moved takes at least as long as its bytes
//! take over the busiest cable: n in the tree, B by a schedule. Data sheets' costs per byte of links are then left out.
//! Devices of data sheets combine as fast as their links, so their trees have no gamma.
//!
//! Measurements correct these costs where a [`Curve`] fits the job.
//!
//! The cheapest path is selected. One that was never measured, neither for the built-in constants nor by a curve, has
//! to be cheaper by a quarter.
//!
//! If an order is declared and the operation's bits depend on it, a schedule is possible only if it evaluates exactly
//! the declared expression, as determined by the schedule checker ([`Declared`]).

mod algo;
mod attachment;
mod curve;
mod declared;
mod file;
mod fit;
mod hybrid;
mod links;
mod model;
mod overrides;
mod table;
#[cfg(test)]
mod tests;

pub use algo::{Algo, UnknownAlgo};
pub(crate) use attachment::prefers_packets;
pub use curve::{Curve, CurveKind, Point, RankPlacement};
pub use declared::Declared;
pub use file::CostFileError;
pub use fit::{FitError, Fitted, Sample, fit, predict};
pub(crate) use hybrid::{is_by_rails, part_of};
pub use links::{LinkFacts, PathTimes};
pub use overrides::{Override, OverrideError};
pub use table::{Constants, CostTable, Origin};

use crate::memory_kind::MemoryKind;
use crate::schedule::{ALGORITHMS, Algorithm, Shape};
use model::{Form, copies_form, schedule_form, tree_form};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Collective, OpDesc, Path, ReduceOp};
use thiserror::Error;

/// What selection depends on. The same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct SelectionContext {
    /// The number of ranks in the communicator.
    pub ranks: u32,
    /// How many of them are on the busiest host, told by their addresses.
    pub ranks_per_host: u32,
    /// How the ranks lie.
    pub shape: Shape,
    /// The declared reduction order.
    pub order: Order,
    /// The tree, or why there is none.
    pub tree: Result<TreeFacts, String>,
    /// The trees of the rails: the worst of each property that any of them has. Or why there are none.
    pub rails: Result<TreeFacts, String>,
    /// The tree of the leaders of servers, or why there is none.
    pub leaders: Result<TreeFacts, String>,
    /// The constants of the cost model.
    pub table: CostTable,
    /// The expression of the declared order.
    pub declared: Declared,
    /// What memory buffers are in.
    pub memory: MemoryKind,
}

/// The properties of a job that costs depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobFacts {
    /// The number of ranks.
    pub ranks: u32,
    /// How many of them are on the busiest host.
    pub ranks_per_host: u32,
    /// How the ranks lie.
    #[serde(default)]
    pub shape: Shape,
    /// The tree, if there is one.
    pub tree: Option<TreeFacts>,
}

/// Return the number of ranks on the busiest host, told by their addresses.
pub(crate) fn ranks_per_host(addrs: impl Iterator<Item = IpAddr>) -> u32 {
    let mut hosts = BTreeMap::new();
    addrs.for_each(|addr| *hosts.entry(addr).or_insert(0_u32) += 1);
    hosts.into_values().max().unwrap_or(1)
}

/// The properties of a tree that selection depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeFacts {
    /// Levels of nodes.
    pub levels: u32,
    /// The maximum number of children of a node.
    pub max_children: u32,
    /// The maximum payload of a chunk, in bytes.
    pub chunk_len_bytes: u32,
    /// Bit n: all nodes support element type number n.
    pub dtypes: u32,
    /// Bit n: all nodes support operator number n.
    pub ops: u32,
    /// Bit n: all nodes support collective number n.
    pub collectives: u32,
    /// How many ranks use zero-copy. The same number on all ranks.
    pub zero_copy_ranks: u32,
    /// How many of these use RDMA.
    pub rdma_ranks: u32,
    /// Whether packets use RDMA verbs.
    pub over_verbs: bool,
    /// The maximum number of shards of a node.
    pub shards: u16,
    /// The rates of cables, if there is a fabric whose rates are all known.
    pub links: Option<LinkFacts>,
}

impl TreeFacts {
    /// How the `ranks` of the job reach their tree.
    pub const fn transport(&self, ranks: u32) -> TreeTransport {
        match self.zero_copy_ranks {
            0 if self.over_verbs => TreeTransport::Verbs,
            0 => TreeTransport::Packets,
            all if all >= ranks && self.rdma_ranks >= ranks => TreeTransport::Rdma,
            all if all >= ranks => TreeTransport::Shm,
            zero_copy => TreeTransport::Mixed { zero_copy, ranks },
        }
    }
}

/// How the ranks of a job reach the leaves of their tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TreeTransport {
    /// All ranks use UDP packets.
    Packets,
    /// All ranks use packets over RDMA verbs.
    Verbs,
    /// Some ranks use zero-copy, the others packets.
    Mixed {
        /// How many ranks use zero-copy.
        zero_copy: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// All ranks use zero-copy.
    Shm,
    /// All ranks use zero-copy over RDMA.
    Rdma,
}

impl TreeTransport {
    /// The name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Packets => "udp",
            Self::Verbs => "verbs",
            Self::Mixed { .. } => "mixed",
            Self::Shm => "shm",
            Self::Rdma => "rdma",
        }
    }
}

impl fmt::Display for TreeTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packets => f.write_str("packets"),
            Self::Verbs => f.write_str("packets over RDMA verbs"),
            Self::Mixed { zero_copy, ranks } => write!(f, "{zero_copy} of {ranks} ranks zero-copy"),
            Self::Shm => f.write_str("zero-copy"),
            Self::Rdma => f.write_str("zero-copy over RDMA"),
        }
    }
}

impl SelectionContext {
    /// What costs depend on.
    pub fn facts(&self) -> JobFacts {
        let Self { ranks, ranks_per_host, shape, ref tree, .. } = *self;
        JobFacts { ranks, ranks_per_host, shape, tree: tree.as_ref().ok().copied() }
    }

    /// The same for so many ranks: others than those of the communicator are in a line.
    #[must_use]
    pub fn for_ranks(&self, ranks: u32) -> Self {
        Self { ranks, shape: self.shape_of(ranks), ..self.clone() }
    }

    /// The shape of so many ranks: others than those of the communicator are in a line.
    pub const fn shape_of(&self, ranks: u32) -> Shape {
        if ranks == self.ranks { self.shape } else { Shape::Line }
    }

    /// How the ranks reach their tree, if there is one.
    pub fn tree_transport(&self) -> Option<TreeTransport> {
        self.tree.as_ref().ok().map(|tree| tree.transport(self.ranks))
    }
}

/// Why a path is not possible: the first condition that rules it out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RuledOut {
    /// There is no tree.
    #[error("there is no tree: {0}")]
    NoTree(String),
    /// A device does not support the collective, type or operator.
    #[error("a device of the tree does not support {0}")]
    Unsupported(OpDesc),
    /// The result depends on the order, and this schedule cannot preserve the declared one.
    #[error("{path} cannot preserve the declared order {order:?}: {why}")]
    Order {
        /// The path's name.
        path: &'static str,
        /// The order.
        order: Order,
        /// How it differs.
        why: String,
    },
    /// The algorithm is for several dimensions, and the ranks have one.
    #[error(
        "{path} needs at least two dimensions of at least two ranks, and these {ranks} ranks have the shape {shape}; \
         set SUMAC_SHAPE, as 4x8 or servers:4"
    )]
    Shape {
        /// The path's name.
        path: &'static str,
        /// The shape.
        shape: Shape,
        /// The number of ranks.
        ranks: u32,
    },
    /// The ranks have no trees of rails, or these cannot carry the operation.
    #[error("{path} is not possible: {why}")]
    Rails {
        /// The path's name.
        path: &'static str,
        /// The reason.
        why: String,
    },
    /// The caller allows completion without stragglers, and this path does not support that.
    #[error("{path} cannot complete without late ranks: {why}")]
    Partial {
        /// The path's name.
        path: &'static str,
        /// The reason.
        why: &'static str,
    },
    /// The GPUs cannot access each other's memory.
    #[error("the ranks' GPUs cannot access each other's memory: {0}")]
    NotDirect(String),
    /// NCCL is not possible.
    #[error("NCCL unavailable: {0}")]
    Nccl(String),
    /// The path does not implement the collective.
    #[error("{path} does not implement {collective}")]
    Collective {
        /// The path's name.
        path: &'static str,
        /// The collective.
        collective: Collective,
    },
}

/// A path with its cost.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The path.
    pub path: Path,
    /// The cost in seconds, or why the path is not possible.
    pub cost_s: Result<f64, RuledOut>,
}

/// All paths with their costs, and the selection.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The requested algorithm.
    pub requested: Algo,
    /// All paths.
    pub candidates: Vec<Candidate>,
    /// The selected path: the requested one, that of an override, or the cheapest. `None` if it is not possible.
    pub chosen: Option<Path>,
    /// The path that the controller's overrides name for this operation.
    pub overridden: Option<Path>,
    /// How the ranks reach the tree, if there is one. The cost of zero-copy applies only if all ranks use it.
    pub transport: Option<TreeTransport>,
    /// Where the costs come from.
    pub origin: Origin,
}

impl Explanation {
    /// Why the operation falls back from the tree: the caller requested `Auto` and the tree is not possible.
    /// Collectives that no tree implements are not fallbacks.
    pub fn fallback(&self) -> Option<&RuledOut> {
        let tree = self.candidates.iter().find(|candidate| candidate.path == Path::Tree)?;
        let why = tree.cost_s.as_ref().err().filter(|why| !matches!(why, RuledOut::Collective { .. }))?;
        (self.requested == Algo::Auto && self.chosen.is_some()).then_some(why)
    }

    /// Why the requested algorithm is not possible, if so.
    pub fn refusal(&self) -> Option<&RuledOut> {
        if self.chosen.is_some() {
            return None;
        }
        let forced = self.requested.forced();
        let mut candidates_for =
            self.candidates.iter().filter(|candidate| forced.is_none_or(|path| candidate.path == path));
        candidates_for.find_map(|candidate| candidate.cost_s.as_ref().err())
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "requested {}; costs: {}", self.requested, self.origin)?;
        if let Some(path) = self.overridden {
            writeln!(f, "overridden to {}", path.name())?;
        }
        for Candidate { path, cost_s } in &self.candidates {
            let mark = if Some(*path) == self.chosen { '*' } else { ' ' };
            match cost_s {
                Ok(cost) => {
                    write!(f, "{mark} {:<13} {:>12.1} us", path.name(), cost * 1e6)?;
                    match self.transport.filter(|_| *path == Path::Tree) {
                        Some(transport) => writeln!(f, "  {transport}")?,
                        None => writeln!(f)?,
                    }
                }
                Err(reason) => writeln!(f, "{mark} {:<13} ruled out: {reason}", path.name())?,
            }
        }
        Ok(())
    }
}

/// Compute the cost of every path for an operation, and select one.
pub fn explain(selection: &SelectionContext, desc: &OpDesc, requested: Algo) -> Explanation {
    explain_with(selection, desc, requested, Vec::new())
}

/// Like [`explain`], with further candidates of the caller.
pub(crate) fn explain_with(
    selection: &SelectionContext,
    desc: &OpDesc,
    requested: Algo,
    others: Vec<Candidate>,
) -> Explanation {
    let forced = requested.forced();
    let tree = Candidate { path: Path::Tree, cost_s: tree_cost(selection, desc) };
    let schedules = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern.collective() == desc.collective);
    let schedules = schedules
        .map(|algorithm| Candidate { path: algorithm.path(), cost_s: schedule_cost(selection, desc, algorithm) });
    let by_rails = [Path::Hybrid, Path::Rab].into_iter().filter(|_| desc.collective == Collective::AllReduce);
    let by_rails = by_rails.map(|path| Candidate { path, cost_s: hybrid::cost(selection, desc, path) });
    let mut candidates: Vec<Candidate> = std::iter::once(tree).chain(schedules).chain(by_rails).chain(others).collect();
    let overridden = selection.table.overridden(desc).filter(|_| forced.is_none());
    if let Some(path) = forced.or(overridden).filter(|path| candidates.iter().all(|candidate| candidate.path != *path))
    {
        let none = match path {
            Path::Nccl => RuledOut::Nccl("the buffers are in the memory of this process, not of a GPU".into()),
            _ => RuledOut::Collective { path: path.name(), collective: desc.collective },
        };
        candidates.push(Candidate { path, cost_s: Err(none) });
    }
    let possible = candidates.iter().filter_map(|candidate| Some((candidate.path, *candidate.cost_s.as_ref().ok()?)));
    let wanted = |wanted: Path| possible.clone().map(|(path, _)| path).find(|&path| path == wanted);
    let chosen = match forced {
        Some(forced) => wanted(forced),
        None => overridden.and_then(wanted).or_else(|| cheapest(selection, desc, possible.clone())),
    };
    let (transport, origin) = (selection.tree_transport(), selection.table.origin.clone());
    Explanation { requested, candidates, chosen, overridden, transport, origin }
}

/// The cheapest path; of several, `one-shot`, which is what `rd` is for two ranks, but combines in any declared order.
/// One that nobody has measured must be cheaper by [`UNMEASURED_MARGIN`].
fn cheapest(selection: &SelectionContext, desc: &OpDesc, possible: impl Iterator<Item = (Path, f64)>) -> Option<Path> {
    let facts = selection.facts();
    let is_measured = |path: Path| {
        let kind = CurveKind::of(&facts, desc, path);
        has_fitted_constants(path) || kind.is_some_and(|kind| curve::is_measured(&selection.table.curves, kind))
    };
    let weighed =
        possible.map(|(path, cost_s)| (path, cost_s * if is_measured(path) { 1.0 } else { UNMEASURED_MARGIN }));
    let is_other = |path: &Path| *path != Path::OneShot;
    let cheapest = weighed.min_by(|(p, a), (q, b)| a.total_cmp(b).then(is_other(p).cmp(&is_other(q))));
    cheapest.map(|(path, _)| path)
}

/// By which factor a path must be cheaper for which neither built-in constants nor curves were measured.
const UNMEASURED_MARGIN: f64 = 1.25;

/// Whether the built-in constants were fitted to times of this path, among others.
const fn has_fitted_constants(path: Path) -> bool {
    use Path::{Bine, DoubleTree, FullMesh, Nhr, Pat, Star, Swing, SwingLatency, VanDeGeijn};
    use Path::{Chain, HierarchicalPairwise, HierarchicalRing, Mesh2d, Ring2d, Torus2d};
    !matches!(path, Star | FullMesh | DoubleTree | Nhr | Pat | Swing | SwingLatency | Bine | VanDeGeijn)
        && !matches!(path, Ring2d | Torus2d | Mesh2d | HierarchicalRing | HierarchicalPairwise | Chain)
        && !is_by_rails(path)
}

/// The cost of the tree: a pipeline of chunks through its slowest part, at a rank or at a node.
fn tree_cost(selection: &SelectionContext, desc: &OpDesc) -> Result<f64, RuledOut> {
    if !desc.collective.is_offloadable() {
        return Err(RuledOut::Collective { path: Path::Tree.name(), collective: desc.collective });
    }
    let tree = selection.tree.as_ref().map_err(|why| RuledOut::NoTree(why.clone()))?;
    if !supports(tree, desc) {
        return Err(RuledOut::Unsupported(*desc));
    }
    let (facts, table) = (selection.facts(), &selection.table);
    let seconds = seconds_of(table, &facts, desc, Path::Tree, &tree_form(&facts, tree, desc));
    Ok(seconds + if selection.memory == MemoryKind::Plain { copies_seconds(table, &facts, tree, desc) } else { 0.0 })
}

/// The time for which ranks copy plain memory in and out, where they share memory with their device. A ring moves about
/// as many bytes in the same way, so what was measured of it corrects this.
fn copies_seconds(table: &CostTable, facts: &JobFacts, tree: &TreeFacts, desc: &OpDesc) -> f64 {
    let Some(form) = copies_form(facts, tree, desc) else { return 0.0 };
    let kind = CurveKind::of(facts, desc, Path::Ring);
    let factor = kind.map_or(1.0, |kind| curve::correction(&table.curves, kind, facts.ranks, bytes(desc) as u64));
    form.seconds(&table.constants_for(facts, Path::Ring)) * factor
}

/// The cost of a schedule, by its own formula for elements of this operation's size.
fn schedule_cost(selection: &SelectionContext, desc: &OpDesc, algorithm: &Algorithm) -> Result<f64, RuledOut> {
    let SelectionContext { ranks, shape, order, table, .. } = selection;
    if algorithm.needs_dimensions() && !shape.is_multidimensional(*ranks) {
        return Err(RuledOut::Shape { path: algorithm.path().name(), shape: *shape, ranks: *ranks });
    }
    if depends_on_order(*order, desc) {
        selection.declared.check_evaluates(algorithm).map_err(|why| RuledOut::Order {
            path: algorithm.path().name(),
            order: *order,
            why,
        })?;
    }
    let facts = selection.facts();
    Ok(seconds_of(table, &facts, desc, algorithm.path(), &schedule_form(&facts, desc, algorithm)))
}

/// The time of an operation in seconds, corrected by what was measured of its kind.
fn seconds_of(table: &CostTable, facts: &JobFacts, desc: &OpDesc, path: Path, form: &Form) -> f64 {
    let kind = CurveKind::of(facts, desc, path);
    let factor = kind.map_or(1.0, |kind| curve::correction(&table.curves, kind, facts.ranks, bytes(desc) as u64));
    form.seconds(&table.constants_for(facts, path)) * factor
}

fn bytes(desc: &OpDesc) -> f64 {
    desc.element_bytes() as f64 * desc.count as f64
}

fn supports(tree: &TreeFacts, desc: &OpDesc) -> bool {
    let has = |mask: u32, number: u8| mask & (1 << number) != 0;
    has(tree.collectives, desc.collective.to_wire())
        && desc.dtype.is_none_or(|dtype| has(tree.dtypes, dtype.to_wire()))
        && desc.op.is_none_or(|op| has(tree.ops, op.to_wire()))
}

/// Only operations that round depend on the order: integer arithmetic wraps, and the other operators select.
fn depends_on_order(order: Order, desc: &OpDesc) -> bool {
    let rounds = matches!(desc.op, Some(ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg | ReduceOp::PremulSum));
    order != Order::Arrival && rounds && desc.dtype.is_some_and(|dtype| !dtype.is_integer())
}
