//! The algorithms that a caller may request, by name.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use sumac_hal::op::Path;
use thiserror::Error;

/// The algorithm that the caller requests. All but `Auto` fail if the path is not possible.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Algo {
    /// The path that the controller's overrides name, or the cheapest possible one.
    #[default]
    Auto,
    /// The aggregation tree.
    Tree,
    /// Ring.
    Ring,
    /// Halving-doubling.
    HalvingDoubling,
    /// Recursive doubling.
    RecursiveDoubling,
    /// Binomial trees.
    Binomial,
    /// Bruck's algorithm.
    Bruck,
    /// Pairwise exchange.
    Pairwise,
    /// The tree's expression, evaluated between hosts.
    HostTree,
    /// Dissemination.
    Dissemination,
    /// NCCL, for GPU memory only.
    Nccl,
    /// One-shot exchange.
    OneShot,
    /// A star: one rank collects and distributes.
    Star,
    /// Full mesh.
    FullMesh,
    /// Double binary tree.
    DoubleTree,
    /// Nonuniform hierarchical ring.
    Nhr,
    /// Parallel aggregated trees.
    Pat,
    /// Swing, in its bandwidth form.
    Swing,
    /// Swing, in its latency form.
    SwingLatency,
    /// Bine trees and butterflies.
    Bine,
    /// Van de Geijn's broadcast.
    VanDeGeijn,
    /// Rings along the dimensions of a grid.
    Ring2d,
    /// Rings along all dimensions of a torus at once.
    Torus2d,
    /// Exchanges between neighbours of a mesh.
    Mesh2d,
    /// Full meshes inside servers, rings between them.
    HierarchicalRing,
    /// Pipelined chain.
    Chain,
    /// Full meshes inside servers, pairwise exchange between them.
    HierarchicalPairwise,
    /// Reduce-scatter inside servers, a tree for each rail, all-gather inside.
    Hybrid,
    /// Reduce inside servers, all-reduce of their leaders in a tree, broadcast inside.
    Rab,
}

impl Algo {
    /// All algorithms.
    pub const ALL: [Self; 29] = [
        Self::Auto,
        Self::Tree,
        Self::Ring,
        Self::HalvingDoubling,
        Self::RecursiveDoubling,
        Self::Binomial,
        Self::Bruck,
        Self::Pairwise,
        Self::HostTree,
        Self::Dissemination,
        Self::Nccl,
        Self::OneShot,
        Self::Star,
        Self::FullMesh,
        Self::DoubleTree,
        Self::Nhr,
        Self::Pat,
        Self::Swing,
        Self::SwingLatency,
        Self::Bine,
        Self::VanDeGeijn,
        Self::Ring2d,
        Self::Torus2d,
        Self::Mesh2d,
        Self::HierarchicalRing,
        Self::Chain,
        Self::HierarchicalPairwise,
        Self::Hybrid,
        Self::Rab,
    ];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self.forced() {
            None => "auto",
            Some(path) => path.name(),
        }
    }

    pub(super) const fn forced(self) -> Option<Path> {
        Some(match self {
            Self::Auto => return None,
            Self::Tree => Path::Tree,
            Self::Ring => Path::Ring,
            Self::HalvingDoubling => Path::HalvingDoubling,
            Self::RecursiveDoubling => Path::RecursiveDoubling,
            Self::Binomial => Path::Binomial,
            Self::Bruck => Path::Bruck,
            Self::Pairwise => Path::Pairwise,
            Self::HostTree => Path::HostTree,
            Self::Dissemination => Path::Dissemination,
            Self::Nccl => Path::Nccl,
            Self::OneShot => Path::OneShot,
            Self::Star => Path::Star,
            Self::FullMesh => Path::FullMesh,
            Self::DoubleTree => Path::DoubleTree,
            Self::Nhr => Path::Nhr,
            Self::Pat => Path::Pat,
            Self::Swing => Path::Swing,
            Self::SwingLatency => Path::SwingLatency,
            Self::Bine => Path::Bine,
            Self::VanDeGeijn => Path::VanDeGeijn,
            Self::Ring2d => Path::Ring2d,
            Self::Torus2d => Path::Torus2d,
            Self::Mesh2d => Path::Mesh2d,
            Self::HierarchicalRing => Path::HierarchicalRing,
            Self::Chain => Path::Chain,
            Self::HierarchicalPairwise => Path::HierarchicalPairwise,
            Self::Hybrid => Path::Hybrid,
            Self::Rab => Path::Rab,
        })
    }
}

impl fmt::Display for Algo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// An unknown algorithm name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not an algorithm; choose one of {known}", known = Algo::ALL.map(Algo::name).join(", "))]
pub struct UnknownAlgo(String);

impl FromStr for Algo {
    type Err = UnknownAlgo;

    fn from_str(text: &str) -> Result<Self, UnknownAlgo> {
        Self::ALL.into_iter().find(|algo| algo.name() == text).ok_or_else(|| UnknownAlgo(text.to_owned()))
    }
}
