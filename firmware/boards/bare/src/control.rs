//! The control plane of a board: dials the controller, says who it is, and carries out what it asks.
//!
//! One request at a time, as they come, and each is carried out before the next is read. A connection that breaks, or on which something
//! stands that is no request, is given up, and the controller is dialled again after [`REDIAL`]; groups live on
//! meanwhile, by the packets of their ranks.

use crate::stack::Stack;
use core::net::SocketAddrV4;
use core::time::Duration;
use smoltcp::phy::Device;
use smoltcp::socket::tcp;
use sumac_hal::ctrl::{
    Announce, Envelope, FrameError, Greeting, GroupConfig, NoBus, Refusal, Request, Response, decode, encode,
};
use sumac_hal::time::Instant;
use thiserror::Error;

/// How long a board waits before it dials again.
pub const REDIAL: Duration = Duration::from_millis(500);

/// How long a connection may be silent in spite of questions before it is given up.
const SILENCE: Duration = Duration::from_secs(10);

/// How often a silent connection is asked whether it still is one.
const KEEP_ALIVE: Duration = Duration::from_secs(3);

/// The longest message either way in bytes: a tree whose parent has as many shards as there can be.
const MESSAGE_BYTES: usize = 4096;

/// The first of the ports that connections come from: IANA's dynamic ones (RFC 6335).
const FIRST_PORT: u16 = 49_152;

/// Why a connection to the controller ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ControlError {
    /// It was never there, or the controller closed it.
    #[error("no connection, or it was closed")]
    Closed,
    /// What came is no request, or is longer than one can be.
    #[error("what the controller sent can't be read: {0}")]
    Frame(#[from] FrameError),
    /// A request that is longer than what the board keeps of one.
    #[error("a request of more than {MESSAGE_BYTES} bytes")]
    TooLong,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Dial then.
    Idle(Instant),
    /// On the way.
    Dialling,
    /// Greeted.
    Up,
}

/// The control connection.
#[derive(Debug)]
pub struct Control {
    controller: SocketAddrV4,
    announce: Announce,
    state: State,
    /// The controller has said something on this connection: one that knows a device of this name hangs up instead.
    is_welcome: bool,
    /// Connections so far: each comes from the next port.
    dials: u16,
    /// What has come of a request.
    request: [u8; MESSAGE_BYTES],
    have: usize,
    /// What is still to be sent of an answer.
    answer: [u8; MESSAGE_BYTES],
    sent: usize,
    len: usize,
}

impl Control {
    /// Dial `controller` from the first step on. `salt` keeps a life's first connection apart from the last one of the
    /// life before, which the controller's side may still hold.
    pub const fn new(controller: SocketAddrV4, announce: Announce, salt: u16) -> Self {
        Self {
            controller,
            announce,
            state: State::Idle(Instant::ZERO),
            is_welcome: false,
            dials: salt,
            request: [0; MESSAGE_BYTES],
            have: 0,
            answer: [0; MESSAGE_BYTES],
            sent: 0,
            len: 0,
        }
    }

    /// Tell whether the controller is connected, and has this device.
    pub fn is_up(&self) -> bool {
        self.state == State::Up && self.is_welcome
    }

    /// Do what there is to do; `carry_out` does what is asked of the device.
    ///
    /// # Errors
    /// [`ControlError`]: why a connection has just ended; it is dialled again by itself.
    pub fn poll<D: Device>(
        &mut self,
        stack: &mut Stack<D>,
        now: Instant,
        carry_out: impl FnMut(&Request) -> Response,
    ) -> Result<(), ControlError> {
        let result = self.advance(stack, now, carry_out);
        if result.is_err() {
            stack.control().0.abort();
            self.state = State::Idle(now + REDIAL);
            (self.have, self.sent, self.len) = (0, 0, 0);
            self.is_welcome = false;
        }
        result
    }

    /// Return when to poll again if nothing arrives.
    pub fn poll_at(&self) -> Option<Instant> {
        match self.state {
            State::Idle(at) => Some(at),
            State::Dialling | State::Up => None,
        }
    }

    fn advance<D: Device>(
        &mut self,
        stack: &mut Stack<D>,
        now: Instant,
        carry_out: impl FnMut(&Request) -> Response,
    ) -> Result<(), ControlError> {
        match self.state {
            State::Idle(at) if now < at => Ok(()),
            State::Idle(_) => self.dial(stack),
            State::Dialling => match stack.control().0.state() {
                tcp::State::SynSent | tcp::State::SynReceived => Ok(()),
                tcp::State::Established => {
                    self.state = State::Up;
                    self.len = encode(&Greeting::Device(self.announce.clone()), &mut self.answer)?.len();
                    self.serve(stack, carry_out)
                }
                _ => Err(ControlError::Closed),
            },
            State::Up => self.serve(stack, carry_out),
        }
    }

    fn dial<D: Device>(&mut self, stack: &mut Stack<D>) -> Result<(), ControlError> {
        let to = stack.outside(self.controller);
        let from = FIRST_PORT + self.dials % (u16::MAX - FIRST_PORT);
        self.dials = self.dials.wrapping_add(1);
        let (socket, context) = stack.control();
        let duration = |time: Duration| Some(smoltcp::time::Duration::from_micros(time.as_micros() as u64));
        socket.set_timeout(duration(SILENCE));
        socket.set_keep_alive(duration(KEEP_ALIVE));
        socket.set_nagle_enabled(false);
        socket.connect(context, to, from).map_err(|_| ControlError::Closed)?;
        self.state = State::Dialling;
        Ok(())
    }

    /// Send what is left of an answer, then take in what there is, answer by answer as long as they fit.
    fn serve<D: Device>(
        &mut self,
        stack: &mut Stack<D>,
        mut carry_out: impl FnMut(&Request) -> Response,
    ) -> Result<(), ControlError> {
        loop {
            let socket = stack.control().0;
            if !socket.may_send() || !socket.may_recv() && socket.recv_queue() == 0 {
                return Err(ControlError::Closed);
            }
            if self.sent < self.len {
                self.sent += socket.send_slice(&self.answer[self.sent..self.len]).map_err(|_| ControlError::Closed)?;
                if self.sent < self.len {
                    return Ok(());
                }
            }
            (self.sent, self.len) = (0, 0);
            self.have += socket.recv_slice(&mut self.request[self.have..]).map_err(|_| ControlError::Closed)?;
            let Some((request, len)) = decode::<Envelope<Request>>(&self.request[..self.have])? else {
                return if self.have == self.request.len() { Err(ControlError::TooLong) } else { Ok(()) };
            };
            self.request.copy_within(len..self.have, 0);
            self.have -= len;
            self.is_welcome = true;
            let message = self.answer(request.message, &mut carry_out);
            self.len = encode(&Envelope { id: request.id, message }, &mut self.answer)?.len();
        }
    }

    fn answer(&self, request: Request, carry_out: &mut impl FnMut(&Request) -> Response) -> Response {
        match request {
            Request::Hello => Response::Hello(self.announce.clone()),
            Request::CreateGroup(config) if !config.by_reference.is_empty() && self.announce.bus.is_none() => {
                Response::Refused(Refusal::NoBus(NoBus::None))
            }
            // Nothing joins shared addresses here, and what is sent to one would not leave an emulated machine's network.
            Request::CreateGroup(config) => {
                carry_out(&Request::CreateGroup(GroupConfig { shared: None, parent_shared: None, ..config }))
            }
            request => carry_out(&request),
        }
    }
}
