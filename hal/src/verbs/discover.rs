//! Discovery of RDMA devices, and selection of a port and GID.
//!
//! Invariant: a device that cannot be used hides no other. `auto` skips it, and its reason is part of the error if no
//! port is left.

use super::config::{VerbsConfig, VerbsError, VerbsLink};
use super::datagrams::Source;
use super::objects::{Context, GidEntry, PortAttr, with_devices};
use super::representor;
use std::cmp::Reverse;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::sync::Arc;

/// Where Linux describes RDMA devices.
const SYSFS: &str = "/sys/class/infiniband";

/// A port of an RDMA device, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct VerbsDevice {
    /// The device's name, as in `rdma link`.
    pub device: String,
    /// The port, counted from 1.
    pub port: u8,
    /// Whether it is active.
    pub is_active: bool,
    /// Whether it is RoCE; else InfiniBand.
    pub is_roce: bool,
    /// The MTU of its link in bytes.
    pub mtu_bytes: usize,
    /// The GID that would be selected, and its index.
    pub gid: Option<([u8; 16], u8)>,
}

/// Return this machine's RDMA ports, and why further devices cannot be used.
///
/// # Errors
/// [`VerbsError::Devices`]
pub fn devices() -> Result<(Vec<VerbsDevice>, Vec<VerbsError>), VerbsError> {
    let (mut found, mut failed) = (Vec::new(), Vec::new());
    for device in names()? {
        if let Err(error) = list(&device, Path::new(SYSFS), &mut found) {
            failed.push(error);
        }
    }
    Ok((found, failed))
}

fn list(device: &str, root: &Path, found: &mut Vec<VerbsDevice>) -> Result<(), VerbsError> {
    let context = usable(device, root)?;
    let gids = context.gids()?;
    for port in 1..=context.device_attr()?.phys_port_cnt {
        let attr = context.port_attr(port)?;
        let gid = best(&gids, port, None).map(|entry| (entry.gid, entry.index));
        let (is_active, is_roce, mtu_bytes) = (attr.is_active, attr.is_ethernet, attr.mtu_bytes);
        found.push(VerbsDevice { device: device.to_owned(), port, is_active, is_roce, mtu_bytes, gid });
    }
    Ok(())
}

/// Return the active port that has a GID of this address, with a preference for RoCE version 2.
///
/// # Errors
/// [`VerbsError`]; [`VerbsError::NoPort`] says why the others cannot be used.
pub fn link_at(addr: IpAddr) -> Result<VerbsLink, VerbsError> {
    let (candidates, skipped) = scan(&VerbsLink::default(), Some(addr), Path::new(SYSFS))?;
    let found = candidates.into_iter().find(|candidate| candidate.is_preferred);
    let PortLocation { context, gid, .. } =
        found.ok_or_else(|| VerbsError::NoPort { at: Some(addr), skipped: skipped.clone() })?.location;
    let (port, gid_index) = (Some(gid.port), Some(gid.index));
    Ok(VerbsLink { device: Some(context.name.clone()), port, gid_index, ..VerbsLink::default() })
}

/// Return the GID of an IP address.
fn gid_of(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
        IpAddr::V6(addr) => addr.octets(),
    }
}

fn names() -> Result<Vec<String>, VerbsError> {
    with_devices(|devices| devices.iter().map(|(name, _)| name.clone()).collect())
}

/// The device, port and GID that a port is opened on.
pub(super) struct PortLocation {
    pub(super) context: Arc<Context>,
    pub(super) attr: PortAttr,
    pub(super) gid: GidEntry,
}

/// Find the best port that matches the configuration.
pub(super) fn find(config: &VerbsConfig) -> Result<PortLocation, VerbsError> {
    find_in(config, Path::new(SYSFS))
}

fn find_in(config: &VerbsConfig, root: &Path) -> Result<PortLocation, VerbsError> {
    let (mut candidates, skipped) = scan(&config.link, config.prefer, root)?;
    // A stable order: among equals, the first.
    candidates.sort_by_key(|candidate| (!candidate.is_preferred, Reverse(candidate.location.attr.rate)));
    let found = candidates.into_iter().next();
    Ok(found.ok_or(VerbsError::NoPort { at: None, skipped })?.location)
}

/// A port that can be used.
struct Candidate {
    location: PortLocation,
    /// It has the preferred address.
    is_preferred: bool,
}

