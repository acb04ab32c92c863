//! How the controller of a cluster runs ([`Controller`]): what it is configured with, when it starts and stops, and
//! what it sends. It plans trees on the cluster's [fabric](super::places).

use super::cluster::Cluster;
use super::controller::{Controller, Peer};
use super::coverage::Mark;
use super::incident::Alarm;
use super::loss::Point;
use super::messages::Message;
use super::options::{Draw, Options};
use super::places::fabric;
use super::report::Violation;
use super::sessions::Session;
use super::wiring::{LEASE_MS, TIMERS, Wiring, slots_for};
use crate::oracle::weight;
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::controller::machine::ConnId;
use sumac::controller::proto::ClientReply;
use sumac::controller::{ControllerConfig, Quota, Quotas, WINDOW_MIN};
use sumac::topo::Fabric;
use sumac_hal::ctrl::{Envelope, FrameError, Request};
use sumac_hal::ids::GroupId;
use sumac_hal::time::Instant;

/// The controller of a cluster, and the connections to it.
#[derive(Default)]
pub(super) struct ControlPlane {
    pub(super) controller: Option<Controller>,
    /// Number of starts.
    starts: u64,
    /// It is gone for good.
    pub(super) is_gone: bool,
    /// It was handed something since it last worked.
    pub(super) is_due: bool,
    fabric: Option<Fabric>,
    /// Open connections, with their peers.
    pub(super) conns: BTreeMap<ConnId, Peer>,
    /// By rank, then group.
    pub(super) sessions: Vec<Vec<Session>>,
}

impl ControlPlane {
    pub(super) fn new(options: &Options, wirings: &[Wiring]) -> Self {
        if !options.recovers() {
            return Self::default();
        }
        let session = |_| (0..options.groups.len()).map(|_| Session::default()).collect();
        Self {
            fabric: fabric(options, wirings),
            sessions: (0..options.ranks).map(session).collect(),
            ..Self::default()
        }
    }

    /// Return when the controller acts next, whatever it is handed.
    pub(super) fn next_event(&self) -> Option<Instant> {
        self.controller.as_ref().map(|controller| controller.machine.poll_timeout())
    }

    pub(super) const fn has_fabric(&self) -> bool {
        self.fabric.is_some()
    }

    /// Return the configuration of a controller. Each group is a tenant, whose quota limits its window.
    fn config(&self, options: &Options) -> ControllerConfig {
        let window = std::iter::successors(Some(options.window), |window| Some(2 * window));
        let window = window.into_iter().find(|&window| window >= WINDOW_MIN).expect("doubling exceeds any limit");
        let slots = Some(u64::from(slots_for(options)));
        // Epochs of the next controller are in another term if its start is hours later.
        let later_ms = Draw::new(weight(&[options.seed, 0x7465_726d])).one_of(&[10_000, 20_000_000]);
        ControllerConfig {
            fabric: self.fabric.clone(),
            window_bytes: u32::from(window) * u32::from(options.chunk_len_bytes),
            chunk_max_bytes: options.chunk_len_bytes,
            multicast_results: false,
            lease: Duration::from_millis(LEASE_MS.into()),
            quotas: Quotas { other: Quota { slots, ..Quota::default() }, ..Quotas::default() },
            timers: TIMERS,
            started_ms: Some(1_000_000 + later_ms * self.starts),
            ..ControllerConfig::new()
        }
    }
}

impl Cluster<'_, '_> {
    /// Start the controller without state.
    pub(super) fn start_controller(&mut self) {
        let control = &mut self.control;
        if control.controller.is_some() || control.is_gone {
            return;
        }
        let (options, starts) = (self.options, control.starts);
        let config = control.config(options);
        control.controller = Some(Controller::start(config, (options.seed, starts), options.planted, self.now));
        control.starts += 1;
        if starts > 0 {
            self.seen.note(Mark::ControllerRestarted);
        }
    }

    /// The controller loses its state, and is away for a while or, without `len`, for good. Its peers detect the ends
    /// of their connections one by one.
    pub(super) fn stop_controller(&mut self, len: Option<Duration>) {
        self.control.is_gone |= len.is_none();
        if self.control.controller.take().is_none() {
            return;
        }
        self.messages.retain(|_, message| message.conn().is_none());
        let most = self.message_draw.one_of(&[10_000, 1_000_000, 200_000_000]);
        for (conn, peer) in std::mem::take(&mut self.control.conns) {
            let at = self.now + Duration::from_nanos(self.message_draw.below(most));
            self.schedule(at, Alarm::Ended(conn, peer));
        }
        if let Some(len) = len {
            self.schedule(self.now + len, Alarm::ControllerUp);
        }
    }

