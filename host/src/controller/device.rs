//! A connected device: requests out, responses in, paired by number.

use super::hang_up;
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use sumac_hal::ctrl::{Announce, Envelope, FrameReader, Refusal, Request, Response, Stats, StreamError, send};
use thiserror::Error;

/// Why a device did not do what it was asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum DeviceError {
    /// It said so.
    #[error("it refused: {0}")]
    Refused(#[from] Refusal),
    /// It is gone, or does not answer.
    #[error("it is gone, or did not answer within {} s", ANSWER_TIMEOUT.as_secs())]
    Gone,
    /// It answered something else.
    #[error("it answered what was not asked")]
    Answer,
}

/// A connected device.
#[derive(Debug)]
pub(super) struct DeviceSession {
    pub(super) announce: Announce,
    calls: Mutex<Calls>,
}

#[derive(Debug)]
struct Calls {
    stream: TcpStream,
    next_id: u32,
    waiting: BTreeMap<u32, Sender<Response>>,
    ended: bool,
}

impl DeviceSession {
    pub(super) fn new(announce: Announce, stream: TcpStream) -> Result<Self, StreamError> {
        // A device that does not read must not hold the controller.
        stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        let calls = Calls { stream, next_id: 0, waiting: BTreeMap::new(), ended: false };
        Ok(Self { announce, calls: Mutex::new(calls) })
    }

    pub(super) fn name(&self) -> &str {
        self.announce.name.as_str()
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Welcome the device; its answer repeats what it announced and is not waited for.
    pub(super) fn hello(&self) -> Result<(), StreamError> {
        send(&mut self.lock().stream, &Envelope { id: u32::MAX, message: Request::Hello })
    }

    /// Hand responses to who waits for them, until the connection ends.
    pub(super) fn read_responses(&self, reader: &mut FrameReader<TcpStream>) -> Result<(), StreamError> {
        let ended = loop {
            match reader.recv::<Envelope<Response>>() {
                Ok(response) => {
                    if let Some(waiter) = self.lock().waiting.remove(&response.id) {
                        // Who waited may have given up.
                        let _ = waiter.send(response.message);
                    }
                }
                Err(StreamError::Closed) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        let mut calls = self.lock();
        calls.ended = true;
        // Ends every wait.
        calls.waiting.clear();
        ended
    }

    fn ask(&self, message: Request) -> Result<Response, DeviceError> {
        let (sender, receiver) = channel();
        let mut calls = self.lock();
        if calls.ended {
            return Err(DeviceError::Gone);
        }
        let id = calls.next_id;
        calls.next_id = id.wrapping_add(1) % u32::MAX;
        calls.waiting.insert(id, sender);
        if send(&mut calls.stream, &Envelope { id, message }).is_err() {
            hang_up(&calls.stream);
            return Err(DeviceError::Gone);
        }
        drop(calls);
        let answer = receiver.recv_timeout(ANSWER_TIMEOUT);
        self.lock().waiting.remove(&id);
        match answer {
            Ok(Response::Refused(refusal)) => Err(refusal.into()),
            Ok(response) => Ok(response),
            Err(_) => Err(DeviceError::Gone),
        }
    }

    /// Ask for something that is either done or refused.
    pub(super) fn order(&self, request: Request) -> Result<(), DeviceError> {
        match self.ask(request)? {
            Response::Done => Ok(()),
            _ => Err(DeviceError::Answer),
        }
    }

    pub(super) fn stats(&self) -> Result<Stats, DeviceError> {
        match self.ask(Request::Stats)? {
            Response::Stats(stats) => Ok(stats),
            _ => Err(DeviceError::Answer),
        }
    }
}

/// How long a device may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
