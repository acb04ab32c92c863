//! Memory that peers access with one-sided operations: access rights, bounds and revocation.
//!
//! Invariants:
//! - A region's description ([`RemoteRegion`]) is valid until the region is revoked; afterwards the hardware refuses
//!   its key from every peer, and the next description has a higher generation. Devices use keys again: this domain
//!   exposes nothing under a key that was revoked within 30 seconds, among the last 64. A peer that uses a key for
//!   longer, or in the moment in which such a registration is replaced, may access other exposed memory of the domain.
//! - A range is checked against both regions before it is posted. If a peer's description of its own region is wrong,
//!   the peer's hardware refuses the access, and the connection ends with
//!   [`LinkError::RemoteAccess`](super::LinkError).
//! - A key grants access through every connection of its domain. Peers that must not access each other's regions get
//!   separate domains.

use super::config::{VerbsConfig, VerbsError};
use super::datagrams::Source;
use super::discover::{self, PortLocation};
use super::memory::RegisteredBuffer;
use super::objects::{Domain, PortAttr};
use super::one_sided::OneSided;
use super::shared_receives::SharedReceives;
use crate::remote::{RegionError, RemoteRegion, check_range};
use std::sync::Arc;

/// A protection domain on an RDMA port: regions, and the connections through which peers access them.
pub struct VerbsDomain {
    pub(super) domain: Arc<Domain>,
    pub(super) from: Source,
    pub(super) attr: PortAttr,
    /// RDMA READs that a connection may have outstanding, in each direction.
    pub(super) reads: u8,
}

impl VerbsDomain {
    /// Open a domain on the configured port.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn open(config: &VerbsConfig) -> Result<Self, VerbsError> {
        let location = discover::find(config)?;
        let from = location.source(config)?;
        let PortLocation { context, attr, .. } = location;
        let limits = context.device_attr()?;
        let reads = limits.max_qp_rd_atom.min(limits.max_qp_init_rd_atom).clamp(1, MAX_READS);
        // Clamped to at most `MAX_READS`.
        Ok(Self { domain: Domain::new(&context, config.link.is_relaxed)?, from, attr, reads: reads as u8 })
    }

    /// Allocate zeroed memory that peers of this domain's connections may read and write.
    ///
    /// # Errors
    /// [`VerbsError::Register`]
    pub fn expose(&self, len_bytes: usize) -> Result<ExposedRegion, VerbsError> {
        Ok(ExposedRegion { memory: RegisteredBuffer::exposed(&self.domain, len_bytes)?, generation: 0 })
    }

    /// Create one end of a connection.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn one_sided(&self) -> Result<OneSided, VerbsError> {
        OneSided::new(self, None)
    }

    /// Create an end that also sends messages, and receives them in a shared queue of this domain.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn messaging(&self, receives: &SharedReceives) -> Result<OneSided, VerbsError> {
        OneSided::new(self, Some(receives))
    }
}

impl std::fmt::Debug for VerbsDomain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerbsDomain").field("from", &self.from).field("attr", &self.attr).finish_non_exhaustive()
    }
}

/// Maximum outstanding RDMA READs: more do not increase the throughput of one link.
const MAX_READS: i32 = 16;

/// Memory of this process that peers access.
pub struct ExposedRegion {
    memory: RegisteredBuffer,
    generation: u32,
}

impl ExposedRegion {
    /// Return the description for a peer.
    pub fn remote(&self) -> RemoteRegion {
        let len_bytes = self.memory.len_bytes();
        let addr = self.memory.device_addr(0, len_bytes);
        RemoteRegion { addr, len_bytes: len_bytes as u64, rkey: self.memory.rkey(), generation: self.generation }
    }

    /// Return its length in bytes.
    pub const fn len_bytes(&self) -> usize {
        self.memory.len_bytes()
    }

    /// Copy bytes out; they are a mixture of old and new if a peer writes concurrently.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), RegionError> {
        check_range(offset as u64, into.len() as u64, self.memory.len_bytes() as u64)?;
        self.memory.copy_out(offset, into);
        Ok(())
    }

    /// Copy bytes in; a peer that reads concurrently sees a mixture of old and new.
    ///
    /// # Errors
    /// [`RegionError`]
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<(), RegionError> {
        check_range(offset as u64, from.len() as u64, self.memory.len_bytes() as u64)?;
        self.memory.copy_in(offset, from);
        Ok(())
    }

    /// Revoke all peers' access: their key becomes invalid. The next description has a new key. See the module on how
    /// long the old one opens nothing else.
    ///
    /// # Errors
    /// [`VerbsError::Register`]; nothing has changed then.
    pub fn revoke(&mut self) -> Result<(), VerbsError> {
        self.memory.reregister()?;
        self.generation += 1;
        Ok(())
    }

    /// Return the device's address of a range, and its local key.
    pub(super) fn local(&self, offset: u64, len_bytes: u64) -> Result<(u64, u32), RegionError> {
        check_range(offset, len_bytes, self.memory.len_bytes() as u64)?;
        // In range, so it fits `usize`.
        Ok((self.memory.device_addr(offset as usize, len_bytes as usize), self.memory.lkey()))
    }
}

impl std::fmt::Debug for ExposedRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ExposedRegion").field("remote", &self.remote()).finish_non_exhaustive()
    }
}
