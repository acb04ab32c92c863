//! Moves packets between an endpoint and its port.

use crate::transport::packets::{Buffers, Endpoint, Outgoing};
use std::time::{Duration, Instant as Clock};
use sumac_hal::port::{Gather, Port, RxToken, WaitPort};
use sumac_hal::time::Instant;

/// An endpoint on a port, with a clock.
#[derive(Debug)]
pub struct TreeDriver<P> {
    endpoint: Endpoint,
    port: P,
    start: Clock,
}

impl<P: Port> TreeDriver<P> {
    /// Put an endpoint on a port.
    pub fn new(endpoint: Endpoint, port: P) -> Self {
        Self { endpoint, port, start: Clock::now() }
    }

    /// Return the endpoint.
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Return the endpoint, to post operations and take events.
    pub const fn endpoint_mut(&mut self) -> &mut Endpoint {
        &mut self.endpoint
    }

    /// Return the port.
    pub const fn port(&self) -> &P {
        &self.port
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Do what can be done without waiting: take in a burst of packets, do what is due, send what may be sent.
    /// Returns how long there is nothing to do unless a packet arrives: zero if there is more at once, `None` if
    /// only a packet can bring it on.
    pub fn pump(&mut self, buffers: &mut impl Buffers) -> Option<Duration> {
        let now = self.now();
        let burst = self.port.capabilities().burst_packets.max(1);
        let mut received = 0;
        while received < burst {
            let Some(token) = self.port.receive(now) else { break };
            let is_marked = token.is_marked();
            token.consume(|from, packet| match is_marked {
                true => self.endpoint.handle_marked(from, packet, buffers, now),
                false => self.endpoint.handle(from, packet, buffers, now),
            });
            received += 1;
        }
        if self.endpoint.poll_timeout().is_some_and(|at| at <= now) {
            self.endpoint.handle_timeout(now);
        }
        // What the socket refused earlier goes first.
        self.port.flush(now);
        let blocked = !self.transmit(buffers, now);
        if blocked || received == burst {
            return Some(Duration::ZERO);
        }
        self.endpoint.poll_timeout().map(|at| at - now)
    }

    /// Send what the endpoint has, payloads from the caller's buffers; false if the port could not take all of it.
    fn transmit(&mut self, buffers: &impl Buffers, now: Instant) -> bool {
        loop {
            let room = self.port.room().min(BATCH);
            if room == 0 {
                return false;
            }
            let mut batch: heapless::Vec<Outgoing<'_>, BATCH> = heapless::Vec::new();
            while batch.len() < room {
                let Some(out) = self.endpoint.poll_outgoing(buffers, now) else { break };
                // There is room: the batch is as long as what was asked for.
                let _ = batch.push(out);
            }
            if batch.is_empty() {
                return true;
            }
            let packets = batch.iter().map(|out| Gather { to: out.to, header: &out.header, payload: out.payload });
            self.port.transmit_gather(packets, now);
        }
    }
}

impl<P: WaitPort> TreeDriver<P> {
    /// Sleep until a packet arrives, the port is woken or `timeout` has passed.
    pub fn wait(&mut self, timeout: Option<Duration>) {
        self.port.wait(timeout);
    }
}

/// Packets handed to the port at a time.
const BATCH: usize = 32;
