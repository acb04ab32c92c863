//! Initial state of a run: devices, ranks and the times of calls.

use super::cluster::Posts;
use super::memory::{Memory, OpMemory};
use super::options::{Draw, Options};
use super::ranks::Membership;
use super::report::Violation;
use super::route::Route;
use super::wiring::{Wiring, slots_for, slots_per_shard};
use crate::oracle::{input, weight};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::transport::packets::{Endpoint, EndpointConfig, EndpointError, Progress};
use sumac_device::{Child, Group, Hop, Node, NodeConfig, Slot, Storage};
use sumac_hal::ctrl::{Order, Request, Response, TreeConfig};
use sumac_hal::ids::{BootId, Epoch};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;

/// A rank in a group.
pub(super) struct Member {
    pub(super) endpoint: Endpoint,
    pub(super) memory: Memory,
    /// Completions seen.
    pub(super) done: u64,
    pub(super) error: Option<EndpointError>,
    /// Last observed progress of its endpoint.
    pub(super) progress: Progress,
    /// Operations that it has called.
    pub(super) called: usize,
    /// How often it has lost its tree.
    pub(super) view: u32,
    /// The first operation of its endpoint.
    pub(super) first: usize,
    pub(super) route: Route,
    /// Maximum window of its endpoint.
    pub(super) window: u16,
    /// The chunk of its endpoint, in bytes.
    pub(super) chunk_len_bytes: u16,
    /// Ranks that have entered each host collective.
    pub(super) entered: BTreeMap<usize, BTreeSet<usize>>,
    /// Operations below have been announced by this rank.
    pub(super) entered_below: usize,
    pub(super) membership: Membership,
}

impl Member {
    /// Create a rank with an endpoint that is configured like this. `incarnation` counts the restarts of all ranks.
    pub(super) fn new(
        options: &Options,
        (rank, group): (usize, usize),
        incarnation: u64,
        (config, route): (EndpointConfig, Route),
    ) -> Self {
        let ops = 0..options.groups[group].ops.len();
        Self {
            window: config.window_max,
            chunk_len_bytes: config.chunk_len_bytes,
            endpoint: options.planted.endpoint(Endpoint::new(config)),
            memory: Memory {
                first: 0,
                posted: Vec::new(),
                ops: ops.map(|op| OpMemory::before(options, incarnation, group, rank, op)).collect(),
            },
            done: 0,
            error: None,
            progress: Progress::default(),
            called: 0,
            view: 0,
            first: 0,
            route,
            entered: BTreeMap::new(),
            entered_below: 0,
            membership: Membership::default(),
        }
    }
}

/// Return one element of what `rank` contributes to operation `op`. It differs between incarnations, so that a packet
/// of an earlier one shows.
pub(super) fn element(options: &Options, incarnation: u64, group: usize, rank: usize, op: usize, i: u64) -> Vec<u8> {
    let desc = options.call(group, rank, op);
    let dtype = desc.dtype.expect("only operations with elements are asked");
    let coordinates = [options.seed.wrapping_add(incarnation << 40), group as u64, rank as u64, op as u64, i];
    match desc.op {
        Some(reduce) => input(dtype, reduce, options.order(group) == Order::Arrival, &coordinates),
        // Data that is only moved may have any bits.
        None => weight(&coordinates).to_le_bytes()[..dtype.size_bytes()].to_vec(),
    }
}

