//! The address of this host that its peers reach: devices, and the other ranks of a job.
//!
//! By default it is the one from which the system would send to the controller. Where hosts have several networks, a
//! filter by names of interfaces selects another one.
//!
//! Invariant: an address that is chosen can be bound to, and is of the controller's family.

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::str::FromStr;
use thiserror::Error;

/// Names of interfaces, in the syntax of `NCCL_SOCKET_IFNAME`: a comma-separated list of prefixes, as `eth,ib`; after
/// `=` of whole names; after `^` of what is excluded, as `^docker,lo` or `^=eth3`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceFilter {
    names: Vec<String>,
    is_exact: bool,
    is_excluding: bool,
}

/// A filter without names.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} names no interface; list names or their beginnings, as in `eth,ib`, `=eth0` or `^docker,lo`")]
pub struct InvalidFilter(String);

impl FromStr for InterfaceFilter {
    type Err = InvalidFilter;

    fn from_str(text: &str) -> Result<Self, InvalidFilter> {
        let (is_excluding, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (is_exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let names: Vec<_> = rest.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
        if names.is_empty() { Err(InvalidFilter(text.to_owned())) } else { Ok(Self { names, is_exact, is_excluding }) }
    }
}

impl fmt::Display for InterfaceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (excluding, exact) = (if self.is_excluding { "^" } else { "" }, if self.is_exact { "=" } else { "" });
        write!(f, "{excluding}{exact}{}", self.names.join(","))
    }
}

impl InterfaceFilter {
    /// Whether an interface of this name is selected.
    pub fn selects(&self, name: &str) -> bool {
        let is_listed = self.names.iter().any(|listed| match self.is_exact {
            true => name == listed,
            false => name.starts_with(listed.as_str()),
        });
        is_listed != self.is_excluding
    }
}

/// An interface that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Interface {
    name: String,
    is_loopback: bool,
    addrs: Vec<IpAddr>,
}

/// The interfaces of this host, for messages: `lo (127.0.0.1, ::1), eth0 (10.0.0.7)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interfaces(Vec<Interface>);

impl fmt::Display for Interfaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addrs = |one: &Interface| one.addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let all: Vec<_> = self.0.iter().map(|one| format!("{} ({})", one.name, addrs(one))).collect();
        if all.is_empty() { f.write_str("none") } else { f.write_str(&all.join(", ")) }
    }
}

/// Why no address can be chosen.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LocalAddressError {
    /// The system has no route to the controller.
    #[error("no route to the controller at {controller}: {source}; interfaces that are up: {interfaces}")]
    NoRoute {
        /// The controller.
        controller: SocketAddr,
        /// The system's reason.
        source: io::Error,
        /// What there is.
        interfaces: Interfaces,
    },
    /// No interface is selected that has an address of the controller's family.
    #[error(
        "SUMAC_IFNAME={filter} selects no interface with an {} address, as the controller {controller} has; \
         interfaces that are up: {interfaces}",
        family(*controller)
    )]
    NotSelected {
        /// The filter.
        filter: InterfaceFilter,
        /// The controller.
        controller: SocketAddr,
        /// What there is.
        interfaces: Interfaces,
    },
    /// The address is not one of this host.
    #[error("cannot bind to {addr}, which is not an address of this host; interfaces that are up: {interfaces}")]
    NotHere {
        /// The address.
        addr: IpAddr,
        /// What there is.
        interfaces: Interfaces,
    },
    /// The address and the controller are of different families.
    #[error("{addr} cannot reach the controller at {controller}, which has an {} address", family(*controller))]
    OtherFamily {
        /// The address.
        addr: IpAddr,
        /// The controller.
        controller: SocketAddr,
    },
    /// Only a link-local address leads to the controller. Peers could not use it without knowing their own interface.
    #[error(
        "only a link-local address of this host reaches the controller at {controller}; give both others, or set \
         SUMAC_BIND; interfaces that are up: {interfaces}"
    )]
    LinkLocal {
        /// The controller.
        controller: SocketAddr,
        /// What there is.
        interfaces: Interfaces,
    },
    /// The system did not list its interfaces.
    #[error("cannot list the network interfaces: {0}")]
    Interfaces(#[source] io::Error),
}

