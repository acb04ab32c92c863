//! Which way an operation takes, and why: an alpha-beta-gamma model with a table that the controller hands out.
//!
//! Ranks never decide from measurements of their own (PROTOCOL 2): the table and its version come with the group,
//! the version is part of every operation's signature, and the same call gives the same choice everywhere. "Not
//! possible" is a named reason ([`RuledOut`]), never a silent infinite cost.
//!
//! Costs in seconds for n bytes over N ranks, from the table's alpha (s a message), beta (s a byte moved through one
//! process, or by one engine) and gamma (s a byte combined):
//!
//! | path | cost | source |
//! |---|---|---|
//! | tree | 2 L alpha + n (r beta + (i + o) beta_node + g gamma) | each of L levels up and down; a rank moves r n bytes; the node with most children, c, takes in i n, combines g n and sends o n, and is the bottleneck of a pipeline of chunks |
//! | tree, all ranks by reference | 2 alpha_reference + n (i + o) beta_reference, and, where L > 1, the tree of L - 1 levels above | the leaf's engine reads i n, combines it on the way and writes o n; ranks move nothing; above the leaves everything is packets |
//! | schedules | as the table in [`crate::schedule`] has them | each named there |
//!
//! with, for all-reduce, r = 2 and i = o = g = c; reduce: 2, c, 1, c; broadcast: 1, 1, c, 0; reduce-scatter: 1 + 1/N, c, 1,
//! c; all-gather: 1 + 1/N, 1, c, 0.
//!
//! Where an order is declared and the operation's bits depend on it, a schedule is possible if it evaluates exactly the
//! declared expression, which the schedule checker finds out ([`Declared`]).

mod declared;
mod table;
#[cfg(test)]
mod tests;

pub use declared::Declared;
pub use table::{CostTable, Override, OverrideError};

use crate::schedule::{ALGORITHMS, Algorithm};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Collective, OpDesc, Path, ReduceOp};
use thiserror::Error;

/// What the caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Algo {
    /// What the controller's overrides say, or the cheapest that is possible.
    #[default]
    Auto,
    /// Through the tree, or an error.
    Tree,
    /// By ring, or an error.
    Ring,
    /// By halving-doubling, or an error.
    HalvingDoubling,
    /// By recursive doubling, or an error.
    RecursiveDoubling,
    /// By binomial trees, or an error.
    Binomial,
    /// By Bruck's algorithm, or an error.
    Bruck,
    /// By pairwise exchange, or an error.
    Pairwise,
    /// By the tree's expression from host to host, or an error.
    HostTree,
    /// By dissemination, or an error.
    Dissemination,
    /// By NCCL, or an error; over memory of GPUs alone.
    Nccl,
}

impl Algo {
    /// Every algorithm.
    pub const ALL: [Self; 11] = [
        Self::Auto,
        Self::Tree,
        Self::Ring,
        Self::HalvingDoubling,
        Self::RecursiveDoubling,
        Self::Binomial,
        Self::Bruck,
        Self::Pairwise,
        Self::HostTree,
        Self::Dissemination,
        Self::Nccl,
    ];

    /// Return its name on the command line.
    pub const fn name(self) -> &'static str {
        match self.forced() {
            None => "auto",
            Some(path) => path.name(),
        }
    }

    const fn forced(self) -> Option<Path> {
        Some(match self {
            Self::Auto => return None,
            Self::Tree => Path::Tree,
            Self::Ring => Path::Ring,
            Self::HalvingDoubling => Path::HalvingDoubling,
            Self::RecursiveDoubling => Path::RecursiveDoubling,
            Self::Binomial => Path::Binomial,
            Self::Bruck => Path::Bruck,
            Self::Pairwise => Path::Pairwise,
            Self::HostTree => Path::HostTree,
            Self::Dissemination => Path::Dissemination,
            Self::Nccl => Path::Nccl,
        })
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no algorithm's.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no algorithm; known are {known}", known = Algo::ALL.map(Algo::name).join(", "))]
pub struct UnknownAlgo(String);

impl FromStr for Algo {
    type Err = UnknownAlgo;

    fn from_str(text: &str) -> Result<Self, UnknownAlgo> {
        Self::ALL.into_iter().find(|algo| algo.name() == text).ok_or_else(|| UnknownAlgo(text.to_owned()))
    }
}

/// What ranks know of their group when they choose.
#[derive(Debug, Clone, PartialEq)]
pub struct Situation {
    /// Ranks of the communicator.
    pub ranks: u32,
    /// The declared order.
    pub order: Order,
    /// The tree, or why there is none.
    pub tree: Result<TreeFacts, String>,
    /// The constants.
    pub table: CostTable,
    /// The expression that a declared order asks for.
    pub declared: Declared,
}

/// What ranks know of their tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeFacts {
    /// Node levels.
    pub levels: u32,
    /// The most children of a node.
    pub max_children: u32,
    /// Bit n: all nodes know element type number n.
    pub dtypes: u32,
    /// Bit n: all nodes know operator number n.
    pub ops: u32,
    /// Bit n: all nodes know collective number n.
    pub collectives: u32,
    /// How many ranks contribute by reference to their leaves: the same number at all ranks.
    pub ranks_by_reference: u32,
    /// How many of these are on other hosts than their leaves, which reach them by RDMA.
    pub ranks_by_rdma: u32,
    /// Whether packets go over RDMA verbs.
    pub over_verbs: bool,
}

