//! Connections to the controller, and letters between the ranks of a job: they take a while and come in order; a
//! connection may end, and what was on its way is lost.

use super::TenantViolation as Violation;
use super::job::{Phase, Say};
use super::world::{Alarm, World};
use std::time::Duration;
use sumac::controller::proto::{ClientReply, ClientRequest};
use sumac::controller::rehearsal::Conn;
use sumac_hal::ctrl::{Envelope, Request, Response};
use sumac_hal::time::Instant;

/// Whose a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    Device(usize),
    Rank(usize, usize),
}

/// What is on its way.
// Few are, and not for long.
#[allow(clippy::large_enum_variant)]
pub(super) enum Letter {
    ToDevice(Conn, Envelope<Request>),
    FromDevice(Conn, Envelope<Response>),
    ToRank(Conn, Box<ClientReply>),
    FromRank(Conn, ClientRequest),
    /// The peer has closed its connection, and sends nothing more.
    Closed(Conn),
    /// The controller finds that a connection is gone.
    Gone(Conn),
    /// The peer does.
    Ended(Conn, Peer),
    /// From rank to rank of a job; `None`: to all of its ranks at once, as many as they are.
    Mesh {
        job: usize,
        from: usize,
        to: Option<usize>,
        say: Say,
    },
}

impl Letter {
    /// Tell whether it is on a connection to the controller.
    pub(super) const fn is_on_wire(&self) -> bool {
        matches!(
            self,
            Self::ToDevice(..)
                | Self::FromDevice(..)
                | Self::ToRank(..)
                | Self::FromRank(..)
                | Self::Closed(_)
                | Self::Gone(_)
        )
    }

    /// What it does not overtake: the same way between the same two.
    const fn way(&self) -> (u64, u64) {
        match self {
            Self::ToDevice(conn, _) | Self::ToRank(conn, _) => (0, conn.0),
            Self::FromDevice(conn, _) | Self::FromRank(conn, _) | Self::Closed(conn) => (1, conn.0),
            Self::Gone(conn) => (2, conn.0),
            Self::Ended(conn, _) => (3, conn.0),
            Self::Mesh { job, from, to, .. } => {
                let to = if let Some(to) = to { *to as u64 } else { u32::MAX as u64 };
                (4 + *job as u64, (*from as u64) << 32 | to)
            }
        }
    }
}

impl World<'_, '_> {
    /// Send a letter on its way.
    pub(super) fn mail(&mut self, letter: Letter) {
        let most = self.plan.mail_max.as_nanos() as u64;
        let most = self.draw.one_of(&[20_000, most / 8, most]).max(1_000);
        let at = self.now + Duration::from_nanos(1_000 + self.draw.below(most));
        let last = self.last.entry(letter.way()).or_default();
        *last = at.max(*last);
        let at = *last;
        self.letter_numbers += 1;
        self.on_wire += usize::from(letter.is_on_wire());
        self.letters.insert((at, self.letter_numbers), letter);
        self.report.letters_most = self.report.letters_most.max(self.letters.len() as u64);
    }

    pub(super) fn open(&mut self, peer: Peer) -> Conn {
        self.next_conn += 1;
        let conn = Conn(self.next_conn);
        self.conns.insert(conn, peer);
        conn
    }

    /// A connection is gone: both ends find out, each in its time, and what was on its way is lost.
    pub(super) fn cut(&mut self, conn: Conn) {
        let Some(peer) = self.conns.remove(&conn) else { return };
        self.mail(Letter::Gone(conn));
        self.tell_end(conn, peer);
        if let Peer::Device(device) = peer {
            self.devices[device].disturbed = true;
        }
    }

    /// The peer of a connection finds that it is gone.
    pub(super) fn tell_end(&mut self, conn: Conn, peer: Peer) {
        self.mail(Letter::Ended(conn, peer));
    }

    /// A peer closes its connection; what it has sent still arrives.
    pub(super) fn close(&mut self, conn: Conn) {
        self.mail(Letter::Closed(conn));
    }

