//! The report as text.

use super::json::path;
use super::rates::{DeviceRates, Rates};
use std::fmt;
use std::io::{self, Write};
use sumac::controller::proto::{
    DeviceStatus, JobStatus, PairStatus, RankRange, RecoveryOutcome, RecoveryStatus, StatusReport, StripeStatus,
    TenantStatus,
};
use sumac_hal::ctrl::update::{SlotId, SlotTrust, SlotsStatus};
use sumac_hal::ctrl::{AttachPoint, Counters, DropReason, StackUsage};

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

/// Write a report, with the rates since an earlier one if there is one.
pub(super) fn write_report(out: &mut impl Write, report: &StatusReport, rates: Option<&Rates>) -> io::Result<()> {
    match &report.fabric {
        Some(fabric) => writeln!(
            out,
            "fabric   {} switches, {} hosts, {} aggregation nodes",
            fabric.switches, fabric.hosts, fabric.aggregation_nodes
        )?,
        None => writeln!(out, "fabric   none: every device counts as a switch to which all hosts are connected")?,
    }
    if let Some(pair) = &report.pair {
        write_pair(out, pair)?;
    }
    writeln!(out, "devices  {}", report.devices.len())?;
    for device in &report.devices {
        write_device(out, device, rates.and_then(|rates| rates.devices.get(&device.name)))?;
    }
    writeln!(out, "tenants  {}", report.tenants.len())?;
    report.tenants.iter().try_for_each(|tenant| write_tenant(out, tenant))?;
    writeln!(out, "jobs     {}", report.jobs.len() as u64 + u64::from(report.jobs_left_out))?;
    report.jobs.iter().try_for_each(|job| write_job(out, job))?;
    if report.jobs_left_out > 0 {
        writeln!(out, "  and {} more that do not fit into the report", report.jobs_left_out)?;
    }
    writeln!(out, "recoveries  {}", report.recoveries.len())?;
    report.recoveries.iter().try_for_each(|recovery| write_recovery(out, recovery))
}

