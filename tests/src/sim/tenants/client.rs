//! A rank's session with the controller: the messages of `sumac::controller::Session` and `sumac::comm`, and how they
//! react to replies.

use super::TenantViolation as Violation;
use super::draw::{Step, Tenancy};
use super::job::{End, Moving, Phase};
use super::wire::Message;
use super::world::{Actor, Alarm, World};
use crate::sim::controller::Peer;
use crate::sim::coverage::Mark;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use sumac::controller::proto::{ClientReply, ClientRequest, JoinRequest, Membership, Terms, Transport};
use sumac_hal::ctrl::Hello;
use sumac_hal::ids::Rank;
use sumac_hal::shm::DeviceUsers;

impl World<'_, '_> {
    pub(super) fn request(&self, (job, rank): (usize, usize)) -> JoinRequest {
        let plan = &self.plan.jobs[job];
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        JoinRequest {
            job: self.plan.name_of(job),
            rank: Rank(rank as u32),
            world: plan.world as u32,
            host: plan.hosts.get(rank).cloned(),
            order: plan.order,
            mesh_addr: addr,
            recovery_addr: addr,
            max_packet_len_bytes: 65_507,
            transport: if plan.machines.is_empty() { Transport::Udp } else { Transport::Auto },
            machine: plan.machine(rank),
            device_users: DeviceUsers::own(),
            terms: Terms {
                tenant: Tenancy::tenant(plan.tenant),
                wait_ms: plan.wait_ms,
                accepts_migration: plan.moves,
                hierarchical: !plan.machines.is_empty(),
                trees: plan.trees,
                stripe: self.plan.stripe_of(job),
                ..Terms::default()
            },
        }
    }

    /// Dial and request to join; retry later if there is no controller.
    pub(super) fn dial(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if self.waits_for_job(at) {
            return Ok(());
        }
        if self.jobs[at.0].ranks[at.1].peers.has_lost_rank {
            return self.end(at, End::NotJoined);
        }
        let now = self.now;
        let dialled = self.controller.as_mut().and_then(|controller| controller.dial(&Hello::Client, now));
        let Some(conn) = dialled else {
            self.schedule(now + REDIAL_DELAY, Alarm::Rank(at.0, at.1));
            return Ok(());
        };
        self.conns.insert(conn, Peer::Rank(at.0, at.1));
        let until = self.now + JOIN_LIMIT + Duration::from_millis(self.plan.jobs[at.0].wait_ms.into());
        let member = &mut self.jobs[at.0].ranks[at.1];
        (member.conn, member.phase) = (Some(conn), Phase::Joining(until));
        let request = self.request(at);
        self.ask_controller(at, ClientRequest::Join(request));
        self.schedule(until, Alarm::Rank(at.0, at.1));
        Ok(())
    }

    /// Handle a reply of the controller.
    pub(super) fn on_reply(&mut self, at: (usize, usize), reply: ClientReply) -> Result<(), Violation> {
        let member = &mut self.jobs[at.0].ranks[at.1];
        let is_joining = matches!(member.phase, Phase::Joining(_));
        if let ClientReply::TreeLost { view } | ClientReply::Offer { view } | ClientReply::Replanned { view, .. } =
            reply
        {
            member.takeover.view = member.takeover.view.max(view);
        }
        match reply {
            ClientReply::Joined(membership) if is_joining => {
                self.note_tree(at, &membership)?;
                return self.begin(at, membership).and_then(|()| self.advance(at));
            }
            ClientReply::Refused(_) if is_joining => return self.end(at, End::NotJoined),
            ClientReply::LeadHost(lead) => return self.lead_host(at, lead),
            ClientReply::Left => self.release_leader(at),
            _ if is_joining || matches!(member.phase, Phase::Ended(_)) => {}
            reply if member.takeover.is_pending => return self.on_takeover(at, reply),
            ClientReply::RankLost(_) => {
                member.peers.has_lost_rank = true;
                return self.end(at, End::RanksFailed);
            }
            ClientReply::TreeLost { view } if member.has_tree && view >= member.view => {
                self.report.seen.note(Mark::FrozenByController);
                self.freeze(at, true)?;
            }
            ClientReply::Offer { view } => {
                let pauses = member.calls.offer(view).map(|from| (view, from));
                self.report.seen.note(Mark::Offered);
                self.pause(at, pauses);
                self.reach(Step::Offered);
            }
            ClientReply::MoveAt { view, call } => {
                member.calls.move_at(view, call);
                self.reach(Step::Scheduled);
            }
            ClientReply::OfferWithdrawn => member.calls.withdraw(),
            ClientReply::Queued(place) => {
                member.queue = place;
                self.report.seen.note(Mark::PositionReported);
            }
            ClientReply::Replanned { view, membership } => {
                member.queue = membership.queue;
                if member.given_up == Some(view.wrapping_sub(1)) {
                    if membership.tree.is_ok() {
                        let why = "it arrived after a rank had stopped waiting".into();
                        self.ask_controller(at, ClientRequest::Decline { view, device: None, why });
                    }
                } else {
                    member.answer = Some((view.wrapping_sub(1), Some(membership.clone())));
                    self.note_tree(at, &membership)?;
                }
            }
            ClientReply::ReplanRefused { view, .. } => member.answer = Some((view, None)),
            _ => {}
        }
        self.advance(at)
    }

