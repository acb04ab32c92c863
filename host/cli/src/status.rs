//! `sumac status`: what a controller knows.

use crate::address::ControllerAddress;
use crate::exit::Failure;
use clap::Args;
use std::io::{self, Write};
use sumac::controller::proto::{DeviceStatus, JobStatus, StatusReport};
use sumac::controller::status;
use sumac_hal::ctrl::Bus;

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
                "  {}  groups {}/{groups}  slots {}/{slots}  packets in {} out {}  dropped {dropped}{}{known}",
                device.name,
                stats.groups,
                stats.slots_used,
                counters.packets_in,
                counters.packets_out,
                describe_bus(device.bus.as_ref())
            )
        }
        Err(why) => writeln!(out, "  {}  DOES NOT ANSWER: {why}{known}", device.name),
    }
}

fn describe_bus(bus: Option<&Bus>) -> String {
    match bus {
        Some(bus) => format!("  bus on machine {}, {} bytes for redo slots", bus.machine, bus.redo_memory_bytes),
        None => "  no bus".into(),
    }
}

fn write_job(out: &mut impl Write, job: &JobStatus) -> io::Result<()> {
    let state = if job.running { "running" } else { "waiting for ranks" };
    let tree = match &job.tree {
        None => String::new(),
        Some(Ok(tree)) => format!(
            "  {} on {} levels: {}  {} of {} ranks by reference",
            tree.group,
            tree.levels,
            tree.devices.join(" "),
            tree.by_reference,
            job.world
        ),
        Some(Err(why)) => format!("  no tree: {why}"),
    };
    // Most jobs keep the tree that they begin with.
    let view = if job.view > 0 { format!("  view {}", job.view) } else { String::new() };
    writeln!(out, "  {}  {state}  ranks {}/{}{view}{tree}", job.name, job.joined, job.world)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac::controller::proto::JobTree;
    use sumac_hal::ctrl::Name;
    use sumac_hal::ids::GroupId;

    fn written(job: &JobStatus) -> String {
        let mut text = Vec::new();
        write_job(&mut text, job).expect("memory");
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn a_job_says_how_many_ranks_are_by_reference() {
        let tree = JobTree { group: GroupId(7), levels: 1, devices: vec!["leaf0".into()], by_reference: 3 };
        let job = JobStatus { name: "j".into(), joined: 4, world: 4, running: true, view: 0, tree: Some(Ok(tree)) };
        let text = written(&job);
        assert!(text.ends_with("ranks 4/4  group 7 on 1 levels: leaf0  3 of 4 ranks by reference\n"), "{text}");
        let text = written(&JobStatus { view: 2, ..job });
        assert!(text.contains("ranks 4/4  view 2  group 7"), "{text}");
    }

    #[test]
    fn a_bus_says_where_it_is() {
        let name = |text| Name::try_from(text).expect("short");
        let bus = Bus { machine: name("m"), socket: name("s"), redo_memory_bytes: 4096 };
        assert_eq!(describe_bus(Some(&bus)), "  bus on machine m, 4096 bytes for redo slots");
        assert_eq!(describe_bus(None), "  no bus");
    }
}