fn write_pair(out: &mut impl Write, pair: &PairStatus) -> io::Result<()> {
    let PairStatus { role, term, peer, peer_role } = pair;
    let other = peer_role.map_or("DOES NOT ANSWER".to_owned(), |role| role.to_string());
    writeln!(out, "pair     {role}, term {term}; the other controller, {peer}: {other}")
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

fn write_device(out: &mut impl Write, device: &DeviceStatus, rates: Option<&DeviceRates>) -> io::Result<()> {
    let known = if device.in_fabric { "" } else { "  NOT IN THE FABRIC: no switch has this name" };
    let name = Escaped(&device.name);
    let stats = match &device.stats {
        Ok(stats) => stats,
        Err(why) => return writeln!(out, "  {name}  NO REPLY: {}{known}", Escaped(why)),
    };
    let (groups, slots) = (device.capabilities.groups, device.capabilities.slots);
    let slots = u64::from(slots) * device.data_addrs.len() as u64;
    writeln!(
        out,
        "  {name}  groups {}/{groups}  slots {}/{slots}{}{}{known}",
        stats.groups,
        stats.slots_used,
        stats.stack.map(describe_stack).unwrap_or_default(),
        describe_attach_point(device.attach.as_ref())
    )?;
    let Counters { packets_in, marked, packets_out, contributions, zero_copy_contributions, completed, .. } =
        stats.counters;
    let marks = if marked > 0 { format!(" ({marked} with a congestion mark)") } else { String::new() };
    writeln!(
        out,
        "    packets in {packets_in}{marks} out {packets_out}  contributions {contributions}, zero-copy \
         {zero_copy_contributions}  completed {completed}  {}",
        describe_drops(&stats.counters)
    )?;
    if let Some(slots) = &device.slots {
        writeln!(out, "    {}", describe_slots(slots))?;
    }
    let Some(rates) = rates else { return Ok(()) };
    let DeviceRates { packets_in, packets_out, contributions, zero_copy_contributions, completed, dropped, .. } = rates;
    writeln!(
        out,
        "    per second: packets in {packets_in:.1} out {packets_out:.1}  MB in {:.1} out {:.1}  contributions \
         {contributions:.1}, zero-copy {zero_copy_contributions:.1}  completed {completed:.1}  dropped {dropped:.1}",
        rates.bytes_in / 1e6,
        rates.bytes_out / 1e6
    )
}

/// Return the reasons for which packets were dropped, and how many were.
pub(super) fn drops(counters: &Counters) -> impl Iterator<Item = (DropReason, u64)> {
    DropReason::ALL.into_iter().map(|reason| (reason, counters.dropped(reason))).filter(|(_, count)| *count > 0)
}

fn describe_drops(counters: &Counters) -> String {
    let total: u64 = counters.dropped.iter().sum();
    let reasons: Vec<_> = drops(counters).map(|(reason, count)| format!("{reason} {count}")).collect();
    if reasons.is_empty() { "dropped 0".into() } else { format!("dropped {total}: {}", reasons.join(", ")) }
}

/// Describe the slots that a device boots from.
fn describe_slots(slots: &SlotsStatus) -> String {
    let image = |slot: SlotId| {
        let image = slots.image(slot).map_or_else(
            || "empty".to_owned(),
            |image| {
                let trust = match image.trust {
                    SlotTrust::Confirmed => "confirmed".to_owned(),
                    SlotTrust::Trial { tries_left } => format!("on trial, {tries_left} tries left"),
                };
                format!("version {} epoch {} {trust}", Escaped(&image.version), image.epoch)
            },
        );
        format!("slot {slot} {image}")
    };
    match slots.running {
        Some(running) => format!("runs {}; {}", image(running), image(running.other())),
        None => format!("not started from a slot; {}; {}", image(SlotId::A), image(SlotId::B)),
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
            "  {}, {} levels: {}  {} of {} ranks zero-copy, transport {}",
            tree.group,
            tree.levels,
            Escaped(&tree.devices.join(" ")),
            tree.zero_copy_ranks,
            job.world,
            Escaped(&tree.transport)
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
    let path = path(job).map(|path| format!("  path {path}")).unwrap_or_default();
    let missing = describe_missing(job);
    let (name, tenant, joined, world) = (Escaped(&job.name), Escaped(&job.tenant), job.joined, job.world);
    let trees = if job.stripes.is_empty() { String::new() } else { format!("  {} trees", job.trees()) };
    writeln!(
        out,
        "  {name}  {state}{path}  tenant {tenant}  ranks {joined}/{world}{missing}{view}{trees}{tree}{queue}"
    )?;
    job.stripes.iter().try_for_each(|stripe| write_stripe(out, stripe))
}

/// Describe a further tree of a job.
fn write_stripe(out: &mut impl Write, stripe: &StripeStatus) -> io::Result<()> {
    let number = stripe.index + 1;
    let view = if stripe.view > 0 { format!("  view {}", stripe.view) } else { String::new() };
    match &stripe.tree {
        Ok(tree) => {
            let (group, levels, devices) = (tree.group, tree.levels, tree.devices.join(" "));
            writeln!(out, "    tree {number}{view}  {group}, {levels} levels: {}", Escaped(&devices))
        }
        Err(why) => writeln!(out, "    tree {number}{view}  no tree: {}", Escaped(why)),
    }
}

/// Name the ranks that are not connected.
fn describe_missing(job: &JobStatus) -> String {
    let named: u32 = job.missing.iter().map(|RankRange { first, last }| last - first + 1).sum();
    let more = (job.world - job.joined.min(job.world)).saturating_sub(named);
    let ranges: Vec<_> = job.missing.iter().map(ToString::to_string).collect();
    match (ranges.is_empty(), more) {
        (true, _) => String::new(),
        (false, 0) => format!(" (missing: {})", ranges.join(", ")),
        (false, more) => format!(" (missing: {} and {more} more)", ranges.join(", ")),
    }
}

fn write_recovery(out: &mut impl Write, recovery: &RecoveryStatus) -> io::Result<()> {
    let RecoveryStatus { job, view, cause, began_ms_ago, took_ms, outcome } = recovery;
    let (job, cause) = (Escaped(job), Escaped(cause));
    write!(out, "  {} s ago  {job}  view {view}  {cause}: ", began_ms_ago / 1000)?;
    let after = took_ms.map(|took_ms| format!(" after {took_ms} ms")).unwrap_or_default();
    match outcome {
        None => writeln!(out, "recovering"),
        Some(RecoveryOutcome::NewTree) => writeln!(out, "another tree{after}"),
        Some(RecoveryOutcome::NoTree { reason }) => writeln!(out, "no tree{after}: {}", Escaped(reason)),
        Some(RecoveryOutcome::Survivors { ranks }) => writeln!(out, "{ranks} ranks continue{after}"),
        Some(RecoveryOutcome::JobEnded) => writeln!(out, "the job ended{after}"),
        Some(_) => writeln!(out, "ended{after}"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use sumac::controller::Quota;
    use sumac::controller::proto::{JobTree, QueuePosition};
    use sumac_hal::ctrl::{DeviceCapabilities, Name, Stats};
    use sumac_hal::ids::{BootId, GroupId};

    fn written(job: &JobStatus) -> String {
        let mut text = Vec::new();
        write_job(&mut text, job).expect("memory");
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn job_line_shows_zero_copy_ranks_and_view() {
        let tree = JobTree {
            group: GroupId(7),
            levels: 1,
            devices: vec!["leaf0".into()],
            zero_copy_ranks: 3,
            transport: "mixed".into(),
        };
        let job = JobStatus { tree: Some(Ok(tree)), ..job() };
        let text = written(&job);
        assert!(text.starts_with("  j  running  path tree  tenant t  ranks 4/4  group 7, 1 levels: leaf0"), "{text}");
        assert!(text.ends_with("  3 of 4 ranks zero-copy, transport mixed\n"), "{text}");
        let text = written(&JobStatus { view: 2, ..job });
        assert!(text.contains("ranks 4/4  view 2  group 7"), "{text}");
    }

    pub(crate) fn job() -> JobStatus {
        JobStatus {
            name: "j".into(),
            tenant: "t".into(),
            joined: 4,
            world: 4,
            missing: vec![],
            running: true,
            view: 0,
            tree: None,
            queue: None,
            is_offered: false,
            stripes: Vec::new(),
        }
    }

    #[test]
    fn further_trees_have_lines_of_their_own() {
        let tree = |device: &str| JobTree {
            group: GroupId(7),
            levels: 1,
            devices: vec![device.into()],
            zero_copy_ranks: 0,
            transport: "udp".into(),
        };
        let stripe = |index, tree| StripeStatus { index, share: 1, view: 0, tree };
        let stripes = vec![stripe(1, Ok(tree("dpu1"))), StripeStatus { view: 2, ..stripe(2, Err("lost".into())) }];
        let text = written(&JobStatus { tree: Some(Ok(tree("dpu0"))), stripes, ..job() });
        assert!(text.contains("ranks 4/4  2 trees  group 7, 1 levels: dpu0"), "{text}");
        assert!(text.ends_with("\n    tree 2  group 7, 1 levels: dpu1\n    tree 3  view 2  no tree: lost\n"), "{text}");
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
        let tree = JobTree {
            group: GroupId(7),
            levels: 1,
            devices: vec![evil.into()],
            zero_copy_ranks: 0,
            transport: evil.into(),
        };
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

    pub(in crate::status) fn report() -> StatusReport {
        let (fabric, devices, jobs, tenants, recoveries) = (None, vec![], vec![], vec![], vec![]);
        StatusReport { fabric, devices, jobs, jobs_left_out: 0, tenants, recoveries, pair: None }
    }

    pub(in crate::status) fn device(name: &str) -> DeviceStatus {
        let capabilities = DeviceCapabilities {
            max_packet_len_bytes: 1024,
            receive_buffer_bytes: 8192,
            groups: 64,
            children: 8,
            slots: 1024,
            slot_memory_bytes: 1 << 20,
            dtypes: 0,
            ops: 0,
            collectives: 0,
        };
        let stats = Stats {
            boot_id: BootId(1),
            groups: 1,
            trees: 1,
            slots_used: 64,
            slot_memory_used_bytes: 0,
            counters: Counters::default(),
            stack: None,
        };
        let (name, in_fabric, data_addrs) = (name.to_owned(), true, vec![]);
        DeviceStatus { name, in_fabric, data_addrs, capabilities, attach: None, stats: Ok(stats), slots: None }
    }

    #[test]
    fn device_lines_show_zero_copy_beside_packets_and_drops_by_name() {
        let mut device = device("leaf0");
        let counters = &mut device.stats.as_mut().expect("it answered").counters;
        (counters.packets_in, counters.contributions, counters.zero_copy_contributions) = (7, 9, 5);
        [DropReason::Stale, DropReason::Late, DropReason::Stale].into_iter().for_each(|why| counters.drop_packet(why));
        let mut text = Vec::new();
        write_device(&mut text, &device, None).expect("memory");
        let text = String::from_utf8(text).expect("text");
        let second = text.lines().nth(1).expect("two lines");
        let expected = "    packets in 7 out 0  contributions 9, zero-copy 5  completed 0  dropped 3: stale 2, late 1";
        assert_eq!(second, expected);
        device.stats.as_mut().expect("it answered").counters.marked = 3;
        let mut text = Vec::new();
        write_device(&mut text, &device, None).expect("memory");
        let text = String::from_utf8(text).expect("text");
        assert!(text.contains("packets in 7 (3 with a congestion mark) out 0"), "{text}");
    }

    #[test]
    fn job_line_names_missing_ranks() {
        let missing = vec![RankRange { first: 0, last: 0 }, RankRange { first: 2, last: 3 }];
        let job = JobStatus { joined: 1, missing, ..job() };
        assert!(written(&job).contains("ranks 1/4 (missing: 0, 2-3)"), "{}", written(&job));
        let large = JobStatus { world: 100, ..job };
        assert!(written(&large).contains("ranks 1/100 (missing: 0, 2-3 and 96 more)"), "{}", written(&large));
    }

    #[test]
    fn recovery_line_tells_when_what_and_how_long() {
        let line = |took_ms, outcome| {
            let (job, cause) = ("j\u{1b}".to_owned(), "tree lost".to_owned());
            let recovery = RecoveryStatus { job, view: 2, cause, began_ms_ago: 12_345, took_ms, outcome };
            let mut text = Vec::new();
            write_recovery(&mut text, &recovery).expect("memory");
            String::from_utf8(text).expect("text")
        };
        assert_eq!(line(None, None), "  12 s ago  j\\u{1b}  view 2  tree lost: recovering\n");
        let ended = line(Some(135), Some(RecoveryOutcome::NewTree));
        assert_eq!(ended, "  12 s ago  j\\u{1b}  view 2  tree lost: another tree after 135 ms\n");
        let without = line(Some(7), Some(RecoveryOutcome::NoTree { reason: "no device\n".into() }));
        assert!(without.ends_with("no tree after 7 ms: no device\\u{a}\n"), "{without}");
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
