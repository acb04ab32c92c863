//! The client side of the controller protocol: a rank's session, and status requests.

use super::connect::{
    ActiveLink, CONNECT_TIMEOUT, JoinFailed, NothingWhileJoining, connect, join_at_active, key_advice,
};
pub use super::connect::{ControllerAddr, WhileJoining};
use super::proto::{
    AbortReason, ClientReply, ClientRequest, JoinRefusal, JoinRequest, Membership, PairRole, QueuePosition,
    ResumeRequest, StatusReport,
};
use super::session_reader::{Connection, REDIAL_INTERVAL, ReplanReply, SessionReader, SurvivorsReply};
use crate::deadline::after;
use crate::transport::path::PathToProbe;
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::secure::ConnectError;
use sumac_hal::ctrl::{Hello, StreamError, send};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a request to the controller failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The controller cannot be reached.
    #[error("no controller at {addr}: {source}; start one with `sumac controller`")]
    Connect {
        /// The address.
        addr: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// No secure channel could be set up with the controller.
    #[error("controller at {addr}: {source}{}", key_advice(source))]
    Key {
        /// The address.
        addr: SocketAddr,
        /// The reason.
        source: ConnectError,
    },
    /// The connection failed, or the peer sent malformed data.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The controller refused.
    #[error(transparent)]
    Refused(#[from] JoinRefusal),
    /// The other ranks did not join in time.
    #[error("not all {world} ranks of job {job:?} joined within {} s", timeout.as_secs())]
    Timeout {
        /// The job.
        job: String,
        /// How many ranks it has.
        world: u32,
        /// How long this one waited.
        timeout: Duration,
    },
    /// The controller refused to replace the tree.
    #[error("cannot replace the tree of view {view}: {reason}")]
    ReplanRefused {
        /// The view whose tree is lost.
        view: u32,
        /// The controller's reason.
        reason: String,
    },
    /// The other ranks did not request a new tree in time.
    #[error("not all ranks requested a replacement for the tree of view {view} within {} ms", waited.as_millis())]
    ReplanTimeout {
        /// The view whose tree is lost.
        view: u32,
        /// How long this one waited.
        waited: Duration,
    },
    /// A restarted controller refused to resume this rank, which continues without one.
    #[error("the restarted controller refused this rank: {refusal}")]
    ResumeRefused {
        /// The refusal.
        refusal: JoinRefusal,
    },
    /// The controller was lost while this rank waited for a new tree.
    #[error("lost the controller while waiting for a replacement for the tree of view {view}")]
    ControllerLost {
        /// The view whose tree is lost.
        view: u32,
    },
    /// The controller could not tell which ranks survive.
    #[error("cannot determine the surviving ranks: {reason}")]
    NoSurvivors {
        /// The reason.
        reason: String,
    },
    /// The controller was active before another one took over.
    #[error(
        "the controller at {addr} has term {term}, and this job has seen term {seen}: another controller has taken \
         over; start this one as its standby"
    )]
    OldTerm {
        /// The controller's address.
        addr: SocketAddr,
        /// Its term.
        term: u64,
        /// The highest term that this client has seen.
        seen: u64,
    },
    /// The reply does not match the request.
    #[error("unexpected controller reply; the controller may be of another version")]
    ReplanReply,
}

