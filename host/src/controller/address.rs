//! A controller's address as users write it: `HOST:PORT`, where the host is a name or an IP address.

use super::connect::CONNECT_TIMEOUT;
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use thiserror::Error;

/// Why the address of a controller cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AddressError {
    /// The text is no address.
    #[error("{0:?} is not HOST:PORT; write an IPv6 address as in [::1]:7847")]
    Syntax(String),
    /// The host's name cannot be resolved.
    #[error("cannot resolve {host:?}: {source}")]
    Resolve {
        /// The host.
        host: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The host's name stands for no address.
    #[error("host {0:?} has no address")]
    NoAddress(String),
}

/// Resolve the addresses of a controller, or of both controllers of a pair: comma-separated, each as in [`resolve`].
/// Returns each address once; never none.
///
/// # Errors
/// [`AddressError`] of the first one that is wrong.
pub fn resolve_all(text: &str, default_port: u16) -> Result<Vec<SocketAddr>, AddressError> {
    let mut addrs = Vec::new();
    for part in text.split(',') {
        for addr in resolve(part.trim(), default_port)? {
            if !addrs.contains(&addr) {
                addrs.push(addr);
            }
        }
    }
    Ok(addrs)
}

/// Resolve `HOST`, `HOST:PORT`, or an IPv6 address, which is in brackets if a port follows. Returns all addresses of
/// the host, in the order in which the system prefers them; never none.
///
/// # Errors
/// [`AddressError`].
pub fn resolve(text: &str, default_port: u16) -> Result<Vec<SocketAddr>, AddressError> {
    if let Ok(addr) = text.parse() {
        return Ok(vec![addr]);
    }
    let literal = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(ip) = literal.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(ip, default_port)]);
    }
    let syntax = || AddressError::Syntax(text.to_owned());
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, port.parse().map_err(|_| syntax())?),
        None => (text, default_port),
    };
    if host.is_empty() {
        return Err(syntax());
    }
    let found = (host, port).to_socket_addrs();
    let addrs: Vec<_> = found.map_err(|source| AddressError::Resolve { host: host.to_owned(), source })?.collect();
    if addrs.is_empty() { Err(AddressError::NoAddress(host.to_owned())) } else { Ok(addrs) }
}

/// Return the first of a controller's addresses that accepts a connection, and the first one if none does. A single
/// address is not tried.
pub fn first_reachable(addr: SocketAddr, alternatives: &[SocketAddr]) -> SocketAddr {
    if alternatives.is_empty() {
        return addr;
    }
    let mut all = std::iter::once(addr).chain(alternatives.iter().copied());
    all.find(|addr| TcpStream::connect_timeout(addr, CONNECT_TIMEOUT).is_ok()).unwrap_or(addr)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};

    #[test]
    fn names_and_addresses_of_both_families_resolve() {
        let v4 = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let v6 = |port| SocketAddr::from((Ipv6Addr::LOCALHOST, port));
        for (text, addr) in
            [("127.0.0.1:9", v4(9)), ("127.0.0.1", v4(7)), ("[::1]:9", v6(9)), ("[::1]", v6(7)), ("::1", v6(7))]
        {
            assert_eq!(resolve(text, 7).expect(text), [addr], "{text}");
        }
        for (text, port) in [("localhost", 7), ("localhost:9", 9)] {
            let found = resolve(text, 7).expect("every system knows it");
            assert!(found.iter().all(|addr| addr.ip().is_loopback() && addr.port() == port), "{found:?}");
        }
    }

    #[test]
    fn both_controllers_of_a_pair_resolve_in_order_and_once() {
        let v4 = |host, port| SocketAddr::from((Ipv4Addr::new(127, 0, 0, host), port));
        assert_eq!(resolve_all("127.0.0.2:9,127.0.0.1,127.0.0.2:9", 7).expect("valid"), [v4(2, 9), v4(1, 7)]);
        assert!(resolve_all("127.0.0.2:9,", 7).is_err_and(|error| error.to_string().starts_with("\"\"")));
    }

    #[test]
    fn invalid_address_error_shows_the_text() {
        for text in ["", ":9", "localhost:", "localhost:port", "localhost:70000", "::1:x", "[::1]9"] {
            let error = resolve(text, 7).expect_err(text);
            assert!(matches!(&error, AddressError::Syntax(shown) if shown == text), "{error}");
        }
        // RFC 6761 reserves the name.
        let error = resolve("controller.invalid:9", 7).expect_err("it has no address");
        assert!(error.to_string().contains("controller.invalid"), "{error}");
    }

    #[test]
    fn first_address_that_listens_is_chosen() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let here = listener.local_addr().expect("bound");
        // Nothing listens on port 9 (discard, RFC 863).
        let nowhere = [SocketAddr::from((Ipv4Addr::LOCALHOST, 9)), SocketAddr::from(([127, 0, 0, 2], 9))];
        assert_eq!(first_reachable(nowhere[0], &[nowhere[1], here]), here);
        assert_eq!(first_reachable(nowhere[0], &nowhere[1..]), nowhere[0]);
    }
}
