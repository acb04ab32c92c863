//! The table: the columns of nccl-tests, with collective, algorithm and path in front of the figures.

use super::names::has;
use super::row::{Figures, Row};
use crate::job::Case;
use crate::options::Algo;
use std::io::{self, Write};
use sumac_hal::op::{Dtype, ReduceOp};

/// The widths of the columns before the figures, which are as wide as the widest cell of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Table {
    collective: usize,
    size: usize,
    count: usize,
    dtype: usize,
    op: usize,
    root: usize,
    algo: usize,
    path: usize,
}

impl Table {
    /// Lay out the table of these rows.
    pub(super) fn new(cases: &[Case]) -> Self {
        let mut table =
            Self { collective: 11, size: 8, count: 10, dtype: 4, op: 5, root: 4, algo: 4, path: "mixed".len() };
        for case in cases {
            let desc = case.desc();
            let widen = |width: &mut usize, len: usize| *width = (*width).max(len);
            widen(&mut table.collective, case.collective.name().len());
            widen(&mut table.size, case.size_bytes().to_string().len());
            widen(&mut table.count, case.count.to_string().len());
            widen(&mut table.dtype, desc.dtype.map_or("none", Dtype::name).len());
            widen(&mut table.op, desc.op.map_or("none", ReduceOp::name).len());
            widen(&mut table.root, root(case.collective.is_rooted().then_some(case.root)).len());
            widen(&mut table.algo, case.algo.name().len());
            let paths = Algo::ALL.into_iter().filter(|&algo| has(case.collective, algo));
            let taken = paths.filter(|&path| case.algo == Algo::Auto || path == case.algo);
            widen(&mut table.path, taken.map(|path| path.name().len()).max().unwrap_or(0));
        }
        table
    }

    /// Print the header.
    pub(super) fn write_head(&self, out: &mut impl Write) -> io::Result<()> {
        let figures = ["time", "algbw", "busbw", "#wrong"];
        let (time, width) = (["min", "avg", "max"], FIGURES_WIDTH);
        let left = self.left(["", "", "", "", "", "", "", ""]);
        let line = format!("#{left}{:^width$}{:^width$}{:^27}", "out-of-place", "in-place", "median time of a rank");
        writeln!(out, "{}", line.trim_end())?;
        let left = self.left(["collective", "size", "count", "type", "redop", "root", "algo", "path"]);
        writeln!(out, "#{left}{}{}{}", cells(figures), cells(figures), times(time))?;
        let figures = ["(us)", "(GB/s)", "(GB/s)", ""];
        let left = self.left(["", "(B)", "(elements)", "", "", "", "", "taken"]);
        let line = format!("#{left}{}{}{}", cells(figures), cells(figures), times(["(us)"; 3]));
        writeln!(out, "{}", line.trim_end())
    }

    /// Print a row.
    pub(super) fn write_row(&self, out: &mut impl Write, row: &Row) -> io::Result<()> {
        let (size, count, root) = (row.size_bytes.to_string(), row.count.to_string(), root(row.root));
        let (dtype, op) = (row.dtype.unwrap_or("none"), row.op.unwrap_or("none"));
        let left = self.left([row.collective, &size, &count, dtype, op, &root, row.algo, row.path]);
        let time = [row.rank_min_us, row.rank_avg_us, row.rank_max_us].map(figure);
        let [out_of_place, in_place] = [row.out_of_place(), row.in_place()].map(figures);
        writeln!(out, " {left}{out_of_place}{in_place}{}", times(time.each_ref().map(String::as_str)))
    }

    fn left(&self, [collective, size, count, dtype, op, root, algo, path]: [&str; 8]) -> String {
        format!(
            "{collective:>a$} {size:>b$} {count:>c$} {dtype:>d$} {op:>e$} {root:>f$} {algo:>g$} {path:>h$}",
            a = self.collective,
            b = self.size,
            c = self.count,
            d = self.dtype,
            e = self.op,
            f = self.root,
            g = self.algo,
            h = self.path,
        )
    }
}

/// The width of the figures of a placement.
const FIGURES_WIDTH: usize = 33;

fn cells([time, algbw, busbw, wrong]: [&str; 4]) -> String {
    format!(" {time:>9} {algbw:>7} {busbw:>7} {wrong:>6}")
}

fn times([min, avg, max]: [&str; 3]) -> String {
    format!(" {min:>9} {avg:>9} {max:>9}")
}

/// Format the figures of a placement; `-` if they were not measured.
fn figures(figures: Option<Figures>) -> String {
    match figures {
        Some(Figures { time_us, algbw, busbw, wrong, .. }) => {
            cells([&figure(time_us), &figure(algbw), &figure(busbw), &wrong.to_string()])
        }
        None => cells(["-"; 4]),
    }
}

/// Format a root; nccl-tests prints -1 for collectives without one.
fn root(root: Option<u32>) -> String {
    root.map_or("-1".into(), |root| root.to_string())
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

#[cfg(test)]
mod tests {
    use super::super::row::tests::{case, in_place, measured, out_of_place, row};
    use super::*;
    use sumac_hal::op::{Collective, Path};

    fn printed(cases: &[Case], rows: &[Row]) -> String {
        let (mut text, table) = (Vec::new(), Table::new(cases));
        table.write_head(&mut text).expect("memory");
        rows.iter().for_each(|row| table.write_row(&mut text, row).expect("memory"));
        String::from_utf8(text).expect("ASCII")
    }

    #[test]
    fn table_columns_line_up() {
        let cases = [case(Collective::AllReduce), case(Collective::Broadcast), case(Collective::ReduceScatter)];
        let ranks = |time_ns, path| vec![measured(&[time_ns], path); 2];
        let rows = [
            row(&cases[0], &[out_of_place(ranks(123_456, Path::Tree)), in_place(ranks(1_234_567, Path::Tree))], None),
            row(&cases[1], &[in_place(ranks(9_000, Path::Tree))], None),
            row(&cases[2], &[out_of_place(ranks(45_000, Path::Tree))], None),
        ];
        let golden = "\
#                                                                       \
out-of-place                       in-place                median time of a rank
#    collective     size      count type redop root algo  path      \
time   algbw   busbw #wrong      time   algbw   busbw #wrong       min       avg       max
#                    (B) (elements)                      taken      \
(us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)             (us)      (us)      (us)
     all_reduce  1048576     262144  f32   sum   -1 tree  tree     \
123.5   8.494   8.494      0      1235   0.849   0.849      0      1235      1235      1235
      broadcast  1048576     262144  f32  none    0 tree  tree         \
-       -       -      -     9.000   116.5   116.5      0     9.000     9.000     9.000
 reduce_scatter  1048576     262144  f32   sum   -1 tree  tree     \
45.00   23.30   11.65      0         -       -       -      -     45.00     45.00     45.00
";
        let text = printed(&cases, &rows);
        assert_eq!(text, golden);
        let widths: Vec<_> = text.lines().skip(1).map(str::len).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{widths:?}");
    }

    #[test]
    fn long_names_widen_their_column_only() {
        let long = Case { op: ReduceOp::PremulSum, algo: Algo::Auto, ..case(Collective::AllReduce) };
        let [usual, wide] = [Table::new(&[case(Collective::AllReduce)]), Table::new(&[long])];
        let expected = Table { op: "premul_sum".len(), path: "swing-latency".len(), ..usual };
        assert_eq!(wide, expected);
        let barrier = Table::new(&[Case { algo: Algo::Auto, ..case(Collective::Barrier) }]);
        assert_eq!(barrier.path, "dissemination".len());
    }
}