/// A notification from the controller to a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A rank's connection closed without leaving the job.
    RankLost(Rank),
    /// A rank, possibly this one, aborted the job. Precedes any [`Notice::RankLost`] that follows from the abort.
    Aborted(AbortReason),
    /// The tree of `view` is lost. Request another one with [`Session::replan`].
    TreeLost {
        /// The view whose tree is lost. A job starts at view 0, and each [`Session::replan`] starts the next one.
        view: u32,
    },
    /// A tree is available for a job that runs without one. Answer with [`ClientRequest::Pause`].
    Offer {
        /// The job's view.
        view: u32,
    },
    /// All ranks request the offered tree right before call number `call`.
    MoveAt {
        /// The view of the offer.
        view: u32,
        /// The call's number.
        call: u64,
    },
    /// The offer is withdrawn, or the controller is lost.
    OfferWithdrawn,
    /// The connection to the controller is lost. No notifications arrive until [`Notice::ControllerBack`].
    ControllerLost,
    /// A restarted controller has resumed the job.
    ControllerBack {
        /// The job's new view.
        view: u32,
    },
    /// A restarted controller refused this rank. There are no further notifications or reconnects.
    ResumeRefused(JoinRefusal),
    /// The job's position in the queue for a tree has changed. `None`: it is not queued.
    Queued(Option<QueuePosition>),
}

/// A rank's session with the controller while it takes part in a job. If the connection is lost, the session reconnects
/// to the same address, or to the other controller of a pair, and resumes the job there ([`Notice::ControllerBack`]).
#[derive(Debug)]
pub struct Session {
    connection: Arc<Mutex<Connection>>,
    /// Replies to [`Session::replan`] and ends of the connection, from the reader thread.
    replan_replies: Mutex<Receiver<ReplanReply>>,
    /// The view whose replan timed out: a tree that still arrives for it is declined.
    given_up: Arc<Mutex<Option<u32>>>,
    survivor_replies: Mutex<Receiver<SurvivorsReply>>,
    reader_thread: Option<JoinHandle<()>>,
    /// The session is being dropped.
    is_closing: Arc<AtomicBool>,
    pid: u32,
}

/// Request a controller's status report: of several addresses, that of the active controller, or else of a standby.
///
/// # Errors
/// [`ClientError`] if the controller cannot be reached or sends an unexpected reply.
pub fn status(controller: impl Into<ControllerAddr>) -> Result<StatusReport, ClientError> {
    let controller = controller.into();
    let (mut standby, mut failed) = (None, None);
    for addr in controller.all() {
        match status_at(&controller, addr) {
            Ok(report) if report.pair.as_ref().is_none_or(|pair| pair.role == PairRole::Active) => return Ok(report),
            Ok(report) => standby = Some(report),
            Err(error) => failed = Some(failed.unwrap_or(error)),
        }
    }
    // There is at least one address.
    standby.ok_or(failed.unwrap_or(ClientError::ReplanReply))
}

fn status_at(controller: &ControllerAddr, addr: SocketAddr) -> Result<StatusReport, ClientError> {
    let (mut stream, mut reader) = connect(controller, addr, &Hello::Client)?;
    // With another address to try, a controller that was stopped is not waited for as long.
    let timeout = if controller.alternatives.is_empty() { STATUS_TIMEOUT } else { 2 * CONNECT_TIMEOUT };
    stream.get_ref().set_read_timeout(Some(timeout)).map_err(StreamError::from)?;
    send(&mut stream, &ClientRequest::Status)?;
    match reader.recv()? {
        ClientReply::Status(report) => Ok(report),
        ClientReply::Refused(refusal) => Err(refusal.into()),
        _ => Err(ClientError::ReplanReply),
    }
}

