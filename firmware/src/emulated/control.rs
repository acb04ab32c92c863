//! The board's control thread: dials the controller, announces the device, and executes the controller's requests.

use super::shard::ShardLink;
use super::{BoardConfig, BoardError, Maintenance, RegistrationError, term_file, update_text};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sumac_hal::ctrl::secure::{self, ConnectError, ControlReader, ControlWriter, HandshakeError, Key, Opener, Sealer};
use sumac_hal::ctrl::{
    Announce, Envelope, FrameError, FrameReader, Hello, JobTicket, Refusal, Rejection, Request, Response, StreamError,
    TermGuard, send, shards,
};
use sumac_hal::traffic_class::TrafficClass;

/// The board's handle of the control thread. Dropping it ends the thread.
#[derive(Debug)]
pub(super) struct Control {
    shared: Arc<Shared>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The state shared by board and control thread.
#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    registered: bool,
    /// Why the controller did not register the device at the last attempt.
    rejection: Option<Rejection>,
    /// Why the controller's messages were none of this version at the last attempt.
    version_error: Option<FrameError>,
    /// Why there was no secure channel at the last attempt. Whoever has the controller's address can cause it.
    key_error: Option<HandshakeError>,
    /// The connection, so that the board can end an attempt to connect and a blocking read.
    stream: Option<TcpStream>,
    stopped: bool,
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // The state is plain flags, which a panic elsewhere leaves consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    pub(super) fn start(config: &BoardConfig, announce: Announce, shards: Vec<ShardLink>) -> Result<Self, BoardError> {
        let shared = Arc::new(Shared::default());
        let (stop, stopped) = channel();
        let term = config.term_file.as_deref().map_or(Ok(0), term_file::read)?;
        let dialer = Dialer {
            guard: TermGuard::new(term),
            term_file: config.term_file.clone(),
            announce,
            ticket: config.ticket.clone(),
            maintenance: config.maintenance.clone(),
            shards,
            key: config.key.clone(),
            controllers: [&[config.controller][..], &config.controller_alternatives].concat(),
            traffic_class: config.udp.traffic_class,
            redial: config.redial,
            shared: Arc::clone(&shared),
            stopped,
        };
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || dialer.run())
            .map_err(|source| BoardError::System { what: "start the control thread", source })?;
        Ok(Self { shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Wait until the device is registered, or until that will not happen.
    pub(super) fn wait_registration(&self, timeout: Duration) -> Result<(), RegistrationError> {
        let is_open = |state: &mut State| !state.registered && !state.rejection.is_some_and(|why| why.is_final());
        let waited = self.shared.changed.wait_timeout_while(self.shared.lock(), timeout, is_open);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match state.rejection {
            _ if state.registered => Ok(()),
            Some(rejection) => Err(RegistrationError::Rejected(rejection)),
            None => Err(match (state.key_error, state.version_error) {
                (Some(error), _) => RegistrationError::Key(error),
                (None, Some(error)) => RegistrationError::Version(error),
                (None, None) => RegistrationError::Unreached,
            }),
        }
    }

    pub(super) fn wait_registered(&self, timeout: Duration) -> bool {
        let state = self.shared.lock();
        let waited = self.shared.changed.wait_timeout_while(state, timeout, |state| !state.registered);
        waited.unwrap_or_else(PoisonError::into_inner).0.registered
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        drop(self.stop.take());
        let mut state = self.shared.lock();
        state.stopped = true;
        if let Some(stream) = &state.stream {
            // This fails only if the peer closed first, which ends the read as well.
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(state);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How long a key exchange may take, and the first message of a controller if there is another one to try.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);

struct Dialer {
    guard: TermGuard,
    /// Keeps the highest term over restarts.
    term_file: Option<PathBuf>,
    announce: Announce,
    ticket: Option<JobTicket>,
    /// What updates the system.
    maintenance: Option<Arc<dyn Maintenance>>,
    shards: Vec<ShardLink>,
    /// The key to connect with, if the controller uses keys.
    key: Option<Key>,
    /// The addresses of the controller, which are dialled in turn.
    controllers: Vec<SocketAddr>,
    traffic_class: TrafficClass,
    redial: Duration,
    shared: Arc<Shared>,
    stopped: Receiver<()>,
}

impl Dialer {
    fn run(mut self) {
        let device = self.announce.name.clone();
        let (device, controllers) = (device.as_str(), self.controllers.clone());
        loop {
            for controller in &controllers {
                match self.serve(controller) {
                    Ok(()) => return,
                    Err(error) => tracing::debug!(device, %controller, %error, "not connected to the controller"),
                }
                self.shared.lock().registered = false;
            }
            // The board drops its end of the channel when it stops, which ends this wait at once.
            if self.stopped.recv_timeout(self.redial) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    /// Serve one connection; `Ok` if the board stops.
    fn serve(&mut self, controller: &SocketAddr) -> Result<(), StreamError> {
        let Some(mut stream) = self.connect(controller)? else { return Ok(()) };
        stream.set_nodelay(true)?;
        let (sealer, opener) = self.exchange_keys(&mut stream)?.unzip();
        let mut reader = FrameReader::new(ControlReader::new(stream.try_clone()?, opener));
        let mut stream = ControlWriter::new(stream, sealer);
        let announce = self.current_announce();
        let hello = match self.ticket.clone() {
            Some(ticket) => Hello::HostDevice { announce, ticket },
            None => Hello::Device(announce),
        };
        send(&mut stream, &hello)?;
        self.guard.connect();
        // A controller answers at once. One that was stopped accepts connections, too.
        let mut silence = (self.controllers.len() > 1).then_some(EXCHANGE_TIMEOUT);
        stream.get_ref().set_read_timeout(silence)?;
        loop {
            let request: Envelope<Request> = match reader.recv() {
                Ok(request) => request,
                Err(_) if self.shared.lock().stopped => return Ok(()),
                Err(StreamError::Frame(error @ FrameError::Version(_))) => {
                    let before = self.shared.lock().version_error.replace(error);
                    if before != Some(error) {
                        tracing::warn!(device = self.announce.name.as_str(), %error, "not registered");
                    }
                    return Err(error.into());
                }
                Err(error) => return Err(error),
            };
            if let Request::Rejected(rejection) = request.message {
                self.note_rejection(rejection);
                return Err(StreamError::Closed);
            }
            let limit = match &request.message {
                Request::Claim(claim) => {
                    Some(Duration::from_millis(claim.silence_ms.into())).filter(|time| !time.is_zero())
                }
                // Only the active controller of a pair speaks regularly.
                _ => silence.filter(|_| self.guard.seen() > 0),
            };
            if limit != silence {
                silence = limit;
                stream.get_ref().set_read_timeout(silence)?;
            }
            let message =
                self.admit(&request.message).map_or_else(Response::Refused, |()| self.execute(request.message));
            let is_registered = matches!(message, Response::Announce(_));
            let is_update = matches!(message, Response::Update(_));
            send(&mut stream, &Envelope { id: request.id, message })?;
            if let Some(maintenance) = self.maintenance.as_ref().filter(|_| is_update) {
                maintenance.handle_sent();
            }
            if is_registered {
                {
                    let mut state = self.shared.lock();
                    (state.registered, state.rejection) = (true, None);
                    (state.key_error, state.version_error) = (None, None);
                }
                self.shared.changed.notify_all();
            }
        }
    }

    /// Connect to a controller; `None` if the board stops, which ends the attempt at once.
    fn connect(&self, controller: &SocketAddr) -> Result<Option<TcpStream>, StreamError> {
        let family = if controller.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = TcpStream::from(socket_with(family, SocketType::STREAM, flags, None).map_err(io::Error::from)?);
        self.traffic_class.apply(&stream)?;
        match rustix::net::connect(&stream, controller) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        {
            let mut state = self.shared.lock();
            if state.stopped {
                return Ok(None);
            }
            // From here on, the board ends the attempt by a shutdown of the socket, as it ends a read later.
            state.stream = Some(stream.try_clone()?);
        }
        let connected = wait_connected(&stream);
        if self.shared.lock().stopped {
            return Ok(None);
        }
        connected?;
        stream.set_nonblocking(false)?;
        Ok(Some(stream))
    }

    /// Set up a secure channel, if the device has a key.
    fn exchange_keys(&self, stream: &mut TcpStream) -> Result<Option<(Sealer, Opener)>, StreamError> {
        let Some(key) = &self.key else { return Ok(None) };
        match secure::connect_within(stream, key, EXCHANGE_TIMEOUT) {
            Ok(channel) => Ok(Some(channel)),
            Err(ConnectError::Io(error)) => Err(error.into()),
            Err(ConnectError::Handshake(error)) => {
                let before = self.shared.lock().key_error.replace(error);
                if before != Some(error) {
                    tracing::warn!(device = self.announce.name.as_str(), %error, "not registered");
                }
                Err(StreamError::Closed)
            }
            Err(error) => Err(std::io::Error::other(error).into()),
        }
    }

    fn note_rejection(&self, rejection: Rejection) {
        let before = self.shared.lock().rejection.replace(rejection);
        if before != Some(rejection) {
            tracing::info!(device = self.announce.name.as_str(), %rejection, "not registered");
        }
        self.shared.changed.notify_all();
    }

    /// Check that the controller may command this device.
    fn admit(&mut self, request: &Request) -> Result<(), Refusal> {
        let device = self.announce.name.as_str();
        if let Some(term) = self.guard.new_term(request)
            && let Some(path) = &self.term_file
            && let Err(error) = term_file::write(path, term)
        {
            // Obeying it now would let an earlier controller in after a restart.
            tracing::error!(device, term, %error, "refusing a controller, because its term cannot be kept");
            return Err(Refusal::Term { term });
        }
        let admitted = self.guard.admit(request);
        if let (Err(refusal), Request::Claim(claim)) = (&admitted, request) {
            tracing::warn!(device, term = claim.term, %refusal, "refusing a controller");
        }
        admitted
    }

    /// Return the announcement, with the slots as they are now.
    fn current_announce(&self) -> Announce {
        let slots = self.maintenance.as_ref().map(|maintenance| maintenance.slots());
        Announce { slots, ..self.announce.clone() }
    }

    fn execute(&self, request: Request) -> Response {
        if matches!(request, Request::Claim(_)) {
            return Response::Done;
        }
        if request == Request::Identify {
            return Response::Announce(self.current_announce());
        }
        let request = match (request, &self.maintenance) {
            (Request::Update(request), Some(maintenance)) => {
                let refused = |why: String| Response::UpdateRefused(update_text(&why));
                return maintenance.handle(request).map_or_else(refused, Response::Update);
            }
            (request, _) => request,
        };
        let responses: Vec<_> = self.shards.iter().map(|shard| shard.request(request.clone())).collect();
        let responses: Vec<Response> = responses.into_iter().filter_map(|response| response.recv().ok()).collect();
        self.roll_back(&request, &responses);
        shards::merge(responses).unwrap_or(Response::Refused(Refusal::Unknown))
    }

    /// Execute a request on all shards or on none: if some refuse a group, the others release it.
    fn roll_back(&self, request: &Request, responses: &[Response]) {
        let Some(undo) = shards::undo(request) else { return };
        if responses.iter().all(|response| *response == Response::Done) {
            return;
        }
        for (shard, _) in self.shards.iter().zip(responses).filter(|(_, response)| **response == Response::Done) {
            // A shard that has ended meanwhile has nothing to release.
            let _ = shard.request(undo.clone()).recv();
        }
    }
}

/// Wait until an attempt to connect has succeeded, failed or been shut down.
fn wait_connected(stream: &TcpStream) -> io::Result<()> {
    let deadline = Instant::now() + CONNECT_TIMEOUT;
    loop {
        let left = Timespec::try_from(deadline.saturating_duration_since(Instant::now())).ok();
        match poll(&mut [PollFd::new(stream, PollFlags::OUT)], left.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return stream.take_error()?.map_or(Ok(()), Err),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// How long an attempt to connect to a controller may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
