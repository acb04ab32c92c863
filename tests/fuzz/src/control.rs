//! Control frames and their messages.
//!
//! Input: a byte of options (bit 0: write valid frame headers; bits 1 to 3: the expected message type; bit 4: the rest
//! is a message without a frame), a byte (the number of bytes per read), then the stream.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::io::{self, Read};
use sumac::controller::proto::{ClientReply, ClientRequest};
use sumac_hal::ctrl::{
    Announce, Envelope, FRAME_HEADER_LEN, FrameReader, Hello, MAX_MESSAGE_LEN, Request, Response, decode, encode,
};
use sumac_hal::wire::crc32c;

/// A reader that returns a fixed number of bytes at a time.
struct Drip<'a> {
    bytes: &'a [u8],
    step: usize,
}

impl Read for Drip<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let len = self.step.min(buffer.len()).min(self.bytes.len());
        let (now, later) = self.bytes.split_at(len);
        buffer[..len].copy_from_slice(now);
        self.bytes = later;
        Ok(len)
    }
}

/// Write a valid header for each frame; keep the length if the stream has that many bytes.
pub fn mend(mut stream: &mut [u8]) {
    while stream.len() >= FRAME_HEADER_LEN {
        let len = u32::from_le_bytes([stream[4], stream[5], stream[6], stream[7]]) as usize;
        let len = len.min(stream.len() - FRAME_HEADER_LEN).min(MAX_MESSAGE_LEN);
        let (frame, rest) = stream.split_at_mut(FRAME_HEADER_LEN + len);
        frame[..2].copy_from_slice(b"Sc");
        frame[2..4].copy_from_slice(&sumac_hal::ctrl::VERSION.to_le_bytes());
        frame[4..8].copy_from_slice(&(len as u32).to_le_bytes());
        let mut header = [0; FRAME_HEADER_LEN];
        header[..8].copy_from_slice(&frame[..8]);
        header[8..].copy_from_slice(&crc32c(&frame[FRAME_HEADER_LEN..]).to_le_bytes());
        frame[8..12].copy_from_slice(&crc32c(&header).to_le_bytes());
        stream = rest;
    }
}

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    let Some(([options, step], stream)) = data.split_first_chunk::<2>() else { return };
    let step = usize::from(*step) + 1;
    let mut bytes = stream.to_vec();
    if options & 0x10 != 0 {
        bytes.splice(0..0, [0; FRAME_HEADER_LEN]);
        let len = (bytes.len() - FRAME_HEADER_LEN) as u32;
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
    }
    if options & 0x11 != 0 {
        mend(&mut bytes);
    }
    match options >> 1 & 7 {
        0 => read::<Envelope<Request>>(&bytes, step),
        1 => read::<Envelope<Response>>(&bytes, step),
        2 => read::<Hello>(&bytes, step),
        3 => read::<Announce>(&bytes, step),
        4 => read::<ClientRequest>(&bytes, step),
        _ => read::<ClientReply>(&bytes, step),
    }
}

fn read<M: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8], step: usize) {
    let mut reader = FrameReader::new(Drip { bytes, step });
    let mut frames = bytes;
    while let Ok(message) = reader.recv::<M>() {
        let (first, len) = decode::<M>(frames).expect("a stream has what its bytes have").expect("a whole frame");
        frames = &frames[len..];
        // Messages survive a round trip; compared as text, since NaN is unequal to itself.
        let mut buffer = vec![0; FRAME_HEADER_LEN + MAX_MESSAGE_LEN];
        let Ok(frame) = encode(&message, &mut buffer) else { continue };
        let (again, _) = decode::<M>(frame).expect("what was written is a frame").expect("a whole one");
        assert_eq!(format!("{again:?}"), format!("{message:?}"));
        assert_eq!(format!("{first:?}"), format!("{message:?}"));
        // Logging it must not panic.
        assert!(!format!("{message:?}").is_empty());
    }
}
