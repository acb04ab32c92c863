//! Moves packets between a node and its port; every board calls [`poll`].

use crate::node::{Node, Payload};
use sumac_hal::driver::{self, Batch, PacketCore, PacketSource, Transmit};
use sumac_hal::port::{Addr, Ecn, Port, Train};
use sumac_hal::time::Instant;

/// Receive rounds per poll. The bound keeps a flood of packets from delaying control requests.
const ROUNDS: usize = 4;

/// Do everything that can be done at `now` without waiting: receive up to a few bursts of packets, handle expired
/// timers, send. Returns when to poll again if no packet arrives before then; `Some(now)` means that there is more to
/// do at once, and `None` that no timer is armed.
#[must_use]
pub fn poll<P: Port>(node: &mut Node<'_>, port: &mut P, now: Instant) -> Option<Instant> {
    driver::poll(node, port, now, ROUNDS)
}

impl PacketCore for Node<'_> {
    type Source<'s>
        = &'s mut Self
    where
        Self: 's;

    fn handle(&mut self, now: Instant, from: Addr, ecn: Ecn, train: Train<'_>) {
        self.handle_train(now, from, ecn, train.packets());
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
    type Payload = Payload;

    fn poll_transmit(&mut self, now: Instant) -> Option<Transmit<Payload>> {
        Node::poll_transmit(self, now)
    }

    fn payload<'t>(&'t self, transmit: &'t Transmit<Payload>) -> &'t [u8] {
        Node::payload(self, transmit)
    }

    fn poll_batch(&mut self, now: Instant, packets_max: usize, batch: &mut Batch<Payload>) {
        Node::poll_batch(self, now, packets_max, batch);
    }
}