    /// Let the controller do what is due, and send its output.
    pub(super) fn serve(&mut self) -> Result<(), Violation> {
        let now = self.now;
        let Some(controller) = &mut self.control.controller else { return Ok(()) };
        if !std::mem::take(&mut self.control.is_due) && controller.machine.poll_timeout() > now {
            return Ok(());
        }
        controller.work(now);
        let (mut requests, mut replies) = (Vec::new(), Vec::new());
        while let Some(conn) = controller.connections.poll_unflushed() {
            let (mut frames, _) = controller.flush(conn, false, now);
            match self.control.conns.get(&conn) {
                Some(Peer::Device(device)) => {
                    while let Some(request) = frames.take_message::<Envelope<Request>>().map_err(undecodable)? {
                        requests.push((*device, conn, request));
                    }
                }
                Some(Peer::Rank(..)) => {
                    while let Some(reply) = frames.take_message::<ClientReply>().map_err(undecodable)? {
                        replies.push((conn, reply));
                    }
                }
                None => {}
            }
        }
        let closed: Vec<ConnId> = std::iter::from_fn(|| controller.connections.poll_closed()).collect();
        self.record_assignments(requests.iter().map(|(device, _, request)| (*device, &request.message)));
        self.check_trees()?;
        for (_, conn, request) in requests {
            self.note_rollback(&request.message);
            self.send_message(Message::ToDevice(conn, Box::new(request)));
        }
        for (conn, reply) in replies {
            self.note_assignment(&reply)?;
            let is_of_recovery = matches!(reply, ClientReply::Replanned { .. });
            self.send_message(Message::ToRank(conn, Box::new(reply)));
            if is_of_recovery {
                self.reach(Point::Assigned, None);
            }
        }
        for conn in closed {
            if let Some(peer) = self.control.conns.remove(&conn) {
                self.schedule(now, Alarm::Ended(conn, peer));
            }
        }
        Ok(())
    }

    /// Note whether a group is released that no rank was told of: a device of its tree was unavailable.
    fn note_rollback(&mut self, request: &Request) {
        let Request::ReleaseGroup(id) = request else { return };
        if self.tree_of(*id).is_some_and(|tree| !self.assignments[tree].is_assigned) {
            self.seen.note(Mark::RolledBack);
        }
    }

    /// Ranks are told of a tree only once it is reserved on all its devices.
    fn note_assignment(&mut self, reply: &ClientReply) -> Result<(), Violation> {
        let (ClientReply::Joined(membership) | ClientReply::Replanned { membership, .. }) = reply else {
            return Ok(());
        };
        let Ok(place) = &membership.tree else { return Ok(()) };
        let wrong = |what: String| Err(Violation::Controller { what });
        let Some(tree) = self.tree_of(place.group) else {
            return wrong(format!("{} is assigned, and no device was asked for it", place.group));
        };
        if !self.assignments[tree].is_assigned && self.options.has_paths() {
            self.check_paths(tree)?;
        }
        let assignment = &mut self.assignments[tree];
        assignment.is_assigned = true;
        let missing = assignment.wiring.nodes.iter().find(|node| !assignment.reserved.contains(&node.device));
        match missing {
            Some(node) => wrong(format!("{} is assigned, and device {} never had it", place.group, node.device)),
            None => Ok(()),
        }
    }

    /// Return the group that holds a claim of the controller.
    pub(super) fn group_of_claim(&self, id: GroupId) -> Option<usize> {
        let claims = self.control.controller.as_ref()?.machine.claims();
        let claim = claims.into_iter().find(|claim| claim.group == id)?;
        (0..self.options.groups.len()).find(|&group| tenant(group) == claim.tenant)
    }
}

/// Return the name of a group's tenant, and of its job.
pub(super) fn tenant(group: usize) -> String {
    format!("group{group}")
}

fn undecodable(error: FrameError) -> Violation {
    Violation::Controller { what: format!("sends what cannot be decoded: {error}") }
}
