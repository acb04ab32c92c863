//! Options that several subcommands share, and parsers for the library's types.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::fmt;
use sumac::controller::limits::{InvalidName, NameKind, check_name};
use sumac::controller::proto::{InvalidTenant, check_tenant};
use sumac_hal::ctrl::Order;
use sumac_hal::dma::Profile;
use sumac_hal::op::ReduceOp;
use thiserror::Error;

pub(crate) use sumac::{Algo, MemoryKind, Transport, WaitPolicy};

/// A value that a command or build can never serve: why, and what to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{0}")]
pub(crate) struct Unserved(&'static str);

/// Return the algorithm.
///
/// # Errors
/// [`Unserved`] for NCCL.
pub(crate) fn served_algo(algo: Algo) -> Result<Algo, Unserved> {
    if algo == Algo::Nccl {
        return Err(Unserved(
            "NCCL takes GPU memory only, and the buffers of this command are in host memory; use auto, or \
             `sumac::gpu` in a program",
        ));
    }
    Ok(algo)
}

/// Return the transport.
///
/// # Errors
/// [`Unserved`] if this build has not got it.
pub(crate) fn served_transport(transport: Transport) -> Result<Transport, Unserved> {
    let is_built = cfg!(feature = "verbs") || !matches!(transport, Transport::Verbs | Transport::Rdma);
    if is_built { Ok(transport) } else { Err(NOT_BUILT) }
}

/// Why a build without the feature `verbs` refuses RDMA.
const NOT_BUILT: Unserved = Unserved(
    "not built in; build with `--features verbs`, which needs cmake, libclang and libibverbs (Debian: apt-get install \
     cmake libclang-dev libibverbs-dev), or do without RDMA",
);

/// Parse one of these names. A value that is not served is refused with the reason, and the help does not list it.
fn served<T: Copy + Send + Sync + 'static>(
    values: impl Iterator<Item = (&'static str, Result<T, Unserved>)>,
) -> impl TypedValueParser<Value = T> {
    let values: Vec<_> = values.collect();
    let names = values.iter().map(|(name, value)| PossibleValue::new(name).hide(value.is_err())).collect::<Vec<_>>();
    PossibleValuesParser::new(names).try_map(move |given| {
        let value = values.iter().find(|(name, _)| *name == given);
        value.map_or(Err(Unserved("not supported by this version")), |(_, value)| *value)
    })
}

/// Parse the name of an algorithm.
pub(crate) fn algo_parser() -> impl TypedValueParser<Value = Algo> {
    served(Algo::ALL.into_iter().map(|algo| (algo.name(), served_algo(algo))))
}

/// Parse the name of a transport.
pub(crate) fn transport_parser() -> impl TypedValueParser<Value = Transport> {
    served(Transport::ALL.into_iter().map(|transport| (transport.name(), served_transport(transport))))
}

/// Describe the transports that this build has, and what others need.
pub(crate) fn transport_help() -> String {
    let rdma = if cfg!(feature = "verbs") {
        "`verbs` sends packets over RDMA. `rdma` is zero-copy by RDMA READ and WRITE of the device."
    } else {
        "Not built in: `verbs` and `rdma`, which need a build with `--features verbs`."
    };
    format!(
        "Transport between ranks and their leaf device\n\n`udp` sends packets that carry the data. `shm` is zero-copy: \
         the device's DMA engine reads and writes memory that it shares with the ranks. `auto` is `shm` where it is \
         available, else `udp`. A transport that is requested explicitly and is unavailable fails the run. {rdma}"
    )
}

/// Parse an RDMA port.
pub(crate) fn link(name: &str) -> Result<String, Unserved> {
    served_transport(Transport::Verbs).map(|_| name.to_owned())
}

/// Parse the name of a device by the controller's rule.
pub(crate) fn device_name(name: &str) -> Result<String, InvalidName> {
    check_name(NameKind::Fabric, "device", name).map(|()| name.to_owned())
}

/// Stands for the first active RDMA port.
pub(crate) const ANY_LINK: &str = "auto";

/// RDMA ports for several processes of one machine.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub(crate) struct Links {
    /// RDMA ports that devices and ranks use in turn, comma-separated: DEVICE, DEVICE:PORT or DEVICE:PORT:GID-INDEX, as
    /// in mlx5_0:1, or `auto` for the first active one
    #[arg(long = "verbs", value_name = "LINK", value_delimiter = ',', value_parser = link)]
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

/// Parse the name of a wait policy.
pub(crate) fn wait_policy_parser() -> impl TypedValueParser<Value = WaitPolicy> {
    PossibleValuesParser::new(WaitPolicy::NAMES.map(|(name, _)| name)).try_map(|given| {
        let found = WaitPolicy::NAMES.iter().find(|(name, _)| *name == given);
        found.map(|&(_, policy)| policy).ok_or(Unknown)
    })
}

/// Parse the name of a kind of memory.
pub(crate) fn memory_parser() -> impl TypedValueParser<Value = MemoryKind> {
    PossibleValuesParser::new(MemoryKind::NAMES.map(|(name, _)| name)).try_map(|given| {
        let found = MemoryKind::NAMES.iter().find(|(name, _)| *name == given);
        found.map(|&(_, kind)| kind).ok_or(Unknown)
    })
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, Command};

    /// Return the help of an option with this parser, and the error of a value.
    fn help_and_refusal(parser: impl TypedValueParser, value: &str) -> (String, String) {
        let mut command = Command::new("test").arg(Arg::new("option").long("option").value_parser(parser));
        let help = command.render_long_help().to_string();
        let error = command.try_get_matches_from(["test", "--option", value]).expect_err("refused");
        assert_eq!(error.exit_code(), 2);
        (help, error.to_string())
    }

    #[test]
    fn unserved_algorithm_is_refused_with_the_reason_and_not_listed() {
        let (help, error) = help_and_refusal(algo_parser(), "nccl");
        assert!(error.contains("'nccl'") && error.contains("GPU memory") && error.contains("use auto"), "{error}");
        assert!(help.contains("tree") && !help.contains("nccl"), "{help}");
    }

    #[test]
    #[cfg(not(feature = "verbs"))]
    fn transport_that_is_not_built_in_is_refused_with_the_feature_and_not_listed() {
        for name in ["verbs", "rdma"] {
            let (help, error) = help_and_refusal(transport_parser(), name);
            assert!(error.contains("not built in") && error.contains("--features verbs"), "{error}");
            assert!(help.contains("udp") && !help.contains(name), "{help}");
        }
        assert!(transport_help().contains("Not built in: `verbs` and `rdma`"));
        assert!(link("mlx5_0").is_err());
    }

    #[test]
    fn device_name_follows_the_rule_of_the_controller() {
        for name in ["leaf0", "n1 mlx5_0", &"x".repeat(64)] {
            assert_eq!(device_name(name).as_deref(), Ok(name));
        }
        for name in ["", "a\tb", "caf\u{e9}", &"x".repeat(65)] {
            let error = device_name(name).expect_err("refused").to_string();
            assert!(error.contains("use 1 to 64 printable ASCII characters"), "{error}");
        }
    }
}
