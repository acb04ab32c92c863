//! The output of a measurement: rows on stdout as they complete, remarks on stderr.

use super::args::PerfArgs;
use super::table::{self, Row};
use crate::exit::Failure;
use crate::job::{Case, Measured};
use crate::layout::Layout;
use crate::workload::Check;
use anyhow::anyhow;
use indicatif::ProgressBar;
use std::collections::HashSet;
use std::io::{self, Write};
use sumac::select::TreeTransport;

/// The table or the JSON objects, and the remarks on stderr.
#[derive(Debug)]
pub(super) struct Output<'a> {
    args: &'a PerfArgs,
    layout: &'a Layout,
    round_trip_ns: Option<f64>,
    /// Hidden while something is printed.
    pub(super) bar: &'a ProgressBar,
    has_begun: bool,
    rows: usize,
    wrong: u64,
    /// Reasons that have been printed, each once.
    printed_reasons: HashSet<String>,
}

impl<'a> Output<'a> {
    pub(super) fn new(
        args: &'a PerfArgs,
        layout: &'a Layout,
        round_trip_ns: Option<f64>,
        bar: &'a ProgressBar,
    ) -> Self {
        Self { args, layout, round_trip_ns, bar, has_begun: false, rows: 0, wrong: 0, printed_reasons: HashSet::new() }
    }

    /// Print the table's preamble; only the first call does.
    pub(super) fn begin(&mut self, transport: Option<TreeTransport>) -> io::Result<()> {
        if std::mem::replace(&mut self.has_begun, true) || self.args.json {
            return Ok(());
        }
        self.bar.suspend(|| write_preamble(&mut io::stdout(), self.args, self.layout, self.round_trip_ns, transport))
    }

    /// Print the row of a case.
    pub(super) fn row(&mut self, case: &Case, ranks: &[Measured], transport: Option<TreeTransport>) -> io::Result<()> {
        let row = Row::new(case, ranks, transport);
        (self.wrong, self.rows) = (self.wrong + row.wrong, self.rows + 1);
        self.bar.suspend(|| write_row(self.args, &row))?;
        if let Some(why) = ranks.iter().find_map(|rank| rank.fallback.clone()) {
            self.remark_once(&why, &format!("{} {} fell back to {}", row.collective, row.algo, row.path));
        }
        self.bar.inc(1);
        Ok(())
    }

    /// Print why a case has no row.
    pub(super) fn skipped(&mut self, case: &Case, why: &str) {
        self.remark_once(why, &format!("{} {} skipped", case.collective, case.algo));
        self.bar.inc(1);
    }

    fn remark_once(&mut self, why: &str, what: &str) {
        if self.printed_reasons.insert(why.to_owned()) {
            self.remark(&format!("{what}: {why}"));
        }
    }

    /// Print a remark on stderr.
    pub(super) fn remark(&self, what: &str) {
        self.bar.suspend(|| note!("# {what}"));
    }

    /// Print the summary and return the number of wrong elements.
    ///
    /// # Errors
    /// There was no row to print.
    pub(super) fn finish(self) -> Result<u64, Failure> {
        if self.rows == 0 {
            return Err(Failure::Run(anyhow!("none of the requested algorithms is possible; see the reasons above")));
        }
        if !self.args.json {
            self.bar.suspend(|| write_summary(&mut io::stdout(), self.rows, self.wrong))?;
        }
        Ok(self.wrong)
    }
}

fn write_preamble(
    out: &mut impl Write,
    args: &PerfArgs,
    layout: &Layout,
    round_trip_ns: Option<f64>,
    transport: Option<TreeTransport>,
) -> io::Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let devices = layout.devices.len();
    let processes = devices + layout.hosts.len();
    writeln!(
        out,
        "# ranks {}  devices {devices} (emulated)  tree levels {}  iterations {}  warm-up {}  checked: every element{}",
        args.ranks,
        layout.levels,
        args.iterations,
        args.warmup,
        if args.check == Check::Ends { " of one operation before and one after" } else { "" }
    )?;
    let oversubscribed = if cores < processes { " (oversubscribed)" } else { "" };
    let round_trip = round_trip_ns.map_or_else(|| "not measured".into(), |ns| format!("{ns:.0} ns"));
    writeln!(out, "# cores {cores} for {processes} processes{oversubscribed}  cache-line round trip {round_trip}")?;
    match transport {
        None => writeln!(out, "# transport none: no tree")?,
        // Packets are filled from any kind of memory.
        Some(transport @ (TreeTransport::Packets | TreeTransport::Verbs)) => {
            writeln!(out, "# transport {}, {transport}", transport.name())?;
        }
        Some(transport) => {
            let (name, memory) = (transport.name(), args.memory.name());
            writeln!(out, "# transport {name}, {transport}  buffers in {memory} memory")?;
        }
    }
    table::write_head(out)
}

fn write_row(args: &PerfArgs, row: &Row) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, row)?;
        writeln!(out)?;
    } else {
        table::write_row(&mut out, row)?;
    }
    out.flush()
}

fn write_summary(out: &mut impl Write, rows: usize, wrong: u64) -> io::Result<()> {
    let verdict = if wrong == 0 { "OK" } else { "WRONG RESULTS" };
    writeln!(out, "# {rows} rows, {wrong} wrong elements: {verdict}")
}
