//! `sumac plan`: plan an aggregation tree for a set of hosts on a fabric.

use crate::exit::Failure;
use crate::fabric;
use crate::size::SizeBytes;
use anyhow::anyhow;
use clap::Args;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::PathBuf;
use sumac::plan::{HostSelection, Limits, Plan, Planner, Pricing, Size};
use sumac::topo::{Device, Fabric, LinkId};

/// `sumac plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// Fabric description: raw output of ibnetdiscover, an ibsim .net file, or TOML; `-` reads it from stdin
    #[arg(long, value_name = "FILE")]
    topology: PathBuf,
    /// Hosts: the first N in natural name order, a comma-separated list of names or GUIDs, or `all`
    #[arg(long, value_name = "N|LIST")]
    hosts: HostSelection,
    /// Maximum number of children of an aggregation node
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_children)]
    max_children: usize,
    /// Plan for messages of this size, such as 64K; default: for 8 B and for 16 MiB, and the tree that serves both best
    #[arg(long, value_name = "BYTES")]
    size: Option<SizeBytes>,
    /// Plan without this switch, host, or cable (one of its ends, as SWITCH:PORT), and list what moves; repeatable
    #[arg(long, value_name = "LINK|SWITCH|HOST")]
    without: Vec<String>,
    /// Print the tree in DOT format, for Graphviz
    #[arg(long, conflicts_with = "json")]
    dot: bool,
    /// Print the tree as JSON
    #[arg(long)]
    json: bool,
}

/// Plan the tree and print it.
pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let (fabric, _) = fabric::read(&args.topology).map_err(Failure::Input)?;
    for warning in fabric.warnings() {
        tracing::warn!("{}: {warning}", args.topology.display());
    }
    let text = if args.without.is_empty() { plan_on(&fabric, args)? } else { plan_without(&fabric, args)? };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

fn limits(args: &PlanArgs, size: Size) -> Limits {
    Limits { max_children: args.max_children, pricing: Pricing { size, ..Pricing::default() }, ..Limits::default() }
}

/// The size that the tree is for.
fn size(args: &PlanArgs) -> Size {
    args.size.map_or(Size::Any, |bytes| Size::Bytes(bytes.0))
}

fn plan_on(fabric: &Fabric, args: &PlanArgs) -> Result<String, Failure> {
    let planner = Planner::new(fabric);
    let plan_for = |size| planner.plan(&args.hosts, &limits(args, size)).map_err(Failure::input);
    let plan = plan_for(size(args))?;
    if args.json {
        return Ok(serde_json::to_string_pretty(&plan).map_err(io::Error::from)? + "\n");
    }
    if args.dot {
        return Ok(plan.to_dot());
    }
    let mut text = describe(&planner, &plan);
    if args.size.is_none() {
        for bytes in [Size::SMALL, Size::LARGE] {
            let best = plan_for(Size::Bytes(bytes))?;
            if !best.moves_from(&plan).is_empty() {
                let best = describe(&planner, &best);
                let _ = writeln!(text, "\nanother tree is faster for {bytes} B:\n{}", best.trim_end());
            }
        }
    }
    Ok(text)
}

/// A plan with its rate and the times of a ring beside it.
fn describe(planner: &Planner<'_>, plan: &Plan) -> String {
    let pricing = Pricing::default();
    let bound = planner.rate_bound(plan, &pricing);
    let mut text = plan.to_text() + &planner.rate_text(plan, &bound, &pricing.costs);
    let ring = plan.prediction.times.iter().filter_map(|(bytes, tree_s)| {
        let ring_s = planner.ring_seconds(plan, *bytes, &pricing)?;
        Some(format!("{bytes} B {:.2} us, {:.2} times the tree", ring_s * 1e6, ring_s / tree_s))
    });
    let ring: Vec<String> = ring.collect();
    if !ring.is_empty() {
        let _ = writeln!(text, "ring in the order of ranks: {}", ring.join("; "));
    }
    text
}

/// Plan on the rest of the fabric, and list what moves.
fn plan_without(fabric: &Fabric, args: &PlanArgs) -> Result<String, Failure> {
    let (mut links, mut hosts) = (BTreeSet::new(), BTreeSet::new());
    for name in &args.without {
        let found = find(fabric, name).ok_or_else(|| {
            Failure::Input(anyhow!("--without {name}: no switch or host has this name or GUID, and no cable this end"))
        })?;
        links.extend(found.0);
        hosts.extend(found.1);
    }
    let limits = limits(args, size(args));
    let whole = Planner::new(fabric).plan(&args.hosts, &limits).map_err(Failure::input)?;
    let names = whole.ranks.iter().map(|rank| &rank.name).filter(|name| !hosts.contains(*name));
    let selection = HostSelection::Named(names.cloned().collect());
    let rest = fabric.without_links(&links);
    let planner = Planner::new(&rest);
    let plan = planner.plan(&selection, &limits).map_err(Failure::input)?;
    if args.json {
        return Ok(serde_json::to_string_pretty(&plan).map_err(io::Error::from)? + "\n");
    }
    if args.dot {
        return Ok(plan.to_dot());
    }
    let moves = plan.moves_from(&whole);
    let mut text = describe(&planner, &plan);
    let colon = if moves.is_empty() { "" } else { ":" };
    let _ = writeln!(text, "{} of {} children move{colon}", moves.len(), whole.children());
    for child in &moves {
        let _ = writeln!(text, "  {child}");
    }
    Ok(text)
}

/// The cables that go with a switch, a host or one cable, and the host that goes.
fn find(fabric: &Fabric, name: &str) -> Option<(Vec<LinkId>, Option<String>)> {
    let of = |device: Device| {
        let links = (0u32..).map(LinkId).zip(fabric.links());
        links.filter(move |(_, link)| link.ends.iter().any(|end| end.device == device))
    };
    if let Some(switch) = fabric.find_switch(name) {
        return Some((of(Device::Switch(switch)).map(|(id, _)| id).collect(), None));
    }
    if let Some(host) = fabric.find_host(name) {
        let links = of(Device::Host(host)).map(|(id, _)| id).collect();
        return Some((links, Some(fabric.host(host).name.clone())));
    }
    let (device, port) = name.rsplit_once(':')?;
    let port: u16 = port.parse().ok()?;
    let device = match (fabric.find_switch(device), fabric.find_host(device)) {
        (Some(switch), _) => Device::Switch(switch),
        (None, host) => Device::Host(host?),
    };
    let is_end = |end: &sumac::topo::Port| end.device == device && end.number == port;
    let link = of(device).find(|(_, link)| link.ends.iter().any(is_end))?;
    Some((vec![link.0], None))
}
