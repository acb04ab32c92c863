//! One run: the event loop and its checks.

use super::net::Fabric;
use super::options::{Draw, Options};
use super::wiring::{Wiring, node_addr, owner, rank_addr, slots_per_shard};
use crate::oracle::{expected, input};
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::endpoint::{Buffers, Endpoint, EndpointError, Event, OpId};
use sumac_device::{Child, Group, Node, NodeConfig, Slot, Storage};
use sumac_hal::ctrl::{Counters, Order, Request, Response, TreeConfig};
use sumac_hal::ids::BootId;
use sumac_hal::op::{OpDesc, Path, ReduceOp};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use thiserror::Error;

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A rank has another result than the oracle.
    #[error("group {group} rank {rank} operation {op}: element {element} is {found:02x?}, expected {expected:02x?}")]
    Wrong {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// The operation's index.
        op: usize,
        /// The first wrong element.
        element: usize,
        /// Its bytes.
        found: Vec<u8>,
        /// The oracle's.
        expected: Vec<u8>,
    },
    /// Nothing happens any more, or it takes too long, and somebody still waits.
    #[error("hang at {at:?}: {waiting} operations are not complete")]
    Hang {
        /// The virtual time.
        at: Duration,
        /// Operations without an answer.
        waiting: usize,
    },
    /// A rank was told of an error that nobody injected.
    #[error("group {group} rank {rank} failed: {error}")]
    Failed {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// What it was told.
        error: EndpointError,
    },
    /// An operation completed twice or out of order.
    #[error("group {group} rank {rank}: completion {found} came where {expected} was due")]
    Completion {
        /// The group's index.
        group: usize,
        /// The rank.
        rank: usize,
        /// What came.
        found: u64,
        /// What was due.
        expected: u64,
    },
    /// A device refused a valid request.
    #[error("node {node} refused: {response}")]
    Refused {
        /// The node's index.
        node: usize,
        /// What it said.
        response: String,
    },
}

/// What a run did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Hash over every delivery: equal for equal seeds.
    pub log_hash: u64,
    /// Virtual time until the last answer.
    pub took: Duration,
    /// Packets sent by all.
    pub packets: u64,
    /// The devices' counters, added up.
    pub counters: Counters,
    /// Contributions that ranks sent again.
    pub retransmits: u64,
}

/// A rank's buffers in one group, by operation.
struct Memory {
    buffers: Vec<Vec<u8>>,
}

impl Buffers for Memory {
    fn input(&self, op: OpId) -> &[u8] {
        &self.buffers[op.0 as usize]
    }

    fn output(&mut self, op: OpId) -> &mut [u8] {
        &mut self.buffers[op.0 as usize]
    }
}

struct Member {
    endpoint: Endpoint,
    memory: Memory,
    /// Completions seen.
    done: u64,
}

struct Tables {
    groups: Vec<Option<Group>>,
    trees: Vec<Option<TreeConfig>>,
    children: Vec<Child>,
    slots: Vec<Slot>,
    bytes: Vec<u8>,
}

struct Cluster<'o, 'm> {
    options: &'o Options,
    fabric: Fabric,
    nodes: Vec<Vec<Node<'m>>>,
    /// By rank, then group.
    members: Vec<Vec<Member>>,
    /// Operations still to be posted: (when, rank, group), in order.
    posts: BTreeMap<(Instant, u64), (usize, usize, OpDesc)>,
    now: Instant,
    buffer: Vec<u8>,
}

/// Run a cluster to its end.
///
/// # Errors
/// The first [`Violation`].
pub fn run(options: &Options) -> Result<Report, Violation> {
    let wiring = Wiring::new(options);
    let shards = usize::from(options.shards);
    let mut tables: Vec<Tables> =
        (0..wiring.nodes.len() * shards).map(|i| tables(options, wiring.nodes[i / shards].children)).collect();
    let mut lent = tables.iter_mut();
    let nodes = (0..wiring.nodes.len())
        .map(|node| {
            (0..options.shards)
                .map(|shard| new_node(options, &wiring, node, shard, lent.next().expect("one each")))
                .collect()
        })
        .collect::<Result<Vec<Vec<_>>, _>>()?;
    let members = (0..options.ranks)
        .map(|rank| (0..options.groups).map(|group| new_member(options, &wiring, rank, group)).collect())
        .collect();
    let f = options.faults;
    let faults = super::net::RandomFaults {
        loss: f.loss,
        duplicate: f.duplicate,
        reorder: f.reorder,
        corrupt: f.corrupt,
        delay_max: f.delay_max,
    };
    let fabric = Fabric::new(options.seed, faults);
    let mut cluster = Cluster {
        options,
        fabric,
        nodes,
        members,
        posts: draw_posts(options),
        now: Instant::ZERO,
        buffer: vec![0; 65536],
    };
    cluster.drive()?;
    cluster.check()?;
    Ok(cluster.report())
}

