//! Cartesian rank grids, for data, pipeline and tensor parallelism.
//!
//! Ranks are row-major, as in MPI's Cartesian topologies: the last axis varies fastest. Put the axis that communicates
//! most (tensor parallelism) last; its ranks are then neighbours below the same leaf.

use super::split::SplitError;
use super::{Communicator, Error};

/// A grid of ranks with named axes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cart {
    axes: Vec<(String, u32)>,
}

impl Cart {
    /// Make a grid from the names and lengths of its axes.
    ///
    /// ```
    /// # use sumac::Cart;
    /// let grid = Cart::new(&[("data", 2), ("pipeline", 3), ("tensor", 4)])?;
    /// assert_eq!(grid.coordinates(17), Some(vec![1, 1, 1]));
    /// assert_eq!(grid.neighbour(17, "tensor", -2), Some(19));
    /// # Ok::<(), sumac::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] if an axis is empty, a name is used twice, or there are more than 2^32 ranks.
    pub fn new(axes: &[(&str, u32)]) -> Result<Self, Error> {
        let twice = axes.iter().enumerate().find(|(i, axis)| axes[..*i].iter().any(|other| other.0 == axis.0));
        if let Some((_, (name, _))) = twice {
            return Err(Error::Argument(format!("axis {name:?} occurs twice; each axis needs a name of its own")));
        }
        if let Some((name, _)) = axes.iter().find(|axis| axis.1 == 0) {
            return Err(Error::Argument(format!("axis {name:?} has length 0; an axis needs at least one rank")));
        }
        let ranks = axes.iter().try_fold(1_u32, |ranks, axis| ranks.checked_mul(axis.1));
        ranks.ok_or_else(|| Error::Argument("the grid has more than 2^32 ranks".into()))?;
        Ok(Self { axes: axes.iter().map(|(name, len)| ((*name).to_owned(), *len)).collect() })
    }

    /// Return the number of ranks.
    pub fn size(&self) -> u32 {
        self.axes.iter().map(|axis| axis.1).product()
    }

    /// Return a rank's coordinates; `None` if it is not in the grid.
    pub fn coordinates(&self, rank: u32) -> Option<Vec<u32>> {
        let mut remaining = rank;
        let mut places: Vec<u32> = self
            .axes
            .iter()
            .rev()
            .map(|(_, len)| {
                let place = remaining % len;
                remaining /= len;
                place
            })
            .collect();
        places.reverse();
        (remaining == 0).then_some(places)
    }

    /// Return the rank at these coordinates; `None` if there is none.
    pub fn rank(&self, coordinates: &[u32]) -> Option<u32> {
        if coordinates.len() != self.axes.len() {
            return None;
        }
        let mut places = self.axes.iter().zip(coordinates);
        places.try_fold(0, |rank, ((_, len), &place)| (place < *len).then_some(rank * len + place))
    }

    /// Return the rank `distance` steps further along an axis, with wrap-around; `None` for an unknown axis or rank.
    pub fn neighbour(&self, rank: u32, axis: &str, distance: i64) -> Option<u32> {
        let index = self.index(axis)?;
        let mut places = self.coordinates(rank)?;
        let len = i64::from(self.axes[index].1);
        let place = (i64::from(places[index]) + distance.rem_euclid(len)) % len;
        places[index] = place as u32;
        self.rank(&places)
    }

    /// Return the line through a rank along an axis, as the color and key to split by.
    fn line(&self, rank: u32, axis: &str) -> Option<(u32, i64)> {
        let index = self.index(axis)?;
        let mut places = self.coordinates(rank)?;
        let key = i64::from(places[index]);
        places[index] = 0;
        Some((self.rank(&places)?, key))
    }

    fn index(&self, axis: &str) -> Option<usize> {
        self.axes.iter().position(|(name, _)| name == axis)
    }
}

impl Communicator {
    /// Split the communicator into lines along an axis: return the communicator of the ranks that differ from this one
    /// only in that coordinate. This is a collective call.
    ///
    /// # Errors
    /// [`SplitError`], with [`Error::Argument`] in it if the grid has another size or no such axis.
    pub fn split_along(&self, grid: &Cart, axis: &str) -> Result<Self, SplitError> {
        let exchange = |what: String| SplitError::Exchange { name: self.name(), source: Error::Argument(what) };
        if grid.size() != self.size() {
            return Err(exchange(format!("the grid has {} ranks, the communicator {}", grid.size(), self.size())));
        }
        let (color, key) =
            grid.line(self.rank(), axis).ok_or_else(|| exchange(format!("the grid has no axis {axis:?}")))?;
        let line = self.split(Some(color), key)?;
        line.ok_or_else(|| exchange(format!("rank {} is on no line along {axis:?}", self.rank())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn grid() -> Cart {
        Cart::new(&[("data", 2), ("pipeline", 3), ("tensor", 4)]).expect("a grid")
    }

    #[test]
    fn coordinates_and_ranks_are_inverse() {
        let grid = grid();
        for rank in 0..24 {
            let places = grid.coordinates(rank).expect("inside");
            assert_eq!(grid.rank(&places), Some(rank));
        }
        assert_eq!((grid.coordinates(24), grid.rank(&[0, 3, 0]), grid.rank(&[0, 0])), (None, None, None));
        assert_eq!(grid.rank(&[1, 2, 3]), Some(23));
    }

    #[test]
    fn lines_partition_the_ranks() {
        for (axis, len) in [("data", 2), ("pipeline", 3), ("tensor", 4)] {
            let mut lines: BTreeMap<u32, Vec<i64>> = BTreeMap::new();
            for rank in 0..24 {
                let (color, key) = grid().line(rank, axis).expect("an axis");
                lines.entry(color).or_default().push(key);
            }
            assert!(lines.values().all(|keys| *keys == (0..len).collect::<Vec<_>>()), "{axis}: {lines:?}");
            assert_eq!(lines.len() as i64 * len, 24);
        }
        assert_eq!(grid().line(0, "expert"), None);
    }

    #[test]
    fn neighbours_wrap_around() {
        assert_eq!(grid().neighbour(0, "pipeline", -1), Some(8));
        assert_eq!(grid().neighbour(8, "pipeline", 4), Some(0));
        assert_eq!(grid().neighbour(0, "pipeline", i64::MAX), Some(4), "2^63 - 1 is 1 modulo 3");
        assert_eq!(grid().neighbour(24, "pipeline", 1), None);
    }

    #[test]
    fn invalid_grid_is_rejected() {
        assert!(Cart::new(&[("data", 2), ("data", 2)]).is_err());
        assert!(Cart::new(&[("data", 0)]).is_err());
        assert!(Cart::new(&[("data", 1 << 20), ("tensor", 1 << 20)]).is_err());
    }
}
