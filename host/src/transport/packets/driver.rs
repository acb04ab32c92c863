//! Moves packets between an endpoint and its port.

use super::{Buffers, Endpoint};
use std::time::{Duration, Instant as Clock};
use sumac_hal::driver::{self, Batch, PacketCore, PacketSource, Transmit};
use sumac_hal::port::{Addr, Ecn, Port, Train, WaitPort};
use sumac_hal::time::Instant;

/// An endpoint on a port, with a clock.
#[derive(Debug)]
pub struct TreeDriver<P> {
    endpoint: Endpoint,
    port: P,
    start: Clock,
}

/// An endpoint with the buffers of its operations.
struct EndpointCore<'e, B> {
    endpoint: &'e mut Endpoint,
    buffers: &'e mut B,
}

/// The same while it sends: payloads go straight from the buffers.
struct EndpointSource<'s, B> {
    endpoint: &'s mut Endpoint,
    buffers: &'s B,
}

impl<P: Port> TreeDriver<P> {
    /// Create a driver.
    pub fn new(endpoint: Endpoint, port: P) -> Self {
        Self { endpoint, port, start: Clock::now() }
    }

    /// Return the endpoint.
    pub const fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Return the endpoint, to post operations and poll events.
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

    /// Make progress without blocking: receive a burst of packets, handle timeouts, send what may be sent. Returns how
    /// long there is nothing to do unless a packet arrives: zero if there is more to do at once, `None` if only a
    /// packet can make progress.
    #[must_use]
    pub fn pump(&mut self, buffers: &mut impl Buffers) -> Option<Duration> {
        let now = self.now();
        let mut core = EndpointCore { endpoint: &mut self.endpoint, buffers };
        driver::poll(&mut core, &mut self.port, now, 1).map(|at| at - now)
    }
}

impl<P: WaitPort> TreeDriver<P> {
    /// Sleep until a packet arrives, the port is woken or `timeout` has passed.
    pub fn wait(&mut self, timeout: Option<Duration>) {
        self.port.wait(timeout);
    }
}

impl<B: Buffers> PacketCore for EndpointCore<'_, B> {
    type Source<'s>
        = EndpointSource<'s, B>
    where
        Self: 's;

    fn handle(&mut self, now: Instant, from: Addr, ecn: Ecn, train: Train<'_>) {
        self.endpoint.handle_train(now, from, ecn, train.packets(), self.buffers);
    }

    fn handle_timeout(&mut self, now: Instant) {
        self.endpoint.handle_timeout(now);
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.endpoint.poll_timeout()
    }

    fn source(&mut self) -> EndpointSource<'_, B> {
        EndpointSource { endpoint: self.endpoint, buffers: self.buffers }
    }
}

impl<'s, B: Buffers> PacketSource for EndpointSource<'s, B> {
    type Payload = &'s [u8];

    fn poll_transmit(&mut self, now: Instant) -> Option<Transmit<&'s [u8]>> {
        self.endpoint.poll_transmit(now, self.buffers)
    }

    fn poll_batch(&mut self, now: Instant, packets_max: usize, batch: &mut Batch<&'s [u8]>) {
        self.endpoint.poll_batch(now, self.buffers, packets_max, batch);
    }

    fn payload<'t>(&'t self, transmit: &'t Transmit<&'s [u8]>) -> &'t [u8] {
        transmit.payload
    }
}
