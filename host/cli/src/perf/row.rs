//! A row of a measurement: the figures of all ranks combined, and the conditions that repeat it.
//!
//! Its fields are the keys of the JSON object and the columns of the CSV file, in this order. Keys are only ever added,
//! at the end of their group, because other programs read them.

use super::args::PerfArgs;
use crate::job::{Case, Measured};
use crate::layout::Layout;
use crate::options::OrderName;
use crate::stats;
use crate::workload::Placement;
use clap::ValueEnum;
use serde::Serialize;
use sumac::JoinConfig;
use sumac::controller::is_host_device;
use sumac::select::TreeTransport;
use sumac_hal::ctrl::Order;
use sumac_hal::op::{Dtype, Path, ReduceOp};

/// The measurements of all ranks of a case in one placement.
#[derive(Debug)]
pub(super) struct Measurement {
    pub(super) placement: Placement,
    pub(super) ranks: Vec<Measured>,
}

/// A row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Row {
    /// The collective.
    pub(super) collective: &'static str,
    /// The element type; `None` for a barrier.
    pub(super) dtype: Option<&'static str>,
    /// The operator; `None` if the collective does not reduce.
    pub(super) op: Option<&'static str>,
    /// The number of ranks.
    pub(super) ranks: u32,
    /// Size of the operation in bytes.
    pub(super) size_bytes: u64,
    /// The number of elements.
    pub(super) count: u64,
    /// The requested algorithm.
    pub(super) algo: &'static str,
    /// The path taken; `mixed` if ranks or placements differ, as after a recovery between the two placements.
    pub(super) path: &'static str,
    /// The transport to the leaf device, `mixed` if ranks differ; `host` if the ranks reduce among themselves.
    pub(super) transport: &'static str,
    /// Median over the iterations of the slowest rank's time, in microseconds. This and all figures that do not say
    /// otherwise are those in place, or out of place if `in_place` is false.
    pub(super) time_us: f64,
    /// 99th percentile of the same times.
    pub(super) p99_us: f64,
    /// Size over time, in 1e9 bytes per second.
    pub(super) algbw_gbytes_s: f64,
    /// `algbw_gbytes_s` times the factor of nccl-tests.
    pub(super) busbw_gbytes_s: f64,
    /// Elements with wrong values, over all iterations and ranks, in place and out of place.
    pub(super) wrong: u64,
    /// Bytes sent per operation, of the rank that sent the most.
    pub(super) wire_bytes: u64,
    /// Processor time per operation in microseconds, of the rank that used the most.
    pub(super) cpu_us: f64,
    /// Retransmitted contributions, over all iterations and ranks, in place and out of place.
    pub(super) retransmits: u64,
    /// Whether the ranks recovered from a lost tree: in an operation, in a barrier next to one, or between calls.
    pub(super) repaired: bool,
    /// Bytes sent for recovery, of the rank that sent the most.
    pub(super) repair_bytes: u64,
    /// The rank that arrived last at an operation, as the tree saw it; `None` on other paths.
    pub(super) slowest_rank: Option<u32>,
    /// How long after the first rank it arrived, in microseconds.
    pub(super) late_us: Option<u32>,
    /// The root; `None` if the collective has none.
    pub(super) root: Option<u32>,
    /// Whether the figures are those in place; `None` for a barrier, which has no buffers.
    pub(super) in_place: Option<bool>,
    /// The least of the ranks' median times, in microseconds.
    pub(super) rank_min_us: f64,
    /// The mean of the ranks' median times, in microseconds.
    pub(super) rank_avg_us: f64,
    /// The greatest of the ranks' median times, in microseconds. It is at most `time_us`, as another rank may be the
    /// slowest in each iteration.
    pub(super) rank_max_us: f64,
    /// `time_us` out of place; this and the next four are `None` unless measured.
    pub(super) out_of_place_time_us: Option<f64>,
    /// `p99_us` out of place.
    pub(super) out_of_place_p99_us: Option<f64>,
    /// `algbw_gbytes_s` out of place.
    pub(super) out_of_place_algbw_gbytes_s: Option<f64>,
    /// `busbw_gbytes_s` out of place.
    pub(super) out_of_place_busbw_gbytes_s: Option<f64>,
    /// The share of `wrong` that is out of place.
    pub(super) out_of_place_wrong: Option<u64>,
    /// The least number of trees that an operation was spread over; 0 if it took none.
    pub(super) trees: u32,
    /// What repeats the row.
    #[serde(flatten)]
    pub(super) conditions: Conditions,
}

