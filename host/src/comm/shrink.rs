//! Continuing without failed ranks, as `MPI_Comm_shrink` does in MPI's user-level failure mitigation.

use super::{Communicator, JoinError};
use crate::controller::ClientError;
use crate::controller::derived_name;
use crate::deadline::after;
use std::time::Instant;
use sumac_hal::ids::Rank;
use thiserror::Error as ThisError;

/// Why a communicator could not be shrunk. Survivors can try again.
#[derive(ThisError)]
#[non_exhaustive]
pub enum ShrinkError {
    /// This rank has left the job, or its program has cancelled the communicator.
    #[error("cannot shrink {name}: this rank is no longer a member")]
    NotMember {
        /// The communicator's name.
        name: String,
    },
    /// The controller does not report the survivors.
    #[error("cannot shrink {name}: {source}")]
    Survivors {
        /// The communicator's name.
        name: String,
        /// What went wrong.
        source: Box<ClientError>,
    },
    /// Joining the new communicator failed, for instance because another rank has died.
    #[error("joining {name}: {source}")]
    Join {
        /// Its name.
        name: String,
        /// What went wrong.
        source: Box<JoinError>,
    },
}

crate::engine::creation_error!(ShrinkError: NotMember Survivors Join);

impl Communicator {
    /// Make a new communicator of the surviving ranks, in their present order, on the devices that are available. All
    /// survivors must call this, after an error or without one; joining waits for them up to
    /// [`JoinConfig::join_timeout`](super::JoinConfig). This communicator stays as it is.
    ///
    /// The controller decides which ranks survive, the same for all. With a declared order, the new communicator has
    /// its own expression, over fewer ranks. If there are fewer, its shape is that of their machines or hosts.
    ///
    /// # Errors
    /// [`ShrinkError`] if this rank is no longer a member, or the controller or the join fails.
    pub fn shrink(&self) -> Result<Self, ShrinkError> {
        let (mut config, survivors, controller) = {
            let Ok(core) = self.lock() else { return Err(ShrinkError::NotMember { name: self.name() }) };
            let config = core.config().clone();
            let name = config.job.clone();
            let survivors = core.survivors(after(Instant::now(), config.join_timeout));
            let Some(survivors) = survivors else { return Err(ShrinkError::NotMember { name }) };
            let survivors = survivors.map_err(|source| ShrinkError::Survivors { name, source: Box::new(source) })?;
            (config, survivors, core.embedded_controller())
        };
        let (round, ranks) = survivors;
        let Some(place) = ranks.iter().position(|&rank| rank == Rank(self.rank())) else {
            return Err(ShrinkError::NotMember { name: config.job });
        };
        config.job = derived_name(&config.job, &format!("~{round}"));
        config.become_rank(place as u32, ranks.len() as u32);
        let name = config.job.clone();
        let joined = Self::join(config).map_err(|source| ShrinkError::Join { name, source: Box::new(source) })?;
        if let Ok(mut core) = joined.lock() {
            core.keep_controller(controller);
        }
        Ok(joined)
    }
}