    pub(super) fn take(&mut self, letter: Letter) -> Result<(), Violation> {
        let is_on_wire = letter.is_on_wire();
        self.on_wire -= usize::from(is_on_wire);
        match letter {
            Letter::ToDevice(conn, request) => {
                if let Some(Peer::Device(device)) = self.conns.get(&conn).copied() {
                    self.ask_of_device(device, conn, request)?;
                }
            }
            Letter::FromDevice(conn, response) => {
                if self.conns.contains_key(&conn)
                    && let Some(controller) = &mut self.controller
                {
                    controller.device_says(conn, response, self.now);
                }
            }
            Letter::ToRank(conn, reply) => {
                if let Some(Peer::Rank(job, rank)) = self.conns.get(&conn).copied() {
                    self.hear((job, rank), *reply)?;
                }
            }
            Letter::FromRank(conn, request) => {
                if self.conns.contains_key(&conn)
                    && let Some(controller) = &mut self.controller
                {
                    controller.client_says(conn, request, self.now);
                }
            }
            Letter::Closed(conn) => {
                self.conns.remove(&conn);
                self.lose(conn);
            }
            Letter::Gone(conn) => self.lose(conn),
            Letter::Ended(conn, peer) => self.end_of(conn, peer)?,
            Letter::Mesh { job, from, to, say } => {
                let all = 0..self.plan.jobs[job].world;
                for to in to.map_or(all, |to| to..to + 1) {
                    self.hear_of_rank((job, to), from, say.clone())?;
                }
            }
        }
        self.watch.is_stale |= is_on_wire;
        Ok(())
    }

    fn lose(&mut self, conn: Conn) {
        if let Some(controller) = &mut self.controller {
            controller.gone(conn, self.now);
        }
    }

    fn end_of(&mut self, conn: Conn, peer: Peer) -> Result<(), Violation> {
        match peer {
            Peer::Device(device) if self.devices[device].conn == Some(conn) => {
                self.devices[device].conn = None;
                self.schedule(self.now + DIAL_AGAIN, Alarm::DialDevice(device));
                Ok(())
            }
            Peer::Rank(job, rank) if self.jobs[job].ranks[rank].conn == Some(conn) => {
                self.jobs[job].ranks[rank].conn = None;
                self.miss_controller((job, rank))
            }
            _ => Ok(()),
        }
    }

    /// A device dials, if it is there, and has not yet.
    pub(super) fn dial_device(&mut self, device: usize) {
        let now = self.now;
        if self.devices[device].node.is_none() || self.devices[device].conn.is_some() {
            return;
        }
        let announce = self.devices[device].announce(device);
        let conn = Conn(self.next_conn + 1);
        let taken = self.controller.as_mut().is_some_and(|controller| controller.device_dials(conn, announce, now));
        if taken {
            let conn = self.open(Peer::Device(device));
            self.devices[device].conn = Some(conn);
            self.watch.is_stale = true;
        } else {
            self.schedule(now + DIAL_AGAIN, Alarm::DialDevice(device));
        }
    }

    /// A rank says something to the controller, if it has one.
    pub(super) fn ask_controller(&mut self, (job, rank): (usize, usize), request: ClientRequest) {
        if let Some(conn) = self.jobs[job].ranks[rank].conn {
            self.mail(Letter::FromRank(conn, request));
        }
    }

    /// A rank says something to all ranks of its job, itself too.
    pub(super) fn tell_all(&mut self, (job, from): (usize, usize), say: &Say) {
        let world = self.plan.jobs[job].world;
        if world > EACH_MAX {
            return self.mail(Letter::Mesh { job, from, to: None, say: say.clone() });
        }
        for to in 0..world {
            self.mail(Letter::Mesh { job, from, to: Some(to), say: say.clone() });
        }
    }

    /// A rank is gone: the others find out.
    pub(super) fn leave_mesh(&mut self, (job, from): (usize, usize)) {
        for to in 0..self.plan.jobs[job].world {
            if to != from && !matches!(self.jobs[job].ranks[to].phase, Phase::Ended(_)) {
                self.mail(Letter::Mesh { job, from, to: Some(to), say: Say::Gone });
            }
        }
    }

    /// Return whether nothing is on its way to or from the controller.
    pub(super) const fn is_silent(&self) -> bool {
        self.on_wire == 0
    }

    /// Return since when the world is whole: nothing goes wrong any more.
    pub(super) fn is_healed(&self) -> bool {
        self.now > Instant::ZERO + self.plan.healed_at()
    }
}

/// The most ranks that each get letters of their own: their number grows with the square.
const EACH_MAX: usize = 16;

/// How long a device waits before it dials again.
const DIAL_AGAIN: Duration = Duration::from_millis(120);
