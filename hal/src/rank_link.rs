//! Opens a rank's end of a link to a device on another host.

use crate::remote::{LinkFailure, RankLink};
use crate::traffic_class::TrafficClass;
use std::boxed::Box;
#[cfg(not(feature = "verbs"))]
use std::format;
use std::net::IpAddr;

/// Open a rank's link on the RDMA port `name` (see `VerbsLink`); the GID of the address `prefer` is preferred. With the
/// feature `double`, a name `exchange:NAME` opens a link on that in-process exchange.
///
/// # Errors
/// [`LinkFailure`] if the link cannot be opened, or the build has no verbs.
pub fn open(name: &str, prefer: IpAddr, traffic_class: TrafficClass) -> Result<Box<dyn RankLink>, LinkFailure> {
    #[cfg(feature = "double")]
    if let Some(exchange) = crate::remote::Exchange::named(name) {
        return Ok(Box::new(exchange.rank_link()?));
    }
    #[cfg(feature = "verbs")]
    return crate::verbs::rank_link(name, prefer, traffic_class);
    #[cfg(not(feature = "verbs"))]
    {
        let _ = (prefer, traffic_class);
        Err(LinkFailure(format!(
            "RDMA port {name}: this build has no verbs; build with `--features verbs`, which needs cmake, libclang and \
             libibverbs (Debian: apt-get install cmake libclang-dev libibverbs-dev)"
        )))
    }
}
