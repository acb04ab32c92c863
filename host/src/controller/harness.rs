//! A test harness that runs the controller without threads, sockets or a clock.
//!
//! It runs the production state, ledger, queue, planner and sessions of [`Controller`](super::Controller). Where the
//! production controller blocks in a thread, a [`ControllerHarness`] is told what has arrived
//! ([`ControllerHarness::handle_response`], [`ControllerHarness::handle_request`]) or is due
//! ([`ControllerHarness::handle_timeout`]), and polled for output ([`ControllerHarness::poll_transmit`]) and its next
//! deadline ([`ControllerHarness::poll_timeout`]). Secrets are derived from a seed, so a run can be reproduced.

use super::admit::{PendingReservation, RolledBack};
use super::device::{DeviceSession, REPLY_TIMEOUT};
use super::entropy::Entropy;
use super::limits::REPLY_LEN_MAX;
use super::outbox::{Frames, MessageSink};
use super::proto::{ClientReply, ClientRequest, StatusReport};
use super::state::{Client, Draft, PendingRenewals, Served, State};
use super::{ControllerConfig, check};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use sumac_hal::ctrl::{Announce, Envelope, FrameReader, Request, Response, StreamError};
use sumac_hal::ids::{BootId, GroupId, Rank};
use sumac_hal::time::Instant;

/// A connection, as numbered by the simulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

/// An output of the controller on a connection.
#[derive(Debug, Clone, PartialEq)]
// At most one exists at a time.
#[allow(clippy::large_enum_variant)]
pub enum Output {
    /// A request to a device.
    Request(Envelope<Request>),
    /// A message to a client.
    Reply(ClientReply),
    /// The controller closes the connection.
    HangUp,
}

/// What a group holds on a device, according to the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRecord {
    /// The group.
    pub group: GroupId,
    /// The group's tenant.
    pub tenant: String,
    /// The device.
    pub device: String,
    /// The device's incarnation.
    pub boot_id: BootId,
    /// Slots held.
    pub slots: u64,
    /// Slot memory held, in bytes.
    pub memory_bytes: u64,
}

#[derive(Debug)]
enum Frame {
    ToDevice(Vec<u8>),
    ToClient(Vec<u8>),
    End,
}

type Outbox = Arc<Mutex<VecDeque<(ConnId, Frame)>>>;

/// A sink that stores frames until the simulator polls them.
#[derive(Debug)]
struct HarnessSink {
    conn: ConnId,
    frame: fn(Vec<u8>) -> Frame,
    outbox: Outbox,
}

impl HarnessSink {
    fn push(&self, frame: Frame) {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner).push_back((self.conn, frame));
    }
}

impl MessageSink for HarnessSink {
    fn put(&self, parts: &[Frames]) -> bool {
        let bytes: Vec<&[u8]> = parts.iter().map(Frames::bytes).collect();
        self.push((self.frame)(bytes.concat()));
        true
    }

    fn disconnect(&self) {
        self.push(Frame::End);
    }
}

/// The progress of a reservation.
enum DraftStep {
    PendingReply(PendingReservation),
    RolledBack(RolledBack),
}

/// A client, and the job and rank that it has joined as.
type Joined = (Arc<Client>, Option<(String, Rank)>);

/// A controller driven by a simulator, which carries its messages and provides the time.
pub struct ControllerHarness {
    config: ControllerConfig,
    state: State,
    /// The system time that represents the virtual time 0.
    began: std::time::Instant,
    outbox: Outbox,
    devices: BTreeMap<ConnId, Arc<DeviceSession>>,
    clients: BTreeMap<ConnId, Joined>,
    /// Running reservations and their deadlines.
    drafts: Vec<(Draft, DraftStep, Instant)>,
    rounds: Vec<(PendingRenewals, Instant)>,
    renews_at: Instant,
    expires_at: Option<Instant>,
}

