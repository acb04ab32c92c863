//! Control frames over a byte stream such as TCP, for hosted programs.

use super::{FRAME_HEADER_LEN, FrameError, MAX_MESSAGE_LEN, MORE, check_crc, encode, read_header, seal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};
use std::vec::Vec;
use thiserror::Error;

/// Why a control stream ended.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StreamError {
    /// The connection failed.
    #[error("control connection: {0}")]
    Io(#[from] io::Error),
    /// The peer sent an invalid frame, or a message cannot be encoded.
    #[error("control connection: {0}")]
    Frame(#[from] FrameError),
    /// The peer closed the connection.
    #[error("control connection: closed by the peer")]
    Closed,
}

/// Write one message as a frame, or as fragments if it exceeds [`MAX_MESSAGE_LEN`].
///
/// # Errors
/// [`StreamError`] if the message cannot be encoded or the stream fails.
pub fn send<M: Serialize>(stream: &mut impl Write, message: &M) -> Result<(), StreamError> {
    let frames = encode_frames(message)?;
    stream.write_all(&frames)?;
    Ok(stream.flush()?)
}

/// Return one message as a frame, or as fragments if it exceeds [`MAX_MESSAGE_LEN`].
///
/// # Errors
/// [`FrameError::Message`] if the message cannot be encoded.
pub fn encode_frames<M: Serialize>(message: &M) -> Result<Vec<u8>, FrameError> {
    // Most messages are small; only large ones are encoded twice.
    let mut buffer = std::vec![0; 1024];
    match encode(message, &mut buffer) {
        Ok(frame) => {
            let len = frame.len();
            buffer.truncate(len);
            Ok(buffer)
        }
        Err(FrameError::Buffer { .. }) => {
            let bytes = postcard::to_io(message, Vec::new()).map_err(|_| FrameError::Message)?;
            Ok(fragment(&bytes, true).concat())
        }
        Err(error) => Err(error),
    }
}

/// Split bytes of an encoded message into one or more frames. The last frame ends the message if `is_end`; otherwise
/// the message continues.
pub fn fragment(bytes: &[u8], is_end: bool) -> Vec<Vec<u8>> {
    let cut = |start: usize| {
        let end = bytes.len().min(start + MAX_MESSAGE_LEN);
        let mut frame = std::vec![0; FRAME_HEADER_LEN];
        frame.extend_from_slice(&bytes[start..end]);
        seal(&mut frame, if is_end && end == bytes.len() { 0 } else { MORE });
        frame
    };
    (0..bytes.len().max(1)).step_by(MAX_MESSAGE_LEN).map(cut).collect()
}

/// Reassembles messages from the bytes of a stream, however they are split.
///
/// Invariant: it holds at most the longest message, one frame, and the bytes of the last [`FrameBuffer::push`].
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    /// How many of `bytes` have been consumed.
    taken: usize,
    /// The fragments received so far of an incomplete message.
    message: Vec<u8>,
    message_len_max: usize,
}

impl FrameBuffer {
    /// Return an empty buffer for messages of at most `message_len_max` bytes.
    pub const fn new(message_len_max: usize) -> Self {
        Self { bytes: Vec::new(), taken: 0, message: Vec::new(), message_len_max }
    }

    /// Change the limit to `message_len_max` bytes from now on.
    pub const fn limit(&mut self, message_len_max: usize) {
        self.message_len_max = message_len_max;
    }

    /// Append received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Return how many bytes are buffered for messages that are not complete.
    pub const fn len(&self) -> usize {
        self.bytes.len() - self.taken + self.message.len()
    }

    /// Return whether no bytes are buffered.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the next message, or `None` if more bytes are needed.
    ///
    /// # Errors
    /// [`FrameError`] if the bytes are not a valid message, or if it exceeds the limit.
    pub fn take_message<M: DeserializeOwned>(&mut self) -> Result<Option<M>, FrameError> {
        loop {
            let rest = &self.bytes[self.taken..];
            let Some((len, has_more)) = read_header(rest)? else { return Ok(None) };
            let message_len = self.message.len() + len - FRAME_HEADER_LEN;
            if message_len > self.message_len_max {
                return Err(FrameError::TooLong { len: message_len });
            }
            let Some(frame) = rest.get(..len) else { return Ok(None) };
            check_crc(frame)?;
            let body = &frame[FRAME_HEADER_LEN..];
            self.taken += len;
            if has_more || !self.message.is_empty() {
                self.message.extend_from_slice(body);
                if has_more {
                    continue;
                }
                return postcard::from_bytes(&std::mem::take(&mut self.message))
                    .map(Some)
                    .map_err(|_| FrameError::Message);
            }
            return postcard::from_bytes(body).map(Some).map_err(|_| FrameError::Message);
        }
    }
}

