//! Sub-communicators: ranks of the same color form a job of their own on the same devices.
//!
//! Each is a separate group (PROTOCOL 1) with its own sequence of chunks, so operations of different communicators
//! overlap. Their names tell them apart in log lines: `job/0.3` is color 3 of the job's first split.

use super::{Buffers, CallOptions, Communicator, Error, JoinConfig, JoinError, Straggler};
use crate::controller::derived_name;
use crate::select::Algo;
use sumac_hal::op::{Dtype, OpDesc};
use thiserror::Error as ThisError;

/// Why a communicator could not be split.
#[derive(ThisError)]
#[non_exhaustive]
pub enum SplitError {
    /// The ranks could not exchange their colors and keys.
    #[error("splitting {name}: {source}")]
    Exchange {
        /// The communicator's name.
        name: String,
        /// What went wrong.
        source: Error,
    },
    /// Joining the new communicator failed.
    #[error("joining {name}: {source}")]
    Join {
        /// Its name.
        name: String,
        /// What went wrong.
        source: Box<JoinError>,
    },
}

crate::engine::creation_error!(SplitError: Exchange Join);

impl Communicator {
    /// Split the communicator, as `MPI_Comm_split` does: ranks with the same color form a new one, ordered by `key` and
    /// then by their rank here. A rank with color `None` gets none. This is a collective call.
    ///
    /// # Errors
    /// [`SplitError`] if the exchange or the join fails.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Self>, SplitError> {
        self.split_with(color, key, |_| {})
    }

    /// Split the communicator, with a configuration of its own: `configure` may change the order, the algorithm, the
    /// deadline and so on, which are otherwise taken from this communicator. The shape is, if as many ranks form the
    /// new one. The order must be the same on all ranks of a color.
    ///
    /// # Errors
    /// [`SplitError`] if the exchange or the join fails.
    pub fn split_with(
        &self,
        color: Option<u32>,
        key: i64,
        configure: impl FnOnce(&mut JoinConfig),
    ) -> Result<Option<Self>, SplitError> {
        let own = [color.map_or(-1, i64::from), key];
        let mut all = vec![0; 2 * self.size() as usize];
        // On any path: the communicator's default algorithm may not support an all-gather.
        let options =
            CallOptions { algo: Some(Algo::Auto), straggler: Some(Straggler::Wait), ..CallOptions::default() };
        let desc = OpDesc::all_gather(Dtype::I64, all.len() as u64);
        let (input, output) = (bytemuck::cast_slice(&own), bytemuck::cast_slice_mut(&mut all));
        let exchanged = self.run(&desc, Buffers::Separate { input, output }, &options);
        exchanged.map_err(|source| SplitError::Exchange { name: self.name(), source })?;
        // Ranks without a color count the split too, since they take part in the next one.
        let core = self.lock().map_err(|source| SplitError::Exchange { name: self.name(), source });
        let mut core = core?;
        let ((mut config, nth), controller) = (core.next_split(), core.embedded_controller());
        drop(core);
        let Some(color) = color else { return Ok(None) };
        let (rank, world) = place(&all, color, key, self.rank());
        config.job = derived_name(&config.job, &format!("/{nth}.{color}"));
        config.become_rank(rank, world);
        configure(&mut config);
        let name = config.job.clone();
        let joined = Self::join(config).map_err(|source| SplitError::Join { name, source: Box::new(source) })?;
        if let Ok(mut core) = joined.lock() {
            core.keep_controller(controller);
        }
        Ok(Some(joined))
    }
}

/// Return a rank's position among those of its color, and their number; `all` holds each rank's color and key.
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
    fn new_ranks_follow_keys_then_old_ranks() {
        // Colors 0, 1, none, 0, 0 with keys 5, 0, 0, -1, 5.
        let all = [0, 5, 1, 0, -1, 0, 0, -1, 0, 5];
        assert_eq!(place(&all, 0, 5, 0), (1, 3));
        assert_eq!(place(&all, 1, 0, 1), (0, 1));
        assert_eq!(place(&all, 0, -1, 3), (0, 3));
        assert_eq!(place(&all, 0, 5, 4), (2, 3));
    }
}