/// The memory of one shard of a device.
pub(super) struct Tables {
    groups: Vec<Option<Group>>,
    trees: Vec<Option<TreeConfig>>,
    children: Vec<Child>,
    hops: Vec<Hop>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

impl Tables {
    /// The exact sizes that the device needs for its nodes of all groups.
    pub(super) fn new(options: &Options, wirings: &[Wiring], device: usize) -> Self {
        // A controller chooses the slots itself.
        let slots = if options.recovers() { slots_for(options) } else { slots_per_shard(options) };
        let slots = usize::from(slots);
        let (mut groups, mut children, mut bytes) = (0, 0, 0);
        for group in 0..options.all_groups() {
            let nodes = &wirings[options.tree(group)].nodes;
            let place = nodes.iter().filter(|node| node.device == device).map(|node| node.children).max();
            // A controller may give a device any place of a tree.
            let widest = nodes.iter().map(|node| node.children).max().filter(|_| options.recovers());
            let Some(place) = widest.or(place) else { continue };
            groups += 1;
            children += usize::from(place);
            bytes += slots * options.order(group).stages(place) * usize::from(options.chunk_len_bytes);
        }
        // Gaps between allocations of different sizes are unusable.
        let room = if options.recovers() { 2 } else { 1 };
        (children, bytes) = (room * children, room * bytes);
        // The table of children also bounds the trees that a device accepts, so there is room for the widest of each.
        let widest = wirings.iter().flat_map(|wiring| &wiring.nodes).map(|node| usize::from(node.children)).max();
        Self {
            groups: (0..groups).map(|_| None).collect(),
            trees: vec![None; wirings.len() + room * options.groups.len()],
            children: vec![Child::EMPTY; children.max(widest.unwrap_or(0))],
            hops: vec![Hop::EMPTY; groups],
            slots: vec![Slot::EMPTY; room * groups * slots],
            bytes: vec![0; bytes],
        }
    }
}

/// Boot one shard of a device, with empty tables.
pub(super) fn boot<'m>(
    options: &Options,
    device: usize,
    shard: u16,
    incarnation: u64,
    tables: &'m mut Tables,
) -> Node<'m> {
    let config = NodeConfig {
        shard: Shard::new(shard, options.shards).expect("drawn within limits"),
        boot_id: boot_id(options, device, incarnation),
        max_packet_len_bytes: 65_507,
        receive_buffer_bytes: options.link.receive_queue_bytes.unwrap_or(1 << 20),
    };
    let storage = Storage {
        groups: &mut tables.groups,
        trees: &mut tables.trees,
        children: &mut tables.children,
        hops: &mut tables.hops,
        slots: &mut tables.slots,
        bytes: &mut tables.bytes,
    };
    options.planted.node(Node::new(config, storage))
}

pub(super) fn boot_id(options: &Options, device: usize, incarnation: u64) -> BootId {
    BootId(weight(&[options.seed, device as u64, incarnation]))
}

/// Install all trees and groups of a booted shard.
pub(super) fn install(
    node: &mut Node<'_>,
    options: &Options,
    wirings: &[Wiring],
    device: usize,
    epoch: Epoch,
    now: Instant,
) -> Result<(), Violation> {
    let mut send = |request: Request| match node.control(&request, now) {
        Response::Done => Ok(()),
        response => Err(Violation::Refused { device, response: format!("{response:?}") }),
    };
    let place = |wiring: &Wiring| wiring.nodes.iter().position(|node| node.device == device);
    for wiring in wirings {
        if let Some(node) = place(wiring) {
            send(Request::InstallTree(wiring.tree(node, options.shards)))?;
        }
    }
    for group in 0..options.all_groups() {
        let wiring = &wirings[options.tree(group)];
        if let Some(node) = place(wiring) {
            send(Request::CreateGroup(wiring.group(options, node, group, epoch)))?;
        }
    }
    Ok(())
}

/// Draw the times of calls: ranks call in order, each a little late, from `start` on.
pub(super) fn draw_posts(options: &Options, start: Instant) -> Posts {
    let mut draw = Draw::new(options.seed ^ 0x706f_7374);
    let mut posts = BTreeMap::new();
    let mut number = 0;
    for rank in 0..options.ranks {
        for (group, described) in options.groups.iter().enumerate() {
            let mut at = start;
            for op in 0..described.ops.len() {
                at = at + Duration::from_nanos(draw.below(options.skew_max.as_nanos() as u64 + 1));
                number += 1;
                posts.insert((at, number), (rank, group, op));
            }
        }
    }
    posts
}
