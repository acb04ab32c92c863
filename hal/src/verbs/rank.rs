//! A rank's end of the `rdma` transport: one connection to its leaf device, with messages and memory that the device
//! reads and writes.
//!
//! Invariants:
//! - A caller's memory is registered for remote reads only, the landing area also for writes.
//! - After [`RankLink::fence`] the queue pair is stopped, drained and destroyed, and no memory is registered.
//! - There are receive buffers for everything that can be outstanding: results not yet taken, and messages.

use super::config::{VerbsConfig, VerbsError, VerbsLink};
use super::memory::Registration;
use super::one_sided::{OneSided, OneSidedEnd};
use super::region::VerbsDomain;
use super::shared_receives::SharedReceives;
use crate::dma::DmaMemory;
use crate::remote::{
    Access, Arrived, BUFFERS, LINK_END_LEN_BYTES, Link, LinkEnd, LinkError, LinkFailure, MESSAGE_LEN_BYTES, RankLink,
    RemoteRegion,
};
use crate::shm::Region;
use crate::traffic_class::TrafficClass;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// The maximum number of results announced and not taken: a rank has as many places for answers.
pub(super) const LANDED_MAX: usize = 1024;

impl OneSidedEnd {
    /// Serialize for the handshake.
    pub fn to_link_end(self) -> LinkEnd {
        let mut bytes = [0; LINK_END_LEN_BYTES];
        bytes[..16].copy_from_slice(&self.gid);
        bytes[16..18].copy_from_slice(&self.lid.to_le_bytes());
        bytes[18..20].copy_from_slice(&self.mtu_bytes.to_le_bytes());
        // Numbers of queue pairs have 24 bits.
        bytes[20..24].copy_from_slice(&(self.qpn | u32::from(self.reads) << 24).to_le_bytes());
        bytes[24..28].copy_from_slice(&self.psn.to_le_bytes());
        LinkEnd(bytes)
    }

    /// Deserialize.
    pub fn from_link_end(end: &LinkEnd) -> Self {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|nth| end.0[at + nth]));
        let half = |at: usize| u16::from_le_bytes([end.0[at], end.0[at + 1]]);
        let gid = std::array::from_fn(|nth| end.0[nth]);
        let (qpn, reads) = (word(20) & 0xff_ffff, end.0[23]);
        Self { gid, lid: half(16), mtu_bytes: half(18), qpn, psn: word(24), reads }
    }
}

/// A rank's end.
pub struct RankEnd {
    // First, so that nothing can arrive when the other fields are dropped.
    connection: OneSided,
    receives: SharedReceives,
    exposed: Vec<Registration>,
    /// Arrivals that were not taken.
    inbox: VecDeque<super::shared_receives::Received>,
    domain: VerbsDomain,
}

impl std::fmt::Debug for RankEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RankEnd").field("connection", &self.connection).finish_non_exhaustive()
    }
}

/// Open a rank's link on an RDMA port.
///
/// # Errors
/// [`LinkFailure`]: an invalid name, or a [`VerbsError`].
pub fn rank_link(name: &str, prefer: IpAddr, traffic_class: TrafficClass) -> Result<Box<dyn RankLink>, LinkFailure> {
    let link = name.parse::<VerbsLink>().map_err(|why| LinkFailure(why.to_string()))?;
    let config = VerbsConfig { link, prefer: Some(prefer), traffic_class, ..VerbsConfig::default() };
    let domain = VerbsDomain::open(&config).map_err(failure)?;
    Ok(Box::new(RankEnd::new(domain).map_err(failure)?))
}

fn failure(error: VerbsError) -> LinkFailure {
    LinkFailure(error.to_string())
}

impl RankEnd {
    /// Create an end in a domain of its own.
    ///
    /// # Errors
    /// [`VerbsError`]
    pub fn new(domain: VerbsDomain) -> Result<Self, VerbsError> {
        let receives = SharedReceives::new(&domain, LANDED_MAX + BUFFERS)?;
        let connection = domain.messaging(&receives)?;
        let inbox = VecDeque::with_capacity(LANDED_MAX + BUFFERS);
        Ok(Self { connection, receives, exposed: Vec::new(), inbox, domain })
    }

    /// Return the counters of the connection and of receptions.
    pub const fn stats(&self) -> (super::LinkStats, super::ReceiveStats) {
        (self.connection.stats(), self.receives.stats())
    }
}

impl RankEnd {
    fn poll_arrivals(&mut self) {
        let inbox = &mut self.inbox;
        self.receives.poll(|_, received| {
            inbox.push_back(received);
            true
        });
    }
}

impl Link for RankEnd {
    fn send(&mut self, message: &[u8]) -> Result<bool, LinkError> {
        self.connection.send(message)
    }

    fn receive(&mut self, into: &mut [u8; MESSAGE_LEN_BYTES]) -> Result<Option<Arrived>, LinkError> {
        if self.inbox.is_empty() {
            self.poll_arrivals();
        }
        match self.inbox.pop_front() {
            Some(received) => Ok(Some(self.receives.take(received, into))),
            // Without arrivals, poll for the completion of sent messages: that is how a dead peer is noticed.
            None if self.connection.is_idle() => {
                self.connection.check_device(false);
                self.connection.error().map_or(Ok(None), Err)
            }
            None => self.connection.poll().error.map_or(Ok(None), Err),
        }
    }
}

impl RankLink for RankEnd {
    fn end(&self) -> LinkEnd {
        self.connection.end().to_link_end()
    }

    fn connect(&mut self, device: &LinkEnd) -> Result<(), LinkFailure> {
        self.connection.connect(&OneSidedEnd::from_link_end(device)).map_err(failure)
    }

    fn expose(&mut self, memory: Region, access: Access) -> Result<RemoteRegion, LinkFailure> {
        let memory: Arc<dyn DmaMemory> = Arc::new(memory);
        let registration =
            Registration::exposed(&self.domain.domain, &memory, access == Access::Land).map_err(failure)?;
        let addr = memory.base().as_ptr().expose_provenance() as u64;
        let region =
            RemoteRegion { addr, len_bytes: memory.len_bytes() as u64, rkey: registration.rkey(), generation: 0 };
        self.exposed.push(registration);
        Ok(region)
    }

    fn withdraw(&mut self, rkey: u32) {
        self.exposed.retain(|registration| registration.rkey() != rkey);
    }

    fn fence(&mut self) -> Result<(), LinkFailure> {
        let stopped = self.connection.stop();
        // Drivers discard unread completions of a destroyed queue pair.
        self.poll_arrivals();
        self.connection.destroy();
        stopped.map_err(failure)?;
        // All of them, also if one fails.
        let ends = self.exposed.iter_mut().map(Registration::deregister).filter_map(Result::err);
        let failed = ends.last();
        self.exposed.clear();
        failed.map_or(Ok(()), |error| Err(failure(error)))
    }

    fn arm(&mut self) {
        self.receives.arm();
        self.connection.arm();
        self.connection.poll_events();
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.receives.channel.fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_round_trips_through_link_end() {
        let gid = std::array::from_fn(|nth| nth as u8);
        let end = OneSidedEnd { gid, lid: 0x1112, qpn: 0x21_2223, psn: 0x31_3233, mtu_bytes: 4096, reads: 16 };
        assert_eq!(OneSidedEnd::from_link_end(&end.to_link_end()), end);
    }
}
