//! Renders a plan as text for a terminal, as a Graphviz graph, and as JSON.
//!
//! The text tree stays readable for hundreds of hosts: ranks are folded into ranges if they would not fit on a screen.

use super::{Child, Plan, PlanNode};
use serde::ser::{Serialize, SerializeStruct, Serializer};
use std::fmt::Write as _;
use sumac_hal::ids::Rank;

impl Plan {
    /// Render the tree as lines of text for a terminal, ending in a newline.
    ///
    /// Up to 24 ranks are listed by host; more are folded into ranges, `0-7` or with a stride `0-28:4`.
    pub fn to_text(&self) -> String {
        let mut text = format!(
            "{} {} in {} {}, {} {}, at most {} children a node, at most {} tree {} a cable{}{}\n",
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
            if self.optimal { "" } else { ", not proved optimal" },
        );
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

fn plural(count: usize, word: &'static str) -> String {
    if count == 1 { word.into() } else { format!("{word}s") }
}

fn children_of(count: usize) -> &'static str {
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
        let mut plan = serializer.serialize_struct("Plan", 8)?;
        plan.serialize_field("levels", &self.levels)?;
        plan.serialize_field("root", &self.root().name)?;
        plan.serialize_field("max_children", &self.max_children)?;
        plan.serialize_field("max_link_sharing", &self.max_link_sharing)?;
        plan.serialize_field("aligned", &self.aligned)?;
        plan.serialize_field("optimal", &self.optimal)?;
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
