//! The protocol between Sumac's devices and hosts, and the interfaces between its runtime and the hardware.
//!
//! Host and device do not depend on each other. They exchange only the bytes that this crate defines. All other crates
//! of Sumac depend on this one. `PROTOCOL.md` beside it specifies the protocol; comments cite its sections as "PROTOCOL
//! n".
//!
//! | module | content |
//! |---|---|
//! | [`wire`] | the data plane: every byte of a packet |
//! | [`ctrl`] | the control plane: postcard messages in checksummed frames |
//! | [`port`] | network interfaces for packets, and a conformance suite for implementations |
//! | [`reduce`] | the arithmetic: a kernel for each element type and operator, used by devices, DMA engines and hosts |
//! | [`ring`] | descriptor rings and doorbells between two sides that do not trust each other |
//! | [`mmio`] | the device as a PCIe function: registers, queues and their entries |
//! | [`dma`] | DMA engines that copy, or also reduce in flight; registered memory |
//! | [`op`], [`ids`], [`key`] | operations, ids, and the keys that authenticate children |
//! | [`uplink`], [`rtt`], [`shard`] | the child's side of a hop, shared by ranks and inner nodes; a node's shards |
//! | [`time`] | time as an argument |
//! | [`flash`] | block storage with defined behaviour on power failure |
//! | [`path_mtu`] | the longest packet that a path carries, found by probing |
//! | `emu` (feature) | emulated links with faults, in virtual time; an emulated DMA engine |
//! | `shm` (feature) | shared memory, futexes and descriptor passing between processes of one machine |
//! | `remote` (with `shm`) | zero-copy for ranks on other hosts: rings as messages, memory by RDMA |
//! | `udp` (feature) | a port over UDP sockets, for hosted targets |
//! | `verbs` (feature) | a port over RDMA verbs, for hosted targets |
//! | `traffic_class` (with `shm` or `udp`) | DSCP of packets and connections |
//! | `rank_link` (with `shm`) | opens a rank's link to a device on another host |
//! | `hosted` (with `udp`) | a port over either, selected when it is opened |
//!
//! # The protocol in one page
//!
//! A *group* runs on the nodes of one *tree*. The chunks of all its operations are numbered in one sequence (`seq`).
//! **Every child sends exactly one contribution per seq** (`Data`, or `Empty` if it has nothing to add) **and gets
//! exactly one answer per seq** (`Result`, or `Done` if no rank below it receives the result). A seq is complete at a
//! node when the bits of all its children are set. The node then contributes to its parent; the root rounds the value
//! and answers. The answer, which goes down to all children, acknowledges the contribution. Collectives differ only in
//! which children contribute data and which want the result: in an all-reduce all do both, in a barrier none does
//! either.
//!
//! Chunk k occupies slot k % S of every node on its path. Each packet up carries `have`: all lower seqs have landed at
//! and below the sender. A rank sends seq j only if j < have + W, with W <= S/2, and a node reuses the slot of k only
//! when every child's `have` is above k. So no packet, however late, can meet the state of another chunk. The root's
//! minimum `have` comes down as `stable`.
//!
//! A lost contribution leaves a gap. When three later contributions have arrived, the node requests the missing one. A
//! child requests a lost answer in the same way. The last packets of a burst are recovered by header-sized probes with
//! back-off; payload is sent again only for contributions that the node lacks. A hop that stays silent is dead, which
//! is reported downwards (`PathLost`). Ranks that call different operations are detected by their signatures: the node
//! sends a Nak to its parent in place of a contribution, and the root reports the same two calls to all ranks.
//!
//! Answers grant a window. It grows by one per window, and halves, at most once per window, for a loss or for a packet
//! with a congestion mark (ECN-CE). A child reports marks on packets from its parent with its next contribution.
//!
//! Every packet carries the group's *epoch*. A device that has restarted has no groups, and replies so. A child is
//! identified by a 64-bit key and pinned to the address that first used it.
//!
//! # Zero-copy
//!
//! A rank on the device's machine can pass addresses instead of data. Entries of a ring ([`mmio`]) refer to memory that
//! it has registered. The device's DMA engine ([`dma`]) pulls and combines the data, publishes the result in a *redo
//! slot*, and then writes it back. A device that dies during a write therefore loses nothing: a published result can be
//! read, and the inputs of an unpublished one are intact. Tests of the node and of whole clusters cover these rules:
//!
//! - The device advances `have` with the answer, because it has landed the result itself. A rank submits a whole
//!   operation; its ring holds what the window does not admit yet, and the rank is woken only at the end.
//! - A chunk is pulled in one chain when all children have contributed, not as each contribution arrives, so that
//!   accumulators pass through a cache once.
//! - A rank's fence removes only its own memory from a group. A rank that ends with an error does not affect the
//!   results of the others.
//! - A rank sets the number of answers that it waits for ([`ring::WakeThreshold`]), and is not woken for each chunk.
//!
//! A rank on another host does the same over RDMA: its rings travel as messages, and the device reads and writes its
//! memory. Nobody can read the redo slots of such a device after it has died; [`remote`] describes what replaces them.
//!
//! # Shared results
//!
//! A node can have a *shared address*: packets sent there reach all its children (on one host, IP multicast on
//! loopback). A child that listens there sets `SHARED` on each contribution. A result that all children wait for, want,
//! and can receive there is sent once, to [`ids::ChildIndex::ALL`], with a key that all children have. Everything else
//! is unicast: `Done`, `Status`, `Nak`, and every retransmitted result. So a lost copy, or an address at which nothing
//! arrives, costs only a request. A child that receives only unicast results stops requesting shared ones
//! ([`uplink::SharedResults`]).
//!
//! Every user of the host can join the address and read results, which with unicast only root could. Keys prevent
//! forged results by others. Siblings know the shared key, but a child accepts results only from its node's address,
//! from which no other process can send while the node uses it.
//!
//! # Design notes
//!
//! - A lost Result is sent again on a header-sized request, so a reply can be larger than its request. It is sent only
//!   to a child with the right key at its pinned address, and only against credit that the child earns by its own
//!   contributions and probes. See `sumac_device::Node`.
//! - A contribution indicates whether any rank below *wants* the result, so nodes need not know roots or owners.
//! - A probe that finds a quarter of a window missing cuts the window: the last packets of a burst that overran a
//!   receive buffer are not followed by packets that would reveal the gap.
//! - The checksum has two levels (payload, then header with the payload's checksum), so that a node that answers 256
//!   children reads the value once.
//! - Elements that are only moved (broadcast, all-gather) stay bit-exact: they have no partial form, are never rounded,
//!   and are not sent back to the rank that they came from.
//! - The chunks of an all-gather do not cross its blocks, because each has one owner; those of a reduce-scatter may.
//! - An operation's signature includes its first seq: equal calls that start at different seqs, after an operation that
//!   ranks called with different counts, must not combine (found by swarm seeds 1649 and 1758).
//! - An operation without elements uses one seq, as a barrier does, so that a mismatch with a rank that contributes
//!   data is detected.
//! - Probes back off by random times per child: 256 children that lost their packets in one burst and retry in unison
//!   lose them again (seeds 472, 1693 and 1984).
//! - A node never sends an answer again to a child that has reported to have it: a delayed probe would otherwise keep
//!   the answer in a slot that the next chunk is about to use (found by `tests/exhaustive`).
//! - With twice as many slots as the window, it is safe even if nodes do not wait for `have` before they reuse a slot.
//!   With fewer slots, or if ranks count chunks in flight, only that wait prevents lost results (`tests/exhaustive`
//!   shows both, for up to 3 ranks and two levels, with loss and duplication in any order).
//! - An operation on another path sends an `Empty` with its signature through the tree, so that ranks on different
//!   paths detect a mismatch as well.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

pub mod atomic;
mod crc;
pub mod ctrl;
pub mod dma;
pub mod driver;
#[cfg(feature = "emu")]
pub mod emu;
pub mod flash;
#[cfg(all(feature = "udp", target_os = "linux"))]
pub mod hosted;
pub mod ids;
pub mod key;
pub mod mmio;
pub mod op;
pub mod path_mtu;
pub mod planted;
pub mod port;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub mod rank_link;
pub mod reduce;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub mod remote;
pub mod ring;
pub mod rtt;
pub mod shard;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub mod shm;
pub mod time;
#[cfg(all(any(feature = "shm", feature = "udp"), target_os = "linux"))]
pub mod traffic_class;
#[cfg(all(feature = "udp", target_os = "linux"))]
pub mod udp;
pub mod uplink;
#[cfg(all(feature = "verbs", target_os = "linux"))]
pub mod verbs;
pub mod wire;
