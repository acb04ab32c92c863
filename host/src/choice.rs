//! Which way an operation takes, and why: an alpha-beta-gamma model with a table that the controller hands out.
//!
//! Ranks never decide from measurements of their own (PROTOCOL 2): the table and its version come with the group,
//! the version is part of every operation's signature, and the same call gives the same choice everywhere. "Not
//! possible" is a named reason ([`RuledOut`]), never a silent infinite cost.
//!
//! Costs in seconds for n bytes over N ranks, from the table's alpha (s a message), beta (s a byte moved through one
//! process) and gamma (s a byte combined):
//!
//! | path | cost | source |
//! |---|---|---|
//! | tree | 2 L alpha + n (2 beta + c (2 beta_node + gamma)) | each of L levels up and down; the node with c children takes in, combines and sends c n bytes, and is the bottleneck of a pipeline of chunks |
//! | ring | 2 (N-1) alpha + 2 (N-1)/N n beta + (N-1)/N n gamma | Patarasuk and Yuan 2009 |
//! | hd, N = 2^k | 2 log2 N alpha + 2 (N-1)/N n beta + (N-1)/N n gamma | Rabenseifner 2004 |
//! | dissemination (barriers) | ceil(log2 N) alpha | Hensgen, Finkel and Manber 1988 |
//! | hd, else, N' = 2^floor(log2 N) | (2 log2 N' + 2) alpha + (2 (N'-1)/N' + 2) n beta + ((N'-1)/N' + 1) n gamma | the same, extra ranks folded in and out |

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Collective, OpDesc, Path};
use sumac_hal::reduce::Kernel;
use thiserror::Error;

/// What the caller asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Algo {
    /// The cheapest that is possible.
    #[default]
    Auto,
    /// Through the tree, or an error.
    Tree,
    /// By ring, or an error.
    Ring,
    /// By halving-doubling, or an error.
    HalvingDoubling,
}

impl Algo {
    /// Return its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Tree => "tree",
            Self::Ring => "ring",
            Self::HalvingDoubling => "hd",
        }
    }

    const fn forced(self) -> Option<Path> {
        match self {
            Self::Auto => None,
            Self::Tree => Some(Path::Tree),
            Self::Ring => Some(Path::Ring),
            Self::HalvingDoubling => Some(Path::HalvingDoubling),
        }
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A name that is no algorithm's.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is no algorithm; known are auto, tree, ring and hd")]
pub struct UnknownAlgo(String);

impl FromStr for Algo {
    type Err = UnknownAlgo;

    fn from_str(text: &str) -> Result<Self, UnknownAlgo> {
        match text {
            "auto" => Ok(Self::Auto),
            "tree" => Ok(Self::Tree),
            "ring" => Ok(Self::Ring),
            "hd" => Ok(Self::HalvingDoubling),
            _ => Err(UnknownAlgo(text.to_owned())),
        }
    }
}

/// The model's constants.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct CostTable {
    /// Raised with each change; part of every signature.
    pub version: u32,
    /// Seconds a hop of the tree, one way.
    pub alpha_tree_s: f64,
    /// Seconds a step of a schedule.
    pub alpha_step_s: f64,
    /// Seconds a byte that a rank sends and receives through the tree.
    pub beta_tree_s: f64,
    /// Seconds a byte that a rank sends and receives by a schedule.
    pub beta_step_s: f64,
    /// Seconds a byte that a node takes in and sends out.
    pub beta_node_s: f64,
    /// Seconds a byte combined.
    pub gamma_s: f64,
}

impl CostTable {
    /// For emulated devices on one machine, where ranks and devices take turns on its cores: fitted by eye to
    /// medians of `sumac perf` with 4 ranks, two levels, on 2 cores (AMD EPYC, Linux 6.18), where 8 B took 80 us
    /// through the tree, 210 us by ring and 150 us by halving-doubling, and 16 MiB 21 to 45 ms, 28 ms and 29 ms. On
    /// one machine each device is one more process that copies every byte, so large messages choose a schedule
    /// there; a network's own table has the device's line rate for `beta_node_s`.
    pub const EMULATED: Self = Self {
        version: 1,
        alpha_tree_s: 20e-6,
        alpha_step_s: 36e-6,
        beta_tree_s: 0.30e-9,
        beta_step_s: 1.10e-9,
        beta_node_s: 0.20e-9,
        gamma_s: 0.02e-9,
    };
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
}

