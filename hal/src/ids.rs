//! The newtypes that both sides name things by.
//!
//! Every id that crosses the wire has a type of its own, so that a child index can never be passed for a
//! rank, nor an epoch for a sequence number.

use core::fmt;
use serde::{Deserialize, Serialize};

/// A member of a communicator, 0-based.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Rank(pub u32);

/// An aggregation group: one communicator's claim on the nodes of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct GroupId(pub u32);

/// An aggregation tree, as installed on its nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct TreeId(pub u32);

/// The index of a child below one aggregation node, 0-based, in the declared order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct ChildIndex(pub u16);

impl ChildIndex {
    /// Every child of a node at once: in packets down to the group's shared address.
    pub const ALL: Self = Self(0xffff);
}

/// The number of a chunk, group-wide across operations; restarts only with the epoch (PROTOCOL 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct ChunkNo(pub u64);

/// One life of a device, random at each boot (PROTOCOL 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct BootId(pub u64);

/// The life of a group's state: (term, counter), packed into 32 bits on the wire.
///
/// It changes at all nodes and ranks whenever any state may have been lost; only the controller or a
/// repair's COMMIT assigns it (PROTOCOL 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Epoch {
    /// Not lower at a later controller; with the group it tells the controller's lives apart.
    pub term: u16,
    /// Raised by each change of view within a term.
    pub counter: u16,
}

impl Epoch {
    /// Return the 32 bits that travel: term above, counter below, so that later epochs compare greater.
    pub const fn to_bits(self) -> u32 {
        ((self.term as u32) << 16) | self.counter as u32
    }

    /// Rebuild an epoch from its 32 bits.
    pub const fn from_bits(bits: u32) -> Self {
        Self { term: (bits >> 16) as u16, counter: bits as u16 }
    }
}

/// One rank's way to a device by reference: a function with registers, rings and memory of its own, numbered by the
/// device. It is whom registered memory belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FunctionId(pub u32);

macro_rules! display {
    ($($ty:ident $prefix:literal),*) => {$(
        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    )*};
}

display!(Rank "rank ", FunctionId "function ", GroupId "group ", TreeId "tree ", ChildIndex "child ", ChunkNo "chunk ");

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "epoch {}.{}", self.term, self.counter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_order_by_term_first() {
        let old = Epoch { term: 1, counter: 9 };
        let new = Epoch { term: 2, counter: 0 };
        assert!(old < new && old.to_bits() < new.to_bits());
        assert_eq!(Epoch::from_bits(new.to_bits()), new);
    }
}
