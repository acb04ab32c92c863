//! Who calls from another host: the set-up of a connection up to what the rank says (`sumac_hal::remote::handshake`). The shard
//! that serves the bus checks it, and answers.
//!
//! All are listened to at once, as on this machine's bus: one that says nothing keeps nobody waiting.

use super::reception::{HELLO_LIMIT, REST, WAITING_MAX};
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
use sumac_hal::remote::handshake::{Call, Challenge, VERSION};
use sumac_hal::udp::Waker;

/// Somebody who has called.
pub(in crate::emulated) struct Caller {
    pub(in crate::emulated) stream: TcpStream,
    pub(in crate::emulated) challenge: Challenge,
    pub(in crate::emulated) call: Call,
}

/// Somebody who has not said yet who it is.
struct Waiting {
    reader: FrameReader<TcpStream>,
    challenge: Challenge,
    until: Instant,
}

/// The listening thread. Dropping it ends the thread.
#[derive(Debug)]
pub(in crate::emulated) struct Calls {
    addr: SocketAddr,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Calls {
    /// Listen at a port of this address.
    pub(in crate::emulated) fn start(
        bind: IpAddr,
        arrivals: Sender<Arrival>,
        waker: Waker,
    ) -> Result<Self, BoardError> {
        let system = |what| move |source| BoardError::System { what, source };
        let listener = TcpListener::bind((bind, 0)).map_err(system("listen for ranks of other hosts"))?;
        let addr = listener.local_addr().map_err(system("listen for ranks of other hosts"))?;
        listener.set_nonblocking(true).map_err(system("listen for ranks of other hosts"))?;
        let event = eventfd(0, EventfdFlags::CLOEXEC).map_err(|errno| system("an event")(errno.into()))?;
        let stop = Arc::new(Stop { is_set: AtomicBool::new(false), event });
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new().name("calls".into()).spawn(move || {
            let mut waiting = VecDeque::new();
            let mut somebody_serves = true;
            while somebody_serves && !stopped.is_set.load(Ordering::Acquire) {
                turn(&listener, &mut waiting, &stopped, |caller| {
                    somebody_serves &= arrivals.send(Arrival::Far(caller)).is_ok();
                    waker.wake();
                });
            }
        });
        let thread = thread.map_err(system("start the thread for ranks of other hosts"))?;
        Ok(Self { addr, stop, thread: Some(thread) })
    }

    /// Return where it listens.
    pub(in crate::emulated) const fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.stop.set();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Sleep until somebody comes or speaks, or has had its time, or it is to stop; hand over who has spoken.
fn turn(listener: &TcpListener, waiting: &mut VecDeque<Waiting>, stop: &Stop, mut called: impl FnMut(Caller)) {
    let now = Instant::now();
    let timeout = waiting.front().map(|first| first.until.saturating_duration_since(now));
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut fds = vec![PollFd::new(&stop.event, PollFlags::IN), PollFd::new(listener, PollFlags::IN)];
    fds.extend(waiting.iter().map(|caller| PollFd::new(caller.reader.get_ref(), PollFlags::IN)));
    match poll(&mut fds, timeout.as_ref()) {
        // Whoever calls looks at time and connections again.
        Err(rustix::io::Errno::INTR) => return,
        Err(error) => {
            tracing::warn!(%error, "nobody can be heard now");
            return thread::sleep(REST);
        }
        Ok(_) => {}
    }
    let has_news: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    let now = Instant::now();
    for &has_news in &has_news[2..] {
        let Some(mut caller) = waiting.pop_front() else { break };
        match if has_news { caller.reader.recv::<Call>() } else { Err(ErrorKind::WouldBlock.into_stream()) } {
            Ok(call) => {
                let Ok(stream) = caller.reader.get_ref().try_clone() else { continue };
                called(Caller { stream, challenge: caller.challenge, call });
            }
            Err(StreamError::Io(error)) if error.kind() == ErrorKind::WouldBlock && now < caller.until => {
                waiting.push_back(caller);
            }
            Err(error) => tracing::warn!(%error, "somebody from another host does not say who it is"),
        }
    }
    if has_news[1] {
        match listener.accept().map_err(StreamError::Io).and_then(|(stream, _)| greet(stream)) {
            Ok(caller) => {
                if waiting.len() == WAITING_MAX {
                    waiting.pop_front();
                }
                waiting.push_back(caller);
            }
            // It has thought better of it.
            Err(StreamError::Io(error)) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::warn!(%error, "somebody from another host can't attach");
                thread::sleep(REST);
            }
        }
    }
}

/// Challenge somebody who has connected.
fn greet(mut stream: TcpStream) -> Result<Waiting, StreamError> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let mut challenge = Challenge { version: VERSION, number: [0; 16] };
    getrandom(&mut challenge.number, GetRandomFlags::empty()).map_err(std::io::Error::from)?;
    // Some bytes, into an empty buffer.
    send(&mut stream, &challenge)?;
    Ok(Waiting { reader: FrameReader::new(stream), challenge, until: Instant::now() + HELLO_LIMIT })
}

/// An error of a stream, of which nothing has come.
trait IntoStream {
    fn into_stream(self) -> StreamError;
}

impl IntoStream for ErrorKind {
    fn into_stream(self) -> StreamError {
        StreamError::Io(self.into())
    }
}
