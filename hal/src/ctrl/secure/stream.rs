//! The initiator's side of a secure channel over a byte stream such as TCP, for hosted programs.
//!
//! [`ControlReader`] and [`ControlWriter`] also carry a connection without a key, so that who uses them need not care.

use super::handshake::{HandshakeError, Initiator};
use super::key::Key;
use super::record::{Opener, RECORD_LEN_MAX, RECORD_PLAINTEXT_MAX, RecordError, Sealer, record_len};
use std::boxed::Box;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Why no secure channel could be set up.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The connection failed, or its peer closed it.
    #[error("key exchange: {0}")]
    Io(#[from] io::Error),
    /// The handshake failed.
    #[error("key exchange: {0}")]
    Handshake(#[from] HandshakeError),
    /// The peer did not answer in time.
    #[error("key exchange: no answer within {} ms", limit.as_millis())]
    Timeout {
        /// How long the exchange might take.
        limit: Duration,
    },
}

/// Set up a secure channel. `ephemeral` is 32 random bytes, used for nothing else. A stream with time limits should
/// have them set: the peer may never answer.
///
/// # Errors
/// [`ConnectError`].
pub fn connect(
    stream: &mut (impl Read + Write),
    key: &Key,
    ephemeral: [u8; 32],
) -> Result<(Sealer, Opener), ConnectError> {
    let (initiator, hello) = Initiator::new(key, ephemeral);
    stream.write_all(&hello)?;
    let mut challenge = [0; _];
    stream.read_exact(&mut challenge)?;
    let (awaiting, message) = initiator.handle_challenge(&challenge)?;
    stream.write_all(&message)?;
    let mut reply = [0; _];
    stream.read_exact(&mut reply)?;
    Ok(awaiting.handle_reply(&reply)?)
}

/// As [`connect`], with an ephemeral key from the system, and a limit of the whole exchange: a peer that sends a byte
/// now and then does not extend it. No read has a limit afterwards.
///
/// # Errors
/// [`ConnectError`].
pub fn connect_within(stream: &TcpStream, key: &Key, limit: Duration) -> Result<(Sealer, Opener), ConnectError> {
    let ephemeral = random()?;
    let channel = connect(&mut UntilDeadline { stream, deadline: Instant::now() + limit }, key, ephemeral);
    stream.set_read_timeout(None)?;
    channel.map_err(|error| match error {
        ConnectError::Io(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            ConnectError::Timeout { limit }
        }
        error => error,
    })
}

/// Return random bytes from the system, which waits for real randomness while it boots. There are no others to fall
/// back to.
///
/// # Errors
/// The system provides none.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(bytes)
}

/// A stream whose reads all end by a deadline. What an exchange writes fits any socket's buffer.
struct UntilDeadline<'s> {
    stream: &'s TcpStream,
    deadline: Instant,
}

impl Read for UntilDeadline<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(bytes)
    }
}

impl Write for UntilDeadline<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Writes to a control connection, in records if it has a key.
pub struct ControlWriter<W> {
    stream: W,
    sealer: Option<Box<SealBuffer>>,
}

struct SealBuffer {
    sealer: Sealer,
    record: [u8; RECORD_LEN_MAX],
    /// A record was not sent completely; what follows it could not be read.
    is_broken: bool,
}

impl<W> ControlWriter<W> {
    /// Write to `stream`; `sealer` is that of the connection's key.
    pub fn new(stream: W, sealer: Option<Sealer>) -> Self {
        let buffer = |sealer| Box::new(SealBuffer { sealer, record: [0; _], is_broken: false });
        Self { stream, sealer: sealer.map(buffer) }
    }

    /// The stream.
    pub const fn get_ref(&self) -> &W {
        &self.stream
    }
}

impl<W> std::fmt::Debug for ControlWriter<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlWriter").field("has_key", &self.sealer.is_some()).finish_non_exhaustive()
    }
}

