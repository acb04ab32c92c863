//! Devices and ranks of a run before it begins, and the moments at which ranks call.

use super::cluster::Posts;
use super::memory::{Memory, OpMemory};
use super::options::{Draw, Options};
use super::ranks::Membership;
use super::repair::{Inbox, Repair, Way};
use super::report::Violation;
use super::wiring::{Wiring, slots_per_shard};
use crate::oracle::{input, weight};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use sumac::transport::packets::{Endpoint, EndpointError, Progress};
use sumac_device::{Child, Group, Node, NodeConfig, Slot, Storage};
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
    /// Where its endpoint was seen last.
    pub(super) progress: Progress,
    /// Operations that it has called.
    pub(super) called: usize,
    /// How often it has lost its way.
    pub(super) view: u32,
    /// The operation that is its endpoint's first.
    pub(super) first: usize,
    pub(super) way: Way,
    /// If its tree is lost.
    pub(super) repair: Option<Repair>,
    /// By view.
    pub(super) inboxes: BTreeMap<u32, Inbox>,
    /// Who has come to operations that run by schedules.
    pub(super) entered: BTreeMap<usize, BTreeSet<usize>>,
    /// Below, it has said so itself.
    pub(super) entered_below: usize,
    pub(super) membership: Membership,
}

impl Member {
    /// `life` counts how often all began again.
    pub(super) fn new(
        options: &Options,
        wiring: &Wiring,
        (rank, group): (usize, usize),
        life: u64,
        epoch: Epoch,
    ) -> Self {
        let ops = 0..options.groups[group].ops.len();
        Self {
            endpoint: options.planted.endpoint(Endpoint::new(wiring.endpoint(options, (rank, group), life, epoch))),
            memory: Memory { first: 0, ops: ops.map(|op| OpMemory::before(options, life, group, rank, op)).collect() },
            done: 0,
            error: None,
            progress: Progress::default(),
            called: 0,
            view: 0,
            first: 0,
            way: Way::Tree(options.repairs().then_some(group)),
            repair: None,
            inboxes: BTreeMap::new(),
            entered: BTreeMap::new(),
            entered_below: 0,
            membership: Membership::default(),
        }
    }
}

/// Return one element of what `rank` puts into operation `op`. What it put there in an earlier life was something else,
/// so that a packet of that life can't pass for one of this.
pub(super) fn element(options: &Options, life: u64, group: usize, rank: usize, op: usize, i: u64) -> Vec<u8> {
    let desc = options.call(group, rank, op);
    let dtype = desc.dtype.expect("only operations with elements are asked");
    let coordinates = [options.seed.wrapping_add(life << 40), group as u64, rank as u64, op as u64, i];
    match desc.op {
        Some(reduce) => input(dtype, reduce, options.order(group) == Order::Arrival, &coordinates),
        // What is only moved may be any bits.
        None => weight(&coordinates).to_le_bytes()[..dtype.size_bytes()].to_vec(),
    }
}

/// The memory of one shard of a device.
pub(super) struct Tables {
    groups: Vec<Option<Group>>,
    trees: Vec<Option<TreeConfig>>,
    children: Vec<Child>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

impl Tables {
    /// Exactly what the device's places in all groups need.
    pub(super) fn new(options: &Options, wirings: &[Wiring], device: usize) -> Self {
        let slots = usize::from(slots_per_shard(options));
        let (mut groups, mut children, mut bytes) = (0, 0, 0);
        for group in 0..options.all_groups() {
            let nodes = &wirings[options.tree(group)].nodes;
            let place = nodes.iter().filter(|node| node.device == device).map(|node| node.children).max();
            // Any place of a tree may be a device's after a repair.
            let widest = nodes.iter().map(|node| node.children).max().filter(|_| options.repairs());
            let Some(place) = widest.or(place) else { continue };
            groups += 1;
            children += usize::from(place);
            bytes += slots * options.order(group).stages(place) * usize::from(options.chunk_len_bytes);
        }
        // What lies between places of different sizes is of no use to anybody.
        let room = if options.repairs() { 2 } else { 1 };
        (children, bytes) = (room * children, room * bytes);
        // The table of children also bounds the trees that a device takes, so there is room for the widest of each.
        let widest = wirings.iter().flat_map(|wiring| &wiring.nodes).map(|node| usize::from(node.children)).max();
        Self {
            groups: (0..groups).map(|_| None).collect(),
            trees: vec![None; wirings.len() + room * options.groups.len()],
            children: vec![Child::EMPTY; children.max(widest.unwrap_or(0))],
            slots: vec![Slot::EMPTY; room * groups * slots],
            bytes: vec![0; bytes],
        }
    }
}

/// Boot one shard of a device, with empty tables.
pub(super) fn boot<'m>(options: &Options, device: usize, shard: u16, life: u64, tables: &'m mut Tables) -> Node<'m> {
    let config = NodeConfig {
        shard: Shard::new(shard, options.shards).expect("drawn within limits"),
        boot_id: BootId(crate::oracle::weight(&[options.seed, device as u64, life])),
        max_packet_len_bytes: 65_507,
        receive_buffer_bytes: options.link.receive_queue_bytes.unwrap_or(1 << 20),
    };
    let storage = Storage {
        groups: &mut tables.groups,
        trees: &mut tables.trees,
        children: &mut tables.children,
        slots: &mut tables.slots,
        bytes: &mut tables.bytes,
    };
    options.planted.node(Node::new(config, storage))
}

/// Give a booted shard its places in all trees and groups.
pub(super) fn install(
    node: &mut Node<'_>,
    options: &Options,
    wirings: &[Wiring],
    device: usize,
    epoch: Epoch,
    now: Instant,
) -> Result<(), Violation> {
    let mut ask = |request: Request| match node.control(&request, now) {
        Response::Done => Ok(()),
        response => Err(Violation::Refused { device, response: format!("{response:?}") }),
    };
    let place = |wiring: &Wiring| wiring.nodes.iter().position(|node| node.device == device);
    for wiring in wirings {
        if let Some(node) = place(wiring) {
            ask(Request::InstallTree(wiring.tree(node, options.shards)))?;
        }
    }
    for group in 0..options.all_groups() {
        let wiring = &wirings[options.tree(group)];
        if let Some(node) = place(wiring) {
            ask(Request::CreateGroup(wiring.group(options, node, group, epoch)))?;
        }
    }
    Ok(())
}

/// Ranks call in order, each a little late, from `start` on.
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
