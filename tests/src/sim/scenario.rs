//! What happens to a cluster besides faulty links, and what each rank has to be told then.

use super::deaths::draw_deaths;
use super::faults::moment;
use super::loss::Loss;
use super::options::{Draw, Options, draw_op};
use super::reference::ByReference;
use crate::oracle::weight;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The kinds of scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScenarioKind {
    /// Nothing but the links' faults: every rank gets every result.
    Calm,
    /// One or two ranks call something else, or all what no device can do: all ranks get every earlier result, then the
    /// same `Mismatch`, or `Unsupported`.
    Mismatch,
    /// A device stops answering: who depends on it gets `PathLost` within the limit, nobody a wrong result.
    Death,
    /// A device loses its state; then maybe the group starts again, in a new epoch.
    Restart,
    /// Somebody sends garbage, replays, and all that a member of another group may: nobody notices.
    Hostile,
    /// Devices, links and the controller are lost, and the ranks repair: every rank gets every result.
    Repair,
    /// Ranks are lost, and perhaps a device and the controller too: those that are left agree on who it was, and on which
    /// results all have.
    Ranks,
    /// Ranks contribute by reference, and engines, devices and ranks fail: every rank gets every result, or those that are
    /// left agree on which.
    Reference,
}

/// What happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scenario {
    /// Nothing.
    Calm,
    /// Some ranks call other operations.
    Mismatch {
        /// The group.
        group: usize,
        /// The operation's index.
        op: usize,
        /// Who calls what instead.
        calls: Vec<(usize, OpDesc)>,
    },
    /// A device stops.
    Death {
        /// Which.
        device: usize,
        /// When.
        at: Duration,
    },
    /// A device starts with empty tables.
    Restart {
        /// Which.
        device: usize,
        /// When.
        at: Duration,
        /// The controller starts all groups again in the next epoch, and ranks begin anew.
        again: bool,
    },
    /// An attacker works at random moments.
    Hostile,
    /// This is lost, and repaired.
    Repair {
        /// What, and when.
        losses: Vec<Loss>,
    },
    /// This is lost, ranks among it.
    Ranks {
        /// What, and when.
        losses: Vec<Loss>,
    },
    /// Ranks contribute by reference.
    Reference(ByReference),
}

impl Scenario {
    /// Return of which kind it is.
    pub fn kind(&self) -> ScenarioKind {
        match self {
            Self::Calm => ScenarioKind::Calm,
            Self::Mismatch { .. } => ScenarioKind::Mismatch,
            Self::Death { .. } => ScenarioKind::Death,
            Self::Restart { .. } => ScenarioKind::Restart,
            Self::Hostile => ScenarioKind::Hostile,
            Self::Repair { .. } => ScenarioKind::Repair,
            Self::Ranks { .. } => ScenarioKind::Ranks,
            Self::Reference(_) => ScenarioKind::Reference,
        }
    }

    /// Tell whether all ranks call, alike, what no device can do.
    pub(super) fn is_unsupported(&self) -> bool {
        let is_known =
            |desc: &OpDesc| desc.dtype.zip(desc.op).is_none_or(|(dtype, op)| Kernel::new(dtype, op).is_some());
        matches!(self, Self::Mismatch { calls, .. } if calls.iter().any(|(_, desc)| !is_known(desc)))
    }

    pub(super) fn draw(kind: ScenarioKind, draw: &mut Draw, options: &Options) -> Self {
        let devices = options.trees.iter().map(super::wiring::count_nodes).max().unwrap_or(1) as u64;
        match kind {
            ScenarioKind::Calm => Self::Calm,
            ScenarioKind::Hostile => Self::Hostile,
            ScenarioKind::Repair => Self::Repair { losses: Loss::draw_all(draw, options, options.devices()) },
            ScenarioKind::Ranks => Self::Ranks { losses: draw_deaths(draw, options) },
            ScenarioKind::Reference => unreachable!("its clusters are drawn otherwise"),
            ScenarioKind::Mismatch => draw_mismatch(draw, options),
            ScenarioKind::Death => {
                let at = moment(draw);
                Self::Death { device: draw.below(devices) as usize, at }
            }
            ScenarioKind::Restart => {
                let at = moment(draw);
                Self::Restart { device: draw.below(devices) as usize, at, again: draw.chance(500) }
            }
        }
    }
}

/// Give one rank, or two, another call than the rest; with the same number of chunks, with more and with fewer.
fn draw_mismatch(draw: &mut Draw, options: &Options) -> Scenario {
    let group = draw.below(options.groups.len() as u64) as usize;
    let ops = &options.groups[group].ops;
    let op = draw.below(ops.len() as u64) as usize;
    let common = ops[op];
    // Apart from the other draws, so that these stay what they were without it.
    if Draw::new(weight(&[options.seed, 4])).chance(80) {
        let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Bxor, 1 + common.count);
        return Scenario::Mismatch { group, op, calls: (0..options.ranks).map(|rank| (rank, desc)).collect() };
    }
    let mut calls = Vec::new();
    for _ in 0..1 + draw.below(2) {
        let rank = draw.below(options.ranks as u64) as usize;
        if calls.iter().all(|(other, _)| *other != rank) && calls.len() + 1 < options.ranks {
            calls.push((rank, other_call(draw, options.ranks, &common)));
        }
    }
    Scenario::Mismatch { group, op, calls }
}

fn other_call(draw: &mut Draw, ranks: usize, common: &OpDesc) -> OpDesc {
    let other_root = Rank((common.root.0 + 1) % ranks as u32);
    let Some(dtype) = common.dtype else {
        return OpDesc { count: draw.below(300), ..draw_op(draw, ranks) };
    };
    let count = common.count;
    let fits = |dtype, op: Option<ReduceOp>| op.is_none_or(|op| Kernel::new(dtype, op).is_some());
    match draw.below(6) {
        0 => OpDesc::barrier(),
        1 => {
            let others = Dtype::ALL.iter().copied().filter(|&other| other != dtype && fits(other, common.op));
            OpDesc { dtype: Some(draw.one_of(&others.collect::<Vec<_>>())), ..*common }
        }
        2 if common.op.is_some() => {
            let others = ReduceOp::ALL.iter().copied().map(Some).filter(|&op| op != common.op && fits(dtype, op));
            OpDesc { op: draw.one_of(&others.collect::<Vec<_>>()), ..*common }
        }
        3 if common.collective.is_rooted() => OpDesc { root: other_root, ..*common },
        4 if common.collective != Collective::Broadcast => OpDesc::broadcast(dtype, other_root, count),
        4 => OpDesc::all_gather(dtype, count),
        _ => OpDesc { count: if draw.chance(500) { count + 1 } else { count * 2 + 1 + draw.below(200) }, ..*common },
    }
}
