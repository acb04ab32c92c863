//! A group and its children, for tests, examples and the first steps of a board: what a controller sets up, and what
//! ranks send and expect.
//!
//! A [`Child`] keeps no state: it has every result before the chunk that it contributes to, asks for nothing again and
//! has no timers. For a real rank see the crate `sumac`.
//!
//! ```
//! use core::time::Duration;
//! use sumac_device::{Memory, Node, NodeConfig, testing};
//! use sumac_hal::ids::BootId;
//! use sumac_hal::op::{Dtype, OpDesc, ReduceOp};
//! use sumac_hal::port::{Addr, Ecn};
//! use sumac_hal::shard::Shard;
//! use sumac_hal::time::Instant;
//!
//! let mut memory = Memory::<1, 2, 4, 256>::new();
//! let config = NodeConfig {
//!     shard: Shard::WHOLE,
//!     boot_id: BootId(1),
//!     max_packet_len_bytes: 1472,
//!     receive_buffer_bytes: 1 << 16,
//! };
//! let mut node = Node::new(config, memory.storage());
//! let group = testing::Group::new(2, 4, 64);
//! group.install(&mut node, Instant::ZERO).unwrap();
//! let sum = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 1);
//! let mut buffer = [0; 1472];
//! for index in 0..2 {
//!     let packet = group.child(index, sum).contribute(0, &i32::from(index + 4).to_le_bytes(), &mut buffer);
//!     node.handle(Instant::ZERO, Addr::Emu(index.into()), Ecn::Unmarked, packet);
//! }
//! for index in 0..2 {
//!     let transmit = node.poll_transmit(Instant::ZERO).unwrap();
//!     let packet = transmit.write(node.payload(&transmit), &mut buffer);
//!     assert_eq!(group.child(index, sum).result(0, packet), Some(&9_i32.to_le_bytes()[..]));
//! }
//! ```

use crate::node::Node;
use core::num::NonZeroU32;
use sumac_hal::ctrl::{ChildMask, GroupConfig, Order, Refusal, Request, Response, TreeConfig};
use sumac_hal::ids::{ChildIndex, ChunkNo, Epoch, GroupId, TreeId};
use sumac_hal::key::GroupSecret;
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::time::Instant;
use sumac_hal::uplink::HopTimers;
use sumac_hal::wire::{Flags, HEADER_LEN, Kind, Packet, Repr, payload_crc};

/// The version of the cost table, which is part of every signature.
const TABLE_VERSION: u32 = 1;

/// A group on one node, whose children are all its ranks.
#[derive(Debug, Clone, Copy)]
pub struct Group {
    /// The number of children.
    pub children: u16,
    /// The number of slots; the window is half of it.
    pub slots: u16,
    /// The longest payload in bytes.
    pub chunk_len_bytes: u16,
    /// The order in which a node combines contributions.
    pub order: Order,
    /// Its id, and that of its tree.
    pub id: u32,
    /// Its epoch.
    pub epoch: Epoch,
    /// What its children's keys derive from.
    pub secret: GroupSecret,
}

impl Group {
    /// Return group 1, which combines contributions in the order of arrival.
    pub const fn new(children: u16, slots: u16, chunk_len_bytes: u16) -> Self {
        Self {
            children,
            slots,
            chunk_len_bytes,
            order: Order::Arrival,
            id: 1,
            epoch: Epoch { term: 1, counter: 1 },
            secret: GroupSecret([7; 16]),
        }
    }

    /// Create the tree and the group on a node, as a controller would.
    ///
    /// # Errors
    /// The node's refusal.
    pub fn install(&self, node: &mut Node<'_>, now: Instant) -> Result<(), Refusal> {
        let tree =
            TreeConfig { tree: TreeId(self.id), parent: None, children: self.children, ranks: Default::default() };
        for request in [Request::InstallTree(tree), Request::CreateGroup(self.config())] {
            match node.control(&request, now) {
                Response::Done => {}
                Response::Refused(refusal) => return Err(refusal),
                _ => return Err(Refusal::Unknown),
            }
        }
        Ok(())
    }

    /// Return the configuration that a controller would send.
    pub fn config(&self) -> GroupConfig {
        GroupConfig {
            group: GroupId(self.id),
            tree: TreeId(self.id),
            epoch: self.epoch,
            order: self.order,
            secret: self.secret,
            parent_key: 0,
            shared: None,
            parent_shared: None,
            window_max: self.slots / 2,
            slots: self.slots,
            chunk_len_bytes: self.chunk_len_bytes,
            ranks: NonZeroU32::new(self.children.into()).unwrap_or(NonZeroU32::MIN),
            lease_ms: 60_000,
            timers: HopTimers::DEFAULT.into(),
            zero_copy: ChildMask::EMPTY,
        }
    }

    /// Return a child that calls `op` on all its chunks.
    pub fn child(&self, index: u16, op: OpDesc) -> Child {
        let (group, index) = (GroupId(self.id), ChildIndex(index));
        Child { group, epoch: self.epoch, index, key: self.secret.child_key(group, self.epoch, index), op }
    }
}

/// A child of a [`Group`]: makes its contributions, and checks what it gets.
#[derive(Debug, Clone, Copy)]
pub struct Child {
    group: GroupId,
    epoch: Epoch,
    index: ChildIndex,
    key: u64,
    op: OpDesc,
}

impl Child {
    /// Write the contribution to chunk `seq` to the start of `buffer`, and return the packet.
    ///
    /// # Panics
    /// If `buffer` is shorter than a header and `elements`.
    pub fn contribute<'b>(&self, seq: u64, elements: &[u8], buffer: &'b mut [u8]) -> &'b [u8] {
        let packet = &mut buffer[..HEADER_LEN + elements.len()];
        packet[HEADER_LEN..].copy_from_slice(elements);
        let mut repr = Repr {
            flags: Flags::WANT,
            count: 1,
            seq: ChunkNo(seq),
            mark: ChunkNo(seq),
            signature: self.op.signature(Path::Tree, TABLE_VERSION),
            payload_len_bytes: elements.len() as u16,
            ..Repr::new(Kind::Data, self.group, self.epoch, self.index, self.key)
        };
        repr.set_op(&self.op);
        repr.emit(&mut Packet::new_unchecked(&mut packet[..]), payload_crc(elements));
        packet
    }

    /// Return the elements of a packet if it is this child's result of chunk `seq`.
    pub fn result<'p>(&self, seq: u64, packet: &'p [u8]) -> Option<&'p [u8]> {
        let repr = Repr::parse(&Packet::new_checked(packet).ok()?).ok()?;
        let link = (repr.group, repr.epoch, repr.child, repr.key);
        let is_mine = link == (self.group, self.epoch, self.index, self.key);
        (is_mine && repr.kind == Kind::Result && repr.seq == ChunkNo(seq)).then(|| &packet[repr.header_len()..])
    }
}