impl<W: Write> Write for ControlWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(buffer) = self.sealer.as_mut().filter(|_| !bytes.is_empty()) else { return self.stream.write(bytes) };
        if buffer.is_broken {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let plaintext = &bytes[..bytes.len().min(RECORD_PLAINTEXT_MAX)];
        let len = buffer.sealer.seal(plaintext, &mut buffer.record).map_err(io::Error::other)?;
        buffer.is_broken = true;
        self.stream.write_all(&buffer.record[..len])?;
        buffer.is_broken = false;
        Ok(plaintext.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Reads from a control connection, from records if it has a key.
pub struct ControlReader<R> {
    stream: R,
    opener: Option<Box<OpenBuffer>>,
}

struct OpenBuffer {
    opener: Opener,
    /// The record that is being received, or whose plaintext is being handed out.
    record: [u8; RECORD_LEN_MAX],
    /// How many bytes of the record have been received.
    filled: usize,
    /// Which of them are plaintext that was not handed out yet.
    plaintext: std::ops::Range<usize>,
}

impl<R> ControlReader<R> {
    /// Read from `stream`; `opener` is that of the connection's key.
    pub fn new(stream: R, opener: Option<Opener>) -> Self {
        let buffer = |opener| Box::new(OpenBuffer { opener, record: [0; _], filled: 0, plaintext: 0..0 });
        Self { stream, opener: opener.map(buffer) }
    }

    /// The stream.
    pub const fn get_ref(&self) -> &R {
        &self.stream
    }
}

impl<R> std::fmt::Debug for ControlReader<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ControlReader").field("has_key", &self.opener.is_some()).finish_non_exhaustive()
    }
}

impl<R: Read> Read for ControlReader<R> {
    /// A read that times out loses nothing: call again.
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let Some(buffer) = self.opener.as_mut().filter(|_| !bytes.is_empty()) else { return self.stream.read(bytes) };
        if buffer.plaintext.is_empty() && !buffer.receive(&mut self.stream)? {
            return Ok(0);
        }
        let len = bytes.len().min(buffer.plaintext.len());
        bytes[..len].copy_from_slice(&buffer.record[buffer.plaintext.start..][..len]);
        buffer.plaintext.start += len;
        Ok(len)
    }
}

