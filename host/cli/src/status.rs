//! `sumac status`: what a controller knows.

use crate::address::ControllerAddress;
use crate::exit::Failure;
use clap::Args;
use std::fmt;
use std::io::{self, Write};
use sumac::controller::proto::{DeviceStatus, JobStatus, StatusReport, TenantStatus};
use sumac::controller::status;
use sumac_hal::ctrl::{Bus, StackUse};

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

/// Text of somebody else, with what a terminal would act on escaped.
struct Plain<'t>(&'t str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            // What turns the direction of writing, too.
            c if c.is_control()
                || matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}') =>
            {
                write!(f, "{}", c.escape_unicode())
            }
            c => write!(f, "{c}"),
        })
    }
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
    writeln!(out, "tenants  {}", report.tenants.len())?;
    report.tenants.iter().try_for_each(|tenant| write_tenant(out, tenant))?;
    writeln!(out, "jobs     {}", report.jobs.len() as u64 + u64::from(report.jobs_left_out))?;
    report.jobs.iter().try_for_each(|job| write_job(out, job))?;
    match report.jobs_left_out {
        0 => Ok(()),
        more => writeln!(out, "  and {more} more, for which the report has no room"),
    }
}

fn write_tenant(out: &mut impl Write, tenant: &TenantStatus) -> io::Result<()> {
    let of = |held: u64, limit: Option<u64>| match limit {
        Some(limit) => format!("{held}/{limit}"),
        None => held.to_string(),
    };
    let TenantStatus { name, groups, slots, memory_bytes, quota } = tenant;
    let name = Plain(name);
    writeln!(
        out,
        "  {name}  groups {}  most slots of a device {}  most bytes of one {}",
        of(*groups, quota.groups),
        of(*slots, quota.slots),
        of(*memory_bytes, quota.memory_bytes)
    )
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
                "  {}  groups {}/{groups}  slots {}/{slots}  packets in {} out {}  dropped {dropped}{}{}{known}",
                Plain(&device.name),
                stats.groups,
                stats.slots_used,
                counters.packets_in,
                counters.packets_out,
                stats.stack.map(describe_stack).unwrap_or_default(),
                describe_bus(device.bus.as_ref())
            )
        }
        Err(why) => writeln!(out, "  {}  DOES NOT ANSWER: {}{known}", Plain(&device.name), Plain(why)),
    }
}

fn describe_stack(StackUse { used_bytes, of_bytes }: StackUse) -> String {
    format!("  stack used {used_bytes} of {of_bytes} bytes")
}

fn describe_bus(bus: Option<&Bus>) -> String {
    match bus {
        Some(bus) => {
            format!("  bus on machine {}, {} bytes for redo slots", Plain(&bus.machine), bus.redo_memory_bytes)
        }
        None => "  no bus".into(),
    }
}

fn write_job(out: &mut impl Write, job: &JobStatus) -> io::Result<()> {
    let state = match (job.running, job.joined < job.world) {
        (true, _) => "running",
        (false, true) => "waiting for ranks",
        (false, false) => "waiting for a tree",
    };
    let tree = match &job.tree {
        None => String::new(),
        Some(Ok(tree)) => format!(
            "  {} on {} levels: {}  {} of {} ranks by reference",
            tree.group,
            tree.levels,
            Plain(&tree.devices.join(" ")),
            tree.by_reference,
            job.world
        ),
        Some(Err(why)) => format!("  no tree: {}", Plain(why)),
    };
    // Most jobs keep the tree that they begin with.
    let view = if job.view > 0 { format!("  view {}", job.view) } else { String::new() };
    let queue = match (job.queue, job.is_offered) {
        (Some(place), _) => format!("  {place}"),
        (None, true) => "  a tree is offered".to_owned(),
        (None, false) => String::new(),
    };
    let (name, tenant, joined, world) = (Plain(&job.name), Plain(&job.tenant), job.joined, job.world);
    writeln!(out, "  {name}  {state}  tenant {tenant}  ranks {joined}/{world}{view}{tree}{queue}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac::controller::Quota;
    use sumac::controller::proto::{JobTree, QueuePlace};
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
        let job = JobStatus { tree: Some(Ok(tree)), ..job() };
        let text = written(&job);
        assert!(text.ends_with("ranks 4/4  group 7 on 1 levels: leaf0  3 of 4 ranks by reference\n"), "{text}");
        let text = written(&JobStatus { view: 2, ..job });
        assert!(text.contains("ranks 4/4  view 2  group 7"), "{text}");
    }

    fn job() -> JobStatus {
        JobStatus {
            name: "j".into(),
            tenant: "t".into(),
            joined: 4,
            world: 4,
            running: true,
            view: 0,
            tree: None,
            queue: None,
            is_offered: false,
        }
    }

    #[test]
    fn a_job_without_a_tree_says_why_and_where_it_stands() {
        let place = QueuePlace { position: 2, of: 3 };
        let waits = JobStatus { tree: Some(Err("no slots".into())), queue: Some(place), ..job() };
        let text = written(&waits);
        assert!(
            text.contains("tenant t  ranks 4/4  no tree: no slots  number 2 of 3 in the queue for a tree"),
            "{text}"
        );
        let offered = written(&JobStatus { queue: None, is_offered: true, ..waits });
        assert!(offered.ends_with("no tree: no slots  a tree is offered\n"), "{offered}");
        let joining = JobStatus { running: false, queue: Some(place), ..job() };
        assert!(written(&joining).contains("j  waiting for a tree  "));
        assert!(written(&JobStatus { joined: 3, ..joining }).contains("j  waiting for ranks  "));
    }

    #[test]
    fn text_of_others_is_escaped_before_it_reaches_the_terminal() {
        let evil = "a\u{1b}[2Jb\r\n\u{9b}c\u{202e}";
        let tree = JobTree { group: GroupId(7), levels: 1, devices: vec![evil.into()], by_reference: 0 };
        let name = evil.to_owned();
        let job = JobStatus { name: name.clone(), tenant: name.clone(), tree: Some(Ok(tree)), ..job() };
        let without = JobStatus { tree: Some(Err(name.clone())), ..job.clone() };
        let mut text = written(&job) + &written(&without);
        let mut tenant = Vec::new();
        let quota = Quota::default();
        write_tenant(&mut tenant, &TenantStatus { name, groups: 0, slots: 0, memory_bytes: 0, quota }).expect("memory");
        text += &String::from_utf8(tenant).expect("text");
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'), "{text:?}");
        assert!(text.contains("a\\u{1b}[2Jb"), "{text}");
    }

    #[test]
    fn a_tenant_says_what_it_holds_of_what_it_may() {
        let quota = Quota { groups: Some(2), slots: None, memory_bytes: Some(4096) };
        let tenant = TenantStatus { name: "t".into(), groups: 1, slots: 64, memory_bytes: 1024, quota };
        let mut text = Vec::new();
        write_tenant(&mut text, &tenant).expect("memory");
        let text = String::from_utf8(text).expect("text");
        assert_eq!(text, "  t  groups 1/2  most slots of a device 64  most bytes of one 1024/4096\n");
    }

    #[test]
    fn a_bus_says_where_it_is() {
        let name = |text| Name::try_from(text).expect("short");
        let user = sumac_hal::ctrl::BusUser::ROOT;
        let bus = Bus { machine: name("m"), socket: name("s"), user, redo_memory_bytes: 4096, remote: None };
        assert_eq!(describe_bus(Some(&bus)), "  bus on machine m, 4096 bytes for redo slots");
        assert_eq!(describe_bus(None), "  no bus");
    }
}
