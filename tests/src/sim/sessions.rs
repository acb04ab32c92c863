//! The sessions of a cluster's ranks with the controller: each group is a job. As `sumac::controller::Session` and a
//! communicator do, a rank joins, reports that its tree is lost, asks for another one, and dials the next controller if
//! it loses this one.

use super::cluster::Cluster;
use super::controller::Peer;
use super::coverage::Mark;
use super::incident::Alarm;
use super::messages::Message;
use super::paths::RankProbes;
use super::places::host;
use super::reduce::shape_of;
use super::report::Violation;
use super::serving::tenant;
use super::wiring::rank_addr;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac::controller::proto::{
    ClientReply, ClientRequest, JoinRefusal, JoinRequest, Membership, ResumeRequest, Terms, Transport,
};
use sumac::exec::JobSecret;
use sumac::harness::Attempt;
use sumac::plan::Child;
use sumac_hal::ctrl::Hello;
use sumac_hal::ids::Rank;
use sumac_hal::port::Addr;
use sumac_hal::shm::DeviceUsers;
use sumac_hal::time::Instant;

/// A rank's session.
#[derive(Default)]
pub(super) struct Session {
    conn: Option<ConnId>,
    /// The next controller has not replied yet.
    is_resuming: bool,
    /// A controller has refused this rank: it continues without one.
    is_refused: bool,
    /// The view of its last membership, as the controller counts.
    view: u32,
    /// The latest view that it has heard of.
    latest: u32,
    /// The job's secret and expression, for the next controller.
    identity: Option<(JobSecret, Vec<Vec<Child>>)>,
    /// The view for which it waits for another tree.
    asked: Option<u32>,
    /// The view whose reply is too late.
    given_up: Option<u32>,
    /// Its last membership, and the tree of it.
    pub(super) membership: Option<(Option<usize>, Box<Membership>)>,
    pub(super) probes: RankProbes,
}

impl Session {
    /// Return whether the rank waits for a tree, and does what the controller asks meanwhile.
    pub(super) fn waits_for_tree(&self) -> bool {
        self.membership.is_none() || self.asked.is_some()
    }
}

impl Cluster<'_, '_> {
    /// Start the controller, let devices and ranks connect, and wait until each rank has its membership.
    pub(super) fn join_all(&mut self) -> Result<(), Violation> {
        self.start_controller();
        (0..self.devices.len()).for_each(|device| self.dial_device(device));
        for rank in 0..self.options.ranks {
            for group in 0..self.options.groups.len() {
                let at = self.now + Duration::from_nanos(self.message_draw.below(1_000_000));
                self.schedule(at, Alarm::Dial { rank, group });
            }
        }
        let waits = |session: &Session| session.membership.is_none();
        while self.control.sessions.iter().flatten().any(waits) {
            let next = self.next_event().filter(|&at| at < Instant::ZERO + JOIN_LIMIT);
            let next =
                next.ok_or_else(|| Violation::Controller { what: "not all ranks have joined in time".into() })?;
            self.turn(next)?;
        }
        Ok(())
    }

    fn session(&mut self, (rank, group): (usize, usize)) -> &mut Session {
        &mut self.control.sessions[rank][group]
    }

    /// Return whether a rank's group has a controller that has taken it over, if it is not the first.
    pub(super) fn has_controller(&self, (rank, group): (usize, usize)) -> bool {
        let session = &self.control.sessions[rank][group];
        session.conn.is_some() && !session.is_resuming
    }

    fn request(&self, (rank, group): (usize, usize)) -> JoinRequest {
        let addr = match self.options.address(rank_addr(rank, group)) {
            Addr::Udp(addr) => addr,
            _ => SocketAddr::from((Ipv4Addr::LOCALHOST, 1)),
        };
        JoinRequest {
            job: tenant(group),
            rank: Rank(rank as u32),
            world: self.options.ranks as u32,
            host: self.control.has_fabric().then(|| host(rank)),
            order: self.options.order(group),
            mesh_addr: addr,
            recovery_addr: addr,
            max_packet_len_bytes: 65_507,
            transport: Transport::Udp,
            machine: None,
            device_users: DeviceUsers::own(),
            terms: Terms { tenant: tenant(group), wait_ms: 0, ..Terms::default() },
        }
    }

