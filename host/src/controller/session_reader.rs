//! The thread behind a [`Session`](super::Session): reads replies and notifications, and reconnects.
//!
//! If the connection is lost, the reader dials the same addresses until a controller there has resumed the job. Of a
//! pair of controllers, it accepts the active one only, whose term is not below one that it has seen, and takes it for
//! lost when it is silent. Requests fail at once meanwhile, and pending ones are told that no reply will come. If a
//! controller refuses to resume this rank, the reader stops and reports the refusal; the job continues without a
//! controller.
//!
//! Invariant: only `Resume` and `Leave` are sent on a connection before the controller has replied `Resumed`.

use super::ClientError;
use super::connect::{ActiveLink, ControllerAddr, connect_active};
use super::proto::{ClientReply, ClientRequest, JoinRefusal, Membership, ResumeRequest};
use super::session::Notice;
use crate::transport::path::PathToProbe;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac_hal::ctrl::secure::{ControlReader, ControlWriter};
use sumac_hal::ctrl::{FrameError, FrameReader, StreamError, send};
use sumac_hal::ids::Rank;

/// What arrives for a replan request.
pub(super) enum ReplanReply {
    /// The view of the request, and its outcome.
    Outcome(u32, Result<Box<Membership>, String>),
    /// A path to probe meanwhile.
    Probe(Box<PathToProbe>),
    /// The connection has ended.
    Ended,
}

/// The round and the surviving ranks. `None`: the connection has ended.
pub(super) type SurvivorsReply = Option<(u32, Result<Vec<Rank>, String>)>;

/// The pause between attempts to reconnect.
pub(super) const REDIAL_INTERVAL: Duration = Duration::from_millis(500);

/// How often to retry when the controller still counts this rank as connected: it may not have noticed yet that the
/// previous connection ended.
const TAKEN_RETRIES_MAX: u32 = 20;

/// The connection to the current controller.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: ControlWriter<TcpStream>,
    /// Whether the controller has accepted this rank.
    is_open: bool,
    /// Set once a controller has refused to resume this rank.
    refusal: Option<JoinRefusal>,
}

impl Connection {
    pub(super) const fn new(stream: ControlWriter<TcpStream>) -> Self {
        Self { stream, is_open: true, refusal: None }
    }

    pub(super) fn send(&mut self, request: &ClientRequest) -> Result<(), ClientError> {
        match &self.refusal {
            Some(refusal) => Err(ClientError::ResumeRefused { refusal: refusal.clone() }),
            None if self.is_open => Ok(send(&mut self.stream, request)?),
            None => Err(StreamError::Closed.into()),
        }
    }
}

/// The state of the reader thread.
pub(super) struct SessionReader<N> {
    pub(super) controller: ControllerAddr,
    pub(super) connection: Arc<Mutex<Connection>>,
    /// The session is being dropped.
    pub(super) is_closing: Arc<AtomicBool>,
    pub(super) given_up: Arc<Mutex<Option<u32>>>,
    pub(super) replan_replies: Sender<ReplanReply>,
    pub(super) survivor_replies: Sender<SurvivorsReply>,
    /// What to tell the next controller.
    pub(super) resumption: ResumeRequest,
    /// The highest term seen.
    pub(super) term: u64,
    pub(super) on_notice: N,
}

impl<N: Fn(Notice) -> Option<ClientRequest>> SessionReader<N> {
    /// Read until the session is dropped or a controller refuses this rank.
    pub(super) fn run(mut self, mut reader: FrameReader<ControlReader<TcpStream>>) {
        loop {
            let mut has_left = false;
            while let Ok(reply) = reader.recv() {
                has_left = reply == ClientReply::Left;
                if has_left || !self.accepts(&reply) {
                    break;
                }
                self.handle_reply(reply);
            }
            self.connection().is_open = false;
            // The session holds the receivers and outlives this thread.
            let _ = (self.replan_replies.send(ReplanReply::Ended), self.survivor_replies.send(None));
            // Without a controller there is no queue, and no further `MoveAt`.
            (self.on_notice)(Notice::Queued(None));
            if has_left || self.is_closing() {
                (self.on_notice)(Notice::OfferWithdrawn);
                return;
            }
            let (job, rank) = (&self.resumption.request.job, self.resumption.request.rank);
            crate::log::warn!(job, %rank, controller = %self.controller.addr, "lost the controller; the job continues without one");
            (self.on_notice)(Notice::ControllerLost);
            match self.reconnect() {
                Some(found) => reader = found,
                None => return,
            }
        }
    }