/// Return the address of this host that peers of `controller` reach: `bind` unless it is unspecified (`0.0.0.0`), else
/// the one that routes to the controller, of an interface that `filter` selects.
///
/// # Errors
/// [`LocalAddressError`].
pub fn choose(
    controller: SocketAddr,
    bind: IpAddr,
    filter: Option<&InterfaceFilter>,
) -> Result<IpAddr, LocalAddressError> {
    if !bind.is_unspecified() {
        return check(bind, controller);
    }
    let routed = route_to(controller);
    if let (Ok(routed), None) = (&routed, filter)
        && !is_link_local(*routed)
    {
        return Ok(*routed);
    }
    select(interfaces()?, routed, controller, filter)
}

/// Return an address of each further interface that `filter` lists, in its order, up to the first one that has none. If
/// `first` is not of the interface that is listed first, the list is no order of rails, and there are none.
///
/// # Errors
/// [`LocalAddressError::Interfaces`].
pub fn choose_rails(
    controller: SocketAddr,
    first: IpAddr,
    filter: &InterfaceFilter,
) -> Result<Vec<IpAddr>, LocalAddressError> {
    if filter.is_excluding || filter.names.len() < 2 {
        return Ok(Vec::new());
    }
    Ok(rails_of(&interfaces()?, controller, first, filter))
}

fn rails_of(interfaces: &[Interface], controller: SocketAddr, first: IpAddr, filter: &InterfaceFilter) -> Vec<IpAddr> {
    let is_usable = |addr: &IpAddr| addr.is_ipv4() == controller.is_ipv4() && !is_link_local(*addr);
    let mut rails: Vec<IpAddr> = Vec::new();
    for name in &filter.names {
        let one = InterfaceFilter { names: vec![name.clone()], ..filter.clone() };
        let is_free = |interface: &&Interface| !interface.addrs.iter().any(|addr| rails.contains(addr));
        let mut selected = interfaces.iter().filter(|interface| one.selects(&interface.name)).filter(is_free);
        let addr = match rails.is_empty() {
            true => selected.any(|interface| interface.addrs.contains(&first)).then_some(first),
            false => selected.find_map(|interface| interface.addrs.iter().copied().find(is_usable)),
        };
        match addr {
            Some(addr) => rails.push(addr),
            None => break,
        }
    }
    rails.into_iter().skip(1).collect()
}

/// Return the address of a host that the text gives, by number or name, of the controller's family where it has
/// several.
///
/// # Errors
/// The system's reason why the name has no address.
pub fn resolve(text: &str, controller: SocketAddr) -> io::Result<IpAddr> {
    if let Ok(addr) = text.parse() {
        return Ok(addr);
    }
    let addrs: Vec<_> = (text, 0).to_socket_addrs()?.map(|addr| addr.ip()).collect();
    let of_family = addrs.iter().find(|addr| addr.is_ipv4() == controller.is_ipv4());
    of_family.or(addrs.first()).copied().ok_or_else(|| io::Error::other("the host has no address"))
}

/// Return an address that this host can bind to.
fn check(addr: IpAddr, controller: SocketAddr) -> Result<IpAddr, LocalAddressError> {
    if addr.is_ipv4() != controller.is_ipv4() {
        return Err(LocalAddressError::OtherFamily { addr, controller });
    }
    match UdpSocket::bind((addr, 0)) {
        Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => {
            Err(LocalAddressError::NotHere { addr, interfaces: Interfaces(interfaces()?) })
        }
        // Whoever binds to it reports any other error.
        _ => Ok(addr),
    }
}

/// Return the address from which the system would send to `peer`. Connecting a datagram socket sends nothing.
fn route_to(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr = if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

/// Choose among the interfaces: the routed address if its interface is selected, else the first one that can reach
/// others.
fn select(
    interfaces: Vec<Interface>,
    routed: io::Result<IpAddr>,
    controller: SocketAddr,
    filter: Option<&InterfaceFilter>,
) -> Result<IpAddr, LocalAddressError> {
    let is_usable = |addr: &IpAddr| addr.is_ipv4() == controller.is_ipv4() && !is_link_local(*addr);
    let is_selected = |one: &&Interface| filter.is_none_or(|filter| filter.selects(&one.name));
    // Loopback reaches nobody but this host. It must be meant.
    let is_meant = controller.ip().is_loopback() || filter.is_some_and(|filter| !filter.is_excluding);
    let selected = || interfaces.iter().filter(is_selected).filter(|one| !one.is_loopback || is_meant);
    let first = |loopback: bool| {
        selected().filter(|one| one.is_loopback == loopback).find_map(|one| one.addrs.iter().copied().find(is_usable))
    };
    let routed = match routed {
        Ok(routed) => routed,
        Err(source) => {
            let interfaces = Interfaces(interfaces);
            return Err(LocalAddressError::NoRoute { controller, source, interfaces });
        }
    };
    let is_its = selected().any(|one| one.addrs.contains(&routed));
    let chosen =
        Some(routed).filter(|routed| is_its && is_usable(routed)).or_else(|| first(false)).or_else(|| first(true));
    chosen.ok_or_else(|| {
        let interfaces = Interfaces(interfaces);
        match filter {
            Some(filter) => LocalAddressError::NotSelected { filter: filter.clone(), controller, interfaces },
            None => LocalAddressError::LinkLocal { controller, interfaces },
        }
    })
}

const fn is_link_local(addr: IpAddr) -> bool {
    match addr {
        // IPv4's need no interface with them.
        IpAddr::V4(_) => false,
        IpAddr::V6(addr) => addr.is_unicast_link_local(),
    }
}

const fn family(addr: SocketAddr) -> &'static str {
    if addr.is_ipv4() { "IPv4" } else { "IPv6" }
}

