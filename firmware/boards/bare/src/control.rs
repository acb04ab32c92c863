//! The control plane of a board: dials the controller, announces the device, and executes the controller's requests.
//!
//! Requests are executed one at a time and in order; each is finished before the next is read. A connection that
//! breaks, or that carries anything but a request, is closed, and the controller is dialled again after [`REDIAL`];
//! meanwhile the packets of their ranks prevent the timeout of groups.
//!
//! With a key, the board begins each connection by a key exchange, for which it needs randomness: without a source of
//! it a board with a key does not connect at all.

mod channel;

use crate::stack::Stack;
use channel::{Channel, MESSAGE_BYTES};
use core::net::SocketAddrV4;
use core::time::Duration;
use smoltcp::phy::Device;
use smoltcp::socket::tcp;
use sumac_hal::ctrl::secure::{HandshakeError, Key, RecordError};
use sumac_hal::ctrl::{
    Announce, Envelope, FrameError, GroupConfig, Hello, Refusal, Request, Response, TermGuard, ZeroCopyRefusal, decode,
    encode,
};
use sumac_hal::time::Instant;
use thiserror::Error;

/// The pause before a board dials again.
pub const REDIAL: Duration = Duration::from_millis(500);

/// How long a connection may not answer keep-alives before it is closed.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// The keep-alive interval of an idle connection.
const KEEP_ALIVE: Duration = Duration::from_secs(3);

/// How long a key exchange may take, as on hosts.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns 32 bytes of real randomness, others at each call; `None` if the board has no source of it.
pub type Entropy = fn() -> Option<[u8; 32]>;

/// The first source port of connections: IANA's dynamic range (RFC 6335).
const FIRST_PORT: u16 = 49_152;

