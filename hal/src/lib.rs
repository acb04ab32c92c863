//! The contract: between device and host, and between the runtime and the hardware.
//!
//! Host and device never name each other; they meet only as bytes, and this crate says which. Every other crate of Sumac
//! depends on it, and it on none of them.
//!
//! | module | what |
//! |---|---|
//! | [`wire`] | the data plane: every byte of a packet |
//! | [`ctrl`] | the control plane: postcard messages in checked frames |
//! | [`port`] | a queue of packets in and one out; the conformance suite that every port passes |
//! | [`reduce`] | the arithmetic: a kernel for each element type and operator, for device, DMA engine and host |
//! | [`ring`] | descriptor rings and doorbells between two sides that do not trust each other |
//! | [`mmio`] | the device as a PCIe function: its registers and queues, and what goes through them |
//! | [`dma`] | a DMA engine that copies, and that reduces in flight; registered memory |
//! | [`op`], [`ids`], [`key`] | what an operation is, what things are called, who may contribute |
//! | [`uplink`], [`rtt`], [`shard`] | a child's side of one hop, which ranks and inner nodes share; a node's shards |
//! | [`time`] | time as an argument |
//! | [`flash`] | block storage, and what it keeps when power fails |
//! | `emu` (feature) | emulated links with faults, on virtual time; an emulated DMA engine |
//! | `shm` (feature) | shared memory, futex and descriptor passing: the bus between processes of one machine |
//! | `remote` (with `shm`) | a function on another host: its rings as messages, its memory by RDMA |
//! | `udp` (feature) | a port over real sockets, for hosted targets |
//! | `verbs` (feature) | a port over RDMA verbs, for hosted targets |
//! | `hosted` (with `udp`) | either of them, as it is opened |
//!
//! # The protocol in one page
//!
//! A *group* lives on the nodes of one *tree*. Chunks of all its operations are numbered in one sequence (`seq`). **Every
//! child sends exactly one contribution per seq** (`Data`, or `Empty` if it has nothing to add) **and gets exactly one
//! answer per seq** (`Result`, or `Done` if nobody below it receives). A seq is complete at a node when all its children's
//! bits are set; the node then contributes to its parent, or, at the root, rounds the value and answers. The answer is the
//! acknowledgement, and goes down to everybody. Which children bring data and which want the result is all that tells one
//! collective from another: in an all-reduce all do both, in a barrier none does either.
//!
//! Chunk k lives in slot k % S of every node on its way. Each packet up carries `have`: all seqs below have landed at and
//! below the sender. A rank sends seq j only if j < have + W, with W <= S/2, and a node uses the slot of k again only when
//! every child's `have` has passed k; so no packet, however late, can meet another chunk's state. The root's least `have`
//! comes down as `stable`.
//!
//! A lost contribution shows as a gap with three later ones behind it: the node asks for it at once, by name. A lost
//! answer shows to the child in the same way. What that leaves, the last packets of a burst, is found by header-sized
//! probes with back-off, and payload is sent again only for what the node says it lacks. A hop that stays silent is dead
//! (`PathLost`), and says so downwards. Ranks that call different things meet as different signatures: the node's Nak goes
//! up in place of a contribution, and the root tells everybody the same two calls.
//!
//! The window that answers grant grows by one a window and halves, once a window, for a loss or for a packet that the
//! network marked (ECN-CE); what was marked on the way down the child tells with its next contribution.
//!
//! A group's *epoch* is in every packet; a device that has restarted knows no groups, and says so. A child is known by a
//! 64-bit key and pinned to the address that first used it.
//!
//! # By reference
//!
//! A rank on the device's machine may say where its data is instead of sending it: entries of a ring ([`mmio`]) name
//! places in memory that it has registered, and the device's engine ([`dma`]) pulls, combines, publishes the result in a
//! *redo slot*, and writes it back, in that order. So a device that dies in mid-write has lost nothing: what is published
//! can be read, and of what is not no input was touched. Four rules go beyond the contract that this grew from; tests of
//! the node and of whole clusters hold them:
//!
//! - `have` moves with the answer, by the device itself: it has landed the result. A rank submits a whole operation, its
//!   ring holds what the window does not let in yet, and nobody wakes it before the end.
//! - A chunk is pulled when all children have contributed, in one chain, not as each arrives: accumulators then pass
//!   through a cache once.
//! - A rank's fence takes its own memory out of a group, and nothing of the others': who ends with an error can't take
//!   away what the others were about to hear.
//! - A rank says how much it waits for ([`ring::Wanted`]) and is woken for that, not for each chunk.
//!
//! A rank on another host does the same over RDMA: its rings travel as messages, and the device reads and writes its memory.
//! What is different where nobody can read a dead device's redo slots, [`remote`] says and argues.
//!
//! # Shared answers
//!
//! A node may have a *shared address* towards its children: what it sends there reaches each of them (on one host, IP
//! multicast on loopback). A child that listens says so on each contribution (`SHARED`). A result that every child waits
//! for, wants, and may get there goes once, to [`ids::ChildIndex::ALL`] with a key that all children have. Everything
//! else stays between a node and one child: `Done`, `Status`, `Nak`, and each result that is sent again. So a copy that is
//! lost, or an address at which nothing arrives, costs a request and no more; a child that has only ever been answered
//! alone stops asking ([`uplink::Listening`]).
//!
//! Whoever is on the host can join the address and read results, which unicast leaves to root. Keys keep
//! strangers from forging them. Siblings know each other's shared key, but a child takes results only from its node's
//! address, which another process can't send from while the node has it.
//!
//! # Where this goes beyond the first design
//!
//! - A lost Result is sent again on a header-sized request, so a reply can be larger than what asked for it: only to a
//!   child with the right key at its pinned address, and only against credit that it earns by its own contributions and
//!   probes. See `sumac_device::Node`.
//! - A contribution says whether anybody below *wants* the result, so a node needs to know neither roots nor owners.
//! - A probe that finds a quarter of a window missing cuts the window: the last packets of a burst that was too much for a
//!   receive buffer have nothing behind them to show the gap.
//! - The checksum is in two levels (payload, then header with the payload's checksum), so that a node which answers 256
//!   children reads the value once.
//! - Elements that are only moved (broadcast, all-gather) keep their bits: they have no partial form, are never rounded,
//!   and are not sent back to the rank that they came from.
//! - The chunks of an all-gather do not cross its blocks, because each has one owner; those of a reduce-scatter may.
//! - An operation's signature contains its first seq: operations that are called alike but begin elsewhere, behind one
//!   that ranks called with different counts, must not combine (swarm seeds 1649 and 1758 found that they did).
//! - An operation without elements uses one seq, as a barrier does, so that a rank which calls it where another brings
//!   data finds out, instead of going on alone.
//! - Probes back off by times drawn per child: 256 children that lost their packets in one burst and ask again at the same
//!   moments lose them again (seeds 472, 1693 and 1984).
//! - A node sends no answer again to a child that has said to have it, whoever asks: an overtaken probe would keep the
//!   answer in a slot that the next chunk is about to use (found by `tests/exhaustive`).
//! - Slots that are twice the window are safe even where nodes do not wait for `have` before they use one again; with
//!   fewer, or with ranks that count what is in flight, only that wait is between a rank and a lost result
//!   (`tests/exhaustive` shows both: up to 3 ranks, two levels, loss and duplication in any order).
//! - Operations that run by a schedule send an `Empty` with their signature through the tree, so that ranks on different
//!   paths find out as well.
#![cfg_attr(not(any(feature = "std", test)), no_std)]

mod crc;
pub mod ctrl;
pub mod dma;
#[cfg(feature = "emu")]
pub mod emu;
pub mod flash;
#[cfg(all(feature = "udp", target_os = "linux"))]
pub mod hosted;
pub mod ids;
pub mod key;
pub mod mmio;
pub mod op;
pub mod planted;
pub mod port;
pub mod reduce;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub mod remote;
pub mod ring;
pub mod rtt;
pub mod shard;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub mod shm;
pub mod time;
#[cfg(all(feature = "udp", target_os = "linux"))]
pub mod udp;
pub mod uplink;
#[cfg(all(feature = "verbs", target_os = "linux"))]
pub mod verbs;
pub mod wire;