/// The conditions of a run, with all defaults resolved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Conditions {
    /// Measured iterations per row and placement.
    pub(super) iterations: u32,
    /// Warm-up iterations before them.
    pub(super) warmup_iterations: u32,
    /// Which iterations are checked.
    pub(super) check: &'static str,
    /// Which placements are measured.
    pub(super) buffers: &'static str,
    /// The memory of the buffers.
    pub(super) memory: &'static str,
    /// The order of reduction.
    pub(super) order: String,
    /// The requested transport.
    pub(super) requested_transport: &'static str,
    /// How ranks wait for other processes of their machine.
    pub(super) wait_policy: String,
    /// Levels of the tree.
    pub(super) levels: usize,
    /// The number of devices.
    pub(super) devices: usize,
    /// How many of them this run has started, which are emulated.
    pub(super) emulated_devices: usize,
    /// Shards of each emulated device.
    pub(super) shards: u16,
    /// Whether leaves and their ranks are bound to processors, where there is something to divide.
    pub(super) bind: bool,
    /// Processors that this run may use.
    pub(super) cores: usize,
    /// The version of this command.
    pub(super) version: &'static str,
    /// The command line.
    pub(super) command: String,
}

impl Conditions {
    /// Return the conditions of a run.
    pub(super) fn new(args: &PerfArgs, layout: &Layout) -> Self {
        let order = args.order.map_or_else(default_order, Into::into);
        Self {
            iterations: args.iterations,
            warmup_iterations: args.warmup,
            check: args.check.name(),
            buffers: args.placements().name(),
            memory: args.memory().name(),
            order: order_name(order),
            requested_transport: args.transport().name(),
            wait_policy: args.wait_policy.unwrap_or_default().to_string(),
            levels: layout.levels,
            devices: layout.devices.len(),
            emulated_devices: match args.launched {
                None => layout.devices.len() - args.devices.len().min(layout.devices.len()),
                Some(_) => layout.devices.iter().filter(|name| is_host_device(name)).count(),
            },
            shards: args.shards,
            bind: !args.no_bind && args.launched.is_none(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            version: env!("CARGO_PKG_VERSION"),
            command: command_line(std::env::args_os().skip(1).map(|arg| arg.to_string_lossy().into_owned())),
        }
    }
}

/// The order of ranks that are not told one.
fn default_order() -> Order {
    JoinConfig::new(([127, 0, 0, 1], sumac::comm::DEFAULT_PORT).into(), "", 0, 1).order
}

/// Return the name of an order on the command line.
fn order_name(order: Order) -> String {
    let name = OrderName::value_variants().iter().find(|&&name| Order::from(name) == order);
    let value = name.and_then(ValueEnum::to_possible_value);
    value.map_or_else(|| format!("{order:?}"), |value| value.get_name().to_owned())
}

/// Quote the arguments for a shell.
fn command_line(args: impl Iterator<Item = String>) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=:,./%+@".contains(c);
    let quoted = |arg: String| match !arg.is_empty() && arg.chars().all(is_plain) {
        true => arg,
        false => format!("'{}'", arg.replace('\'', r"'\''")),
    };
    std::iter::once("sumac".to_owned()).chain(args.map(quoted)).collect::<Vec<_>>().join(" ")
}

/// The figures of one placement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figures {
    pub(super) time_us: f64,
    pub(super) p99_us: f64,
    pub(super) algbw: f64,
    pub(super) busbw: f64,
    pub(super) wrong: u64,
}

