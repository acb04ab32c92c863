//! Registered memory, as the device knows it: whose it is, how long, and who uses it.
//!
//! Whoever registers memory owns it, and only its owner's descriptors may name it (PROTOCOL 10). A device checks every
//! reference here before it makes a descriptor; its engine checks bounds once more.
//!
//! Invariants:
//! - A key names one registration for ever: a generation is not given out twice. An index whose generations are used
//!   up is retired.
//! - Memory is free when nobody uses it: deregistering a region in use refuses new uses at once, and the region goes
//!   when its last use has been released. Until then its place is taken.
//! - No owner has more than its share of the table.

use super::{Address, RegionKey};
use crate::ids::FunctionId;

/// What a device knows of up to `N` regions.
#[derive(Debug, Clone)]
pub struct RegionTable<const N: usize> {
    entries: [Entry; N],
    per_owner_max: usize,
    per_owner_max_bytes: u64,
    max_bytes: u64,
}

/// Consecutive bytes of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The address.
    pub address: Address,
    /// The length in bytes.
    pub len_bytes: u64,
}

/// Why memory was not registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// Nothing can be said about no bytes.
    #[error("a region of 0 bytes can't be registered")]
    Empty,
    /// The owner has its share.
    #[error("{owner} has registered {max} regions, its share: deregister one first")]
    Share {
        /// Who.
        owner: FunctionId,
        /// The share.
        max: usize,
    },
    /// The owner's regions would be longer, together, than its share.
    #[error(
        "{len_bytes} bytes more than the {held_bytes} that {owner} has registered exceed its share of {max_bytes} bytes: \
         deregister a region first"
    )]
    ShareBytes {
        /// Who.
        owner: FunctionId,
        /// What was to be registered.
        len_bytes: u64,
        /// What is, with what is deregistered and still in use.
        held_bytes: u64,
        /// The share.
        max_bytes: u64,
    },
    /// All regions would be longer, together, than the device can reach.
    #[error("{len_bytes} bytes more than the {held_bytes} that are registered exceed the device's {max_bytes} bytes")]
    FullBytes {
        /// What was to be registered.
        len_bytes: u64,
        /// What is.
        held_bytes: u64,
        /// What can be.
        max_bytes: u64,
    },
    /// The table is full.
    #[error("all {capacity} regions of the device are registered: deregister one first")]
    Full {
        /// How many there are.
        capacity: usize,
    },
}

/// Why a reference is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// No region of the owner ever had this key. Also for regions of others, so that nothing is learnt about them.
    #[error("{owner} has no region {index}")]
    Unknown {
        /// Who asked.
        owner: FunctionId,
        /// The index asked for.
        index: u16,
    },
    /// The region has been deregistered.
    #[error("region {index} of generation {asked} has been deregistered: register it again")]
    Stale {
        /// The index asked for.
        index: u16,
        /// The generation asked for.
        asked: u32,
    },
    /// The reference reaches beyond the region.
    #[error("{len_bytes} bytes at {offset_bytes} reach beyond the {region_len_bytes} bytes of region {index}")]
    OutOfBounds {
        /// The region's index.
        index: u16,
        /// Where the reference begins.
        offset_bytes: u64,
        /// How long it is.
        len_bytes: u64,
        /// How long the region is.
        region_len_bytes: u64,
    },
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    /// The generation of the region that is or was last here; the first is 1.
    generation: u32,
    uses: u32,
    len_bytes: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Live(FunctionId),
    /// Deregistered, with uses left.
    Draining(FunctionId),
}

impl<const N: usize> RegionTable<N> {
    /// Make an empty table of which each owner may have `per_owner_max` regions.
    pub const fn new(per_owner_max: usize) -> Self {
        const { assert!(N > 0 && N <= 1 << 16, "a region's index has 16 bits") };
        let entry = Entry { generation: 0, uses: 0, len_bytes: 0, state: State::Free };
        Self { entries: [entry; N], per_owner_max, per_owner_max_bytes: u64::MAX, max_bytes: u64::MAX }
    }

    /// Limit the bytes of the regions that each owner may have, and of all regions. What is deregistered and still in use
    /// counts.
    #[must_use]
    pub const fn with_max_bytes(mut self, per_owner_max_bytes: u64, max_bytes: u64) -> Self {
        (self.per_owner_max_bytes, self.max_bytes) = (per_owner_max_bytes, max_bytes);
        self
    }

