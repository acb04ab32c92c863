//! A controller: the production state machine and the connections in front of it, driven as the controller's threads
//! do. The bytes that it exchanges with its peers are decoded at the other end.

use super::planted::Planted;
use crate::oracle::weight;
use std::io::{self, ErrorKind, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;
use sumac::controller::ControllerConfig;
use sumac::controller::limits::REPLY_LEN_MAX;
use sumac::controller::machine::{CloseReason, ConnId, Connections, Entropy, Machine};
use sumac_hal::ctrl::{FrameBuffer, Hello, encode_frames};
use sumac_hal::time::Instant;

/// A controller that runs.
pub(super) struct Controller {
    pub(super) machine: Machine,
    pub(super) connections: Connections,
    config: Arc<ControllerConfig>,
    /// Counts from 0.
    incarnation: u64,
}

impl Controller {
    /// Start one of a run's controllers. `config` says when it was started.
    pub(super) fn start(
        config: ControllerConfig,
        (seed, incarnation): (u64, u64),
        planted: Planted,
        now: Instant,
    ) -> Self {
        let config = Arc::new(config);
        let entropy = Entropy::Seeded(weight(&[seed, incarnation, 0x6374_726c]));
        let started_ms = config.started_ms.expect("drawn");
        let connections = Connections::new(config.limits.clone(), ConnId(incarnation << CONN_BITS), now);
        let machine = Machine::new(Arc::clone(&config), started_ms, entropy, now).expect("a valid config");
        planted.controller(Self { machine, connections, config, incarnation })
    }

    /// Return whether it has, or had, this connection.
    pub(super) const fn owns(&self, conn: ConnId) -> bool {
        incarnation_of(conn) == self.incarnation
    }

    /// A peer dials and says hello. Returns `None` if it is refused.
    pub(super) fn dial(&mut self, hello: &Hello, now: Instant) -> Option<ConnId> {
        let conn = self.connections.connect(Ipv4Addr::LOCALHOST.into(), now)?;
        self.handle(conn, &encode_frames(hello).expect("short"), now);
        let is_refused = self.connections.poll_closed().inspect(|closed| assert_eq!(*closed, conn)).is_some();
        (!is_refused).then_some(conn)
    }

    /// Handle an encoded message of a peer.
    pub(super) fn handle(&mut self, conn: ConnId, bytes: &[u8], now: Instant) {
        self.connections.handle_input(conn, bytes, &mut self.machine, now);
    }

    /// The connection of a peer has ended.
    pub(super) fn handle_closed(&mut self, conn: ConnId) {
        self.connections.handle_closed(conn, &CloseReason::Closed);
    }

    /// Handle what is due. Returns whether anything was.
    ///
    /// # Panics
    /// If there is no end to it: something stays due.
    pub(super) fn work(&mut self, now: Instant) -> bool {
        let mut has_worked = false;
        self.connections.handle_timeout(now);
        for _ in 0..TURNS_MAX {
            let (has_ended, is_due) = (self.connections.has_ended(), self.machine.poll_timeout() <= now);
            if has_ended || is_due {
                self.connections.settle(&mut self.machine, now);
            } else if let Some(report) = self.machine.poll_report() {
                self.machine.handle_report(report.run(), now);
            } else if !self.machine.has_plan() {
                return has_worked;
            } else if let Some(task) = self.machine.poll_plan() {
                self.machine.handle_plan(task.run(&self.config), now);
            }
            has_worked = true;
        }
        panic!("the controller has something to do {TURNS_MAX} times at {now:?}");
    }

    /// Return a connection's output, unless its peer does not read, and whether some is left.
    pub(super) fn flush(&mut self, conn: ConnId, is_blocked: bool, now: Instant) -> (FrameBuffer, bool) {
        let mut reader = Reader { read: Vec::new(), is_blocked };
        let is_left = self.connections.flush(conn, &mut reader, now);
        let mut frames = FrameBuffer::new(REPLY_LEN_MAX);
        frames.push(&reader.read);
        (frames, is_left)
    }
}

/// Return the incarnation of the controller that a connection leads to.
pub(super) const fn incarnation_of(conn: ConnId) -> u64 {
    conn.0 >> CONN_BITS
}

/// The peer of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Device(usize),
    /// A rank: of a job, as a tenant's; or in a group.
    Rank(usize, usize),
}

/// A peer that reads everything, or nothing.
struct Reader {
    read: Vec<u8>,
    is_blocked: bool,
}

impl Write for Reader {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_blocked {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.read.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// More than a controller of hundreds of ranks has to do at one moment.
const TURNS_MAX: u32 = 100_000;

/// Connections of a controller are numbered from its incarnation in the high bits.
const CONN_BITS: u32 = 32;