/// Why a connection to the controller ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The connection failed, or the controller closed it.
    #[error("the connection failed or was closed")]
    Closed,
    /// The controller sent something that is not a request, or is too long for one.
    #[error("invalid request from the controller: {0}")]
    Frame(#[from] FrameError),
    /// The controller did not register the device, for this reason ([`Rejection::summary`]).
    ///
    /// [`Rejection::summary`]: sumac_hal::ctrl::Rejection::summary
    #[error("not registered: {0}")]
    Rejected(&'static str),
    /// A request exceeds the board's buffer.
    #[error("a request exceeds {MESSAGE_BYTES} bytes")]
    TooLong,
    /// The board has a key, and no randomness for a key exchange.
    #[error("no source of real randomness for the key exchange: the board needs a virtio-rng or its processor's own")]
    NoRandomness,
    /// The key exchange failed.
    #[error("key exchange: {0}")]
    Key(#[from] HandshakeError),
    /// The controller did not finish the key exchange in time.
    #[error("key exchange: the controller did not answer within {} s", EXCHANGE_TIMEOUT.as_secs())]
    KeyTimeout,
    /// What was received is not of this connection.
    #[error("the encrypted connection: {0}")]
    Record(#[from] RecordError),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not connected; dial at this time.
    Idle(Instant),
    /// Connecting.
    Dialling,
    /// Connected; the key exchange ends before this time.
    Exchanging(Instant),
    /// Connected; the hello was queued.
    Up,
}

/// The control connection.
#[derive(Debug)]
pub struct Control {
    controller: SocketAddrV4,
    announce: Announce,
    /// The device's key, if the controller uses keys.
    key: Option<Key>,
    entropy: Entropy,
    state: State,
    channel: Channel,
    /// The controller has sent a request on this connection; one that already has a device of this name rejects this
    /// one instead.
    is_accepted: bool,
    /// The highest term of a pair of controllers that this incarnation has seen.
    guard: TermGuard,
    /// The number of connections so far: each uses the next source port.
    dials: u16,
    /// The part of a request received so far.
    request: [u8; MESSAGE_BYTES],
    have: usize,
    /// Where responses are encoded.
    answer: [u8; MESSAGE_BYTES],
}

impl Control {
    /// Create the control connection, which dials `controller` in the first step. `salt` varies the first source port
    /// between incarnations, because the controller's side may still hold the last connection of the previous one. With
    /// a key, nothing is dialled until [`Control::set_entropy`].
    pub const fn new(controller: SocketAddrV4, announce: Announce, key: Option<Key>, salt: u16) -> Self {
        Self {
            controller,
            announce,
            key,
            entropy: || None,
            state: State::Idle(Instant::ZERO),
            channel: Channel::new(),
            is_accepted: false,
            guard: TermGuard::new(0),
            dials: salt,
            request: [0; MESSAGE_BYTES],
            have: 0,
            answer: [0; MESSAGE_BYTES],
        }
    }

    /// Set the source of randomness for key exchanges.
    pub const fn set_entropy(&mut self, entropy: Entropy) {
        self.entropy = entropy;
    }

    /// Return whether the controller is connected and has accepted this device.
    pub fn is_up(&self) -> bool {
        self.state == State::Up && self.is_accepted
    }

    /// Do all pending work; `execute` executes a request.
    ///
    /// # Errors
    /// [`ControlError`] when a connection has ended; the controller is dialled again automatically.
    pub fn poll<D: Device>(
        &mut self,
        stack: &mut Stack<D>,
        now: Instant,
        execute: impl FnMut(&Request) -> Response,
    ) -> Result<(), ControlError> {
        let result = self.advance(stack, now, execute);
        if result.is_err() {
            stack.control().0.abort();
            self.state = State::Idle(now + REDIAL);
            self.channel.close();
            self.have = 0;
            self.is_accepted = false;
        }
        result
    }

    /// Return when to poll again if nothing arrives.
    pub fn poll_at(&self) -> Option<Instant> {
        match self.state {
            State::Idle(at) | State::Exchanging(at) => Some(at),
            State::Dialling | State::Up => None,
        }
    }

    fn advance<D: Device>(
        &mut self,
        stack: &mut Stack<D>,
        now: Instant,
        execute: impl FnMut(&Request) -> Response,
    ) -> Result<(), ControlError> {
        match self.state {
            State::Idle(at) if now < at => Ok(()),
            State::Idle(_) => self.dial(stack),
            State::Dialling => match stack.control().0.state() {
                tcp::State::SynSent | tcp::State::SynReceived => Ok(()),
                tcp::State::Established => {
                    self.state = State::Exchanging(now + EXCHANGE_TIMEOUT);
                    self.exchange(stack, now, execute)
                }
                _ => Err(ControlError::Closed),
            },
            State::Exchanging(_) => self.exchange(stack, now, execute),
            State::Up => self.serve(stack, execute),
        }
    }

    /// Go on with the key exchange, if there is one; then announce the device.
    fn exchange<D: Device>(
        &mut self,
        stack: &mut Stack<D>,
        now: Instant,
        execute: impl FnMut(&Request) -> Response,
    ) -> Result<(), ControlError> {
        let socket = stack.control().0;
        check_open(socket)?;
        if !self.channel.shake_hands(socket)? {
            let is_late = matches!(self.state, State::Exchanging(limit) if now >= limit);
            return if is_late { Err(ControlError::KeyTimeout) } else { Ok(()) };
        }
        self.state = State::Up;
        self.guard.connect();
        self.channel.send(encode(&Hello::Device(self.announce.clone()), &mut self.answer)?)?;
        self.serve(stack, execute)
    }

    fn dial<D: Device>(&mut self, stack: &mut Stack<D>) -> Result<(), ControlError> {
        let handshake = match &self.key {
            // There is nothing to fall back to: an ephemeral key that can be guessed is none.
            Some(key) => Some((key, (self.entropy)().ok_or(ControlError::NoRandomness)?)),
            None => None,
        };
        self.channel.open(handshake);
        let to = stack.to_network_addr(self.controller);
        let from = FIRST_PORT + self.dials % (u16::MAX - FIRST_PORT);
        self.dials = self.dials.wrapping_add(1);
        let (socket, context) = stack.control();
        let duration = |time: Duration| Some(smoltcp::time::Duration::from_micros(time.as_micros() as u64));
        socket.set_timeout(duration(KEEP_ALIVE_TIMEOUT));
        socket.set_keep_alive(duration(KEEP_ALIVE));
        socket.set_nagle_enabled(false);
        socket.connect(context, to, from).map_err(|_| ControlError::Closed)?;
        self.state = State::Dialling;
        Ok(())
    }

    /// Send the rest of a response, then process received requests as long as their responses fit.
    fn serve<D: Device>(
        &mut self,
        stack: &mut Stack<D>,
        mut execute: impl FnMut(&Request) -> Response,
    ) -> Result<(), ControlError> {
        loop {
            let socket = stack.control().0;
            check_open(socket)?;
            if !self.channel.flush(socket)? {
                return Ok(());
            }
            let received = self.channel.receive(socket, &mut self.request[self.have..])?;
            self.have += received;
            let Some((request, len)) = decode::<Envelope<Request>>(&self.request[..self.have])? else {
                match received {
                    _ if self.have == self.request.len() => return Err(ControlError::TooLong),
                    0 => return Ok(()),
                    // The rest may be in the next record.
                    _ => continue,
                }
            };
            self.request.copy_within(len..self.have, 0);
            self.have -= len;
            if let Request::Rejected(rejection) = request.message {
                return Err(ControlError::Rejected(rejection.summary()));
            }
            self.is_accepted = true;
            let message = match self.guard.admit(&request.message) {
                Ok(()) => self.answer(request.message, &mut execute),
                Err(refusal) => Response::Refused(refusal),
            };
            self.channel.send(encode(&Envelope { id: request.id, message }, &mut self.answer)?)?;
        }
    }

    fn answer(&self, request: Request, execute: &mut impl FnMut(&Request) -> Response) -> Response {
        match request {
            Request::Identify => Response::Announce(self.announce.clone()),
            Request::Claim(_) => Response::Done,
            Request::CreateGroup(config) if !config.zero_copy.is_empty() && self.announce.attach.is_none() => {
                Response::Refused(Refusal::NoZeroCopy(ZeroCopyRefusal::Unsupported))
            }
            // Boards have no multicast: it would not cross an emulated machine's network.
            Request::CreateGroup(config) => {
                execute(&Request::CreateGroup(GroupConfig { shared: None, parent_shared: None, ..config }))
            }
            request => execute(&request),
        }
    }
}

/// Check that messages can be sent and received.
fn check_open(socket: &tcp::Socket<'_>) -> Result<(), ControlError> {
    let is_open = socket.may_send() && (socket.may_recv() || socket.recv_queue() > 0);
    if is_open { Ok(()) } else { Err(ControlError::Closed) }
}
