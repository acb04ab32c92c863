//! The rows that the options ask for, or why there are none.
//!
//! Invariants: options that exclude each other or would have no effect are refused before anything starts, and the
//! number of rows is bounded.

use super::PerfArgs;
use super::fault::Fault;
use super::names::{AlgosOf, Choice, Root, has};
use crate::job::Case;
use crate::options::{Algo, Transport};
use crate::size::{SizeBytes, Step, sweep};
use crate::workload::Placements;
use anyhow::{anyhow, bail, ensure};
use sumac_hal::op::{Collective, Dtype, ReduceOp};
use sumac_hal::reduce::Kernel;

/// The largest operation. A rank allocates twice as much.
const SIZE_MAX: SizeBytes = SizeBytes(16 << 30);

/// The most rows of a run.
const ROWS_MAX: usize = 100_000;

/// The algorithms that are measured unless others are requested, of those that the collective has.
const DEFAULT_ALGOS: [Algo; 4] = [Algo::Tree, Algo::Ring, Algo::HalvingDoubling, Algo::Dissemination];

impl PerfArgs {
    /// Return the rows to measure, in the order in which they are printed.
    ///
    /// # Errors
    /// An empty or too large range of sizes, too many rows, a root that is not a rank, an operator that its type does
    /// not have, an algorithm that none of the collectives has, and options that exclude each other or have no effect.
    pub(super) fn cases(&self) -> anyhow::Result<Vec<Case>> {
        self.check_transport()?;
        self.check_shape()?;
        self.check_fault()?;
        self.check_effects()?;
        self.check_algos()?;
        let mut cases = Vec::new();
        for &collective in &self.collectives {
            for (dtype, op) in self.kernels(collective)? {
                for root in self.roots(collective)? {
                    self.sweep(Case { collective, dtype, op, root, count: 0, algo: Algo::Auto }, &mut cases)?;
                }
            }
        }
        let auto = cases.iter().any(|case| case.algo == Algo::Auto);
        for (option, is_given) in [("--overrides", self.overrides.is_some()), ("--costs", self.costs.is_some())] {
            ensure!(auto || !is_given, "{option} needs --algo auto, for which it selects the algorithm");
        }
        Ok(cases)
    }

    fn begin(&self) -> SizeBytes {
        self.begin.unwrap_or(SizeBytes(8))
    }

    fn end(&self) -> SizeBytes {
        self.end.unwrap_or(SizeBytes(16 << 20))
    }

    fn check_fault(&self) -> anyhow::Result<()> {
        let Some(fault) = self.fault else { return Ok(()) };
        ensure!(self.world() > 1, "--fault needs --ranks 2 or more");
        let is_shm = fault == Fault::CutLink && self.transport == Transport::Shm;
        ensure!(!is_shm, "--fault cut-link drops packets, and --transport shm sends none; use udp or auto");
        let both = self.buffers == Some(Placements::Both);
        ensure!(!both, "--fault goes into one operation per row; use --buffers in-place or out-of-place");
        Ok(())
    }

    fn check_shape(&self) -> anyhow::Result<()> {
        let checked = self.shape.map_or(Ok(()), |shape| shape.check(self.world()));
        checked.map_err(|why| anyhow!("--shape: {why}"))
    }

    fn check_transport(&self) -> anyhow::Result<()> {
        let transport = self.transport;
        if !matches!(transport, Transport::Verbs | Transport::Rdma) {
            ensure!(self.verbs.is_empty(), "--verbs needs --transport verbs or rdma");
            return Ok(());
        }
        let relayed = self.chaos.is_some() || self.fault == Some(Fault::CutLink);
        ensure!(
            !relayed,
            "--transport {transport}: --chaos and --fault cut-link relay UDP only; use `tc qdisc` and `ip link`"
        );
        let none = self.devices.is_empty();
        ensure!(none, "--transport {transport} cannot be combined with --device, which names a UDP address");
        Ok(())
    }