impl Figures {
    fn new(case: &Case, ranks: &[Measured]) -> Self {
        let times: Vec<_> = ranks.iter().map(|rank| rank.times_ns.clone()).collect();
        let slowest = stats::slowest_ns(&times);
        let median_ns = stats::median_ns(&slowest);
        let algbw = stats::algbw_gbytes_s(case.size_bytes(), median_ns);
        Self {
            time_us: thousandths(median_ns / 1e3),
            p99_us: thousandths(stats::p99_ns(&slowest) as f64 / 1e3),
            algbw,
            busbw: algbw * stats::bus_factor(case.collective, ranks.len() as u32),
            wrong: ranks.iter().map(|rank| rank.wrong).sum(),
        }
    }
}

impl Row {
    /// Combine the ranks' measurements of a case, of which there is at least one; in place, it comes last.
    pub(super) fn new(
        case: &Case,
        measurements: &[Measurement],
        transport: Option<TreeTransport>,
        conditions: &Conditions,
    ) -> Self {
        let desc = case.desc();
        let ranks = measurements.last().map_or(&[][..], |last| &last.ranks);
        let figures = Figures::new(case, ranks);
        let out_of_place = measurements.iter().find(|one| one.placement == Placement::OutOfPlace);
        let out_of_place = out_of_place.map(|one| Figures::new(case, &one.ranks));
        let in_place = measurements.last().map(|last| last.placement == Placement::InPlace);
        let all = || measurements.iter().flat_map(|one| &one.ranks);
        let path = common_path(all());
        let slowest = all().filter_map(|rank| rank.slowest).max_by_key(|(_, late_us)| *late_us);
        let iterations = ranks.iter().map(|rank| rank.times_ns.len()).min().unwrap_or(0).max(1) as u64;
        let repair_bytes = |rank: usize| measurements.iter().map(|one| one.ranks[rank].repair_bytes).sum::<u64>();
        let [rank_min_us, rank_avg_us, rank_max_us] = over_ranks_us(ranks);
        Self {
            collective: case.collective.name(),
            dtype: desc.dtype.map(Dtype::name),
            op: desc.op.map(ReduceOp::name),
            ranks: ranks.len() as u32,
            size_bytes: case.size_bytes(),
            count: case.count,
            algo: case.algo.name(),
            path: path.map_or("mixed", Path::name),
            transport: transport.filter(|_| path == Some(Path::Tree)).map_or("host", TreeTransport::name),
            time_us: figures.time_us,
            p99_us: figures.p99_us,
            algbw_gbytes_s: figures.algbw,
            busbw_gbytes_s: figures.busbw,
            wrong: all().map(|rank| rank.wrong).sum(),
            wire_bytes: ranks.iter().map(|rank| rank.wire_bytes).max().unwrap_or(0).div_ceil(iterations),
            cpu_us: thousandths(
                ranks.iter().map(|rank| rank.cpu_ns).max().unwrap_or(0) as f64 / iterations as f64 / 1e3,
            ),
            retransmits: all().map(|rank| rank.retransmits).sum(),
            repaired: all().any(|rank| rank.recoveries > 0),
            repair_bytes: (0..ranks.len()).map(repair_bytes).max().unwrap_or(0),
            slowest_rank: slowest.map(|(rank, _)| rank),
            late_us: slowest.map(|(_, late_us)| late_us),
            root: case.collective.is_rooted().then_some(case.root),
            in_place: in_place.filter(|_| desc.dtype.is_some()),
            rank_min_us,
            rank_avg_us,
            rank_max_us,
            out_of_place_time_us: out_of_place.map(|figures| figures.time_us),
            out_of_place_p99_us: out_of_place.map(|figures| figures.p99_us),
            out_of_place_algbw_gbytes_s: out_of_place.map(|figures| figures.algbw),
            out_of_place_busbw_gbytes_s: out_of_place.map(|figures| figures.busbw),
            out_of_place_wrong: out_of_place.map(|figures| figures.wrong),
            trees: all().filter_map(|rank| rank.trees).min().unwrap_or(0),
            conditions: conditions.clone(),
        }
    }

    /// Return the figures out of place, if they were measured.
    pub(super) fn out_of_place(&self) -> Option<Figures> {
        Some(Figures {
            time_us: self.out_of_place_time_us?,
            p99_us: self.out_of_place_p99_us?,
            algbw: self.out_of_place_algbw_gbytes_s?,
            busbw: self.out_of_place_busbw_gbytes_s?,
            wrong: self.out_of_place_wrong?,
        })
    }

