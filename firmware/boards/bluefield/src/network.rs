//! The network of the data ports: which interface is theirs, and its address.

use crate::config::{Cidr, Config};
use crate::log::Log;
use crate::netlink::{ANSWER_BYTES, Netlink, open_socket};
use crate::system::wait_readable;
use rustix::net::{RecvFlags, recv};
use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};
use thiserror::Error;

/// The card's address on its link to the host, over rshim (the vendor's).
const HOST_LINK_ADDRESS: Cidr = Cidr { ip: Ipv4Addr::new(192, 168, 100, 2), prefix_len: 30 };

/// How long no interface has to change until the data ports' one is chosen by its kind.
const SETTLE: Duration = Duration::from_secs(1);

/// How long to wait for an interface to appear.
const APPEAR_LIMIT: Duration = Duration::from_secs(30);

/// Multicast group of interface changes (Linux, include/uapi/linux/rtnetlink.h: RTMGRP_LINK).
const LINK_GROUP: u32 = 1;

const SYS_CLASS_NET: &str = "/sys/class/net";

/// Why the network could not be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The interface did not appear.
    #[error("no interface {wanted} appeared within {} s; existing interfaces: {found}", APPEAR_LIMIT.as_secs())]
    Absent {
        /// The interface waited for.
        wanted: String,
        /// The existing interfaces.
        found: String,
    },
    /// Several interfaces may be meant.
    #[error(
        "several interfaces may carry the data ports: {candidates}. Name one with sumac.interface=, by its name or its \
         port (such as p0)"
    )]
    Ambiguous {
        /// The interfaces, with drivers and ports.
        candidates: String,
    },
    /// A netlink or system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// The system's error.
        source: io::Error,
    },
}

/// What an interface is, by its driver: without udev, names are only the order in which interfaces appeared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Not hardware, such as loopback.
    Virtual,
    /// The link to the card's host, over rshim.
    HostLink,
    /// The card's management port.
    Management,
    /// This side of a function that the host or a virtual machine has. What is sent here arrives there.
    Representor,
    /// Any other hardware, possibly emulated: an uplink, a sub-function, a NIC.
    Port,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// What it is.
    pub kind: Kind,
    /// Its driver, if it has one.
    pub driver: Option<String>,
    /// The port of its card (`phys_port_name`), if the driver names it.
    pub port: Option<String>,
    /// Its MAC address, if any.
    pub mac: Option<[u8; 6]>,
}

impl Interface {
    /// Return a link-local address (RFC 3927) derived from the MAC address, so that it is the same at each start.
    fn link_local(&self) -> Cidr {
        let [.., third, fourth] = self.mac.unwrap_or_default();
        // The first and the last 256 addresses are reserved.
        let third = third.clamp(1, 254);
        Cidr { ip: Ipv4Addr::new(169, 254, third, fourth), prefix_len: 16 }
    }
}

/// Return the interfaces listed in `folder` (`/sys/class/net`), sorted by name.
///
/// # Errors
/// It cannot be read.
pub fn interfaces(folder: &Path) -> io::Result<Vec<Interface>> {
    let mut all: Vec<_> = fs::read_dir(folder)?.flatten().filter_map(|entry| interface(&entry.path())).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

fn interface(folder: &Path) -> Option<Interface> {
    let read = |file: &str| fs::read_to_string(folder.join(file)).ok();
    let driver = driver_of(&folder.join("device"));
    // Reading fails for drivers that name no ports.
    let port = read("phys_port_name").map(|text| text.trim().to_owned()).filter(|port| !port.is_empty());
    Some(Interface {
        name: folder.file_name()?.to_str()?.to_owned(),
        // An interface that has gone meanwhile has no index.
        index: read("ifindex")?.trim().parse().ok()?,
        kind: kind(folder, driver.as_deref(), port.as_deref()),
        driver,
        port,
        mac: read("address").and_then(|text| parse_mac(text.trim())),
    })
}

/// Return what the interface at this folder is (Linux: drivers/platform/mellanox/mlxbf-tmfifo.c, drivers/net/ethernet/
/// mellanox/mlxbf_gige and mlx5/core/en_rep.c).
fn kind(folder: &Path, driver: Option<&str>, port: Option<&str>) -> Kind {
    let Ok(device) = folder.join("device").canonicalize() else { return Kind::Virtual };
    // The link to the host is a virtio device of the FIFO's driver.
    let is_fifo = |device: &Path| driver_of(device).as_deref() == Some("mlxbf-tmfifo");
    let is_uplink = |port: &str| port.strip_prefix('p').is_some_and(|digits| digits.parse::<u32>().is_ok());
    match driver {
        _ if device.ancestors().any(is_fifo) => Kind::HostLink,
        Some("mlxbf_gige") => Kind::Management,
        Some(driver) if driver.starts_with("mlx5_core") && !port.is_none_or(is_uplink) => Kind::Representor,
        _ => Kind::Port,
    }
}

/// Return the name of a device's driver.
fn driver_of(device: &Path) -> Option<String> {
    let driver = fs::read_link(device.join("driver")).ok()?;
    Some(driver.file_name()?.to_str()?.to_owned())
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let bytes: Option<Vec<u8>> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
    bytes?.try_into().ok()
}

/// Return the interface for the data ports: the one with this name or port, else the only one of [`Kind::Port`].
///
/// # Errors
/// There are several.
fn choose<'a>(all: &'a [Interface], wanted: Option<&str>) -> Result<Option<&'a Interface>, NetworkError> {
    let only = |found: Vec<&'a Interface>| match found[..] {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        _ => {
            Err(NetworkError::Ambiguous { candidates: found.into_iter().map(describe).collect::<Vec<_>>().join(", ") })
        }
    };
    match wanted {
        None => only(all.iter().filter(|interface| interface.kind == Kind::Port).collect()),
        Some(wanted) => match all.iter().find(|interface| interface.name == wanted) {
            Some(named) => Ok(Some(named)),
            None => only(all.iter().filter(|interface| interface.port.as_deref() == Some(wanted)).collect()),
        },
    }
}

