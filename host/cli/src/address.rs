//! The address of the controller to query: an option, or the variables that ranks use as well.

use crate::exit::Failure;
use anyhow::{Context, anyhow};
use clap::Args;
use std::net::{SocketAddr, ToSocketAddrs};
use sumac::comm::DEFAULT_PORT;

/// Options that specify a controller.
#[derive(Debug, Args)]
pub(crate) struct ControllerAddress {
    /// Address of the controller [default: MASTER_ADDR and SUMAC_PORT]
    #[arg(long, value_name = "ADDRESS")]
    controller: Option<SocketAddr>,
    /// Host of the controller
    #[arg(long, env = "MASTER_ADDR", hide = true)]
    master_addr: Option<String>,
    /// Port of the controller
    #[arg(long, env = "SUMAC_PORT", hide = true)]
    port: Option<u16>,
}

impl ControllerAddress {
    /// Return the controller that an option or a variable specifies, if one does.
    ///
    /// # Errors
    /// The name cannot be resolved.
    pub(crate) fn named(&self) -> Result<Option<SocketAddr>, Failure> {
        match self {
            Self { controller: Some(addr), .. } => Ok(Some(*addr)),
            Self { master_addr: None, port: None, .. } => Ok(None),
            _ => self.or_default().map(Some),
        }
    }

    /// Return the specified controller, with the library's defaults for what is not specified.
    ///
    /// # Errors
    /// The name cannot be resolved.
    pub(crate) fn or_default(&self) -> Result<SocketAddr, Failure> {
        if let Some(addr) = self.controller {
            return Ok(addr);
        }
        let host = self.master_addr.as_deref().unwrap_or("127.0.0.1");
        let resolved = (host, self.port.unwrap_or(DEFAULT_PORT)).to_socket_addrs();
        let resolved = resolved.with_context(|| format!("MASTER_ADDR {host:?}")).map_err(Failure::Input)?;
        let none = || Failure::Input(anyhow!("MASTER_ADDR {host:?} has no address"));
        resolved.into_iter().next().ok_or_else(none)
    }
}
