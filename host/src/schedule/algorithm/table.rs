//! The table of all algorithms.

use super::size::cost;
use super::{Algorithm, Cost, Pattern, host_tree, shaped};
use crate::schedule::{
    bine, binomial, bruck, chain, dissemination, double_tree, full_mesh, halving_doubling, hierarchical_pairwise,
    hierarchical_ring, mesh_2d, nhr, one_shot, pairwise, pat, recursive_doubling, ring, ring_2d, star, swing, torus_2d,
    tree, van_de_geijn,
};
use sumac_hal::op::Path;

macro_rules! algorithms {
    ($($name:literal $path:ident $pattern:ident $follows_tree:literal: |$problem:ident| $schedule:expr, |$size:ident| $cost:expr;)*) => {
        /// Every algorithm, by collective; the formulas of their costs are in the table of
        /// [`schedule`](crate::schedule).
        pub const ALGORITHMS: &[Algorithm] = &[$(Algorithm {
            name: $name,
            path: Path::$path,
            pattern: Pattern::$pattern,
            follows_tree: $follows_tree,
            schedule: |$problem| $schedule,
            cost: |$size| $cost,
        }),*];
    };
}

algorithms! {
    "ring::all_reduce" Ring AllReduce false: |x| ring::all_reduce(x.place, x.count),
        |s| cost(2.0 * (s.p - 1.0), 2.0 * s.rest(), s.rest(), 2.0 * s.rest()).by_all((2.0 * s.pairs_of_ranks(), 2.0 * s.once()));
    "halving_doubling::all_reduce" HalvingDoubling AllReduce false: |x| halving_doubling::all_reduce(x.place, x.count), |s| cost(
        2.0 * (s.log_floor + s.folds()),
        2.0 * (s.rest_of_floor() + s.n * s.folds()),
        s.rest_of_floor() + s.n * s.folds(),
        2.0 * s.rest_of_floor() + s.n * s.folds(),
    ).by_all((2.0 * (s.exchanges() + s.folded()), 2.0 * s.once()));
    "recursive_doubling::all_reduce" RecursiveDoubling AllReduce false: |x| recursive_doubling::all_reduce(x.place, x.count), |s| cost(
        s.log_floor + 2.0 * s.folds(),
        s.n * (s.log_floor + 2.0 * s.folds()),
        s.n * (s.log_floor + s.folds()),
        s.n * (s.log_floor + s.folds()),
    ).by_all((s.exchanges() + 2.0 * s.folded(), s.n * (s.exchanges() + 2.0 * s.folded())));
    "binomial::all_reduce" Binomial AllReduce false: |x| binomial::all_reduce(x.place, x.count),
        |s| cost(2.0 * s.log_ceil, 2.0 * s.n * s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil).by_all((2.0 * (s.p - 1.0), 2.0 * s.once()));
    "tree::all_reduce" HostTree AllReduce true: |x| tree::all_reduce(x.place, x.count, x.tree),
        |s| host_tree::cost_of(s, Pattern::AllReduce);
    "pairwise::all_reduce" Pairwise AllReduce true: |x| pairwise::all_reduce(x.place, x.count, x.tree),
        |s| cost(s.p - 1.0 + s.log_ceil, 2.0 * s.rest(), s.rest(), 2.0 * s.rest()).by_all((s.pairs_of_ranks() + s.p * s.log_ceil, 2.0 * s.once()));
    "binomial::reduce" Binomial Reduce false: |x| binomial::reduce(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil.min(1.0)).by_all((s.p - 1.0, s.once()));
    "tree::reduce" HostTree Reduce true: |x| tree::reduce(x.place, x.count, x.tree, x.root),
        |s| host_tree::cost_of(s, Pattern::Reduce);
    "binomial::broadcast" Binomial Broadcast false: |x| binomial::broadcast(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, 0.0, s.n * s.log_ceil).by_all((s.p - 1.0, s.once()));
    "ring::reduce_scatter" Ring ReduceScatter false: |x| ring::reduce_scatter(x.place, x.count),
        |s| cost(s.p - 1.0, s.rest(), s.rest(), s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "halving_doubling::reduce_scatter" HalvingDoubling ReduceScatter false: |x| halving_doubling::reduce_scatter(x.place, x.count),
        |s| match s.is_power {
            true => cost(s.log_floor, s.rest(), s.rest(), s.rest()).by_all((s.exchanges(), s.once())),
            false => Cost {
                is_bound: true,
                ..cost(s.log_floor + 2.0, s.n + s.pairs() + s.n / s.p, s.n + s.pairs(), s.n + s.pairs())
                    .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            },
        };
    "pairwise::reduce_scatter" Pairwise ReduceScatter true: |x| pairwise::reduce_scatter(x.place, x.count, x.tree),
        |s| cost(s.p - 1.0, s.rest(), s.rest(), s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "ring::all_gather" Ring AllGather false: |x| ring::all_gather(x.place, x.count),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "halving_doubling::all_gather" HalvingDoubling AllGather false: |x| halving_doubling::all_gather(x.place, x.count),
        |s| match s.is_power {
            true => cost(s.log_floor, s.rest(), 0.0, s.rest()).by_all((s.exchanges(), s.once())),
            false => Cost {
                is_bound: true,
                ..cost(s.log_floor + 2.0, s.n / s.p + s.pairs() + s.n, 0.0, s.pairs() + s.n)
                    .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            },
        };
    "bruck::all_gather" Bruck AllGather false: |x| bruck::all_gather(x.place, x.count),
        |s| cost(s.log_ceil, s.rest(), 0.0, s.rest()).by_all((s.p * s.log_ceil, s.once()));
    "binomial::gather" Binomial Gather false: |x| binomial::gather(x.place, x.count, x.root), |s| {
        let half = s.log_ceil.exp2() / 2.0;
        let largest = (half / 2.0).max(s.p - half) * s.log_ceil.min(1.0);
        cost(s.log_ceil, s.rest(), 0.0, s.n * largest / s.p).by_all((s.p - 1.0, s.n * s.tree_blocks() / s.p))
    };
    "binomial::scatter" Binomial Scatter false: |x| binomial::scatter(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.rest(), 0.0, s.rest()).by_all((s.p - 1.0, s.n * s.tree_blocks() / s.p));
    "pairwise::all_to_all" Pairwise AllToAll false: |x| pairwise::all_to_all(x.place, x.count),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.rest()).by_all((s.pairs_of_ranks(), s.once()));
    "dissemination::barrier" Dissemination Barrier false: |x| dissemination::barrier(x.place),
        |s| cost(s.log_ceil, 0.0, 0.0, 0.0).by_all((s.p * s.log_ceil, 0.0));
    "one_shot::all_reduce" OneShot AllReduce true: |x| one_shot::all_reduce(x.place, x.count, x.tree),
        |s| cost(s.others(), s.once(), s.once(), s.once()).by_all((s.pairs_of_ranks(), s.p * s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::reduce" OneShot Reduce true: |x| one_shot::reduce(x.place, x.count, x.tree, x.root),
        |s| cost(s.others(), s.once(), s.once(), s.n * s.others()).by_all((s.p - 1.0, s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::broadcast" OneShot Broadcast false: |x| one_shot::broadcast(x.place, x.count, x.root),
        |s| cost(s.others(), s.once(), 0.0, s.once()).by_all((s.p - 1.0, s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::reduce_scatter" OneShot ReduceScatter true: |x| one_shot::reduce_scatter(x.place, x.count, x.tree),
        |s| cost(s.others(), s.rest(), s.rest(), s.rest()).by_all((s.pairs_of_ranks(), s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::all_gather" OneShot AllGather false: |x| one_shot::all_gather(x.place, x.count),
        |s| cost(s.others(), s.rest(), 0.0, s.rest()).by_all((s.pairs_of_ranks(), s.once())).with_extra((s.p - 2.0).max(0.0), 0.0);
    "one_shot::barrier" OneShot Barrier false: |x| one_shot::barrier(x.place),
        |s| cost(s.others(), 0.0, 0.0, 0.0).by_all((s.pairs_of_ranks(), 0.0)).with_extra((s.p - 2.0).max(0.0), 0.0);
    "star::all_reduce" Star AllReduce false: |x| star::all_reduce(x.place, x.count),
        |s| cost(2.0 * (s.p - 1.0), 2.0 * s.once(), s.once(), s.once()).by_all((2.0 * (s.p - 1.0), 2.0 * s.once()));
    "full_mesh::all_reduce" FullMesh AllReduce true: |x| full_mesh::all_reduce(x.place, x.count, x.tree),
        |s| cost(2.0 * s.others(), 2.0 * s.rest(), s.rest(), 2.0 * s.rest())
            .by_all((2.0 * s.pairs_of_ranks(), 2.0 * s.once()))
            .with_extra(2.0 * (s.p - 2.0).max(0.0), 0.0);
    "double_tree::all_reduce" DoubleTree AllReduce false: |x| double_tree::all_reduce(x.place, x.count), |s| {
        let (h, k) = s.double_tree();
        cost(2.0 * h + k + 1.0, s.n * (2.0 + 2.0 * h / k), s.n, 2.0 * s.n)
            .by_all((4.0 * k * (s.p - 1.0), 2.0 * s.once()))
            .with_extra(3.0 * k, 0.0)
            .bound()
    };
    "nhr::all_reduce" Nhr AllReduce false: |x| nhr::all_reduce(x.place, x.count),
        |s| cost(2.0 * s.log_ceil, 2.0 * s.rest(), s.rest(), 2.0 * s.rest())
            .by_all((2.0 * s.p * s.log_ceil, 2.0 * s.once()))
            .with_extra(0.0, 2.0 * (s.p - 1.0 - s.log_ceil));
    "swing::all_reduce" Swing AllReduce false: |x| swing::all_reduce(x.place, x.count, x.shape), |s| {
        let (messages, pieces) = shaped::swing_messages(s);
        cost(
            2.0 * (s.log_floor + s.folds()),
            2.0 * (s.rest_of_floor() + s.n * s.folds()),
            s.rest_of_floor() + s.n * s.folds(),
            2.0 * s.rest_of_floor() + s.n * s.folds(),
        )
        .by_all((2.0 * (messages * s.floor + s.folded()), 2.0 * s.once()))
        .with_extra(2.0 * (messages - s.log_floor), 2.0 * (pieces - messages))
    };
    "swing::all_reduce_latency" SwingLatency AllReduce false: |x| swing::all_reduce_latency(x.place, x.count, x.shape), |s| {
        let (messages, pieces) = shaped::swing_messages(s);
        cost(
            s.log_floor + 2.0 * s.folds(),
            s.n * (s.log_floor + 2.0 * s.folds()),
            s.n * (s.log_floor + s.folds()),
            s.n * (s.log_floor + s.folds()),
        )
        .by_all((messages * s.floor + 2.0 * s.folded(), s.n * (s.exchanges() + 2.0 * s.folded())))
        .with_extra(messages - s.log_floor, pieces - messages)
    };
    "bine::all_reduce" Bine AllReduce false: |x| bine::all_reduce(x.place, x.count), |s| cost(
        2.0 * (s.log_floor + s.folds()),
        2.0 * (s.rest_of_floor() + s.n * s.folds()),
        s.rest_of_floor() + s.n * s.folds(),
        2.0 * s.rest_of_floor() + s.n * s.folds(),
    ).by_all((2.0 * (s.exchanges() + s.folded()), 2.0 * s.once()));
    "star::reduce" Star Reduce false: |x| star::reduce(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.once(), s.once(), s.n * s.others()).by_all((s.p - 1.0, s.once()));
    "double_tree::reduce" DoubleTree Reduce false: |x| double_tree::reduce(x.place, x.count, x.root), |s| {
        let (h, k) = s.double_tree();
        cost(h + k, s.n * (1.0 + h / k), s.n, s.n)
            .by_all((2.0 * k * (s.p - 1.0), s.once()))
            .with_extra(k, 0.0)
            .bound()
    };
    "bine::reduce" Bine Reduce false: |x| bine::reduce(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, s.n * s.log_ceil, s.n * s.others()).by_all((s.p - 1.0, s.once()));
    "star::broadcast" Star Broadcast false: |x| star::broadcast(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.once(), 0.0, s.once()).by_all((s.p - 1.0, s.once()));
    "double_tree::broadcast" DoubleTree Broadcast false: |x| double_tree::broadcast(x.place, x.count, x.root), |s| {
        let (h, k) = s.double_tree();
        cost(h + k, s.n * (1.0 + h / k), 0.0, s.n)
            .by_all((2.0 * k * (s.p - 1.0), s.once()))
            .with_extra(k, 0.0)
            .bound()
    };
    "bine::broadcast" Bine Broadcast false: |x| bine::broadcast(x.place, x.count, x.root),
        |s| cost(s.log_ceil, s.n * s.log_ceil, 0.0, s.n * s.log_ceil).by_all((s.p - 1.0, s.once()));
    "van_de_geijn::broadcast" VanDeGeijn Broadcast false: |x| van_de_geijn::broadcast(x.place, x.count, x.root),
        |s| cost(2.0 * s.log_ceil, 2.0 * s.rest(), 0.0, 2.0 * s.rest())
            .by_all((s.p - 1.0 + s.p * s.log_ceil, s.n * s.tree_blocks() / s.p + s.once()));
    "nhr::reduce_scatter" Nhr ReduceScatter false: |x| nhr::reduce_scatter(x.place, x.count),
        |s| cost(s.log_ceil, s.rest(), s.rest(), s.rest())
            .by_all((s.p * s.log_ceil, s.once()))
            .with_extra(0.0, s.p - 1.0 - s.log_ceil);
    "pat::reduce_scatter" Pat ReduceScatter false: |x| pat::reduce_scatter(x.place, x.count), |s| {
        let (steps, segments) = s.pat();
        cost(steps * segments, s.rest(), s.rest(), s.rest())
            .by_all((s.p * steps * segments, s.once()))
            .with_extra(0.0, segments * (s.p - 1.0 - steps))
    };
    "bine::reduce_scatter" Bine ReduceScatter false: |x| bine::reduce_scatter(x.place, x.count), |s| match s.is_power {
        true => cost(s.log_floor, s.rest(), s.rest(), s.rest()).by_all((s.exchanges(), s.once())),
        false => cost(s.log_floor + 2.0, s.n + s.pairs() + s.n / s.p, s.n + s.pairs(), s.n + s.pairs())
            .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            .bound(),
    };
    "nhr::all_gather" Nhr AllGather false: |x| nhr::all_gather(x.place, x.count),
        |s| cost(s.log_ceil, s.rest(), 0.0, s.rest())
            .by_all((s.p * s.log_ceil, s.once()))
            .with_extra(0.0, s.p - 1.0 - s.log_ceil);
    "pat::all_gather" Pat AllGather false: |x| pat::all_gather(x.place, x.count), |s| {
        let (steps, _) = s.pat();
        cost(steps, s.rest(), 0.0, s.rest())
            .by_all((s.p * steps, s.once()))
            .with_extra(0.0, s.p - 1.0 - steps)
    };
    "bine::all_gather" Bine AllGather false: |x| bine::all_gather(x.place, x.count), |s| match s.is_power {
        true => cost(s.log_floor, s.rest(), 0.0, s.rest()).by_all((s.exchanges(), s.once())),
        false => cost(s.log_floor + 2.0, s.n / s.p + s.pairs() + s.n, 0.0, s.pairs() + s.n)
            .by_all((s.exchanges() + 2.0 * s.folded(), s.floor * s.pairs() + 2.0 * s.n * s.folded()))
            .bound(),
    };
    "star::gather" Star Gather false: |x| star::gather(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.n / s.p * s.others()).by_all((s.p - 1.0, s.rest()));
    "star::scatter" Star Scatter false: |x| star::scatter(x.place, x.count, x.root),
        |s| cost(s.p - 1.0, s.rest(), 0.0, s.rest()).by_all((s.p - 1.0, s.rest()));
    "ring_2d::all_reduce" Ring2d AllReduce false: |x| ring_2d::all_reduce(x.place, x.count, x.shape),
        |s| shaped::rings(s, Pattern::AllReduce);
    "ring_2d::reduce_scatter" Ring2d ReduceScatter false: |x| ring_2d::reduce_scatter(x.place, x.count, x.shape),
        |s| shaped::rings(s, Pattern::ReduceScatter);
    "ring_2d::all_gather" Ring2d AllGather false: |x| ring_2d::all_gather(x.place, x.count, x.shape),
        |s| shaped::rings(s, Pattern::AllGather);
    "torus_2d::all_reduce" Torus2d AllReduce false: |x| torus_2d::all_reduce(x.place, x.count, x.shape),
        |s| shaped::torus(s, Pattern::AllReduce);
    "torus_2d::reduce_scatter" Torus2d ReduceScatter false: |x| torus_2d::reduce_scatter(x.place, x.count, x.shape),
        |s| shaped::torus(s, Pattern::ReduceScatter);
    "torus_2d::all_gather" Torus2d AllGather false: |x| torus_2d::all_gather(x.place, x.count, x.shape),
        |s| shaped::torus(s, Pattern::AllGather);
    "mesh_2d::all_reduce" Mesh2d AllReduce false: |x| mesh_2d::all_reduce(x.place, x.count, x.shape),
        |s| shaped::mesh(s, Pattern::AllReduce);
    "mesh_2d::reduce_scatter" Mesh2d ReduceScatter false: |x| mesh_2d::reduce_scatter(x.place, x.count, x.shape),
        |s| shaped::mesh(s, Pattern::ReduceScatter);
    "mesh_2d::all_gather" Mesh2d AllGather false: |x| mesh_2d::all_gather(x.place, x.count, x.shape),
        |s| shaped::mesh(s, Pattern::AllGather);
    "hierarchical_ring::all_reduce" HierarchicalRing AllReduce false: |x| hierarchical_ring::all_reduce(x.place, x.count, x.shape),
        |s| shaped::servers(s, Pattern::AllReduce);
    "hierarchical_ring::reduce_scatter" HierarchicalRing ReduceScatter false: |x| hierarchical_ring::reduce_scatter(x.place, x.count, x.shape),
        |s| shaped::servers(s, Pattern::ReduceScatter);
    "hierarchical_ring::all_gather" HierarchicalRing AllGather false: |x| hierarchical_ring::all_gather(x.place, x.count, x.shape),
        |s| shaped::servers(s, Pattern::AllGather);
    "chain::all_reduce" Chain AllReduce false: |x| chain::all_reduce(x.place, x.count), |s| {
        let (fill, k) = s.chain();
        let path = 2.0 * s.n * s.others() * (1.0 + fill / k);
        cost(s.others() * (2.0 * fill + k + 1.0), path, s.n * s.others(), s.n * (s.p - 1.0).min(2.0))
            .by_all((2.0 * k * (s.p - 1.0), 2.0 * s.once()))
            .with_extra(if s.p > 2.0 { k } else { 0.0 }, 0.0)
            .bound()
    };
    "chain::reduce" Chain Reduce false: |x| chain::reduce(x.place, x.count, x.root), |s| {
        let (fill, k) = s.chain();
        let n = s.n * s.others();
        cost(s.others() * (fill + k), n * (1.0 + fill / k), n, n).by_all((k * (s.p - 1.0), s.once())).bound()
    };
    "chain::broadcast" Chain Broadcast false: |x| chain::broadcast(x.place, x.count, x.root), |s| {
        let (fill, k) = s.chain();
        let n = s.n * s.others();
        cost(s.others() * (fill + k), n * (1.0 + fill / k), 0.0, n).by_all((k * (s.p - 1.0), s.once())).bound()
    };
    "hierarchical_pairwise::all_to_all" HierarchicalPairwise AllToAll false:
        |x| hierarchical_pairwise::all_to_all(x.place, x.count, x.shape),
        |s| shaped::all_to_all(s);
}
