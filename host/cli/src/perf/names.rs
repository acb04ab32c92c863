//! Names of collectives, algorithms, element types and operators, in the spellings of this command and of nccl-tests.
//!
//! nccl-tests names types and operators in `test_typenames` and `test_opnames` of its `src/common.cu`, and collectives
//! in the names of its programs (`alltoall_perf`). Names may be written with hyphens or underscores.
//!
//! Invariant: a value that `perf` can never serve does not parse, and the message lists those that do.

use crate::options::{Algo, Unserved, served_algo};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use std::fmt;
use std::str::FromStr;
use sumac::schedule::{ALGORITHMS, Algorithm};
use sumac_hal::op::{Collective, Dtype, Path, ReduceOp};
use thiserror::Error;

/// Other spellings, each with the name that it stands for.
const ALIASES: [(&str, &str); 37] = [
    ("int8", "i8"),
    ("uint8", "u8"),
    ("int32", "i32"),
    ("uint32", "u32"),
    ("int64", "i64"),
    ("uint64", "u64"),
    ("half", "f16"),
    ("float", "f32"),
    ("double", "f64"),
    ("bfloat16", "bf16"),
    ("mulsum", "premul_sum"),
    ("premul-sum", "premul_sum"),
    ("all-reduce", "all_reduce"),
    ("reduce-scatter", "reduce_scatter"),
    ("all-gather", "all_gather"),
    ("all-to-all", "all_to_all"),
    ("alltoall", "all_to_all"),
    ("host_tree", "host-tree"),
    ("one_shot", "one-shot"),
    ("halving-doubling", "hd"),
    ("halving_doubling", "hd"),
    ("recursive-doubling", "rd"),
    ("recursive_doubling", "rd"),
    ("double-binary-tree", "dbt"),
    ("full_mesh", "full-mesh"),
    ("swing_latency", "swing-latency"),
    ("van_de_geijn", "van-de-geijn"),
    ("2d_ring", "2d-ring"),
    ("2d_torus", "2d-torus"),
    ("2d_mesh", "2d-mesh"),
    ("hier_ring", "hier-ring"),
    ("hierarchical-ring", "hier-ring"),
    ("hierarchical_ring", "hier-ring"),
    ("pipeline", "chain"),
    ("hier_pairwise", "hier-pairwise"),
    ("hierarchical-pairwise", "hier-pairwise"),
    ("hierarchical_pairwise", "hier-pairwise"),
];

/// One value, or all that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice<T> {
    /// This value.
    One(T),
    /// Every value that goes with the other options.
    All,
}

/// Parse the name of a collective.
pub(crate) fn collective_parser() -> impl TypedValueParser<Value = Collective> {
    // All-to-all-v needs counts per rank, for which there is no option.
    let served = Collective::ALL.iter().filter(|&&collective| collective != Collective::AllToAllV);
    parser(served.map(|&collective| (collective.name(), collective)))
}

/// Parse the name of an algorithm, or `all`.
pub(super) fn algo_parser() -> impl TypedValueParser<Value = Choice<Algo>> {
    let each = Algo::ALL.into_iter().map(|algo| (algo.name(), served_algo(algo).map(Choice::One)));
    parser_of(each.chain([("all", Ok(Choice::All))]))
}

/// Parse the name of an algorithm with messages between hosts, or `all`.
pub(crate) fn algorithm_parser() -> impl TypedValueParser<Value = Choice<Path>> {
    let mut paths = Vec::new();
    ALGORITHMS.iter().map(Algorithm::path).chain([Path::Hybrid, Path::Rab]).for_each(|path| {
        if !paths.contains(&path) {
            paths.push(path);
        }
    });
    let each = paths.into_iter().map(|path| (path.name(), Choice::One(path)));
    parser(each.chain([("all", Choice::All)]))
}

/// Parse the name of an element type, or `all`.
pub(super) fn dtype_parser() -> impl TypedValueParser<Value = Choice<Dtype>> {
    let each = Dtype::ALL.iter().map(|&dtype| (dtype.name(), Choice::One(dtype)));
    parser(each.chain([("all", Choice::All)]))
}

/// Parse the name of an operator, or `all`.
pub(super) fn op_parser() -> impl TypedValueParser<Value = Choice<ReduceOp>> {
    let each = ReduceOp::ALL.iter().map(|&op| (op.name(), Choice::One(op)));
    parser(each.chain([("all", Choice::All)]))
}

fn parser<T: Copy + Send + Sync + 'static>(
    values: impl Iterator<Item = (&'static str, T)>,
) -> impl TypedValueParser<Value = T> {
    parser_of(values.map(|(name, value)| (name, Ok(value))))
}

fn parser_of<T: Copy + Send + Sync + 'static>(
    values: impl Iterator<Item = (&'static str, Result<T, Unserved>)>,
) -> impl TypedValueParser<Value = T> {
    let spelled = |name: &'static str| {
        let aliases = ALIASES.iter().filter(move |(_, known)| *known == name).map(|(alias, _)| *alias);
        PossibleValue::new(name).aliases(aliases)
    };
    let values: Vec<(PossibleValue, Result<T, Unserved>)> =
        values.map(|(name, value)| (spelled(name).hide(value.is_err()), value)).collect();
    let names = values.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    PossibleValuesParser::new(names).try_map(move |given| {
        let value = values.iter().find(|(name, _)| name.matches(&given, false));
        match value {
            Some((_, value)) => value.map_err(Refusal::Unserved),
            None => Err(Refusal::Unknown(given)),
        }
    })
}

