//! A controller's part in a pair: what it tells devices, ranks and the other controller, and what a change of its role
//! does.

use super::super::outbox::Frames;
use super::super::pair::{Pair, RoleChange};
use super::super::proto::{ClientReply, ClientRequest, JoinRefusal, PeerReport};
use super::super::state::State;
use super::{ConnId, Machine};
use std::net::SocketAddr;
use sumac_hal::ctrl::{Envelope, Request, TermClaim};
use sumac_hal::time::Instant;

impl Machine {
    /// Tell a connected client the term, now and repeatedly. A standby refuses. The client has seen the term `seen`.
    pub fn notify_term(&mut self, conn: ConnId, seen: u64) {
        let Some(pair) = &mut self.pair else {
            let claim = TermClaim { term: 0, silence_ms: 0 };
            return self.state.output.send(conn, &ClientReply::Leading(claim));
        };
        pair.handle_hint(seen);
        let active = pair.active_peer();
        match self.claim() {
            Some(claim) => {
                self.failover_clients.insert(conn);
                self.state.output.send(conn, &ClientReply::Leading(claim));
            }
            None => {
                let refusal = JoinRefusal::Standby { active };
                self.state.output.send(conn, &ClientReply::Refused(refusal));
            }
        }
    }

    /// What to tell the other controller, if there is one and this one is not stopping. Hand in its answer with
    /// [`Machine::handle_peer_answer`].
    pub fn peer_report(&self) -> Option<PeerReport> {
        self.pair.as_ref().filter(|_| !self.is_stopping).map(Pair::report)
    }

    /// Handle the other controller's answer to a report made at `asked`; `None` if there was none.
    pub fn handle_peer_answer(&mut self, answer: Option<PeerReport>, asked: Instant, now: Instant) {
        self.set_time(now);
        let Some(pair) = &mut self.pair else { return };
        match answer {
            Some(report) => pair.handle_answer(report, asked),
            None => pair.handle_no_answer(),
        }
        self.update_role();
    }

    /// Handle a report of the other controller.
    pub(super) fn answer_peer(&mut self, report: PeerReport) -> ClientReply {
        let Some(pair) = &mut self.pair else { return ClientReply::Refused(JoinRefusal::NoPair) };
        if report.is_second == pair.config().is_second {
            let side = if report.is_second { "second" } else { "first" };
            tracing::error!(side, "another controller of the pair is started as this one");
            return ClientReply::Refused(JoinRefusal::SameSide { side: side.into() });
        }
        pair.handle_report(report);
        self.update_role();
        self.pair.as_ref().map_or(ClientReply::Left, |pair| ClientReply::Peer(pair.report()))
    }

    /// Refuse what only the active controller serves, if this one is the standby.
    pub(super) fn refuse_as_standby(&mut self, request: &ClientRequest) -> Option<JoinRefusal> {
        let active = match request {
            ClientRequest::Resume(_) => self.witness()?,
            ClientRequest::Join(_) | ClientRequest::JoinOn { .. } | ClientRequest::Update(_) => {
                self.pair.as_ref().filter(|pair| pair.term().is_none())?.active_peer()
            }
            _ => return None,
        };
        Some(JoinRefusal::Standby { active })
    }

    /// A device or a rank of a running job has come. If this controller is the standby and does not take over for that,
    /// return the active one as far as it is known.
    pub(super) fn witness(&mut self) -> Option<Option<SocketAddr>> {
        let pair = self.pair.as_mut().filter(|pair| pair.term().is_none())?;
        pair.handle_witness();
        self.update_role();
        self.pair.as_ref().filter(|pair| pair.term().is_none()).map(Pair::active_peer)
    }

    /// The claim of the active controller of a pair.
    pub(super) fn claim(&self) -> Option<TermClaim> {
        let pair = self.pair.as_ref()?;
        let silence_ms = u32::try_from(pair.config().silence.as_millis()).unwrap_or(u32::MAX);
        Some(TermClaim { term: pair.term()?, silence_ms })
    }

    /// Claim the term on all connections if it is time.
    pub(super) fn claim_again(&mut self) {
        let (Some(claim), Some(pair)) = (self.claim(), &self.pair) else { return };
        let now = self.state.now;
        if self.claimed_at.is_some_and(|at| now - at < pair.config().interval()) {
            return;
        }
        self.claimed_at = Some(now);
        for device in self.state.devices.values().chain(self.state.host_devices.values()) {
            let claim = Envelope { id: u32::MAX, message: Request::Claim(claim) };
            self.state.output.request(device.conn, &claim);
        }
        let frames = Frames::of(&ClientReply::Leading(claim));
        self.state.output.broadcast(self.failover_clients.iter().copied(), frames);
    }

    pub(super) fn update_role(&mut self) {
        while let Some(change) = self.pair.as_mut().and_then(Pair::update) {
            self.change_role(change);
        }
    }

    pub(super) fn change_role(&mut self, change: RoleChange) {
        let peer = self.pair.as_ref().map(|pair| pair.config().peer);
        let elapsed_ms = u64::try_from((self.state.now - self.began).as_millis()).unwrap_or(u64::MAX);
        let now_ms = self.started_ms.saturating_add(elapsed_ms);
        self.is_due = true;
        match change {
            RoleChange::Activated { term } => {
                tracing::warn!(term, peer = ?peer, "this controller is the active one of its pair from now on");
                return self.state.activate(&self.config, now_ms);
            }
            RoleChange::Fenced { own, by } => tracing::warn!(
                own,
                by,
                peer = ?peer,
                "fenced: a controller of a higher term has taken over; this one is the standby from now on. Nothing has \
                 to be done while the other one is active (`sumac status`)"
            ),
            RoleChange::Stalled => tracing::warn!(
                peer = ?peer,
                "this controller was stopped for longer than its pair waits; it is the standby until it has asked the \
                 other one"
            ),
        }
        // Devices and ranks go to the active controller, which learns of the jobs from them.
        let devices = self.state.devices.values().chain(self.state.host_devices.values()).map(|device| device.conn);
        let conns: Vec<_> = self.clients.keys().copied().chain(devices).collect();
        let mut output = std::mem::take(&mut self.state.output);
        let index = std::mem::take(self.state.index());
        conns.into_iter().for_each(|conn| output.close(conn));
        self.state = State::new(&self.config, now_ms, self.state.entropy(), self.state.now);
        self.state.output = output;
        *self.state.index() = index;
        (self.drops_plan, self.drops_report) = (self.is_planning, self.is_reporting);
        (self.claimed_at, self.due) = (None, self.state.now);
        self.clients.clear();
        self.failover_clients.clear();
    }
}
