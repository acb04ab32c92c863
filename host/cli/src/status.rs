//! `sumac status`: a controller's fabric, devices, tenants and jobs.

use crate::address::ControllerAddress;
use crate::exit::Failure;
use clap::Args;
use std::fmt;
use std::io::{self, Write};
use sumac::controller::proto::{DeviceStatus, JobStatus, StatusReport, TenantStatus};
use sumac::controller::status;
use sumac_hal::ctrl::{AttachPoint, StackUsage};

/// `sumac status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    controller: ControllerAddress,
    /// Print the whole report as JSON
    #[arg(long)]
    json: bool,
}

/// Query the controller and print its report.
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

/// Untrusted text: control characters that a terminal would interpret are escaped.
struct Escaped<'t>(&'t str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            // Characters that change the writing direction, too.
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
        None => writeln!(out, "fabric   none: every device counts as a switch to which all hosts are connected")?,
    }
    writeln!(out, "devices  {}", report.devices.len())?;
    report.devices.iter().try_for_each(|device| write_device(out, device))?;
    writeln!(out, "tenants  {}", report.tenants.len())?;
    report.tenants.iter().try_for_each(|tenant| write_tenant(out, tenant))?;
    writeln!(out, "jobs     {}", report.jobs.len() as u64 + u64::from(report.jobs_left_out))?;
    report.jobs.iter().try_for_each(|job| write_job(out, job))?;
    match report.jobs_left_out {
        0 => Ok(()),
        more => writeln!(out, "  and {more} more that do not fit into the report"),
    }
}

fn write_tenant(out: &mut impl Write, tenant: &TenantStatus) -> io::Result<()> {
    let of = |held: u64, limit: Option<u64>| match limit {
        Some(limit) => format!("{held}/{limit}"),
        None => held.to_string(),
    };
    let TenantStatus { name, groups, slots, memory_bytes, quota } = tenant;
    let name = Escaped(name);
    writeln!(
        out,
        "  {name}  groups {}  slots (max per device) {}  memory bytes (max per device) {}",
        of(*groups, quota.groups),
        of(*slots, quota.slots),
        of(*memory_bytes, quota.memory_bytes)
    )
}

fn write_device(out: &mut impl Write, device: &DeviceStatus) -> io::Result<()> {
    let known = if device.in_fabric { "" } else { "  NOT IN THE FABRIC: no switch has this name" };
    match &device.stats {
        Ok(stats) => {
            let (groups, slots) = (device.capabilities.groups, device.capabilities.slots);
            let slots = u64::from(slots) * device.data_addrs.len() as u64;
            let counters = &stats.counters;
            let dropped: u64 = counters.dropped.iter().sum();
            writeln!(
                out,
                "  {}  groups {}/{groups}  slots {}/{slots}  packets in {} out {}  dropped {dropped}{}{}{known}",
                Escaped(&device.name),
                stats.groups,
                stats.slots_used,
                counters.packets_in,
                counters.packets_out,
                stats.stack.map(describe_stack).unwrap_or_default(),
                describe_attach_point(device.attach.as_ref())
            )
        }
        Err(why) => writeln!(out, "  {}  NO REPLY: {}{known}", Escaped(&device.name), Escaped(why)),
    }
}

fn describe_stack(StackUsage { used_bytes, size_bytes }: StackUsage) -> String {
    format!("  stack used {used_bytes} of {size_bytes} bytes")
}

fn describe_attach_point(bus: Option<&AttachPoint>) -> String {
    match bus {
        Some(bus) => {
            format!("  zero-copy on machine {}, {} bytes for redo slots", Escaped(&bus.machine), bus.redo_memory_bytes)
        }
        None => "  no zero-copy".into(),
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
            "  {}, {} levels: {}  {} of {} ranks zero-copy",
            tree.group,
            tree.levels,
            Escaped(&tree.devices.join(" ")),
            tree.zero_copy_ranks,
            job.world
        ),
        Some(Err(why)) => format!("  no tree: {}", Escaped(why)),
    };
    // The view is 0 unless the job has changed its tree.
    let view = if job.view > 0 { format!("  view {}", job.view) } else { String::new() };
    let queue = match (job.queue, job.is_offered) {
        (Some(place), _) => format!("  {place}"),
        (None, true) => "  migrating to a tree".to_owned(),
        (None, false) => String::new(),
    };
    let (name, tenant, joined, world) = (Escaped(&job.name), Escaped(&job.tenant), job.joined, job.world);
    writeln!(out, "  {name}  {state}  tenant {tenant}  ranks {joined}/{world}{view}{tree}{queue}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use sumac::controller::Quota;
    use sumac::controller::proto::{JobTree, QueuePosition};
    use sumac_hal::ctrl::Name;
    use sumac_hal::ids::GroupId;

    fn written(job: &JobStatus) -> String {
        let mut text = Vec::new();
        write_job(&mut text, job).expect("memory");
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn job_line_shows_zero_copy_ranks_and_view() {
        let tree = JobTree { group: GroupId(7), levels: 1, devices: vec!["leaf0".into()], zero_copy_ranks: 3 };
        let job = JobStatus { tree: Some(Ok(tree)), ..job() };
        let text = written(&job);
        assert!(text.ends_with("ranks 4/4  group 7, 1 levels: leaf0  3 of 4 ranks zero-copy\n"), "{text}");
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
    fn job_line_without_a_tree_shows_reason_and_queue_position() {
        let place = QueuePosition { position: 2, of: 3 };
        let queued = JobStatus { tree: Some(Err("no slots".into())), queue: Some(place), ..job() };
        let text = written(&queued);
        assert!(
            text.contains("tenant t  ranks 4/4  no tree: no slots  position 2 of 3 in the queue for a tree"),
            "{text}"
        );
        let offered = written(&JobStatus { queue: None, is_offered: true, ..queued });
        assert!(offered.ends_with("no tree: no slots  migrating to a tree\n"), "{offered}");
        let joining = JobStatus { running: false, queue: Some(place), ..job() };
        assert!(written(&joining).contains("j  waiting for a tree  "));
        assert!(written(&JobStatus { joined: 3, ..joining }).contains("j  waiting for ranks  "));
    }

    #[test]
    fn control_characters_of_untrusted_text_are_escaped() {
        let evil = "a\u{1b}[2Jb\r\n\u{9b}c\u{202e}";
        let tree = JobTree { group: GroupId(7), levels: 1, devices: vec![evil.into()], zero_copy_ranks: 0 };
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
    fn tenant_line_shows_usage_and_quota() {
        let quota = Quota { groups: Some(2), slots: None, memory_bytes: Some(4096) };
        let tenant = TenantStatus { name: "t".into(), groups: 1, slots: 64, memory_bytes: 1024, quota };
        let mut text = Vec::new();
        write_tenant(&mut text, &tenant).expect("memory");
        let text = String::from_utf8(text).expect("text");
        assert_eq!(text, "  t  groups 1/2  slots (max per device) 64  memory bytes (max per device) 1024/4096\n");
    }

    #[test]
    fn device_line_shows_zero_copy_machine_and_redo_memory() {
        let name = |text| Name::try_from(text).expect("short");
        let user = sumac_hal::ctrl::DeviceUser::ROOT;
        let bus = AttachPoint { machine: name("m"), socket: name("s"), user, redo_memory_bytes: 4096, remote: None };
        assert_eq!(describe_attach_point(Some(&bus)), "  zero-copy on machine m, 4096 bytes for redo slots");
        assert_eq!(describe_attach_point(None), "  no zero-copy");
    }
}
