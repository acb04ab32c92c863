//! Going on without ranks that died, as MPI's user-level failure mitigation calls it (`MPI_Comm_shrink`).

use super::{Communicator, JoinError};
use crate::controller::ClientError;
use crate::controller::derived_name;
use std::time::Instant;
use sumac_hal::ids::Rank;
use thiserror::Error as ThisError;

/// Why there is no smaller communicator. Whoever is left can try again.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum ShrinkError {
    /// This rank has left, or was given up by its own program.
    #[error("{name} can't shrink: this rank is no member any more")]
    NoMember {
        /// The communicator's name.
        name: String,
    },
    /// The controller does not say who is left.
    #[error("shrinking {name}: {source}")]
    Survivors {
        /// The communicator's name.
        name: String,
        /// What went wrong.
        source: Box<ClientError>,
    },
    /// The new communicator did not come about, as when another rank has died meanwhile.
    #[error("joining {name}: {source}")]
    Join {
        /// Its name.
        name: String,
        /// What went wrong.
        source: Box<JoinError>,
    },
}

impl Communicator {
    /// Make a communicator of those ranks that are left, in the order of their ranks here, on what devices there are. All
    /// who are left call this, after an error or without; who does not is waited for as long as for joining
    /// ([`JoinConfig::join_timeout`](super::JoinConfig)). This communicator stays as it is.
    ///
    /// Which ranks are left is the controller's word, the same for all. With a declared order the new communicator has
    /// an expression of its own, over fewer ranks.
    ///
    /// # Errors
    /// [`ShrinkError`].
    pub fn shrink(&self) -> Result<Self, ShrinkError> {
        let (mut config, left) = {
            let Ok(core) = self.lock() else { return Err(ShrinkError::NoMember { name: self.name() }) };
            let name = core.config.job.clone();
            let Some(session) = &core.session else { return Err(ShrinkError::NoMember { name }) };
            let left = session.survivors(Instant::now() + core.config.join_timeout);
            (core.config.clone(), left.map_err(|source| ShrinkError::Survivors { name, source: Box::new(source) })?)
        };
        let (round, ranks) = left;
        let Some(place) = ranks.iter().position(|&rank| rank == Rank(self.rank())) else {
            return Err(ShrinkError::NoMember { name: config.job });
        };
        config.job = derived_name(&config.job, &format!("~{round}"));
        (config.rank, config.world) = (place as u32, ranks.len() as u32);
        let name = config.job.clone();
        Self::join(config).map_err(|source| ShrinkError::Join { name, source: Box::new(source) })
    }
}
