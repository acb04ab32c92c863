//! Ranks of other hosts: the handshake (`sumac_hal::remote::handshake`) up to the rank's request. The shard that serves
//! zero-copy ranks verifies the request and replies.
//!
//! All pending connections are polled together, so one that sends nothing does not delay the others.

use super::local::{ACCEPT_BACKOFF, ATTACH_REQUEST_TIMEOUT, PENDING_MAX};
use super::{Arrival, BoardError, Stop};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::Instant;
use sumac_hal::ctrl::{FrameReader, StreamError, send};
use sumac_hal::remote::handshake::{AttachRequest, Challenge, VERSION};
use sumac_hal::traffic_class::TrafficClass;
use sumac_hal::udp::Waker;

/// A rank on another host that has sent its attach request.
pub(in crate::emulated) struct RemoteArrival {
    pub(in crate::emulated) stream: TcpStream,
    pub(in crate::emulated) challenge: Challenge,
    pub(in crate::emulated) request: AttachRequest,
}

/// A connection that has not sent its request yet.
struct Pending {
    reader: FrameReader<TcpStream>,
    challenge: Challenge,
    deadline: Instant,
}

/// The listener for ranks of other hosts. Dropping it ends its thread.
#[derive(Debug)]
pub(in crate::emulated) struct RemoteListener {
    addr: SocketAddr,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl RemoteListener {
    /// Listen on any free port of this address.
    pub(in crate::emulated) fn start(
        (bind, traffic_class): (IpAddr, TrafficClass),
        arrivals: Sender<Arrival>,
        waker: Waker,
    ) -> Result<Self, BoardError> {
        let system = |what| move |source| BoardError::System { what, source };
        let listener = TcpListener::bind((bind, 0)).map_err(system("listen for ranks of other hosts"))?;
        traffic_class.apply(&listener).map_err(system("listen for ranks of other hosts"))?;
        let addr = listener.local_addr().map_err(system("listen for ranks of other hosts"))?;
        listener.set_nonblocking(true).map_err(system("listen for ranks of other hosts"))?;
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| system("create an eventfd")(errno.into()))?;
        let stop = Arc::new(Stop { is_set: AtomicBool::new(false), event });
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new().name("calls".into()).spawn(move || {
            let mut pending = VecDeque::new();
            let mut is_served = true;
            while is_served && !stopped.is_set.load(Ordering::Acquire) {
                poll_once(&listener, &mut pending, &stopped, |arrival| {
                    is_served &= arrivals.send(Arrival::Remote(arrival)).is_ok();
                    waker.wake();
                });
            }
        });
        let thread = thread.map_err(system("start the thread for ranks of other hosts"))?;
        Ok(Self { addr, stop, thread: Some(thread) })
    }

    /// Return the address that it listens on.
    pub(in crate::emulated) const fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for RemoteListener {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sleep until a connection or request arrives, a request is overdue, or `stop` is set; hand over received requests.
fn poll_once(
    listener: &TcpListener,
    pending: &mut VecDeque<Pending>,
    stop: &Stop,
    mut arrived: impl FnMut(RemoteArrival),
) {
    let now = Instant::now();
    let timeout = pending.front().map(|first| first.deadline.saturating_duration_since(now));
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut fds = vec![PollFd::new(&stop.event, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
    fds.extend(pending.iter().map(|entry| PollFd::new(entry.reader.get_ref(), PollFlags::IN)));
    match poll(&mut fds, timeout.as_ref()) {
        // The caller's loop checks time and connections again.
        Err(rustix::io::Errno::INTR) => return,
        Err(error) => {
            tracing::warn!(%error, "poll failed");
            return thread::sleep(ACCEPT_BACKOFF);
        }
        Ok(_) => {}
    }
    let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    let now = Instant::now();
    for &is_ready in &is_ready[2..] {
        let Some(mut entry) = pending.pop_front() else { break };
        match if is_ready {
            entry.reader.recv::<AttachRequest>()
        } else {
            Err(ErrorKind::WouldBlock.into_stream_error())
        } {
            Ok(request) => {
                let Ok(stream) = entry.reader.get_ref().try_clone() else { continue };
                arrived(RemoteArrival { stream, challenge: entry.challenge, request });
            }
            Err(StreamError::Io(error)) if error.kind() == ErrorKind::WouldBlock && now < entry.deadline => {
                pending.push_back(entry);
            }
            Err(error) => tracing::warn!(%error, "a connection from another host sent no valid attach request"),
        }
    }
    if is_ready[1] {
        match listener.accept().map_err(StreamError::Io).and_then(|(stream, _)| challenge_peer(stream)) {
            Ok(entry) => {
                if pending.len() == PENDING_MAX {
                    pending.pop_front();
                }
                pending.push_back(entry);
            }
            // The connection was closed before it was accepted.
            Err(StreamError::Io(error)) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(%error, "accept failed for a rank of another host");
                thread::sleep(ACCEPT_BACKOFF);
            }
        }
    }
}

/// Send the challenge to a new connection.
fn challenge_peer(mut stream: TcpStream) -> Result<Pending, StreamError> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let mut challenge = Challenge { version: VERSION, nonce: [0; 16] };
    getrandom(&mut challenge.nonce, GetRandomFlags::empty()).map_err(std::io::Error::from)?;
    // A few bytes fit the empty send buffer.
    send(&mut stream, &challenge)?;
    Ok(Pending { reader: FrameReader::new(stream), challenge, deadline: Instant::now() + ATTACH_REQUEST_TIMEOUT })
}

/// Converts to a stream error without received data.
trait IntoStreamError {
    fn into_stream_error(self) -> StreamError;
}

impl IntoStreamError for ErrorKind {
    fn into_stream_error(self) -> StreamError {
        StreamError::Io(self.into())
    }
}
