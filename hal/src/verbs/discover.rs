//! Discovery of RDMA devices, and selection of a port and GID.

use super::config::{VerbsConfig, VerbsError, VerbsLink};
use super::objects::{Context, GidEntry, PortAttr, with_devices};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

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

/// Return this machine's RDMA ports.
///
/// # Errors
/// [`VerbsError`]
pub fn devices() -> Result<Vec<VerbsDevice>, VerbsError> {
    let mut found = Vec::new();
    for device in names()? {
        let context = Context::open(&device)?;
        let gids = context.gids()?;
        for port in 1..=context.device_attr()?.phys_port_cnt {
            let attr = context.port_attr(port)?;
            let gid = best(&gids, port, None).map(|entry| (entry.gid, entry.index));
            let (is_active, is_roce, mtu_bytes) = (attr.is_active, attr.is_ethernet, attr.mtu_bytes);
            found.push(VerbsDevice { device: device.clone(), port, is_active, is_roce, mtu_bytes, gid });
        }
    }
    Ok(found)
}

/// Return the active port that has a GID of this address, if any, with a preference for RoCE version 2.
///
/// # Errors
/// [`VerbsError`]
pub fn link_at(addr: IpAddr) -> Result<Option<VerbsLink>, VerbsError> {
    for device in names()? {
        let context = Context::open(&device)?;
        let gids = context.gids()?;
        for port in 1..=context.device_attr()?.phys_port_cnt {
            let found = best(&gids, port, Some(addr)).filter(|entry| entry.gid == gid_of(addr));
            if let Some(entry) = found
                && context.port_attr(port)?.is_active
            {
                return Ok(Some(VerbsLink { device: Some(device), port: Some(port), gid_index: Some(entry.index) }));
            }
        }
    }
    Ok(None)
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

/// Find the first port that matches the configuration.
pub(super) fn find(config: &VerbsConfig) -> Result<PortLocation, VerbsError> {
    let link = &config.link;
    let candidates = match &link.device {
        Some(device) => vec![device.clone()],
        None => names()?,
    };
    let mut no_gid = None;
    for device in &candidates {
        let context = Context::open(device)?;
        let ports = 1..=context.device_attr()?.phys_port_cnt;
        for port in ports.filter(|port| link.port.is_none_or(|wanted| wanted == *port)) {
            let attr = context.port_attr(port)?;
            if !attr.is_active {
                continue;
            }
            let gids = context.gids()?;
            let gid = match link.gid_index {
                Some(index) => gids.iter().find(|entry| (entry.port, entry.index) == (port, index)).copied(),
                None => best(&gids, port, config.prefer),
            };
            match gid {
                Some(gid) => return Ok(PortLocation { context, attr, gid }),
                None => no_gid = Some(VerbsError::NoGid { device: device.clone(), port, index: link.gid_index }),
            }
        }
    }
    Err(no_gid.unwrap_or_else(|| VerbsError::NotActive {
        device: link.device.clone().unwrap_or_else(|| "any device".into()),
    }))
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
}