/// Return the ports that match `link`, and why devices were skipped.
fn scan(link: &VerbsLink, prefer: Option<IpAddr>, root: &Path) -> Result<(Vec<Candidate>, Vec<String>), VerbsError> {
    let (mut found, mut skipped) = (Vec::new(), Vec::new());
    match &link.device {
        Some(device) => examine(device, (link, prefer), root, &mut found)?,
        None => {
            for device in names()? {
                if let Err(error) = examine(&device, (link, prefer), root, &mut found) {
                    skipped.push(error.to_string());
                }
            }
        }
    }
    Ok((found, skipped))
}

/// Add the ports of a device that match; an error if there are none.
fn examine(
    device: &str,
    (link, prefer): (&VerbsLink, Option<IpAddr>),
    root: &Path,
    found: &mut Vec<Candidate>,
) -> Result<(), VerbsError> {
    let context = usable(device, root)?;
    let gids = context.gids()?;
    let before = found.len();
    let mut why = VerbsError::NotActive { device: device.to_owned() };
    let ports = 1..=context.device_attr()?.phys_port_cnt;
    for port in ports.filter(|port| link.port.is_none_or(|wanted| wanted == *port)) {
        let attr = context.port_attr(port)?;
        if !attr.is_active {
            continue;
        }
        let gid = match link.gid_index {
            Some(index) => gids.iter().find(|entry| (entry.port, entry.index) == (port, index)).copied(),
            None => best(&gids, port, prefer),
        };
        match gid {
            Some(gid) => {
                let is_preferred = prefer.is_some_and(|addr| gid_of(addr) == gid.gid);
                let context = Arc::clone(&context);
                found.push(Candidate { location: PortLocation { context, attr, gid }, is_preferred });
            }
            None => why = VerbsError::NoGid { device: device.to_owned(), port, index: link.gid_index },
        }
    }
    if found.len() > before { Ok(()) } else { Err(why) }
}

impl PortLocation {
    /// Return how packets and connections of this configuration leave the port.
    pub(super) fn source(&self, config: &VerbsConfig) -> Result<Source, VerbsError> {
        let port = self.gid.port;
        let index = config.link.partition_key.map_or(Ok(Some(0)), |key| self.context.partition_index(port, key));
        let no_partition = || VerbsError::NoPartition {
            device: self.context.name.clone(),
            port,
            key: config.link.partition_key.unwrap_or_default(),
        };
        Ok(Source {
            gid: self.gid,
            traffic_class: config.traffic_class,
            service_level: config.link.service_level,
            partition_index: index?.ok_or_else(no_partition)?,
        })
    }
}

/// Open a device, unless its kind has no queue pairs that this crate needs.
fn usable(device: &str, root: &Path) -> Result<Arc<Context>, VerbsError> {
    if let Some(interface) = representor::of(root, device) {
        return Err(VerbsError::Representor { device: device.to_owned(), interface });
    }
    let context = Context::open(device)?;
    if context.is_iwarp() { Err(VerbsError::Iwarp { device: device.to_owned() }) } else { Ok(context) }
}