/// Return the interfaces that are up and have an address, in the system's order.
fn interfaces() -> Result<Vec<Interface>, LocalAddressError> {
    let all = getifaddrs().map_err(|errno| LocalAddressError::Interfaces(errno.into()))?;
    let mut found: Vec<Interface> = Vec::new();
    let mut index = BTreeMap::new();
    for entry in all.filter(|entry| entry.flags.contains(InterfaceFlags::IFF_UP)) {
        let Some(addr) = entry.address.as_ref().and_then(|addr| {
            let v4 = addr.as_sockaddr_in().map(|addr| IpAddr::V4(addr.ip()));
            v4.or_else(|| addr.as_sockaddr_in6().map(|addr| IpAddr::V6(addr.ip())))
        }) else {
            continue;
        };
        let at = *index.entry(entry.interface_name.clone()).or_insert_with(|| {
            let is_loopback = entry.flags.contains(InterfaceFlags::IFF_LOOPBACK);
            found.push(Interface { name: entry.interface_name.clone(), is_loopback, addrs: Vec::new() });
            found.len() - 1
        });
        found[at].addrs.push(addr);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(text: &str) -> InterfaceFilter {
        text.parse().expect("a filter")
    }

    /// A host with two networks, a bridge for containers, and IPv6 on one of the networks.
    fn host() -> Vec<Interface> {
        let interface = |name: &str, addrs: &[&str]| Interface {
            name: name.into(),
            is_loopback: name == "lo",
            addrs: addrs.iter().map(|addr| addr.parse().expect("an address")).collect(),
        };
        vec![
            interface("lo", &["127.0.0.1", "::1"]),
            interface("docker0", &["172.17.0.1", "fe80::2"]),
            interface("eth0", &["10.0.0.7", "fe80::1", "fd00::7"]),
            interface("eth10", &["10.1.0.7"]),
        ]
    }

    fn selected(text: &str, routed: &str, controller: &str) -> Result<String, String> {
        let filter = (!text.is_empty()).then(|| filter(text));
        let routed = Ok(routed.parse().expect("an address"));
        let controller = controller.parse().expect("an address");
        let selected = select(host(), routed, controller, filter.as_ref());
        selected.map(|addr| addr.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn filter_has_the_syntax_of_nccl() {
        for (text, eth0, eth10, lo) in [
            ("eth", true, true, false),
            ("eth1,lo", false, true, true),
            ("=eth1", false, false, false),
            ("=eth10,eth0", true, true, false),
            ("^eth", false, false, true),
            ("^=eth0", false, true, true),
            ("eth1, lo,", false, true, true),
        ] {
            let filter = filter(text);
            let found = ["eth0", "eth10", "lo"].map(|name| filter.selects(name));
            assert_eq!(found, [eth0, eth10, lo], "{text}");
        }
        for text in ["", "^", "=", "^=", ",", "^ ,"] {
            let error = text.parse::<InterfaceFilter>().expect_err(text).to_string();
            assert!(error.contains("names no interface"), "{error}");
        }
        assert_eq!(filter("^=a,b").to_string(), "^=a,b");
    }

    #[test]
    fn routed_address_is_chosen_where_its_interface_is_selected() {
        let controller = "10.1.0.1:7847";
        assert_eq!(selected("eth", "10.1.0.7", controller), Ok("10.1.0.7".into()), "not the first that is selected");
        assert_eq!(selected("^docker", "10.1.0.7", controller), Ok("10.1.0.7".into()));
        assert_eq!(selected("=eth0", "10.1.0.7", controller), Ok("10.0.0.7".into()));
        assert_eq!(selected("^eth10", "10.1.0.7", controller), Ok("172.17.0.1".into()));
    }

    #[test]
    fn address_is_of_the_family_of_the_controller_and_not_link_local() {
        assert_eq!(selected("eth", "fd00::7", "[fd00::1]:7847"), Ok("fd00::7".into()));
        assert_eq!(selected("", "fe80::1", "[fe80::9]:7847"), Ok("fd00::7".into()));
        let error = selected("eth1,docker", "fd00::7", "[fd00::1]:7847").expect_err("IPv4 only");
        assert!(error.contains("SUMAC_IFNAME=eth1,docker selects no interface with an IPv6 address"), "{error}");
        assert!(error.contains("lo (127.0.0.1, ::1), docker0 (172.17.0.1, fe80::2), eth0 (10.0.0.7"), "{error}");
    }

    #[test]
    fn listed_interfaces_are_rails_from_the_chosen_one_on() {
        let controller = "10.0.0.1:7847".parse().expect("an address");
        for (text, first, expected) in [
            ("=eth0,eth10", "10.0.0.7", &["10.1.0.7"][..]),
            ("eth1,eth,docker", "10.1.0.7", &["10.0.0.7", "172.17.0.1"]),
            ("eth10,eth0", "10.0.0.7", &[]),
            ("=eth0,ib0,eth10", "10.0.0.7", &[]),
            ("eth", "10.0.0.7", &[]),
        ] {
            let rails = rails_of(&host(), controller, first.parse().expect("an address"), &filter(text));
            assert_eq!(rails.iter().map(ToString::to_string).collect::<Vec<_>>(), expected, "{text}");
        }
    }

    #[test]
    fn loopback_must_be_meant() {
        assert!(selected("^eth,docker", "10.0.0.7", "10.0.0.1:1").is_err(), "an exclusion means no loopback");
        assert_eq!(selected("lo", "10.0.0.7", "10.0.0.1:1"), Ok("127.0.0.1".into()));
        assert_eq!(selected("^eth,docker", "127.0.0.1", "127.0.0.1:1"), Ok("127.0.0.1".into()));
    }

    #[test]
    fn system_routes_to_loopback_from_loopback_in_both_families() {
        let any = IpAddr::from(Ipv4Addr::UNSPECIFIED);
        for (controller, addr) in [("127.0.0.1:7847", "127.0.0.1"), ("[::1]:7847", "::1")] {
            let controller: SocketAddr = controller.parse().expect("an address");
            let chosen = choose(controller, any, None).map(|addr| addr.to_string());
            assert_eq!(chosen.ok().as_deref(), Some(addr));
            let chosen = choose(controller, any, Some(&filter("=lo"))).map(|addr| addr.to_string());
            assert_eq!(chosen.ok().as_deref(), Some(addr));
        }
    }

    #[test]
    fn address_of_another_host_or_family_is_refused_with_those_of_this_one() {
        let controller = SocketAddr::from(([127, 0, 0, 1], 7847));
        // RFC 5737: no host has it.
        let error = choose(controller, [192, 0, 2, 1].into(), None).expect_err("not here").to_string();
        assert!(
            error.starts_with("cannot bind to 192.0.2.1, which is not an address of this host")
                && error.contains("lo (127.0.0.1"),
            "{error}"
        );
        let error = choose(controller, Ipv6Addr::LOCALHOST.into(), None).expect_err("IPv6").to_string();
        assert!(error.contains("::1 cannot reach the controller at 127.0.0.1:7847"), "{error}");
        assert_eq!(choose(controller, [127, 0, 0, 9].into(), None).ok(), Some([127, 0, 0, 9].into()));
        let error = choose(controller, [0, 0, 0, 0].into(), Some(&filter("=nonet7"))).expect_err("none").to_string();
        assert!(error.contains("SUMAC_IFNAME==nonet7 selects no interface"), "{error}");
    }

    #[test]
    fn names_resolve_to_the_family_of_the_controller() {
        let v4 = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(resolve("10.0.0.7", v4).ok(), Some([10, 0, 0, 7].into()));
        assert!(resolve("localhost", v4).is_ok_and(|addr| addr.is_loopback()));
        assert!(resolve("host.invalid", v4).is_err());
    }
}