/// How the ranks of a job reach the leaves of its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Attached {
    /// All by packets.
    ByPackets,
    /// All by packets over RDMA verbs.
    ByVerbs,
    /// Some by reference, the others by packets.
    Mixed {
        /// How many by reference.
        by_reference: u32,
        /// Of how many.
        ranks: u32,
    },
    /// All by reference.
    ByReference,
    /// All by reference, over RDMA.
    ByRdma,
}

impl Attached {
    /// Return its name in tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ByPackets => "udp",
            Self::ByVerbs => "verbs",
            Self::Mixed { .. } => "mixed",
            Self::ByReference => "shm",
            Self::ByRdma => "rdma",
        }
    }
}

impl fmt::Display for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ByPackets => f.write_str("by packets"),
            Self::ByVerbs => f.write_str("by packets over RDMA verbs"),
            Self::Mixed { by_reference, ranks } => write!(f, "{by_reference} of {ranks} ranks by reference"),
            Self::ByReference => f.write_str("by reference"),
            Self::ByRdma => f.write_str("by reference over RDMA"),
        }
    }
}

impl Situation {
    /// Return how the ranks reach their tree, if there is one.
    pub fn attached(&self) -> Option<Attached> {
        let tree = self.tree.as_ref().ok()?;
        Some(match tree.ranks_by_reference {
            0 if tree.over_verbs => Attached::ByVerbs,
            0 => Attached::ByPackets,
            all if all >= self.ranks && tree.ranks_by_rdma >= self.ranks => Attached::ByRdma,
            all if all >= self.ranks => Attached::ByReference,
            by_reference => Attached::Mixed { by_reference, ranks: self.ranks },
        })
    }
}

/// The first condition that rules a path out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RuledOut {
    /// There is no tree.
    #[error("there is no tree: {0}")]
    NoTree(String),
    /// A device does not know the collective, type or operator.
    #[error("a device of the tree can't do {0}")]
    Unsupported(OpDesc),
    /// The sum of floats depends on the order, which this schedule can't keep.
    #[error("{path} can't keep the declared order {order:?}: {why}")]
    Order {
        /// The path's name.
        path: &'static str,
        /// The order.
        order: Order,
        /// What breaks it.
        why: String,
    },
    /// It can't be completed without ranks that are late, as the caller may want.
    #[error("{path} can't go on without ranks that are late: {why}")]
    Partial {
        /// The path's name.
        path: &'static str,
        /// Why not.
        why: &'static str,
    },
    /// GPUs don't reach each other's memory.
    #[error("the ranks' GPUs don't reach each other's memory: {0}")]
    NotDirect(String),
    /// NCCL can't take it.
    #[error("no NCCL: {0}")]
    Nccl(String),
    /// There is no such collective on this path.
    #[error("{path} has no {collective}")]
    Collective {
        /// The path's name.
        path: &'static str,
        /// The collective.
        collective: Collective,
    },
}

/// One path, judged.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The path.
    pub path: Path,
    /// Its cost in seconds, or why it is out.
    pub cost_s: Result<f64, RuledOut>,
}

/// All paths, judged, and the choice.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// What was asked for.
    pub requested: Algo,
    /// Every path.
    pub candidates: Vec<Candidate>,
    /// The path taken: the one forced, that of an override, or the cheapest; `None` if it is not possible.
    pub chosen: Option<Path>,
    /// What the controller's overrides say for this size.
    pub overridden: Option<Path>,
    /// How the ranks reach the tree, if there is one; only where all do so by reference does it cost as much as then.
    pub attached: Option<Attached>,
}

impl Explanation {
    /// Return why the tree is not taken, if the caller left the choice open and it is not possible: a fallback. What no
    /// tree can do falls back from nothing.
    pub fn fallback(&self) -> Option<&RuledOut> {
        let tree = self.candidates.iter().find(|candidate| candidate.path == Path::Tree)?;
        let why = tree.cost_s.as_ref().err().filter(|why| !matches!(why, RuledOut::Collective { .. }))?;
        (self.requested == Algo::Auto && self.chosen.is_some()).then_some(why)
    }

    /// Return why what was asked for is not possible, if it is not.
    pub fn refusal(&self) -> Option<&RuledOut> {
        if self.chosen.is_some() {
            return None;
        }
        let forced = self.requested.forced();
        let mut judged = self.candidates.iter().filter(|candidate| forced.is_none_or(|path| candidate.path == path));
        judged.find_map(|candidate| candidate.cost_s.as_ref().err())
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "asked for {}", self.requested)?;
        if let Some(path) = self.overridden {
            writeln!(f, "overridden to {}", path.name())?;
        }
        for Candidate { path, cost_s } in &self.candidates {
            let mark = if Some(*path) == self.chosen { '*' } else { ' ' };
            match cost_s {
                Ok(cost) => {
                    write!(f, "{mark} {:<13} {:>12.1} us", path.name(), cost * 1e6)?;
                    match self.attached.filter(|_| *path == Path::Tree) {
                        Some(attached) => writeln!(f, "  {attached}")?,
                        None => writeln!(f)?,
                    }
                }
                Err(reason) => writeln!(f, "{mark} {:<13} ruled out: {reason}", path.name())?,
            }
        }
        Ok(())
    }
}