/// Return an interface's name, and its driver and port where known.
fn describe(interface: &Interface) -> String {
    let parts: Vec<_> = [&interface.driver, &interface.port].into_iter().flatten().map(String::as_str).collect();
    if parts.is_empty() { interface.name.clone() } else { format!("{} ({})", interface.name, parts.join(" ")) }
}

/// Bring up loopback, the host's link and the ports, and assign the data ports' interface its address, which is
/// returned.
///
/// # Errors
/// [`NetworkError`].
pub fn configure(config: &Config, log: &Log) -> Result<Cidr, NetworkError> {
    let mut netlink = Netlink::open().map_err(system("netlink"))?;
    let wanted = config.interface.as_deref();
    let (all, data) = wait_for_interface(wanted)?;
    for interface in &all {
        let is_host_link = interface.kind == Kind::HostLink;
        if interface.name == "lo" || is_host_link || interface.kind == Kind::Port || interface == &data {
            let up = netlink.set_up(interface.index);
            let up = up.and_then(|()| {
                if is_host_link { netlink.add_address(interface.index, HOST_LINK_ADDRESS) } else { Ok(()) }
            });
            match up {
                Err(error) if *interface == data => return Err(system(&data.name)(error)),
                Err(error) => log.warn(&format!("{}: {error}", interface.name)),
                Ok(()) => {}
            }
        }
    }
    let own = netlink.addresses(data.index).map_err(system(&data.name))?;
    let ip = config.ip.or_else(|| own.first().copied()).unwrap_or_else(|| data.link_local());
    if !own.contains(&ip) {
        netlink.add_address(data.index, ip).map_err(system(&format!("{} {ip}", data.name)))?;
    }
    if let Some(gateway) = config.gateway {
        netlink.add_gateway(gateway).map_err(system(&format!("gateway {gateway}")))?;
    }
    log.info(&format!("network: {} {ip}", describe(&data)));
    Ok(ip)
}

/// Return the address of the data ports on a machine whose network is managed by others.
///
/// # Errors
/// [`NetworkError`], also if the interface has no address.
pub fn existing_address(config: &Config) -> Result<Cidr, NetworkError> {
    if let Some(ip) = config.ip {
        return Ok(ip);
    }
    let all = interfaces(Path::new(SYS_CLASS_NET)).map_err(system(SYS_CLASS_NET))?;
    let data = choose(&all, config.interface.as_deref())?.ok_or_else(|| absent(&all, config.interface.as_deref()))?;
    let mut netlink = Netlink::open().map_err(system("netlink"))?;
    let own = netlink.addresses(data.index).map_err(system(&data.name))?;
    let none = || io::Error::other("it has no IPv4 address; name one with ip=");
    own.first().copied().ok_or_else(|| system(&data.name)(none()))
}

fn system(what: &str) -> impl FnOnce(io::Error) -> NetworkError + use<> {
    let what = what.to_owned();
    move |source| NetworkError::System { what, source }
}

fn absent(all: &[Interface], wanted: Option<&str>) -> NetworkError {
    let found: Vec<_> = all.iter().map(describe).collect();
    let wanted = wanted.unwrap_or("of a NIC").to_owned();
    NetworkError::Absent { wanted, found: found.join(", ") }
}

