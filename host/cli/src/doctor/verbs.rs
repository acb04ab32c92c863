//! Checks for RDMA: ports, their identifiers, the limit of locked memory, and devices that copy memory themselves.

use super::{Finding, Health};

/// The name of the capability.
const WHAT: &str = "RDMA (verbs)";

/// Report that verbs are not built in.
#[cfg(not(feature = "verbs"))]
pub(super) fn findings() -> Vec<Finding> {
    let advice = "build with `--features verbs`; Debian: apt-get install cmake libclang-dev libibverbs-dev";
    vec![Finding { health: Health::NotBuilt, what: WHAT, found: "not built in".into(), advice: advice.into() }]
}

#[cfg(feature = "verbs")]
pub(super) use built::findings;

#[cfg(feature = "verbs")]
mod built {
    use super::{Finding, Health, WHAT};
    use rustix::process::{Resource, getrlimit};
    use std::net::Ipv6Addr;
    use sumac_hal::verbs::{VerbsDevice, devices, max_memcpy_len_bytes};

    /// The memory that the buffers of a device's ports lock: 16 MiB, with as much in reserve.
    const LOCKED_BYTES: u64 = 32 << 20;

    pub(in crate::doctor) fn findings() -> Vec<Finding> {
        let missing =
            |found, advice: &str| vec![Finding { health: Health::Missing, what: WHAT, found, advice: advice.into() }];
        match devices() {
            Err(error) => missing(error.to_string(), ""),
            Ok(ports) if ports.is_empty() => missing(
                "no RDMA device".into(),
                "Soft-RoCE turns a network interface into one: modprobe rdma_rxe, rdma link add rxe0 type rxe netdev eth0",
            ),
            Ok(ports) => {
                let mut names: Vec<_> = ports.iter().map(|port| port.device.as_str()).collect();
                names.dedup();
                ports.iter().map(of_port).chain([locked()]).chain(names.into_iter().map(copies)).collect()
            }
        }
    }

    /// Check whether the device copies between registered memory itself.
    fn copies(device: &str) -> Finding {
        let (health, found) = match max_memcpy_len_bytes(device) {
            Ok(len_bytes) => (Health::Ok, format!("{device}: up to {len_bytes} bytes at a time")),
            Err(error) => (Health::Missing, error.to_string()),
        };
        Finding { health, what: "DMA copies", found, advice: String::new() }
    }

    fn of_port(port: &VerbsDevice) -> Finding {
        let kind = if port.is_roce { "RoCE" } else { "InfiniBand" };
        let gid = port.gid.map_or_else(
            || "no identifier".to_owned(),
            |(gid, index)| format!("[{}], index {index}", Ipv6Addr::from(gid)),
        );
        let (health, advice) = match (port.is_active, port.gid, port.mtu_bytes) {
            (false, ..) => (Health::Warn, "the port is down; check `rdma link` and bring its network interface up"),
            (_, None, _) => (Health::Warn, "give its network interface an IP address"),
            (_, _, ..4096) => (
                Health::Warn,
                "packets are shorter than possible; an MTU of 4200 or more on a RoCE interface allows 4096 bytes",
            ),
            _ => (Health::Ok, ""),
        };
        let found = format!("{}:{}, {kind}, packets of {} bytes, {gid}", port.device, port.port, port.mtu_bytes);
        Finding { health, what: WHAT, found, advice: advice.into() }
    }

    fn locked() -> Finding {
        let limit = getrlimit(Resource::Memlock).current;
        let found = limit.map_or_else(|| "no limit".into(), |bytes| format!("{} KiB", bytes >> 10));
        let (health, advice) = match limit {
            Some(bytes) if bytes < LOCKED_BYTES => (
                Health::Warn,
                "buffers of RDMA ports may not fit; raise the limit (ulimit -l, LimitMEMLOCK=) or run as root",
            ),
            _ => (Health::Ok, ""),
        };
        Finding { health, what: "locked memory", found, advice: advice.into() }
    }
}
