//! Control frames over a byte stream (TCP), for hosted programs.

use super::{FRAME_HEADER_LEN, FrameError, MAX_MESSAGE_LEN, decode, encode, frame_len};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};
use std::vec::Vec;
use thiserror::Error;

/// Why a control stream ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The connection broke.
    #[error("control connection: {0}")]
    Io(#[from] io::Error),
    /// What came was not a frame, or what should go does not fit one.
    #[error("control connection: {0}")]
    Frame(#[from] FrameError),
    /// The peer closed the connection.
    #[error("control connection: closed by the peer")]
    Closed,
}

/// Write one message as a frame.
///
/// # Errors
/// [`StreamError`] if the message is too long or the stream breaks.
pub fn send<M: Serialize>(stream: &mut impl Write, message: &M) -> Result<(), StreamError> {
    let mut buffer = Vec::new();
    // Most messages are small; only the few that are not pay for a second try.
    for capacity in [1024, FRAME_HEADER_LEN + MAX_MESSAGE_LEN] {
        buffer.resize(capacity, 0);
        match encode(message, &mut buffer) {
            Ok(frame) => {
                stream.write_all(frame)?;
                return Ok(stream.flush()?);
            }
            Err(FrameError::Buffer { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Err(FrameError::TooLong { len: MAX_MESSAGE_LEN }.into())
}

/// Reads frames from a stream, however it cuts them.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    buffer: Vec<u8>,
}

impl<R: Read> FrameReader<R> {
    /// Read frames from `stream`.
    pub const fn new(stream: R) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    /// Return the stream.
    pub const fn get_ref(&self) -> &R {
        &self.stream
    }

    /// Wait for the next message. A read that times out leaves what was read in place: call again.
    ///
    /// # Errors
    /// [`StreamError`]; [`StreamError::Closed`] if the peer is done.
    pub fn recv<M: DeserializeOwned>(&mut self) -> Result<M, StreamError> {
        loop {
            if let Some(len) = frame_len(&self.buffer)?.filter(|&len| self.buffer.len() >= len) {
                let message = decode(&self.buffer[..len]);
                self.buffer.drain(..len);
                if let Some((message, _)) = message? {
                    return Ok(message);
                }
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(StreamError::Closed),
                Ok(n) => self.buffer.extend_from_slice(&chunk[..n]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ctrl::{Envelope, Request};
    use crate::ids::GroupId;

    /// Gives one byte at a time.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Some((first, rest)) = self.0.split_first() else { return Ok(0) };
            buffer[0] = *first;
            self.0 = rest;
            Ok(1)
        }
    }

    #[test]
    fn frames_survive_any_cut() {
        let mut bytes = Vec::new();
        let messages = [Request::Stats, Request::RenewGroup(GroupId(7)), Request::Reset];
        for (id, message) in (0..).zip(messages.clone()) {
            send(&mut bytes, &Envelope { id, message }).unwrap();
        }
        let mut reader = FrameReader::new(Drip(&bytes));
        for (id, message) in (0..).zip(messages) {
            assert_eq!(reader.recv::<Envelope<Request>>().unwrap(), Envelope { id, message });
        }
        assert!(matches!(reader.recv::<Envelope<Request>>(), Err(StreamError::Closed)));
    }

    #[test]
    fn long_messages_fit_and_longer_ones_are_refused() {
        let mut bytes = Vec::new();
        let long: Vec<u8> = (0..40_000).map(|i| i as u8).collect();
        send(&mut bytes, &long).unwrap();
        assert_eq!(FrameReader::new(&bytes[..]).recv::<Vec<u8>>().unwrap(), long);
        assert!(send(&mut bytes, &[0_u8; 70_000].to_vec()).is_err());
    }
}