    /// Refuse options that none of the collectives has.
    fn check_effects(&self) -> anyhow::Result<()> {
        let any = |has: fn(Collective) -> bool| self.collectives.iter().any(|&collective| has(collective));
        let moves_data = any(|collective| collective != Collective::Barrier);
        let options = [
            ("--root", self.root.is_some(), any(Collective::is_rooted), "root"),
            ("--op", !self.ops.is_empty(), any(Collective::reduces), "operator"),
            ("--datatype", !self.dtypes.is_empty(), moves_data, "element type"),
            ("--minbytes", self.begin.is_some(), moves_data, "size"),
            ("--maxbytes", self.end.is_some(), moves_data, "size"),
            ("--stepbytes", self.step.is_some(), moves_data, "size"),
            ("--stepfactor", self.factor.is_some(), moves_data, "size"),
            ("--memory", self.memory.is_some(), moves_data, "buffers"),
            ("--buffers", self.buffers.is_some(), moves_data, "buffers"),
        ];
        let names = || self.collectives.iter().map(|collective| collective.name()).collect::<Vec<_>>().join(", ");
        for (option, is_given, has_effect, what) in options {
            ensure!(has_effect || !is_given, "{option} has no effect: {} has no {what}", names());
        }
        let in_place = self.buffers == Some(Placements::InPlace) && self.collectives.contains(&Collective::AllToAll);
        ensure!(!in_place, "--buffers in-place: all_to_all is measured out of place only");
        ensure!(self.step != Some(SizeBytes(0)), "--stepbytes 0 leads to no other size; use at least 1");
        Ok(())
    }

    /// Refuse algorithms that none of the collectives has.
    fn check_algos(&self) -> anyhow::Result<()> {
        for algo in self.requested_algos() {
            if !self.collectives.iter().any(|&collective| has(collective, algo)) {
                let possible: Vec<_> = self.collectives.iter().map(|&of| AlgosOf(of).to_string()).collect();
                bail!("--algo {algo}: {}", possible.join("; "));
            }
        }
        Ok(())
    }

    /// The algorithms that are requested by name.
    fn requested_algos(&self) -> impl Iterator<Item = Algo> {
        self.algos.iter().filter_map(|choice| match choice {
            Choice::One(algo) => Some(*algo),
            Choice::All => None,
        })
    }

    /// Return whether the ranks join the trees that an algorithm needs beside their own.
    pub(super) fn joins_for(&self, algo: Algo) -> bool {
        let is_all = self.algos.contains(&Choice::All) && self.shape.is_some();
        is_all || self.requested_algos().any(|requested| requested == algo)
    }

    /// Return the algorithms to measure of a collective.
    fn algos_of(&self, collective: Collective) -> Vec<Algo> {
        if self.algos.contains(&Choice::All) {
            return Algo::ALL.into_iter().filter(|&algo| has(collective, algo)).collect();
        }
        if collective == Collective::Barrier && !self.algos.is_empty() {
            // Algorithms that a barrier lacks stand for what the communicator selects.
            let others = self.requested_algos().any(|algo| !has(collective, algo)).then_some(Algo::Auto);
            let mut algos: Vec<Algo> =
                self.requested_algos().filter(|&algo| has(collective, algo)).chain(others).collect();
            algos.sort_by_key(|&algo| algo == Algo::Auto);
            algos.dedup();
            return algos;
        }
        if !self.algos.is_empty() {
            return self.requested_algos().collect();
        }
        let usual: Vec<Algo> = DEFAULT_ALGOS.into_iter().filter(|&algo| has(collective, algo)).collect();
        if usual.is_empty() { vec![Algo::Auto] } else { usual }
    }

