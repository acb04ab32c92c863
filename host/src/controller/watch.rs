//! What a rank hears of its controller: handed on as it comes, from one controller after the other.
//!
//! When a connection ends that this rank has not ended, the same address is dialled until a controller there has taken
//! the job over. What is asked meanwhile fails at once, and who waits for an answer is told that none comes.
//!
//! A controller that does not take this rank in ends the search: the rank goes on without one, and says why.
//!
//! Invariant: nothing but Resume and Leave is sent on a connection before the controller has said Resumed; who asks finds
//! the connection closed, or is told of its end after it has asked.

use super::ClientError;
use super::client::{Notice, connect};
use super::proto::{ClientReply, ClientRequest, JoinRefusal, Membership, Resumption};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac_hal::ctrl::{FrameReader, StreamError, send};
use sumac_hal::ids::Rank;

/// The view that another tree was asked for, and that tree or why there is none; `None`: the connection has ended.
pub(super) type Answer = Option<(u32, Result<Box<Membership>, String>)>;

/// The round, and who is left; `None`: the connection has ended.
pub(super) type Left = Option<(u32, Result<Vec<Rank>, String>)>;

/// How long a controller that is not there is left alone.
const REDIAL_AFTER: Duration = Duration::from_millis(500);

/// How often a controller may say that this rank is there already: until it has noticed the end of an earlier connection.
const TAKEN_MAX: u32 = 20;

/// The way to the controller of the moment.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: TcpStream,
    /// Whether the controller knows the job.
    is_open: bool,
    /// Why it never will again.
    refusal: Option<JoinRefusal>,
}

impl Connection {
    pub(super) const fn new(stream: TcpStream) -> Self {
        Self { stream, is_open: true, refusal: None }
    }

    pub(super) fn send(&mut self, request: &ClientRequest) -> Result<(), ClientError> {
        match &self.refusal {
            Some(refusal) => Err(ClientError::NotResumed { refusal: refusal.clone() }),
            None if self.is_open => Ok(send(&mut self.stream, request)?),
            None => Err(StreamError::Closed.into()),
        }
    }
}

/// The thread that listens to the controller.
pub(super) struct Watcher<N> {
    pub(super) addr: SocketAddr,
    pub(super) connection: Arc<Mutex<Connection>>,
    /// It is this end that ends it.
    pub(super) is_over: Arc<AtomicBool>,
    pub(super) given_up: Arc<Mutex<Option<u32>>>,
    pub(super) answers: Sender<Answer>,
    pub(super) left: Sender<Left>,
    /// What the next controller is told.
    pub(super) known: Resumption,
    pub(super) on_notice: N,
}

impl<N: Fn(Notice) -> Option<ClientRequest>> Watcher<N> {
    /// Listen until this end ends it.
    pub(super) fn watch(mut self, mut reader: FrameReader<TcpStream>) {
        loop {
            while let Ok(reply) = reader.recv() {
                self.take(reply);
            }
            self.connection().is_open = false;
            // The receivers live as long as the session, which outlives this.
            let _ = (self.answers.send(None), self.left.send(None));
            // There is no queue, and where to move nobody says that has not said it.
            (self.on_notice)(Notice::Queued(None));
            if self.is_over() {
                (self.on_notice)(Notice::Withdrawn);
                return;
            }
            let (job, rank) = (&self.known.request.job, self.known.request.rank);
            tracing::warn!(job, %rank, controller = %self.addr, "the controller is gone: the job goes on without one");
            (self.on_notice)(Notice::ControllerLost);
            match self.find_another() {
                Some(found) => reader = found,
                None => return,
            }
        }
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Dial until there is a controller that has taken the job over; `None` if this end is over, or refused there.
    fn find_another(&mut self) -> Option<FrameReader<TcpStream>> {
        let (job, rank) = (self.known.request.job.clone(), self.known.request.rank);
        let mut taken = 0;
        while !self.is_over() {
            match self.resume() {
                Ok((view, reader)) => {
                    tracing::info!(job, %rank, view, "a controller has taken the job over");
                    self.known.view = self.known.view.max(view);
                    (self.on_notice)(Notice::ControllerBack { view });
                    return Some(reader);
                }
                Err(ClientError::Refused(JoinRefusal::Taken { .. })) if taken < TAKEN_MAX => taken += 1,
                Err(ClientError::Refused(refusal)) => {
                    tracing::warn!(job, %rank, %refusal, "the job goes on without a controller for good");
                    self.connection().refusal = Some(refusal.clone());
                    (self.on_notice)(Notice::NotResumed(refusal));
                    return None;
                }
                Err(error) => tracing::debug!(job, %rank, %error, "not resumed"),
            }
            // Woken when it is over.
            std::thread::park_timeout(REDIAL_AFTER);
        }
        None
    }

    /// Tell a controller of the job, and wait until it has taken it over. Returns the job's view there.
    fn resume(&self) -> Result<(u32, FrameReader<TcpStream>), ClientError> {
        let (mut stream, mut reader) = connect(self.addr)?;
        send(&mut stream, &ClientRequest::Resume(Box::new(self.known.clone())))?;
        {
            let mut connection = self.connection();
            // Who ends it says so first and then shuts down what is there.
            connection.stream = stream;
            if self.is_over() {
                return Err(StreamError::Closed.into());
            }
        }
        let view = match reader.recv()? {
            ClientReply::Resumed { view } => view,
            ClientReply::Refused(refusal) => return Err(refusal.into()),
            _ => return Err(ClientError::Answer),
        };
        self.connection().is_open = true;
        Ok((view, reader))
    }

    /// Hand on what the controller says.
    fn take(&mut self, reply: ClientReply) {
        let notice = match reply {
            ClientReply::RankLost(rank) => Notice::RankLost(rank),
            ClientReply::Over(over) => Notice::Over(over),
            ClientReply::Repair { view } => Notice::Repair { view },
            ClientReply::Offer { view } => Notice::Offer { view },
            ClientReply::MoveAt { view, call } => Notice::MoveAt { view, call },
            ClientReply::Withdrawn => Notice::Withdrawn,
            ClientReply::Queued(place) => Notice::Queued(place),
            ClientReply::Replanned { view, membership } => return self.take_place(view, membership),
            ClientReply::NotReplanned { view, reason } => {
                let _ = self.answers.send(Some((view, Err(reason))));
                return;
            }
            ClientReply::Survivors { round, ranks } => {
                self.known.shrunk = self.known.shrunk.max(round.saturating_add(u32::from(ranks.is_ok())));
                let _ = self.left.send(Some((round, ranks)));
                return;
            }
            _ => return,
        };
        if let Notice::Repair { view } | Notice::Offer { view } = notice {
            self.known.view = self.known.view.max(view);
        }
        if let Some(answer) = (self.on_notice)(notice) {
            self.say(&answer);
        }
    }

    fn take_place(&mut self, view: u32, membership: Box<Membership>) {
        self.known.view = self.known.view.max(view);
        (self.on_notice)(Notice::Queued(membership.queue));
        let given_up = self.given_up.lock().unwrap_or_else(PoisonError::into_inner);
        if *given_up != Some(view.wrapping_sub(1)) {
            let _ = self.answers.send(Some((view.wrapping_sub(1), Ok(membership))));
        } else if membership.tree.is_ok() {
            self.say(&ClientRequest::Decline { view, device: None, why: "it came too late for a rank".into() });
        }
    }

    fn say(&self, request: &ClientRequest) {
        if let Err(error) = self.connection().send(request) {
            tracing::debug!(%error, "controller can't be answered");
        }
    }
}
