//! The conformance suite: what every [`Port`] must do, checked from outside.
//!
//! [`run`] (and [`run_wait`] for a [`WaitPort`](super::WaitPort)) drives any implementation through the rules of
//! [`port`](super) on a [`Testbed`] that loses nothing of itself, and returns the first rule that it breaks. What
//! arrives is compared as a multiset of byte strings with what was sent, so that a packet that was merged, split,
//! cut, damaged, doubled or delivered to somebody else cannot pass for another.
//!
//! The suite knows no implementation, reads no clock and measures no time: patience is counted in
//! [`Testbed::pass`]es. A port that blocks where it must not makes it hang.

mod checks;
#[cfg(test)]
mod tests;
mod wait;

pub use wait::{WaitTestbed, run_wait};

use super::{Addr, Port, RxToken, TxToken};
use crate::time::Instant;
use std::collections::BTreeMap;
use thiserror::Error;

/// How many [`Testbed::pass`]es without progress the suite stands before it calls a packet lost or a queue stuck.
pub const PATIENCE_PASSES: usize = 20_000;

/// How many passes it looks for packets that must not arrive.
const SILENCE_PASSES: usize = 50;

/// Where ports are tested: makes them, connects them, and lets time pass.
pub trait Testbed {
    /// The implementation under test.
    type Port: Port;

    /// Make `n` ports that reach each other, without loss as long as their receive buffers hold.
    fn ports(&mut self, n: usize) -> Vec<Self::Port>;

    /// Return an address of the ports' kind where nobody listens.
    fn nowhere(&mut self) -> Addr;

    /// Return the time.
    fn now(&self) -> Instant;

    /// Let some time pass. [`PATIENCE_PASSES`] of it are ample for a packet to arrive.
    fn pass(&mut self);
}

/// A rule of the contract that a port has broken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// Packets were sent and did not arrive, although there was room for them.
    #[error("{check}: {missing} of {sent} packets did not arrive; the shortest has {len_bytes} bytes")]
    Missing {
        /// Which check found it.
        check: &'static str,
        /// Packets sent.
        sent: usize,
        /// Packets missing.
        missing: usize,
        /// The length of the shortest one missing.
        len_bytes: usize,
    },
    /// A packet arrived that nobody sent there, or oftener than it was sent.
    #[error("{check}: a packet of {len_bytes} bytes arrived at {at} that was not sent there, or once too often")]
    Foreign {
        /// Which check found it.
        check: &'static str,
        /// Where it arrived.
        at: Addr,
        /// Its length.
        len_bytes: usize,
    },
    /// The receiver sees another address than the sender's.
    #[error("{check}: a packet of {expected} arrived as from {seen}")]
    Address {
        /// Which check found it.
        check: &'static str,
        /// The sender's [`Port::local_addr`].
        expected: Addr,
        /// What the receiver saw.
        seen: Addr,
    },
    /// The transmit queue has no end.
    #[error("{check}: the queue took {packets} packets without a flush and never said that it is full")]
    NeverFull {
        /// Which check found it.
        check: &'static str,
        /// Packets queued.
        packets: usize,
    },
    /// The transmit queue stays full for ever.
    #[error("{check}: the queue is full after {flushes} flushes")]
    StuckFull {
        /// Which check found it.
        check: &'static str,
        /// Flushes tried.
        flushes: usize,
    },
    /// The capabilities promise something that is not so.
    #[error("{check}: the capabilities say {name} is {promised}, but it is {found}")]
    Capability {
        /// Which check found it.
        check: &'static str,
        /// Which capability.
        name: &'static str,
        /// What it says.
        promised: usize,
        /// What was found.
        found: usize,
    },
    /// A wait went on although there was something to come back for.
    #[error("{check}: a wait slept on although there was a reason to return")]
    SleptOver {
        /// Which check found it.
        check: &'static str,
    },
    /// A wait came back for another reason than there was.
    #[error("{check}: the wait returned {found:?} instead of {expected:?}")]
    Wake {
        /// Which check found it.
        check: &'static str,
        /// The reason there was.
        expected: super::Wake,
        /// The reason it gave.
        found: super::Wake,
    },
}

