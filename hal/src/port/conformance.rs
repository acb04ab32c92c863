//! The conformance suite for implementations of [`Port`].
//!
//! [`run`], and [`run_wait`] for a [`WaitPort`](super::WaitPort), check an implementation against the rules of
//! [`port`](super) on a lossless [`Testbed`], and return the first violation. Received packets are compared with sent
//! ones as a multiset of byte strings, so that merged, split, truncated, damaged, duplicated and misdirected packets
//! are all detected.
//!
//! The suite depends on no implementation and reads no clock: it counts calls of [`Testbed::advance`]. A port that
//! blocks where it must not makes it hang.

mod checks;
#[cfg(test)]
mod tests;
mod wait;

pub use wait::{WaitTestbed, run_wait};

use super::{Addr, Port, RxToken, TxToken};
use crate::time::Instant;
use std::collections::BTreeMap;
use thiserror::Error;

/// The number of [`Testbed::advance`] calls without progress after which a packet counts as lost or a queue as stuck.
pub const TIMEOUT_STEPS: usize = 20_000;

/// How many steps the suite watches for unexpected packets.
const QUIET_STEPS: usize = 50;

/// Creates and connects the ports under test, and controls time.
pub trait Testbed {
    /// The implementation under test.
    type Port: Port;

    /// Return `n` connected ports. Packets are not lost as long as they fit the receive buffers.
    fn ports(&mut self, n: usize) -> Vec<Self::Port>;

    /// Return the address that a port's peers send to.
    fn addr_of(&self, port: &Self::Port) -> Addr;

    /// Return an address of the ports' kind that no port uses.
    fn unused_addr(&mut self) -> Addr;

    /// Return the current time.
    fn now(&self) -> Instant;

    /// Advance time by a step. [`TIMEOUT_STEPS`] steps must be ample for a packet to arrive.
    fn advance(&mut self);
}

/// A rule that a port violates.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// Packets did not arrive, although there was room for them.
    #[error("{check}: {missing} of {sent} packets did not arrive; the shortest has {len_bytes} bytes")]
    Missing {
        /// The check that failed.
        check: &'static str,
        /// Packets sent.
        sent: usize,
        /// Packets missing.
        missing: usize,
        /// The length of the shortest one missing.
        len_bytes: usize,
    },
    /// A packet arrived that was not sent there, or more often than it was sent.
    #[error(
        "{check}: an unexpected packet of {len_bytes} bytes arrived at {at}: it was not sent there, or is a duplicate"
    )]
    Unexpected {
        /// The check that failed.
        check: &'static str,
        /// Where it arrived.
        at: Addr,
        /// The packet's length.
        len_bytes: usize,
    },
    /// The receiver sees a wrong sender address.
    #[error("{check}: a packet from {expected} arrived with the sender address {seen}")]
    Address {
        /// The check that failed.
        check: &'static str,
        /// The sender's [`Testbed::addr_of`].
        expected: Addr,
        /// The address that the receiver saw.
        seen: Addr,
    },
    /// The transmit queue is unbounded.
    #[error("{check}: the queue accepted {packets} packets without a flush and never became full")]
    NeverFull {
        /// The check that failed.
        check: &'static str,
        /// Packets queued.
        packets: usize,
    },
    /// The transmit queue stays full.
    #[error("{check}: the queue is still full after {flushes} flushes")]
    StuckFull {
        /// The check that failed.
        check: &'static str,
        /// The number of flushes.
        flushes: usize,
    },
    /// A declared capability is wrong.
    #[error("{check}: {name} is declared as {declared}, but is {found}")]
    Capability {
        /// The check that failed.
        check: &'static str,
        /// The name of the capability.
        name: &'static str,
        /// The declared value.
        declared: usize,
        /// The observed value.
        found: usize,
    },
    /// A wait did not end although it should have.
    #[error("{check}: a wait did not end although there was a reason to")]
    MissedWakeUp {
        /// The check that failed.
        check: &'static str,
    },
    /// A wait returned a wrong reason.
    #[error("{check}: the wait returned {found:?}, expected {expected:?}")]
    WrongWake {
        /// The check that failed.
        check: &'static str,
        /// The actual reason.
        expected: super::Wake,
        /// The reason that it returned.
        found: super::Wake,
    },
}

/// Check an implementation of [`Port`] against every rule.
///
/// # Errors
/// The first [`Violation`].
pub fn run<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    checks::empty_queue_receives_nothing(bed)?;
    checks::every_length_arrives(bed)?;
    checks::empty_token_sends_nothing(bed)?;
    checks::dropped_token_sends_nothing(bed)?;
    checks::replies_reach_the_sender(bed)?;
    checks::equal_packets_are_not_merged(bed)?;
    checks::mixed_lengths_are_not_merged(bed)?;
    checks::full_queue_recovers(bed)?;
    checks::long_bursts_arrive(bed)?;
    checks::gathered_packets_arrive(bed)?;
    checks::many_peers_exchange_packets(bed)?;
    checks::receive_buffer_holds_its_capacity(bed)?;
    checks::unreachable_peer_does_not_affect_others(bed)
}

