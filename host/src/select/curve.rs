//! Corrections of the cost model by measurements.
//!
//! The model's few constants cannot follow every effect of caches, kernels and schedulers. A curve holds, for one path
//! and kind of job, the measured time over the model's at several sizes. Predictions for jobs of that kind are
//! multiplied by the factor between the nearest points, interpolated in the logarithms of size and of the number of
//! ranks; beyond the last point its factor applies. Jobs of other kinds get the model alone.
//!
//! Ranks of one host share its cores with the devices that serve them. Those that serve packets take them for
//! microseconds at a time: a post of 8 ranks beside them took nine times as long as beside devices in shared memory. So
//! the times of host algorithms on one host are kept by the tree beside them. A job beside another tree than was
//! measured, or none, takes the curve of the tree that disturbs least.

use super::{JobFacts, TreeTransport};
use serde::{Deserialize, Serialize};
use sumac_hal::op::{Collective, OpDesc, Path};

/// The maximum number of curves of a table.
pub(super) const CURVES_MAX: usize = 1024;

/// The maximum number of points of a curve.
pub(super) const POINTS_MAX: usize = 32;

/// Measured times over predicted ones, by size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// What was measured.
    pub kind: CurveKind,
    /// The number of ranks.
    pub ranks: u32,
    /// The factors, by increasing size.
    pub points: Vec<Point>,
}

/// What a curve was measured with. It applies to operations of the same kind only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CurveKind {
    /// The collective.
    pub collective: Collective,
    /// The path.
    pub path: Path,
    /// The transport to the tree and the tree's levels. Of a host algorithm between ranks of one host, those of the
    /// tree beside it, and `None` if there is none; between several hosts always `None`.
    pub tree: Option<(TreeTransport, u32)>,
    /// Where the ranks are.
    pub placement: RankPlacement,
}

/// How ranks share hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RankPlacement {
    /// All on one host.
    OneHost,
    /// On several hosts, with so many ranks on the busiest.
    PerHost(u32),
}

/// A point of a curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Size of the operation in bytes.
    pub bytes: u64,
    /// The measured time over the predicted one.
    pub factor: f32,
}

impl CurveKind {
    /// What an operation by this path is. `None` for a tree that ranks reach in different ways.
    pub(super) fn of(facts: &JobFacts, desc: &OpDesc, path: Path) -> Option<Self> {
        let placement = match facts.ranks_per_host >= facts.ranks {
            true => RankPlacement::OneHost,
            false => RankPlacement::PerHost(facts.ranks_per_host),
        };
        let tree = facts.tree.as_ref().map(|tree| (tree.transport(facts.ranks), tree.levels));
        let tree = tree.filter(|(transport, _)| !matches!(transport, TreeTransport::Mixed { .. }));
        let tree = match (path, placement) {
            (Path::Tree, _) => Some(tree?),
            (_, RankPlacement::OneHost) => tree,
            (_, RankPlacement::PerHost(_)) => None,
        };
        Some(Self { collective: desc.collective, path, tree, placement })
    }
}

/// Return the measured kind that applies to operations of this kind: the same or, of a host algorithm, that beside
/// another tree.
fn measured_kind(curves: &[Curve], kind: CurveKind) -> Option<CurveKind> {
    let kinds = || curves.iter().filter(|curve| !curve.points.is_empty()).map(|curve| curve.kind);
    let is_other = |one: &CurveKind| kind.path != Path::Tree && CurveKind { tree: kind.tree, ..*one } == kind;
    let others = || kinds().filter(is_other).max_by_key(|one| (one.tree.is_none(), one.tree));
    kinds().find(|one| *one == kind).or_else(others)
}

/// Return whether operations of this kind were measured.
pub(super) fn is_measured(curves: &[Curve], kind: CurveKind) -> bool {
    measured_kind(curves, kind).is_some()
}

/// Return the factor for an operation of `bytes` over `ranks` ranks, 1 if none was measured of this kind.
pub(super) fn correction(curves: &[Curve], kind: CurveKind, ranks: u32, bytes: u64) -> f64 {
    let Some(kind) = measured_kind(curves, kind) else { return 1.0 };
    let of_kind = || curves.iter().filter(|curve| curve.kind == kind && !curve.points.is_empty());
    let below = of_kind().filter(|curve| curve.ranks <= ranks).max_by_key(|curve| curve.ranks);
    let above = of_kind().filter(|curve| curve.ranks >= ranks).min_by_key(|curve| curve.ranks);
    match (below, above) {
        (None, None) => 1.0,
        (Some(only), None) | (None, Some(only)) => only.factor_at(bytes),
        (Some(below), Some(above)) => interpolate(
            f64::from(ranks),
            (f64::from(below.ranks), below.factor_at(bytes)),
            (f64::from(above.ranks), above.factor_at(bytes)),
        ),
    }
}

