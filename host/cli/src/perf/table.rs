//! The rows of a measurement: the columns of nccl-tests, or one JSON object per row.

use super::stats_of;
use crate::job::{Case, Measured};
use serde::Serialize;
use std::io::{self, Write};
use sumac::select::TreeTransport;
use sumac_hal::op::{Dtype, Path, ReduceOp};

/// A row. Its fields are the keys of the JSON object, in this order.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Row {
    /// The collective.
    pub(crate) collective: &'static str,
    /// The element type; `None` for a barrier.
    pub(crate) dtype: Option<&'static str>,
    /// The operator; `None` if the collective does not reduce.
    pub(crate) op: Option<&'static str>,
    /// The number of ranks.
    pub(crate) ranks: u32,
    /// Size of the operation in bytes.
    pub(crate) size_bytes: u64,
    /// The number of elements.
    pub(crate) count: u64,
    /// The requested algorithm.
    pub(crate) algo: &'static str,
    /// The path taken; `mixed` if the ranks disagree, which no correct run shows.
    pub(crate) path: &'static str,
    /// The transport to the leaf device, `mixed` if ranks differ; `host` if the ranks reduce among themselves.
    pub(crate) transport: &'static str,
    /// Median over the iterations of the slowest rank's time, in microseconds.
    pub(crate) time_us: f64,
    /// 99th percentile of the same times.
    pub(crate) p99_us: f64,
    /// Size over time, in 1e9 bytes per second.
    pub(crate) algbw_gbytes_s: f64,
    /// `algbw_gbytes_s` times the factor of nccl-tests.
    pub(crate) busbw_gbytes_s: f64,
    /// Elements with wrong values, over all iterations and ranks.
    pub(crate) wrong: u64,
    /// Bytes sent per operation, of the rank that sent the most.
    pub(crate) wire_bytes: u64,
    /// Processor time per operation in microseconds, of the rank that used the most.
    pub(crate) cpu_us: f64,
    /// Retransmitted contributions, over all iterations and ranks.
    pub(crate) retransmits: u64,
    /// Whether the ranks recovered from a lost tree: in an operation, in a barrier next to one, or between calls.
    pub(crate) repaired: bool,
    /// Bytes sent for recovery, of the rank that sent the most.
    pub(crate) repair_bytes: u64,
    /// The rank that arrived last at an operation, as the tree saw it; `None` on other paths.
    pub(crate) slowest_rank: Option<u32>,
    /// How long after the first rank it arrived, in microseconds.
    pub(crate) late_us: Option<u32>,
}

impl Row {
    /// Combine the ranks' measurements of a case.
    pub(crate) fn new(case: &Case, ranks: &[Measured], transport: Option<TreeTransport>) -> Self {
        let figures = stats_of(case, ranks);
        let desc = case.desc();
        let path = common_path(ranks);
        let slowest = ranks.iter().filter_map(|rank| rank.slowest).max_by_key(|(_, late_us)| *late_us);
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
            time_us: thousandths(figures.median_ns / 1e3),
            p99_us: thousandths(figures.p99_ns as f64 / 1e3),
            algbw_gbytes_s: figures.algbw,
            busbw_gbytes_s: figures.busbw,
            wrong: ranks.iter().map(|rank| rank.wrong).sum(),
            wire_bytes: figures.wire_bytes,
            cpu_us: thousandths(figures.cpu_ns / 1e3),
            retransmits: ranks.iter().map(|rank| rank.retransmits).sum(),
            repaired: ranks.iter().any(|rank| rank.repairs > 0),
            repair_bytes: ranks.iter().map(|rank| rank.repair_bytes).max().unwrap_or(0),
            slowest_rank: slowest.map(|(rank, _)| rank),
            late_us: slowest.map(|(_, late_us)| late_us),
        }
    }
}

/// Print the table's header.
pub(crate) fn write_head(out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "#{:>12} {:>13} {:>8} {:>7} {:>6} {:>6} {:>11} {:>11} {:>8} {:>8} {:>7}",
        "size", "count", "type", "redop", "algo", "path", "time", "p99", "algbw", "busbw", "#wrong"
    )?;
    writeln!(
        out,
        "#{:>12} {:>13} {:>8} {:>7} {:>6} {:>6} {:>11} {:>11} {:>8} {:>8} {:>7}",
        "(B)", "(elements)", "", "", "", "taken", "(us)", "(us)", "(GB/s)", "(GB/s)", ""
    )
}

