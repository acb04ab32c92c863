//! Renders a plan as text for a terminal, as a Graphviz graph, and as JSON.
//!
//! The text tree stays readable for hundreds of hosts: ranks are folded into ranges if they would not fit on a screen.

use super::{Bottleneck, BoundKind, Child, FabricCosts, Plan, PlanNode, RateBound};
use crate::topo::{Device, Fabric, LinkId};
use serde::ser::{Serialize, SerializeStruct, Serializer};
use std::fmt::Write as _;
use sumac_hal::ids::Rank;

impl Plan {
    /// Render the tree as lines of text for a terminal, ending in a newline.
    ///
    /// Up to 24 ranks are listed by host; more are folded into ranges, `0-7` or with a stride `0-28:4`.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{} {} in {} {}, {} {}, at most {} children a node, at most {} tree {} a cable{}\n",
            self.ranks.len(),
            plural(self.ranks.len(), "rank"),
            self.nodes.len(),
            plural(self.nodes.len(), "node"),
            self.levels,
            plural(self.levels, "level"),
            self.max_children,
            self.max_link_sharing,
            plural(self.max_link_sharing, "edge"),
            if self.aligned { ", aligned" } else { "" },
        );
        let times: Vec<String> =
            self.prediction.times.iter().map(|(size, time)| format!("{} {}", bytes(*size), seconds(*time))).collect();
        let _ = writeln!(text, "predicted: {}; {}", times.join(", "), self.proof());
        let mut open = vec![(0, String::new(), String::new())];
        while let Some((index, prefix, below)) = open.pop() {
            let node = &self.nodes[index];
            let lines = self.rank_lines(node);
            let folded = if lines.is_empty() { fold(&ranks_of(node)) } else { String::new() };
            let ranks = if folded.is_empty() { folded } else { format!("  ranks {folded}") };
            let count = node.children.len();
            let _ = writeln!(text, "{prefix}{}  {count} {}{ranks}", node.name, children_of(count));
            let nodes: Vec<usize> = nodes_of(node).collect();
            for (nth, line) in lines.iter().enumerate() {
                let is_last = nodes.is_empty() && nth + 1 == lines.len();
                let _ = writeln!(text, "{below}{}{line}", if is_last { "└─ " } else { "├─ " });
            }
            // Pushed in reverse, so that they are popped in order.
            for (nth, child) in nodes.iter().enumerate().rev() {
                let (branch, beside) = if nth + 1 == nodes.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
                open.push((*child, format!("{below}{branch}"), format!("{below}{beside}")));
            }
        }
        text
    }

    /// How far the tree is proved to be the fastest.
    fn proof(&self) -> String {
        match self.gap {
            _ if self.optimal => "optimal by these times".into(),
            gap => format!("not proved optimal, within {:.1} % of a lower bound", (gap * 100.0).max(0.1)),
        }
    }

    /// Describe what limits a rate.
    pub(super) fn bottleneck_text(&self, fabric: &Fabric, bottleneck: Bottleneck) -> String {
        match bottleneck {
            Bottleneck::Cable { link, edges } => {
                format!("{edges} {} on the cable {}", plural(edges as usize, "edge"), cable(fabric, link))
            }
            Bottleneck::Port { node, children } => {
                format!("{children} {} at the port of {}", children_of(children), self.nodes[node].name)
            }
            Bottleneck::Window => "a rank's window".into(),
        }
    }

    /// See [`super::Planner::rate_text`].
    pub(super) fn rate_text(&self, fabric: &Fabric, bound: &RateBound, costs: &FabricCosts) -> String {
        let kind = match bound.kind {
            BoundKind::MinCut => "min-cut bound",
            BoundKind::Cuts => "bound by cuts around hosts, leaves and pods",
        };
        let limit = self.bottleneck_text(fabric, self.prediction.bottleneck);
        let (rate, most) = (self.prediction.gbits(), bound.gbits);
        let mut text = format!("rate: {rate:.1} of {most:.1} Gbit/s ({kind}, at {}); limited by {limit}\n", bound.at);
        text += &self.assumed_text(costs);
        text
    }

    /// What the prediction assumes, as a line.
    pub(super) fn assumed_text(&self, costs: &FabricCosts) -> String {
        let mut text = format!("assumed: {}", self.routing.name());
        if !costs.calibrated {
            text.push_str("; times of data sheets, not calibrated");
        }
        if self.unrated > 0 {
            let cables = plural(self.unrated, "cable");
            let _ = write!(text, "; {} Gbit/s for {} {cables} of unknown rate", costs.assumed_gbits, self.unrated);
        }
        text.push('\n');
        text
    }

    /// Render the tree as a Graphviz `digraph`. Edges point in the direction of contributions.
    pub fn to_dot(&self) -> String {
        let mut dot = "digraph plan {\n  rankdir=BT;\n  node [shape=box];\n".to_owned();
        for (index, node) in self.nodes.iter().enumerate() {
            let _ = writeln!(dot, "  n{index} [label=\"{}\\nlevel {}\"];", escaped(&node.name), node.level);
            if let Some(parent) = node.parent {
                let _ = writeln!(dot, "  n{index} -> n{parent};");
            }
        }
        for rank in &self.ranks {
            let number = rank.rank.0;
            let label = escaped(&rank.name);
            let _ = writeln!(dot, "  r{number} [shape=ellipse, label=\"{}\\n{label}\"];", rank.rank);
            let _ = writeln!(dot, "  r{number} -> n{};", rank.leaf);
        }
        dot.push_str("}\n");
        dot
    }

    /// One line per rank of the node, or none if ranks are folded.
    fn rank_lines(&self, node: &PlanNode) -> Vec<String> {
        if self.ranks.len() > LISTED_RANKS_MAX {
            return Vec::new();
        }
        ranks_of(node).into_iter().map(|rank| format!("{}  {}", Rank(rank), self.ranks[rank as usize].name)).collect()
    }
}