    /// Return the figures in place, if they were measured, and those of a barrier.
    pub(super) fn in_place(&self) -> Option<Figures> {
        let figures = Figures {
            time_us: self.time_us,
            p99_us: self.p99_us,
            algbw: self.algbw_gbytes_s,
            busbw: self.busbw_gbytes_s,
            wrong: self.wrong - self.out_of_place_wrong.unwrap_or(0),
        };
        (self.in_place != Some(false)).then_some(figures)
    }

    /// Return the bus bandwidths in GB/s that count for the average: none of a barrier, which moves no data.
    pub(super) fn bus_bandwidths(&self) -> impl Iterator<Item = f64> + use<> {
        let figures = [self.out_of_place(), self.in_place()];
        let moves_data = self.dtype.is_some();
        figures.into_iter().flatten().filter(move |_| moves_data).map(|figures| figures.busbw)
    }
}

/// Return the least, the mean and the greatest of the ranks' median times, in microseconds.
fn over_ranks_us(ranks: &[Measured]) -> [f64; 3] {
    let medians: Vec<f64> = ranks.iter().map(|rank| stats::median_ns(&rank.times_ns) / 1e3).collect();
    let least = medians.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0);
    let greatest = medians.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0);
    let mean = medians.iter().sum::<f64>() / medians.len().max(1) as f64;
    [least, mean, greatest].map(thousandths)
}

/// Return the path, if all took the same one.
fn common_path<'a>(mut ranks: impl Iterator<Item = &'a Measured>) -> Option<Path> {
    let path = ranks.next()?.path?;
    ranks.all(|rank| rank.path == Some(path)).then_some(path)
}

