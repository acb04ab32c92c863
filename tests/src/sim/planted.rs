//! The bug planted in all components of a run, if any: only with the feature `planted` (`sumac_hal::planted`).

use super::controller::Controller;
use sumac::harness::{Calls, Operations};
use sumac::transport::packets::Endpoint;
use sumac::transport::path::PathProber;
use sumac_device::Node;
use sumac_hal::ids::Epoch;
use sumac_hal::planted;
#[cfg(feature = "planted")]
use sumac_hal::planted::Bug;

/// A bug, or none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Planted {
    #[cfg(feature = "planted")]
    pub(super) bug: Option<Bug>,
}

#[cfg(feature = "planted")]
impl From<Bug> for Planted {
    fn from(bug: Bug) -> Self {
        Self { bug: Some(bug) }
    }
}

impl Planted {
    pub(super) fn node(self, node: Node<'_>) -> Node<'_> {
        #[cfg(feature = "planted")]
        let node = self.bug.into_iter().fold(node, |mut node, bug| {
            node.plant(bug);
            node
        });
        node
    }

    pub(super) fn endpoint(self, endpoint: Endpoint) -> Endpoint {
        #[cfg(feature = "planted")]
        let endpoint = self.bug.into_iter().fold(endpoint, |mut endpoint, bug| {
            endpoint.plant(bug);
            endpoint
        });
        endpoint
    }

    pub(super) fn prober(self, prober: PathProber) -> PathProber {
        #[cfg(feature = "planted")]
        let prober = self.bug.into_iter().fold(prober, |mut prober, bug| {
            prober.plant(bug);
            prober
        });
        prober
    }

    pub(super) fn controller(self, controller: Controller) -> Controller {
        #[cfg(feature = "planted")]
        let controller = self.bug.into_iter().fold(controller, |mut controller, bug| {
            controller.machine.plant(bug);
            controller.connections.plant(bug);
            controller
        });
        controller
    }

    pub(super) fn calls(self, calls: Calls) -> Calls {
        #[cfg(feature = "planted")]
        self.bug.into_iter().for_each(|bug| calls.plant(bug));
        calls
    }

    pub(super) fn operations(self, operations: Operations) -> Operations {
        #[cfg(feature = "planted")]
        let operations = self.bug.into_iter().fold(operations, |mut operations, bug| {
            operations.plant(bug);
            operations
        });
        operations
    }

    /// Return whether calls forget the path that they had in an earlier view.
    pub(super) fn forgets_paths(self) -> bool {
        planted!(self, EarlierPathForgotten)
    }

    /// Return whether refused calls keep their numbers.
    pub(super) fn counts_refused_calls(self) -> bool {
        planted!(self, RefusedCallCounted)
    }

    /// Return the epoch that keys are derived from.
    pub(super) fn key_epoch(self, epoch: Epoch) -> Epoch {
        if planted!(self, EpochUnchecked) { Epoch::default() } else { epoch }
    }

    /// Return its name as code, if there is one.
    pub(super) fn code(self) -> Option<String> {
        #[cfg(feature = "planted")]
        return self.bug.map(|bug| format!("Bug::{bug:?}.into()"));
        #[cfg(not(feature = "planted"))]
        None
    }
}
