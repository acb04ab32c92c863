//! Options that several subcommands share, and how names become the library's types.

use anyhow::ensure;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use std::fmt;
use std::str::FromStr;
use sumac::controller::proto::{BadTenant, check_tenant};
use sumac_hal::ctrl::Order;
use sumac_hal::dma::Profile;
use sumac_hal::op::{Collective, Dtype, ReduceOp};

pub(crate) use sumac::{Algo, Attach};

/// Accept an algorithm's name.
pub(crate) fn algo_parser() -> impl TypedValueParser<Value = Algo> {
    PossibleValuesParser::new(Algo::ALL.map(Algo::name)).try_map(|name| Algo::from_str(&name))
}

/// Accept the name of a way to reach a leaf device.
pub(crate) fn attach_parser() -> impl TypedValueParser<Value = Attach> {
    PossibleValuesParser::new(Attach::ALL.map(Attach::name)).try_map(|name| Attach::from_str(&name))
}

/// Check that this build can attach in this way.
///
/// # Errors
/// It can't: what to build it with.
pub(crate) fn check_built(attach: Attach) -> anyhow::Result<()> {
    ensure!(
        cfg!(feature = "verbs") || !matches!(attach, Attach::Verbs | Attach::Rdma),
        "to attach by {attach}: this build has no verbs; build with `--features verbs`, which takes cmake, libclang and \
         libibverbs (Debian: apt-get install cmake libclang-dev libibverbs-dev)"
    );
    Ok(())
}

/// The RDMA port that is whichever is active.
pub(crate) const ANY_LINK: &str = "auto";

/// RDMA ports for several processes of one machine.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub(crate) struct Links {
    /// Over RDMA verbs, the RDMA ports that devices and ranks take in turn, comma-separated: DEVICE, DEVICE:PORT or
    /// DEVICE:PORT:GID-INDEX, as in mlx5_0:1, or auto, the first that is active
    #[arg(long = "verbs", value_name = "LINK", value_delimiter = ',')]
    links: Vec<String>,
}

impl Links {
    /// Return the RDMA port that process number `nth` takes.
    pub(crate) fn in_turn(&self, nth: usize) -> Option<String> {
        self.links.get(nth % self.links.len().max(1)).cloned()
    }

    /// Whether none is named.
    pub(crate) fn is_empty(&self) -> bool {
        self.links.is_empty()
    }

    /// Return the options of so many devices to which ranks attach in this way: by which they receive over verbs, or reach
    /// ranks' memory by RDMA.
    pub(crate) fn of_devices(&self, attach: Attach, devices: usize) -> Vec<(usize, Vec<String>)> {
        let name = match attach {
            Attach::Verbs => "verbs",
            Attach::Rdma => "rdma",
            _ => return Vec::new(),
        };
        let option = |nth| format!("--{name}={}", self.in_turn(nth).as_deref().unwrap_or(ANY_LINK));
        (0..devices).map(|nth| (nth, vec![option(nth)])).collect()
    }
}

/// Accept a tenant's name.
pub(crate) fn tenant(name: &str) -> Result<String, BadTenant> {
    check_tenant(name).map(|()| name.to_owned())
}

/// Accept the name of a DMA engine's profile.
pub(crate) fn profile_parser() -> impl TypedValueParser<Value = Profile> {
    PossibleValuesParser::new(Profile::ALL.map(Profile::name))
        .try_map(|name| Profile::ALL.into_iter().find(|profile| profile.name() == name).ok_or(Unknown))
}

/// Accept an element type's name.
pub(crate) fn dtype_parser() -> impl TypedValueParser<Value = Dtype> {
    let names = Dtype::ALL.iter().map(|dtype| dtype.name());
    PossibleValuesParser::new(names).try_map(|name| Dtype::from_name(&name).ok_or(Unknown))
}

/// Accept an operator's name.
pub(crate) fn op_parser() -> impl TypedValueParser<Value = ReduceOp> {
    let names = ReduceOp::ALL.iter().map(|op| op.name());
    PossibleValuesParser::new(names).try_map(|name| ReduceOp::from_name(&name).ok_or(Unknown))
}

/// Accept the name of an operator that takes plain arrays: no pairs with locations, no scalar for each rank.
pub(crate) fn array_op_parser() -> impl TypedValueParser<Value = ReduceOp> {
    let plain = |op: &&ReduceOp| !op.is_located() && **op != ReduceOp::PremulSum;
    let names = ReduceOp::ALL.iter().filter(plain).map(|op| op.name());
    PossibleValuesParser::new(names).try_map(|name| ReduceOp::from_name(&name).ok_or(Unknown))
}

/// Accept a collective's name.
pub(crate) fn collective_parser() -> impl TypedValueParser<Value = Collective> {
    // All-to-all-v has counts of its own at each rank, which no option says.
    let names = Collective::ALL.iter().filter(|&&collective| collective != Collective::AllToAllV);
    let names = names.map(|collective| collective.name());
    PossibleValuesParser::new(names).try_map(|name| Collective::from_name(&name).ok_or(Unknown))
}

/// The order in which contributions combine, by the name on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OrderName {
    /// As contributions come: least memory, float sums may differ in their last bits from run to run
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

/// A name that its own list does not hold: the two lists differ, which is a fault of this program.
#[derive(Debug)]
struct Unknown;

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this version does not know it")
    }
}

impl std::error::Error for Unknown {}
