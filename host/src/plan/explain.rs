//! Why this plan: what each way of an all-reduce would take on this fabric, hosts and order of ranks, and why other
//! roots lost.

use super::render::{bytes, cable, plural, seconds};
use super::search::{RunnerUp, runners_up};
use super::select::Ranks;
use super::{Limits, PlanError, Trees, evaluate, index::FabricIndex, ring};
use crate::topo::Fabric;
use serde::Serialize;
use std::fmt::Write as _;

/// What each way would take, and why other roots lost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// The algorithms, the planned trees first.
    pub algorithms: Vec<Algorithm>,
    /// Which way is the fastest from which size on.
    pub crossings: Vec<Crossing>,
    /// Other roots, the fastest first.
    pub roots: Vec<OtherRoot>,
}

/// A way to run an all-reduce.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Algorithm {
    /// Its name.
    pub name: String,
    /// Messages one after the other.
    pub steps: u64,
    /// What limits it for long messages: a cable and what it carries.
    pub limit: String,
    /// The predicted seconds for each power of two from 8 B to 1 GiB.
    pub times: Vec<SizeTime>,
}

/// A size and a time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct SizeTime {
    /// The message, in bytes.
    pub bytes: u64,
    /// The predicted seconds.
    pub seconds: f64,
}

/// A size from which on a way is the fastest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Crossing {
    /// The first power of two, in bytes.
    pub from_bytes: u64,
    /// The name of the way.
    pub algorithm: String,
}

/// A root that lost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OtherRoot {
    /// The switch.
    pub root: String,
    /// How many times the time its best tree takes; `None` if a lower bound of its times ruled it out.
    pub factor: Option<f64>,
    /// Why.
    pub reason: String,
}

/// From 8 B to 1 GiB.
const POWERS: std::ops::RangeInclusive<u32> = 3..=30;
/// The sizes of a table's lines are so many powers of two apart.
const LINE_EVERY: usize = 3;
/// How many other roots are told.
const ROOTS_MAX: usize = 16;

pub(super) fn explain(
    fabric: &Fabric,
    index: &FabricIndex,
    (ranks, limits): (&Ranks, &Limits),
    trees: &Trees,
) -> Result<Explanation, PlanError> {
    let (plan, pricing) = (&trees.trees[0].plan, &limits.pricing);
    let times = |time: &dyn Fn(u64) -> f64| {
        let sizes = POWERS.map(|power| 1 << power);
        sizes.map(|bytes| SizeTime { bytes, seconds: time(bytes) }).collect::<Vec<_>>()
    };
    let tree = evaluate::Evaluation::new(fabric, plan, limits);
    let limit = plan.bottleneck_text(fabric, plan.prediction.bottleneck);
    let mut algorithms = vec![Algorithm {
        name: "tree".into(),
        steps: 2 * plan.levels as u64,
        limit,
        times: times(&|bytes| tree.seconds(bytes)),
    }];
    if trees.trees.len() > 1 {
        let levels = trees.trees.iter().map(|tree| tree.plan.levels).max().unwrap_or(0);
        algorithms.push(Algorithm {
            name: format!("{} trees", trees.trees.len()),
            steps: 2 * levels as u64,
            limit: trees.limit_text(fabric),
            times: times(&|bytes| trees.seconds(fabric, limits, bytes)),
        });
    }
    for algorithm in ring::algorithms(fabric, index, plan, pricing).unwrap_or_default() {
        let limit = algorithm.busiest().map_or_else(String::new, |(link, count)| {
            format!("{count} {} on the cable {}", plural(count as usize, "message"), cable(fabric, link))
        });
        let times = times(&|bytes| algorithm.seconds(bytes, pricing));
        algorithms.push(Algorithm { name: algorithm.name.into(), steps: algorithm.steps(), limit, times });
    }
    let mut crossings: Vec<Crossing> = Vec::new();
    for nth in 0..algorithms[0].times.len() {
        let best = algorithms.iter().min_by(|a, b| a.times[nth].seconds.total_cmp(&b.times[nth].seconds));
        let Some(best) = best else { continue };
        if crossings.last().is_none_or(|last| last.algorithm != best.name) {
            crossings.push(Crossing { from_bytes: best.times[nth].bytes, algorithm: best.name.clone() });
        }
    }
    let own = plan.prediction.times.clone();
    let others = runners_up(fabric, index, ranks, limits)?;
    let others = others.into_iter().filter(|other| other.root != plan.root().switch).take(ROOTS_MAX);
    let roots = others.map(|other| other_root(fabric, &own, plan.levels, &other)).collect();
    Ok(Explanation { algorithms, crossings, roots })
}

fn other_root(fabric: &Fabric, own: &[(u64, f64)], levels: usize, other: &RunnerUp) -> OtherRoot {
    let root = fabric.switch(other.root).name.clone();
    let Some(best) = &other.best else {
        let reason = "the least distance and the slowest cable leave no chance".into();
        return OtherRoot { root, factor: None, reason };
    };
    let factors: Vec<f64> = own.iter().zip(best.times).map(|((_, own), other)| other / own).collect();
    let product: f64 = factors.iter().product();
    let factor = product.powf(1.0 / factors.len() as f64);
    let mut reasons = Vec::new();
    for ((bytes_of, _), factor) in own.iter().zip(&factors).filter(|(_, factor)| **factor > 1.0 + 1e-9) {
        reasons.push(format!("{factor:.2} times as long for {}", bytes(*bytes_of)));
    }
    if best.levels > levels {
        reasons.push(format!("{} levels", best.levels));
    }
    if let Some((link, edges)) = best.busiest {
        reasons.push(format!("{edges} {} on the cable {}", plural(edges as usize, "edge"), cable(fabric, link)));
    }
    if factor < 1.0 - 1e-9 {
        reasons.insert(0, "faster, but the edges of all jobs would spread less evenly over cables".into());
    } else if factor <= 1.0 + 1e-9 {
        reasons.insert(0, "as fast; later by the rules for equal times".into());
    }
    OtherRoot { root, factor: Some(factor), reason: reasons.join(", ") }
}

impl Explanation {
    /// Render it as lines of text, each ending in a newline.
    pub fn to_text(&self) -> String {
        let mut text = String::from("algorithms, in the order of ranks:\n");
        for way in &self.algorithms {
            let _ = writeln!(text, "  {:<19} {:>6} steps; {}", way.name, way.steps, way.limit);
        }
        let _ = write!(text, "{:>9}", "size");
        for way in &self.algorithms {
            let _ = write!(text, " {:>19}", way.name);
        }
        text.push_str("  fastest\n");
        for nth in (0..self.algorithms[0].times.len()).step_by(LINE_EVERY) {
            let size = self.algorithms[0].times[nth].bytes;
            let _ = write!(text, "{:>9}", bytes(size));
            for way in &self.algorithms {
                let _ = write!(text, " {:>19}", seconds(way.times[nth].seconds));
            }
            let best = self.crossings.iter().rev().find(|crossing| crossing.from_bytes <= size);
            let _ = writeln!(text, "  {}", best.map_or("", |best| best.algorithm.as_str()));
        }
        let crossings = self.crossings.iter().map(|one| format!("{} from {}", one.algorithm, bytes(one.from_bytes)));
        let _ = writeln!(text, "fastest: {}", crossings.collect::<Vec<_>>().join(", "));
        for other in &self.roots {
            let factor = other.factor.map_or("slower".into(), |factor| format!("{factor:.2} times the time"));
            let _ = writeln!(text, "root {}: {factor}: {}", other.root, other.reason);
        }
        text
    }
}
