//! The shape of a communicator: how its ranks lie, for algorithms that use more than a line of them.
//!
//! Rank numbers run through the last dimension first, so servers of consecutive ranks are the rows of a grid.
//!
//! Invariants: a grid has 1 to [`DIMENSIONS_MAX`] dimensions of at least one rank and fewer than 2^32 ranks. A shape
//! that does not fit a number of ranks counts as a line there ([`Shape::dims`]), so that schedules need no checks.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use thiserror::Error;

/// The maximum number of dimensions of a grid.
pub const DIMENSIONS_MAX: usize = 4;

/// How the ranks of a communicator lie. As text `line`, `4x8` or `servers:4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Shape {
    /// In a line: nothing more is known.
    #[default]
    Line,
    /// In a grid.
    Grid(Dims),
    /// On servers, or in groups of the fabric, each with this many consecutive ranks.
    Servers(NonZeroU32),
}

/// The extents of a grid, first dimension first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "[u32; DIMENSIONS_MAX]", into = "[u32; DIMENSIONS_MAX]")]
pub struct Dims {
    /// 0 for those after the last.
    extents: [u32; DIMENSIONS_MAX],
}

/// Why something is no shape, or not the shape of a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// The text is not a shape's.
    #[error("{0:?} is not a shape; write line, a grid as 4x8, or servers:N for servers of N consecutive ranks each")]
    Text(String),
    /// The grid has too many dimensions, or none.
    #[error("a grid of {0} dimensions; it has 1 to {DIMENSIONS_MAX}")]
    Dimensions(usize),
    /// The grid has too many ranks, or a dimension without any.
    #[error("a grid of {0:?} ranks; each dimension has at least one rank, and all together fewer than 2^32")]
    Extents(Vec<u32>),
    /// The shape is for another number of ranks.
    #[error("{shape} does not fit {ranks} ranks; {}", match shape {
        Shape::Servers(each) => format!("servers of {each} have a multiple of {each}"),
        _ => format!("it has {}", shape.ranks().unwrap_or_default()),
    })]
    Ranks {
        /// The shape.
        shape: Shape,
        /// The number of ranks.
        ranks: u32,
    },
}

impl Dims {
    /// Create a grid of these extents, first dimension first.
    ///
    /// # Errors
    /// [`ShapeError::Dimensions`] or [`ShapeError::Extents`].
    pub fn new(extents: &[u32]) -> Result<Self, ShapeError> {
        if !(1..=DIMENSIONS_MAX).contains(&extents.len()) {
            return Err(ShapeError::Dimensions(extents.len()));
        }
        let ranks = extents.iter().try_fold(1_u32, |ranks, &extent| ranks.checked_mul(extent));
        if ranks.is_none_or(|ranks| ranks == 0) {
            return Err(ShapeError::Extents(extents.to_vec()));
        }
        let mut all = [0; DIMENSIONS_MAX];
        all[..extents.len()].copy_from_slice(extents);
        Ok(Self { extents: all })
    }

    /// A line of ranks, at least one.
    const fn line(ranks: u32) -> Self {
        Self { extents: [ranks, 0, 0, 0] }
    }

    /// Return the extents, first dimension first.
    pub fn as_slice(&self) -> &[u32] {
        let len = self.extents.iter().take_while(|&&extent| extent > 0).count();
        &self.extents[..len]
    }

    /// Return the number of ranks.
    pub fn ranks(&self) -> u32 {
        self.as_slice().iter().product()
    }
}

impl TryFrom<[u32; DIMENSIONS_MAX]> for Dims {
    type Error = ShapeError;

    fn try_from(extents: [u32; DIMENSIONS_MAX]) -> Result<Self, ShapeError> {
        let len = DIMENSIONS_MAX - extents.iter().rev().take_while(|&&extent| extent == 0).count();
        Self::new(&extents[..len])
    }
}

