//! `sumac plan`: plan an aggregation tree for a set of hosts on a fabric.

use crate::exit::Failure;
use crate::fabric;
use clap::Args;
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;
use sumac::plan::{self, Child, HostSelection, Limits, Plan};

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
    let limits = Limits { max_children: args.max_children, ..Limits::default() };
    let plan = plan::plan(&fabric, &args.hosts, &limits).map_err(Failure::input)?;
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &PlanJson::new(&plan)).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        let text = if args.dot { plan.to_dot() } else { plan.to_text() };
        out.write_all(text.as_bytes())?;
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
        }
    }
}
