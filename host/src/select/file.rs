//! Cost tables as files.
//!
//! ```toml
//! format = 2
//! date = "2026-01-31T12:00:00Z" # when it was measured
//! error = 0.08                  # median relative error of its predictions
//!
//! [constants]                   # all of `Constants`, in seconds
//! alpha_tree_s = 1.2e-5
//! # ...
//!
//! [[curve]]                     # optional: measured over modelled time, by size
//! collective = "all_reduce"
//! path = "tree"
//! transport = "shm"             # of the tree; on one host, also of the tree beside a host algorithm
//! levels = 2                    # of the same tree
//! ranks = 8
//! ranks_per_host = 2            # left out: all ranks were on one host
//! points = [[8, 1.02], [64, 0.97]]
//! ```
//!
//! Files come from operators, so every number is checked, and the numbers of curves and points are bounded.

use super::TreeTransport;
use super::curve::{CURVES_MAX, Curve, CurveKind, POINTS_MAX, Point, RankPlacement};
use super::table::{Constants, CostTable, Origin};
use serde::Deserialize;
use std::fmt::Write;
use sumac_hal::op::{Collective, Path};
use thiserror::Error;

/// The version of the format.
const FORMAT: u32 = 2;

/// The greatest constant, in seconds.
const CONSTANT_MAX_S: f64 = 10.0;

/// The greatest factor of a point; its inverse is the least.
const FACTOR_MAX: f32 = 1e6;

/// The most levels of a tree that a curve can be of.
const LEVELS_MAX: u32 = 64;

/// Why a cost table is refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CostFileError {
    /// Not TOML, or with other keys.
    #[error("not a cost table: {0}")]
    Form(#[from] toml::de::Error),
    /// Of another format.
    #[error("format {found} of the cost table is unknown; this release reads format {FORMAT}: run `sumac calibrate`")]
    Format {
        /// The format.
        found: u32,
    },
    /// A constant out of range.
    #[error("{name} = {value} is out of range; it must be 0 to {CONSTANT_MAX_S} seconds")]
    Constant {
        /// Its name.
        name: &'static str,
        /// Its value.
        value: f64,
    },
    /// The error of the predictions is none.
    #[error("error = {0} is out of range; it must be 0 or more")]
    Error(f64),
    /// Too many curves.
    #[error("{found} curves are too many; a cost table has at most {CURVES_MAX}")]
    Curves {
        /// Their number.
        found: usize,
    },
    /// An invalid curve.
    #[error("curve {number}: {why}")]
    Curve {
        /// Its number in the file, from 1.
        number: usize,
        /// What is wrong with it.
        why: String,
    },
}

/// What is read first: files of other formats have other keys.
#[derive(Debug, Deserialize)]
struct Head {
    format: u32,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "format")]
    _format: u32,
    date: String,
    error: f64,
    constants: Constants,
    #[serde(rename = "curve", default)]
    curves: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    collective: String,
    path: String,
    transport: Option<String>,
    levels: Option<u32>,
    ranks: u32,
    ranks_per_host: Option<u32>,
    points: Vec<(u64, f32)>,
}

impl CostTable {
    /// Read a cost table.
    ///
    /// # Errors
    /// [`CostFileError`] names the value that is invalid.
    pub fn from_toml(text: &str) -> Result<Self, CostFileError> {
        let Head { format } = toml::from_str(text)?;
        if format != FORMAT {
            return Err(CostFileError::Format { found: format });
        }
        let File { date, error, constants, curves, .. } = toml::from_str(text)?;
        for (&name, value) in Constants::NAMES.iter().zip(constants.to_array()) {
            if !(0.0..=CONSTANT_MAX_S).contains(&value) {
                return Err(CostFileError::Constant { name, value });
            }
        }
        if !(error.is_finite() && error >= 0.0) {
            return Err(CostFileError::Error(error));
        }
        if curves.len() > CURVES_MAX {
            return Err(CostFileError::Curves { found: curves.len() });
        }
        let read =
            |(at, entry): (usize, Entry)| entry.read().map_err(|why| CostFileError::Curve { number: at + 1, why });
        let curves = curves.into_iter().enumerate().map(read).collect::<Result<_, _>>()?;
        Ok(Self { curves, ..Self::new(Origin::Calibrated { date, error }, constants) }.sealed())
    }

