//! Calibration on clusters of emulated devices on this machine.

use super::{CalibrateArgs, Cell, MeasuredJob, cell};
use crate::cluster::{self, ClusterConfig, Limit, Parts, Supervisor};
use crate::exit::{Failure, is_quiet};
use crate::job::{RankJob, Report, Turns, Work};
use crate::layout::Layout;
use crate::options::{MemoryKind, Transport, WaitPolicy};
use crate::perf::{Reports, spawn_rank};
use anyhow::anyhow;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// How long the ranks may take to join and to leave.
const JOIN_LIMIT: Duration = Duration::from_secs(60);

/// Measure on each cluster that the options ask for.
pub(super) fn measure(args: &CalibrateArgs, groups: &[Turns], verbose: u8) -> Result<Vec<MeasuredJob>, Failure> {
    let (mut ranks, mut transports) = (args.ranks.clone(), args.transports.clone());
    if ranks.is_empty() {
        ranks = vec![2, 4, 8];
    }
    if transports.is_empty() {
        transports = vec![Transport::Udp, Transport::Shm];
    }
    let mut clusters = Vec::new();
    for &ranks in &ranks {
        for &levels in &args.levels {
            clusters.extend(transports.iter().map(|&transport| (ranks, levels, transport)));
        }
    }
    let bar = progress_bar((clusters.len() * groups.len()) as u64);
    let mut jobs = Vec::new();
    for cluster in clusters {
        jobs.push(measure_cluster(args, cluster, groups, Supervisor::new(bar.clone(), verbose)?, &bar)?);
    }
    bar.finish_and_clear();
    Ok(jobs)
}

/// Start a cluster and measure on it.
fn measure_cluster(
    args: &CalibrateArgs,
    (ranks, levels, transport): (u32, u8, Transport),
    groups: &[Turns],
    mut supervisor: Supervisor,
    bar: &ProgressBar,
) -> Result<MeasuredJob, Failure> {
    bar.set_message(format!("{ranks} ranks, {levels} levels, {transport}"));
    let layout = Layout::generated(levels, ranks).map_err(Failure::Input)?;
    let config =
        ClusterConfig { costs: args.check.as_deref(), parts: Parts::new(&layout), ..ClusterConfig::new(&layout)? };
    let controller = cluster::start(&mut supervisor, &config)?.addr;
    let mut children = Vec::new();
    for (rank, (host, &leaf)) in (0_u32..).zip(layout.hosts.iter().zip(&layout.leaves)) {
        let job = RankJob {
            controller,
            job: "calibrate".into(),
            key: config.keys.as_ref().map(|keys| keys.rank().clone()),
            rank,
            world: ranks,
            host: host.clone(),
            order: None,
            transport,
            verbs: None,
            trees: 1,
            shape: None,
            hybrid: false,
            rab: false,
            memory: MemoryKind::Registered,
            wait_policy: WaitPolicy::default(),
            deadline_ms: args.timeout_s.saturating_mul(1000),
            work: Work::InTurns { groups: groups.to_vec() },
        };
        children.push(config.parts.within(leaf, || spawn_rank(&mut supervisor, &job))?);
    }
    let mut reports = Reports::new(children.clone());
    reports.next_of_each(&mut supervisor, Limit::new(JOIN_LIMIT), "join")?;
    let joined = reports.next_of_each(&mut supervisor, Limit::new(JOIN_LIMIT), "describe the job")?.into_iter().next();
    let Some(Report::Facts(facts)) = joined else {
        return Err(Failure::Run(anyhow!("unexpected report of a rank that has joined: {joined:?}")));
    };
    let mut cells: Vec<Vec<Cell>> = Vec::new();
    for group in groups {
        let mut row = Vec::new();
        for &case in &group.cases {
            // A rank gives up at the first operation that misses its deadline.
            let limit = Duration::from_secs(args.timeout_s.saturating_mul(1000));
            let of_ranks = reports.next_of_each(&mut supervisor, Limit::new(limit), "report a measurement")?;
            row.extend(cell(case, &facts, of_ranks)?);
        }
        cells.push(row);
        bar.inc(1);
    }
    supervisor.wait_ended(&children, Limit::new(JOIN_LIMIT))?;
    Ok(MeasuredJob { facts, cells })
}

fn progress_bar(groups: u64) -> ProgressBar {
    let target = if is_quiet() { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(groups), target);
    // The template is a constant. If it is rejected, the default style does.
    if let Ok(style) = ProgressStyle::with_template("[{bar:24}] {pos}/{len} {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
