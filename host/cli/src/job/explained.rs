//! `sumac perf --explain`: which path the ranks would select, and why, without running anything.

use super::Case;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use sumac::Path;
use sumac::select::Explanation;

/// One rank's selection for one case. Its fields are the keys of the JSON object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Explained {
    /// The operation.
    operation: String,
    /// The requested algorithm.
    requested: String,
    /// The path that the controller's overrides ask for.
    overridden: Option<String>,
    /// The selected path; `None` if the requested algorithm is not possible.
    chosen: Option<String>,
    /// The transport to the tree, if there is one: `shm`, `udp`, `verbs`, `rdma` or `mixed`.
    transport: Option<String>,
    /// Every path that the collective has.
    candidates: Vec<Candidate>,
    /// Where their costs come from.
    costs: String,
}

/// A path that was considered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Candidate {
    path: String,
    /// Its estimated time in microseconds, if it is possible.
    cost_us: Option<f64>,
    /// The first condition that rules it out.
    ruled_out: Option<String>,
}

impl Explained {
    /// Convert the library's explanation of a case.
    pub(crate) fn new(case: &Case, explanation: &Explanation) -> Self {
        let candidates = explanation.candidates.iter().map(|candidate| Candidate {
            path: candidate.path.name().into(),
            cost_us: candidate.cost_s.as_ref().ok().map(|cost_s| cost_s * 1e6),
            ruled_out: candidate.cost_s.as_ref().err().map(ToString::to_string),
        });
        Self {
            operation: case.desc().to_string(),
            requested: explanation.requested.name().into(),
            overridden: explanation.overridden.map(|path| path.name().into()),
            chosen: explanation.chosen.map(|path| path.name().into()),
            transport: explanation.transport.map(|transport| transport.name().into()),
            candidates: candidates.collect(),
            costs: explanation.origin.to_string(),
        }
    }

    /// Print it as a paragraph, or as one JSON object on a line.
    pub(crate) fn write(&self, out: &mut impl Write, json: bool) -> io::Result<()> {
        if json {
            serde_json::to_writer(&mut *out, self)?;
            return writeln!(out);
        }
        write!(out, "{}, requested {}", self.operation, self.requested)?;
        if let Some(path) = &self.overridden {
            write!(out, ", overridden to {path}")?;
        }
        writeln!(out, "; costs: {}", self.costs)?;
        for Candidate { path, cost_us, ruled_out } in &self.candidates {
            let mark = if self.chosen.as_ref() == Some(path) { '*' } else { ' ' };
            match (cost_us, ruled_out) {
                (Some(cost_us), _) => {
                    let how = match self.transport.as_deref() {
                        Some("shm") if path == Path::Tree.name() => "  zero-copy",
                        Some("mixed") if path == Path::Tree.name() => "  zero-copy for some ranks",
                        _ => "",
                    };
                    writeln!(out, "  {mark} {path:<14} {cost_us:>12.1} us{how}")?;
                }
                (None, why) => writeln!(out, "  {mark} {path:<14} ruled out: {}", why.as_deref().unwrap_or(""))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Algo;
    use sumac::select::Origin;
    use sumac_hal::op::{Collective, Dtype, ReduceOp};

    #[test]
    fn explanation_lists_costs_and_reasons() {
        let (collective, dtype, op) = (Collective::AllReduce, Dtype::F32, ReduceOp::Sum);
        let case = Case { collective, dtype, op, root: 0, count: 2, algo: Algo::Auto };
        let ruled_out = sumac::select::RuledOut::NoTree("no device is connected".into());
        let explanation = Explanation {
            requested: Algo::Auto,
            candidates: vec![
                sumac::select::Candidate { path: Path::Tree, cost_s: Err(ruled_out) },
                sumac::select::Candidate { path: Path::Ring, cost_s: Ok(2.5e-6) },
            ],
            chosen: Some(Path::Ring),
            overridden: Some(Path::Tree),
            transport: None,
            origin: Origin::DataSheets,
        };
        let explained = Explained::new(&case, &explanation);
        let mut text = Vec::new();
        explained.write(&mut text, false).expect("memory");
        let text = String::from_utf8(text).expect("text");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "all_reduce f32 sum x 2, requested auto, overridden to tree; costs: data sheets, not calibrated"
        );
        assert!(lines[1].contains("ruled out: there is no tree: no device is connected"), "{text}");
        assert!(lines[2].starts_with("  * ring") && lines[2].ends_with("2.5 us"), "{text}");
        let mut json = Vec::new();
        explained.write(&mut json, true).expect("memory");
        assert_eq!(serde_json::from_slice::<Explained>(&json).expect("JSON"), explained);
    }

    #[test]
    fn explanation_marks_a_zero_copy_tree() {
        let candidate = |path: Path| Candidate { path: path.name().into(), cost_us: Some(1.0), ruled_out: None };
        let explained = Explained {
            operation: "barrier".into(),
            requested: "auto".into(),
            overridden: None,
            chosen: None,
            transport: Some("shm".into()),
            candidates: vec![candidate(Path::Tree), candidate(Path::Dissemination)],
            costs: String::new(),
        };
        let mut text = Vec::new();
        explained.write(&mut text, false).expect("memory");
        let text = String::from_utf8(text).expect("text");
        let marked: Vec<bool> = text.lines().skip(1).map(|line| line.ends_with("us  zero-copy")).collect();
        assert_eq!(marked, [true, false], "{text}");
    }
}