impl ControllerHarness {
    /// Start a controller. `config.started_ms` tells its incarnations apart, and `seed` is what secrets are made of.
    ///
    /// # Panics
    /// If `config` is invalid or `config.started_ms` is `None`.
    pub fn start(config: ControllerConfig, seed: u64, now: Instant) -> Self {
        check(&config).expect("a valid config");
        let started_ms = config.started_ms.expect("`started_ms` is set");
        let state = State::new(&config, started_ms, Entropy::Seeded(seed), Arc::new(Condvar::new()));
        let began = state.now;
        let renews_at = now + config.lease / 3;
        Self {
            config,
            state,
            began,
            outbox: Outbox::default(),
            devices: BTreeMap::new(),
            clients: BTreeMap::new(),
            drafts: Vec::new(),
            rounds: Vec::new(),
            renews_at,
            expires_at: None,
        }
    }

    /// Plant a bug in this controller.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.state.plant(bug);
    }

    /// Adopt the claims of an earlier incarnation: a planted bug.
    #[cfg(feature = "planted")]
    pub fn inherit_claims(&mut self, earlier: Self) {
        self.state.inherit_claims(earlier.state);
    }

    fn sink(&self, conn: ConnId, frame: fn(Vec<u8>) -> Frame) -> Box<dyn MessageSink> {
        Box::new(HarnessSink { conn, frame, outbox: Arc::clone(&self.outbox) })
    }

    fn tick(&mut self, now: Instant) {
        self.state.now = self.began + (now - Instant::ZERO);
    }

    /// A device connects and announces itself. Returns false if it is refused; then the connection ends.
    pub fn connect_device(&mut self, conn: ConnId, announce: Announce, now: Instant) -> bool {
        self.tick(now);
        let session = Arc::new(DeviceSession::new(announce, self.sink(conn, Frame::ToDevice)));
        if self.state.add_device(&self.config, &session).is_err() {
            return false;
        }
        session.welcome();
        self.devices.insert(conn, session);
        self.work(now);
        true
    }

    /// Handle a response from a device.
    pub fn handle_response(&mut self, conn: ConnId, response: Envelope<Response>, now: Instant) {
        self.tick(now);
        if let Some(session) = self.devices.get(&conn) {
            session.handle_response(response);
            self.work(now);
        }
    }

    /// A client connects.
    pub fn connect_client(&mut self, conn: ConnId) {
        self.clients.insert(conn, (Arc::new(Client::new(self.sink(conn, Frame::ToClient))), None));
    }

    /// A client asks for something; [`ClientRequest::Status`] is answered by [`ControllerHarness::report`] instead.
    pub fn handle_request(&mut self, conn: ConnId, request: ClientRequest, now: Instant) {
        self.tick(now);
        let Some((client, place)) = self.clients.get_mut(&conn) else { return };
        // Reports are requested separately.
        let (Served::Done | Served::Report) = self.state.serve(&self.config, request, client, place);
        self.work(now);
    }

    /// A connection of a device or client has ended.
    pub fn disconnect(&mut self, conn: ConnId, now: Instant) {
        self.tick(now);
        if let Some(session) = self.devices.remove(&conn) {
            session.mark_closed();
            self.state.remove_device(&session);
        }
        if let Some((client, Some((job, rank)))) = self.clients.remove(&conn) {
            self.state.depart((&job, rank), &client, false);
        }
        self.work(now);
    }

    /// Handle deadlines that have passed. Call it at [`ControllerHarness::poll_timeout`].
    pub fn handle_timeout(&mut self, now: Instant) {
        self.tick(now);
        if now >= self.renews_at {
            self.renews_at = now + self.config.lease / 3;
            self.rounds.push((self.state.lease_round().send(), now + REPLY_TIMEOUT));
        }
        self.work(now);
    }

    /// The next deadline. Poll it again after every other call.
    pub fn poll_timeout(&self) -> Instant {
        let drafts = self.drafts.iter().map(|(.., due)| *due);
        let rounds = self.rounds.iter().map(|(_, due)| *due);
        drafts.chain(rounds).chain(self.expires_at).fold(self.renews_at, Instant::min)
    }

    /// The next output and its connection. Poll until it returns `None` after every other call.
    ///
    /// # Panics
    /// If an output cannot be decoded.
    pub fn poll_transmit(&mut self) -> Option<(ConnId, Output)> {
        fn read<M: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<M, StreamError> {
            FrameReader::with_limit(bytes, REPLY_LEN_MAX).recv()
        }
        let (conn, frame) = self.outbox.lock().unwrap_or_else(PoisonError::into_inner).pop_front()?;
        let sent = match frame {
            Frame::End => Output::HangUp,
            Frame::ToClient(bytes) => Output::Reply(read(&bytes).expect("a reply")),
            Frame::ToDevice(bytes) => Output::Request(read(&bytes).expect("a request")),
        };
        Some((conn, sent))
    }

    fn ask(&mut self, draft: Draft, now: Instant) {
        let (placement, order) = draft.parts();
        let asked = placement.send_reservation(&self.config, order);
        self.drafts.push((draft, DraftStep::PendingReply(asked), now + REPLY_TIMEOUT));
    }

    /// Advance everything whose responses have arrived or timed out.
    fn work(&mut self, now: Instant) {
        loop {
            while let Some(plan) = self.state.next_plan() {
                let apply_plan = plan.run(&self.config);
                self.state.apply_plan(&self.config, apply_plan);
            }
            let expires = self.state.expire_all();
            if self.state.has_plans() {
                continue;
            }
            self.expires_at = expires.map(|at| Instant::ZERO + at.saturating_duration_since(self.began));
            if let Some(draft) = self.state.ready.pop_front() {
                self.ask(draft, now);
                continue;
            }
            let is_over = |round: &PendingRenewals, due: Instant| round.has_answers() || now >= due;
            if let Some(at) = self.rounds.iter().position(|(round, due)| is_over(round, *due)) {
                let (round, _) = self.rounds.remove(at);
                self.state.renewed(round.wait(self.began));
                continue;
            }
            let is_over = |draft: &Draft, step: &DraftStep, due: Instant| {
                let (placement, _) = draft.parts();
                now >= due
                    || match step {
                        DraftStep::PendingReply(asked) => placement.is_answered_by_all(asked),
                        DraftStep::RolledBack(failed) => placement.is_rolled_back(failed),
                    }
            };
            let Some(at) = self.drafts.iter().position(|(draft, step, due)| is_over(draft, step, *due)) else { return };
            let (draft, step, _) = self.drafts.remove(at);
            self.proceed(draft, step, now);
        }
    }

    /// Advance a reservation whose responses have arrived or timed out.
    fn proceed(&mut self, draft: Draft, step: DraftStep, now: Instant) {
        let (placement, _) = draft.parts();
        let reserved = match step {
            DraftStep::PendingReply(asked) => match placement.finish_reservation(asked, self.began) {
                Ok(()) => Ok(()),
                Err(failed) => return self.drafts.push((draft, DraftStep::RolledBack(failed), now + REPLY_TIMEOUT)),
            },
            DraftStep::RolledBack(failed) => Err(placement.finish_rollback(failed, self.began)),
        };
        if let Some(next) = self.state.finish_reservation(&self.config, draft, reserved) {
            self.ask(next, now);
        }
    }

    /// The status report, without the devices' counters.
    pub fn report(&self) -> StatusReport {
        self.state.report(&self.config).without_devices()
    }

    /// All claims in the ledger.
    pub fn claims(&self) -> Vec<ClaimRecord> {
        self.state.claim_records()
    }

    /// Whether no reservation is running or pending.
    pub fn has_no_drafts(&self) -> bool {
        self.drafts.is_empty() && self.state.ready.is_empty()
    }
}