    /// A rank dials: it joins, or asks the next controller to resume its job.
    pub(super) fn dial(&mut self, at: (usize, usize)) {
        let (rank, group) = at;
        let now = self.now;
        let session = self.session(at);
        if session.conn.is_some() || session.is_refused || self.deaths.is_dead(rank) || self.control.is_gone {
            return;
        }
        let dialled = self.control.controller.as_mut().and_then(|controller| controller.dial(&Hello::Client, now));
        let Some(conn) = dialled else {
            return self.schedule(now + REDIAL_INTERVAL, Alarm::Dial { rank, group });
        };
        self.control.conns.insert(conn, Peer::Rank(rank, group));
        self.control.is_due = true;
        let request = self.request(at);
        let session = self.session(at);
        session.conn = Some(conn);
        let request = match &session.identity {
            None => ClientRequest::Join(request),
            Some((secret, expression)) => ClientRequest::Resume(Box::new(ResumeRequest {
                request,
                devices: Vec::new(),
                view: session.latest,
                shrink_count: 0,
                secret: secret.clone(),
                expression: expression.clone(),
            })),
        };
        session.is_resuming = session.identity.is_some();
        self.send_message(Message::FromRank(conn, Box::new(request)));
    }

    /// Send a request to the controller, if there is one.
    pub(super) fn ask_controller(&mut self, at: (usize, usize), request: ClientRequest) {
        if let Some(conn) = self.session(at).conn.filter(|_| self.has_controller(at)) {
            self.send_message(Message::FromRank(conn, Box::new(request)));
        }
    }

    /// Report that the tree is lost.
    pub(super) fn suspect(&mut self, at: (usize, usize)) {
        let view = self.session(at).view;
        let is_narrow = self.members[at.0][at.1].endpoint.is_path_narrow();
        if is_narrow {
            self.seen.note(Mark::PathNarrowed);
        }
        let lost = if is_narrow { ClientRequest::PathNarrowed { view } } else { ClientRequest::Suspect { view } };
        self.ask_controller(at, lost);
    }

    /// Ask for another tree at the end of an attempt. The reply, or its limit, [finishes](Self::finish_trial) it.
    pub(super) fn ask_for_tree(&mut self, at: (usize, usize), attempt: Attempt) {
        let session = self.session(at);
        let view = session.view;
        (session.asked, session.given_up) = (Some(view), None);
        self.ask_controller(at, ClientRequest::Replan { view });
        let (rank, group) = at;
        let of = self.members[rank][group].view;
        self.schedule(self.now + REPLAN_LIMIT, Alarm::ReplanLimit { rank, group, view: of, attempt });
    }

    /// Stop waiting for another tree.
    pub(super) fn give_up_tree(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let Some(view) = self.session(at).asked.take() else { return Ok(()) };
        self.seen.note(Mark::ControllerLate);
        self.session(at).given_up = Some(view);
        self.ask_controller(at, ClientRequest::AbandonReplan { view });
        self.finish_trial(at, None)
    }

    /// Handle a reply of the controller.
    pub(super) fn on_reply(&mut self, at: (usize, usize), reply: ClientReply) -> Result<(), Violation> {
        let session = self.session(at);
        if let ClientReply::TreeLost { view } | ClientReply::Replanned { view, .. } = reply {
            session.latest = session.latest.max(view);
        }
        match reply {
            ClientReply::Joined(membership) => self.on_joined(at, membership),
            ClientReply::Refused(refusal) => self.on_refused(at, &refusal),
            ClientReply::Resumed { view } => {
                session.is_resuming = false;
                (session.view, session.latest) = (session.view.max(view), session.latest.max(view));
                Ok(())
            }
            _ if session.is_resuming => Ok(()),
            ClientReply::ProbePath(path) => {
                self.on_probe_path(at, *path);
                Ok(())
            }
            ClientReply::RankLost(of) => self.learn_death(at, of.0 as usize, true),
            ClientReply::TreeLost { view } if view >= session.view => self.on_tree_lost(at),
            ClientReply::Replanned { view, membership } => self.on_replanned(at, view, membership),
            ClientReply::ReplanRefused { view, .. } if session.asked == Some(view) => {
                session.asked = None;
                self.seen.note(Mark::NoTree);
                self.finish_trial(at, None)
            }
            _ => Ok(()),
        }
    }

