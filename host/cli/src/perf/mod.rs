//! `sumac perf`: collectives by every algorithm on a cluster of processes on this machine, timed and checked.
//!
//! Where a launcher has started the command as a rank, it is one of its ranks ([`launched`]). Otherwise, the ranks are
//! processes that measure ([`crate::bench`]). This module starts the cluster, combines the ranks' figures and prints
//! each row as it completes. All algorithms run in one communicator, so two rows differ in nothing but the path.

mod args;
mod capture;
mod cases;
mod csv;
mod fault;
mod heartbeat;
mod help;
mod launched;
mod names;
mod output;
mod relay;
mod row;
mod ssh;
mod table;

pub(crate) use args::PerfArgs;
pub(crate) use help::HELP;
pub(crate) use names::{Choice, algorithm_parser, collective_parser};

use crate::cluster::{
    self, ChildId, ClusterConfig, ClusterError, ClusterKeys, Limit, Parts, Preference, Supervisor, describe_controller,
};
use crate::exit::Failure;
use crate::job::{Case, Measured, RankJob, Report, Work};
use crate::layout::Layout;
use crate::machine;
use anyhow::anyhow;
use capture::Capture;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use output::Output;
use relay::Link;
use row::Measurement;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use sumac::Algo;
use sumac::comm::launcher;
use sumac::select::TreeTransport;

/// How long the ranks may take to join and to leave.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// Run the measurement.
pub(crate) fn run(mut args: PerfArgs, verbose: u8) -> Result<(), Failure> {
    if !args.ssh.is_empty() {
        return ssh::run(&args, &args.ssh, verbose);
    }
    if args.ranks.is_none() {
        let reading = launcher::from_env();
        args.launched = launched::world(&reading)?;
        if args.launched.is_some() {
            return launched::run(&args, &reading);
        }
    }
    if args.controller.is_some() {
        return Err(Failure::Input(anyhow!(
            "--controller is for ranks that a launcher starts, as in `mpirun -np 4 sumac perf --controller HOST:PORT`; \
             without it, perf starts a controller of its own"
        )));
    }
    supervise(&args, verbose)
}

/// Start a cluster and measure on it.
fn supervise(args: &PerfArgs, verbose: u8) -> Result<(), Failure> {
    let cases = args.cases().map_err(Failure::Input)?;
    // The controller reads them again; an invalid file is to be rejected before anything starts.
    crate::costs::with_overrides(args.costs.as_deref(), args.overrides.as_deref()).map_err(Failure::Input)?;
    let layout = match &args.topology {
        Some(path) => Layout::from_file(path, args.world()),
        None => Layout::generated(args.levels, args.world()),
    }
    .map_err(Failure::Input)?;
    let bar = progress_bar(cases.len(), args.is_quiet());
    let outcome = Supervisor::new(bar.clone(), verbose)
        .map_err(Failure::from)
        .and_then(|supervisor| measure(args, &cases, &layout, supervisor, &bar));
    bar.finish_and_clear();
    match outcome? {
        0 => Ok(()),
        _ => Err(Failure::Reported),
    }
}

/// Measure and print all cases, and return how many elements were wrong.
fn measure(
    args: &PerfArgs,
    cases: &[Case],
    layout: &Layout,
    mut supervisor: Supervisor,
    bar: &ProgressBar,
) -> Result<u64, Failure> {
    // Measured before other processes start and disturb it.
    let is_printed = !args.is_machine_readable() && !args.is_quiet() && !args.explain;
    let round_trip_ns = is_printed.then(machine::cache_line_round_trip_ns).flatten();
    bar.set_message("starting the controller and the devices");
    let preference = args.overrides.as_deref().map_or(Preference::Cost, Preference::File);
    let given = cluster::places(&layout.devices, &args.devices).map_err(|why| Failure::Input(anyhow!(why)))?;
    let listen = (!given.is_empty()).then_some(args.listen);
    let links = relay::start(args, layout)?;
    let capture = Capture::prepare(args, layout)?;
    let device_options = links
        .iter()
        .map(|link| (link.device, link.device_options()))
        .chain(args.verbs.of_devices(args.transport, layout.devices.len()))
        .chain(capture.iter().flat_map(Capture::device_options))
        .collect();
    let keys = keys(args, layout, &given)?.map(Arc::new);
    let costs = args.costs.as_deref();
    let config = ClusterConfig { preference, costs, device_options, listen, given, keys, ..config(args, layout) };
    let mut output = Output::new(args, layout, cases, round_trip_ns, bar)?;
    if let Some(fault) = args.fault {
        fault::measure(args, (fault, &links), cases, config, supervisor, &mut output)?;
        print_link_counters(args, layout, &links, &output);
        return output.finish();
    }
    let started = cluster::start(&mut supervisor, &config)?;
    bar.set_message("waiting for the ranks to join");
    let job = JobOf { name: "perf".into(), controller: started.addr, cases: cases.to_vec(), announced: None };
    let ranks = start_ranks(&mut supervisor, args, &config, job)?;
    let watch = describe_controller(started.addr, config.keys.as_deref());
    let measured = measure_rows(args, (cases, &ranks), &watch, &mut supervisor, &mut output);
    if let Some(capture) = capture {
        // A capture of a failed run tells most.
        ranks.iter().for_each(|&rank| supervisor.may_fail(rank));
        let captured = capture.finish(&mut supervisor, &started.devices);
        measured.and(captured)?;
    } else {
        measured?;
    }
    if args.explain {
        return Ok(0);
    }
    print_link_counters(args, layout, &links, &output);
    output.finish()
}

