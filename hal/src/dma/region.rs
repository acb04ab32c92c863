//! A device's table of registered memory regions: owner, length and uses of each.
//!
//! Only the owner of a region, the rank that registered it, may refer to it (PROTOCOL 10). A device checks every
//! reference here before it builds a descriptor; its engine checks the bounds again.
//!
//! Invariants:
//! - A key identifies one registration forever: generations are not reused. An index whose generations are exhausted is
//!   retired.
//! - A region in use stays until its last use is released. Deregistering it refuses new uses at once; its table entry
//!   stays occupied until then.
//! - No owner exceeds its quota.

use super::{Address, RegionKey};
use crate::ids::FunctionId;

/// A table of up to `N` regions.
#[derive(Debug, Clone)]
pub struct RegionTable<const N: usize> {
    entries: [Entry; N],
    per_owner_max: usize,
    per_owner_max_bytes: u64,
    max_bytes: u64,
}

/// A contiguous range of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The start.
    pub address: Address,
    /// The length in bytes.
    pub len_bytes: u64,
}

/// Why memory cannot be registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The region is empty.
    #[error("cannot register a region of 0 bytes")]
    Empty,
    /// The owner's quota of regions is used up.
    #[error("{owner} has registered {max} regions, its quota; deregister one first")]
    RegionQuota {
        /// The owner.
        owner: FunctionId,
        /// The quota.
        max: usize,
    },
    /// The owner's quota of bytes would be exceeded.
    #[error(
        "cannot register {len_bytes} bytes: {owner} has registered {held_bytes} of its quota of {max_bytes} bytes; \
         deregister a region first"
    )]
    ByteQuota {
        /// The owner.
        owner: FunctionId,
        /// The requested length.
        len_bytes: u64,
        /// The bytes registered, including deregistered regions that are still in use.
        held_bytes: u64,
        /// The quota.
        max_bytes: u64,
    },
    /// The device's limit of registered bytes would be exceeded.
    #[error("cannot register {len_bytes} bytes: {held_bytes} of the device's {max_bytes} bytes are registered")]
    DeviceBytes {
        /// The requested length.
        len_bytes: u64,
        /// The bytes registered.
        held_bytes: u64,
        /// The device's limit.
        max_bytes: u64,
    },
    /// The table is full.
    #[error("all {capacity} regions of the device are registered; deregister one first")]
    Full {
        /// The table's capacity.
        capacity: usize,
    },
}

/// Why a reference to a region is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// No region of the owner ever had this key. Regions of other owners give the same error, so that it reveals
    /// nothing about them.
    #[error("{owner} has no region {index}")]
    Unknown {
        /// Who refers to the region.
        owner: FunctionId,
        /// The index in the key.
        index: u16,
    },
    /// The region has been deregistered.
    #[error("region {index} of generation {asked} has been deregistered; register the memory again")]
    Stale {
        /// The index in the key.
        index: u16,
        /// The generation in the key.
        asked: u32,
    },
    /// The reference reaches beyond the region.
    #[error("{len_bytes} bytes at {offset_bytes} reach beyond the {region_len_bytes} bytes of region {index}")]
    OutOfBounds {
        /// The region's index.
        index: u16,
        /// The start of the reference.
        offset_bytes: u64,
        /// The length of the reference.
        len_bytes: u64,
        /// The length of the region.
        region_len_bytes: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    /// The generation of the current or last region with this index; the first is 1.
    generation: u32,
    uses: u32,
    len_bytes: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Live(FunctionId),
    /// Deregistered, but still in use.
    Draining(FunctionId),
}

impl<const N: usize> RegionTable<N> {
    /// Return an empty table with a quota of `per_owner_max` regions per owner.
    pub const fn new(per_owner_max: usize) -> Self {
        const { assert!(N > 0 && N <= 1 << 16, "a region's index has 16 bits") };
        let entry = Entry { generation: 0, uses: 0, len_bytes: 0, state: State::Free };
        Self { entries: [entry; N], per_owner_max, per_owner_max_bytes: u64::MAX, max_bytes: u64::MAX }
    }

    /// Limit the registered bytes per owner and in total. Deregistered regions that are still in use count.
    #[must_use]
    pub const fn with_max_bytes(mut self, per_owner_max_bytes: u64, max_bytes: u64) -> Self {
        (self.per_owner_max_bytes, self.max_bytes) = (per_owner_max_bytes, max_bytes);
        self
    }

