//! A client's connection to a controller.

use super::limits::REPLY_LEN_MAX;
use super::proto::{
    ClientReply, ClientRequest, JoinRefusal, JoinRequest, Membership, Over, QueuePlace, Resumption, StatusReport,
};
use super::watch::{Answer, Connection, Left, Watcher};
use std::io::ErrorKind;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{FrameReader, Greeting, StreamError, send};
use sumac_hal::ids::Rank;
use thiserror::Error;

/// Why a controller could not be asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Not reached.
    #[error("no controller at {addr}: {source}; start one with `sumac controller`")]
    Connect {
        /// The address.
        addr: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The connection broke, or what came was not a controller's.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// It would not.
    #[error(transparent)]
    Refused(#[from] JoinRefusal),
    /// The other ranks did not come in time.
    #[error("not all {world} ranks of job {job:?} have joined within {} s", timeout.as_secs())]
    Timeout {
        /// The job.
        job: String,
        /// How many ranks it has.
        world: u32,
        /// How long this one waited.
        timeout: Duration,
    },
    /// The job stays on the tree that it has.
    #[error("no other tree than that of view {view}: {reason}")]
    NotReplanned {
        /// The view whose tree is lost.
        view: u32,
        /// What the controller said.
        reason: String,
    },
    /// The other ranks did not ask for another tree in time.
    #[error("not all ranks have asked for another tree than that of view {view} within {} ms", waited.as_millis())]
    ReplanTimeout {
        /// The view whose tree is lost.
        view: u32,
        /// How long this one waited.
        waited: Duration,
    },
    /// The controller that is there does not take this rank in, which goes on without one.
    #[error("no controller stands behind the job any more: {refusal}")]
    NotResumed {
        /// What it said.
        refusal: JoinRefusal,
    },
    /// The controller ended while this rank waited for another tree.
    #[error("the controller is gone, and with it whoever could give another tree than that of view {view}")]
    Ended {
        /// The view whose tree is lost.
        view: u32,
    },
    /// Nobody can say who is left of the job.
    #[error("who is left of the job: {reason}")]
    NoSurvivors {
        /// Why.
        reason: String,
    },
    /// It answered something else.
    #[error("the controller answered what was not asked; it is of another version")]
    Answer,
}

/// What a controller tells a rank by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Notice {
    /// A rank of the job is gone without leaving.
    RankLost(Rank),
    /// The job is over, as a rank of it says, maybe this one. Said before any [`Notice::RankLost`] that comes of it.
    Over(Over),
    /// A rank of the job, maybe this one, says that its tree of that view is lost: ask for another one by
    /// [`Session::replan`].
    Repair {
        /// The view. A job begins with 0, and each [`Session::replan`] begins the next one.
        view: u32,
    },
    /// The job has no tree, and may have one now: answer with [`ClientRequest::Pause`].
    Offer {
        /// The job's view.
        view: u32,
    },
    /// All ranks are to ask for a tree right before that call.
    MoveAt {
        /// The view that was offered.
        view: u32,
        /// The number of the call.
        call: u64,
    },
    /// The offer is off, or the controller gone.
    Withdrawn,
    /// The controller has ended the connection, or is gone: nothing more comes until it is back.
    ControllerLost,
    /// A controller has taken the job over: what it says counts again.
    ControllerBack {
        /// The job's view from then on.
        view: u32,
    },
    /// The controller that is there does not take this rank in: nothing more comes, and nobody is looked for any more.
    NotResumed(JoinRefusal),
    /// The job's place in the queue for a tree has changed; `None`: it waits no more.
    Queued(Option<QueuePlace>),
}

/// A rank's connection while it takes part in a job. Where it ends, whoever is the controller at that address by then is
/// told of the job, so that it goes on there ([`Notice::ControllerBack`]).
#[derive(Debug)]
pub struct Session {
    connection: Arc<Mutex<Connection>>,
    /// What the watcher read that somebody waits for, and that the connection has ended.
    answers: Mutex<Receiver<Answer>>,
    /// The view whose answer nobody waits for any more: a tree that comes with it is declined.
    given_up: Arc<Mutex<Option<u32>>>,
    left: Mutex<Receiver<Left>>,
    watcher: Option<JoinHandle<()>>,
    /// It is this end that ends it.
    is_over: Arc<AtomicBool>,
    pid: u32,
}

pub(super) fn connect(addr: SocketAddr) -> Result<(TcpStream, FrameReader<TcpStream>), ClientError> {
    let unreached = |source| ClientError::Connect { addr, source };
    let mut stream = TcpStream::connect_timeout(&addr, CONNECT_TIMEOUT).map_err(unreached)?;
    stream.set_nodelay(true).map_err(unreached)?;
    let reader = FrameReader::with_limit(stream.try_clone().map_err(unreached)?, REPLY_LEN_MAX);
    send(&mut stream, &Greeting::Client)?;
    Ok((stream, reader))
}