    /// All ranks of the group have joined.
    fn on_joined(&mut self, at: (usize, usize), membership: Box<Membership>) -> Result<(), Violation> {
        let shape = shape_of(&membership.expression, 0);
        if *self.shapes.entry(at.1).or_insert_with(|| shape.clone()) != shape {
            return Err(Violation::Disagreement { group: at.1, view: 0 });
        }
        let tree = membership.tree.as_ref().ok().and_then(|place| self.tree_of(place.group));
        let session = self.session(at);
        session.identity = Some((membership.secret.clone(), membership.expression.clone()));
        session.membership = Some((tree, membership));
        Ok(())
    }

    /// The reply to `Replan`.
    fn on_replanned(&mut self, at: (usize, usize), view: u32, membership: Box<Membership>) -> Result<(), Violation> {
        let tree = membership.tree.as_ref().ok().and_then(|place| self.tree_of(place.group));
        let session = self.session(at);
        if session.given_up == Some(view - 1) {
            if tree.is_some() {
                let why = "it arrived after a rank had stopped waiting".into();
                self.ask_controller(at, ClientRequest::Decline { view, device: None, why });
            }
            return Ok(());
        }
        if session.asked != Some(view - 1) {
            return Ok(());
        }
        (session.asked, session.view) = (None, view);
        session.membership = Some((tree, membership));
        if tree.is_none() {
            self.seen.note(Mark::NoTree);
        }
        self.finish_trial(at, tree)
    }

    fn on_refused(&mut self, at: (usize, usize), refusal: &JoinRefusal) -> Result<(), Violation> {
        let (rank, group) = at;
        let now = self.now;
        let session = self.session(at);
        if !session.is_resuming {
            return Err(Violation::Controller { what: format!("refuses rank {rank} of group {group}: {refusal}") });
        }
        session.is_refused = !matches!(refusal, JoinRefusal::RankTaken { .. });
        session.is_resuming = false;
        if let Some(conn) = session.conn.take() {
            self.control.conns.remove(&conn);
            self.send_message(Message::Gone(conn));
        }
        self.schedule(now + REDIAL_INTERVAL, Alarm::Dial { rank, group });
        Ok(())
    }

    /// A rank has died: its connections end.
    pub(super) fn close_sessions(&mut self, rank: usize) {
        for group in 0..self.options.groups.len() {
            self.session((rank, group)).probes = RankProbes::default();
            if let Some(conn) = self.session((rank, group)).conn.take() {
                self.control.conns.remove(&conn);
                self.send_message(Message::Gone(conn));
            }
        }
    }

    /// A rank's connection to the controller has ended: it dials the next one.
    pub(super) fn rank_lost_controller(&mut self, at: (usize, usize), conn: ConnId) -> Result<(), Violation> {
        let (rank, group) = at;
        if self.deaths.is_dead(rank) || self.session(at).conn != Some(conn) {
            return Ok(());
        }
        let session = self.session(at);
        (session.conn, session.is_resuming) = (None, false);
        session.probes = RankProbes::default();
        let redials_at = self.now + Duration::from_nanos(self.message_draw.below(500_000_000));
        self.schedule(redials_at, Alarm::Dial { rank, group });
        if self.members.is_empty() {
            return Ok(());
        }
        let confirmed = self.deaths.confirmed(at);
        self.advance_change(at, |change| _ = change.report_deaths(&confirmed, false))?;
        self.give_up_tree(at)?;
        self.watch(rank);
        Ok(())
    }
}

/// Limit for all ranks to join.
const JOIN_LIMIT: Duration = Duration::from_secs(20);

/// Limit for the controller to provide another tree.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);

/// The pause between attempts to reconnect.
const REDIAL_INTERVAL: Duration = Duration::from_millis(500);