/// Return the keys of the cluster: none if there are existing devices, and none of theirs are known.
fn keys(args: &PerfArgs, layout: &Layout, given: &[(usize, SocketAddr)]) -> Result<Option<ClusterKeys>, Failure> {
    let Some(store) = &args.keys else {
        return Ok(given.is_empty().then(|| ClusterKeys::new(layout)).transpose()?);
    };
    if args.listen.ip().is_unspecified() {
        let listen = args.listen;
        return Err(Failure::Input(anyhow!("--listen {listen}: name the address of this host that the devices reach")));
    }
    let given: Vec<_> = given.iter().map(|(index, _)| *index).collect();
    ClusterKeys::with_store(layout, store, &given).map(Some)
}

/// Measure all cases on ranks that have been started, or explain them, and wait until the ranks have ended.
fn measure_rows(
    args: &PerfArgs,
    (cases, ranks): (&[Case], &[ChildId]),
    controller: &str,
    supervisor: &mut Supervisor,
    output: &mut Output<'_>,
) -> Result<(), Failure> {
    let mut reports = Reports::new(ranks.to_vec());
    let transport = joined(&mut reports, supervisor)?;
    if args.explain {
        print_explanations(args, cases, &mut reports, supervisor, output.bar())?;
        return Ok(supervisor.wait_ended(ranks, Limit::new(JOIN_LIMIT))?);
    }
    output.begin(controller, transport)?;
    for case in cases {
        output.begin_row(case);
        let (mut measurements, mut refused) = (Vec::new(), None);
        for &placement in args.placements().of(case.collective) {
            let limit = Limit::new(case_limit(args));
            match measured(reports.next_of_each(supervisor, limit, "report a measurement")?)? {
                Ok(ranks) => measurements.push(Measurement { placement, ranks }),
                Err(why) => refused = Some(why),
            }
        }
        match refused {
            Some(why) => output.skipped(case, &why),
            None => output.row(case, &measurements, transport)?,
        }
    }
    Ok(supervisor.wait_ended(ranks, Limit::new(JOIN_LIMIT))?)
}

/// Print the packet counters of `--chaos`.
fn print_link_counters(args: &PerfArgs, layout: &Layout, links: &[Link], output: &Output<'_>) {
    if args.chaos.is_some() {
        links.iter().for_each(|link| link.print_counters(&layout.devices[link.device], output));
    }
}

/// Return the configuration of the requested cluster.
fn config<'a>(args: &PerfArgs, layout: &'a Layout) -> ClusterConfig<'a> {
    let parts = if args.no_bind { Parts::anywhere() } else { Parts::new(layout) };
    ClusterConfig { shards: args.shards, parts, ..ClusterConfig::without_keys(layout) }
}

/// Wait until all ranks have joined, and return the transport to the tree, if there is one.
fn joined(reports: &mut Reports, supervisor: &mut Supervisor) -> Result<Option<TreeTransport>, Failure> {
    let mut common = None;
    for report in reports.next_of_each(supervisor, Limit::new(JOIN_LIMIT), "join")? {
        let Report::Joined { transport } = report else {
            return Err(Failure::Run(anyhow!("unexpected report of a rank that has not joined: {report:?}")));
        };
        common = transport;
    }
    Ok(common)
}

/// Print the explanation of each case, which must be the same on all ranks.
fn print_explanations(
    args: &PerfArgs,
    cases: &[Case],
    reports: &mut Reports,
    supervisor: &mut Supervisor,
    bar: &ProgressBar,
) -> Result<(), Failure> {
    for case in cases {
        let ranks = reports.next_of_each(supervisor, Limit::new(JOIN_LIMIT), "explain")?;
        let [Report::Explained(first), others @ ..] = &ranks[..] else {
            return Err(Failure::Run(anyhow!(
                "unexpected report of a rank instead of an explanation: {:?}",
                ranks.first()
            )));
        };
        if let Some(other) = others.iter().find(|other| *other != &ranks[0]) {
            return Err(Failure::Run(anyhow!("ranks disagree on the selection: {first:?} and {other:?}")));
        }
        bar.suspend(|| first.write(&mut io::stdout().lock(), args.json))?;
        bar.set_message(case.collective.name());
        bar.inc(1);
    }
    Ok(())
}

/// A job for the ranks.
struct JobOf {
    name: String,
    controller: SocketAddr,
    cases: Vec<Case>,
    /// The iteration of each case whose start the ranks report.
    announced: Option<u32>,
}

