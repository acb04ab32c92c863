//! Scenarios: what happens to a cluster besides link faults, and how each rank must end.

use super::deaths::draw_deaths;
use super::faults::moment;
use super::loss::Loss;
use super::options::{Draw, Options, draw_op};
use super::paths::{PathLimit, draw_paths};
use super::zero_copy::ZeroCopy;
use crate::oracle::weight;
use std::time::Duration;
use sumac_hal::ids::Rank;
use sumac_hal::op::{Collective, Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The kinds of scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScenarioKind {
    /// Link faults only: every rank gets every result.
    Calm,
    /// One or two ranks call a different operation, or all call one that no device supports: all ranks get every
    /// earlier result, then the same `Mismatch` or `Unsupported`.
    Mismatch,
    /// A device stops: ranks that depend on it get `PathLost` within the limit, and no rank gets a wrong result.
    Death,
    /// A device loses its state; the group may then restart in a new epoch.
    Restart,
    /// An attacker sends garbage, replays, and everything that a member of another group can: no rank is affected.
    Hostile,
    /// Devices, links and the controller are lost, and the ranks recover: every rank gets every result.
    Recovery,
    /// Ranks are lost, and perhaps a device and the controller: the survivors agree on which ranks, and on the results
    /// that all have.
    Ranks,
    /// Zero-copy ranks, with failing engines, devices and ranks: every rank gets every result, or the survivors agree
    /// on which.
    ZeroCopy,
    /// Zero-copy ranks whose leaf device stalls, so that they sever their memory from it, and goes on meanwhile: every
    /// rank gets every result, or the error that says that its output is unknown.
    Severing,
    /// Paths that carry shorter packets than others, and become narrower or wider: every rank gets every result, by
    /// trees whose packets fit.
    Paths,
}

/// A scenario with its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scenario {
    /// Link faults only.
    Calm,
    /// Some ranks call other operations.
    Mismatch {
        /// Index of the group.
        group: usize,
        /// Index of the operation.
        op: usize,
        /// The ranks that differ, and their calls.
        calls: Vec<(usize, OpDesc)>,
    },
    /// A device stops.
    Death {
        /// Index of the device.
        device: usize,
        /// When, after the start.
        at: Duration,
    },
    /// A device restarts with empty tables.
    Restart {
        /// Index of the device.
        device: usize,
        /// When, after the start.
        at: Duration,
        /// The controller restarts all groups in the next epoch, and all ranks start again.
        again: bool,
    },
    /// An attacker sends packets at random times.
    Hostile,
    /// Losses that ranks recover from.
    Recovery {
        /// What is lost, and when.
        losses: Vec<Loss>,
    },
    /// Losses that include ranks.
    Ranks {
        /// What is lost, and when.
        losses: Vec<Loss>,
    },
    /// Zero-copy ranks.
    ZeroCopy(ZeroCopy),
    /// Paths of different widths.
    Paths {
        /// Those that are narrow from the start.
        limits: Vec<PathLimit>,
        /// What changes or is lost, and when.
        losses: Vec<Loss>,
    },
}

impl Scenario {
    /// Return the scenario's kind.
    pub fn kind(&self) -> ScenarioKind {
        match self {
            Self::Calm => ScenarioKind::Calm,
            Self::Mismatch { .. } => ScenarioKind::Mismatch,
            Self::Death { .. } => ScenarioKind::Death,
            Self::Restart { .. } => ScenarioKind::Restart,
            Self::Hostile => ScenarioKind::Hostile,
            Self::Recovery { .. } => ScenarioKind::Recovery,
            Self::Ranks { .. } => ScenarioKind::Ranks,
            Self::ZeroCopy(by) if by.severs => ScenarioKind::Severing,
            Self::ZeroCopy(_) => ScenarioKind::ZeroCopy,
            Self::Paths { .. } => ScenarioKind::Paths,
        }
    }

    /// Return whether all ranks make the same unsupported call.
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
            ScenarioKind::Recovery => Self::Recovery { losses: Loss::draw_all(draw, options, options.devices()) },
            ScenarioKind::Paths => {
                let (limits, losses) = draw_paths(options);
                Self::Paths { limits, losses }
            }
            ScenarioKind::Ranks => Self::Ranks { losses: draw_deaths(draw, options) },
            ScenarioKind::ZeroCopy | ScenarioKind::Severing => unreachable!("its clusters are drawn otherwise"),
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

/// Let one or two ranks make another call than the rest: with as many chunks, more, or fewer.
fn draw_mismatch(draw: &mut Draw, options: &Options) -> Scenario {
    let group = draw.below(options.groups.len() as u64) as usize;
    let ops = &options.groups[group].ops;
    let op = draw.below(ops.len() as u64) as usize;
    let common = ops[op];
    // Drawn separately, so that the other draws of a seed stay the same.
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
