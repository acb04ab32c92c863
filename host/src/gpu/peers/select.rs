//! Selects the transport of an operation between GPUs, by estimated cost.
//!
//! Direct schedules cost what [`crate::select`] computes with the group's table, times the ranks that share a GPU.
//! Staged, every byte is also copied down and up between GPU and host, at [`HOST_BETA_S`] each. NCCL uses the constants
//! of its own model.

use super::join::NetworkCost;
use super::{PeerOptions, WhyStaged};
use crate::gpu::nccl::why_not;
use crate::select::{Algo, Candidate, Constants, Explanation, RuledOut, SelectionContext, explain_with};
use std::fmt;
use sumac_hal::op::{Collective, OpDesc, Path};

/// Seconds for each byte between GPU and host, one direction: PCIe 5.0's 63 GB/s on 16 lanes. Not measured.
pub const HOST_BETA_S: f64 = 1.0 / 63e9;

/// NCCL's latency in seconds, from its own model for rings with its protocol for small messages over NVLink: for the
/// start, and for each step (src/graph/tuning.cc of 2.30.7: 6.6 us and 0.6 us).
const NCCL_ALPHA_S: (f64, f64) = (6.6e-6, 0.6e-6);

/// The transport of an operation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum PeerTransport {
    /// Directly from GPU to GPU, with this algorithm.
    Direct(Path),
    /// By NCCL.
    Nccl,
    /// Through pinned memory and the network, for this reason.
    Staged(WhyStaged),
}

/// Estimated costs, and the selection.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerExplanation {
    /// Direct algorithms and NCCL, with costs or reasons; `chosen` is `None` if none is possible.
    pub direct: Explanation,
    /// Why no direct schedule is possible, if so.
    pub why_staged: Option<WhyStaged>,
    /// Estimated cost through the network in seconds, if known.
    pub staged_s: Option<f64>,
    /// The selection, or the first reason against what was requested.
    pub transport: Result<PeerTransport, RuledOut>,
}

impl fmt::Display for PeerExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.direct)?;
        if let Some(why) = &self.why_staged {
            writeln!(f, "  schedules over GPU memory ruled out: {why}")?;
        }
        let mark = if matches!(self.transport, Ok(PeerTransport::Staged(_))) { '*' } else { ' ' };
        match self.staged_s {
            Some(cost) => writeln!(f, "{mark} {:<13} {:>12.1} us", "staged", cost * 1e6),
            None => writeln!(f, "{mark} {:<13} cost unknown", "staged"),
        }
    }
}

/// Inputs of the selection.
pub(super) struct PeerSelection<'a> {
    pub(super) selection: &'a SelectionContext,
    pub(super) options: &'a PeerOptions,
    /// Why direct schedules are impossible, if so.
    pub(super) why_staged: Option<&'a WhyStaged>,
    /// Why NCCL is unavailable, if so.
    pub(super) no_nccl: Option<&'a str>,
    /// Cost of the network as estimated by rank 0.
    pub(super) network: Option<NetworkCost>,
}

impl PeerSelection<'_> {
    pub(super) fn explain(&self, desc: &OpDesc, algo: Algo) -> PeerExplanation {
        let nccl = Candidate { path: Path::Nccl, cost_s: self.nccl_cost(desc) };
        let mut direct = explain_with(self.selection, desc, algo, vec![nccl]);
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
        let transport = self.transport(&direct, staged_s, desc, algo);
        PeerExplanation { direct, why_staged: self.why_staged.cloned(), staged_s, transport }
    }

    fn transport(
        &self,
        direct: &Explanation,
        staged_s: Option<f64>,
        desc: &OpDesc,
        algo: Algo,
    ) -> Result<PeerTransport, RuledOut> {
        let is_open = algo == Algo::Auto && desc.collective == Collective::AllReduce;
        if is_open && self.options.network_first {
            return Ok(PeerTransport::Staged(WhyStaged::Asked));
        }
        let Some(path) = direct.chosen else {
            return match self.why_staged.filter(|_| is_open) {
                Some(why) => Ok(PeerTransport::Staged(why.clone())),
                None => {
                    Err(direct.refusal().cloned().unwrap_or(RuledOut::NotDirect("no transport is possible".into())))
                }
            };
        };
        let direct_s = direct.candidates.iter().find(|candidate| candidate.path == path);
        let direct_s = direct_s.and_then(|candidate| candidate.cost_s.as_ref().ok().copied());
        if let (true, Some(direct_s), Some(staged_s)) = (is_open, direct_s, staged_s)
            && staged_s < direct_s
        {
            return Ok(PeerTransport::Staged(WhyStaged::Cost { direct_us: direct_s * 1e6, staged_us: staged_s * 1e6 }));
        }
        Ok(if path == Path::Nccl { PeerTransport::Nccl } else { PeerTransport::Direct(path) })
    }

    fn nccl_cost(&self, desc: &OpDesc) -> Result<f64, RuledOut> {
        if let Some(why) = why_not(self.selection.order, desc) {
            return Err(why);
        }
        if let Some(why) = self.no_nccl {
            return Err(RuledOut::Nccl(why.to_owned()));
        }
        let Constants { beta_step_s, .. } = self.selection.table.constants;
        let ranks = f64::from(self.selection.ranks);
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
