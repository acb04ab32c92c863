//! Sub-communicators: ranks of the same color meet in a job of their own, on the same devices.
//!
//! Each is a group of its own (PROTOCOL 1), with its own sequence of chunks, so operations of several communicators
//! overlap freely. Names tell them apart in every log line: `job/0.3` is color 3 of the job's first split.

use super::{Buffers, CallOptions, Communicator, Error, JoinConfig, JoinError, Straggler};
use crate::controller::derived_name;
use crate::select::Algo;
use sumac_hal::op::{Dtype, OpDesc};
use thiserror::Error as ThisError;

/// Why a communicator could not be split.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum SplitError {
    /// The ranks could not tell each other their colors.
    #[error("splitting {name}: {source}")]
    Exchange {
        /// The communicator's name.
        name: String,
        /// What went wrong.
        source: Error,
    },
    /// The new communicator did not come about.
    #[error("joining {name}: {source}")]
    Join {
        /// Its name.
        name: String,
        /// What went wrong.
        source: Box<JoinError>,
    },
}

impl Communicator {
    /// Split the communicator: ranks that name the same color become one of their own, in the order of `key`, then of
    /// their rank here. Who names none gets none. All ranks call this, as a collective.
    ///
    /// # Errors
    /// [`SplitError`].
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>, SplitError> {
        self.split_with(color, key, |_| {})
    }

    /// The same, with an order, an algorithm or a deadline of its own: `configure` changes what is taken over from
    /// this communicator. The order has to be the same at all ranks of a color.
    ///
    /// # Errors
    /// [`SplitError`].
    pub fn split_with(
        &self,
        color: Option<u32>,
        key: i64,
        configure: impl FnOnce(&mut JoinConfig),
    ) -> Result<Option<Self>, SplitError> {
        let own = [color.map_or(-1, i64::from), key];
        let mut all = vec![0; 2 * self.size() as usize];
        // By whatever way there is: the communicator's own choice may be one that has no all-gather.
        let options =
            CallOptions { algo: Some(Algo::Auto), straggler: Some(Straggler::Wait), ..CallOptions::default() };
        let desc = OpDesc::all_gather(Dtype::I64, all.len() as u64);
        let (input, output) = (bytemuck::cast_slice(&own), bytemuck::cast_slice_mut(&mut all));
        let exchanged = self.run(&desc, Buffers::Separate { input, output }, &options);
        exchanged.map_err(|source| SplitError::Exchange { name: self.name(), source })?;
        // Counted at ranks without a color too: they take part in the next split.
        let core = self.lock().map_err(|source| SplitError::Exchange { name: self.name(), source });
        let (mut config, nth) = core?.next_split();
        let Some(color) = color else { return Ok(None) };
        let (rank, world) = place(&all, color, key, self.rank());
        config.job = derived_name(&config.job, &format!("/{nth}.{color}"));
        (config.rank, config.world) = (rank, world);
        configure(&mut config);
        let name = config.job.clone();
        Self::join(config).map(Some).map_err(|source| SplitError::Join { name, source: Box::new(source) })
    }
}

/// Return a rank's place among those of its color; `all` holds each rank's color and key.
fn place(all: &[i64], color: u32, key: i64, rank: u32) -> (u32, u32) {
    let (pairs, _) = all.as_chunks::<2>();
    let same = (0..).zip(pairs).filter(|(_, pair)| pair[0] == i64::from(color)).map(|(other, pair)| (pair[1], other));
    let before = same.clone().filter(|&other| other < (key, rank)).count();
    (before as u32, same.count() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_follow_keys_then_ranks() {
        // Colors 0, 1, none, 0, 0 with keys 5, 0, 0, -1, 5.
        let all = [0, 5, 1, 0, -1, 0, 0, -1, 0, 5];
        assert_eq!(place(&all, 0, 5, 0), (1, 3));
        assert_eq!(place(&all, 1, 0, 1), (0, 1));
        assert_eq!(place(&all, 0, -1, 3), (0, 3));
        assert_eq!(place(&all, 0, 5, 4), (2, 3));
    }
}