    /// Register `len_bytes` bytes of `owner`.
    ///
    /// # Errors
    /// [`RegisterError`], and then nothing has changed.
    pub fn register(&mut self, owner: FunctionId, len_bytes: u64) -> Result<RegionKey, RegisterError> {
        if len_bytes == 0 {
            return Err(RegisterError::Empty);
        }
        let owned = self.entries.iter().filter(|entry| entry.owner() == Some(owner)).count();
        if owned >= self.per_owner_max {
            return Err(RegisterError::Share { owner, max: self.per_owner_max });
        }
        // A table without limits refuses no length: whoever maps the memory does.
        let held = |is_counted: &dyn Fn(&Entry) -> bool| {
            let counted = self.entries.iter().filter(|entry| is_counted(entry));
            counted.fold(0, |held: u64, entry| held.saturating_add(entry.len_bytes))
        };
        let (held_bytes, max_bytes) = (held(&|entry| entry.owner() == Some(owner)), self.per_owner_max_bytes);
        if held_bytes.saturating_add(len_bytes) > max_bytes {
            return Err(RegisterError::ShareBytes { owner, len_bytes, held_bytes, max_bytes });
        }
        let (held_bytes, max_bytes) = (held(&|entry| entry.owner().is_some()), self.max_bytes);
        if held_bytes.saturating_add(len_bytes) > max_bytes {
            return Err(RegisterError::FullBytes { len_bytes, held_bytes, max_bytes });
        }
        let usable = |entry: &Entry| entry.state == State::Free && entry.generation < u32::MAX;
        let index = self.entries.iter().position(usable).ok_or(RegisterError::Full { capacity: N })?;
        let generation = self.entries[index].generation + 1;
        self.entries[index] = Entry { generation, uses: 0, len_bytes, state: State::Live(owner) };
        Ok(RegionKey { index: index as u16, generation })
    }

    /// Deregister a region. True: it is gone. False: it goes with its last use, see [`RegionTable::release`].
    ///
    /// # Errors
    /// [`RegionError::Unknown`] or [`RegionError::Stale`].
    pub fn deregister(&mut self, owner: FunctionId, key: RegionKey) -> Result<bool, RegionError> {
        let entry = self.live(owner, key)?;
        let unused = entry.uses == 0;
        entry.state = if unused { State::Free } else { State::Draining(owner) };
        Ok(unused)
    }

    /// Return the regions of an owner that are registered, or deregistered and still in use.
    pub fn of(&self, owner: FunctionId) -> impl Iterator<Item = RegionKey> + '_ {
        let owned = self.entries.iter().enumerate().filter(move |(_, entry)| entry.owner() == Some(owner));
        owned.map(|(index, entry)| RegionKey { index: index as u16, generation: entry.generation })
    }

    /// Deregister all regions of an owner that is gone, and return how many of them are still in use.
    pub fn deregister_all(&mut self, owner: FunctionId) -> usize {
        let mut draining = 0;
        for entry in self.entries.iter_mut().filter(|entry| entry.owner() == Some(owner)) {
            let unused = entry.uses == 0;
            entry.state = if unused { State::Free } else { State::Draining(owner) };
            draining += usize::from(!unused);
        }
        draining
    }

    /// Check a reference of `owner` to `len_bytes` bytes, and keep the region until [`RegionTable::release`].
    ///
    /// # Errors
    /// [`RegionError`], and then nothing is kept.
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
        // 2^32 uses at a time need as many descriptors in flight, which no queue holds.
        entry.uses += 1;
        Ok(Span { address, len_bytes })
    }

    /// Release one use. True: it was the last one of a region that has been deregistered, which is gone now.
    ///
    /// # Panics
    /// If the region has no use to release: that is a bug of the caller.
    #[track_caller]
    pub fn release(&mut self, key: RegionKey) -> bool {
        let entry = self
            .entries
            .get_mut(usize::from(key.index))
            .filter(|entry| entry.generation == key.generation && entry.uses > 0)
            .expect("a use is released once");
        entry.uses -= 1;
        let gone = entry.uses == 0 && matches!(entry.state, State::Draining(_));
        if gone {
            entry.state = State::Free;
        }
        gone
    }

    /// Tell whether a region is registered, or deregistered and still in use.
    pub fn contains(&self, key: RegionKey) -> bool {
        let entry = self.entries.get(usize::from(key.index));
        entry.is_some_and(|entry| entry.owner().is_some() && entry.generation == key.generation)
    }

    /// Return how many regions are registered or draining.
    pub fn len(&self) -> usize {
        self.entries.iter().filter(|entry| entry.owner().is_some()).count()
    }

    /// Tell whether no region is registered or draining.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn live(&mut self, owner: FunctionId, key: RegionKey) -> Result<&mut Entry, RegionError> {
        let unknown = RegionError::Unknown { owner, index: key.index };
        let entry = self.entries.get_mut(usize::from(key.index)).ok_or(unknown)?;
        match entry.state {
            State::Live(live) if live == owner && entry.generation == key.generation => Ok(entry),
            // A foreign region that came after one's own: only the past is told.
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
