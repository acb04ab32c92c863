//! Fits the constants of the cost model to measured times.
//!
//! The constants minimise the sum of the squared logarithms of modelled over measured times, and none is negative. Few
//! samples determine all of them: each is drawn towards its value in the table that the fit starts from, so weakly that
//! a constant which the samples do determine is hardly moved. What the model leaves unexplained becomes [`Curve`]s.
//!
//! Source of the method: non-negative least squares by coordinate descent, as in V. Franc, V. Hlavac, M. Navara,
//! "Sequential Coordinate-Wise Algorithm for the Non-negative Least Squares Problem", CAIP 2005.

use super::curve::{CURVES_MAX, Curve, CurveKind, POINTS_MAX, Point};
use super::model::{Form, Terms, dot, schedule_form, tree_form};
use super::table::{CONSTANTS, Constants, CostTable, Origin};
use super::{JobFacts, seconds_of};
use crate::schedule::ALGORITHMS;
use std::collections::BTreeMap;
use sumac_hal::op::{OpDesc, Path};
use thiserror::Error;

/// The weight of a constant's present value against one sample.
const PRIOR: f64 = 1e-4;

/// How often the overlapping parts of the forms are compared anew, for either kind of error.
const ROUNDS: usize = 12;

/// Sweeps of the coordinate descent.
const SWEEPS: usize = 4000;

/// A measured operation.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The job.
    pub facts: JobFacts,
    /// The operation.
    pub desc: OpDesc,
    /// The path that it took.
    pub path: Path,
    /// Its time in seconds, above 0.
    pub seconds: f64,
}

/// Why no table can be fitted.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum FitError {
    /// Too few samples to fit anything.
    #[error("{samples} measured operations are too few to fit a cost table; at least {CONSTANTS} are needed")]
    TooFew {
        /// The number of samples.
        samples: usize,
    },
    /// A measured time that is none.
    #[error("a time of {seconds} s was measured for {desc} by {path}; it must be above 0")]
    Time {
        /// The operation.
        desc: OpDesc,
        /// The path's name.
        path: &'static str,
        /// The time.
        seconds: f64,
    },
    /// More curves than a table can have.
    #[error("{found} curves are too many: a cost table has at most {CURVES_MAX}; measure fewer collectives at once")]
    Curves {
        /// The number of curves.
        found: usize,
    },
    /// A path that has no cost.
    #[error("{desc} by {path} is not an operation that the cost model knows")]
    Unknown {
        /// The operation.
        desc: OpDesc,
        /// The path's name.
        path: &'static str,
    },
}

/// A fitted table, with what it says about each sample.
#[derive(Debug, Clone)]
pub struct Fitted {
    /// The table.
    pub table: CostTable,
    /// By sample: the model's time in seconds, without corrections.
    pub modelled_s: Vec<f64>,
}

/// Fit a table to samples, starting from another one, whose overrides are kept. `date` is the present time, as RFC 3339
/// has it.
///
/// # Errors
/// [`FitError`] names the first sample that cannot be used.
pub fn fit(samples: &[Sample], base: &CostTable, date: &str) -> Result<Fitted, FitError> {
    if samples.len() < CONSTANTS {
        return Err(FitError::TooFew { samples: samples.len() });
    }
    let forms = samples.iter().map(form_of).collect::<Result<Vec<_>, _>>()?;
    let constants = Constants::from_array(solve(samples, &forms, &base.constants.to_array()));
    let modelled_s: Vec<f64> = forms.iter().map(|form| form.seconds(&constants)).collect();
    let curves = curves(samples, &modelled_s);
    if curves.len() > CURVES_MAX {
        return Err(FitError::Curves { found: curves.len() });
    }
    let origin = Origin::Calibrated { date: date.to_owned(), error: 0.0 };
    let mut table = CostTable { curves, overrides: base.overrides.clone(), ..CostTable::new(origin, constants) };
    let error = left_out_error(samples, &table, &modelled_s);
    table.origin = Origin::Calibrated { date: date.to_owned(), error };
    Ok(Fitted { table: table.sealed(), modelled_s })
}

fn form_of(sample: &Sample) -> Result<Form, FitError> {
    let Sample { facts, desc, path, seconds } = sample;
    if !(seconds.is_finite() && *seconds > 0.0) {
        return Err(FitError::Time { desc: *desc, path: path.name(), seconds: *seconds });
    }
    let unknown = FitError::Unknown { desc: *desc, path: path.name() };
    if *path == Path::Tree {
        return facts.tree.as_ref().map(|tree| tree_form(facts, tree, desc)).ok_or(unknown);
    }
    let mut of_collective = ALGORITHMS.iter().filter(|algorithm| algorithm.pattern.collective() == desc.collective);
    let algorithm = of_collective.find(|algorithm| algorithm.path() == *path);
    algorithm.map(|algorithm| schedule_form(facts, desc, algorithm)).ok_or(unknown)
}

