//! One machine at rest, and what it does when something happens to it: production code between two snapshots.
//!
//! A machine knows nothing of the search. To add a kind (say, whoever runs a repair), give it a variant here, events for
//! what only it can do, and facts for what the oracles of `search` have to know of it.

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

/// What can happen to a machine.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event<'p> {
    /// Packets arrive, one after the other.
    Packets(&'p [(Addr, &'p [u8])]),
    /// Its timer fires.
    Timer,
    /// The rank calls what it calls next.
    Call,
    /// The device starts with empty tables.
    Restart,
    /// The controller begins the next epoch here.
    Renew,
    /// No packet is on its way: what waits for one forgets that.
    Calm,
}

/// What was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// A node refused a packet of a peer that keeps the rules.
    Refused,
    /// A buffer holds what is neither its input nor the result.
    Wrong,
    /// A rank's group ended without a cause.
    Failed,
    /// Production code panicked.
    Panicked,
    /// A slot was used again while a rank below still needed what was in it.
    Freed,
    /// `stable` is said of a chunk that a rank has not got.
    Unstable,
    /// There is no way to the end any more.
    Stuck,
    /// A packet that could make no difference, and never was to, makes one after all.
    Revived,
    /// At the end something is left to be sent or waited for.
    Restless,
}

/// What a machine did.
#[derive(Debug)]
pub(crate) struct Act {
    /// What it is now.
    pub(crate) next: Machine,
    /// What it sent.
    pub(crate) sent: Vec<(Addr, Vec<u8>)>,
    /// Nothing came of it, and nothing ever will: the packet may as well be gone.
    pub(crate) inert: bool,
    /// What was wrong with it.
    pub(crate) flaw: Option<(Flaw, String)>,
}

/// What oracles and the search know of a machine.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Facts {
    /// Its epoch, 0 for none.
    pub(crate) epoch: u16,
    /// A timer is armed.
    pub(crate) armed: bool,
    /// The rank has something left to call.
    pub(crate) can_call: bool,
    /// The rank has all its results; true for devices.
    pub(crate) done: bool,
    /// The rank's chunks with an answer, one bit each.
    pub(crate) held: u64,
    /// The device's chunks that made room for others, one bit each.
    pub(crate) passed: u64,
    /// Every rank has what is below, as the rank was told.
    pub(crate) stable: u64,
}

impl Machine {
    /// All machines before anything happened, devices first.
    pub(crate) fn all(scope: &Scope, wiring: &Wiring) -> Vec<Self> {
        let devices = (0..wiring.devices.len()).map(|index| Self::Device(Device::installed(scope, wiring, index)));
        let ranks = (0..wiring.ranks.len()).map(|index| Self::Rank(Box::new(Member::new(scope, wiring, index, 1))));
        devices.chain(ranks).collect()
    }

    /// Let something happen to it.
    pub(crate) fn act(&self, scope: &Scope, wiring: &Wiring, event: Event<'_>) -> Act {
        let act = catch_unwind(AssertUnwindSafe(|| match self {
            Self::Device(device) => device.act(scope, wiring, event),
            Self::Rank(member) => member.act(scope, wiring, event),
        }));
        act.unwrap_or_else(|cause| {
            let text = cause.downcast_ref::<String>().cloned();
            let text = text.or_else(|| cause.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            let flaw = Some((Flaw::Panicked, text.unwrap_or_default()));
            Act { next: self.clone(), sent: Vec::new(), inert: false, flaw }
        })
    }

    /// Say what there is to know of it.
    pub(crate) fn facts(&self, scope: &Scope) -> Facts {
        match self {
            Self::Device(device) => device.facts(),
            Self::Rank(member) => member.facts(scope),
        }
    }
}
