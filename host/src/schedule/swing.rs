//! Swing: halving-doubling whose partners alternate between both directions of a torus, and so stay near.
//!
//! In step s rank r exchanges with r + rho(s) if it is even, with r - rho(s) if it is odd, where rho(s) = (1 -
//! (-2)^(s+1)) / 3 = 1, -1, 3, -5, 11, ... Half of the elements go by these steps, the other half by mirrored ones
//! (-rho), so that both directions of a ring carry the same (De Sensi, Bonato, Saam and Hoefler, "Swing:
//! short-cutting rings for higher bandwidth allreduce", NSDI 2024, arXiv 2401.09356, sections 3 and 4).
//!
//! | p = 2^k | cost |
//! |---|---|
//! | [`all_reduce`], the bandwidth form | 2 log2 p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma |
//! | [`all_reduce_latency`], the latency form | log2 p (alpha + n beta + n gamma) |
//!
//! Where the [`Shape`] is a torus of D dimensions, there are 2D such exchanges, each on 1/(2D) of the elements: step s
//! goes along dimension s mod D by rho(floor(s/D)), others begin with another dimension, and half of them are mirrored.
//! So all links of a rank carry as much.
//!
//! Each step sends two messages to two peers, or 2D on a torus. Other p fold as in [`super::halving_doubling`], at the
//! same price. The latency form takes its steps from far to near, so that all ranks evaluate one expression; its bytes
//! on each link are the same.

use super::butterfly::{self, Butterfly};
use super::{Place, Schedule, Shape};
use thiserror::Error;

/// Schedule an all-reduce of `count` elements in the bandwidth form: on the torus of this shape, where all its
/// dimensions are powers of two, and otherwise on a ring.
pub fn all_reduce(place: Place, count: usize, shape: Shape) -> Schedule {
    butterfly::all_reduce(place, count, &exchanges(place, shape))
}

/// Why ranks are no torus for Swing.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TorusError {
    /// A dimension is not a power of two.
    #[error("a dimension of {0} ranks is not a power of two, which Swing needs on a torus")]
    Dimension(u32),
    /// The dimensions have another number of ranks.
    #[error("a torus of {dims:?} has other than {ranks} ranks")]
    Ranks {
        /// The dimensions.
        dims: Vec<u32>,
        /// The number of ranks.
        ranks: u32,
    },
}

/// Schedule an all-reduce of `count` elements over a torus of `dims` ranks, in its bandwidth form. Rank numbers run
/// through the last dimension first.
///
/// # Errors
/// [`TorusError`] if a dimension is not a power of two, or the ranks are not those of the torus.
pub fn all_reduce_on_torus(place: Place, count: usize, dims: &[u32]) -> Result<Schedule, TorusError> {
    if let Some(&dim) = dims.iter().find(|dim| !dim.is_power_of_two()) {
        return Err(TorusError::Dimension(dim));
    }
    let ranks = dims.iter().try_fold(1_u32, |ranks, &dim| ranks.checked_mul(dim));
    if ranks != Some(place.ranks()) {
        return Err(TorusError::Ranks { dims: dims.to_vec(), ranks: place.ranks() });
    }
    Ok(butterfly::all_reduce(place, count, &|_| on_torus(dims)))
}

/// Schedule an all-reduce of `count` elements in the latency form, on the same torus as [`all_reduce`].
pub fn all_reduce_latency(place: Place, count: usize, shape: Shape) -> Schedule {
    butterfly::all_reduce_whole(place, count, &exchanges(place, shape))
}

/// The exchanges of the survivors of a fold. A torus has only survivors.
fn exchanges(place: Place, shape: Shape) -> impl Fn(u32) -> Vec<Box<dyn Butterfly>> {
    let dims: Vec<u32> = shape.dims(place.ranks()).as_slice().iter().copied().filter(|&dim| dim > 1).collect();
    move |survivors| if is_torus(&dims) { on_torus(&dims) } else { both(survivors) }
}

/// Whether dimensions of more than one rank are those of a torus for Swing.
pub(super) fn is_torus(dims: &[u32]) -> bool {
    dims.len() > 1 && dims.iter().all(|dim| dim.is_power_of_two())
}

/// The exchanges on a torus: from each dimension on, in both directions.
fn on_torus(dims: &[u32]) -> Vec<Box<dyn Butterfly>> {
    let exchange = |(first, mirrored)| Box::new(Torus::new(dims, first, mirrored)) as Box<dyn Butterfly>;
    (0..dims.len().max(1)).flat_map(|first| [(first, false), (first, true)]).map(exchange).collect()
}

/// The exchanges in both directions, of which two ranks have only one.
fn both(ranks: u32) -> Vec<Box<dyn Butterfly>> {
    let directions = if ranks > 2 { &[false, true][..] } else { &[false] };
    directions.iter().map(|&mirrored| Box::new(Ring { ranks, mirrored }) as Box<dyn Butterfly>).collect()
}

/// rho(step): 1, -1, 3, -5, 11, ...
pub(super) const fn distance(step: u32) -> i64 {
    (1 - (-2_i64).pow(step + 1)) / 3
}

/// The exchanges on a ring of 2^k positions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ring {
    /// The number of positions.
    pub(super) ranks: u32,
    /// Whether distances are negative.
    pub(super) mirrored: bool,
}

impl Ring {
    fn moved(self, position: u32, by: i64) -> u32 {
        (i64::from(position) + by).rem_euclid(i64::from(self.ranks)) as u32
    }

