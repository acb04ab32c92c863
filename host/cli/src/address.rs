//! The addresses of a controller and of this host: options, or the variables that ranks use as well.

use crate::exit::Failure;
use anyhow::Context;
use clap::Args;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;
use sumac::comm::DEFAULT_PORT;
use sumac::controller::{ControllerAddr, resolve_all};
use sumac::local_address::{self, InterfaceFilter};

/// Options that specify a controller to query.
#[derive(Debug, Args)]
pub(crate) struct ControllerAddress {
    /// Address of the controller, or comma-separated addresses of a pair; all addresses of a host name are tried
    /// [default: SUMAC_CONTROLLER, else MASTER_ADDR and SUMAC_PORT]
    #[arg(long, value_name = "HOST:PORT", env = "SUMAC_CONTROLLER", hide_env = true)]
    controller: Option<String>,
    /// Host of the controller
    #[arg(long, env = "MASTER_ADDR", hide = true)]
    master_addr: Option<String>,
    /// Port of the controller
    #[arg(long, env = "SUMAC_PORT", hide = true)]
    port: Option<u16>,
}

impl ControllerAddress {
    /// Return the controller that an option or a variable specifies, if one does, without a key.
    ///
    /// # Errors
    /// The name cannot be resolved.
    pub(crate) fn named(&self) -> Result<Option<ControllerAddr>, Failure> {
        match self {
            Self { controller: None, master_addr: None, port: None } => Ok(None),
            _ => self.or_default().map(Some),
        }
    }

    /// Return the specified controller, with the library's defaults for what is not specified, and without a key.
    ///
    /// # Errors
    /// The name cannot be resolved.
    pub(crate) fn or_default(&self) -> Result<ControllerAddr, Failure> {
        let addrs = match &self.controller {
            Some(text) => all("--controller", text, DEFAULT_PORT)?,
            None => {
                let host = self.master_addr.as_deref().unwrap_or("127.0.0.1");
                all("MASTER_ADDR", host, self.port.unwrap_or(DEFAULT_PORT))?
            }
        };
        Ok(ControllerAddr { alternatives: addrs[1..].to_vec(), ..addrs[0].into() })
    }
}

/// Return all addresses of the controller that `what` specifies; never none.
///
/// # Errors
/// The name cannot be resolved.
pub(crate) fn all(what: &str, text: &str, default_port: u16) -> Result<Vec<SocketAddr>, Failure> {
    resolve_all(text, default_port).with_context(|| what.to_owned()).map_err(Failure::Input)
}

/// Options that specify the address of this host that others reach.
#[derive(Debug, Args)]
pub(crate) struct LocalAddress {
    /// Address of this host, as a number or a name, that ranks and other devices reach [default: SUMAC_BIND, else the
    /// one that routes to the controller]
    #[arg(long, value_name = "ADDRESS", env = "SUMAC_BIND", hide_env = true)]
    bind: Option<String>,
    /// Interfaces from which the address may be taken: comma-separated beginnings of their names; after `=` whole
    /// names, after `^` those that may not [default: SUMAC_IFNAME, else all]
    #[arg(long, value_name = "NAMES", env = "SUMAC_IFNAME", hide_env = true)]
    ifname: Option<InterfaceFilter>,
}

impl LocalAddress {
    /// Return the address.
    ///
    /// # Errors
    /// A name that cannot be resolved, and an address or interfaces that this host does not have.
    pub(crate) fn choose(&self, controller: SocketAddr) -> Result<IpAddr, Failure> {
        let bind = match &self.bind {
            None => Ipv4Addr::UNSPECIFIED.into(),
            Some(text) => {
                // SUMAC_BIND lists the addresses of the server's adapters for ranks; the first is the server's.
                let first = text.split(',').next().unwrap_or(text).trim();
                local_address::resolve(first, controller)
                    .with_context(|| format!("--bind {first:?} is not an IP address or the name of a host"))
                    .map_err(Failure::Input)?
            }
        };
        local_address::choose(controller, bind, self.ifname.as_ref()).map_err(Failure::input)
    }
}

/// Whether a controller listens at this address.
pub(crate) fn is_reachable(addr: &SocketAddr) -> bool {
    TcpStream::connect_timeout(addr, REACH_TIMEOUT).is_ok()
}

/// How long an attempt to connect may take.
const REACH_TIMEOUT: Duration = Duration::from_secs(1);