/// Why a name is refused that is in the parser's list.
#[derive(Debug, Error)]
enum Refusal {
    /// It is never served.
    #[error(transparent)]
    Unserved(Unserved),
    /// The two lists differ, which is a bug.
    #[error("{0}: not supported by this version")]
    Unknown(String),
}

/// The roots to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Root(pub(super) Choice<u32>);

/// A root that cannot be parsed.
#[derive(Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not a rank, nor `all`")]
pub(super) struct InvalidRoot(String);

impl FromStr for Root {
    type Err = InvalidRoot;

    fn from_str(text: &str) -> Result<Self, InvalidRoot> {
        match text {
            "all" => Ok(Self(Choice::All)),
            rank => rank.parse().map(|rank| Self(Choice::One(rank))).map_err(|_| InvalidRoot(text.into())),
        }
    }
}

/// Whether a collective has an algorithm, whatever the number of ranks, the order of reduction and the devices.
pub(super) fn has(collective: Collective, algo: Algo) -> bool {
    match algo {
        Algo::Auto => true,
        Algo::Tree => collective.is_offloadable(),
        Algo::Hybrid | Algo::Rab => collective == Collective::AllReduce,
        algo => ALGORITHMS
            .iter()
            .any(|known| known.pattern.collective() == collective && known.path().name() == algo.name()),
    }
}

/// The algorithms of a collective, for messages.
#[derive(Debug)]
pub(super) struct AlgosOf(pub(super) Collective);

impl fmt::Display for AlgosOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = Algo::ALL.into_iter().filter(|&algo| has(self.0, algo)).map(Algo::name).collect();
        write!(f, "{} has {}", self.0, names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    fn parse<T>(parser: &impl TypedValueParser<Value = T>, text: &str) -> Result<T, String> {
        parser.parse_ref(&Command::new("perf"), None, text.as_ref()).map_err(|error| error.to_string())
    }

    /// The lists of nccl-tests: `test_typenames` and `test_opnames` of `src/common.cu`, and its programs.
    #[test]
    fn every_name_of_nccl_tests_is_accepted() {
        let types = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16"];
        for name in types.into_iter().chain(["f8e4m3", "f8e5m2", "all"]) {
            parse(&dtype_parser(), name).expect(name);
        }
        for name in ["sum", "prod", "max", "min", "avg", "mulsum", "all"] {
            parse(&op_parser(), name).expect(name);
        }
        let programs = ["all_reduce", "all_gather", "broadcast", "reduce_scatter", "reduce", "alltoall", "scatter"];
        for name in programs.into_iter().chain(["gather"]) {
            parse(&collective_parser(), name).expect(name);
        }
        assert_eq!(parse(&dtype_parser(), "float"), Ok(Choice::One(Dtype::F32)));
        assert_eq!(parse(&dtype_parser(), "half"), Ok(Choice::One(Dtype::F16)));
        assert_eq!(parse(&op_parser(), "mulsum"), Ok(Choice::One(ReduceOp::PremulSum)));
        assert_eq!(parse(&collective_parser(), "alltoall"), Ok(Collective::AllToAll));
    }

    #[test]
    fn every_name_is_accepted_with_hyphens_and_with_underscores() {
        for collective in Collective::ALL.iter().filter(|&&collective| collective != Collective::AllToAllV) {
            assert_eq!(parse(&collective_parser(), &collective.name().replace('_', "-")), Ok(*collective));
        }
        for op in ReduceOp::ALL {
            assert_eq!(parse(&op_parser(), &op.name().replace('_', "-")), Ok(Choice::One(*op)));
        }
        for algo in Algo::ALL.into_iter().filter(|&algo| algo != Algo::Nccl) {
            assert_eq!(parse(&algo_parser(), &algo.name().replace('-', "_")), Ok(Choice::One(algo)));
        }
    }

    #[test]
    fn value_that_is_never_served_is_refused_with_the_possible_ones() {
        let error = parse(&algo_parser(), "nccl").expect_err("host memory");
        assert!(error.contains("GPU memory") && error.contains("use auto"), "{error}");
        let error = parse(&algo_parser(), "none").expect_err("no such algorithm");
        assert!(error.contains("tree") && error.contains("ring") && !error.contains("nccl"), "{error}");
        assert!(parse(&collective_parser(), "all_to_all_v").is_err());
        let error = parse(&dtype_parser(), "quad").expect_err("no such type");
        assert!(error.contains("f32") && !error.contains("float,"), "aliases are not listed: {error}");
    }

    #[test]
    fn roots_are_ranks_or_all() {
        assert_eq!("all".parse(), Ok(Root(Choice::All)));
        assert_eq!("3".parse(), Ok(Root(Choice::One(3))));
        for text in ["-1", "every", ""] {
            assert_eq!(text.parse::<Root>(), Err(InvalidRoot(text.into())));
        }
    }

    #[test]
    fn collectives_have_the_algorithms_of_their_schedules() {
        assert!(has(Collective::AllReduce, Algo::Ring) && !has(Collective::AllReduce, Algo::Bruck));
        assert!(has(Collective::Barrier, Algo::Dissemination) && !has(Collective::Barrier, Algo::Ring));
        assert!(!has(Collective::Gather, Algo::Tree) && has(Collective::Gather, Algo::Auto));
        assert_eq!(AlgosOf(Collective::Barrier).to_string(), "barrier has auto, tree, dissemination, one-shot");
    }
}