/// Ask a controller for its state.
///
/// # Errors
/// [`ClientError`] if it can't be reached or answers something else.
pub fn status(addr: SocketAddr) -> Result<StatusReport, ClientError> {
    let (mut stream, mut reader) = connect(addr)?;
    stream.set_read_timeout(Some(STATUS_TIMEOUT)).map_err(StreamError::from)?;
    send(&mut stream, &ClientRequest::Status)?;
    match reader.recv()? {
        ClientReply::Status(report) => Ok(report),
        ClientReply::Refused(refusal) => Err(refusal.into()),
        _ => Err(ClientError::Answer),
    }
}

impl Session {
    /// Join a job and wait until all its ranks have, at most `timeout`, and for a tree as long as its terms say. From then on, `on_notice` is called (on a
    /// thread of its own) with what the controller says by itself, and may return what is answered. It must not wait for [`Session::replan`], whose answer
    /// that thread reads.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn join(
        addr: SocketAddr,
        request: JoinRequest,
        timeout: Duration,
        on_notice: impl Fn(Notice) -> Option<ClientRequest> + Send + 'static,
    ) -> Result<(Self, Membership), ClientError> {
        Self::join_on(addr, request, Vec::new(), timeout, on_notice)
    }

    /// The same on devices of the job's choice, each the parent of the next: the root first, all ranks at the last
    /// one. For tests of single links; no fabric is asked. No device is as [`Session::join`].
    ///
    /// # Errors
    /// [`ClientError`]. A device that is not connected is no error: it is why [`Membership::tree`] is none.
    pub fn join_on(
        addr: SocketAddr,
        request: JoinRequest,
        devices: Vec<String>,
        timeout: Duration,
        on_notice: impl Fn(Notice) -> Option<ClientRequest> + Send + 'static,
    ) -> Result<(Self, Membership), ClientError> {
        let (mut stream, mut reader) = connect(addr)?;
        let (job, world) = (request.job.clone(), request.world);
        let wait = Duration::from_millis(u64::from(request.terms.wait_ms));
        let of_job = (request.clone(), devices.clone());
        let join =
            if devices.is_empty() { ClientRequest::Join(request) } else { ClientRequest::JoinOn { request, devices } };
        send(&mut stream, &join)?;
        let timeout = timeout + wait;
        let deadline = Instant::now() + timeout;
        stream.set_read_timeout(Some(timeout.max(Duration::from_millis(1)))).map_err(StreamError::from)?;
        let membership = match reader.recv() {
            Ok(ClientReply::Joined(membership)) => *membership,
            Ok(ClientReply::Refused(refusal)) => return Err(refusal.into()),
            Ok(_) => return Err(ClientError::Answer),
            Err(StreamError::Io(error))
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
                    && Instant::now() >= deadline =>
            {
                return Err(ClientError::Timeout { job, world, timeout });
            }
            Err(error) => return Err(error.into()),
        };
        stream.set_read_timeout(None).map_err(StreamError::from)?;
        let ((to_replan, answers), (to_shrink, left)) = (channel(), channel());
        let (request, devices) = of_job;
        let known = Resumption {
            request,
            devices,
            view: 0,
            shrunk: 0,
            mesh_token: membership.mesh_token,
            expression: membership.expression.clone(),
        };
        let connection = Arc::new(Mutex::new(Connection::new(stream)));
        let is_over = Arc::new(AtomicBool::new(false));
        let given_up = Arc::new(Mutex::new(None));
        let watcher = Watcher {
            addr,
            connection: Arc::clone(&connection),
            is_over: Arc::clone(&is_over),
            given_up: Arc::clone(&given_up),
            answers: to_replan,
            left: to_shrink,
            known,
            on_notice,
        };
        let thread = std::thread::Builder::new().name("controller".into());
        let watcher = Some(thread.spawn(move || watcher.watch(reader)).map_err(StreamError::from)?);
        let (answers, left) = (Mutex::new(answers), Mutex::new(left));
        let session = Self { connection, answers, given_up, left, watcher, is_over, pid: std::process::id() };
        Ok((session, membership))
    }

    /// Tell the controller that this rank's tree of view `view` is lost. It tells all ranks, this one included
    /// ([`Notice::Repair`]), once for each view.
    pub fn suspect(&self, view: u32) {
        if let Err(error) = self.send(&ClientRequest::Suspect { view }) {
            // The watcher notices too; whoever then asks for another tree is told.
            tracing::debug!(%error, view, "controller can't be told of a lost tree");
        }
    }

    /// Tell the controller that the job is over for all its ranks, which it tells the others ([`Notice::Over`]).
    pub fn over(&self, over: Over) {
        if let Err(error) = self.send(&ClientRequest::Over(over)) {
            // The others have their own ways to find out, unless they come to it when this rank is gone.
            tracing::debug!(%error, "controller can't be told of the job's end");
        }
    }

    /// Ask for another tree than that of view `view`, and wait until all ranks have, or until `deadline`. The
    /// membership is of view `view + 1`; its tree may be none again, for the reason that is there.
    ///
    /// # Errors
    /// [`ClientError::NotReplanned`] if the job is at another view or a rank of it is gone,
    /// [`ClientError::ReplanTimeout`], or, at once, [`ClientError::Ended`] or [`ClientError::Stream`] if the controller
    /// is gone, [`ClientError::NotResumed`] if the next one does not take this rank in.
    pub fn replan(&self, view: u32, deadline: Instant) -> Result<Membership, ClientError> {
        let asked = Instant::now();
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        // That a connection before this one has ended.
        while answers.try_recv().is_ok() {}
        *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.send(&ClientRequest::Replan { view })?;
        loop {
            match answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Some((other, _))) if other != view => {}
                Ok(Some((_, Ok(membership)))) => return Ok(*membership),
                Ok(Some((_, Err(reason)))) => return Err(ClientError::NotReplanned { view, reason }),
                Err(RecvTimeoutError::Timeout) => break,
                Ok(None) | Err(RecvTimeoutError::Disconnected) => return Err(ClientError::Ended { view }),
            }
        }
        // From here on the watcher declines what comes; what came until now is there.
        *self.given_up.lock().unwrap_or_else(PoisonError::into_inner) = Some(view);
        if let Err(error) = self.send(&ClientRequest::Forgo { view }) {
            // The next one does not know that this rank has asked.
            tracing::debug!(%error, view, "controller can't be told that nobody waits any more");
        }
        match answers.try_iter().flatten().find(|(other, _)| *other == view) {
            Some((_, Ok(membership))) => Ok(*membership),
            Some((_, Err(reason))) => Err(ClientError::NotReplanned { view, reason }),
            None => Err(ClientError::ReplanTimeout { view, waited: asked.elapsed() }),
        }
    }

    /// Ask who is left of the job, and wait until all who are have asked, or until `deadline`. Returns how often that
    /// was asked before, and the ranks; all who ask get the same.
    ///
    /// # Errors
    /// [`ClientError::NoSurvivors`] if the job has not begun, or not all have asked in time; at once
    /// [`ClientError::Stream`] if the controller is gone, [`ClientError::NotResumed`] if the next one does not take this
    /// rank in.
    pub fn survivors(&self, deadline: Instant) -> Result<(u32, Vec<Rank>), ClientError> {
        let left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        // An answer to what was given up stands for ranks that have gone on without this one.
        while left.try_recv().is_ok() {}
        self.send(&ClientRequest::Survivors)?;
        match left.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Some((round, Ok(ranks)))) => Ok((round, ranks)),
            Ok(Some((_, Err(reason)))) => Err(ClientError::NoSurvivors { reason }),
            Err(RecvTimeoutError::Timeout) => {
                Err(ClientError::NoSurvivors { reason: "not all of them have asked within the time".into() })
            }
            Ok(None) | Err(RecvTimeoutError::Disconnected) => Err(StreamError::Closed.into()),
        }
    }

    /// Tell the controller that the ranks do not take their tree of view `view`, and the device that this rank could not
    /// attach to, if that is why.
    pub fn decline(&self, view: u32, device: Option<String>, why: &str) {
        let why = why.chars().take(WHY_MAX_CHARS).collect();
        if let Err(error) = self.send(&ClientRequest::Decline { view, device, why }) {
            // Whom nobody renews a lease for, the devices free.
            tracing::debug!(%error, view, "controller can't be told of a declined tree");
        }
    }

    /// Answer an offer later than at once: this rank begins no call from `at` on before it hears more.
    pub fn pause(&self, view: u32, at: u64) {
        if let Err(error) = self.send(&ClientRequest::Pause { view, at }) {
            // The offer is off then.
            tracing::debug!(%error, view, "controller can't be answered");
        }
    }

    fn send(&self, request: &ClientRequest) -> Result<(), ClientError> {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner).send(request)
    }

    /// Tell the controller that this rank is done.
    pub fn leave(self) {
        // A controller that is gone has nothing to release; one that waits for the other ranks is to know.
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = send(&mut connection.stream, &ClientRequest::Leave);
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            // A forked child does not have the thread, and the connection is its parent's.
            return std::mem::forget(self.watcher.take());
        }
        self.is_over.store(true, Ordering::Release);
        // Ends the watcher's read; what was sent before still arrives. Fails only if the peer was faster.
        let _ = self.connection.lock().unwrap_or_else(PoisonError::into_inner).stream.shutdown(Shutdown::Both);
        if let Some(watcher) = self.watcher.take() {
            watcher.thread().unpark();
            let _ = watcher.join();
        }
    }
}

/// What of a reason is sent.
const WHY_MAX_CHARS: usize = 300;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Covers a device that does not answer the controller.
const STATUS_TIMEOUT: Duration = Duration::from_secs(30);