/// Round to thousandths; finer digits of a microsecond are noise.
fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::options::Algo;
    use sumac_hal::op::Collective;

    pub(crate) fn measured(times_ns: &[u64], path: Path) -> Measured {
        Measured {
            times_ns: times_ns.to_vec(),
            wrong: 0,
            path: Some(path),
            trees: Some(u32::from(path == Path::Tree)),
            fallback: None,
            wire_bytes: 3000,
            cpu_ns: 9000,
            retransmits: 1,
            recovery: None,
            recoveries: 0,
            recoveries_ns: 0,
            repair_bytes: 0,
            slowest: Some((3, 70)),
        }
    }

    pub(crate) fn case(collective: Collective) -> Case {
        Case { collective, dtype: Dtype::F32, op: ReduceOp::Sum, root: 0, count: 1 << 18, algo: Algo::Tree }
    }

    pub(crate) fn conditions() -> Conditions {
        Conditions {
            iterations: 3,
            warmup_iterations: 1,
            check: "every",
            buffers: "both",
            memory: "registered",
            order: "arrival".into(),
            requested_transport: "auto",
            wait_policy: "auto".into(),
            levels: 2,
            devices: 3,
            emulated_devices: 3,
            shards: 1,
            bind: true,
            cores: 2,
            version: "0.2.0",
            command: "sumac perf".into(),
        }
    }

    pub(crate) fn row(case: &Case, measurements: &[Measurement], transport: Option<TreeTransport>) -> Row {
        Row::new(case, measurements, transport, &conditions())
    }

    pub(crate) fn in_place(ranks: Vec<Measured>) -> Measurement {
        Measurement { placement: Placement::InPlace, ranks }
    }

    pub(crate) fn out_of_place(ranks: Vec<Measured>) -> Measurement {
        Measurement { placement: Placement::OutOfPlace, ranks }
    }

    #[test]
    fn figures_in_place_keep_their_keys_and_those_out_of_place_are_added() {
        let mut ranks = vec![measured(&[131_072, 524_288, 262_144], Path::Tree); 4];
        ranks[2].times_ns[1] = 1_048_576;
        ranks[1].wire_bytes = 6000;
        ranks[3].wrong = 2;
        ranks[2].slowest = Some((1, 90));
        ranks[0].times_ns[2] = 131_072;
        ranks[1].repair_bytes = 5;
        let mut apart = vec![measured(&[524_288; 3], Path::Tree); 4];
        (apart[0].wrong, apart[1].repair_bytes) = (1, 6);
        let both = [out_of_place(apart), in_place(ranks)];
        let found = row(&case(Collective::AllReduce), &both, Some(TreeTransport::Shm));
        let json = serde_json::to_string(&found).expect("plain data");
        let known = "{\"collective\":\"all_reduce\",\"dtype\":\"f32\",\"op\":\"sum\",\"ranks\":4,\
             \"size_bytes\":1048576,\"count\":262144,\"algo\":\"tree\",\"path\":\"tree\",\"transport\":\"shm\",\
             \"time_us\":262.144,\"p99_us\":1048.576,\"algbw_gbytes_s\":4.0,\"busbw_gbytes_s\":6.0,\"wrong\":3,\
             \"wire_bytes\":2000,\"cpu_us\":3.0,\"retransmits\":8,\"repaired\":false,\"repair_bytes\":11,\
             \"slowest_rank\":1,\"late_us\":90,\"root\":null,\"in_place\":true,\"rank_min_us\":131.072,\
             \"rank_avg_us\":229.376,\"rank_max_us\":262.144,\"out_of_place_time_us\":524.288,\
             \"out_of_place_p99_us\":524.288,\"out_of_place_algbw_gbytes_s\":2.0,\
             \"out_of_place_busbw_gbytes_s\":3.0,\"out_of_place_wrong\":1,\"trees\":1,\"iterations\":3,";
        assert_eq!(&json[..known.len()], known);
        assert_eq!(found.in_place().map(|figures| (figures.busbw, figures.wrong)), Some((6.0, 2)));
        assert_eq!(found.out_of_place().map(|figures| (figures.busbw, figures.wrong)), Some((3.0, 1)));
        assert_eq!(found.bus_bandwidths().collect::<Vec<_>>(), [3.0, 6.0]);
    }

    #[test]
    fn row_measured_out_of_place_only_has_no_figures_in_place() {
        let apart = [out_of_place(vec![measured(&[1000], Path::Pairwise); 2])];
        let found = row(&case(Collective::AllToAll), &apart, None);
        assert_eq!((found.in_place, found.in_place(), found.time_us), (Some(false), None, 1.0));
        assert_eq!(found.out_of_place_time_us, Some(1.0));
        let together = [in_place(vec![measured(&[1000], Path::Tree); 2])];
        let found = row(&Case { root: 1, ..case(Collective::Reduce) }, &together, None);
        assert_eq!((found.out_of_place(), found.root), (None, Some(1)));
    }

    #[test]
    fn path_is_mixed_if_ranks_or_placements_disagree() {
        let [tree, ring] = [measured(&[1], Path::Tree), measured(&[1], Path::Ring)];
        let udp = Some(TreeTransport::Packets);
        let of = |measurements: &[Measurement]| row(&case(Collective::AllReduce), measurements, udp);
        assert_eq!(of(&[in_place(vec![tree.clone(), ring.clone()])]).path, "mixed");
        let changed = of(&[out_of_place(vec![tree.clone()]), in_place(vec![ring.clone()])]);
        assert_eq!((changed.path, changed.transport), ("mixed", "host"));
        let barrier = Case { count: 0, ..case(Collective::Barrier) };
        let found = row(&barrier, &[in_place(vec![tree])], udp);
        assert_eq!((found.dtype, found.op, found.size_bytes, found.busbw_gbytes_s), (None, None, 0, 0.0));
        assert_eq!((found.transport, found.in_place, found.bus_bandwidths().count()), ("udp", None, 0));
        let found = of(&[in_place(vec![ring])]);
        assert_eq!((found.path, found.transport), ("ring", "host"));
    }

    #[test]
    fn orders_have_the_names_of_the_option() {
        assert_eq!(order_name(Order::TreeFold), "fold");
        assert_eq!(order_name(default_order()), "arrival");
    }

    #[test]
    fn command_line_is_quoted_for_a_shell() {
        let args = ["perf", "-b", "4K", "--chaos=--loss 5%", "it's", ""].map(str::to_owned);
        assert_eq!(command_line(args.into_iter()), r"sumac perf -b 4K '--chaos=--loss 5%' 'it'\''s' ''");
    }
}