/// Check every rule for a [`Port`].
///
/// # Errors
/// The first rule that it breaks.
pub fn run<B: Testbed>(bed: &mut B) -> Result<(), Violation> {
    checks::empty_queue_receives_nothing(bed)?;
    checks::every_length_arrives(bed)?;
    checks::no_bytes_are_no_packet(bed)?;
    checks::an_abandoned_token_leaves_nothing(bed)?;
    checks::replies_reach_the_sender(bed)?;
    checks::equal_runs_stay_apart(bed)?;
    checks::mixed_lengths_stay_apart(bed)?;
    checks::a_full_queue_recovers(bed)?;
    checks::long_bursts_arrive(bed)?;
    checks::gathered_packets_arrive(bed)?;
    checks::many_peers(bed)?;
    checks::capabilities_hold(bed)?;
    checks::an_unreachable_peer_harms_nobody(bed)
}

/// Bytes that are the same for the same `seed` and `len_bytes`, and differ for others: SplitMix64's output (Steele,
/// Lea, Flood: Fast splittable pseudorandom number generators, 2014).
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

/// One check in progress: what was sent and is still to arrive, by receiver.
struct Ledger {
    check: &'static str,
    sent: usize,
    due: BTreeMap<Addr, BTreeMap<Vec<u8>, usize>>,
}

impl Ledger {
    fn new(check: &'static str) -> Self {
        Self { check, sent: 0, due: BTreeMap::new() }
    }

    /// Queue `bytes`; flush and let time pass as long as the queue is full.
    fn send<B: Testbed>(&mut self, bed: &mut B, port: &mut B::Port, to: Addr, bytes: &[u8]) -> Result<(), Violation> {
        for _ in 0..PATIENCE_PASSES {
            if let Some(token) = port.transmit(to, bed.now()) {
                token.consume(|buffer| (put(buffer, bytes), ()));
                self.expect(to, bytes);
                return Ok(());
            }
            port.flush(bed.now());
            bed.pass();
        }
        Err(Violation::StuckFull { check: self.check, flushes: PATIENCE_PASSES })
    }

    /// Note that `bytes` are on their way to `to`.
    fn expect(&mut self, to: Addr, bytes: &[u8]) {
        self.sent += 1;
        *self.due.entry(to).or_default().entry(bytes.to_vec()).or_default() += 1;
    }

    /// Strike off a packet that arrived.
    fn strike(&mut self, at: Addr, bytes: &[u8]) -> Result<(), Violation> {
        let foreign = Violation::Foreign { check: self.check, at, len_bytes: bytes.len() };
        let due = self.due.get_mut(&at).ok_or(foreign.clone())?;
        let count = due.get_mut(bytes).ok_or(foreign)?;
        *count -= 1;
        if *count == 0 {
            due.remove(bytes);
        }
        Ok(())
    }

    fn is_settled(&self, at: Addr) -> bool {
        self.due.get(&at).is_none_or(BTreeMap::is_empty)
    }

    /// Take whatever has arrived at `port` by now; return how many packets that was.
    fn drain<B: Testbed>(&mut self, bed: &B, port: &mut B::Port) -> Result<usize, Violation> {
        let at = port.local_addr();
        let mut packets = 0;
        while let Some(token) = port.receive(bed.now()) {
            token.consume(|_, bytes| self.strike(at, bytes))?;
            packets += 1;
        }
        Ok(packets)
    }

    /// Take packets at `port` until all that is due there has arrived.
    fn settle_soon<B: Testbed>(&mut self, bed: &mut B, port: &mut B::Port) -> Result<(), Violation> {
        let at = port.local_addr();
        let mut idle_passes = 0;
        while !self.is_settled(at) && idle_passes < PATIENCE_PASSES {
            if self.drain(bed, port)? > 0 {
                idle_passes = 0;
            } else {
                bed.pass();
                idle_passes += 1;
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

    /// The same, and see that nothing else arrives.
    fn settle<B: Testbed>(&mut self, bed: &mut B, port: &mut B::Port) -> Result<(), Violation> {
        self.settle_soon(bed, port)?;
        for _ in 0..SILENCE_PASSES {
            self.drain(bed, port)?;
            bed.pass();
        }
        Ok(())
    }
}

/// Copy as much of `bytes` as fits; a port whose buffer is too short is found out by what arrives.
fn put(buffer: &mut [u8], bytes: &[u8]) -> usize {
    let len = bytes.len().min(buffer.len());
    buffer[..len].copy_from_slice(&bytes[..len]);
    len
}

/// Make two ports.
fn pair<B: Testbed>(bed: &mut B) -> (B::Port, B::Port) {
    let mut ports = bed.ports(2);
    let b = ports.pop().expect("a testbed makes as many ports as it is asked for");
    let a = ports.pop().expect("a testbed makes as many ports as it is asked for");
    (a, b)
}