/// Select a GID of a port: that of the preferred address, then RoCE version 2 (which is routable) over IPv4, then over
/// IPv6 except link-local addresses, then the first entry.
fn best(gids: &[GidEntry], port: u8, prefer: Option<IpAddr>) -> Option<GidEntry> {
    let prefer = prefer.map(gid_of);
    let rank = |entry: &GidEntry| {
        let addr = Ipv6Addr::from(entry.gid);
        let wide = addr.to_ipv4_mapped().is_some() || !addr.is_unicast_link_local();
        let preferred = prefer == Some(entry.gid);
        (!(preferred && entry.is_v2), !preferred, !entry.is_v2, addr.to_ipv4_mapped().is_none(), !wide, entry.index)
    };
    gids.iter().filter(|entry| entry.port == port && entry.gid != [0; 16]).min_by_key(|entry| rank(entry)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::fake::machine;
    use std::net::Ipv4Addr;

    fn entry(index: u8, addr: IpAddr, is_v2: bool) -> GidEntry {
        GidEntry { gid: gid_of(addr), port: 1, index, is_v2 }
    }

    #[test]
    fn best_gid_is_preferred_then_routable() {
        let local: IpAddr = "fe80::1".parse().expect("an address");
        let wide: IpAddr = "2001:db8::1".parse().expect("an address");
        let (a, b) = (IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)));
        let all = [
            entry(0, local, false),
            entry(1, local, true),
            entry(2, wide, true),
            entry(3, a, false),
            entry(4, a, true),
            entry(5, b, true),
        ];
        let index = |count: usize, prefer| best(&all[..count], 1, prefer).map(|entry| entry.index);
        assert_eq!(
            [0, 1, 2, 3, 4, 6].map(|count| index(count, None)),
            [None, Some(0), Some(1), Some(2), Some(2), Some(4)]
        );
        assert_eq!((index(6, Some(b)), index(6, Some(wide)), index(6, Some(a))), (Some(5), Some(2), Some(4)));
        assert_eq!(best(&all, 2, None), None, "GIDs of other ports do not count");
    }

    const A: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
    const B: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

    /// The device that `auto` selects for an address, or why there is none.
    fn auto(prefer: Option<Ipv4Addr>) -> Result<String, String> {
        let config = VerbsConfig { prefer: prefer.map(IpAddr::V4), ..VerbsConfig::default() };
        find(&config).map(|found| found.context.name.clone()).map_err(|error| error.to_string())
    }

    fn add_two() {
        machine(|machine| _ = machine.add("mlx5_0", A));
        machine(|machine| _ = machine.add("mlx5_1", B));
    }

    #[test]
    fn auto_selects_the_port_of_the_preferred_address() {
        add_two();
        assert_eq!([A, B].map(|addr| auto(Some(addr))), [Ok("mlx5_0".into()), Ok("mlx5_1".into())]);
        assert_eq!(auto(Some(Ipv4Addr::LOCALHOST)), Ok("mlx5_0".into()), "of equals the first");
        assert_eq!(link_at(B.into()).expect("a port").to_string(), "mlx5_1:1:0");
        let none = link_at(Ipv4Addr::LOCALHOST.into()).expect_err("no such address").to_string();
        assert!(none.contains("at 127.0.0.1"), "{none}");
    }

    #[test]
    fn auto_selects_the_fastest_of_others() {
        add_two();
        machine(|machine| machine.card(0).speed = 1);
        assert_eq!(auto(None), Ok("mlx5_1".into()));
        assert_eq!(auto(Some(A)), Ok("mlx5_0".into()), "the address matters more");
    }

    #[test]
    fn auto_skips_devices_that_fail_and_reports_why_if_none_is_left() {
        add_two();
        machine(|machine| machine.card(0).opens = false);
        assert_eq!(auto(Some(A)), Ok("mlx5_1".into()));
        let (ports, failed) = devices().expect("a list");
        assert_eq!(ports.iter().map(|port| &*port.device).collect::<Vec<_>>(), ["mlx5_1"]);
        assert!(failed[0].to_string().contains("mlx5_0: can't open the device"), "{failed:?}");
        machine(|machine| machine.card(1).is_active = false);
        let error = auto(None).expect_err("nothing is left");
        assert!(error.contains("mlx5_0: can't open") && error.contains("no port of mlx5_1 is active"), "{error}");
    }

    #[test]
    fn auto_skips_iwarp() {
        add_two();
        machine(|machine| machine.set_iwarp(0));
        assert_eq!(auto(Some(A)), Ok("mlx5_1".into()));
        let named = VerbsConfig { link: "mlx5_0".parse().expect("a name"), ..VerbsConfig::default() };
        let error = find(&named).err().expect("iWARP has no datagrams").to_string();
        assert!(error.contains("mlx5_0 is an iWARP device"), "{error}");
    }

    #[test]
    fn auto_skips_representors_and_names_the_sub_function() {
        add_two();
        machine(|machine| machine.card(0).gids.clear());
        let sysfs = representor::tests::Sysfs::new();
        sysfs.interface("mlx5_0", "p0", Some("p0"), Some("a4b1c2"));
        sysfs.interface("mlx5_1", "enp3s0f0s0", None, None);
        let found = |config: &VerbsConfig| find_in(config, sysfs.root());
        assert_eq!(found(&VerbsConfig::default()).map(|found| found.context.name.clone()).ok(), Some("mlx5_1".into()));
        let named = VerbsConfig { link: "mlx5_0".parse().expect("a name"), ..VerbsConfig::default() };
        let error = found(&named).err().expect("it carries raw Ethernet only").to_string();
        assert!(error.contains("mlx5_0 is a switchdev representor (p0)") && error.contains("sub-function"), "{error}");
    }
}
