//! The traffic class of packets: DSCP (RFC 2474), which networks map to queues and priorities.

use rustix::io::Errno;
use rustix::net::{AddressFamily, sockopt};
use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::str::FromStr;
use thiserror::Error;

/// A traffic class as a byte: IPv4's type of service, the traffic class of IPv6 and of a verbs address. DSCP is the
/// upper six bits. The lower two are ECN's (RFC 3168), so they are zero here.
///
/// The default, 0, is best effort, and leaves TCP sockets as the system makes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TrafficClass(u8);

/// The bits of ECN.
const ECN_MASK: u8 = 0b11;

/// A value that is no traffic class.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidTrafficClass {
    /// It is not a number of one byte.
    #[error("{0:?} is not a traffic class; give a number from 0 to 252, which is four times the DSCP, as 184 for EF")]
    Syntax(String),
    /// It has bits of ECN.
    #[error(
        "traffic class {0} has bits of ECN, which are the port's own; give a multiple of 4, as {lower}",
        lower = .0 & !ECN_MASK
    )]
    Ecn(u8),
}

impl TryFrom<u8> for TrafficClass {
    type Error = InvalidTrafficClass;

    fn try_from(bits: u8) -> Result<Self, InvalidTrafficClass> {
        if bits & ECN_MASK == 0 { Ok(Self(bits)) } else { Err(InvalidTrafficClass::Ecn(bits)) }
    }
}

impl FromStr for TrafficClass {
    type Err = InvalidTrafficClass;

    fn from_str(text: &str) -> Result<Self, InvalidTrafficClass> {
        text.parse::<u8>().map_err(|_| InvalidTrafficClass::Syntax(text.to_owned()))?.try_into()
    }
}

impl fmt::Display for TrafficClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl TrafficClass {
    /// Return the byte, with zero for ECN.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Set it on a TCP socket. The connections that a listener accepts have the listener's. The system keeps TCP's own
    /// bits of ECN.
    ///
    /// # Errors
    /// The system's error. The default is not set, and never fails.
    pub fn apply(self, socket: impl AsFd) -> io::Result<()> {
        if self == Self::default() {
            return Ok(());
        }
        if sockopt::socket_domain(&socket)? == AddressFamily::INET {
            return Ok(sockopt::set_ip_tos(&socket, self.0)?);
        }
        sockopt::set_ipv6_tclass(&socket, self.0.into())?;
        // For IPv4 through a socket of both families; others refuse it.
        match sockopt::set_ip_tos(&socket, self.0) {
            Ok(()) | Err(Errno::NOPROTOOPT | Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Return that of a TCP socket.
    ///
    /// # Errors
    /// The system's error.
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let bits = if sockopt::socket_domain(&socket)? == AddressFamily::INET {
            sockopt::ip_tos(&socket)?
        } else {
            // The lowest byte is the class.
            sockopt::ipv6_tclass(&socket)? as u8
        };
        Ok(Self(bits & !ECN_MASK))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn values_out_of_range_and_bits_of_ecn_are_refused_with_the_limit() {
        for (text, named) in [
            ("256", "\"256\" is not a traffic class; give a number from 0 to 252"),
            ("-4", "from 0 to 252"),
            ("ef", "\"ef\" is not a traffic class"),
            ("", "from 0 to 252"),
            ("186", "traffic class 186 has bits of ECN, which are the port's own; give a multiple of 4, as 184"),
            ("255", "a multiple of 4, as 252"),
        ] {
            let error = text.parse::<TrafficClass>().expect_err(text).to_string();
            assert!(error.contains(named), "{text}: {error}");
        }
        for text in ["0", "184", "252"] {
            assert_eq!(text.parse::<TrafficClass>().map(|class| class.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn accepted_connections_have_the_class_of_their_listener() {
        let class = TrafficClass(0xb8);
        for ip in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(ip) else {
                eprintln!("SKIPPED: no {ip} here");
                continue;
            };
            assert_eq!(TrafficClass::of(&listener).expect("a socket"), TrafficClass::default());
            class.apply(&listener).expect("set");
            let dialled = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
            let (accepted, _) = listener.accept().expect("a connection");
            let classes = [&dialled, &accepted].map(|stream| TrafficClass::of(stream).expect("a socket"));
            assert_eq!(classes, [TrafficClass::default(), class], "{ip}");
        }
    }
}
