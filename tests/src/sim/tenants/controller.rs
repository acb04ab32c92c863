//! Controllers: the production state machine and the connections in front of it, driven as the controller's threads do.
//! The bytes that they exchange with their peers are decoded at the other end, and travel as messages.

use super::TenantViolation as Violation;
use super::draw::{PEER_OUTPUT_BYTES, STALLED, Tenancy};
use super::wire::{Message, Peer};
use super::world::{Alarm, World};
use crate::oracle::weight;
use crate::sim::coverage::Mark;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;
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
    pub(super) fn start(plan: &Tenancy, incarnation: u64, now: Instant) -> Self {
        let config = Arc::new(plan.config(incarnation));
        let entropy = Entropy::Seeded(weight(&[plan.seed, incarnation, 0x6374_726c]));
        let started_ms = config.started_ms.expect("drawn");
        let connections = Connections::new(config.limits.clone(), ConnId(incarnation << CONN_BITS), now);
        let machine = Machine::new(Arc::clone(&config), started_ms, entropy, now).expect("a valid config");
        Self { machine, connections, config, incarnation }
    }

    /// Return whether it has, or had, this connection.
    pub(super) const fn owns(&self, conn: ConnId) -> bool {
        incarnation_of(conn) == self.incarnation
    }

    /// A peer dials and says hello. Returns `None` if it is refused.
    pub(super) fn dial(&mut self, hello: &Hello, now: Instant) -> Option<ConnId> {
        let conn = self.connections.connect(now)?;
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
    fn work(&mut self, now: Instant) -> bool {
        let mut has_worked = false;
        self.connections.handle_timeout(now);
        loop {
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
    }
}

/// Return the incarnation of the controller that a connection leads to.
pub(super) const fn incarnation_of(conn: ConnId) -> u64 {
    conn.0 >> CONN_BITS
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

impl World<'_, '_> {
    /// Start the controller without state.
    pub(super) fn start_controller(&mut self) {
        if self.controller.is_some() {
            return;
        }
        self.controller = Some(Controller::start(self.plan, self.incarnation, self.now));
        if self.incarnation > 0 {
            self.report.seen.note(Mark::ControllerRestarted);
        }
        self.incarnation += 1;
        #[cfg(feature = "planted")]
        self.plant();
    }

    #[cfg(feature = "planted")]
    fn plant(&mut self) {
        let Some((controller, bug)) = self.controller.as_mut().zip(self.plan.planted.bug) else { return };
        controller.machine.plant(bug);
        controller.connections.plant(bug);
        if let Some(earlier) = self.earlier.take().filter(|_| bug == sumac_hal::planted::Bug::OldReservationTrusted) {
            controller.machine.inherit_claims(earlier);
        }
    }

    pub(super) fn stop_controller(&mut self, len: Duration) {
        let Some(controller) = self.controller.take() else { return };
        self.report.seen.note(Mark::LossController);
        self.end_connections(&controller);
        #[cfg(feature = "planted")]
        {
            self.earlier = Some(controller.machine);
        }
        self.watch.controller_gone();
        self.devices.iter_mut().for_each(|device| device.disturbed = true);
        self.schedule(self.now + len, Alarm::ControllerUp);
    }

    /// Another controller starts at the same address, while this one keeps running with the connections that it has.
    /// Some of them end: those of half the devices, of all ranks of some jobs, and of some ranks of others.
    pub(super) fn succeed_controller(&mut self, len: Duration) {
        if self.older.is_some() || self.controller.is_none() {
            return;
        }
        self.older = self.controller.take();
        self.report.seen.note(Mark::TwoControllers);
        self.watch.controller_gone();
        self.start_controller();
        self.devices.iter_mut().for_each(|device| device.disturbed = true);
        for device in 0..self.devices.len() {
            if self.draw.chance(500)
                && let Some(conn) = self.devices[device].conn
            {
                self.cut(conn);
            }
        }
        for job in 0..self.jobs.len() {
            self.jobs[job].has_lost_controller = true;
            match self.draw.below(3) {
                0 => {}
                1 => self.cut_ranks(job, 1000),
                _ => {
                    self.jobs[job].is_disturbed = true;
                    self.cut_ranks(job, 500);
                }
            }
        }
        self.schedule(self.now + len, Alarm::OlderGone);
    }

    /// The connections of a job's ranks to the controller end, each with this chance.
    fn cut_ranks(&mut self, job: usize, per_mille: u64) {
        let cut: Vec<bool> = self.jobs[job].ranks.iter().map(|_| self.draw.chance(per_mille)).collect();
        let conns: Vec<ConnId> =
            self.jobs[job].ranks.iter().zip(&cut).filter_map(|(rank, cut)| rank.conn.filter(|_| *cut)).collect();
        conns.into_iter().for_each(|conn| self.cut(conn));
    }

    /// The older of two controllers ends.
    pub(super) fn stop_older(&mut self) {
        let Some(older) = self.older.take() else { return };
        self.end_connections(&older);
    }

    /// A controller is gone: its connections end, and what is in flight on them is lost.
    fn end_connections(&mut self, controller: &Controller) {
        let ended: Vec<(ConnId, Peer)> =
            self.conns.iter().filter(|(conn, _)| controller.owns(**conn)).map(|(conn, peer)| (*conn, *peer)).collect();
        for (conn, peer) in ended {
            self.conns.remove(&conn);
            if let Peer::Rank(job, _) = peer {
                self.jobs[job].has_lost_controller = true;
            }
            self.notify_end(conn, peer);
        }
        let is_lost = |message: &Message| message.wire_conn().is_some_and(|conn| controller.owns(conn));
        self.on_wire -= self.messages.values().filter(|message| is_lost(message)).count();
        self.messages.retain(|_, message| !is_lost(message));
    }

    /// The controller that has, or had, this connection.
    pub(super) fn controller_of(&mut self, conn: ConnId) -> Option<&mut Controller> {
        [&mut self.controller, &mut self.older].into_iter().flatten().find(|controller| controller.owns(conn))
    }

    /// Let the controllers do what is due, and send their output.
    pub(super) fn serve(&mut self) -> Result<(), Violation> {
        let now = self.now;
        let (mut unflushed, mut closed) = (Vec::new(), Vec::new());
        for controller in [&mut self.controller, &mut self.older].into_iter().flatten() {
            self.watch.is_stale |= controller.work(now);
            unflushed.extend(std::iter::from_fn(|| controller.connections.poll_unflushed()));
        }
        for conn in unflushed {
            self.flush(conn)?;
        }
        for controller in [&mut self.controller, &mut self.older].into_iter().flatten() {
            closed.extend(std::iter::from_fn(|| controller.connections.poll_closed()));
        }
        for conn in closed {
            if self.blocked.remove(&conn) {
                self.report.seen.note(Mark::ClientShed);
            }
            self.cut(conn);
        }
        self.check_blocked()
    }

    /// Clients that do not read hold no more than their limit, and are disconnected in time.
    fn check_blocked(&mut self) -> Result<(), Violation> {
        let (now, controllers) = (self.now, [&self.controller, &self.older]);
        let waiting = |conn: ConnId| {
            let controller = controllers.into_iter().flatten().find(|controller| controller.owns(conn));
            controller.map_or((0, None), |controller| controller.connections.waiting(conn))
        };
        self.blocked.retain(|conn| waiting(*conn).0 > 0);
        for conn in &self.blocked {
            let (bytes, since) = waiting(*conn);
            let found = |oracle, what| Err(Violation { oracle, what });
            if bytes > PEER_OUTPUT_BYTES {
                return found("output limit", format!("{bytes} bytes wait for a client that does not read"));
            }
            if since.is_some_and(|since| now - since >= STALLED + SWEEP_LIMIT) {
                return found("stalled client", format!("not disconnected in {:?}", now - since.unwrap_or(now)));
            }
        }
        Ok(())
    }

    /// Send a connection's output.
    pub(super) fn flush(&mut self, conn: ConnId) -> Result<(), Violation> {
        let (now, peer) = (self.now, self.conns.get(&conn).copied());
        let is_blocked = match peer {
            Some(Peer::Rank(job, rank)) => self.jobs[job].ranks[rank].blocked_until > now,
            _ => false,
        };
        let Some(controller) = self.controller_of(conn) else { return Ok(()) };
        let mut reader = Reader { read: Vec::new(), is_blocked };
        if controller.connections.flush(conn, &mut reader, now) && self.blocked.insert(conn) {
            self.schedule(now + STALLED, Alarm::Sweep);
            self.schedule(now + STALLED + SWEEP_LIMIT, Alarm::Sweep);
        }
        let mut frames = FrameBuffer::new(REPLY_LEN_MAX);
        frames.push(&reader.read);
        let failed = |error| Violation { oracle: "output of the controller", what: format!("{error}") };
        match peer {
            Some(Peer::Device(_)) => {
                while let Some(request) = frames.take_message().map_err(failed)? {
                    self.send_message(Message::ToDevice(conn, request));
                }
            }
            Some(Peer::Rank(..)) => {
                while let Some(reply) = frames.take_message().map_err(failed)? {
                    self.send_message(Message::ToRank(conn, Box::new(reply)));
                }
            }
            None => {}
        }
        Ok(())
    }
}

/// Connections of a controller are numbered from its incarnation in the high bits.
const CONN_BITS: u32 = 32;

/// How long after its deadline a connection ends at the latest.
const SWEEP_LIMIT: Duration = Duration::from_millis(110);