/// Return the constants of the least errors, each the logarithm of the model's time over the measured one: half of a
/// time counts as much as twice of it. Relative errors, which are linear in the constants, serve as the start.
fn solve(samples: &[Sample], forms: &[Form], base: &Terms) -> Terms {
    let mut constants = *base;
    for _ in 0..ROUNDS {
        // Each sample's terms over its time: the model's time is to be 1.
        let row = |(form, sample): (&Form, &Sample)| {
            let (terms, rest_s) = form.linear_at(&constants);
            (terms.map(|often| often / sample.seconds), 1.0 - rest_s / sample.seconds)
        };
        let rows: Vec<(Terms, f64)> = forms.iter().zip(samples).map(row).collect();
        constants = least_squares(&rows, base);
    }
    let mut least = squared_logs(samples, forms, &constants);
    for _ in 0..ROUNDS {
        // Gauss and Newton's step, or as much of it as makes the error smaller.
        let row = |(form, sample): (&Form, &Sample)| {
            let (terms, rest_s) = form.linear_at(&constants);
            let modelled = (dot(&terms, &constants) + rest_s).max(f64::MIN_POSITIVE);
            (terms.map(|often| often / modelled), 1.0 - rest_s / modelled + (sample.seconds / modelled).ln())
        };
        let rows: Vec<(Terms, f64)> = forms.iter().zip(samples).map(row).collect();
        let whole = least_squares(&rows, base);
        let part =
            |share: f64| -> Terms { std::array::from_fn(|at| constants[at] + share * (whole[at] - constants[at])) };
        let error_at = |share: f64| (squared_logs(samples, forms, &part(share)), share);
        let Some((error, share)) = [1.0, 0.5, 0.25, 0.1].map(error_at).into_iter().find(|(error, _)| *error < least)
        else {
            break;
        };
        (constants, least) = (part(share), error);
    }
    constants
}

fn squared_logs(samples: &[Sample], forms: &[Form], constants: &Terms) -> f64 {
    let constants = Constants::from_array(*constants);
    let error = |(form, sample): (&Form, &Sample)| {
        (form.seconds(&constants).max(f64::MIN_POSITIVE) / sample.seconds).ln().powi(2)
    };
    forms.iter().zip(samples).map(error).sum()
}

/// Minimise the squares of `row . x - target`, with x >= 0.
fn least_squares(rows: &[(Terms, f64)], base: &Terms) -> Terms {
    // Scale the unknowns by what one of each contributes, as they differ by nine orders of magnitude.
    let scale: Terms = std::array::from_fn(|at| {
        let norm = rows.iter().map(|(row, _)| row[at] * row[at]).sum::<f64>().sqrt();
        if norm > 0.0 { 1.0 / norm } else { 0.0 }
    });
    let mut matrix = [[0.0; CONSTANTS]; CONSTANTS];
    let mut right = [0.0; CONSTANTS];
    for (row, target) in rows {
        let scaled: Terms = std::array::from_fn(|at| row[at] * scale[at]);
        for (at, line) in matrix.iter_mut().enumerate() {
            right[at] += scaled[at] * target;
            line.iter_mut().zip(&scaled).for_each(|(cell, other)| *cell += scaled[at] * other);
        }
    }
    let mut x: Terms = std::array::from_fn(|at| if scale[at] > 0.0 { base[at] / scale[at] } else { 0.0 });
    for at in 0..CONSTANTS {
        matrix[at][at] += PRIOR;
        right[at] += PRIOR * x[at];
    }
    for _ in 0..SWEEPS {
        for at in 0..CONSTANTS {
            let others = dot(&matrix[at], &x) - matrix[at][at] * x[at];
            x[at] = ((right[at] - others) / matrix[at][at]).max(0.0);
        }
    }
    // A constant that no sample depends on stays as it was.
    std::array::from_fn(|at| if scale[at] > 0.0 { x[at] * scale[at] } else { base[at] })
}

/// Return what the model leaves unexplained.
fn curves(samples: &[Sample], modelled_s: &[f64]) -> Vec<Curve> {
    // Times of the same operation are averaged in their logarithms.
    let mut found: BTreeMap<(CurveKind, u32), BTreeMap<u64, (f64, u32)>> = BTreeMap::new();
    for (sample, modelled) in samples.iter().zip(modelled_s) {
        let Some(kind) = CurveKind::of(&sample.facts, &sample.desc, sample.path) else { continue };
        let of_kind = found.entry((kind, sample.facts.ranks)).or_default();
        let point = of_kind.entry(super::bytes(&sample.desc) as u64).or_default();
        *point = (point.0 + (sample.seconds / modelled.max(f64::MIN_POSITIVE)).ln(), point.1 + 1);
    }
    let point = |(bytes, (sum, count)): (u64, (f64, u32))| {
        let factor = (sum / f64::from(count)).exp().clamp(1e-6, 1e6) as f32;
        Point { bytes, factor }
    };
    found
        .into_iter()
        .map(|((kind, ranks), points)| Curve {
            kind,
            ranks,
            points: points.into_iter().map(point).take(POINTS_MAX).collect(),
        })
        .collect()
}