/// Return bytes that depend on `seed` and `len_bytes`: the output of SplitMix64 (Steele, Lea, Flood: Fast splittable
/// pseudorandom number generators, 2014).
fn content(seed: u64, len_bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ len_bytes as u64;
    let mut bytes = Vec::with_capacity(len_bytes + 8);
    while bytes.len() < len_bytes {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bytes.extend((z ^ (z >> 31)).to_le_bytes());
    }
    bytes.truncate(len_bytes);
    bytes
}

/// The packets of one check that have been sent and not yet received, by receiver.
struct Expectations {
    check: &'static str,
    sent: usize,
    due: BTreeMap<Addr, BTreeMap<Vec<u8>, usize>>,
}

impl Expectations {
    fn new(check: &'static str) -> Self {
        Self { check, sent: 0, due: BTreeMap::new() }
    }

    /// Send `bytes`. While the queue is full, flush and advance time.
    fn send<B: Testbed>(&mut self, bed: &mut B, port: &mut B::Port, to: Addr, bytes: &[u8]) -> Result<(), Violation> {
        for _ in 0..TIMEOUT_STEPS {
            if let Some(token) = port.transmit(bed.now()) {
                token.consume(to, |buffer| (put(buffer, bytes), ()));
                self.expect(to, bytes);
                return Ok(());
            }
            port.flush(bed.now());
            bed.advance();
        }
        Err(Violation::StuckFull { check: self.check, flushes: TIMEOUT_STEPS })
    }

    /// Record that `bytes` have been sent to `to`.
    fn expect(&mut self, to: Addr, bytes: &[u8]) {
        self.sent += 1;
        *self.due.entry(to).or_default().entry(bytes.to_vec()).or_default() += 1;
    }

    /// Check off a received packet.
    fn check_off(&mut self, at: Addr, bytes: &[u8]) -> Result<(), Violation> {
        let unexpected = Violation::Unexpected { check: self.check, at, len_bytes: bytes.len() };
        let due = self.due.get_mut(&at).ok_or(unexpected.clone())?;
        let count = due.get_mut(bytes).ok_or(unexpected)?;
        *count -= 1;
        if *count == 0 {
            due.remove(bytes);
        }
        Ok(())
    }

    fn is_complete(&self, at: Addr) -> bool {
        self.due.get(&at).is_none_or(BTreeMap::is_empty)
    }

    /// Receive what has arrived at `port`, and return the number of packets.
    fn drain<B: Testbed>(&mut self, bed: &B, port: &mut B::Port) -> Result<usize, Violation> {
        let at = bed.addr_of(port);
        let mut packets = 0;
        while let Some(token) = port.receive(bed.now()) {
            token.consume(|_, bytes| self.check_off(at, bytes))?;
            packets += 1;
        }
        Ok(packets)
    }

    /// Receive at `port` until all expected packets have arrived.
    fn receive_all<B: Testbed>(&mut self, bed: &mut B, port: &mut B::Port) -> Result<(), Violation> {
        let at = bed.addr_of(port);
        let mut idle_steps = 0;
        while !self.is_complete(at) && idle_steps < TIMEOUT_STEPS {
            if self.drain(bed, port)? > 0 {
                idle_steps = 0;
            } else {
                bed.advance();
                idle_steps += 1;
            }
        }
        if let Some(due) = self.due.get(&at).filter(|due| !due.is_empty()) {
            let len_bytes = due.keys().map(Vec::len).min().unwrap_or(0);
            return Err(Violation::Missing {
                check: self.check,
                sent: self.sent,
                missing: due.values().sum(),
                len_bytes,
            });
        }
        Ok(())
    }

    /// Like [`Expectations::receive_all`], and check that nothing else arrives.
    fn receive_exactly<B: Testbed>(&mut self, bed: &mut B, port: &mut B::Port) -> Result<(), Violation> {
        self.receive_all(bed, port)?;
        for _ in 0..QUIET_STEPS {
            self.drain(bed, port)?;
            bed.advance();
        }
        Ok(())
    }
}

/// Copy as much of `bytes` as fits. If the buffer is too short, the received packet reveals it.
fn put(buffer: &mut [u8], bytes: &[u8]) -> usize {
    let len = bytes.len().min(buffer.len());
    buffer[..len].copy_from_slice(&bytes[..len]);
    len
}

/// Return two connected ports.
fn pair<B: Testbed>(bed: &mut B) -> (B::Port, B::Port) {
    let mut ports = bed.ports(2);
    let b = ports.pop().expect("the testbed returns two ports");
    let a = ports.pop().expect("the testbed returns two ports");
    (a, b)
}
