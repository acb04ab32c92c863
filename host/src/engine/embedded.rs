//! A controller that rank 0 runs for its job where there is none ([`JoinConfig::embedded_controller`]).
//!
//! Invariant: it serves as long as rank 0 has a communicator of the job, or one that was split from it. When the last
//! of these leaves gracefully, the other ranks have left before, so none of them misses the controller.

use super::config::{JoinConfig, JoinError};
use crate::controller::keys::{KeyStore, Principal};
use crate::controller::{Controller, ControllerConfig, ControllerError};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How often rank 0 is tried until its controller listens.
const DIAL_INTERVAL: Duration = Duration::from_millis(50);

/// How long one attempt may take.
const DIAL_TIMEOUT: Duration = Duration::from_secs(1);

/// Start the job's controller on rank 0, if the job is to have one of its own. Other ranks wait until it listens, at
/// most until the time limit for joining. Sub-communicators of the job use the same.
pub(super) fn prepare(config: &mut JoinConfig) -> Result<Option<Arc<Controller>>, JoinError> {
    if !std::mem::take(&mut config.embedded_controller) {
        return Ok(None);
    }
    let addrs = std::iter::once(config.controller).chain(config.controller_alternatives.drain(..)).collect::<Vec<_>>();
    if config.rank == 0 {
        let controller = start(config, &addrs)?;
        config.controller = controller.local_addr();
        return Ok(Some(Arc::new(controller)));
    }
    let began = Instant::now();
    while began.elapsed() < config.join_timeout {
        if let Some(addr) = addrs.iter().find(|addr| TcpStream::connect_timeout(addr, DIAL_TIMEOUT).is_ok()) {
            config.controller = *addr;
            return Ok(None);
        }
        thread::sleep(DIAL_INTERVAL);
    }
    // Joining reports why it is unreachable.
    Ok(None)
}

/// Listen on the first of these addresses that this host has. With the job's key, the controller knows this key alone.
fn start(config: &JoinConfig, addrs: &[SocketAddr]) -> Result<Controller, JoinError> {
    let principal = Principal::Tenant { name: config.tenant.clone() };
    let keys = config.key.clone().map(|key| KeyStore::of_one(key, principal)).transpose();
    let keys = keys.map_err(|error| JoinError::Membership(error.to_string()))?.map(Arc::new);
    let mut failure = None;
    for &listen in addrs {
        let mut own = ControllerConfig::new();
        (own.listen, own.keys, own.traffic_class) = (listen, keys.clone(), config.udp.traffic_class);
        match Controller::start(own) {
            Ok(controller) => return Ok(controller),
            Err(error @ ControllerError::Listen { .. }) => failure = failure.or(Some(error)),
            Err(error) => return Err(JoinError::EmbeddedController(error)),
        }
    }
    let none = || JoinError::Membership("the controller has no address".into());
    Err(failure.map_or_else(none, JoinError::EmbeddedController))
}