fn tables(options: &Options, children: u16) -> Tables {
    let slots = usize::from(slots_per_shard(options)) * options.groups;
    let stages = options.order.stages(children);
    Tables {
        groups: (0..options.groups).map(|_| None).collect(),
        trees: vec![None; 1],
        children: vec![Child::EMPTY; usize::from(children) * options.groups],
        slots: vec![Slot::EMPTY; slots],
        bytes: vec![0; slots * stages * usize::from(options.chunk_len_bytes)],
    }
}

fn new_node<'m>(
    options: &Options,
    wiring: &Wiring,
    node: usize,
    shard: u16,
    tables: &'m mut Tables,
) -> Result<Node<'m>, Violation> {
    let config = NodeConfig {
        shard: Shard::new(shard, options.shards).expect("drawn within limits"),
        boot_id: BootId(options.seed ^ node as u64),
        max_packet_len_bytes: 2048,
        receive_buffer_bytes: 1 << 20,
    };
    let storage = Storage {
        groups: &mut tables.groups,
        trees: &mut tables.trees,
        children: &mut tables.children,
        slots: &mut tables.slots,
        bytes: &mut tables.bytes,
    };
    let mut device = Node::new(config, storage);
    let groups = (0..options.groups).map(|group| Request::CreateGroup(wiring.group(options, node, group)));
    for request in std::iter::once(Request::InstallTree(wiring.tree(node, options.shards))).chain(groups) {
        let response = device.control(&request, Instant::ZERO);
        if response != Response::Done {
            return Err(Violation::Refused { node, response: format!("{response:?}") });
        }
    }
    Ok(device)
}

fn new_member(options: &Options, wiring: &Wiring, rank: usize, group: usize) -> Member {
    let buffers = options.ops[group].iter().enumerate();
    let buffers =
        buffers.map(|(op, desc)| (0..desc.count).flat_map(|i| element(options, group, rank, op, i)).collect());
    Member {
        endpoint: Endpoint::new(wiring.endpoint(options, rank, group)),
        memory: Memory { buffers: buffers.collect() },
        done: 0,
    }
}

fn element(options: &Options, group: usize, rank: usize, op: usize, i: u64) -> Vec<u8> {
    let desc = &options.ops[group][op];
    let dtype = desc.dtype.expect("only operations with elements are asked");
    let exact = options.order == Order::Arrival && desc.op == Some(ReduceOp::Sum);
    input(dtype, exact, &[options.seed, group as u64, rank as u64, op as u64, i])
}

/// Ranks post in order, each a little late.
fn draw_posts(options: &Options) -> BTreeMap<(Instant, u64), (usize, usize, OpDesc)> {
    let mut draw = Draw::new(options.seed ^ 0x706f_7374);
    let mut posts = BTreeMap::new();
    let mut number = 0;
    for rank in 0..options.ranks {
        for (group, ops) in options.ops.iter().enumerate() {
            let mut at = Instant::ZERO;
            for desc in ops {
                let late = draw.below(options.skew_max.as_nanos() as u64 + 1);
                at = at + Duration::from_nanos(late);
                number += 1;
                posts.insert((at, number), (rank, group, *desc));
            }
        }
    }
    posts
}

impl Cluster<'_, '_> {
    fn drive(&mut self) -> Result<(), Violation> {
        while self.waiting() > 0 {
            let Some(next) = self.next_event().filter(|&at| at - Instant::ZERO < TIME_LIMIT) else {
                return Err(Violation::Hang { at: self.now - Instant::ZERO, waiting: self.waiting() });
            };
            self.now = self.now.max(next);
            self.post_due();
            self.deliver_due();
            self.time_out_due();
            self.send_all();
            self.collect()?;
        }
        Ok(())
    }

    fn waiting(&self) -> usize {
        let ops: usize = self.options.ops.iter().map(Vec::len).sum();
        let done: u64 = self.members.iter().flatten().map(|member| member.done).sum();
        ops * self.options.ranks - done as usize
    }

