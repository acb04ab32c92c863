//! The table of links.

use super::link::Row;
use std::io::{self, Write};

/// Print the table's header.
pub(super) fn write_head(out: &mut impl Write) -> io::Result<()> {
    writeln!(
        out,
        "#{:>15} {:>16} {:>9} {:>7} {:>8} {:>11} {:>10} {:>7}",
        "from", "to", "packets", "lost", "loss", "round trip", "bandwidth", "link"
    )?;
    writeln!(out, "#{:>15} {:>16} {:>9} {:>7} {:>8} {:>11} {:>10} {:>7}", "", "", "", "", "(%)", "(us)", "(GB/s)", "")
}

/// Print a link; `-` stands for what could not be measured.
pub(super) fn write_row(out: &mut impl Write, row: &Row) -> io::Result<()> {
    let count = |value: Option<u64>| value.map_or_else(|| "-".into(), |value| value.to_string());
    let figure = |value: Option<f64>, decimals| value.map_or_else(|| "-".into(), |value| format!("{value:.decimals$}"));
    writeln!(
        out,
        " {:>15} {:>16} {:>9} {:>7} {:>8} {:>11} {:>10} {:>7}",
        row.from,
        row.to,
        count(row.packets),
        count(row.lost),
        figure(row.loss_percent, 3),
        figure(row.latency_us, 1),
        figure(row.bandwidth_gbytes_s, 3),
        if row.ok { "ok" } else { "BAD" }
    )
}

/// Print the problems of bad links and the summary.
pub(super) fn write_summary(out: &mut impl Write, rows: &[Row]) -> io::Result<()> {
    for problem in rows.iter().filter_map(|row| row.problem.as_ref()) {
        writeln!(out, "# {problem}")?;
    }
    let bad = rows.iter().filter(|row| !row.ok).count();
    let verdict = if bad == 0 { "all good".into() } else { format!("{bad} BAD") };
    writeln!(out, "# {} links: {verdict}", rows.len())
}