/// Wait for the interface of the data ports; return all interfaces, and it. One that is chosen by its kind may not be
/// the only one for long, so that the interfaces have to settle.
fn wait_for_interface(wanted: Option<&str>) -> Result<(Vec<Interface>, Interface), NetworkError> {
    let deadline = Instant::now() + APPEAR_LIMIT;
    // Subscribe before listing, so that no change is missed.
    let changes = open_socket(LINK_GROUP).map_err(system("netlink"))?;
    let mut is_settled = wanted.is_some();
    loop {
        let all = interfaces(Path::new(SYS_CLASS_NET)).map_err(system(SYS_CLASS_NET))?;
        let data = choose(&all, wanted)?.cloned();
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = match data {
            Some(data) if is_settled || left.is_zero() => return Ok((all, data)),
            None if left.is_zero() => return Err(absent(&all, wanted)),
            Some(_) => left.min(SETTLE),
            None => left,
        };
        wait_readable(&changes, wait).map_err(system("netlink"))?;
        let mut buffer = [0; ANSWER_BYTES];
        let mut has_changed = false;
        while recv(&changes, &mut buffer[..], RecvFlags::DONTWAIT).is_ok() {
            has_changed = true;
        }
        is_settled = wanted.is_some() || !has_changed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A folder like /sys. Each interface has a device with a driver, perhaps below another device with one.
    fn sys(all: &[(&str, &[&str], Option<&str>)]) -> tempfile::TempDir {
        let sys = tempfile::tempdir().expect("a folder");
        for (index, (name, drivers, port)) in all.iter().enumerate() {
            let folder = sys.path().join("class/net").join(name);
            fs::create_dir_all(&folder).expect("made");
            fs::write(folder.join("ifindex"), format!("{}\n", index + 1)).expect("written");
            fs::write(folder.join("address"), format!("02:00:00:00:00:0{}\n", index + 1)).expect("written");
            if let Some(port) = port {
                fs::write(folder.join("phys_port_name"), format!("{port}\n")).expect("written");
            }
            let mut device = sys.path().join("devices").join(name);
            for driver in *drivers {
                device.push(driver);
                fs::create_dir_all(&device).expect("made");
                symlink(Path::new("/sys/bus/any/drivers").join(driver), device.join("driver")).expect("made");
            }
            if !drivers.is_empty() {
                symlink(&device, folder.join("device")).expect("made");
            }
        }
        sys
    }

    const FIFO: &[&str] = &["mlxbf-tmfifo", "virtio_net"];
    const NIC: &[&str] = &["mlx5_core"];

    fn all(sys: &tempfile::TempDir) -> Vec<Interface> {
        interfaces(&sys.path().join("class/net")).expect("readable")
    }

    /// A BlueField-3 in DPU mode, with the kernel's names: the management port comes first.
    #[test]
    fn interfaces_of_a_card_are_told_apart_by_driver_and_port() {
        let sys = sys(&[
            ("eth0", &["mlxbf_gige"], None),
            ("eth1", FIFO, None),
            ("eth2", NIC, Some("p0")),
            ("eth3", NIC, Some("pf0hpf")),
            ("eth4", NIC, Some("pf0vf0")),
            ("eth5", NIC, Some("pf0sf0")),
            ("lo", &[], None),
        ]);
        let all = all(&sys);
        let kinds: Vec<_> = all.iter().map(|interface| interface.kind).collect();
        let representor = Kind::Representor;
        let expected =
            [Kind::Management, Kind::HostLink, Kind::Port, representor, representor, representor, Kind::Virtual];
        assert_eq!(kinds, expected);
        let name = |wanted| choose(&all, wanted).expect("certain").map(|interface| interface.name.as_str());
        assert_eq!((name(None), name(Some("eth0")), name(Some("p7"))), (Some("eth2"), Some("eth0"), None));
        assert_eq!((name(Some("p0")), name(Some("pf0hpf"))), (Some("eth2"), Some("eth3")), "by port");
        let data = choose(&all, None).expect("certain").expect("an uplink");
        assert_eq!((data.index, data.link_local().to_string()), (3, "169.254.1.3/16".into()));
        assert_eq!(describe(data), "eth2 (mlx5_core p0)");
    }

    #[test]
    fn interface_is_required_where_several_may_be_meant() {
        for second in [("eth3", NIC, Some("p1")), ("eth3", &["mlx5_core.sf"][..], None), ("eth3", &["igb"], None)] {
            let sys = sys(&[("eth2", NIC, Some("p0")), second]);
            let all = all(&sys);
            let error = choose(&all, None).expect_err("not certain").to_string();
            assert!(error.contains("sumac.interface=") && error.contains("eth2 (mlx5_core p0), eth3"), "{error}");
            assert!(choose(&all, Some("eth2")).is_ok());
        }
        // The same port of two cards.
        let sys = sys(&[("eth2", NIC, Some("p0")), ("eth3", NIC, Some("p0"))]);
        assert!(choose(&all(&sys), Some("p0")).is_err());
    }

    #[test]
    fn missing_interface_is_reported_with_those_that_exist() {
        let sys = sys(&[("eth0", &["mlxbf_gige"], None), ("eth1", FIFO, None), ("lo", &[], None)]);
        let all = all(&sys);
        assert_eq!(choose(&all, None).expect("certain"), None);
        let message = absent(&all, None).to_string();
        assert!(
            message.contains("of a NIC") && message.contains("eth0 (mlxbf_gige), eth1 (virtio_net), lo"),
            "{message}"
        );
    }

    #[test]
    fn configured_address_needs_no_interface() {
        let settings = crate::config::Settings::from_words(["name=d", "controller=127.0.0.1:1", "ip=127.0.0.1/8"]);
        let config = settings.and_then(|settings| settings.config()).expect("a configuration");
        assert_eq!(existing_address(&config).expect("named").to_string(), "127.0.0.1/8");
    }
}
