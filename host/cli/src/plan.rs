//! `sumac plan`: plan an aggregation tree for a set of hosts on a fabric, or print what an algorithm without one does.

mod algorithm;
mod drawing;
mod hybrid;

use crate::exit::Failure;
use crate::fabric::{FabricArgs, HostArgs, read_text, routes, with_devices};
use crate::size::SizeBytes;
use algorithm::AlgorithmArgs;
use anyhow::{Context, anyhow};
use clap::Args;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use sumac::plan::{Explanation, HostSelection, Limits, Planner, Pricing, Report, Size, Trees};
use sumac::topo::{Device, Fabric, HostId, LinkId};

/// `sumac plan`.
#[derive(Debug, Args)]
#[command(mut_arg("topology", |arg| arg.required(false).required_unless_present("algo")))]
#[command(mut_arg("hosts", |arg| arg.required_unless_present_any(["adapters", "algo"])))]
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
    /// Plan up to N trees that carry a share of each message each, where that is faster than one; a server's adapters
    /// are all used
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    trees: u16,
    /// Where devices are: `switches` for one in each switch, `hosts` for a DPU at the port of each selected host, or a
    /// TOML file that lists them; default: as the fabric's file says
    #[arg(long, value_name = "FILE|switches|hosts")]
    devices: Option<String>,
    /// The fabric's forwarding tables, as `dump_lfts` prints them: edges are counted on the cables that they take;
    /// default: shortest up*/down* routes
    #[arg(long, value_name = "FILE")]
    routes: Option<PathBuf>,
    /// Plan without this switch, host, or cable (one of its ends, as SWITCH:PORT), and list what moves; repeatable. A
    /// tree in which fewer children move may take a quarter longer than the best one
    #[arg(long, value_name = "LINK|SWITCH|HOST")]
    without: Vec<String>,
    /// Print what each way would take from 8 B to 1 GiB on this fabric, for these hosts in this order, and why
    /// other roots lost
    #[arg(long, conflicts_with_all = ["dot", "without"])]
    explain: bool,
    /// Print the tree in DOT format, for Graphviz; several trees are as many graphs
    #[arg(long, conflicts_with = "json")]
    dot: bool,
    /// Print the tree, or the messages of --algo, as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    algorithm: AlgorithmArgs,
}

