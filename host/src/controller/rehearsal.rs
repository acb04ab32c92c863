//! The controller without threads, sockets and a clock: for a simulator that carries its messages.
//!
//! What decides here is what [`Controller`](super::Controller) decides with: the same state, books, queue and planner,
//! the same sessions of devices and clients. Where that one waits in a thread, a [`Rehearsed`] is told when something has
//! come ([`Rehearsed::device_says`], [`Rehearsed::client_says`]) or is due ([`Rehearsed::handle_timeout`]), and asked for
//! what is to be sent ([`Rehearsed::poll_transmit`]) and when it wants to be woken ([`Rehearsed::poll_timeout`]). Its
//! secrets are made of a seed, so that a run can be repeated.

use super::admit::{Failed, Reserving};
use super::device::{ANSWER_TIMEOUT, DeviceSession};
use super::entropy::Entropy;
use super::limits::REPLY_LEN_MAX;
use super::line::{Frames, Line};
use super::proto::{ClientReply, ClientRequest, StatusReport};
use super::state::{Client, Draft, Renewing, Served, State};
use super::{ControllerConfig, check};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use sumac_hal::ctrl::{Announce, Envelope, FrameReader, Request, Response, StreamError};
use sumac_hal::ids::{BootId, GroupId, Rank};
use sumac_hal::time::Instant;

/// A connection, as its carrier calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Conn(pub u64);

/// What the controller sends on a connection.
#[derive(Debug, Clone, PartialEq)]
// One exists at a time.
#[allow(clippy::large_enum_variant)]
pub enum Sent {
    /// To a device.
    Request(Envelope<Request>),
    /// To a client.
    Reply(ClientReply),
    /// Nothing more: the connection ends.
    HangUp,
}

/// What the books say that a group holds of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Booked {
    /// The group.
    pub group: GroupId,
    /// Whose it is.
    pub tenant: String,
    /// The device.
    pub device: String,
    /// In this life.
    pub boot_id: BootId,
    /// Slots.
    pub slots: u64,
    /// Memory for slots, in bytes.
    pub memory_bytes: u64,
}

#[derive(Debug)]
enum Frame {
    ToDevice(Vec<u8>),
    ToClient(Vec<u8>),
    End,
}

type Outbox = Arc<Mutex<VecDeque<(Conn, Frame)>>>;

/// Puts frames in a box that is emptied by whoever carries them.
#[derive(Debug)]
struct BoxLine {
    conn: Conn,
    frame: fn(Vec<u8>) -> Frame,
    outbox: Outbox,
}

impl BoxLine {
    fn push(&self, frame: Frame) {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner).push_back((self.conn, frame));
    }
}

impl Line for BoxLine {
    fn put(&self, parts: &[Frames]) -> bool {
        let bytes: Vec<&[u8]> = parts.iter().map(Frames::bytes).collect();
        self.push((self.frame)(bytes.concat()));
        true
    }

    fn hang_up(&self) {
        self.push(Frame::End);
    }
}

/// How far a draft is.
enum Step {
    Asked(Reserving),
    Failed(Failed),
}

/// A client, and the job and rank that it has joined.
type Joined = (Arc<Client>, Option<(String, Rank)>);

/// A controller whose messages somebody else carries.
pub struct Rehearsed {
    config: ControllerConfig,
    state: State,
    /// What stands for the virtual time 0.
    began: std::time::Instant,
    outbox: Outbox,
    devices: BTreeMap<Conn, Arc<DeviceSession>>,
    clients: BTreeMap<Conn, Joined>,
    /// What devices are being asked for, and until when they may answer.
    drafts: Vec<(Draft, Step, Instant)>,
    rounds: Vec<(Renewing, Instant)>,
    renews_at: Instant,
    expires_at: Option<Instant>,
}

impl Rehearsed {
    /// Start a controller. `config.started_ms` tells its lives apart, and `seed` is what secrets are made of.
    ///
    /// # Panics
    /// If the config is not one that a controller starts with.
    pub fn start(config: ControllerConfig, seed: u64, now: Instant) -> Self {
        check(&config).expect("a valid config");
        let started_ms = config.started_ms.expect("a rehearsal says when it begins");
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

    /// Give this controller a bug.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, bug: sumac_hal::planted::Bug) {
        self.state.plant(bug);
    }

    /// Take what an earlier life had booked for this one's.
    #[cfg(feature = "planted")]
    pub fn believe(&mut self, earlier: Self) {
        self.state.believe(earlier.state);
    }

    fn line(&self, conn: Conn, frame: fn(Vec<u8>) -> Frame) -> Box<dyn Line> {
        Box::new(BoxLine { conn, frame, outbox: Arc::clone(&self.outbox) })
    }

    fn tick(&mut self, now: Instant) {
        self.state.now = self.began + (now - Instant::ZERO);
    }

    /// A device has dialled, and said who it is. False if one of that name is there: then the connection ends.
    pub fn device_dials(&mut self, conn: Conn, announce: Announce, now: Instant) -> bool {
        self.tick(now);
        let session = Arc::new(DeviceSession::on(announce, self.line(conn, Frame::ToDevice)));
        if self.state.add_device(&self.config, &session).is_err() {
            return false;
        }
        session.hello();
        self.devices.insert(conn, session);
        self.work(now);
        true
    }