impl OpenBuffer {
    /// Receive and open a record. False at the end of the stream.
    fn receive(&mut self, stream: &mut impl Read) -> io::Result<bool> {
        let invalid = |error: RecordError| io::Error::new(ErrorKind::InvalidData, error);
        loop {
            let wanted = record_len(&self.record[..self.filled]).map_err(invalid)?;
            // Never more than this record, so that nothing has to be moved.
            let wanted = match wanted {
                Some(len) if len == self.filled => break,
                Some(len) => len,
                None => HEADER_LEN,
            };
            match stream.read(&mut self.record[self.filled..wanted]) {
                Ok(0) => return Ok(false),
                Ok(len) => self.filled += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let len = self.opener.open(&mut self.record[..self.filled]).map_err(invalid)?.len();
        (self.plaintext, self.filled) = (HEADER_LEN..HEADER_LEN + len, 0);
        Ok(true)
    }
}

/// The length of a record's length field.
const HEADER_LEN: usize = 2;

#[cfg(test)]
mod tests {
    use super::super::{Responder, key_id};
    use super::*;
    use crate::ctrl::secure::KeyId;
    use crate::ctrl::{FrameReader, StreamError, send};
    use std::collections::VecDeque;
    use std::vec::Vec;

    /// The initiator's end of a connection to a responder that answers at once.
    #[derive(Default)]
    struct Peer {
        sent: Vec<u8>,
        answers: VecDeque<u8>,
        responder: Option<Responder>,
        ciphers: Option<(Sealer, Opener)>,
    }

    impl Write for Peer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.sent.extend_from_slice(bytes);
            if let Some(responder) = self.responder.take() {
                let message = bytes.try_into().expect("a message");
                let (reply, sealer, opener) = responder.handle_message(message, [5; 32]).expect("the same key");
                self.answers.extend(reply);
                self.ciphers = Some((sealer, opener));
            } else {
                let hello = bytes.try_into().expect("a hello");
                assert_eq!(key_id(hello), Ok(key().id()));
                let (responder, challenge) = Responder::new(hello, &key(), &[4; 16]);
                self.answers.extend(challenge);
                self.responder = Some(responder);
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Read for Peer {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.answers.read(bytes)
        }
    }

    fn key() -> Key {
        Key::new(KeyId(3), [6; 32])
    }

    /// Return the ciphers of both sides.
    fn channel() -> ((Sealer, Opener), (Sealer, Opener)) {
        let mut peer = Peer::default();
        let initiator = connect(&mut peer, &key(), [7; 32]).expect("the same key");
        (initiator, peer.ciphers.expect("it has answered"))
    }

    /// Returns one byte per read, and times out between any two.
    struct Slow<'a>(&'a [u8], bool);

    impl Read for Slow<'_> {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(ErrorKind::WouldBlock.into());
            }
            let Some((first, rest)) = self.0.split_first() else { return Ok(0) };
            bytes[0] = *first;
            self.0 = rest;
            Ok(1)
        }
    }

    #[test]
    fn long_messages_travel_in_records_and_timeouts_lose_nothing() {
        let ((sealer, _), (_, opener)) = channel();
        let mut writer = ControlWriter::new(Vec::new(), Some(sealer));
        let messages = [std::vec![7_u8; 3], std::vec![8; 20_000], std::vec![9; 1]];
        messages.iter().for_each(|message| send(&mut writer, message).expect("sent"));
        let sent = writer.get_ref().clone();
        assert!(sent.len() > 20_000 + 5 * 18 && !sent.windows(4).any(|bytes| bytes == [8; 4]), "nothing is in clear");
        let mut reader = FrameReader::new(ControlReader::new(Slow(&sent, false), Some(opener)));
        for message in messages {
            let received = loop {
                match reader.recv::<Vec<u8>>() {
                    Err(StreamError::Io(error)) if error.kind() == ErrorKind::WouldBlock => {}
                    received => break received.expect("a message"),
                }
            };
            assert_eq!(received, message);
        }
    }

    #[test]
    fn changed_record_ends_the_stream_with_invalid_data() {
        let ((sealer, _), (_, opener)) = channel();
        let mut writer = ControlWriter::new(Vec::new(), Some(sealer));
        send(&mut writer, &7_u32).expect("sent");
        let mut sent = writer.get_ref().clone();
        *sent.last_mut().expect("a tag") ^= 1;
        let mut reader = ControlReader::new(&sent[..], Some(opener));
        let error = reader.read(&mut [0; 8]).expect_err("not authentic");
        assert_eq!((error.kind(), error.to_string().contains("authentication")), (ErrorKind::InvalidData, true));
    }

    #[test]
    fn writer_whose_record_was_cut_sends_no_more() {
        /// Fails in the middle of the first record.
        struct Cut(usize);
        impl Write for Cut {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0 += 1;
                if self.0 == 1 { Ok(bytes.len() / 2) } else { Err(ErrorKind::TimedOut.into()) }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let ((sealer, _), _) = channel();
        let mut writer = ControlWriter::new(Cut(0), Some(sealer));
        assert_eq!(writer.write(b"frame").expect_err("cut").kind(), ErrorKind::TimedOut);
        assert_eq!(writer.write(b"frame").expect_err("broken").kind(), ErrorKind::BrokenPipe);
        assert_eq!(writer.get_ref().0, 2, "nothing was written after the cut");
    }

    #[test]
    fn connection_without_a_key_carries_plain_frames() {
        let mut writer = ControlWriter::new(Vec::new(), None);
        send(&mut writer, &7_u32).expect("sent");
        let mut plain = Vec::new();
        send(&mut plain, &7_u32).expect("sent");
        assert_eq!(*writer.get_ref(), plain);
        assert_eq!(FrameReader::new(ControlReader::new(&plain[..], None)).recv::<u32>().expect("a frame"), 7);
    }

    #[test]
    fn exchange_with_a_peer_that_sends_a_byte_now_and_then_ends_at_its_limit() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let stream = TcpStream::connect(listener.local_addr().expect("bound")).expect("connected");
        let (mut peer, _) = listener.accept().expect("a connection");
        let peer = std::thread::spawn(move || {
            // Until the other side has closed.
            while peer.write_all(b"S").is_ok() {
                std::thread::sleep(Duration::from_millis(30));
            }
        });
        let key = Key::new(KeyId(1), [1; 32]);
        let error = connect_within(&stream, &key, Duration::from_millis(200)).map(|_| ()).expect_err("no peer");
        assert!(matches!(error, ConnectError::Timeout { .. }), "{error}");
        drop(stream);
        peer.join().expect("no panic");
    }

    #[test]
    fn exchange_with_a_silent_peer_ends_with_its_limit() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let stream = TcpStream::connect(silent.local_addr().expect("bound")).expect("it listens");
        let limit = Duration::from_millis(20);
        let error = connect_within(&stream, &key(), limit).expect_err("no answer");
        assert!(matches!(error, ConnectError::Timeout { limit: told } if told == limit), "{error}");
        assert_eq!(error.to_string(), "key exchange: no answer within 20 ms");
        assert_eq!(stream.read_timeout().expect("a socket"), None);
    }
}