fn start_ranks(
    supervisor: &mut Supervisor,
    args: &PerfArgs,
    config: &ClusterConfig<'_>,
    JobOf { name, controller, cases, announced }: JobOf,
) -> Result<Vec<ChildId>, Failure> {
    let (warmup, iterations) = (args.warmup, args.iterations);
    let work = match args.explain {
        true => Work::Explain { cases },
        false => Work::Perf { cases, warmup, iterations, check: args.check, placements: args.placements(), announced },
    };
    (0_u32..)
        .zip(config.layout.hosts.iter().zip(&config.layout.leaves))
        .map(|(rank, (host, &leaf))| {
            let job = RankJob {
                controller,
                job: name.clone(),
                key: config.keys.as_ref().map(|keys| keys.rank().clone()),
                rank,
                world: args.world(),
                host: host.clone(),
                order: args.order.map(Into::into),
                transport: args.transport(),
                verbs: args.verbs.in_turn(rank as usize),
                trees: args.trees.unwrap_or(0),
                shape: args.shape,
                hybrid: args.joins_for(Algo::Hybrid),
                rab: args.joins_for(Algo::Rab),
                memory: args.memory(),
                wait_policy: args.wait_policy.unwrap_or_default(),
                deadline_ms: args.timeout_s.saturating_mul(1000),
                work: work.clone(),
            };
            config.parts.within(leaf, || spawn_rank(supervisor, &job))
        })
        .collect()
}

/// Start a rank and send it its job.
pub(crate) fn spawn_rank(supervisor: &mut Supervisor, job: &RankJob) -> Result<ChildId, Failure> {
    let mut line = serde_json::to_vec(job).map_err(Failure::run)?;
    line.push(b'\n');
    let rank = supervisor.spawn_with_stdin(&format!("rank {}", job.rank), &["rank".to_owned()])?;
    supervisor.write(rank, line);
    Ok(rank)
}

/// Reports of several ranks, queued per rank because ranks report independently of each other.
#[derive(Debug)]
pub(crate) struct Reports {
    ranks: Vec<ChildId>,
    waiting: Vec<VecDeque<Report>>,
}

impl Reports {
    /// Collect the reports of these children.
    pub(crate) fn new(ranks: Vec<ChildId>) -> Self {
        let waiting = vec![VecDeque::new(); ranks.len()];
        Self { ranks, waiting }
    }

    /// Wait until every rank has reported, and return one report of each, in order of rank.
    ///
    /// # Errors
    /// Those of [`Supervisor::next_line`], and a line that is not a report.
    pub(crate) fn next_of_each(
        &mut self,
        supervisor: &mut Supervisor,
        limit: Limit,
        what: &'static str,
    ) -> Result<Vec<Report>, ClusterError> {
        while let Some(missing) = self.waiting.iter().position(VecDeque::is_empty) {
            let (id, line) = supervisor.next_line(limit, self.ranks[missing], what)?;
            self.take(supervisor, id, line)?;
        }
        Ok(self.waiting.iter_mut().filter_map(VecDeque::pop_front).collect())
    }

    /// Queue a line as a report.
    ///
    /// # Errors
    /// The line is not a report, or not of one of these children.
    fn take(&mut self, supervisor: &mut Supervisor, id: ChildId, line: String) -> Result<(), ClusterError> {
        let rank = self.ranks.iter().position(|&rank| rank == id);
        let (Some(rank), Ok(report)) = (rank, serde_json::from_str(&line)) else {
            let name = supervisor.name(id).to_owned();
            return Err(ClusterError::Unexpected { name, line, expected: "a report" });
        };
        // A missing report is noticed when it is waited for. After the last one, the child may end at any time.
        supervisor.may_end(id);
        self.waiting[rank].push_back(report);
        Ok(())
    }
}

/// Return the measurements, or why the algorithm is not possible.
fn measured(reports: Vec<Report>) -> Result<Result<Vec<Measured>, String>, Failure> {
    let measured = |report| match report {
        Report::Measured(measured) => Ok(Ok(measured)),
        Report::NotPossible { why } => Ok(Err(why)),
        other => Err(Failure::Run(anyhow!("unexpected report of a rank instead of a measurement: {other:?}"))),
    };
    reports.into_iter().map(measured).collect()
}

/// Return how long a case may take.
///
/// A rank gives up at the first operation that misses its deadline, so this limit only catches a rank that hangs
/// outside operations.
fn case_limit(args: &PerfArgs) -> Duration {
    let operations = u64::from(args.warmup) + u64::from(args.iterations);
    Duration::from_secs(args.timeout_s.saturating_mul(operations.clamp(4, 1000)))
}

/// Return a progress bar on stderr, hidden if stderr is not a terminal or only rows are wanted.
fn progress_bar(rows: usize, quiet: bool) -> ProgressBar {
    let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(rows as u64), target);
    // The template is a constant. If it is rejected, the default style does.
    if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {pos}/{len} {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