    /// A device has answered.
    pub fn device_says(&mut self, conn: Conn, response: Envelope<Response>, now: Instant) {
        self.tick(now);
        if let Some(session) = self.devices.get(&conn) {
            session.take(response);
            self.work(now);
        }
    }

    /// A client has dialled.
    pub fn client_dials(&mut self, conn: Conn) {
        self.clients.insert(conn, (Arc::new(Client::new(self.line(conn, Frame::ToClient))), None));
    }

    /// A client asks for something; [`ClientRequest::Status`] is answered by [`Rehearsed::report`] instead.
    pub fn client_says(&mut self, conn: Conn, request: ClientRequest, now: Instant) {
        self.tick(now);
        let Some((client, place)) = self.clients.get_mut(&conn) else { return };
        // A report is asked for by itself.
        let (Served::Done | Served::Report) = self.state.serve(&self.config, request, client, place);
        self.work(now);
    }

    /// A connection has ended, whoever's it was.
    pub fn gone(&mut self, conn: Conn, now: Instant) {
        self.tick(now);
        if let Some(session) = self.devices.remove(&conn) {
            session.end();
            self.state.remove_device(&session);
        }
        if let Some((client, Some((job, rank)))) = self.clients.remove(&conn) {
            self.state.depart((&job, rank), &client, false);
        }
        self.work(now);
    }

    /// Do what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.tick(now);
        if now >= self.renews_at {
            self.renews_at = now + self.config.lease / 3;
            self.rounds.push((self.state.round().ask(), now + ANSWER_TIMEOUT));
        }
        self.work(now);
    }

    /// Return when something is due.
    pub fn poll_timeout(&self) -> Instant {
        let drafts = self.drafts.iter().map(|(.., due)| *due);
        let rounds = self.rounds.iter().map(|(_, due)| *due);
        drafts.chain(rounds).chain(self.expires_at).fold(self.renews_at, Instant::min)
    }

    /// Return what is to be sent next, and on which connection.
    ///
    /// # Panics
    /// If it is no frame of what is said on that connection.
    pub fn poll_transmit(&mut self) -> Option<(Conn, Sent)> {
        fn read<M: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<M, StreamError> {
            FrameReader::with_limit(bytes, REPLY_LEN_MAX).recv()
        }
        let (conn, frame) = self.outbox.lock().unwrap_or_else(PoisonError::into_inner).pop_front()?;
        let sent = match frame {
            Frame::End => Sent::HangUp,
            Frame::ToClient(bytes) => Sent::Reply(read(&bytes).expect("a reply")),
            Frame::ToDevice(bytes) => Sent::Request(read(&bytes).expect("a request")),
        };
        Some((conn, sent))
    }

    fn ask(&mut self, draft: Draft, now: Instant) {
        let (placement, order) = draft.by_steps();
        let asked = placement.ask(&self.config, order);
        self.drafts.push((draft, Step::Asked(asked), now + ANSWER_TIMEOUT));
    }

    /// Go on with everything that has its answers, or does not wait for them any longer.
    fn work(&mut self, now: Instant) {
        loop {
            while let Some(plan) = self.state.next_plan() {
                let planned = plan.run(&self.config);
                self.state.planned(&self.config, planned);
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
            let is_over = |round: &Renewing, due: Instant| round.has_answers() || now >= due;
            if let Some(at) = self.rounds.iter().position(|(round, due)| is_over(round, *due)) {
                let (round, _) = self.rounds.remove(at);
                self.state.renewed(round.answered(self.began));
                continue;
            }
            let is_over = |draft: &Draft, step: &Step, due: Instant| {
                let (placement, _) = draft.by_steps();
                now >= due
                    || match step {
                        Step::Asked(asked) => placement.has_answers(asked),
                        Step::Failed(failed) => placement.has_count(failed),
                    }
            };
            let Some(at) = self.drafts.iter().position(|(draft, step, due)| is_over(draft, step, *due)) else { return };
            let (draft, step, _) = self.drafts.remove(at);
            self.proceed(draft, step, now);
        }
    }

    /// Take in what was asked for: everything is there that is going to be.
    fn proceed(&mut self, draft: Draft, step: Step, now: Instant) {
        let (placement, _) = draft.by_steps();
        let reserved = match step {
            Step::Asked(asked) => match placement.answered(asked, self.began) {
                Ok(()) => Ok(()),
                Err(failed) => return self.drafts.push((draft, Step::Failed(failed), now + ANSWER_TIMEOUT)),
            },
            Step::Failed(failed) => Err(placement.counted(failed, self.began)),
        };
        if let Some(next) = self.state.settle(&self.config, draft, reserved) {
            self.ask(next, now);
        }
    }

    /// Return the state of the controller's world, without what devices say of themselves.
    pub fn report(&self) -> StatusReport {
        self.state.report(&self.config).without_devices()
    }

    /// Return all that the books hold.
    pub fn booked(&self) -> Vec<Booked> {
        self.state.booked()
    }

    /// Tell whether nobody is being asked for a tree.
    pub fn is_settled(&self) -> bool {
        self.drafts.is_empty() && self.state.ready.is_empty()
    }
}
