//! The controllers of a world ([`Controller`]): when they start and stop, what they send, and clients that do not read.

use super::TenantViolation as Violation;
use super::draw::{PEER_OUTPUT_BYTES, STALLED};
use super::wire::Message;
use super::world::{Alarm, World};
use crate::sim::controller::{Controller, Peer};
use crate::sim::coverage::Mark;
use std::time::Duration;
use sumac::controller::machine::ConnId;

impl World<'_, '_> {
    /// Start the controller without state.
    pub(super) fn start_controller(&mut self) {
        if self.controller.is_some() {
            return;
        }
        let config = self.plan.config(self.incarnation);
        let which = (self.plan.seed, self.incarnation);
        self.controller = Some(Controller::start(config, which, self.plan.planted, self.now));
        if self.incarnation > 0 {
            self.report.seen.note(Mark::ControllerRestarted);
        }
        self.incarnation += 1;
        #[cfg(feature = "planted")]
        self.inherit_claims();
    }

    #[cfg(feature = "planted")]
    fn inherit_claims(&mut self) {
        let trusts_old = self.plan.planted.bug == Some(sumac_hal::planted::Bug::OldReservationTrusted);
        if let (Some(controller), Some(earlier), true) = (&mut self.controller, self.earlier.take(), trusts_old) {
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
        let (mut frames, is_left) = controller.flush(conn, is_blocked, now);
        if is_left && self.blocked.insert(conn) {
            self.schedule(now + STALLED, Alarm::Sweep);
            self.schedule(now + STALLED + SWEEP_LIMIT, Alarm::Sweep);
        }
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

/// How long after its deadline a connection ends at the latest.
const SWEEP_LIMIT: Duration = Duration::from_millis(110);
