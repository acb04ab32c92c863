//! Moves packets between a node and its port; every board calls [`poll`].

use crate::node::{Node, Outgoing};
use sumac_hal::driver::{self, PacketCore, PacketSource};
use sumac_hal::port::{Addr, Gather, Port};
use sumac_hal::time::Instant;

/// Receive rounds per poll. The bound keeps a flood of packets from delaying control requests.
const ROUNDS: usize = 4;

/// Do everything that can be done at `now` without waiting: receive up to a few bursts of packets, handle expired
/// timers, send. Returns when to poll again if no packet arrives before then; `Some(now)` means that there is more to
/// do at once, and `None` that no timer is armed.
pub fn poll<P: Port>(node: &mut Node<'_>, port: &mut P, now: Instant) -> Option<Instant> {
    driver::poll(node, port, now, ROUNDS)
}

impl PacketCore for Node<'_> {
    type Source<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self, from: Addr, packet: &[u8], is_marked: bool, now: Instant) {
        match is_marked {
            true => self.handle_marked(from, packet, now),
            false => Self::handle(self, from, packet, now),
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        Self::handle_timeout(self, now);
    }

    fn poll_timeout(&self) -> Option<Instant> {
        Self::poll_timeout(self)
    }

    fn source(&mut self) -> &mut Self {
        self
    }
}

impl PacketSource for &mut Node<'_> {
    type Outgoing = Outgoing;

    fn poll_outgoing(&mut self, now: Instant) -> Option<Outgoing> {
        Node::poll_outgoing(self, now)
    }

    fn gather<'o>(&'o self, outgoing: &'o Outgoing) -> Gather<'o> {
        Gather { to: outgoing.to, header: &outgoing.header, payload: self.payload(outgoing) }
    }
}