    /// Write the table as a file, without its overrides, which have a file of their own.
    pub fn to_toml(&self) -> String {
        let (date, error) = match &self.origin {
            Origin::Calibrated { date, error } => (date.as_str(), *error),
            Origin::Emulator | Origin::DataSheets => ("", 0.0),
        };
        let mut text = format!("format = {FORMAT}\ndate = {date:?}\nerror = {error:.4}\n\n[constants]\n");
        for (name, value) in Constants::NAMES.iter().zip(self.constants.to_array()) {
            let _ = writeln!(text, "{name} = {value:e}");
        }
        for Curve { kind, ranks, points } in &self.curves {
            let (collective, path) = (kind.collective.name(), kind.path.name());
            let _ = write!(text, "\n[[curve]]\ncollective = \"{collective}\"\npath = \"{path}\"\n");
            if let Some((transport, levels)) = kind.tree {
                let _ = write!(text, "transport = \"{}\"\nlevels = {levels}\n", transport.name());
            }
            let _ = writeln!(text, "ranks = {ranks}");
            if let RankPlacement::PerHost(ranks) = kind.placement {
                let _ = writeln!(text, "ranks_per_host = {ranks}");
            }
            let points: Vec<_> =
                points.iter().map(|point| format!("[{}, {:.4e}]", point.bytes, point.factor)).collect();
            let _ = writeln!(text, "points = [{}]", points.join(", "));
        }
        text
    }
}

impl Entry {
    fn read(self) -> Result<Curve, String> {
        let collective = Collective::from_name(&self.collective)
            .ok_or_else(|| format!("collective {:?} is unknown", self.collective))?;
        let path = Path::ALL.iter().copied().find(|path| path.name() == self.path);
        let path = path.ok_or_else(|| format!("path {:?} is unknown", self.path))?;
        let tree = match (path, &self.transport, self.levels) {
            (Path::Tree, Some(name), Some(levels @ 1..=LEVELS_MAX)) => Some((transport(name)?, levels)),
            (Path::Tree, ..) => {
                return Err(format!("a curve of the tree needs `transport`, and `levels` from 1 to {LEVELS_MAX}"));
            }
            (_, None, None) => None,
            (_, Some(name), Some(levels @ 1..=LEVELS_MAX)) if self.ranks_per_host.is_none() => {
                Some((transport(name)?, levels))
            }
            _ => {
                return Err(format!(
                    "a host algorithm has `transport`, and `levels` from 1 to {LEVELS_MAX}, or neither; on several \
                     hosts neither"
                ));
            }
        };
        if self.ranks == 0 || self.ranks_per_host == Some(0) {
            return Err("`ranks` and `ranks_per_host` must be 1 or more".into());
        }
        let placement = self.ranks_per_host.map_or(RankPlacement::OneHost, RankPlacement::PerHost);
        if !(1..=POINTS_MAX).contains(&self.points.len()) {
            return Err(format!("{} points; a curve has 1 to {POINTS_MAX}", self.points.len()));
        }
        if !self.points.is_sorted_by(|(a, _), (b, _)| a < b) {
            return Err("the sizes of its points must increase".into());
        }
        let in_range = |factor: f32| (1.0 / FACTOR_MAX..=FACTOR_MAX).contains(&factor);
        if let Some((bytes, factor)) = self.points.iter().find(|(_, factor)| !in_range(*factor)) {
            return Err(format!(
                "factor {factor} at {bytes} B is out of range; it must be {} to {FACTOR_MAX}",
                1.0 / FACTOR_MAX
            ));
        }
        let points = self.points.into_iter().map(|(bytes, factor)| Point { bytes, factor }).collect();
        Ok(Curve { kind: CurveKind { collective, path, tree, placement }, ranks: self.ranks, points })
    }
}

