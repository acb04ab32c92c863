//! Memory that peers read and write without asking: who may, where, and until when.
//!
//! Invariants:
//! - What a peer is told of a region ([`RemoteRegion`]) is good until the region is revoked; afterwards the hardware refuses
//!   its key, whoever uses it, and the next one has a higher generation.
//! - A range is checked against both regions before anything is posted. What a peer says of its own region can be a lie:
//!   then the peer's hardware refuses, and the connection ends with [`LinkError::RemoteAccess`](super::LinkError).
//! - A key opens a region to every connection of its domain. Peers that must not reach each other's regions get domains of
//!   their own.

use super::config::{VerbsConfig, VerbsError};
use super::discover::{self, Place};
use super::memory::Registered;
use super::objects::{Domain, GidEntry, PortAttr};
use super::one_sided::OneSided;
use super::shared_receives::SharedReceives;
use crate::remote::{RegionError, RemoteRegion, inside};
use std::sync::Arc;

/// A device's port, and what belongs together on it: regions, and the connections by which peers reach them.
pub struct VerbsDomain {
    pub(super) domain: Arc<Domain>,
    pub(super) gid: GidEntry,
    pub(super) attr: PortAttr,
    /// RDMA READs that a connection may have on their way, in each direction.
    pub(super) reads: u8,
}

impl VerbsDomain {
    /// Open a domain on the port that is asked for.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn open(config: &VerbsConfig) -> Result<Self, VerbsError> {
        let Place { context, attr, gid } = discover::find(config)?;
        let limits = context.device_attr()?;
        let reads = limits.max_qp_rd_atom.min(limits.max_qp_init_rd_atom).clamp(1, MAX_READS);
        // Clamped to less than a byte.
        Ok(Self { domain: Domain::new(&context)?, gid, attr, reads: reads as u8 })
    }

    /// Allocate memory, zeroed, that peers of this domain's connections may read and write.
    ///
    /// # Errors
    /// [`VerbsError::Register`]
    pub fn expose(&self, len_bytes: usize) -> Result<ExposedRegion, VerbsError> {
        Ok(ExposedRegion { memory: Registered::exposed(&self.domain, len_bytes)?, generation: 0 })
    }

    /// Make an end of a connection.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn one_sided(&self) -> Result<OneSided, VerbsError> {
        OneSided::new(self, None)
    }

    /// Make an end that also sends messages, and receives them in a shared queue of this domain.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn messaging(&self, receives: &SharedReceives) -> Result<OneSided, VerbsError> {
        OneSided::new(self, Some(receives))
    }
}

impl std::fmt::Debug for VerbsDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsDomain").field("gid", &self.gid).field("attr", &self.attr).finish_non_exhaustive()
    }
}

/// RDMA READs on their way at a time; more bring nothing on one link.
const MAX_READS: i32 = 16;

/// Memory of this process that peers reach.
pub struct ExposedRegion {
    memory: Registered,
    generation: u32,
}

impl ExposedRegion {
    /// Return what a peer needs to know.
    pub fn remote(&self) -> RemoteRegion {
        let len_bytes = self.memory.len_bytes();
        let addr = self.memory.device_addr(0, len_bytes);
        RemoteRegion { addr, len_bytes: len_bytes as u64, rkey: self.memory.rkey(), generation: self.generation }
    }

    /// Return its length in bytes.
    pub const fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    /// Copy bytes out. Those that a peer is writing meanwhile are of either time.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), RegionError> {
        inside(offset as u64, into.len() as u64, self.memory.len_bytes() as u64)?;
        self.memory.copy_out(offset, into);
        Ok(())
    }

    /// Copy bytes in. Those that a peer is reading meanwhile it gets as they were or as they are.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<(), RegionError> {
        inside(offset as u64, from.len() as u64, self.memory.len_bytes() as u64)?;
        self.memory.copy_in(offset, from);
        Ok(())
    }

    /// Take the region away from all peers: the key that they have opens it no more. What they are told next does.
    ///
    /// # Errors
    /// [`VerbsError::Register`]; then nothing has changed.
    pub fn revoke(&mut self) -> Result<(), VerbsError> {
        self.memory.renew()?;
        self.generation += 1;
        Ok(())
    }

    /// Return the address of a range for this domain's device, and its key there.
    pub(super) fn local(&self, offset: u64, len_bytes: u64) -> Result<(u64, u32), RegionError> {
        inside(offset, len_bytes, self.memory.len_bytes() as u64)?;
        // Inside memory that is there.
        Ok((self.memory.device_addr(offset as usize, len_bytes as usize), self.memory.lkey()))
    }
}

impl std::fmt::Debug for ExposedRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExposedRegion").field("remote", &self.remote()).finish_non_exhaustive()
    }
}
