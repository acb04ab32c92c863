//! The ids that devices and hosts share.
//!
//! Every id on the wire is a newtype, so that a child index cannot be passed for a rank, or an epoch for a sequence
//! number.

use core::fmt;
use serde::{Deserialize, Serialize};

/// A member of a communicator, counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Rank(pub u32);

/// An aggregation group: one communicator's resources on the nodes of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct GroupId(pub u32);

/// An aggregation tree that is installed on its nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct TreeId(pub u32);

/// The index of a child of one aggregation node, counted from 0 in declared order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct ChildIndex(pub u16);

impl ChildIndex {
    /// All children of a node: in packets to the shared address.
    pub const ALL: Self = Self(0xffff);
}

/// The number of a chunk (`seq`), unique in a group across operations; starts again only with a new epoch (PROTOCOL 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct ChunkNo(pub u64);

/// Identifies an incarnation of a device; drawn at random at each boot (PROTOCOL 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct BootId(pub u64);

/// The version of a group's state: (term, counter), packed into 32 bits on the wire.
///
/// It changes on all nodes and ranks whenever state may have been lost. Only the controller or the COMMIT of a recovery
/// assigns one (PROTOCOL 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Epoch {
    /// Never decreases from one incarnation of the controller to the next; group and term together identify it.
    pub term: u16,
    /// Incremented by each view change within a term.
    pub counter: u16,
}

impl Epoch {
    /// Return the wire form: the term in the high half, the counter in the low half, so that later epochs compare
    /// greater.
    pub const fn to_bits(self) -> u32 {
        ((self.term as u32) << 16) | self.counter as u32
    }

    /// Return the epoch with this wire form.
    pub const fn from_bits(bits: u32) -> Self {
        Self { term: (bits >> 16) as u16, counter: bits as u16 }
    }
}

/// A rank's PCIe function on a device: its own registers, rings and registered memory. The device numbers its
/// functions.
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
    fn epochs_are_ordered_by_term_then_counter() {
        let old = Epoch { term: 1, counter: 9 };
        let new = Epoch { term: 2, counter: 0 };
        assert!(old < new && old.to_bits() < new.to_bits());
        assert_eq!(Epoch::from_bits(new.to_bits()), new);
    }
}