/// Reads messages from a byte stream.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    buffer: FrameBuffer,
}

impl<R: Read> FrameReader<R> {
    /// Read messages of at most [`MAX_MESSAGE_LEN`] bytes from `stream`.
    pub const fn new(stream: R) -> Self {
        Self::with_limit(stream, MAX_MESSAGE_LEN)
    }

    /// Read messages of at most `message_len_max` bytes from `stream`.
    pub const fn with_limit(stream: R, message_len_max: usize) -> Self {
        Self { stream, buffer: FrameBuffer::new(message_len_max) }
    }

    /// Return the underlying stream.
    pub const fn get_ref(&self) -> &R {
        &self.stream
    }

    /// Wait for the next message. A read that times out loses nothing: call again.
    ///
    /// # Errors
    /// [`StreamError`]; [`StreamError::Closed`] if the peer has closed the connection.
    pub fn recv<M: DeserializeOwned>(&mut self) -> Result<M, StreamError> {
        loop {
            if let Some(message) = self.buffer.take_message()? {
                return Ok(message);
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(StreamError::Closed),
                Ok(n) => self.buffer.push(&chunk[..n]),
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

    /// Returns one byte per read.
    struct OneByteReads<'a>(&'a [u8]);

    impl Read for OneByteReads<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let Some((first, rest)) = self.0.split_first() else { return Ok(0) };
            buffer[0] = *first;
            self.0 = rest;
            Ok(1)
        }
    }

    #[test]
    fn messages_read_byte_by_byte_are_whole() {
        let mut bytes = Vec::new();
        let messages = [Request::Stats, Request::RenewGroup(GroupId(7)), Request::Reset];
        for (id, message) in (0..).zip(messages.clone()) {
            send(&mut bytes, &Envelope { id, message }).unwrap();
        }
        let mut reader = FrameReader::new(OneByteReads(&bytes));
        for (id, message) in (0..).zip(messages) {
            assert_eq!(reader.recv::<Envelope<Request>>().unwrap(), Envelope { id, message });
        }
        assert!(matches!(reader.recv::<Envelope<Request>>(), Err(StreamError::Closed)));
    }

    #[test]
    fn long_message_is_reassembled_within_the_readers_limit() {
        for len in [0, 1, 40_000, MAX_MESSAGE_LEN - 2, MAX_MESSAGE_LEN, 3 * MAX_MESSAGE_LEN, 500_000] {
            let long: Vec<u8> = (0..len).map(|i| i as u8).collect();
            let mut bytes = Vec::new();
            send(&mut bytes, &long).unwrap();
            send(&mut bytes, &7_u32).unwrap();
            let mut reader = FrameReader::with_limit(&bytes[..], len + 3);
            assert_eq!(reader.recv::<Vec<u8>>().unwrap(), long);
            assert_eq!(reader.recv::<u32>().unwrap(), 7, "the next message starts after the fragments");
        }
    }

    #[test]
    fn message_over_the_readers_limit_is_refused_before_it_is_buffered() {
        let mut bytes = Vec::new();
        send(&mut bytes, &std::vec![0_u8; 200_000]).unwrap();
        let refused = FrameReader::new(&bytes[..]).recv::<Vec<u8>>();
        assert!(matches!(refused, Err(StreamError::Frame(FrameError::TooLong { .. }))), "{refused:?}");
        // A peer without a heap accepts whole messages only.
        assert_eq!(crate::ctrl::frame_len(&bytes), Err(FrameError::Fragment));
        // An endless sequence of fragments.
        let mut buffer = FrameBuffer::new(100_000);
        let fragment = fragment(&[0; 1000], false).concat();
        let refused = (0..200).find_map(|_| {
            buffer.push(&fragment);
            buffer.take_message::<u8>().err()
        });
        assert!(matches!(refused, Some(FrameError::TooLong { .. })), "{refused:?}");
        assert!(buffer.len() < 102_000, "{}", buffer.len());
    }
}
