//! Which way an operation between GPUs takes, and what each would cost.
//!
//! Direct schedules cost what [`crate::select`] says of them with the group's table, times the ranks that share a
//! GPU. Staged, every byte also goes down and up between GPU and host, [`HOST_BETA_S`] each. NCCL has its own model's
//! constants.

use super::join::NetworkCost;
use super::{PeerOptions, WhyStaged};
use crate::gpu::nccl::why_not;
use crate::select::{Algo, Candidate, CostTable, Explanation, RuledOut, Situation, explain_with};
use std::fmt;
use sumac_hal::op::{Collective, OpDesc, Path};

/// Seconds a byte between GPU and host, one way: PCIe 5.0's 63 GB/s on 16 lanes. Not measured.
pub const HOST_BETA_S: f64 = 1.0 / 63e9;

/// NCCL's latency in seconds, as its own model has it for rings by its protocol for small messages over NVLink: at the
/// start, and a step (src/graph/tuning.cc of 2.30.7: 6.6 us and 0.6 us).
const NCCL_ALPHA_S: (f64, f64) = (6.6e-6, 0.6e-6);

/// The way an operation takes.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Way {
    /// From GPU to GPU, by this schedule.
    Direct(Path),
    /// By NCCL.
    Nccl,
    /// Through pinned memory and the network, and why.
    Staged(WhyStaged),
}

/// What each way would cost, and the choice.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerExplanation {
    /// The direct ways and NCCL, with costs or reasons; `chosen` is `None` if none is possible.
    pub direct: Explanation,
    /// Why no schedule goes directly, if that is so.
    pub why_staged: Option<WhyStaged>,
    /// What it would cost through the network, in seconds, if that is known.
    pub staged_s: Option<f64>,
    /// The choice; or the first reason against what was asked for.
    pub way: Result<Way, RuledOut>,
}

impl fmt::Display for PeerExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.direct)?;
        if let Some(why) = &self.why_staged {
            writeln!(f, "  schedules over GPU memory ruled out: {why}")?;
        }
        let mark = if matches!(self.way, Ok(Way::Staged(_))) { '*' } else { ' ' };
        match self.staged_s {
            Some(cost) => writeln!(f, "{mark} {:<13} {:>12.1} us", "staged", cost * 1e6),
            None => writeln!(f, "{mark} {:<13} the network does not say what it costs", "staged"),
        }
    }
}

/// What a choice depends on.
pub(super) struct Choice<'a> {
    pub(super) situation: &'a Situation,
    pub(super) options: &'a PeerOptions,
    /// Why schedules can't go directly.
    pub(super) why_staged: Option<&'a WhyStaged>,
    /// Why there is no NCCL.
    pub(super) no_nccl: Option<&'a str>,
    /// What the network costs, as rank 0 sees it.
    pub(super) network: Option<NetworkCost>,
}

impl Choice<'_> {
    pub(super) fn explain(&self, desc: &OpDesc, algo: Algo) -> PeerExplanation {
        let nccl = Candidate { path: Path::Nccl, cost_s: self.judge_nccl(desc) };
        let mut direct = explain_with(self.situation, desc, algo, vec![nccl]);
        if let Some(why) = self.why_staged {
            for candidate in direct.candidates.iter_mut().filter(|candidate| is_schedule(candidate.path)) {
                candidate.cost_s = candidate.cost_s.clone().and(Err(RuledOut::NotDirect(why.to_string())));
            }
            let nccl = direct.candidates.iter().find(|candidate| candidate.path == Path::Nccl);
            let is_possible = nccl.is_some_and(|candidate| candidate.cost_s.is_ok());
            let is_wanted = matches!(algo, Algo::Auto | Algo::Nccl);
            direct.chosen = (is_possible && is_wanted).then_some(Path::Nccl);
        }
        let each_s = 2.0 * bytes(desc) * HOST_BETA_S;
        let staged_s = self.network.map(|network| network.seconds(bytes(desc)) + each_s);
        let way = self.way(&direct, staged_s, desc, algo);
        PeerExplanation { direct, why_staged: self.why_staged.cloned(), staged_s, way }
    }

    fn way(&self, direct: &Explanation, staged_s: Option<f64>, desc: &OpDesc, algo: Algo) -> Result<Way, RuledOut> {
        let is_open = algo == Algo::Auto && desc.collective == Collective::AllReduce;
        if is_open && self.options.network_first {
            return Ok(Way::Staged(WhyStaged::Asked));
        }
        let Some(path) = direct.chosen else {
            return match self.why_staged.filter(|_| is_open) {
                Some(why) => Ok(Way::Staged(why.clone())),
                None => Err(direct.refusal().cloned().unwrap_or(RuledOut::NotDirect("no way is possible".into()))),
            };
        };
        let direct_s = direct.candidates.iter().find(|candidate| candidate.path == path);
        let direct_s = direct_s.and_then(|candidate| candidate.cost_s.as_ref().ok().copied());
        if let (true, Some(direct_s), Some(staged_s)) = (is_open, direct_s, staged_s)
            && staged_s < direct_s
        {
            return Ok(Way::Staged(WhyStaged::Cost { direct_us: direct_s * 1e6, staged_us: staged_s * 1e6 }));
        }
        Ok(if path == Path::Nccl { Way::Nccl } else { Way::Direct(path) })
    }

    fn judge_nccl(&self, desc: &OpDesc) -> Result<f64, RuledOut> {
        if let Some(why) = why_not(self.situation.order, desc) {
            return Err(why);
        }
        if let Some(why) = self.no_nccl {
            return Err(RuledOut::Nccl(why.to_owned()));
        }
        let CostTable { beta_step_s, .. } = self.situation.table;
        let ranks = f64::from(self.situation.ranks);
        let steps = 2.0 * (ranks - 1.0);
        Ok(NCCL_ALPHA_S.0 + steps * NCCL_ALPHA_S.1 + steps / ranks * bytes(desc) * beta_step_s)
    }
}

fn bytes(desc: &OpDesc) -> f64 {
    desc.element_bytes() as f64 * desc.count as f64
}

const fn is_schedule(path: Path) -> bool {
    !matches!(path, Path::Tree | Path::Nccl)
}
