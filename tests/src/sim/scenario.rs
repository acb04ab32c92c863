//! What happens to a cluster besides faulty links, and what each rank has to be told then.

use super::options::{Draw, Options, draw_all_reduce};
use std::time::Duration;
use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The kinds of scenario.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScenarioKind {
    /// Nothing but the links' faults: every rank gets every result.
    Calm,
    /// One or two ranks call something else: all ranks get every earlier result, then the same `Mismatch`.
    Mismatch,
    /// A device stops answering: who depends on it gets `PathLost` within the limit, nobody a wrong result.
    Death,
    /// A device loses its state; then maybe the group starts again, in a new epoch.
    Restart,
    /// Somebody sends garbage, replays, and all that a member of another group may: nobody notices.
    Hostile,
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
}

impl Scenario {
    pub(super) fn draw(kind: ScenarioKind, draw: &mut Draw, options: &mut Options) -> Self {
        let devices = options.trees.iter().map(super::wiring::count_nodes).max().unwrap_or(1) as u64;
        // Most runs take less than a hundred round trips; a moment among those is likely to hit something.
        let moment = |draw: &mut Draw| {
            let scale = draw.one_of(&[14, 17, 20, 23, 29]);
            Duration::from_nanos(draw.below(1 << scale))
        };
        match kind {
            ScenarioKind::Calm => Self::Calm,
            ScenarioKind::Hostile => Self::Hostile,
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
fn draw_mismatch(draw: &mut Draw, options: &mut Options) -> Scenario {
    let group = draw.below(options.groups.len() as u64) as usize;
    let ops = &mut options.groups[group].ops;
    let op = draw.below(ops.len() as u64) as usize;
    if ops[op].dtype.is_some() {
        // Without elements it would use no chunk, and nobody could notice that it differs.
        ops[op].count = ops[op].count.max(1);
    }
    let common = ops[op];
    let mut calls = Vec::new();
    for _ in 0..1 + draw.below(2) {
        let rank = draw.below(options.ranks as u64) as usize;
        if calls.iter().all(|(other, _)| *other != rank) && calls.len() + 1 < options.ranks {
            calls.push((rank, other_call(draw, &common)));
        }
    }
    Scenario::Mismatch { group, op, calls }
}

fn other_call(draw: &mut Draw, common: &OpDesc) -> OpDesc {
    let (Some(dtype), Some(reduce)) = (common.dtype, common.op) else {
        return OpDesc { count: 1 + draw.below(300), ..draw_all_reduce(draw) };
    };
    let count = common.count.max(1);
    match draw.below(4) {
        0 => OpDesc::barrier(),
        1 => {
            let fits = |other: &Dtype| *other != dtype && Kernel::new(*other, reduce).is_some();
            let others: Vec<Dtype> = Dtype::ALL.iter().copied().filter(fits).collect();
            OpDesc::all_reduce(draw.one_of(&others), reduce, count)
        }
        2 => {
            let fits = |other: &ReduceOp| *other != reduce && Kernel::new(dtype, *other).is_some();
            let others: Vec<ReduceOp> = ReduceOp::ALL.iter().copied().filter(fits).collect();
            OpDesc::all_reduce(dtype, draw.one_of(&others), count)
        }
        _ => OpDesc::all_reduce(dtype, reduce, if draw.chance(500) { count + 1 } else { count * 2 + draw.below(200) }),
    }
}
