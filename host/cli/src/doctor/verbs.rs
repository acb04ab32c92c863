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
    use sumac_hal::udp::UdpConfig;
    use sumac_hal::verbs::{
        VerbsDevice, VerbsError, alias_support, device_locked_bytes, devices, max_memcpy_len_bytes, port_locked_bytes,
        rank_locked_bytes,
    };

    /// A device's ranks with zero-copy over RDMA, at most, and its redo slots.
    const RANKS: usize = 128;
    const REDO_BYTES: u64 = 32 << 20;

    /// The memory that a rank registers at first for its operations and results.
    const OPERATIONS_BYTES: u64 = 8 << 20;

    pub(in crate::doctor) fn findings() -> Vec<Finding> {
        let missing =
            |found, advice: &str| vec![Finding { health: Health::Missing, what: WHAT, found, advice: advice.into() }];
        match devices() {
            Err(error) => missing(error.to_string(), ""),
            Ok((ports, failed)) if ports.is_empty() && failed.is_empty() => missing(
                "no RDMA device".into(),
                "Soft-RoCE turns a network interface into one: modprobe rdma_rxe, rdma link add rxe0 type rxe netdev eth0",
            ),
            Ok((ports, failed)) => {
                let mut names: Vec<_> = ports.iter().map(|port| port.device.as_str()).collect();
                names.dedup();
                let unusable = |error: VerbsError| Finding {
                    health: Health::Warn,
                    what: WHAT,
                    found: error.to_string(),
                    advice: String::new(),
                };
                let ports = ports.iter().map(of_port).chain(failed.into_iter().map(unusable));
                ports
                    .chain([locked()])
                    .chain(names.into_iter().flat_map(|name| [copies(name), aliases(name)]))
                    .collect()
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

    /// Check whether the device shares memory between its functions, as a card that copies from and to its host needs.
    fn aliases(device: &str) -> Finding {
        let (health, found) = match alias_support(device) {
            Ok(support) => {
                (Health::Ok, format!("{device}: exports and attaches memory, as function {}", support.function))
            }
            Err(error) => (Health::Missing, error.to_string()),
        };
        Finding { health, what: "alias keys", found, advice: String::new() }
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
        let packets = port_locked_bytes(UdpConfig::default().receive_buffer_bytes);
        let rank = packets.max(rank_locked_bytes() + OPERATIONS_BYTES);
        let device = packets + device_locked_bytes(RANKS, RANKS) + REDO_BYTES;
        limited(getrlimit(Resource::Memlock).current, rank, device)
    }

    /// Compare the limit with what a rank and a device need.
    fn limited(limit: Option<u64>, rank: u64, device: u64) -> Finding {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let needs = format!("a rank needs {} MiB, a device with one shard up to {} MiB", mib(rank), mib(device));
        let found = limit.map_or_else(|| "no limit".into(), |bytes| format!("{} KiB; {needs}", bytes >> 10));
        let (health, advice) = match limit {
            Some(bytes) if bytes < rank => {
                (Health::Warn, "no RDMA port can be opened; raise the limit (ulimit -l, LimitMEMLOCK=) or run as root")
            }
            Some(bytes) if bytes < device => {
                (Health::Warn, "not enough for a device; raise the limit (ulimit -l, LimitMEMLOCK=) or run as root")
            }
            _ => (Health::Ok, ""),
        };
        Finding { health, what: "locked memory", found, advice: advice.into() }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn limit_is_compared_with_what_ranks_and_devices_need() {
            let health = |limit| limited(limit, 10 << 20, 50 << 20).health;
            assert_eq!(health(None), Health::Ok);
            assert_eq!(health(Some(50 << 20)), Health::Ok);
            let low = limited(Some(20 << 20), 10 << 20, 50 << 20);
            assert_eq!((low.health, low.advice.contains("for a device")), (Health::Warn, true));
            assert!(low.found.contains("20480 KiB; a rank needs 10 MiB, a device with one shard up to 50 MiB"));
            assert!(limited(Some(1 << 20), 10 << 20, 50 << 20).advice.contains("no RDMA port"));
        }
    }
}
