//! Several trees as text and as JSON, with the names of cables.
//!
//! [`Report`] is the one JSON form: that of [`Plan`] for the first tree, with what follows from the fabric beside it.

use super::render::{bytes, plural, seconds};
use super::{BoundKind, FabricCosts, Plan, Routing, Trees, TreesLimit};
use crate::topo::{Fabric, LinkId, Port};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use std::fmt::Write as _;

/// Trees for programs, see [`Planner::report`](super::Planner::report). Its JSON form has the keys of [`Plan`], of the
/// first tree, and `rate{gbits,bound_gbits,bound,bound_at,limited_by}`, `times[{bytes,seconds}]` of all trees together,
/// `routes`, `unrated_cables`, `share`, `paths[{child,node,cables[{ends,gbits}]}]` and `further_trees[{share, ...}]`
/// with the same keys as the first tree. Ends of cables are `name:port`.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    fabric: &'a Fabric,
    trees: &'a Trees,
}

impl<'a> Report<'a> {
    pub(super) const fn new(fabric: &'a Fabric, trees: &'a Trees) -> Self {
        Self { fabric, trees }
    }
}

#[derive(Serialize)]
struct RateJson<'a> {
    gbits: f64,
    bound_gbits: f64,
    bound: &'static str,
    bound_at: &'a str,
    limited_by: String,
}

#[derive(Serialize)]
struct TimeJson {
    bytes: u64,
    seconds: f64,
}

#[derive(Serialize)]
struct CableJson {
    ends: [String; 2],
    gbits: Option<f64>,
}

#[derive(Serialize)]
struct PathJson<'a> {
    child: &'a str,
    node: &'a str,
    cables: Vec<CableJson>,
}

#[derive(Serialize)]
struct TreeJson<'a> {
    share: f64,
    tree_gbits: f64,
    #[serde(flatten)]
    plan: &'a Plan,
    paths: Vec<PathJson<'a>>,
}

impl Serialize for Report<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Trees { gbits, bound, .. } = self.trees;
        let rate = RateJson {
            gbits: *gbits,
            bound_gbits: bound.gbits,
            bound: match bound.kind {
                BoundKind::MinCut => "min-cut",
                BoundKind::Cuts => "cuts of hosts, leaves and pods",
            },
            bound_at: &bound.at,
            limited_by: self.trees.limit_text(self.fabric),
        };
        let first = &self.trees.trees[0].plan;
        let mut json = serializer.serialize_map(None)?;
        // The keys of the first tree come first, as they do for a plan alone.
        let tree = serde_json::to_value(self.tree(0)).map_err(serde::ser::Error::custom)?;
        let times = |(bytes, seconds): &(u64, f64)| TimeJson { bytes: *bytes, seconds: *seconds };
        for (key, value) in tree.as_object().into_iter().flatten().filter(|(key, _)| *key != "times") {
            json.serialize_entry(key, value)?;
        }
        json.serialize_entry("times", &self.trees.times.iter().map(times).collect::<Vec<_>>())?;
        json.serialize_entry("rate", &rate)?;
        json.serialize_entry("routes", first.routing.name())?;
        json.serialize_entry("unrated_cables", &first.unrated)?;
        let further: Vec<TreeJson<'_>> = (1..self.trees.trees.len()).map(|tree| self.tree(tree)).collect();
        json.serialize_entry("further_trees", &further)?;
        json.end()
    }
}

impl<'a> Report<'a> {
    fn tree(&self, tree: usize) -> TreeJson<'a> {
        let planned = &self.trees.trees[tree];
        let plan = &planned.plan;
        let nodes = plan.nodes.iter().filter_map(|node| {
            Some(PathJson { child: &node.name, node: &plan.nodes[node.parent?].name, cables: self.cables(&node.path) })
        });
        let ranks = plan.ranks.iter().map(|rank| PathJson {
            child: &rank.name,
            node: &plan.nodes[rank.leaf].name,
            cables: self.cables(&rank.path),
        });
        TreeJson { share: planned.share, tree_gbits: planned.gbits, plan, paths: ranks.chain(nodes).collect() }
    }

    fn cables(&self, path: &[LinkId]) -> Vec<CableJson> {
        let end = |port: Port| format!("{}:{}", self.fabric.name(port.device), port.number);
        let cable = |link: &LinkId| {
            let link = self.fabric.link(*link);
            CableJson { ends: link.ends.map(end), gbits: link.rate.map(|rate| rate.gbits()) }
        };
        path.iter().map(cable).collect()
    }
}

impl Routing {
    /// What the routes are called.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::UpDown => "shortest up*/down* routes",
            Self::Shortest => "shortest routes, since up*/down* routes do not connect all nodes",
            Self::Tables => "the routes of the given forwarding tables, on the way up",
        }
    }
}

impl Trees {
    /// Render what the trees reach together, and each tree: lines of text, each ending in a newline.
    pub(super) fn to_text(&self, fabric: &Fabric, costs: &FabricCosts) -> String {
        let kind = match self.bound.kind {
            BoundKind::MinCut => "min-cut bound",
            BoundKind::Cuts => "bound by cuts around hosts, leaves and pods",
        };
        let count = self.trees.len();
        let mut text = format!(
            "{count} {}: rate {:.1} of {:.1} Gbit/s ({kind}, at {}); limited by {}\n",
            plural(count, "tree"),
            self.gbits,
            self.bound.gbits,
            self.bound.at,
            self.limit_text(fabric)
        );
        let times: Vec<String> =
            self.times.iter().map(|(size, time)| format!("{} {}", bytes(*size), seconds(*time))).collect();
        let _ = writeln!(text, "predicted: {}; a message of one packet takes tree 0 alone", times.join(", "));
        text += &self.trees[0].plan.assumed_text(costs);
        for (index, tree) in self.trees.iter().enumerate() {
            let share = tree.share * 100.0;
            let _ = writeln!(text, "\ntree {index}: {share:.1} % of a message, {:.1} Gbit/s; alone:", tree.gbits);
            text += &tree.plan.to_text();
        }
        text
    }

    /// What keeps the trees from a higher rate.
    pub(super) fn limit_text(&self, fabric: &Fabric) -> String {
        match self.limited_by {
            TreesLimit::Bound => "the bound".into(),
            TreesLimit::Count => format!("the number of trees, {}", self.trees.len()),
            TreesLimit::Bottleneck(bottleneck) => self.trees[0].plan.bottleneck_text(fabric, bottleneck),
        }
    }
}
