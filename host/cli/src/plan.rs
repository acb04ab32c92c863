//! `sumac plan`: plan an aggregation tree for a set of hosts on a fabric.

use crate::exit::Failure;
use crate::fabric::{FabricArgs, HostArgs};
use crate::size::SizeBytes;
use anyhow::anyhow;
use clap::Args;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write};
use sumac::plan::{HostSelection, Limits, Plan, Planner, Pricing, Size};
use sumac::topo::{Device, Fabric, LinkId};

/// `sumac plan`.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    fabric: FabricArgs,
    #[command(flatten)]
    hosts: HostArgs,
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
    let fabric = args.fabric.read()?;
    let taken = args.hosts.take(&fabric)?;
    let request = Request {
        args,
        fabric: &fabric,
        // By name, which is unique: the order of the hosts is that of the ranks.
        hosts: HostSelection::Named(taken.hosts.iter().map(|host| fabric.host(*host).name.clone()).collect()),
        selected: taken.describe(&fabric),
        assumptions: fabric.assumptions().iter().map(ToString::to_string).collect(),
    };
    let text = if args.without.is_empty() { request.plan()? } else { request.plan_without()? };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// What is planned, and what is printed with every plan.
struct Request<'a> {
    args: &'a PlanArgs,
    fabric: &'a Fabric,
    hosts: HostSelection,
    /// What was taken of the fabric and what was left out, a sentence each.
    selected: Vec<String>,
    /// What the fabric's source does not say, a sentence each.
    assumptions: Vec<String>,
}

/// The JSON form: the library's, and what was taken and assumed.
#[derive(Debug, Serialize)]
struct PlanJson<'a> {
    #[serde(flatten)]
    plan: &'a Plan,
    selected: &'a [String],
    assumptions: &'a [String],
}

fn limits(args: &PlanArgs, size: Size) -> Limits {
    Limits { max_children: args.max_children, pricing: Pricing { size, ..Pricing::default() }, ..Limits::default() }
}

/// The size that the tree is for.
fn size(args: &PlanArgs) -> Size {
    args.size.map_or(Size::Any, |bytes| Size::Bytes(bytes.0))
}

impl Request<'_> {
    fn plan(&self) -> Result<String, Failure> {
        let planner = Planner::new(self.fabric);
        let plan_for = |size| planner.plan(&self.hosts, &limits(self.args, size)).map_err(Failure::input);
        let plan = plan_for(size(self.args))?;
        if let Some(text) = self.machine_readable(&plan)? {
            return Ok(text);
        }
        let mut text = self.describe(&planner, &plan);
        if self.args.size.is_none() {
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

    /// Plan on the rest of the fabric, and list what moves.
    fn plan_without(&self) -> Result<String, Failure> {
        let (mut links, mut hosts) = (BTreeSet::new(), BTreeSet::new());
        for name in &self.args.without {
            let found = find(self.fabric, name).ok_or_else(|| {
                Failure::Input(anyhow!(
                    "--without {name}: no switch or host has this name or GUID, and no cable this end"
                ))
            })?;
            links.extend(found.0);
            hosts.extend(found.1);
        }
        let limits = limits(self.args, size(self.args));
        let whole = Planner::new(self.fabric).plan(&self.hosts, &limits).map_err(Failure::input)?;
        let names = whole.ranks.iter().map(|rank| &rank.name).filter(|name| !hosts.contains(*name));
        let selection = HostSelection::Named(names.cloned().collect());
        let rest = self.fabric.without_links(&links);
        let planner = Planner::new(&rest);
        let plan = planner.plan(&selection, &limits).map_err(Failure::input)?;
        if let Some(text) = self.machine_readable(&plan)? {
            return Ok(text);
        }
        let moves = plan.moves_from(&whole);
        let mut text = self.describe(&planner, &plan);
        let colon = if moves.is_empty() { "" } else { ":" };
        let _ = writeln!(text, "{} of {} children move{colon}", moves.len(), whole.children());
        for child in &moves {
            let _ = writeln!(text, "  {child}");
        }
        Ok(text)
    }

    /// The plan for programs, if that is wanted.
    fn machine_readable(&self, plan: &Plan) -> Result<Option<String>, Failure> {
        let Self { args, selected, assumptions, .. } = self;
        if args.json {
            let json = PlanJson { plan, selected, assumptions };
            return Ok(Some(serde_json::to_string_pretty(&json).map_err(io::Error::from)? + "\n"));
        }
        // Comments of DOT, so that a drawing tells them too.
        let assumed: String = assumptions.iter().map(|assumed| format!("// assumed: {assumed}\n")).collect();
        Ok(args.dot.then(|| assumed + &plan.to_dot()))
    }

    /// What was taken and assumed, and the plan.
    fn describe(&self, planner: &Planner<'_>, plan: &Plan) -> String {
        let mut text = String::new();
        self.selected.iter().for_each(|line| text += &format!("{line}\n"));
        self.assumptions.iter().for_each(|assumed| text += &format!("assumed: {assumed}\n"));
        text + &describe(planner, plan)
    }
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
