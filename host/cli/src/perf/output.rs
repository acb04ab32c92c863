//! The output of a measurement: rows on stdout as they complete, remarks on stderr.

use super::args::PerfArgs;
use super::csv;
use super::heartbeat::Heartbeat;
use super::row::{Conditions, Measurement, Row};
use super::table::Table;
use crate::exit::Failure;
use crate::job::Case;
use crate::layout::Layout;
use crate::workload::Check;
use anyhow::anyhow;
use indicatif::ProgressBar;
use std::collections::HashSet;
use std::io::{self, IsTerminal, Write};
use sumac::select::TreeTransport;

/// The rows in one of their forms, and the remarks on stderr.
#[derive(Debug)]
pub(super) struct Output<'a> {
    args: &'a PerfArgs,
    conditions: Conditions,
    table: Table,
    round_trip_ns: Option<f64>,
    /// The processes of the cluster.
    processes: usize,
    /// Hidden while something is printed.
    bar: &'a ProgressBar,
    heartbeat: Option<Heartbeat>,
    /// The number of rows that are to be printed, and of those that have begun.
    expected: usize,
    begun: usize,
    has_head: bool,
    rows: usize,
    wrong: u64,
    /// The sum of all bus bandwidths, and their number.
    busbw: (f64, u32),
    /// Reasons that have been printed, each once.
    printed_reasons: HashSet<String>,
}

impl<'a> Output<'a> {
    /// Prepare the output of these cases.
    ///
    /// # Errors
    /// The system could not start the heartbeat's thread.
    pub(super) fn new(
        args: &'a PerfArgs,
        layout: &Layout,
        cases: &[Case],
        round_trip_ns: Option<f64>,
        bar: &'a ProgressBar,
    ) -> io::Result<Self> {
        // On a terminal, rows or the progress bar show that the run lives.
        let beats = !args.is_quiet() && !io::stdout().is_terminal();
        Ok(Self {
            args,
            conditions: Conditions::new(args, layout),
            table: Table::new(cases),
            round_trip_ns,
            processes: layout.devices.len() + layout.hosts.len(),
            bar,
            heartbeat: beats.then(|| Heartbeat::start(bar)).transpose()?,
            expected: cases.len(),
            begun: 0,
            has_head: false,
            rows: 0,
            wrong: 0,
            busbw: (0.0, 0),
            printed_reasons: HashSet::new(),
        })
    }

    /// Print the conditions, a line about the controller, and the table's header; only the first call does.
    pub(super) fn begin(&mut self, controller: &str, transport: Option<TreeTransport>) -> io::Result<()> {
        if std::mem::replace(&mut self.has_head, true) {
            return Ok(());
        }
        if self.args.is_machine_readable() {
            self.remark(controller);
            return Ok(());
        }
        self.bar.suspend(|| {
            let mut out = io::stdout().lock();
            if !self.args.is_quiet() {
                self.write_conditions(&mut out, transport)?;
                writeln!(out, "# {controller}")?;
            }
            self.table.write_head(&mut out)
        })
    }