/// Maximum number of ranks that the text tree lists one by one.
const LISTED_RANKS_MAX: usize = 24;

pub(super) fn plural(count: usize, word: &'static str) -> String {
    if count == 1 { word.into() } else { format!("{word}s") }
}

/// A cable by its ends.
pub(super) fn cable(fabric: &Fabric, link: LinkId) -> String {
    let end = |port: crate::topo::Port| {
        let name = match port.device {
            Device::Switch(switch) => &fabric.switch(switch).name,
            Device::Host(host) => &fabric.host(host).name,
        };
        format!("{name}[{}]", port.number)
    };
    fabric.link(link).ends.map(end).join(" to ")
}

/// A size in the largest unit that divides it.
pub(super) fn bytes(size: u64) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let fits = units.iter().find(|(unit, _)| size >= *unit && size.is_multiple_of(*unit));
    fits.map_or(format!("{size} B"), |(unit, name)| format!("{} {name}", size / unit))
}

/// A time in the unit that reads best.
pub(super) fn seconds(time: f64) -> String {
    match time {
        ..1e-3 => format!("{:.2} us", time * 1e6),
        ..1.0 => format!("{:.2} ms", time * 1e3),
        _ => format!("{time:.2} s"),
    }
}

pub(super) fn children_of(count: usize) -> &'static str {
    if count == 1 { "child" } else { "children" }
}

fn ranks_of(node: &PlanNode) -> Vec<u32> {
    let rank = |child: &Child| if let Child::Rank(rank) = child { Some(rank.0) } else { None };
    node.children.iter().filter_map(rank).collect()
}

fn nodes_of(node: &PlanNode) -> impl Iterator<Item = usize> {
    node.children.iter().filter_map(|child| if let Child::Node(index) = child { Some(*index) } else { None })
}

/// Fold ascending numbers into ranges: `0-7,9`, or with a stride for at least four numbers: `0-12:4`.
fn fold(numbers: &[u32]) -> String {
    let mut parts = Vec::new();
    let mut rest = numbers;
    while let [first, tail @ ..] = rest {
        let stride = tail.first().map_or(1, |second| second - first);
        let run = 1 + tail.iter().zip(1u32..).take_while(|(number, nth)| **number == first + nth * stride).count();
        let last = rest[run - 1];
        let taken = match (run, stride) {
            (2.., 1) => {
                parts.push(format!("{first}-{last}"));
                run
            }
            (4.., _) => {
                parts.push(format!("{first}-{last}:{stride}"));
                run
            }
            _ => {
                parts.push(first.to_string());
                1
            }
        };
        rest = &rest[taken..];
    }
    parts.join(",")
}

fn escaped(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"")
}

impl Serialize for Plan {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let nodes: Vec<NodeJson<'_>> = self.nodes.iter().map(|node| self.node_json(node)).collect();
        let ranks: Vec<RankJson<'_>> = self
            .ranks
            .iter()
            .map(|rank| RankJson {
                rank: rank.rank.0,
                host: &rank.name,
                guid: &rank.guid,
                leaf: &self.nodes[rank.leaf].name,
            })
            .collect();
        let time = |(bytes, seconds): &(u64, f64)| TimeJson { bytes: *bytes, seconds: *seconds };
        let times: Vec<TimeJson> = self.prediction.times.iter().map(time).collect();
        let mut plan = serializer.serialize_struct("Plan", 11)?;
        plan.serialize_field("levels", &self.levels)?;
        plan.serialize_field("root", &self.root().name)?;
        plan.serialize_field("max_children", &self.max_children)?;
        plan.serialize_field("max_link_sharing", &self.max_link_sharing)?;
        plan.serialize_field("aligned", &self.aligned)?;
        plan.serialize_field("optimal", &self.optimal)?;
        plan.serialize_field("gap", &self.gap)?;
        plan.serialize_field("gbits", &self.prediction.gbits())?;
        plan.serialize_field("times", &times)?;
        plan.serialize_field("nodes", &nodes)?;
        plan.serialize_field("ranks", &ranks)?;
        plan.end()
    }
}

impl Plan {
    fn node_json<'a>(&'a self, node: &'a PlanNode) -> NodeJson<'a> {
        let child = |child: &Child| match child {
            Child::Node(index) => self.nodes[*index].name.clone(),
            Child::Rank(rank) => rank.to_string(),
        };
        NodeJson {
            name: &node.name,
            guid: &node.guid,
            level: node.level,
            parent: node.parent.map(|parent| self.nodes[parent].name.as_str()),
            children: node.children.iter().map(child).collect(),
        }
    }
}

#[derive(serde::Serialize)]
struct TimeJson {
    bytes: u64,
    seconds: f64,
}

#[derive(serde::Serialize)]
struct NodeJson<'a> {
    name: &'a str,
    guid: &'a str,
    level: usize,
    parent: Option<&'a str>,
    children: Vec<String>,
}

#[derive(serde::Serialize)]
struct RankJson<'a> {
    rank: u32,
    host: &'a str,
    guid: &'a str,
    leaf: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_fold_into_ranges_and_strides() {
        let golden: [(&[u32], &str); 7] = [
            (&[], ""),
            (&[3], "3"),
            (&[0, 1], "0-1"),
            (&[0, 1, 2, 7, 9], "0-2,7,9"),
            (&[0, 4, 8, 12], "0-12:4"),
            (&[0, 4, 8], "0,4,8"),
            (&[1, 5, 6, 7, 10, 13, 16, 19], "1,5-7,10-19:3"),
        ];
        for (numbers, text) in golden {
            assert_eq!(fold(numbers), text);
        }
    }
}