    const fn sign(self, position: u32) -> i64 {
        if position.is_multiple_of(2) == self.mirrored { -1 } else { 1 }
    }
}

impl Butterfly for Ring {
    fn partner(&self, position: u32, step: u32) -> u32 {
        self.moved(position, self.sign(position) * distance(step))
    }

    /// The partners of step s and later lead from an even position to those that differ by multiples of 2^(s+1), and to
    /// these one's odd partners. So bit s of half the even position is the same for all that meet later, and parity is
    /// left for the last step.
    fn label(&self, position: u32) -> u32 {
        let levels = self.ranks.ilog2();
        if levels == 0 {
            return 0;
        }
        let is_odd = position % 2;
        let even = if is_odd == 1 { self.partner(position, levels - 1) } else { position };
        even / 2 + (is_odd << (levels - 1))
    }
}

/// The exchanges on a torus, which take turns between its dimensions.
#[derive(Debug, Clone)]
struct Torus {
    dims: Vec<u32>,
    /// For each step, the dimension and the step there.
    turns: Vec<(usize, u32)>,
    mirrored: bool,
}

impl Torus {
    fn new(dims: &[u32], first: usize, mirrored: bool) -> Self {
        let most = dims.iter().map(|dim| dim.ilog2()).max().unwrap_or(0);
        let turns = (0..most).flat_map(|step| (0..dims.len()).map(move |turn| ((first + turn) % dims.len(), step)));
        let turns = turns.filter(|&(dim, step)| step < dims[dim].ilog2()).collect();
        Self { dims: dims.to_vec(), turns, mirrored }
    }

    /// The ranks between neighbours along a dimension.
    fn stride(&self, dim: usize) -> u32 {
        self.dims[dim + 1..].iter().product()
    }

    /// A position's place along a dimension, and the exchanges there.
    fn along(&self, position: u32, dim: usize) -> (u32, Ring) {
        let ring = Ring { ranks: self.dims[dim], mirrored: self.mirrored };
        (position / self.stride(dim) % self.dims[dim], ring)
    }
}

impl Butterfly for Torus {
    fn partner(&self, position: u32, step: u32) -> u32 {
        let (dim, step) = self.turns[step as usize];
        let (own, ring) = self.along(position, dim);
        position - own * self.stride(dim) + ring.partner(own, step) * self.stride(dim)
    }

    fn label(&self, position: u32) -> u32 {
        let bit = |(nth, &(dim, step)): (usize, &(usize, u32))| {
            let (own, ring) = self.along(position, dim);
            (ring.label(own) >> step & 1) << nth
        };
        self.turns.iter().enumerate().map(bit).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::check::{Goal, check};
    use sumac_hal::ids::Rank;

    #[test]
    fn distances_are_those_of_the_paper() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(distance), [1, -1, 3, -5, 11, -21]);
        let ring = Ring { ranks: 16, mirrored: false };
        assert_eq!([0, 1, 2, 3].map(|step| ring.partner(0, step)), [1, 15, 3, 11]);
        assert_eq!([0, 1, 2, 3].map(|step| ring.partner(1, step)), [0, 2, 14, 6]);
    }

    #[test]
    fn partners_labels_agree_below_the_step_and_differ_in_it() {
        for ranks in (1..=10).map(|power| 1 << power) {
            for ring in [false, true].map(|mirrored| Ring { ranks, mirrored }) {
                for (position, step) in (0..ranks).flat_map(|at| (0..ranks.ilog2()).map(move |step| (at, step))) {
                    let partner = ring.partner(position, step);
                    assert_eq!(ring.partner(partner, step), position, "{ring:?}");
                    let differ = ring.label(position) ^ ring.label(partner);
                    assert_eq!(differ & ((2 << step) - 1), 1 << step, "{ring:?} {position} {step}");
                }
            }
        }
    }

    #[test]
    fn all_reduce_on_a_torus_is_correct_and_bandwidth_optimal() {
        for dims in [&[1][..], &[8], &[2, 2], &[4, 4], &[2, 8], &[8, 2, 1], &[4, 2, 2], &[2, 2, 2, 2], &[2, 4, 2, 4]] {
            let ranks: u32 = dims.iter().product();
            for count in [0, 1, 7 * ranks as usize + 3, 4 * 3 * 64 * 64] {
                let schedule = |place| all_reduce_on_torus(place, count, dims).expect("a torus");
                let schedules: Vec<_> = Place::all(ranks).map(schedule).collect();
                let report = check(Goal::AllReduce, &schedules).unwrap_or_else(|error| panic!("{dims:?}: {error}"));
                assert_eq!(report.steps as u32, 2 * ranks.ilog2(), "{dims:?}");
                if count % 4096 == 0 {
                    assert_eq!(report.sent_elements_max, 2 * (count - count / ranks as usize) as u64, "{dims:?}");
                }
            }
        }
    }

    #[test]
    fn ranks_that_are_no_torus_are_refused() {
        let place = Place::new(Rank(0), 12).expect("inside");
        assert_eq!(all_reduce_on_torus(place, 1, &[4, 3]), Err(TorusError::Dimension(3)));
        let error = all_reduce_on_torus(place, 1, &[4, 4]);
        assert_eq!(error, Err(TorusError::Ranks { dims: vec![4, 4], ranks: 12 }));
    }
}