/// What ranks know of their tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeFacts {
    /// Node levels.
    pub levels: u32,
    /// The most children of a node.
    pub max_children: u32,
    /// Made of aligned power-of-two blocks of ranks.
    pub aligned: bool,
    /// Bit n: all nodes know element type number n.
    pub dtypes: u32,
    /// Bit n: all nodes know operator number n.
    pub ops: u32,
    /// Bit n: all nodes know collective number n.
    pub collectives: u32,
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
        why: &'static str,
    },
    /// The schedule has no such collective.
    #[error("{path} is no schedule for {collective}")]
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
    /// The path taken: the one forced, or the cheapest; `None` if it is not possible.
    pub chosen: Option<Path>,
}

impl Explanation {
    /// Return why the tree is not taken, if the caller left the choice open and it is not possible: a fallback.
    pub fn fallback(&self) -> Option<&RuledOut> {
        let tree = self.candidates.iter().find(|candidate| candidate.path == Path::Tree)?;
        tree.cost_s.as_ref().err().filter(|_| self.requested == Algo::Auto && self.chosen.is_some())
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
        for Candidate { path, cost_s } in &self.candidates {
            let mark = if Some(*path) == self.chosen { '*' } else { ' ' };
            match cost_s {
                Ok(cost) => writeln!(f, "{mark} {:<13} {:>12.1} us", path.name(), cost * 1e6)?,
                Err(reason) => writeln!(f, "{mark} {:<13} ruled out: {reason}", path.name())?,
            }
        }
        Ok(())
    }
}

/// Judge every path for an operation and choose.
pub fn explain(situation: &Situation, desc: &OpDesc, requested: Algo) -> Explanation {
    let candidates: Vec<Candidate> = [Path::Tree, Path::Ring, Path::HalvingDoubling, Path::Dissemination]
        .into_iter()
        .map(|path| Candidate { path, cost_s: judge(situation, desc, path) })
        .collect();
    let possible = candidates.iter().filter_map(|candidate| Some((candidate.path, *candidate.cost_s.as_ref().ok()?)));
    let chosen = match requested.forced() {
        Some(forced) => possible.map(|(path, _)| path).find(|&path| path == forced),
        None => possible.min_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(path, _)| path),
    };
    Explanation { requested, candidates, chosen }
}

fn judge(situation: &Situation, desc: &OpDesc, path: Path) -> Result<f64, RuledOut> {
    let Situation { ranks, table, .. } = situation;
    let bytes = desc.element_bytes() as f64 * desc.count as f64;
    let n = f64::from(*ranks);
    let share = (n - 1.0) / n;
    match path {
        Path::Tree => {
            let tree = situation.tree.as_ref().map_err(|why| RuledOut::NoTree(why.clone()))?;
            if !knows(tree, desc) {
                return Err(RuledOut::Unsupported(*desc));
            }
            let node = f64::from(tree.max_children) * (2.0 * table.beta_node_s + table.gamma_s);
            Ok(2.0 * f64::from(tree.levels) * table.alpha_tree_s + bytes * (2.0 * table.beta_tree_s + node))
        }
        Path::Ring | Path::HalvingDoubling if desc.collective != Collective::AllReduce => {
            Err(RuledOut::Collective { path: path.name(), collective: desc.collective })
        }
        Path::Ring => {
            let path = path.name();
            if depends_on_order(situation.order, desc) {
                let why = "each block is added up from another rank on";
                return Err(RuledOut::Order { path, order: situation.order, why });
            }
            Ok(2.0 * (n - 1.0) * table.alpha_step_s + share * bytes * (2.0 * table.beta_step_s + table.gamma_s))
        }
        Path::HalvingDoubling => {
            if depends_on_order(situation.order, desc) {
                halving_doubling_keeps(situation)?;
            }
            let whole = f64::from(1_u32 << ranks.ilog2());
            let share = (whole - 1.0) / whole;
            let extra = if ranks.is_power_of_two() { 0.0 } else { 1.0 };
            Ok((2.0 * whole.log2() + 2.0 * extra) * table.alpha_step_s
                + bytes * ((2.0 * share + 2.0 * extra) * table.beta_step_s + (share + extra) * table.gamma_s))
        }
        Path::Dissemination if desc.collective == Collective::Barrier => Ok(n.log2().ceil() * table.alpha_step_s),
        _ => Err(RuledOut::Collective { path: path.name(), collective: desc.collective }),
    }
}

fn knows(tree: &TreeFacts, desc: &OpDesc) -> bool {
    let has = |mask: u32, number: u8| mask & (1 << number) != 0;
    has(tree.collectives, desc.collective.to_wire())
        && desc.dtype.is_none_or(|dtype| has(tree.dtypes, dtype.to_wire()))
        && desc.op.is_none_or(|op| has(tree.ops, op.to_wire()))
}