/// Return the median relative error of the predictions that the table makes for each inner point of its curves without
/// that point.
fn left_out_error(samples: &[Sample], table: &CostTable, modelled_s: &[f64]) -> f64 {
    let mut errors = Vec::new();
    for (sample, modelled) in samples.iter().zip(modelled_s) {
        let kind = CurveKind::of(&sample.facts, &sample.desc, sample.path);
        let of_sample = |curve: &&Curve| Some(curve.kind) == kind && curve.ranks == sample.facts.ranks;
        let Some(curve) = table.curves.iter().find(of_sample) else { continue };
        let bytes = super::bytes(&sample.desc) as u64;
        let Some(at) = curve.points.iter().position(|point| point.bytes == bytes) else { continue };
        if at == 0 || at + 1 == curve.points.len() {
            continue;
        }
        let mut without = curve.clone();
        without.points.remove(at);
        errors.push((modelled * without.factor_at(bytes) / sample.seconds - 1.0).abs());
    }
    median(errors)
}

/// Return the median, 0 without values.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Predict the time of an operation by a path, with the table's corrections.
///
/// # Errors
/// [`FitError::Unknown`] if the path has no cost for the operation.
pub fn predict(table: &CostTable, facts: &JobFacts, desc: &OpDesc, path: Path) -> Result<f64, FitError> {
    let form = form_of(&Sample { facts: facts.clone(), desc: *desc, path, seconds: 1.0 })?;
    Ok(seconds_of(table, facts, desc, path, &form))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Shape;
    use crate::select::TreeFacts;
    use proptest::prelude::*;
    use sumac_hal::op::{Dtype, ReduceOp};

    const DATE: &str = "2026-01-31T12:00:00Z";

    fn facts(ranks: u32, levels: u32, is_zero_copy: bool) -> JobFacts {
        let tree = TreeFacts {
            levels,
            max_children: if levels == 1 { ranks } else { 2 },
            chunk_len_bytes: 8192,
            dtypes: u32::MAX,
            ops: u32::MAX,
            collectives: u32::MAX,
            zero_copy_ranks: if is_zero_copy { ranks } else { 0 },
            rdma_ranks: 0,
            over_verbs: false,
            shards: 1,
            links: None,
        };
        // Trees of several levels are those of several hosts.
        JobFacts { ranks, ranks_per_host: ranks.div_ceil(levels), shape: Shape::Line, tree: Some(tree) }
    }

    /// What a cluster would measure whose times are those of the table, each times a factor.
    fn measure(table: &CostTable, mut factor: impl FnMut(&JobFacts, u64, Path) -> f64) -> Vec<Sample> {
        let paths = [Path::Tree, Path::Ring, Path::HalvingDoubling, Path::RecursiveDoubling, Path::Binomial];
        let mut samples = Vec::new();
        for (ranks, levels, is_zero_copy) in [(2, 1, false), (4, 2, false), (8, 2, true), (4, 1, true), (2, 1, true)] {
            let facts = facts(ranks, levels, is_zero_copy);
            for count in (0..12).map(|power| 2_u64 << (2 * power)) {
                let desc = OpDesc::all_reduce(Dtype::F32, ReduceOp::Sum, count);
                for path in paths {
                    let exact = predict(table, &facts, &desc, path).expect("a cost");
                    let seconds = exact * factor(&facts, 4 * count, path);
                    samples.push(Sample { facts: facts.clone(), desc, path, seconds });
                }
            }
        }
        samples
    }

    fn errors(table: &CostTable, samples: &[Sample]) -> Vec<f64> {
        let error = |sample: &Sample| {
            predict(table, &sample.facts, &sample.desc, sample.path).expect("a cost") / sample.seconds - 1.0
        };
        samples.iter().map(|sample| error(sample).abs()).collect()
    }

    fn without_curves(table: &CostTable) -> CostTable {
        CostTable { curves: Vec::new(), ..table.clone() }
    }

    #[test]
    fn exact_times_are_reproduced_by_the_model_alone() {
        let constants = Constants {
            packet_node_s: 2e-6,
            beta_tree_shared_s: 0.1e-9,
            alpha_shared_s: 5e-6,
            beta_shared_s: 0.2e-9,
            beta_shm_shared_s: 0.05e-9,
            chunk_zero_copy_s: 1e-6,
            ..CostTable::emulated().constants
        };
        let truth = CostTable::new(Origin::Emulator, constants);
        let samples = measure(&truth, |_, _, _| 1.0);
        let fitted = fit(&samples, &CostTable::data_sheets(), DATE).expect("a table");
        let worst = errors(&without_curves(&fitted.table), &samples).into_iter().fold(0.0, f64::max);
        assert!(worst < 0.05, "{worst}: {:?}", fitted.table.constants);
    }

    #[test]
    fn curves_correct_times_that_the_model_cannot_explain() {
        // Caches: the ring takes three times as long from 1 MiB on.
        let cached = |_: &JobFacts, bytes: u64, path| if path == Path::Ring && bytes >= 1 << 20 { 3.0 } else { 1.0 };
        let samples = measure(&CostTable::emulated(), cached);
        let fitted = fit(&samples, &CostTable::emulated(), DATE).expect("a table");
        let alone = errors(&without_curves(&fitted.table), &samples).into_iter().fold(0.0, f64::max);
        let corrected = errors(&fitted.table, &samples).into_iter().fold(0.0, f64::max);
        assert!(alone > 0.2 && corrected < 1e-3, "{alone} {corrected}");
        let Origin::Calibrated { error, .. } = fitted.table.origin else { panic!("not calibrated") };
        assert!(error > 0.0 && error < 0.1, "{error}");
    }

    #[test]
    fn times_that_scatter_by_a_factor_are_met_in_the_middle() {
        let mut is_slow = false;
        let scattered = |_: &JobFacts, _, _| {
            is_slow = !is_slow;
            if is_slow { 3.0 } else { 1.0 / 3.0 }
        };
        let samples = measure(&CostTable::emulated(), scattered);
        let fitted = fit(&samples, &CostTable::emulated(), DATE).expect("a table");
        let logs = samples.iter().zip(&fitted.modelled_s).map(|(sample, modelled)| (modelled / sample.seconds).ln());
        let mean = logs.sum::<f64>() / samples.len() as f64;
        assert!(mean.abs() < 0.05, "{mean}");
    }

    #[test]
    fn constants_that_nothing_determines_stay() {
        let base = CostTable::emulated();
        let samples: Vec<Sample> =
            measure(&base, |_, _, _| 2.0).into_iter().filter(|sample| sample.path != Path::Tree).collect();
        let fitted = fit(&samples, &base, DATE).expect("a table").table.constants;
        assert_eq!(fitted.alpha_zero_copy_s, base.constants.alpha_zero_copy_s);
        assert_eq!(fitted.beta_tree_s, base.constants.beta_tree_s);
        assert!(fitted.alpha_step_s + fitted.alpha_shared_s > 1.5 * base.constants.alpha_step_s);
    }

    #[test]
    fn unusable_samples_are_refused_by_name() {
        let samples = measure(&CostTable::emulated(), |_, _, _| 1.0);
        let refused = |samples: &[Sample]| fit(samples, &CostTable::emulated(), DATE).expect_err("refused").to_string();
        assert!(refused(&samples[..3]).contains("3 measured"));
        let mut bad = samples.clone();
        bad[7].seconds = 0.0;
        assert!(refused(&bad).contains("a time of 0 s"), "{}", refused(&bad));
        let mut bad = samples;
        bad[7].path = Path::Dissemination;
        assert!(refused(&bad).contains("dissemination"), "{}", refused(&bad));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        /// Predictions with noise of 20 % pick a path that is at most that much slower than the best.
        #[test]
        fn fitted_table_picks_the_winner_within_the_noise(seed in any::<u64>()) {
            let mut state = seed | 1;
            let mut noise = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                0.9 + 0.2 * (state % 1000) as f64 / 1000.0
            };
            let truth = CostTable::emulated();
            let samples = measure(&truth, |_, _, _| noise());
            let fitted = fit(&samples, &CostTable::data_sheets(), DATE).expect("a table").table;
            for cell in samples.chunk_by(|a, b| a.facts == b.facts && a.desc == b.desc) {
                let time = |table: &CostTable, path| predict(table, &cell[0].facts, &cell[0].desc, path).expect("a cost");
                let best = |table: &CostTable| {
                    let paths = cell.iter().map(|sample| sample.path);
                    paths.min_by(|a, b| time(table, *a).total_cmp(&time(table, *b))).expect("paths")
                };
                let lost = time(&truth, best(&fitted)) / time(&truth, best(&truth));
                prop_assert!(lost <= 1.1 / 0.9 + 1e-9, "{lost} {}", cell[0].desc);
            }
        }
    }
}