impl Session {
    /// Join a job. Waits up to `timeout` for all its ranks, and then for a tree as long as the job's terms say.
    ///
    /// From then on a background thread calls `on_notice` with each notification. The callback may return a request as
    /// its answer. It must not block on [`Session::replan`], whose reply the same thread reads.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn join(
        controller: impl Into<ControllerAddr>,
        request: JoinRequest,
        timeout: Duration,
        on_notice: impl Fn(Notice) -> Option<ClientRequest> + Send + 'static,
    ) -> Result<(Self, Membership), ClientError> {
        Self::join_on(controller, request, Vec::new(), timeout, on_notice)
    }

    /// Join a job on a chain of explicitly chosen devices, root first, with all ranks at the last one. Bypasses the
    /// fabric, to test single links. An empty list is the same as [`Session::join`].
    ///
    /// # Errors
    /// [`ClientError`]. A device that is not connected is not an error; [`Membership::tree`] gives it as the reason for
    /// having no tree.
    pub fn join_on(
        controller: impl Into<ControllerAddr>,
        request: JoinRequest,
        devices: Vec<String>,
        timeout: Duration,
        on_notice: impl Fn(Notice) -> Option<ClientRequest> + Send + 'static,
    ) -> Result<(Self, Membership), ClientError> {
        Self::join_with(controller, (request, devices), timeout, NothingWhileJoining, on_notice)
    }

    /// Join a job, as [`Session::join_on`], and do what the controller asks of this rank meanwhile. It asks again if
    /// joining starts anew at another controller.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn join_with(
        controller: impl Into<ControllerAddr>,
        (request, devices): (JoinRequest, Vec<String>),
        timeout: Duration,
        mut tasks: impl WhileJoining,
        on_notice: impl Fn(Notice) -> Option<ClientRequest> + Send + 'static,
    ) -> Result<(Self, Membership), ClientError> {
        let controller = controller.into();
        let wait = Duration::from_millis(u64::from(request.terms.wait_ms));
        let resume_parts = (request.clone(), devices.clone());
        let join =
            if devices.is_empty() { ClientRequest::Join(request) } else { ClientRequest::JoinOn { request, devices } };
        let timeout = timeout + wait;
        let deadline = after(Instant::now(), timeout);
        let (link, membership) = loop {
            match join_at_active(&controller, &join, deadline, &mut tasks) {
                Ok(joined) => break joined,
                // A standby is about to take over, or the active controller was lost in the middle.
                Err(JoinFailed::MayRetry(_)) if Instant::now() + REDIAL_INTERVAL < deadline => {
                    std::thread::sleep(REDIAL_INTERVAL);
                }
                Err(JoinFailed::Timeout) => {
                    let (job, world) = (resume_parts.0.job, resume_parts.0.world);
                    return Err(ClientError::Timeout { job, world, timeout });
                }
                Err(JoinFailed::MayRetry(error) | JoinFailed::Final(error)) => return Err(error),
            }
        };
        let ActiveLink { writer: stream, reader, term, silence } = link;
        stream.get_ref().set_read_timeout(silence).map_err(StreamError::from)?;
        let ((replan_sender, replan_replies), (survivor_sender, survivor_replies)) = (channel(), channel());
        let (request, devices) = resume_parts;
        let resumption = ResumeRequest {
            request,
            devices,
            view: 0,
            shrink_count: 0,
            secret: membership.secret.clone(),
            expression: membership.expression.clone(),
        };
        let connection = Arc::new(Mutex::new(Connection::new(stream)));
        let is_closing = Arc::new(AtomicBool::new(false));
        let given_up = Arc::new(Mutex::new(None));
        let session_reader = SessionReader {
            controller,
            connection: Arc::clone(&connection),
            is_closing: Arc::clone(&is_closing),
            given_up: Arc::clone(&given_up),
            replan_replies: replan_sender,
            survivor_replies: survivor_sender,
            resumption,
            term,
            on_notice,
        };
        let thread = std::thread::Builder::new().name("controller".into());
        let reader_thread = Some(thread.spawn(move || session_reader.run(reader)).map_err(StreamError::from)?);
        let (replan_replies, survivor_replies) = (Mutex::new(replan_replies), Mutex::new(survivor_replies));
        let session = Self {
            connection,
            replan_replies,
            given_up,
            survivor_replies,
            reader_thread,
            is_closing,
            pid: std::process::id(),
        };
        Ok((session, membership))
    }

    /// Report that the tree of `view` is lost. The controller notifies all ranks, including this one, once per view
    /// ([`Notice::TreeLost`]).
    pub fn suspect(&self, view: u32) {
        self.suspect_because(view, false);
    }

    /// As [`Session::suspect`]. If only the path has become too narrow for the tree's packets, its devices may be used
    /// again at once.
    pub fn suspect_because(&self, view: u32, is_path_narrow: bool) {
        let request = match is_path_narrow {
            true => ClientRequest::PathNarrowed { view },
            false => ClientRequest::Suspect { view },
        };
        if let Err(error) = self.send(&request) {
            // The reader thread also notices, and `replan` returns the error.
            crate::log::debug!(%error, view, "cannot report a lost tree to the controller");
        }
    }

    /// Abort the job on all its ranks. The controller notifies the others ([`Notice::Aborted`]).
    pub fn abort(&self, reason: AbortReason) {
        if let Err(error) = self.send(&ClientRequest::Abort(reason)) {
            // The other ranks detect the failure themselves, unless they reach it after this rank is gone.
            crate::log::debug!(%error, "cannot report the abort to the controller");
        }
    }

    /// Request a replacement for the tree of `view`, and wait until all ranks have requested it or until `deadline`.
    /// The returned membership belongs to view `view + 1`. It may again have no tree, and says why.
    ///
    /// # Errors
    /// [`ClientError::ReplanRefused`] if the job is at another view or has lost a rank; [`ClientError::ReplanTimeout`]
    /// at the deadline; and at once [`ClientError::ControllerLost`] or [`ClientError::Stream`] if the controller is
    /// lost, or [`ClientError::ResumeRefused`] if its successor refused this rank.
    pub fn replan(&self, view: u32, deadline: Instant) -> Result<Membership, ClientError> {
        self.replan_with(view, deadline, |_| None)
    }

    /// As [`Session::replan`]; `probe` returns the longest packet that a path carries, in bytes, or `None` if that is
    /// not known.
    ///
    /// # Errors
    /// As [`Session::replan`].
    pub fn replan_with(
        &self,
        view: u32,
        deadline: Instant,
        mut probe: impl FnMut(&PathToProbe) -> Option<u32>,
    ) -> Result<Membership, ClientError> {
        let asked = Instant::now();
        let replan_replies = self.replan_replies.lock().unwrap_or_else(PoisonError::into_inner);
        // Drop replies and connection ends from before this request.
        while replan_replies.try_recv().is_ok() {}
        *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.send(&ClientRequest::Replan { view })?;
        loop {
            match replan_replies.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(ReplanReply::Probe(path)) => {
                    let max_packet_len_bytes = probe(&path);
                    self.send(&ClientRequest::PathProbed { group: path.group, max_packet_len_bytes })?;
                }
                Ok(ReplanReply::Outcome(other, _)) if other != view => {}
                Ok(ReplanReply::Outcome(_, Ok(membership))) => return Ok(*membership),
                Ok(ReplanReply::Outcome(_, Err(reason))) => return Err(ClientError::ReplanRefused { view, reason }),
                Err(RecvTimeoutError::Timeout) => break,
                Ok(ReplanReply::Ended) | Err(RecvTimeoutError::Disconnected) => {
                    return Err(ClientError::ControllerLost { view });
                }
            }
        }
        // From here on the reader thread declines a late tree; a reply that came before is still in the channel.
        *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = Some(view);
        if let Err(error) = self.send(&ClientRequest::AbandonReplan { view }) {
            // A successor does not know about this rank's request anyway.
            crate::log::debug!(%error, view, "cannot tell the controller that the replan timed out");
        }
        let outcome = replan_replies.try_iter().find_map(|reply| match reply {
            ReplanReply::Outcome(of, outcome) => Some(outcome).filter(|_| of == view),
            ReplanReply::Probe(_) | ReplanReply::Ended => None,
        });
        match outcome {
            Some(Ok(membership)) => Ok(*membership),
            Some(Err(reason)) => Err(ClientError::ReplanRefused { view, reason }),
            None => Err(ClientError::ReplanTimeout { view, waited: asked.elapsed() }),
        }
    }

    /// Request the list of surviving ranks, and wait until all of them have requested it or until `deadline`. Returns
    /// how many lists the job received before, and the ranks. All survivors get the same list.
    ///
    /// # Errors
    /// [`ClientError::NoSurvivors`] if the job has not begun, or not all have asked in time; at once
    /// [`ClientError::Stream`] if the controller is gone, [`ClientError::ResumeRefused`] if the next one does not take
    /// this rank in.
    pub fn survivors(&self, deadline: Instant) -> Result<(u32, Vec<Rank>), ClientError> {
        let survivor_replies = self.survivor_replies.lock().unwrap_or_else(PoisonError::into_inner);
        // Drop the reply to an earlier request that timed out: those ranks have continued without this one.
        while survivor_replies.try_recv().is_ok() {}
        self.send(&ClientRequest::Survivors)?;
        match survivor_replies.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some((round, Ok(ranks)))) => Ok((round, ranks)),
            Ok(Some((_, Err(reason)))) => Err(ClientError::NoSurvivors { reason }),
            Err(RecvTimeoutError::Timeout) => {
                Err(ClientError::NoSurvivors { reason: "not all of them asked before the deadline".into() })
            }
            Ok(None) | Err(RecvTimeoutError::Disconnected) => Err(StreamError::Closed.into()),
        }
    }

    /// Decline the tree of `view`. `device` is the device that this rank could not attach to, if that is the reason.
    pub fn decline(&self, view: u32, device: Option<String>, why: &str) {
        let why = why.chars().take(REASON_SENT_CHARS_MAX).collect();
        if let Err(error) = self.send(&ClientRequest::Decline { view, device, why }) {
            // The devices release the group when its lease expires.
            crate::log::debug!(%error, view, "cannot decline the tree at the controller");
        }
    }

    /// Answer an offer after [`Notice::Offer`] was handled: this rank starts no call numbered `at` or higher until
    /// [`Notice::MoveAt`] or [`Notice::OfferWithdrawn`].
    pub fn pause(&self, view: u32, at: u64) {
        if let Err(error) = self.send(&ClientRequest::Pause { view, at }) {
            // The lost connection withdraws the offer.
            crate::log::debug!(%error, view, "cannot answer the offer");
        }
    }

    fn send(&self, request: &ClientRequest) -> Result<(), ClientError> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).send(request)
    }

    /// Leave the job.
    pub fn leave(self) {
        // Best effort: a lost controller has nothing to release. Also sent while the job is being resumed.
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = send(&mut connection.stream, &ClientRequest::Leave);
    }

    /// Leave the job, and wait until the controller confirms it or is lost, or until `deadline`.
    pub(crate) fn leave_and_wait(self, deadline: Instant) {
        let sent = {
            let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            send(&mut connection.stream, &ClientRequest::Leave)
        };
        let replies = self.replan_replies.lock().unwrap_or_else(PoisonError::into_inner);
        // `Ended` arrives when the connection has ended, and nothing when the reader thread has.
        let mut is_connected = sent.is_ok();
        while is_connected {
            let left = deadline.saturating_duration_since(Instant::now());
            is_connected = matches!(replies.recv_timeout(left), Ok(ReplanReply::Outcome(..) | ReplanReply::Probe(_)));
        }
        drop(replies);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // In a forked child the thread does not exist, and the connection belongs to the parent.
            return std::mem::forget(self.reader_thread.take());
        }
        self.is_closing.store(true, Ordering::Release);
        // Unblocks the reader thread. Data already sent still arrives. Fails only if the peer closed first.
        let _ =
            self.connection.lock().unwrap_or_else(PoisonError::into_inner).stream.get_ref().shutdown(Shutdown::Both);
        if let Some(reader_thread) = self.reader_thread.take() {
            reader_thread.thread().unpark();
            let _ = reader_thread.join();
        }
    }
}

/// How much of a reason is sent, in characters.
const REASON_SENT_CHARS_MAX: usize = 300;
/// Long enough for a controller that waits for an unresponsive device.
const STATUS_TIMEOUT: Duration = Duration::from_secs(30);
