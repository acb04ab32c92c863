//! One packed machine and its reaction to an event: production code between two snapshots.
//!
//! A machine does not depend on the search. To add a kind, add a variant here, its events, and the facts that the
//! oracles of `search` need.

use crate::device::Device;
use crate::rank::Member;
use crate::scope::{Scope, Wiring};
use std::panic::{AssertUnwindSafe, catch_unwind};
use sumac_hal::port::Addr;

/// A machine between two events.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Machine {
    /// An aggregation node.
    Device(Device),
    /// A rank with its endpoint and its buffers.
    Rank(Box<Member>),
}

/// An event of a machine.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event<'p> {
    /// Packets arrive in this order.
    Packets(&'p [(Addr, &'p [u8])]),
    /// Its timer fires.
    Timer,
    /// The rank makes its next calls.
    Call,
    /// The device restarts with empty tables.
    Restart,
    /// The controller starts the next epoch on this machine.
    Renew,
    /// No packet is in flight, so the machine forgets outstanding requests.
    Calm,
}

/// A kind of violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ViolationKind {
    /// A node refused a packet of a correct peer.
    Refused,
    /// A buffer holds neither its input nor the result.
    WrongBytes,
    /// A rank's group ended without a cause.
    Failed,
    /// Production code panicked.
    Panicked,
    /// A slot was reused while a rank below still needed its contents.
    Freed,
    /// `stable` covers a chunk that some rank does not have.
    Unstable,
    /// The end is no longer reachable.
    Stuck,
    /// A packet considered inert has an effect.
    Revived,
    /// Something is pending at the end.
    Restless,
}

/// A machine's reaction to an event.
#[derive(Debug)]
pub(crate) struct Act {
    /// The next state.
    pub(crate) next: Machine,
    /// Packets sent.
    pub(crate) sent: Vec<(Addr, Vec<u8>)>,
    /// The event had no effect and never will: the packet can be removed.
    pub(crate) inert: bool,
    /// The violation, if any.
    pub(crate) flaw: Option<(ViolationKind, String)>,
}

/// The facts of a machine that the search and its oracles use.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Facts {
    /// Its epoch, 0 for none.
    pub(crate) epoch: u16,
    /// A timer is armed.
    pub(crate) armed: bool,
    /// The rank has further calls to make.
    pub(crate) can_call: bool,
    /// The rank has all its results; true for devices.
    pub(crate) done: bool,
    /// The rank's completed chunks, one bit each.
    pub(crate) held: u64,
    /// Chunks whose slots the device has reused, one bit each.
    pub(crate) passed: u64,
    /// The rank was told that every rank has all chunks below this one.
    pub(crate) stable: u64,
}

impl Machine {
    /// Return the initial states of all machines, devices first.
    pub(crate) fn all(scope: &Scope, wiring: &Wiring) -> Vec<Self> {
        let devices = (0..wiring.devices.len()).map(|index| Self::Device(Device::installed(scope, wiring, index)));
        let ranks = (0..wiring.ranks.len()).map(|index| Self::Rank(Box::new(Member::new(scope, wiring, index, 1))));
        devices.chain(ranks).collect()
    }

    /// Apply an event.
    pub(crate) fn act(&self, scope: &Scope, wiring: &Wiring, event: Event<'_>) -> Act {
        let act = catch_unwind(AssertUnwindSafe(|| match self {
            Self::Device(device) => device.act(scope, wiring, event),
            Self::Rank(member) => member.act(scope, wiring, event),
        }));
        act.unwrap_or_else(|cause| {
            let text = cause.downcast_ref::<String>().cloned();
            let text = text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            let flaw = Some((ViolationKind::Panicked, text.unwrap_or_default()));
            Act { next: self.clone(), sent: Vec::new(), inert: false, flaw }
        })
    }

    /// Return the facts for the oracles.
    pub(crate) fn facts(&self, scope: &Scope) -> Facts {
        match self {
            Self::Device(device) => device.facts(),
            Self::Rank(member) => member.facts(scope),
        }
    }
}