/// Integer arithmetic wraps and minima and maxima pick: only sums and products of floats depend on the order.
fn depends_on_order(order: Order, desc: &OpDesc) -> bool {
    let kernel = desc.dtype.zip(desc.op).and_then(|(dtype, op)| Kernel::new(dtype, op));
    order != Order::Arrival && kernel.is_some_and(|kernel| kernel.depends_on_order())
}

/// Halving-doubling evaluates pairs, pairs of pairs, ... of ranks: the bits of an aligned pairwise tree.
fn halving_doubling_keeps(situation: &Situation) -> Result<(), RuledOut> {
    let why = match &situation.tree {
        _ if situation.order != Order::TreePairwise => "it combines pairwise",
        _ if !situation.ranks.is_power_of_two() => "the number of ranks is not a power of two",
        Ok(tree) if !tree.aligned => "the tree is not made of aligned power-of-two blocks of ranks",
        _ => return Ok(()),
    };
    Err(RuledOut::Order { path: Path::HalvingDoubling.name(), order: situation.order, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac_hal::op::{Dtype, ReduceOp};

    const TREE: TreeFacts =
        TreeFacts { levels: 2, max_children: 2, aligned: true, dtypes: u32::MAX, ops: u32::MAX, collectives: u32::MAX };

    fn situation(ranks: u32, order: Order, tree: Result<TreeFacts, String>) -> Situation {
        Situation { ranks, order, tree, table: CostTable::EMULATED }
    }

    fn sum(count: u64) -> OpDesc {
        OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count)
    }

    #[test]
    fn costs_follow_the_formulas() {
        let table = CostTable {
            version: 1,
            alpha_tree_s: 1.0,
            alpha_step_s: 1.0,
            beta_tree_s: 0.0,
            beta_step_s: 1.0,
            beta_node_s: 0.0,
            gamma_s: 0.0,
        };
        let at =
            |ranks, path| judge(&Situation { table, ..situation(ranks, Order::Arrival, Ok(TREE)) }, &sum(60), path);
        // 240 bytes.
        assert_eq!(at(4, Path::Tree), Ok(4.0));
        assert_eq!(at(4, Path::Ring), Ok(6.0 + 360.0));
        assert_eq!(at(4, Path::HalvingDoubling), Ok(4.0 + 360.0));
        assert_eq!(at(6, Path::HalvingDoubling), Ok(6.0 + 360.0 + 480.0));
    }

    #[test]
    fn what_is_forced_is_taken_or_refused_by_name() {
        let none = situation(4, Order::Arrival, Err("device leaf0 is not connected".into()));
        let forced = explain(&none, &sum(8), Algo::Tree);
        assert_eq!(forced.chosen, None);
        assert_eq!(forced.refusal(), Some(&RuledOut::NoTree("device leaf0 is not connected".into())));
        assert_eq!(forced.fallback(), None);
        let open = explain(&none, &sum(8), Algo::Auto);
        assert!(open.chosen.is_some() && open.fallback().is_some(), "{open}");
        let ring = explain(&situation(4, Order::Arrival, Ok(TREE)), &sum(8), Algo::Ring);
        assert_eq!((ring.chosen, ring.fallback()), (Some(Path::Ring), None));
    }

    #[test]
    fn order_rules_schedules_out() {
        let judge =
            |order, ranks, tree, path, desc: OpDesc| judge(&situation(ranks, order, Ok(tree)), &desc, path).is_ok();
        let (ring, hd) = (Path::Ring, Path::HalvingDoubling);
        assert!(!judge(Order::TreePairwise, 4, TREE, ring, sum(8)));
        assert!(judge(Order::TreePairwise, 4, TREE, hd, sum(8)));
        assert!(!judge(Order::TreePairwise, 6, TREE, hd, sum(8)));
        assert!(!judge(Order::TreeFold, 4, TREE, hd, sum(8)));
        assert!(!judge(Order::TreePairwise, 4, TreeFacts { aligned: false, ..TREE }, hd, sum(8)));
        let max = OpDesc::all_reduce(Dtype::F32, ReduceOp::Max, 8);
        assert!(judge(Order::TreeFold, 6, TREE, ring, max), "maxima don't depend on the order");
        assert!(!judge(Order::Arrival, 4, TREE, ring, OpDesc::barrier()));
    }

    #[test]
    fn a_missing_capability_is_named() {
        let tree = TreeFacts { dtypes: 0, ..TREE };
        let found = explain(&situation(4, Order::Arrival, Ok(tree)), &sum(8), Algo::Tree);
        assert_eq!(found.refusal(), Some(&RuledOut::Unsupported(sum(8))));
    }
}