impl From<Dims> for [u32; DIMENSIONS_MAX] {
    fn from(dims: Dims) -> Self {
        dims.extents
    }
}

impl Shape {
    /// Create a grid of these extents, first dimension first.
    ///
    /// # Errors
    /// As [`Dims::new`].
    pub fn grid(extents: &[u32]) -> Result<Self, ShapeError> {
        Dims::new(extents).map(Self::Grid)
    }

    /// Return the shape of ranks on these machines, in rank order: servers if all have equal numbers of consecutive
    /// ranks, and there are at least two of at least two, otherwise a line.
    pub fn of_machines<T: PartialEq>(machines: &[T]) -> Self {
        let runs: Vec<&[T]> = machines.chunk_by(PartialEq::eq).collect();
        let each = runs.first().map_or(0, |run| run.len());
        let is_equal = runs.iter().all(|run| run.len() == each);
        let is_once = |nth: usize| runs[..nth].iter().all(|other| other[0] != runs[nth][0]);
        if each < 2 || runs.len() < 2 || !is_equal || !(0..runs.len()).all(is_once) {
            return Self::Line;
        }
        u32::try_from(each).ok().and_then(NonZeroU32::new).map_or(Self::Line, Self::Servers)
    }

    /// Return the number of ranks, if the shape has only one.
    fn ranks(&self) -> Option<u32> {
        match self {
            Self::Grid(dims) => Some(dims.ranks()),
            Self::Line | Self::Servers(_) => None,
        }
    }

    /// Check that the shape can be that of `ranks` ranks.
    ///
    /// # Errors
    /// [`ShapeError::Ranks`].
    pub fn check(self, ranks: u32) -> Result<(), ShapeError> {
        let fits = match self {
            Self::Line => true,
            Self::Grid(dims) => dims.ranks() == ranks,
            Self::Servers(each) => ranks.is_multiple_of(each.get()),
        };
        if fits { Ok(()) } else { Err(ShapeError::Ranks { shape: self, ranks }) }
    }

    /// Return `ranks` ranks of this shape as a grid: servers are its rows. A shape that does not fit is a line.
    pub fn dims(self, ranks: u32) -> Dims {
        match self {
            Self::Grid(dims) if dims.ranks() == ranks => dims,
            Self::Servers(each) if ranks.is_multiple_of(each.get()) && ranks > 0 => {
                Dims { extents: [ranks / each, each.get(), 0, 0] }
            }
            _ => Dims::line(ranks),
        }
    }

    /// Return whether `ranks` ranks of this shape have at least two dimensions with more than one rank.
    pub fn is_multidimensional(self, ranks: u32) -> bool {
        self.dims(ranks).as_slice().iter().filter(|&&extent| extent > 1).count() > 1
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line => f.pad("line"),
            Self::Grid(dims) => {
                let extents: Vec<String> = dims.as_slice().iter().map(u32::to_string).collect();
                f.pad(&extents.join("x"))
            }
            Self::Servers(each) => f.pad(&format!("servers:{each}")),
        }
    }
}

impl FromStr for Shape {
    type Err = ShapeError;

    fn from_str(text: &str) -> Result<Self, ShapeError> {
        let unknown = || ShapeError::Text(text.chars().take(TEXT_SHOWN_MAX).collect());
        if text == "line" {
            return Ok(Self::Line);
        }
        if let Some(each) = text.strip_prefix("servers:") {
            return each.parse().map(Self::Servers).map_err(|_| unknown());
        }
        let extents = text.split('x').map(str::parse).collect::<Result<Vec<u32>, _>>().map_err(|_| unknown())?;
        Self::grid(&extents)
    }
}