    /// Report that the tree is lost.
    pub(super) fn suspect(&mut self, at: (usize, usize)) {
        let view = self.jobs[at.0].ranks[at.1].view;
        self.ask_controller(at, ClientRequest::Suspect { view });
    }

    /// All ranks are at the call where they move to the offered tree.
    pub(super) fn move_to(&mut self, at: (usize, usize), call: u64, view: u32) -> Result<(), Violation> {
        let member = &mut self.jobs[at.0].ranks[at.1];
        if member.has_tree {
            let pauses = member.calls.moved();
            self.pause(at, pauses);
            return Ok(());
        }
        let vote = member.calls.vote(view, member.view, member.trees);
        member.moving = Some(Moving { call, vote });
        member.view = member.view.max(view);
        if !vote.asks() {
            member.found = None;
            return self.vote(at, 0);
        }
        self.ask_for_tree(at);
        Ok(())
    }

    /// Answer an offer, now or when an earlier one is done: the view, and the call at which this rank will wait.
    pub(super) fn pause(&mut self, at: (usize, usize), offered: Option<(u32, u64)>) {
        if let Some((view, from)) = offered {
            self.ask_controller(at, ClientRequest::Pause { view, at: from });
        }
    }

    /// Request another tree.
    pub(super) fn ask_for_tree(&mut self, at: (usize, usize)) {
        let until = self.now + REPLAN_LIMIT;
        let member = &mut self.jobs[at.0].ranks[at.1];
        (member.answer, member.found) = (None, None);
        member.phase = Phase::Replanning(until);
        let view = member.view;
        member.asked_view = view;
        self.ask_controller(at, ClientRequest::Replan { view });
        self.schedule(until, Alarm::Rank(at.0, at.1));
    }

    /// Take the controller's reply, or continue without; false if it may still arrive.
    pub(super) fn take_answer(
        &mut self,
        at: (usize, usize),
        until: sumac_hal::time::Instant,
    ) -> Result<bool, Violation> {
        let now = self.now;
        let member = &mut self.jobs[at.0].ranks[at.1];
        let view = member.asked_view;
        let answer = member.answer.take_if(|(of, _)| *of == view);
        let has_controller = member.conn.is_some() && !member.takeover.is_pending;
        if answer.is_none() && has_controller && now < until {
            return Ok(false);
        }
        match answer {
            Some((_, Some(membership))) => {
                member.view = member.view.max(view + 1);
                member.found = membership.tree.is_ok().then_some(membership);
            }
            Some((_, None)) => {}
            None => {
                member.given_up = Some(view);
                self.report.seen.note(Mark::ControllerLate);
                self.ask_controller(at, ClientRequest::AbandonReplan { view });
            }
        }
        let member = &mut self.jobs[at.0].ranks[at.1];
        let tree = member.found.as_ref().and_then(|membership| membership.tree.as_ref().ok());
        let group = tree.map_or(0, |tree| u64::from(tree.group.0) + 1);
        if group == 0 {
            self.report.seen.note(Mark::NoTree);
        }
        self.vote(at, group)?;
        Ok(true)
    }

    pub(super) fn decline(&mut self, at: (usize, usize), why: &str) {
        let view = self.jobs[at.0].ranks[at.1].view;
        self.ask_controller(at, ClientRequest::Decline { view, device: None, why: why.to_owned() });
    }

