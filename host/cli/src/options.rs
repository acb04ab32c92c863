//! Options that several subcommands share, and parsers for the library's types.

use anyhow::ensure;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::fmt;
use std::str::FromStr;
use sumac::controller::proto::{InvalidTenant, check_tenant};
use sumac_hal::ctrl::Order;
use sumac_hal::dma::Profile;
use sumac_hal::op::ReduceOp;

pub(crate) use sumac::{Algo, Transport};

/// Parse the name of an algorithm.
pub(crate) fn algo_parser() -> impl TypedValueParser<Value = Algo> {
    PossibleValuesParser::new(Algo::ALL.map(Algo::name)).try_map(|name| Algo::from_str(&name))
}

/// Parse the name of a transport.
pub(crate) fn transport_parser() -> impl TypedValueParser<Value = Transport> {
    PossibleValuesParser::new(Transport::ALL.map(Transport::name)).try_map(|name| Transport::from_str(&name))
}

/// Check that this build has the transport.
///
/// # Errors
/// It has not; the message tells what to build with.
pub(crate) fn check_built(transport: Transport) -> anyhow::Result<()> {
    ensure!(
        cfg!(feature = "verbs") || !matches!(transport, Transport::Verbs | Transport::Rdma),
        "--transport {transport}: not built in; use auto, udp or shm, or build with `--features verbs`, which needs \
         cmake, libclang and libibverbs (Debian: apt-get install cmake libclang-dev libibverbs-dev)"
    );
    Ok(())
}

/// Stands for the first active RDMA port.
pub(crate) const ANY_LINK: &str = "auto";

/// RDMA ports for several processes of one machine.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub(crate) struct Links {
    /// RDMA ports that devices and ranks use in turn, comma-separated: DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX, as
    /// in mlx5_0:1, or `auto` for the first active one
    #[arg(long = "verbs", value_name = "LINK", value_delimiter = ',')]
    links: Vec<String>,
}

impl Links {
    /// Return the RDMA port of process number `nth`.
    pub(crate) fn in_turn(&self, nth: usize) -> Option<String> {
        self.links.get(nth % self.links.len().max(1)).cloned()
    }

    /// Whether no port is named.
    pub(crate) fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Return the options with which so many devices serve ranks of this transport.
    pub(crate) fn of_devices(&self, transport: Transport, devices: usize) -> Vec<(usize, Vec<String>)> {
        let name = match transport {
            Transport::Verbs => "verbs",
            Transport::Rdma => "rdma",
            _ => return Vec::new(),
        };
        let option = |nth| format!("--{name}={}", self.in_turn(nth).as_deref().unwrap_or(ANY_LINK));
        (0..devices).map(|nth| (nth, vec![option(nth)])).collect()
    }
}

/// Parse the name of a tenant.
pub(crate) fn tenant(name: &str) -> Result<String, InvalidTenant> {
    check_tenant(name).map(|()| name.to_owned())
}

/// Parse the name of a DMA engine profile.
pub(crate) fn profile_parser() -> impl TypedValueParser<Value = Profile> {
    PossibleValuesParser::new(Profile::ALL.map(Profile::name))
        .try_map(|name| Profile::ALL.into_iter().find(|profile| profile.name() == name).ok_or(Unknown))
}

/// Parse the name of an operator for plain arrays: without locations and without a scalar per rank.
pub(crate) fn array_op_parser() -> impl TypedValueParser<Value = ReduceOp> {
    let plain = |op: &&ReduceOp| !op.is_located() && **op != ReduceOp::PremulSum;
    let names = ReduceOp::ALL.iter().filter(plain).map(|op| op.name());
    PossibleValuesParser::new(names).try_map(|name| ReduceOp::from_name(&name).ok_or(Unknown))
}

/// The order of reduction, by its name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OrderName {
    /// As contributions arrive: needs the least memory; the last bits of float sums may differ between runs
    Arrival,
    /// Left to right over a node's children
    Fold,
    /// Pairwise over aligned blocks of a node's children
    Pairwise,
}

impl From<OrderName> for Order {
    fn from(name: OrderName) -> Self {
        match name {
            OrderName::Arrival => Self::Arrival,
            OrderName::Fold => Self::TreeFold,
            OrderName::Pairwise => Self::TreePairwise,
        }
    }
}

/// A name that passed the parser and is not in the list: the two lists differ, which is a bug.
#[derive(Debug)]
struct Unknown;

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not supported by this version")
    }
}

impl std::error::Error for Unknown {}
