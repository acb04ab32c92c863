//! `sumac status`: what a controller knows.

use crate::address::ControllerAddress;
use crate::exit::Failure;
use clap::Args;
use std::io::{self, Write};
use sumac::controller::proto::{DeviceStatus, JobStatus, StatusReport};
use sumac::controller::status;

/// `sumac status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    controller: ControllerAddress,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
}

/// Ask and print.
pub(crate) fn run(args: &StatusArgs) -> Result<(), Failure> {
    let report = status(args.controller.or_default()?).map_err(Failure::run)?;
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        write_report(&mut out, &report)?;
    }
    Ok(out.flush()?)
}

fn write_report(out: &mut impl Write, report: &StatusReport) -> io::Result<()> {
    match &report.fabric {
        Some(fabric) => writeln!(
            out,
            "fabric   {} switches, {} hosts, {} aggregation nodes",
            fabric.switches, fabric.hosts, fabric.aggregation_nodes
        )?,
        None => writeln!(out, "fabric   none: every device is a switch that all hosts hang on")?,
    }
    writeln!(out, "devices  {}", report.devices.len())?;
    report.devices.iter().try_for_each(|device| write_device(out, device))?;
    writeln!(out, "jobs     {}", report.jobs.len())?;
    report.jobs.iter().try_for_each(|job| write_job(out, job))
}

fn write_device(out: &mut impl Write, device: &DeviceStatus) -> io::Result<()> {
    let known = if device.in_fabric { "" } else { "  NOT IN THE FABRIC: its name is no switch's" };
    match &device.stats {
        Ok(stats) => {
            let (groups, slots) = (device.capabilities.groups, device.capabilities.slots);
            let slots = u64::from(slots) * device.data_addrs.len() as u64;
            let counters = &stats.counters;
            let dropped: u64 = counters.dropped.iter().sum();
            writeln!(
                out,
                "  {}  groups {}/{groups}  slots {}/{slots}  packets in {} out {}  dropped {dropped}{known}",
                device.name, stats.groups, stats.slots_used, counters.packets_in, counters.packets_out
            )
        }
        Err(why) => writeln!(out, "  {}  DOES NOT ANSWER: {why}{known}", device.name),
    }
}

fn write_job(out: &mut impl Write, job: &JobStatus) -> io::Result<()> {
    let state = if job.running { "running" } else { "waiting for ranks" };
    let tree = match &job.tree {
        None => String::new(),
        Some(Ok(tree)) => format!("  {} on {} levels: {}", tree.group, tree.levels, tree.devices.join(" ")),
        Some(Err(why)) => format!("  no tree: {why}"),
    };
    writeln!(out, "  {}  {state}  ranks {}/{}{tree}", job.name, job.joined, job.world)
}