/// Print a row of the table.
pub(crate) fn write_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    writeln!(
        out,
        " {:>12} {:>13} {:>8} {:>7} {:>6} {:>6} {:>11} {:>11} {:>8} {:>8} {:>7}",
        row.size_bytes,
        row.count,
        row.dtype.unwrap_or("none"),
        row.op.unwrap_or("none"),
        row.algo,
        row.path,
        figure(row.time_us),
        figure(row.p99_us),
        figure(row.algbw_gbytes_s),
        figure(row.busbw_gbytes_s),
        row.wrong
    )
}

/// Return the path, if all ranks took the same one.
fn common_path(ranks: &[Measured]) -> Option<Path> {
    let path = ranks.first()?.path?;
    ranks.iter().all(|rank| rank.path == Some(path)).then_some(path)
}

/// Format a number with about four digits, as nccl-tests does.
fn figure(value: f64) -> String {
    let decimals = match value {
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 10.0 => 2,
        v if v >= 0.01 || v == 0.0 => 3,
        _ => 5,
    };
    format!("{value:.decimals$}")
}

/// Round to thousandths; finer digits of a microsecond are noise.
fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Algo;
    use sumac_hal::op::Collective;

    fn measured(times_ns: &[u64], path: Path) -> Measured {
        Measured {
            times_ns: times_ns.to_vec(),
            wrong: 0,
            path: Some(path),
            fallback: None,
            wire_bytes: 3000,
            cpu_ns: 9000,
            retransmits: 1,
            repair: None,
            repairs: 0,
            repairs_ns: 0,
            repair_bytes: 0,
            slowest: Some((3, 70)),
        }
    }

    fn case(collective: Collective) -> Case {
        Case { collective, dtype: Dtype::F32, op: ReduceOp::Sum, root: 0, count: 1 << 18, algo: Algo::Tree }
    }

    #[test]
    fn row_has_the_documented_keys_and_figures() {
        let mut ranks = vec![measured(&[131_072, 524_288, 262_144], Path::Tree); 4];
        ranks[2].times_ns[1] = 1_048_576;
        ranks[1].wire_bytes = 6000;
        ranks[3].wrong = 2;
        ranks[2].slowest = Some((1, 90));
        let row = Row::new(&case(Collective::AllReduce), &ranks, Some(TreeTransport::Shm));
        let json = serde_json::to_string(&row).expect("plain data");
        assert_eq!(
            json,
            "{\"collective\":\"all_reduce\",\"dtype\":\"f32\",\"op\":\"sum\",\"ranks\":4,\"size_bytes\":1048576,\
             \"count\":262144,\"algo\":\"tree\",\"path\":\"tree\",\"transport\":\"shm\",\"time_us\":262.144,\
             \"p99_us\":1048.576,\"algbw_gbytes_s\":4.0,\"busbw_gbytes_s\":6.0,\"wrong\":2,\"wire_bytes\":2000,\"cpu_us\":3.0,\
             \"retransmits\":4,\"repaired\":false,\"repair_bytes\":0,\"slowest_rank\":1,\"late_us\":90}"
        );
    }

    #[test]
    fn table_columns_line_up() {
        let mut text = Vec::new();
        write_head(&mut text).expect("memory");
        let ranks = vec![measured(&[1_234_567], Path::HalvingDoubling); 2];
        write_row(&mut text, &Row::new(&case(Collective::AllReduce), &ranks, None)).expect("memory");
        let text = String::from_utf8(text).expect("ASCII");
        let golden = "\
#        size         count     type   redop   algo   path        time         p99    algbw    busbw  #wrong
#         (B)    (elements)                          taken        (us)        (us)   (GB/s)   (GB/s)        
      1048576        262144      f32     sum   tree     hd        1235        1235    0.849    0.849       0
";
        assert_eq!(text, golden);
    }

    #[test]
    fn path_is_mixed_if_ranks_disagree() {
        let ranks = [measured(&[1], Path::Tree), measured(&[1], Path::Ring)];
        let udp = Some(TreeTransport::Packets);
        assert_eq!(Row::new(&case(Collective::AllReduce), &ranks, udp).path, "mixed");
        let row = Row::new(&Case { count: 0, ..case(Collective::Barrier) }, &ranks[..1], udp);
        assert_eq!((row.dtype, row.op, row.size_bytes, row.busbw_gbytes_s), (None, None, 0, 0.0));
        assert_eq!(row.transport, "udp");
        let ring = Row::new(&case(Collective::AllReduce), &ranks[1..], udp);
        assert_eq!((ring.path, ring.transport), ("ring", "host"));
    }
}