/// Judge every path for an operation and choose.
pub fn explain(situation: &Situation, desc: &OpDesc, requested: Algo) -> Explanation {
    explain_with(situation, desc, requested, Vec::new())
}

/// The same with ways of the caller's own, already judged.
pub(crate) fn explain_with(
    situation: &Situation,
    desc: &OpDesc,
    requested: Algo,
    others: Vec<Candidate>,
) -> Explanation {
    let forced = requested.forced();
    let tree = Candidate { path: Path::Tree, cost_s: judge_tree(situation, desc) };
    let schedules = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern.collective() == desc.collective);
    let schedules = schedules
        .map(|algorithm| Candidate { path: algorithm.path(), cost_s: judge_schedule(situation, desc, algorithm) });
    let mut candidates: Vec<Candidate> = std::iter::once(tree).chain(schedules).chain(others).collect();
    let overridden = situation.table.overridden(desc).filter(|_| forced.is_none());
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
        None => overridden
            .and_then(wanted)
            .or_else(|| possible.clone().min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(path, _)| path)),
    };
    Explanation { requested, candidates, chosen, overridden, attached: situation.attached() }
}

/// Return the cost of the tree: a pipeline of chunks through its slowest part, at a rank or at a node.
fn judge_tree(situation: &Situation, desc: &OpDesc) -> Result<f64, RuledOut> {
    let table = &situation.table;
    if !desc.collective.is_offloadable() {
        return Err(RuledOut::Collective { path: Path::Tree.name(), collective: desc.collective });
    }
    let tree = situation.tree.as_ref().map_err(|why| RuledOut::NoTree(why.clone()))?;
    if !knows(tree, desc) {
        return Err(RuledOut::Unsupported(*desc));
    }
    let (n, c) = (bytes(desc), f64::from(tree.max_children));
    let block = 1.0 / f64::from(situation.ranks);
    // Of n: what the busiest rank moves, what a node takes in, what it sends out.
    let (rank, taken, sent) = match desc.collective {
        Collective::AllReduce => (2.0, c, c),
        Collective::Reduce => (2.0, c, 1.0),
        Collective::Broadcast => (1.0, 1.0, c),
        Collective::ReduceScatter => (1.0 + block, c, 1.0),
        Collective::AllGather => (1.0 + block, 1.0, c),
        _ => (0.0, 0.0, 0.0),
    };
    let combined = if desc.collective.reduces() { taken } else { 0.0 };
    let each = rank * table.beta_tree_s + (taken + sent) * table.beta_node_s + combined * table.gamma_s;
    let by_packets = |levels: u32| match levels {
        0 => 0.0,
        levels => 2.0 * f64::from(levels) * table.alpha_tree_s + n * each,
    };
    if !matches!(situation.attached(), Some(Attached::ByReference | Attached::ByRdma)) {
        return Ok(by_packets(tree.levels));
    }
    let leaf = 2.0 * table.alpha_reference_s + n * (taken + sent) * table.beta_reference_s;
    Ok(leaf + by_packets(tree.levels.saturating_sub(1)))
}

/// Return the cost of a schedule; its own formula, for elements of this operation's size.
fn judge_schedule(situation: &Situation, desc: &OpDesc, algorithm: &Algorithm) -> Result<f64, RuledOut> {
    let Situation { ranks, order, table, .. } = situation;
    if depends_on_order(*order, desc) {
        situation.declared.kept_by(algorithm).map_err(|why| RuledOut::Order {
            path: algorithm.path().name(),
            order: *order,
            why,
        })?;
    }
    let cost = algorithm.cost(*ranks, usize::try_from(desc.count).unwrap_or(usize::MAX));
    let each = desc.element_bytes() as f64;
    Ok(cost.seconds(table.alpha_step_s, table.beta_step_s * each, table.gamma_s * each))
}

fn bytes(desc: &OpDesc) -> f64 {
    desc.element_bytes() as f64 * desc.count as f64
}

fn knows(tree: &TreeFacts, desc: &OpDesc) -> bool {
    let has = |mask: u32, number: u8| mask & (1 << number) != 0;
    has(tree.collectives, desc.collective.to_wire())
        && desc.dtype.is_none_or(|dtype| has(tree.dtypes, dtype.to_wire()))
        && desc.op.is_none_or(|op| has(tree.ops, op.to_wire()))
}

/// Integer arithmetic wraps and the other operators pick: only what rounds depends on the order.
fn depends_on_order(order: Order, desc: &OpDesc) -> bool {
    let rounds = matches!(desc.op, Some(ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Avg | ReduceOp::PremulSum));
    order != Order::Arrival && rounds && desc.dtype.is_some_and(|dtype| !dtype.is_integer())
}