    /// Register `len_bytes` bytes for `owner`.
    ///
    /// # Errors
    /// [`RegisterError`] if a limit is exceeded. The table is unchanged then.
    pub fn register(&mut self, owner: FunctionId, len_bytes: u64) -> Result<RegionKey, RegisterError> {
        if len_bytes == 0 {
            return Err(RegisterError::Empty);
        }
        let owned = self.entries.iter().filter(|entry| entry.owner() == Some(owner)).count();
        if owned >= self.per_owner_max {
            return Err(RegisterError::RegionQuota { owner, max: self.per_owner_max });
        }
        // A table without limits accepts any length; mapping the memory checks it.
        let held = |is_counted: &dyn Fn(&Entry) -> bool| {
            let counted = self.entries.iter().filter(|entry| is_counted(entry));
            counted.fold(0, |held: u64, entry| held.saturating_add(entry.len_bytes))
        };
        let (held_bytes, max_bytes) = (held(&|entry| entry.owner() == Some(owner)), self.per_owner_max_bytes);
        if held_bytes.saturating_add(len_bytes) > max_bytes {
            return Err(RegisterError::ByteQuota { owner, len_bytes, held_bytes, max_bytes });
        }
        let (held_bytes, max_bytes) = (held(&|entry| entry.owner().is_some()), self.max_bytes);
        if held_bytes.saturating_add(len_bytes) > max_bytes {
            return Err(RegisterError::DeviceBytes { len_bytes, held_bytes, max_bytes });
        }
        let usable = |entry: &Entry| entry.state == State::Free && entry.generation < u32::MAX;
        let index = self.entries.iter().position(usable).ok_or(RegisterError::Full { capacity: N })?;
        let generation = self.entries[index].generation + 1;
        self.entries[index] = Entry { generation, uses: 0, len_bytes, state: State::Live(owner) };
        Ok(RegionKey { index: index as u16, generation })
    }

    /// Deregister a region. Returns true if it is removed at once, false if its last [`RegionTable::release`] will
    /// remove it.
    ///
    /// # Errors
    /// [`RegionError::Unknown`] or [`RegionError::Stale`].
    pub fn deregister(&mut self, owner: FunctionId, key: RegionKey) -> Result<bool, RegionError> {
        let entry = self.live(owner, key)?;
        let unused = entry.uses == 0;
        entry.state = if unused { State::Free } else { State::Draining(owner) };
        Ok(unused)
    }

    /// Return the regions of an owner, including deregistered ones that are still in use.
    pub fn owned_by(&self, owner: FunctionId) -> impl Iterator<Item = RegionKey> + '_ {
        let owned = self.entries.iter().enumerate().filter(move |(_, entry)| entry.owner() == Some(owner));
        owned.map(|(index, entry)| RegionKey { index: index as u16, generation: entry.generation })
    }

    /// Deregister all regions of an owner, and return how many are still in use.
    pub fn deregister_all(&mut self, owner: FunctionId) -> usize {
        let mut draining = 0;
        for entry in self.entries.iter_mut().filter(|entry| entry.owner() == Some(owner)) {
            let unused = entry.uses == 0;
            entry.state = if unused { State::Free } else { State::Draining(owner) };
            draining += usize::from(!unused);
        }
        draining
    }

    /// Check a reference of `owner` to `len_bytes` bytes, and keep the region in use until [`RegionTable::release`].
    ///
    /// # Errors
    /// [`RegionError`] if the reference is invalid; the region is not in use then.
    pub fn hold(&mut self, owner: FunctionId, address: Address, len_bytes: u64) -> Result<Span, RegionError> {
        let entry = self.live(owner, address.region)?;
        let end = address.offset_bytes.checked_add(len_bytes);
        if end.is_none_or(|end| end > entry.len_bytes) {
            return Err(RegionError::OutOfBounds {
                index: address.region.index,
                offset_bytes: address.offset_bytes,
                len_bytes,
                region_len_bytes: entry.len_bytes,
            });
        }
        // Cannot overflow: each use is a descriptor in flight, and no queue holds 2^32.
        entry.uses += 1;
        Ok(Span { address, len_bytes })
    }

    /// Release one use. Returns true if this removed the region: it was the last use of a deregistered region.
    ///
    /// # Panics
    /// If the region is not in use.
    #[track_caller]
    pub fn release(&mut self, key: RegionKey) -> bool {
        let entry = self
            .entries
            .get_mut(usize::from(key.index))
            .filter(|entry| entry.generation == key.generation && entry.uses > 0)
            .expect("each use is released once");
        entry.uses -= 1;
        let gone = entry.uses == 0 && matches!(entry.state, State::Draining(_));
        if gone {
            entry.state = State::Free;
        }
        gone
    }

    /// Return whether a region is registered, or deregistered and still in use.
    pub fn contains(&self, key: RegionKey) -> bool {
        let entry = self.entries.get(usize::from(key.index));
        entry.is_some_and(|entry| entry.owner().is_some() && entry.generation == key.generation)
    }

    /// Return the number of regions, including deregistered ones that are still in use.
    pub fn len(&self) -> usize {
        self.entries.iter().filter(|entry| entry.owner().is_some()).count()
    }

    /// Return whether there are no regions.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn live(&mut self, owner: FunctionId, key: RegionKey) -> Result<&mut Entry, RegionError> {
        let unknown = RegionError::Unknown { owner, index: key.index };
        let entry = self.entries.get_mut(usize::from(key.index)).ok_or(unknown)?;
        match entry.state {
            State::Live(live) if live == owner && entry.generation == key.generation => Ok(entry),
            // Another owner's later region at this index: reveal nothing about it.
            _ if key.generation == 0 || key.generation > entry.generation => Err(unknown),
            State::Live(other) | State::Draining(other) if other != owner && entry.generation == key.generation => {
                Err(unknown)
            }
            _ => Err(RegionError::Stale { index: key.index, asked: key.generation }),
        }
    }
}

impl Entry {
    const fn owner(&self) -> Option<FunctionId> {
        match self.state {
            State::Free => None,
            State::Live(owner) | State::Draining(owner) => Some(owner),
        }
    }
}