    fn next_event(&self) -> Option<Instant> {
        let posts = self.posts.keys().next().map(|&(at, _)| at);
        let nodes = self.nodes.iter().flatten().filter_map(Node::poll_timeout).min();
        let ranks = self.members.iter().flatten().filter_map(|member| member.endpoint.poll_timeout()).min();
        [posts, nodes, ranks, self.fabric.next_event()].into_iter().flatten().min()
    }

    fn post_due(&mut self) {
        while let Some(entry) = self.posts.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let (rank, group, desc) = entry.remove();
            self.members[rank][group].endpoint.post(desc, Path::Tree).expect("nothing has failed");
        }
    }

    fn deliver_due(&mut self) {
        while let Some(delivery) = self.fabric.poll_delivery(self.now) {
            match owner(delivery.to) {
                Ok((node, shard)) => self.nodes[node][shard].handle(delivery.from, &delivery.bytes, self.now),
                Err((rank, group)) => {
                    let member = &mut self.members[rank][group];
                    member.endpoint.handle(delivery.from, &delivery.bytes, &mut member.memory, self.now);
                }
            }
        }
    }

    fn time_out_due(&mut self) {
        for node in self.nodes.iter_mut().flatten() {
            if node.poll_timeout().is_some_and(|at| at <= self.now) {
                node.handle_timeout(self.now);
            }
        }
        for member in self.members.iter_mut().flatten() {
            if member.endpoint.poll_timeout().is_some_and(|at| at <= self.now) {
                member.endpoint.handle_timeout(self.now);
            }
        }
    }

    fn send_all(&mut self) {
        for (i, node) in self.nodes.iter_mut().enumerate() {
            for (shard, node) in node.iter_mut().enumerate() {
                while let Some(sent) = node.poll_transmit(&mut self.buffer, self.now) {
                    self.fabric.send(self.now, node_addr(i, shard as u16), sent.to, &self.buffer[..sent.len_bytes]);
                }
            }
        }
        for (rank, members) in self.members.iter_mut().enumerate() {
            for (group, member) in members.iter_mut().enumerate() {
                while let Some(sent) = member.endpoint.poll_transmit(&member.memory, &mut self.buffer, self.now) {
                    self.fabric.send(self.now, rank_addr(rank, group), sent.to, &self.buffer[..sent.len_bytes]);
                }
            }
        }
    }

    fn collect(&mut self) -> Result<(), Violation> {
        for (rank, members) in self.members.iter_mut().enumerate() {
            for (group, member) in members.iter_mut().enumerate() {
                while let Some(event) = member.endpoint.poll_event() {
                    match event {
                        Event::Completed(id) if id.0 == member.done => member.done += 1,
                        Event::Completed(id) => {
                            return Err(Violation::Completion { group, rank, found: id.0, expected: member.done });
                        }
                        Event::Failed(error) => return Err(Violation::Failed { group, rank, error }),
                        other => panic!("unknown event {other:?}"),
                    }
                }
            }
        }
        Ok(())
    }

    /// Compare every element of every operation at every rank with the oracle.
    fn check(&self) -> Result<(), Violation> {
        for (group, ops) in self.options.ops.iter().enumerate() {
            for (op, desc) in ops.iter().enumerate() {
                let (Some(dtype), Some(reduce)) = (desc.dtype, desc.op) else { continue };
                let size = dtype.size_bytes();
                for i in 0..desc.count as usize {
                    let inputs = |rank| element(self.options, group, rank, op, i as u64);
                    let expected = expected(&self.options.shape, self.options.order, dtype, reduce, &inputs);
                    for (rank, members) in self.members.iter().enumerate() {
                        let found = &members[group].memory.buffers[op][i * size..][..size];
                        if found != expected {
                            let found = found.to_vec();
                            return Err(Violation::Wrong { group, rank, op, element: i, found, expected });
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn report(&self) -> Report {
        let mut counters = Counters::default();
        self.nodes.iter().flatten().for_each(|node| counters.merge(node.counters()));
        Report {
            log_hash: self.fabric.hash,
            took: self.now - Instant::ZERO,
            packets: self.fabric.sent,
            counters,
            retransmits: self.members.iter().flatten().map(|member| member.endpoint.stats().retransmits).sum(),
        }
    }
}

/// No run of these sizes needs this long, whatever the faults.
const TIME_LIMIT: Duration = Duration::from_secs(600);