    /// Whether a message is not from a controller whose term has ended.
    fn accepts(&self, reply: &ClientReply) -> bool {
        match reply {
            ClientReply::Leading(claim) => claim.term == self.term,
            _ => true,
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Dial until a controller has resumed the job. `None` if the session is dropped or the controller refuses.
    fn reconnect(&mut self) -> Option<FrameReader<ControlReader<TcpStream>>> {
        let (job, rank) = (self.resumption.request.job.clone(), self.resumption.request.rank);
        let (mut taken, mut is_other_version) = (0, false);
        while !self.is_closing() {
            match self.resume() {
                Ok((view, term, reader)) => {
                    self.term = term;
                    crate::log::info!(job, %rank, view, "a controller has resumed the job");
                    self.resumption.view = self.resumption.view.max(view);
                    (self.on_notice)(Notice::ControllerBack { view });
                    return Some(reader);
                }
                Err(ClientError::Refused(JoinRefusal::RankTaken { .. })) if taken < TAKEN_RETRIES_MAX => taken += 1,
                Err(error @ ClientError::Refused(JoinRefusal::Standby { .. })) => {
                    crate::log::debug!(job, %rank, %error, "not resumed yet");
                }
                Err(error @ ClientError::OldTerm { .. }) => crate::log::warn!(job, %rank, %error, "not resumed"),
                Err(ClientError::Refused(refusal)) => {
                    crate::log::warn!(job, %rank, %refusal, "resume refused; the job continues without a controller");
                    self.connection().refusal = Some(refusal.clone());
                    (self.on_notice)(Notice::ResumeRefused(refusal));
                    return None;
                }
                Err(error @ ClientError::Stream(StreamError::Frame(FrameError::Version(_)))) if !is_other_version => {
                    is_other_version = true;
                    crate::log::warn!(job, %rank, %error, "not resumed; the job continues without a controller");
                }
                Err(error) => crate::log::debug!(job, %rank, %error, "not resumed"),
            }
            // Unparked when the session is dropped.
            std::thread::park_timeout(REDIAL_INTERVAL);
        }
        None
    }

    /// Ask the active controller to resume the job, and wait for its reply. Returns the job's new view, and the
    /// controller's term.
    fn resume(&self) -> Result<(u32, u64, FrameReader<ControlReader<TcpStream>>), ClientError> {
        let ActiveLink { writer: mut stream, mut reader, term, .. } = connect_active(&self.controller, self.term)?;
        send(&mut stream, &ClientRequest::Resume(Box::new(self.resumption.clone())))?;
        {
            let mut connection = self.connection();
            // `drop` sets the flag first and then shuts down the stream that it finds here.
            connection.stream = stream;
            if self.is_closing() {
                return Err(StreamError::Closed.into());
            }
        }
        let view = loop {
            match reader.recv()? {
                ClientReply::Leading(claim) if claim.term == term => {}
                ClientReply::Resumed { view } => break view,
                ClientReply::Refused(refusal) => return Err(refusal.into()),
                _ => return Err(ClientError::ReplanReply),
            }
        };
        self.connection().is_open = true;
        Ok((view, term, reader))
    }

    /// Dispatch a message from the controller.
    fn handle_reply(&mut self, reply: ClientReply) {
        let notice = match reply {
            ClientReply::RankLost(rank) => Notice::RankLost(rank),
            ClientReply::Aborted(over) => Notice::Aborted(over),
            ClientReply::TreeLost { view } => Notice::TreeLost { view },
            ClientReply::Offer { view } => Notice::Offer { view },
            ClientReply::MoveAt { view, call } => Notice::MoveAt { view, call },
            ClientReply::OfferWithdrawn => Notice::OfferWithdrawn,
            ClientReply::Queued(place) => Notice::Queued(place),
            ClientReply::Replanned { view, membership } => return self.handle_membership(view, membership),
            ClientReply::ReplanRefused { view, reason } => {
                let _ = self.replan_replies.send(ReplanReply::Outcome(view, Err(reason)));
                return;
            }
            ClientReply::ProbePath(path) => {
                // If no thread waits any more, the controller goes on without an answer.
                let _ = self.replan_replies.send(ReplanReply::Probe(path));
                return;
            }
            ClientReply::Survivors { round, ranks } => {
                self.resumption.shrink_count =
                    self.resumption.shrink_count.max(round.saturating_add(u32::from(ranks.is_ok())));
                let _ = self.survivor_replies.send(Some((round, ranks)));
                return;
            }
            _ => return,
        };
        if let Notice::TreeLost { view } | Notice::Offer { view } = notice {
            self.resumption.view = self.resumption.view.max(view);
        }
        if let Some(answer) = (self.on_notice)(notice) {
            self.send(&answer);
        }
    }

    fn handle_membership(&mut self, view: u32, membership: Box<Membership>) {
        self.resumption.view = self.resumption.view.max(view);
        (self.on_notice)(Notice::Queued(membership.queue));
        let given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        if *given_up != Some(view.wrapping_sub(1)) {
            let _ = self.replan_replies.send(ReplanReply::Outcome(view.wrapping_sub(1), Ok(membership)));
        } else if membership.tree.is_ok() {
            self.send(&ClientRequest::Decline {
                view,
                device: None,
                why: "it arrived after a rank had stopped waiting".into(),
            });
        }
    }

    fn send(&self, request: &ClientRequest) {
        if let Err(error) = self.connection().send(request) {
            crate::log::debug!(%error, "cannot answer the controller");
        }
    }
}