/// Print what is asked for.
pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    if args.algorithm.shape.is_some() && args.algorithm.algo.is_none() && !args.explain {
        return Err(Failure::Input(anyhow!("--shape: only --algo and --explain use it")));
    }
    let text = match args.algorithm.algo {
        Some(algo) => args.algorithm.text(algo, args.json)?,
        None => plan(args)?,
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Plan the tree.
fn plan(args: &PlanArgs) -> Result<String, Failure> {
    let mut fabric = args.fabric.read()?;
    let taken = args.hosts.take(&fabric)?;
    if let Some(devices) = &args.devices {
        // Hosts keep their ids.
        fabric = with_devices(&fabric, devices, taken.rails.iter().flatten().copied())?;
    }
    let hosts = if args.trees > 1 {
        HostSelection::Rails(taken.rails.clone())
    } else {
        // By name, which is unique: the order of the hosts is that of the ranks.
        HostSelection::Named(taken.hosts.iter().map(|host| fabric.host(*host).name.clone()).collect())
    };
    let mut selected = taken.describe(&fabric);
    if args.trees > 1 {
        // Trees use all adapters.
        selected.retain(|line| !line.starts_with("each host is one rank"));
    }
    let request = Request {
        args,
        fabric: &fabric,
        hosts,
        selected,
        assumptions: fabric.assumptions().iter().map(ToString::to_string).collect(),
        tables: match &args.routes {
            Some(file) => Some((file, read_text(file).context("--routes").map_err(Failure::Input)?)),
            None => None,
        },
    };
    if args.without.is_empty() { request.plan() } else { request.plan_without() }
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
    /// The file with the forwarding tables, and its text.
    tables: Option<(&'a Path, String)>,
}

/// The JSON form: the library's, and what was taken and assumed.
#[derive(Debug, Serialize)]
struct PlanJson<'a> {
    #[serde(flatten)]
    report: Report<'a>,
    selected: &'a [String],
    assumptions: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    explanation: Option<&'a Explanation>,
}

/// By which part a tree may be slower than the best one, so that fewer children move.
const REPLAN_SLACK: f64 = 0.25;

/// The size that the tree is for.
fn size(args: &PlanArgs) -> Size {
    args.size.map_or(Size::Any, |bytes| Size::Bytes(bytes.0))
}

impl Request<'_> {
    /// The limits and the pricing on a fabric.
    fn limits(&self, fabric: &Fabric, size: Size) -> Result<Limits, Failure> {
        let routes = match &self.tables {
            Some((file, text)) => Some(Arc::new(routes(fabric, file, text)?)),
            None => None,
        };
        let pricing = Pricing { size, routes, ..Pricing::default() };
        Ok(Limits { max_children: self.args.max_children, pricing, ..Limits::default() })
    }

    fn plan(&self) -> Result<String, Failure> {
        let planner = Planner::new(self.fabric);
        let plan_for = |size| {
            let max = usize::from(self.args.trees);
            planner.plan_trees(&self.hosts, &self.limits(self.fabric, size)?, max).map_err(Failure::input)
        };
        let trees = plan_for(size(self.args))?;
        let explanation = match self.args.explain {
            true => {
                let limits = self.limits(self.fabric, size(self.args))?;
                let shape = self.args.algorithm.shape;
                self.check_shape(&trees)?;
                Some(planner.explain(&self.hosts, &limits, (&trees, shape)).map_err(Failure::input)?)
            }
            false => None,
        };
        if let Some(text) = self.machine_readable(&planner, &trees, explanation.as_ref())? {
            return Ok(text);
        }
        let pricing = self.limits(self.fabric, size(self.args))?.pricing;
        let mut text = self.describe(&planner, &trees, &pricing);
        // Of several trees, the first is for small messages and all are for large ones.
        if self.args.size.is_none() && trees.trees.len() == 1 {
            let plan = &trees.trees[0].plan;
            for bytes in [Size::SMALL, Size::LARGE] {
                let best = plan_for(Size::Bytes(bytes))?;
                if !best.trees[0].plan.moves_from(plan).is_empty() {
                    let best = describe(&planner, &best, &pricing);
                    let _ = writeln!(text, "\nanother tree is faster for {bytes} B:\n{}", best.trim_end());
                }
            }
        }
        if let Some(explanation) = explanation {
            let _ = write!(text, "\n{}", explanation.to_text());
        }
        Ok(text)
    }

    /// Check that the hosts can lie as --shape says.
    fn check_shape(&self, trees: &Trees) -> Result<(), Failure> {
        let ranks = trees.trees[0].plan.ranks.len() as u32;
        let checked = self.args.algorithm.shape().check(ranks);
        checked.map_err(|why| Failure::Input(anyhow!("--shape: {why}")))
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
        let limits = self.limits(self.fabric, size(self.args))?;
        let max = usize::from(self.args.trees);
        let whole = Planner::new(self.fabric).plan(&self.hosts, &limits).map_err(Failure::input)?;
        let selection = match &self.hosts {
            HostSelection::Rails(servers) => {
                let is_left = |host: &HostId| !hosts.contains(&self.fabric.host(*host).name);
                let left = servers.iter().map(|rails| rails.iter().copied().filter(is_left).collect::<Vec<_>>());
                HostSelection::Rails(left.filter(|rails| !rails.is_empty()).collect())
            }
            _ => {
                let names = whole.ranks.iter().map(|rank| &rank.name).filter(|name| !hosts.contains(*name));
                HostSelection::Named(names.cloned().collect())
            }
        };
        let rest = self.fabric.without_links(&links);
        let planner = Planner::new(&rest);
        // Tables that name failed cables have no route over them.
        let limits = self.limits(&rest, size(self.args))?;
        let trees = if max == 1 {
            let plan = planner.replan(&selection, &limits, &whole, REPLAN_SLACK).map_err(Failure::input)?;
            planner.single(&selection, &limits, plan).map_err(Failure::input)?
        } else {
            planner.plan_trees(&selection, &limits, max).map_err(Failure::input)?
        };
        if let Some(text) = self.machine_readable(&planner, &trees, None)? {
            return Ok(text);
        }
        let moves = trees.trees[0].plan.moves_from(&whole);
        let mut text = self.describe(&planner, &trees, &limits.pricing);
        let colon = if moves.is_empty() { "" } else { ":" };
        let _ = writeln!(text, "{} of {} children move{colon}", moves.len(), whole.children());
        for child in &moves {
            let _ = writeln!(text, "  {child}");
        }
        Ok(text)
    }

    /// The plan for programs, if that is wanted.
    fn machine_readable(
        &self,
        planner: &Planner<'_>,
        trees: &Trees,
        explanation: Option<&Explanation>,
    ) -> Result<Option<String>, Failure> {
        let Self { args, selected, assumptions, .. } = self;
        if args.json {
            let json = PlanJson { report: planner.report(trees), selected, assumptions, explanation };
            return Ok(Some(serde_json::to_string_pretty(&json).map_err(io::Error::from)? + "\n"));
        }
        // Comments of DOT, so that a drawing tells them too.
        let assumed: String = assumptions.iter().map(|assumed| format!("// assumed: {assumed}\n")).collect();
        let drawn = |tree: &sumac::plan::PlannedTree| tree.plan.to_dot();
        Ok(args.dot.then(|| assumed + &trees.trees.iter().map(drawn).collect::<String>()))
    }

    /// What was taken and assumed, and the plan.
    fn describe(&self, planner: &Planner<'_>, trees: &Trees, pricing: &Pricing) -> String {
        let mut text = String::new();
        self.selected.iter().for_each(|line| text += &format!("{line}\n"));
        self.assumptions.iter().for_each(|assumed| text += &format!("assumed: {assumed}\n"));
        text + &describe(planner, trees, pricing)
    }
}

/// Trees with their rate and the times of a ring beside them.
fn describe(planner: &Planner<'_>, trees: &Trees, pricing: &Pricing) -> String {
    let (plan, times) = (&trees.trees[0].plan, &trees.times);
    let mut text = match trees.trees.len() {
        1 => plan.to_text() + &planner.rate_text(plan, &trees.bound, &pricing.costs),
        _ => planner.trees_text(trees, &pricing.costs),
    };
    let ring = times.iter().filter_map(|(bytes, tree_s)| {
        let ring_s = planner.ring_seconds(plan, *bytes, pricing)?;
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