    /// Return the element types and operators to measure of a collective.
    fn kernels(&self, collective: Collective) -> anyhow::Result<Vec<(Dtype, ReduceOp)>> {
        let dtypes = chosen(&self.dtypes, Dtype::F32, Dtype::ALL);
        match collective {
            Collective::Barrier => return Ok(vec![(Dtype::F32, ReduceOp::Sum)]),
            _ if !collective.reduces() => return Ok(dtypes.into_iter().map(|dtype| (dtype, ReduceOp::Sum)).collect()),
            _ => {}
        }
        let is_open = self.dtypes.contains(&Choice::All) || self.ops.contains(&Choice::All);
        let mut kernels = Vec::new();
        for (dtype, op) in dtypes
            .iter()
            .flat_map(|&dtype| chosen(&self.ops, ReduceOp::Sum, ReduceOp::ALL).into_iter().map(move |op| (dtype, op)))
        {
            match Kernel::unsupported_reason(dtype, op) {
                None => kernels.push((dtype, op)),
                // `all` means all that go together.
                Some(_) if is_open => {}
                Some(why) => bail!("-o {op} with -d {dtype}: {why}"),
            }
        }
        ensure!(!kernels.is_empty(), "none of these types has any of these operators");
        Ok(kernels)
    }

    /// Return the roots to measure of a collective.
    fn roots(&self, collective: Collective) -> anyhow::Result<Vec<u32>> {
        match self.root {
            _ if !collective.is_rooted() => Ok(vec![0]),
            Some(Root(Choice::All)) => Ok((0..self.world()).collect()),
            None => Ok(vec![0]),
            Some(Root(Choice::One(root))) => {
                ensure!(root < self.world(), "--root {root}: the {} ranks count from 0", self.world());
                Ok(vec![root])
            }
        }
    }

    /// Add the rows of a case: size by size, all algorithms of a size together.
    fn sweep(&self, case: Case, cases: &mut Vec<Case>) -> anyhow::Result<()> {
        let (begin, end) = (self.begin(), self.end());
        ensure!(begin <= end, "the smallest message (-b {begin}) is larger than the largest (-e {end})");
        ensure!(end <= SIZE_MAX, "-e {end} exceeds the limit of {SIZE_MAX} per operation");
        let algos = self.algos_of(case.collective);
        let each = case.desc().element_bytes() as u64;
        let step = self.step.map_or(Step::Factor(self.factor.unwrap_or(8)), Step::Bytes);
        let end = if case.collective == Collective::Barrier { begin } else { end };
        for size in sweep(begin, end, step) {
            let count = size.0.checked_div(each).unwrap_or(0);
            cases.extend(algos.iter().map(|&algo| Case { count, algo, ..case }));
            ensure!(cases.len() <= ROWS_MAX, "these options ask for more than {ROWS_MAX} rows; use fewer sizes");
        }
        Ok(())
    }
}