fn transport(name: &str) -> Result<TreeTransport, String> {
    let known = [TreeTransport::Packets, TreeTransport::Verbs, TreeTransport::Shm, TreeTransport::Rdma];
    known.into_iter().find(|transport| transport.name() == name).ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|transport| transport.name()).collect();
        format!("transport {name:?} is unknown; choose one of {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> CostTable {
        let kind = CurveKind {
            collective: Collective::AllReduce,
            path: Path::Tree,
            tree: Some((TreeTransport::Shm, 2)),
            placement: RankPlacement::PerHost(2),
        };
        let points = vec![Point { bytes: 8, factor: 1.25 }, Point { bytes: 64, factor: 0.5 }];
        let ring = CurveKind { path: Path::Ring, tree: None, placement: RankPlacement::OneHost, ..kind };
        let beside = CurveKind { path: Path::OneShot, tree: Some((TreeTransport::Packets, 1)), ..ring };
        let curves = [(kind, 8), (ring, 4), (beside, 4)];
        let curves = curves.map(|(kind, ranks)| Curve { kind, ranks, points: points.clone() }).into();
        let origin = Origin::Calibrated { date: "2026-01-31T12:00:00Z".into(), error: 0.125 };
        CostTable { curves, ..CostTable::new(origin, CostTable::emulated().constants) }.sealed()
    }

    #[test]
    fn written_table_reads_back_the_same() {
        let table = table();
        assert_eq!(CostTable::from_toml(&table.to_toml()).expect("a cost table"), table);
    }

    #[test]
    fn tables_that_differ_have_different_versions() {
        let mut other = table();
        other.curves[0].points[0].factor = 1.2501;
        assert_ne!(other.sealed().version, table().version);
        assert_ne!(table().version, CostTable::emulated().version);
    }

    #[test]
    fn invalid_value_is_refused_by_name() {
        let valid = table().to_toml();
        for (from, to, why) in [
            ("format = 2", "format = 1", "format 1"),
            ("format = 2", "format = 1\nkey_of_format_1 = 3", "run `sumac calibrate`"),
            ("alpha_tree_s = 2e-5", "alpha_tree_s = -1.0", "alpha_tree_s = -1"),
            ("alpha_tree_s = 2e-5", "alpha_tree_s = nan", "alpha_tree_s = NaN"),
            ("alpha_tree_s = 2e-5", "alfa = 1.0", "alfa"),
            ("error = 0.1250", "error = inf", "error = inf"),
            ("path = \"tree\"", "path = \"spiral\"", "curve 1: path \"spiral\""),
            ("transport = \"shm\"", "transport = \"mixed\"", "transport \"mixed\""),
            ("levels = 2", "levels = 0", "`levels` from 1"),
            ("path = \"ring\"", "path = \"ring\"\nlevels = 1", "curve 2: a host algorithm has"),
            (
                "path = \"ring\"",
                "path = \"ring\"\nlevels = 1\ntransport = \"udp\"\nranks_per_host = 2",
                "on several hosts neither",
            ),
            ("ranks = 4", "ranks = 0", "1 or more"),
            ("[[8, 1.2500e0], [64, 5.0000e-1]]", "[]", "0 points"),
            ("[64, 5.0000e-1]", "[8, 0.5]", "must increase"),
            ("[64, 5.0000e-1]", "[64, 0.0]", "factor 0"),
        ] {
            let text = valid.replacen(from, to, 1);
            assert_ne!(text, valid, "{from}");
            let error = CostTable::from_toml(&text).expect_err("refused").to_string();
            assert!(error.contains(why), "{to}: {error}");
        }
    }

    #[test]
    fn too_many_curves_are_refused() {
        let curve = "[[curve]]\ncollective = \"barrier\"\npath = \"dissemination\"\nranks = 2\npoints = [[0, 1.0]]\n";
        let constants = CostTable::emulated().to_toml();
        let text = format!("{constants}{}", curve.repeat(CURVES_MAX + 1));
        let error = CostTable::from_toml(&text).expect_err("refused").to_string();
        assert!(error.contains("1025 curves"), "{error}");
    }
}
