//! Commands to the device, and replies that nobody waits for.

use super::{POLL_INTERVAL, REGISTER_LIMIT, ZeroCopyDriver};
use crate::transport::memory::error::{ProtocolViolation, RegisterError};
use crate::transport::memory::queue::{AdminReply, Purpose};
use std::time::{Duration, Instant};
use sumac_hal::dma::RegionKey;
use sumac_hal::mmio::{AdminCommand, EntryStatus};

impl ZeroCopyDriver {
    /// Process a reply that nobody waits for.
    pub(super) fn handle_reply(&mut self, reply: &AdminReply) -> Result<(), ProtocolViolation> {
        match reply.purpose {
            Purpose::Deregister(region) if reply.status == EntryStatus::Result => {
                self.registry.remove(region);
                self.device_link.withdraw(region);
                self.arena.iter_mut().for_each(|arena| arena.give_back(region));
            }
            // A region that the device does not release stays mapped; nothing looks it up any more.
            Purpose::Deregister(region) => {
                let status = reply.status;
                crate::log::warn!(
                    device = self.device,
                    ?region,
                    ?status,
                    "cannot deregister a region; it stays mapped"
                );
            }
            Purpose::Abandoned => {
                if let Some(region) = RegionKey::from_bits(reply.value)
                    && reply.status == EntryStatus::Result
                {
                    let command = AdminCommand::Deregister { region: self.check_unique(region)? };
                    self.admin.submit(command, Purpose::Deregister(region))?;
                }
            }
            Purpose::Awaited => {}
        }
        Ok(())
    }

    /// Register memory that the device has been given.
    pub(super) fn register(&mut self, handle: u64, len_bytes: usize) -> Result<RegionKey, RegisterError> {
        let command = AdminCommand::Register { handle, offset_bytes: 0, len_bytes: len_bytes as u64 };
        match self.command(command, REGISTER_LIMIT)? {
            (EntryStatus::Result, value) => RegionKey::from_bits(value)
                .ok_or(RegisterError::Protocol(ProtocolViolation::UnexpectedEntry { queue: 0 })),
            (status, _) => Err(RegisterError::Refused(status)),
        }
    }

    /// Check that no other memory has this key: regions are looked up and revoked by key.
    pub(super) fn check_unique(&self, region: RegionKey) -> Result<RegionKey, ProtocolViolation> {
        let used = region == self.config.bounce.region || self.registry.region(region).is_some();
        if used { Err(ProtocolViolation::DuplicateRegion { region }) } else { Ok(region) }
    }

    /// Submit a command and wait for its reply.
    pub(in crate::transport::memory) fn command(
        &mut self,
        command: AdminCommand,
        limit: Duration,
    ) -> Result<(EntryStatus, u64), RegisterError> {
        let deadline = Instant::now() + limit;
        let mut cookie = None;
        loop {
            if cookie.is_none() {
                cookie = self.admin.submit(command, Purpose::Awaited)?;
            }
            while let Some(reply) = self.admin.poll()? {
                if Some(reply.cookie) == cookie {
                    return Ok((reply.status, reply.value));
                }
                self.handle_reply(&reply)?;
            }
            // The command is in the ring, should the device resume.
            if self.is_disconnected || self.is_stalled {
                cookie.into_iter().for_each(|cookie| self.admin.abandon(cookie));
                return Err(RegisterError::DeviceLost);
            }
            let now = Instant::now();
            if now >= deadline {
                cookie.into_iter().for_each(|cookie| self.admin.abandon(cookie));
                return Err(RegisterError::Timeout(limit));
            }
            let is_answered = self.wait_for_answer(deadline.min(now + self.poll_interval));
            if !is_answered && self.last_check.elapsed() >= POLL_INTERVAL {
                self.check_device()?;
            }
        }
    }
}