impl Curve {
    /// The factor at a size.
    pub(super) fn factor_at(&self, bytes: u64) -> f64 {
        let at = self.points.partition_point(|point| point.bytes < bytes);
        let place = |point: &Point| (point.bytes.max(1) as f64, f64::from(point.factor));
        match (at.checked_sub(1).and_then(|below| self.points.get(below)), self.points.get(at)) {
            (Some(below), Some(above)) => interpolate(bytes as f64, place(below), place(above)),
            (Some(only), None) | (None, Some(only)) => f64::from(only.factor),
            (None, None) => 1.0,
        }
    }
}

/// Interpolate between two points, both coordinates by their logarithms. All are positive.
fn interpolate(x: f64, (x0, y0): (f64, f64), (x1, y1): (f64, f64)) -> f64 {
    if x1 <= x0 {
        return y0;
    }
    let share = ((x / x0).ln() / (x1 / x0).ln()).clamp(0.0, 1.0);
    (y0.ln() + share * (y1.ln() - y0.ln())).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: CurveKind = CurveKind {
        collective: Collective::AllReduce,
        path: Path::Ring,
        tree: None,
        placement: RankPlacement::OneHost,
    };

    fn curve(ranks: u32, points: &[(u64, f32)]) -> Curve {
        let points = points.iter().map(|&(bytes, factor)| Point { bytes, factor }).collect();
        Curve { kind: KIND, ranks, points }
    }

    #[test]
    fn factor_is_interpolated_between_points_and_constant_beyond() {
        let curve = curve(4, &[(16, 2.0), (256, 8.0)]);
        for (bytes, factor) in [(0, 2.0), (16, 2.0), (64, 4.0), (256, 8.0), (1 << 40, 8.0)] {
            assert!((curve.factor_at(bytes) - factor).abs() < 1e-6, "{bytes}: {}", curve.factor_at(bytes));
        }
    }

    #[test]
    fn factor_is_interpolated_between_numbers_of_ranks() {
        let curves = [curve(2, &[(8, 1.0)]), curve(8, &[(8, 4.0)])];
        for (ranks, factor) in [(1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0), (64, 4.0)] {
            let found = correction(&curves, KIND, ranks, 8);
            assert!((found - factor).abs() < 1e-6, "{ranks}: {found}");
        }
    }

    #[test]
    fn jobs_of_another_kind_are_not_corrected() {
        let curves = [curve(2, &[(8, 3.0)])];
        let others = [
            CurveKind { path: Path::Tree, ..KIND },
            CurveKind { collective: Collective::Reduce, ..KIND },
            CurveKind { placement: RankPlacement::PerHost(1), ..KIND },
            CurveKind { path: Path::Tree, tree: Some((TreeTransport::Shm, 1)), ..KIND },
        ];
        assert!(others.iter().all(|&kind| correction(&curves, kind, 2, 8) == 1.0));
    }

    /// A post of ranks on one machine, beside devices that serve packets, and beside those in shared memory.
    #[test]
    fn host_algorithm_has_the_curve_of_the_tree_beside_it() {
        let beside = |tree, factor| Curve { kind: CurveKind { tree, ..KIND }, ..curve(4, &[(8, factor)]) };
        let [udp, shm] = [TreeTransport::Packets, TreeTransport::Shm].map(|transport| Some((transport, 1)));
        let curves = [beside(udp, 9.0), beside(shm, 1.5)];
        let factor = |curves: &[Curve], tree| correction(curves, CurveKind { tree, ..KIND }, 4, 8);
        assert_eq!([udp, shm, None].map(|tree| factor(&curves, tree)), [9.0, 1.5, 1.5]);
        assert_eq!(factor(&curves[..1], shm), 9.0, "no other was measured");
        let alone = [curves[0].clone(), curves[1].clone(), beside(None, 1.25)];
        assert_eq!(factor(&alone, Some((TreeTransport::Verbs, 2))), 1.25);
        // Not so the tree itself.
        let of_tree = |tree| CurveKind { path: Path::Tree, tree, ..KIND };
        let curves = [Curve { kind: of_tree(udp), ..curves[0].clone() }];
        assert!(is_measured(&curves, of_tree(udp)) && !is_measured(&curves, of_tree(shm)));
    }
}
