//! Predicted times as linear forms of the table's constants, so that constants can be fitted to measured times.

use super::table::{CONSTANTS, Constants};
use super::{JobFacts, TreeFacts, TreeTransport};
use crate::exec::board::is_for_board;
use crate::schedule::Algorithm;
use sumac_hal::op::{Collective, OpDesc};

/// How often each constant is paid, in the order of [`Constants::to_array`].
pub(super) type Terms = [f64; CONSTANTS];

/// A predicted time: `sum`, and the slowest of what overlaps.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Form {
    sum: Terms,
    either: [Terms; 2],
    /// Seconds that the bytes take over the busiest cable; 0 if that is not known.
    links_s: f64,
}

impl Form {
    /// The terms that decide with these constants, and the seconds that do not depend on them.
    pub(super) fn linear_at(&self, constants: &Terms) -> (Terms, f64) {
        let [a, b] = &self.either;
        let slower = if dot(a, constants) >= dot(b, constants) { a } else { b };
        if self.links_s > dot(slower, constants) {
            return (self.sum, self.links_s);
        }
        (std::array::from_fn(|at| self.sum[at] + slower[at]), 0.0)
    }

    /// The time in seconds.
    pub(super) fn seconds(&self, constants: &Constants) -> f64 {
        let constants = constants.to_array();
        let (terms, rest_s) = self.linear_at(&constants);
        dot(&terms, &constants) + rest_s
    }
}

pub(super) fn dot(terms: &Terms, constants: &Terms) -> f64 {
    terms.iter().zip(constants).map(|(often, constant)| often * constant).sum()
}

/// What an operation moves through the busiest parts of a tree, as multiples of its size.
struct Traffic {
    /// Sent and received by a rank.
    rank: f64,
    /// Received by a node with `c` children.
    taken: f64,
    /// Sent by it.
    sent: f64,
}

impl Traffic {
    fn new(desc: &OpDesc, ranks: u32, children: f64) -> Self {
        let block = 1.0 / f64::from(ranks);
        let (rank, taken, sent) = match desc.collective {
            Collective::Reduce => (2.0, children, 1.0),
            Collective::Broadcast => (1.0, 1.0, children),
            Collective::ReduceScatter => (1.0 + block, children, 1.0),
            Collective::AllGather => (1.0 + block, 1.0, children),
            _ => (2.0, children, children),
        };
        Self { rank, taken, sent }
    }
}

/// The time of an operation in the tree.
pub(super) fn tree_form(facts: &JobFacts, tree: &TreeFacts, desc: &OpDesc) -> Form {
    let n = super::bytes(desc);
    let traffic = Traffic::new(desc, facts.ranks, f64::from(tree.max_children));
    let served = traffic.taken + traffic.sent;
    let chunk = f64::from(tree.chunk_len_bytes.max(1));
    let chunks = (n / chunk).ceil().max(1.0);
    let combined = if desc.collective.reduces() { traffic.taken * n } else { 0.0 };
    // From a rank, or from a leaf, through `levels` of nodes that exchange packets.
    let packets = |levels: u32, ranks_sharing: u32| {
        let fill = f64::from(levels.saturating_sub(1)) * n.min(chunk);
        let latency = Constants { alpha_tree_s: 2.0 * f64::from(levels), ..Constants::default() };
        let moved = Constants {
            packet_node_s: served * chunks,
            beta_tree_s: traffic.rank * n,
            beta_tree_shared_s: traffic.rank * n * f64::from(ranks_sharing.saturating_sub(1)),
            beta_node_s: served * (n + fill),
            gamma_s: combined,
            ..Constants::default()
        };
        (latency.to_array(), moved.to_array())
    };
    let links = tree.links.filter(|_| tree.crosses_cables(facts.ranks));
    let links_s = links.map_or(0.0, |links| links.tree_byte_s() * n);
    if !matches!(tree.transport(facts.ranks), TreeTransport::Shm | TreeTransport::Rdma) {
        let (latency, moved) = packets(tree.levels, facts.ranks_per_host);
        return Form { sum: latency, either: [moved, [0.0; CONSTANTS]], links_s };
    }
    let (above, moved_above) = match tree.levels {
        0 | 1 => ([0.0; CONSTANTS], [0.0; CONSTANTS]),
        levels => packets(levels - 1, 1),
    };
    let leaf = Constants { alpha_zero_copy_s: 2.0, ..Constants::default() }.to_array();
    let moved = Constants { chunk_zero_copy_s: served * chunks, beta_zero_copy_s: served * n, ..Constants::default() };
    // Chunks pass the leaf while others are above it.
    Form { sum: std::array::from_fn(|at| leaf[at] + above[at]), either: [moved.to_array(), moved_above], links_s }
}

/// The time for which the ranks of a host copy plain memory into that which they share with a device, and out of it,
/// all at once. `None` where they share none.
pub(super) fn copies_form(facts: &JobFacts, tree: &TreeFacts, desc: &OpDesc) -> Option<Form> {
    if !matches!(tree.transport(facts.ranks), TreeTransport::Shm | TreeTransport::Rdma) {
        return None;
    }
    let bytes = Traffic::new(desc, facts.ranks, 0.0).rank * super::bytes(desc);
    let by_others = bytes * f64::from(facts.ranks_per_host.saturating_sub(1));
    let copied = Constants { beta_shm_step_s: bytes, beta_shm_shared_s: by_others, ..Constants::default() };
    Some(Form { sum: copied.to_array(), either: [[0.0; CONSTANTS]; 2], links_s: 0.0 })
}

/// The time of an operation by a schedule, by its own formula for elements of this operation's size.
pub(super) fn schedule_form(facts: &JobFacts, desc: &OpDesc, algorithm: &Algorithm) -> Form {
    let cost = algorithm.cost(facts.ranks, facts.shape, usize::try_from(desc.count).unwrap_or(usize::MAX));
    let each = desc.element_bytes() as f64;
    let sent = cost.path_elements * each;
    // What the other ranks of a host send meanwhile: its processors move all of it.
    let share = f64::from(facts.ranks_per_host) / f64::from(facts.ranks.max(1));
    let messages = (cost.messages * share - cost.steps).max(cost.extra_messages);
    let moved_by_others = (cost.moved_elements * each * share - sent).max(0.0);
    let gamma_s = cost.reduced_elements * each;
    let is_one_host = facts.ranks_per_host == facts.ranks;
    let (latency, moved) = if is_one_host && is_for_board(desc, algorithm.path(), facts.ranks) {
        let post = Constants { alpha_post_s: cost.steps, ..Constants::default() };
        (post, Constants { beta_shm_step_s: sent, gamma_s, ..Constants::default() })
    } else if is_one_host {
        let steps = cost.latencies();
        let latency = Constants { alpha_shm_step_s: steps, alpha_shm_shared_s: messages, ..Constants::default() };
        let moved = Constants { beta_shm_step_s: sent, beta_shm_shared_s: moved_by_others, ..Constants::default() };
        (latency, Constants { gamma_s, ..moved })
    } else {
        let steps = cost.latencies();
        let latency = Constants { alpha_step_s: steps, alpha_shared_s: messages, ..Constants::default() };
        let moved = Constants { beta_step_s: sent, beta_shared_s: moved_by_others, ..Constants::default() };
        (latency, Constants { gamma_s, ..moved })
    };
    let links_s = facts.links().map_or(0.0, |links| links.schedule_byte_s(algorithm.path()) * sent);
    Form { sum: latency.to_array(), either: [moved.to_array(), [0.0; CONSTANTS]], links_s }
}
