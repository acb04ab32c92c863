//! Why there is no plan.

use super::{Refusal, select};

/// Why there is no plan: the first condition that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The selection is empty.
    #[error("no host is selected; a tree needs at least one")]
    NoHosts,
    /// More hosts are requested than the fabric has.
    #[error("{asked} hosts requested, but the fabric has {available}")]
    TooManyHosts {
        /// The requested number.
        asked: usize,
        /// The number of hosts in the fabric.
        available: usize,
    },
    /// No host has this name or GUID.
    #[error("no host is named `{name}`{}", select::hint(near))]
    UnknownHost {
        /// The requested name.
        name: String,
        /// Similar names, the nearest first.
        near: Vec<String>,
    },
    /// Several hosts have this description.
    #[error("{} hosts are named `{name}`; select one by its GUID: {}", guids.len(), select::some_of(guids))]
    AmbiguousHost {
        /// The requested name.
        name: String,
        /// The GUIDs of those hosts.
        guids: Vec<String>,
    },
    /// A host is listed twice.
    #[error("host `{name}` is listed twice; a host holds one rank")]
    DuplicateHost {
        /// Its name.
        name: String,
    },
    /// The child limit is too small to combine anything.
    #[error("a limit of {max_children} children is too small; it must be at least 2")]
    ChildLimitTooSmall {
        /// The limit.
        max_children: usize,
    },
    /// No switch can be a node.
    #[error("none of the {switches} switches can aggregate; `{first}`: {reason}")]
    NoUsableNode {
        /// The number of switches.
        switches: usize,
        /// One of them.
        first: String,
        /// Why it cannot.
        reason: Refusal,
    },
    /// A host cannot reach any usable aggregation node.
    #[error("host `{host}` has no path to a switch that can aggregate; check its cables")]
    Isolated {
        /// Its name.
        host: String,
    },
    /// No aggregation node is reachable from all hosts.
    #[error("no root reaches all hosts: `{one}` and `{other}` are in disconnected parts of the fabric")]
    Disconnected {
        /// A host.
        one: String,
        /// A host in another part.
        other: String,
    },
    /// A node has too many children, and no free node can take some of them.
    #[error(
        "`{node}` would have {children} children, but its limit is {limit} and no free aggregation node within reach can \
         take {chunk} of them; raise the limit or use fewer hosts"
    )]
    ChildLimit {
        /// The node.
        node: String,
        /// The number of children.
        children: usize,
        /// The node's limit.
        limit: usize,
        /// The number of children that a further node would take.
        chunk: usize,
    },
}