/// Return the values that the choices stand for, each once and in the order given.
fn chosen<T: Copy + PartialEq>(choices: &[Choice<T>], default: T, all: &[T]) -> Vec<T> {
    let mut values = Vec::new();
    for choice in choices {
        let each = match choice {
            Choice::One(value) => std::slice::from_ref(value),
            Choice::All => all,
        };
        for value in each {
            if !values.contains(value) {
                values.push(*value);
            }
        }
    }
    if values.is_empty() { vec![default] } else { values }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use sumac::MemoryKind;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        perf: PerfArgs,
    }

    fn parse(args: &str) -> PerfArgs {
        Command::try_parse_from(std::iter::once("perf").chain(args.split_whitespace())).expect("valid options").perf
    }

    fn cases(args: &str) -> Vec<Case> {
        parse(args).cases().expect("rows")
    }

    fn refused(args: &str) -> String {
        parse(args).cases().expect_err("refused").to_string()
    }

    #[test]
    fn default_sweep_is_8_bytes_to_16_mib_by_three_algorithms() {
        let cases = cases("");
        assert_eq!(cases.len(), 8 * 3);
        assert_eq!(cases.iter().map(Case::size_bytes).max(), Some(16 << 20));
        assert_eq!(cases[..3].iter().map(|case| case.algo.name()).collect::<Vec<_>>(), ["tree", "ring", "hd"]);
    }

    #[test]
    fn types_and_operators_multiply_rows_and_barriers_have_no_size() {
        let cases = cases("-b 4 -e 16 -f 2 -d f32,f64 -o sum,max --algo tree --collective all_reduce,barrier");
        assert_eq!(cases.len(), 3 * 2 * 2 + 1);
        assert_eq!(cases.iter().find(|case| case.dtype == Dtype::F64).map(|case| case.count), Some(0));
    }

    #[test]
    fn default_algorithms_are_those_that_the_collective_has() {
        let algos = |of: &str| {
            let size = if of == "barrier" { "" } else { "-e 8" };
            let cases = cases(&format!("{size} --collective {of}"));
            cases.iter().map(|case| case.algo.name()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(algos("reduce_scatter"), "tree ring hd");
        assert_eq!(algos("broadcast"), "tree");
        assert_eq!(algos("gather"), "auto");
        assert_eq!(algos("barrier"), "tree dissemination");
    }

    #[test]
    fn all_algorithms_are_those_that_the_collective_has() {
        let algos = |of: &str| {
            let cases = cases(&format!("-e 8 --collective {of} --algo all"));
            cases.iter().map(|case| case.algo.name()).collect::<Vec<_>>().join(" ")
        };
        let first = "auto tree ring hd rd binomial pairwise host-tree one-shot";
        let others =
            "star full-mesh dbt nhr swing swing-latency bine 2d-ring 2d-torus 2d-mesh hier-ring chain hybrid rab";
        assert_eq!(algos("all_reduce"), format!("{first} {others}"));
        assert_eq!(algos("broadcast"), "auto tree binomial one-shot star dbt bine van-de-geijn chain");
        assert_eq!(
            algos("all_gather"),
            "auto tree ring hd bruck one-shot nhr pat bine 2d-ring 2d-torus 2d-mesh hier-ring"
        );
        assert_eq!(algos("gather"), "auto binomial star");
        assert_eq!(algos("all_to_all"), "auto pairwise hier-pairwise");
    }

    #[test]
    fn barrier_takes_auto_for_algorithms_that_it_lacks() {
        let cases = cases("-e 8 --collective all_reduce,barrier --algo auto,tree,ring,hd");
        let barriers = cases.iter().filter(|case| case.collective == Collective::Barrier);
        assert_eq!(barriers.map(|case| case.algo).collect::<Vec<_>>(), [Algo::Tree, Algo::Auto]);
    }

    #[test]
    fn all_types_and_operators_are_those_that_go_together() {
        let kernels = |args: &str| {
            let cases = cases(&format!("-b 96 -e 96 --algo tree {args}"));
            cases.iter().map(|case| (case.dtype, case.op)).collect::<Vec<_>>()
        };
        let together = Dtype::ALL
            .iter()
            .flat_map(|&dtype| ReduceOp::ALL.iter().map(move |&op| (dtype, op)))
            .filter(|&(dtype, op)| Kernel::unsupported_reason(dtype, op).is_none())
            .count();
        assert_eq!(kernels("-d all -o all").len(), together);
        assert!(kernels("-d float -o all").iter().all(|(dtype, op)| *dtype == Dtype::F32 && *op != ReduceOp::Band));
        assert!(kernels("-d all -o band").iter().all(|(dtype, _)| dtype.is_integer()));
        assert_eq!(kernels("-d float,f32,all -o sum").len(), Dtype::ALL.len(), "each once");
        assert!(refused("-d float -o band").contains("take integers"));
    }

    #[test]
    fn all_roots_are_a_row_each_of_rooted_collectives() {
        let args = "-e 8 --ranks 3 --algo tree --collective broadcast,all_reduce -r all";
        let roots: Vec<_> = cases(args).iter().map(|case| case.root).collect();
        assert_eq!(roots, [0, 1, 2, 0]);
        assert!(refused("--collective reduce --root 4").contains("the 4 ranks count from 0"));
    }

    #[test]
    fn step_in_bytes_replaces_the_factor_and_rows_are_bounded() {
        let sizes: Vec<_> = cases("-b 8 -e 40 -i 16 --algo tree").iter().map(Case::size_bytes).collect();
        assert_eq!(sizes, [8, 24, 40]);
        assert!(refused("-b 8 -e 40 -i 0").contains("at least 1"));
        assert!(refused("-b 0 -e 16G -i 1").contains("100000 rows"));
        assert!(Command::try_parse_from(["perf", "-i", "8", "-f", "2"]).is_err());
    }

    #[test]
    fn transport_memory_and_buffers_are_parsed() {
        let defaults = parse("");
        assert_eq!((defaults.transport, defaults.memory()), (Transport::Auto, MemoryKind::Registered));
        assert_eq!(defaults.placements(), Placements::Both);
        assert_eq!(parse("--fault kill-device").placements(), Placements::InPlace);
        let given = parse("--transport shm --memory plain --buffers out-of-place");
        assert_eq!((given.transport, given.memory()), (Transport::Shm, MemoryKind::Plain));
        assert_eq!(given.placements(), Placements::OutOfPlace);
        let error =
            Command::try_parse_from(["perf", "--transport", "roce"]).map(|_| ()).expect_err("no such transport");
        assert!(error.to_string().contains("auto, udp, shm"), "{error}");
    }

    #[test]
    fn shape_must_fit_the_ranks() {
        assert_eq!(parse("--shape 2x3").shape, "2x3".parse().ok());
        assert!(refused("--shape 2x3 --ranks 4").contains("2x3 does not fit 4 ranks"));
        assert!(refused("--shape servers:3 --ranks 8").contains("a multiple of 3"));
        assert!(Command::try_parse_from(["perf", "--shape", "round"]).is_err());
    }

    #[test]
    fn faults_without_effect_are_refused() {
        assert!(refused("--fault kill-rank --ranks 1").contains("2 or more"));
        assert!(refused("--fault cut-link --transport shm").contains("udp or auto"));
        assert!(refused("--fault kill-device --buffers both").contains("in-place or out-of-place"));
        assert_eq!(parse("--fault cut-link").transport(), Transport::Udp);
        assert_eq!(parse("--fault kill-device").transport(), Transport::Auto);
        assert!(Command::try_parse_from(["perf", "--fault", "kill-device", "--explain"]).is_err());
    }

    #[test]
    #[cfg(feature = "verbs")]
    fn rdma_options_without_effect_are_refused() {
        assert!(refused("--fault cut-link --transport verbs").contains("ip link"));
        assert!(refused("--fault cut-link --transport rdma").contains("ip link"));
        assert!(refused("--verbs mlx5_0").contains("--transport verbs"));
    }

    #[test]
    fn options_without_effect_are_refused() {
        for (args, why) in [
            ("-r 0", "all_reduce has no root"),
            ("--collective all_gather,barrier -o max", "all_gather, barrier has no operator"),
            ("--collective barrier -d float", "no element type"),
            ("--collective barrier -e 8", "no size"),
            ("--collective barrier --memory plain", "no buffers"),
            ("--overrides file.toml", "--algo auto"),
            ("--costs file.toml", "--algo auto"),
            ("--algo bruck", "all_reduce has auto, tree, ring"),
            ("--collective all_to_all --buffers in-place", "out of place only"),
        ] {
            let error = refused(args);
            assert!(error.contains(why), "{args}: {error}");
        }
        for option in ["-n", "-w", "-c", "--buffers", "--timeout"] {
            let value = match option {
                "-c" => "ends",
                "--memory" => "plain",
                "--buffers" => "both",
                _ => "1",
            };
            assert!(Command::try_parse_from(["perf", "--explain", option, value]).is_err(), "{option}");
        }
    }

    #[test]
    fn reversed_size_range_error_names_both_sizes() {
        let error = refused("-b 1M -e 8");
        assert!(error.contains("-b 1M") && error.contains("-e 8"), "{error}");
        assert!(parse("-e 32G").cases().is_err());
    }
}
