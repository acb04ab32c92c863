//! Why this plan: what each way of an all-reduce would take on this fabric, hosts and order of ranks, and why other
//! roots lost.

use super::render::{bytes, cable, plural, seconds};
use super::search::{RunnerUp, runners_up};
use super::select::Ranks;
use super::{Limits, PlanError, Trees, counted, evaluate, index::FabricIndex, ring};
use crate::schedule::Shape;
use crate::topo::Fabric;
use serde::Serialize;
use std::fmt::Write as _;

/// What each way would take, and why other roots lost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    /// How the ranks lie.
    pub shape: String,
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
    /// What the busiest cables of all steps carry together, in lengths of the message; `None` for trees.
    pub load: Option<f64>,
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

/// Up to how many messages an algorithm's routes are followed: those of every algorithm for 64 ranks.
const MESSAGES_MAX: f64 = 24_576.0;
/// From 8 B to 1 GiB.
const POWERS: std::ops::RangeInclusive<u32> = 3..=30;
/// The sizes of a table are so many powers of two apart.
const LINE_EVERY: usize = 3;
/// How many other roots are told.
const ROOTS_MAX: usize = 16;

pub(super) fn explain(
    fabric: &Fabric,
    index: &FabricIndex,
    (ranks, limits): (&Ranks, &Limits),
    (trees, shape): (&Trees, Shape),
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
        load: None,
        times: times(&|bytes| tree.seconds(bytes)),
    }];
    if trees.trees.len() > 1 {
        let levels = trees.trees.iter().map(|tree| tree.plan.levels).max().unwrap_or(0);
        algorithms.push(Algorithm {
            name: format!("{} trees", trees.trees.len()),
            steps: 2 * levels as u64,
            limit: trees.limit_text(fabric),
            load: None,
            times: times(&|bytes| trees.seconds(fabric, limits, bytes)),
        });
    }
    let places: Vec<usize> = (0..plan.ranks.len()).collect();
    let mut job = ring::Job::new(fabric, index, (plan, &places), pricing);
    let mut by_hosts = ring::algorithms(&mut job).unwrap_or_default();
    by_hosts.extend(counted::counted(&mut job, shape, &by_hosts, MESSAGES_MAX).unwrap_or_default());
    for algorithm in by_hosts {
        let limit = algorithm.busiest().map_or_else(String::new, |(link, count)| {
            let count = (count * 100.0).round() / 100.0;
            format!("{count} {} on the cable {}", plural(count.ceil() as usize, "message"), cable(fabric, link))
        });
        let (name, steps, load) = (algorithm.path.name().into(), algorithm.steps(), Some(algorithm.load()));
        algorithms.push(Algorithm {
            name,
            steps,
            limit,
            load,
            times: times(&|bytes| algorithm.seconds(bytes, pricing)),
        });
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
    Ok(Explanation { shape: shape.to_string(), algorithms, crossings, roots })
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
        let mut text = format!("algorithms, in the order of ranks ({}):\n", self.shape);
        for way in &self.algorithms {
            let load = way.load.map_or(String::new(), |load| format!("load {load:.3}; "));
            let _ = writeln!(text, "  {:<13} {:>6} steps; {load}{}", way.name, way.steps, way.limit);
        }
        let sizes = || (0..self.algorithms[0].times.len()).step_by(LINE_EVERY);
        let _ = write!(text, "  {:<13}", "seconds of");
        for nth in sizes() {
            let _ = write!(text, " {:>9}", bytes(self.algorithms[0].times[nth].bytes));
        }
        for way in &self.algorithms {
            let _ = write!(text, "\n  {:<13}", way.name);
            for nth in sizes() {
                let _ = write!(text, " {:>9}", seconds(way.times[nth].seconds));
            }
        }
        text.push('\n');
        let crossings = self.crossings.iter().map(|one| format!("{} from {}", one.algorithm, bytes(one.from_bytes)));
        let _ = writeln!(text, "fastest: {}", crossings.collect::<Vec<_>>().join(", "));
        for other in &self.roots {
            let factor = other.factor.map_or("slower".into(), |factor| format!("{factor:.2} times the time"));
            let _ = writeln!(text, "root {}: {factor}: {}", other.root, other.reason);
        }
        text
    }
}
