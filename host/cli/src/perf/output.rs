//! What a measurement prints, row by row as it comes.

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
use sumac::select::Attached;

/// The table or the JSON objects, and what stands beside them on stderr.
#[derive(Debug)]
pub(super) struct Output<'a> {
    args: &'a PerfArgs,
    layout: &'a Layout,
    round_trip_ns: Option<f64>,
    /// Is taken off the terminal while something is printed.
    pub(super) bar: &'a ProgressBar,
    has_begun: bool,
    rows: usize,
    wrong: u64,
    /// Reasons that were given once.
    told: HashSet<String>,
}

impl<'a> Output<'a> {
    pub(super) fn new(
        args: &'a PerfArgs,
        layout: &'a Layout,
        round_trip_ns: Option<f64>,
        bar: &'a ProgressBar,
    ) -> Self {
        Self { args, layout, round_trip_ns, bar, has_begun: false, rows: 0, wrong: 0, told: HashSet::new() }
    }

    /// Print what stands above the rows, once the ranks have said how they reach the tree; only the first time.
    pub(super) fn begin(&mut self, attached: Option<Attached>) -> io::Result<()> {
        if std::mem::replace(&mut self.has_begun, true) || self.args.json {
            return Ok(());
        }
        self.bar.suspend(|| write_preamble(&mut io::stdout(), self.args, self.layout, self.round_trip_ns, attached))
    }

    /// Print a row of what the ranks, which reach their tree like this, measured of a case.
    pub(super) fn row(&mut self, case: &Case, ranks: &[Measured], attached: Option<Attached>) -> io::Result<()> {
        let row = Row::new(case, ranks, attached);
        (self.wrong, self.rows) = (self.wrong + row.wrong, self.rows + 1);
        self.bar.suspend(|| write_row(self.args, &row))?;
        if let Some(why) = ranks.iter().find_map(|rank| rank.fallback.clone()) {
            self.tell_once(&why, &format!("{} {} took {}", row.collective, row.algo, row.path));
        }
        self.bar.inc(1);
        Ok(())
    }

    /// Say why there is no row of a case.
    pub(super) fn left_out(&mut self, case: &Case, why: &str) {
        self.tell_once(why, &format!("{} {} left out", case.collective, case.algo));
        self.bar.inc(1);
    }

    fn tell_once(&mut self, why: &str, what: &str) {
        if self.told.insert(why.to_owned()) {
            self.tell(&format!("{what}: {why}"));
        }
    }

    /// Say something on stderr.
    pub(super) fn tell(&self, what: &str) {
        self.bar.suspend(|| tell!("# {what}"));
    }

    /// Print what stands below the rows, and return how many elements were wrong.
    ///
    /// # Errors
    /// There is no row.
    pub(super) fn finish(self) -> Result<u64, Failure> {
        if self.rows == 0 {
            return Err(Failure::Run(anyhow!("none of the ways asked for is possible; the reasons stand above")));
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
    attached: Option<Attached>,
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
        if args.check == Check::Ends { " of an operation before and one after" } else { "" }
    )?;
    let turns = if cores < processes { " taking turns" } else { "" };
    let round_trip = round_trip_ns.map_or_else(|| "not measured".into(), |ns| format!("{ns:.0} ns"));
    writeln!(out, "# cores {cores} for {processes} processes{turns}  cache line there and back {round_trip}")?;
    match attached {
        None => writeln!(out, "# attach none, there is no tree")?,
        // Packets are filled from any memory alike.
        Some(attached @ (Attached::ByPackets | Attached::ByVerbs)) => {
            writeln!(out, "# attach {}, {attached}", attached.name())?;
        }
        Some(attached) => {
            let (name, memory) = (attached.name(), args.memory.name());
            writeln!(out, "# attach {name}, {attached}  buffers in {memory} memory")?;
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
    let verdict = if wrong == 0 { "all right" } else { "WRONG RESULTS" };
    writeln!(out, "# {rows} rows, {wrong} wrong elements: {verdict}")
}