    /// A rank's connection has ended.
    pub(super) fn on_controller_lost(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = &mut self.jobs[at.0].ranks[at.1];
        let is_in_doubt = member.calls.controller_lost();
        member.queue = None;
        member.takeover.is_pending = false;
        if matches!(member.phase, Phase::Ended(_)) {
            self.release_leader(at);
            return Ok(());
        }
        self.await_controller(at);
        if matches!(self.jobs[at.0].ranks[at.1].phase, Phase::Joining(_)) {
            return self.end(at, End::NotJoined);
        }
        if is_in_doubt {
            self.report.seen.note(Mark::OfferInDoubt);
            self.freeze(at, true)?;
        }
        self.advance(at)
    }

    /// A rank stops reading from its connection to the controller.
    pub(super) fn block(&mut self, at: (usize, usize), len: Duration, asks: bool) -> Result<(), Violation> {
        let now = self.now;
        let job = &mut self.jobs[at.0];
        if job.ranks[at.1].conn.is_none() {
            return Ok(());
        }
        (job.ranks[at.1].blocked_until, job.ranks[at.1].asks) = (now + len, asks);
        job.is_disturbed = true;
        self.report.seen.note(Mark::ClientBlocked);
        self.stay_blocked(at)
    }

    /// A blocked rank may ask for a report that it does not read; at the end it reads everything.
    pub(super) fn stay_blocked(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        let member = &self.jobs[at.0].ranks[at.1];
        let Some(conn) = member.conn else { return Ok(()) };
        if member.blocked_until <= self.now {
            return self.flush(conn);
        }
        let next = member.blocked_until.min(self.now + BLOCKED_ASKS_EVERY);
        if member.asks {
            self.ask_controller(at, ClientRequest::Status);
        }
        self.schedule(next, Alarm::Blocked(at.0, at.1));
        Ok(())
    }

    pub(super) fn kill_rank(&mut self, at: (usize, usize)) -> Result<(), Violation> {
        if !matches!(self.jobs[at.0].ranks[at.1].phase, Phase::Disconnected | Phase::Ended(_)) {
            self.jobs[at.0].is_disturbed = true;
            self.report.seen.note(Mark::RankDied);
            self.end(at, End::Killed)?;
        }
        Ok(())
    }

    /// A rank has ended.
    pub(super) fn end(&mut self, at: (usize, usize), end: End) -> Result<(), Violation> {
        if end == End::RanksFailed {
            if let Some(endpoint) = &mut self.jobs[at.0].ranks[at.1].endpoint {
                endpoint.freeze();
            }
            self.check_torn(at)?;
            self.end_started(at)?;
        }
        if end == End::Done {
            self.check_nothing_held(at)?;
        }
        self.check_rank_end(at, end)?;
        self.report.count_end(end);
        let leaves = end == End::Done || end == End::RanksFailed && self.draw.chance(500);
        if leaves {
            self.ask_controller(at, ClientRequest::Leave);
        }
        if end != End::Done {
            self.leave_mesh(at);
        }
        let member = &mut self.jobs[at.0].ranks[at.1];
        (member.phase, member.endpoint, member.recovery) = (Phase::Ended(end), None, None);
        let waits = self.end_leader(at, (end, leaves));
        let member = &mut self.jobs[at.0].ranks[at.1];
        if let Some(conn) = member.conn.take_if(|_| !waits) {
            match end {
                End::Killed => {
                    self.conns.remove(&conn);
                    self.send_message(Message::Gone(conn));
                }
                _ => self.close(conn),
            }
        }
        self.touched.insert(Actor::Rank(at.0, at.1));
        self.end_stripes(at, end)
    }

    /// Record a tree, or the reason for having none, which must be given.
    fn note_tree(&mut self, at: (usize, usize), membership: &Membership) -> Result<(), Violation> {
        match &membership.tree {
            Ok(tree) => {
                self.report.placed += 1;
                self.report.deepest(tree.facts.levels);
                self.check_reserved(at, tree)
            }
            Err(why) if why.is_empty() => {
                Err(Violation { oracle: "no reason", what: format!("job {} has no tree and no reason", at.0) })
            }
            Err(_) => {
                self.report.unplaced += 1;
                if membership.queue.is_some() {
                    self.report.seen.note(Mark::Queued);
                }
                Ok(())
            }
        }
    }
}

/// Limit for all ranks to join.
const JOIN_LIMIT: Duration = Duration::from_secs(20);

/// Limit for the controller to provide another tree.
const REPLAN_LIMIT: Duration = Duration::from_secs(6);

/// Delay before a rank redials.
const REDIAL_DELAY: Duration = Duration::from_millis(90);

/// How often a blocked rank asks for a report.
const BLOCKED_ASKS_EVERY: Duration = Duration::from_millis(40);