/// The most characters of a text that an error shows.
const TEXT_SHOWN_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(each: u32) -> Shape {
        Shape::Servers(NonZeroU32::new(each).expect("not 0"))
    }

    #[test]
    fn texts_round_trip() {
        for text in ["line", "7", "4x8", "2x1x3", "8x8x8x8", "servers:1", "servers:4"] {
            assert_eq!(text.parse::<Shape>().expect(text).to_string(), text);
        }
        assert_eq!("4x8".parse(), Shape::grid(&[4, 8]));
        assert_eq!("servers:4".parse(), Ok(servers(4)));
    }

    #[test]
    fn text_of_no_shape_is_refused_with_the_remedy() {
        for (text, why) in [
            ("", "write line, a grid as 4x8, or servers:N"),
            ("4x", "\"4x\" is not a shape"),
            ("servers:0", "\"servers:0\" is not a shape"),
            ("servers of 4", "not a shape"),
            ("-1x2", "not a shape"),
            ("2x2x2x2x2", "a grid of 5 dimensions; it has 1 to 4"),
            ("4x0", "a grid of [4, 0] ranks; each dimension has at least one"),
            ("65536x65536", "fewer than 2^32"),
        ] {
            let error = text.parse::<Shape>().expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!("4".repeat(1 << 20).parse::<Shape>().expect_err("no number").to_string().len() < 200);
    }

    #[test]
    fn shape_of_another_number_of_ranks_is_refused_and_counts_as_a_line() {
        for (shape, ranks, dims) in [(Shape::Line, 6, &[6][..]), (servers(3), 6, &[2, 3]), (servers(6), 6, &[1, 6])] {
            shape.check(ranks).expect("it fits");
            assert_eq!(shape.dims(ranks).as_slice(), dims);
        }
        let grid = Shape::grid(&[2, 3]).expect("a grid");
        let why = |shape: Shape| shape.check(8).expect_err("it does not fit").to_string();
        assert_eq!(why(grid), "2x3 does not fit 8 ranks; it has 6");
        assert_eq!(why(servers(3)), "servers:3 does not fit 8 ranks; servers of 3 have a multiple of 3");
        assert_eq!([grid, servers(3)].map(|shape| shape.dims(8).as_slice().to_vec()), [[8], [8]]);
    }

    #[test]
    fn only_two_extents_beyond_one_are_two_dimensions() {
        let is_multidimensional = |text: &str, ranks| text.parse::<Shape>().expect(text).is_multidimensional(ranks);
        assert!(
            is_multidimensional("2x3", 6) && is_multidimensional("2x1x3", 6) && is_multidimensional("servers:2", 6)
        );
        for shape in ["line", "6", "6x1", "1x6x1", "servers:6", "servers:1", "servers:4", "2x4"] {
            assert!(!is_multidimensional(shape, 6), "{shape}");
        }
    }

    #[test]
    fn machines_with_equal_runs_of_ranks_are_servers() {
        assert_eq!(Shape::of_machines(&["a", "a", "b", "b", "c", "c"]), servers(2));
        for machines in [&[][..], &["a"], &["a", "a"], &["a", "b"], &["a", "a", "b"], &["a", "b", "a", "b"]] {
            assert_eq!(Shape::of_machines(machines), Shape::Line, "{machines:?}");
        }
        assert_eq!(Shape::of_machines(&["a", "a", "b", "b", "a", "a"]), Shape::Line, "a machine comes twice");
    }

    #[test]
    fn shape_from_the_wire_is_checked() {
        for shape in [Shape::Line, Shape::grid(&[2, 3]).expect("a grid"), servers(4)] {
            let bytes = postcard::to_allocvec(&shape).expect("encoded");
            assert_eq!(postcard::from_bytes(&bytes), Ok(shape));
        }
        // Variant 1 with extents, variant 2 with a number of ranks.
        for bytes in [&[1, 0, 0, 0, 0][..], &[1, 2, 0, 3, 0], &[2, 0], &[3]] {
            postcard::from_bytes::<Shape>(bytes).expect_err("no shape");
        }
        assert_eq!(postcard::from_bytes::<Shape>(&[1, 2, 3, 0, 0]), Ok(Shape::grid(&[2, 3]).expect("a grid")));
    }
}
