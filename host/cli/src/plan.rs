//! `sumac plan`: plan an aggregation tree for a set of hosts on a fabric.

use crate::exit::Failure;
use crate::fabric::{FabricArgs, HostArgs};
use clap::Args;
use serde::Serialize;
use std::io::{self, Write};
use sumac::plan::{self, Child, HostSelection, Limits, Plan};

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
    // By name, which is unique: the order of the hosts is that of the ranks.
    let hosts = HostSelection::Named(taken.hosts.iter().map(|host| fabric.host(*host).name.clone()).collect());
    let limits = Limits { max_children: args.max_children, ..Limits::default() };
    let plan = plan::plan(&fabric, &hosts, &limits).map_err(Failure::input)?;
    let selected = taken.describe(&fabric);
    let assumptions: Vec<String> = fabric.assumptions().iter().map(ToString::to_string).collect();
    let mut out = io::stdout().lock();
    if args.json {
        let json = PlanJson { selected, assumptions, ..PlanJson::new(&plan) };
        serde_json::to_writer_pretty(&mut out, &json).map_err(io::Error::from)?;
        writeln!(out)?;
    } else if args.dot {
        // Comments of DOT, so that a drawing tells them too.
        assumptions.iter().try_for_each(|assumed| writeln!(out, "// assumed: {assumed}"))?;
        out.write_all(plan.to_dot().as_bytes())?;
    } else {
        selected.iter().try_for_each(|line| writeln!(out, "{line}"))?;
        assumptions.iter().try_for_each(|assumed| writeln!(out, "assumed: {assumed}"))?;
        out.write_all(plan.to_text().as_bytes())?;
    }
    Ok(out.flush()?)
}

/// The JSON form. It has exactly the documented keys, independently of the library's types.
#[derive(Debug, Serialize)]
struct PlanJson<'a> {
    levels: usize,
    root: &'a str,
    max_children: usize,
    max_link_sharing: usize,
    nodes: Vec<NodeJson<'a>>,
    ranks: Vec<RankJson<'a>>,
    /// What was taken of the fabric and what was left out, a sentence each.
    selected: Vec<String>,
    /// What the fabric's source does not say, a sentence each.
    assumptions: Vec<String>,
}

#[derive(Debug, Serialize)]
struct NodeJson<'a> {
    name: &'a str,
    level: usize,
    parent: Option<&'a str>,
    /// Names of nodes and `rank N`.
    children: Vec<String>,
}

#[derive(Debug, Serialize)]
struct RankJson<'a> {
    rank: u32,
    host: &'a str,
    leaf: &'a str,
}

impl<'a> PlanJson<'a> {
    fn new(plan: &'a Plan) -> Self {
        let name = |node: usize| plan.nodes[node].name.as_str();
        let child = |child: &Child| match child {
            Child::Node(node) => name(*node).to_owned(),
            Child::Rank(rank) => rank.to_string(),
        };
        let node = |node: &'a plan::PlanNode| NodeJson {
            name: &node.name,
            level: node.level,
            parent: node.parent.map(name),
            children: node.children.iter().map(child).collect(),
        };
        let rank = |rank: &'a plan::PlanRank| RankJson { rank: rank.rank.0, host: &rank.name, leaf: name(rank.leaf) };
        Self {
            levels: plan.levels,
            root: &plan.root().name,
            max_children: plan.max_children,
            max_link_sharing: plan.max_link_sharing,
            nodes: plan.nodes.iter().map(node).collect(),
            ranks: plan.ranks.iter().map(rank).collect(),
            selected: Vec::new(),
            assumptions: Vec::new(),
        }
    }
}