    /// Return the progress bar.
    pub(super) const fn bar(&self) -> &'a ProgressBar {
        self.bar
    }

    /// Note that the ranks begin with the row of a case.
    pub(super) fn begin_row(&mut self, case: &Case) {
        self.begun += 1;
        let what = format!("{} {} {} B", case.collective, case.algo, case.size_bytes());
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.begin(format!("{what}, row {} of {}", self.begun, self.expected));
        }
        self.bar.set_message(what);
    }

    /// Print the row of a case.
    pub(super) fn row(
        &mut self,
        case: &Case,
        measurements: &[Measurement],
        transport: Option<TreeTransport>,
    ) -> io::Result<()> {
        self.end_row();
        let row = Row::new(case, measurements, transport, &self.conditions);
        let is_first = self.rows == 0;
        (self.wrong, self.rows) = (self.wrong + row.wrong, self.rows + 1);
        for busbw in row.bus_bandwidths() {
            self.busbw = (self.busbw.0 + busbw, self.busbw.1 + 1);
        }
        self.bar.suspend(|| self.write_row(&row, is_first))?;
        let mut ranks = measurements.iter().flat_map(|one| &one.ranks);
        if let Some(why) = ranks.find_map(|rank| rank.fallback.clone()) {
            self.remark_once(&why, &format!("{} {} fell back to {}", row.collective, row.algo, row.path));
        }
        self.bar.inc(1);
        Ok(())
    }

    /// Print why a case has no row.
    pub(super) fn skipped(&mut self, case: &Case, why: &str) {
        self.end_row();
        self.remark_once(why, &format!("{} {} skipped", case.collective, case.algo));
        self.bar.inc(1);
    }

    fn end_row(&self) {
        if let Some(heartbeat) = &self.heartbeat {
            heartbeat.end();
        }
    }

    fn remark_once(&mut self, why: &str, what: &str) {
        if self.printed_reasons.insert(why.to_owned()) {
            self.remark(&format!("{what}: {why}"));
        }
    }

    /// Print a remark on stderr, unless only rows are wanted.
    pub(super) fn remark(&self, what: &str) {
        if !self.args.is_quiet() {
            self.bar.suspend(|| message!("# {what}"));
        }
    }

    /// Print the summary and return the number of wrong elements.
    ///
    /// # Errors
    /// There was no row to print.
    pub(super) fn finish(self) -> Result<u64, Failure> {
        if self.rows == 0 {
            let hint = if self.args.is_quiet() { "run it without --quiet for" } else { "see" };
            return Err(Failure::Run(anyhow!("none of the requested algorithms is possible; {hint} the reasons")));
        }
        if !self.args.is_machine_readable() && !self.args.is_quiet() {
            self.bar.suspend(|| self.write_summary(&mut io::stdout()))?;
        }
        Ok(self.wrong)
    }

    fn write_conditions(&self, out: &mut impl Write, transport: Option<TreeTransport>) -> io::Result<()> {
        let Conditions {
            devices, emulated_devices, levels, iterations, warmup_iterations, order, cores, version, ..
        } = &self.conditions;
        let devices = match self.args.launched {
            Some(_) if *emulated_devices == 0 => devices.to_string(),
            Some(_) => format!("{devices} ({emulated_devices} on hosts of ranks, where they combine first)"),
            None if *emulated_devices == 0 => format!("{devices} (existing)"),
            None if emulated_devices == devices => format!("{devices} (emulated)"),
            None => format!("{devices} ({emulated_devices} emulated)"),
        };
        let checked = match self.args.check {
            Check::Every => "every element",
            Check::Ends => "every element of one operation before and one after",
        };
        writeln!(out, "# sumac {version}  ranks {}  devices {devices}  tree levels {levels}", self.args.world())?;
        writeln!(out, "# iterations {iterations}  warm-up {warmup_iterations}  order {order}  checked: {checked}")?;
        if self.args.launched.is_some() {
            writeln!(out, "# cores {cores} on the host of rank 0")?;
            return self.write_transport(out, transport);
        }
        let oversubscribed = if *cores < self.processes { " (oversubscribed)" } else { "" };
        let round_trip = self.round_trip_ns.map_or_else(|| "not measured".into(), |ns| format!("{ns:.0} ns"));
        let processes = self.processes;
        writeln!(out, "# cores {cores} for {processes} processes{oversubscribed}  cache-line round trip {round_trip}")?;
        let policy = self.args.wait_policy.unwrap_or_default();
        writeln!(
            out,
            "# wait policy {policy}: ranks that wait for each other {}",
            policy.stages(self.args.world() as usize)
        )?;
        self.write_transport(out, transport)
    }

    fn write_transport(&self, out: &mut impl Write, transport: Option<TreeTransport>) -> io::Result<()> {
        let memory = self.conditions.memory;
        match transport {
            None => writeln!(out, "# transport none: no tree"),
            // Packets are filled from any kind of memory.
            Some(transport @ (TreeTransport::Packets | TreeTransport::Verbs)) => {
                writeln!(out, "# transport {}, {transport}", transport.name())
            }
            Some(transport) => {
                writeln!(out, "# transport {}, {transport}  buffers in {memory} memory", transport.name())
            }
        }
    }

    fn write_row(&self, row: &Row, is_first: bool) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.args.json {
            serde_json::to_writer(&mut out, row)?;
            writeln!(out)?;
        } else if self.args.csv {
            if is_first {
                csv::write_head(&mut out, row)?;
            }
            csv::write_row(&mut out, row)?;
        } else {
            self.table.write_row(&mut out, row)?;
        }
        out.flush()
    }

    fn write_summary(&self, out: &mut impl Write) -> io::Result<()> {
        let verdict = if self.wrong == 0 { "OK" } else { "WRONG RESULTS" };
        writeln!(out, "# {} rows, {} wrong elements: {verdict}", self.rows, self.wrong)?;
        let (sum, count) = self.busbw;
        // The line of nccl-tests, in GB/s, over all rows in place and out of place.
        if count > 0 { writeln!(out, "# Avg bus bandwidth    : {:.6}", sum / f64::from(count)) } else { Ok(()) }
    }
}
