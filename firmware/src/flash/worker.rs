//! The worker processes that access the driver, and their protocol of JSON lines.
//!
//! A call into the driver can hang, and then not even SIGKILL ends the calling process until the driver responds
//! (Linux, fs/fuse/dev.c: a request that was handed to the driver is waited for). The process that watches the time
//! therefore makes no such call: one worker accesses `misc`, one writes `boot`, and their parent can abandon them.
//!
//! Workers are trusted, because they run the same program; a malformed line counts as the end of the worker.

use super::failure::Failure;
use super::messages::Event;
use crate::rshim::{Misc, Rshim, Setting};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::os::unix::fs::FileExt;
use zeroize::Zeroizing;

/// The size of a write in bytes. The driver consumes a write completely before it returns.
const CHUNK_LEN_BYTES: usize = 32 << 10;

/// What the worker for `boot` reads from its stdin and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contents {
    /// The length of the stream, in bytes.
    pub len_bytes: u64,
    /// Its SHA-256.
    pub sha256: [u8; 32],
    /// The length of what follows it, in bytes.
    pub tail_len_bytes: u64,
    /// Whether only what follows the stream is written.
    pub is_tail_only: bool,
}

/// A request to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request {
    /// Read `misc`.
    Read,
    /// Change a setting.
    DisplayLevel(u32),
    /// Change a setting.
    ClearOnRead(bool),
    /// Change a setting.
    BootMode(u32),
    /// Change a setting.
    Reset,
    /// Change a setting.
    BootResetSkip(bool),
}

impl From<Setting> for Request {
    fn from(setting: Setting) -> Self {
        match setting {
            Setting::DisplayLevel(level) => Self::DisplayLevel(level),
            Setting::ClearOnRead(clears) => Self::ClearOnRead(clears),
            Setting::BootMode(mode) => Self::BootMode(mode),
            Setting::Reset => Self::Reset,
            Setting::BootResetSkip(skips) => Self::BootResetSkip(skips),
        }
    }
}

impl Request {
    fn setting(self) -> Option<Setting> {
        match self {
            Self::Read => None,
            Self::DisplayLevel(level) => Some(Setting::DisplayLevel(level)),
            Self::ClearOnRead(clears) => Some(Setting::ClearOnRead(clears)),
            Self::BootMode(mode) => Some(Setting::BootMode(mode)),
            Self::Reset => Some(Setting::Reset),
            Self::BootResetSkip(skips) => Some(Setting::BootResetSkip(skips)),
        }
    }
}

/// A worker's reply; errors are `errno` values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// The text of `misc`.
    Misc(Result<String, i32>),
    /// The result of changing a setting.
    Set(Request, Result<(), i32>),
    /// See [`Event`].
    Opened,
    /// See [`Event`].
    OpenFailed(i32),
    /// See [`Event`].
    Wrote(u64),
    /// See [`Event`].
    WriteFailed(i32),
    /// The image differs from what was checked.
    ImageChanged,
    /// The image cannot be read.
    ImageFailed(String),
    /// See [`Event`].
    Closed,
}

impl Reply {
    /// Convert to a session's event.
    pub(super) fn event(self) -> Option<Event> {
        let errno = Errno::from_raw_os_error;
        Some(match self {
            Self::Misc(text) => Event::Misc(text.map(|text| Box::new(Misc::parse(&text))).map_err(errno)),
            Self::Set(request, result) => Event::Set(request.setting()?, result.map_err(errno)),
            Self::Opened => Event::Opened,
            Self::OpenFailed(number) => Event::OpenFailed(errno(number)),
            Self::Wrote(bytes) => Event::Wrote(bytes),
            Self::WriteFailed(number) => Event::WriteFailed(errno(number)),
            Self::ImageChanged => Event::ImageFailed(Failure::ImageChanged),
            Self::ImageFailed(why) => Event::ImageFailed(Failure::Image(why)),
            Self::Closed => Event::Closed,
        })
    }
}

/// Serve `misc`: requests in, replies out, until the requests end.
///
/// # Errors
/// The parent has closed its pipe.
pub fn serve_misc(card: &Rshim, requests: impl BufRead, mut replies: impl Write) -> io::Result<()> {
    for line in requests.lines() {
        let request: Request = serde_json::from_str(&line?)?;
        let reply = match request.setting() {
            Some(setting) => Reply::Set(request, card.set(setting).map_err(|error| number(&error))),
            None => Reply::Misc(card.read_misc_text().map_err(|error| number(&error))),
        };
        send(&mut replies, &reply)?;
    }
    Ok(())
}

/// Serve `boot`: open it, which resets the card unless the driver was told otherwise, and write the image and what
/// follows it, or the latter only. The image's last piece is written only if the whole image has the SHA-256 that it
/// had when it was checked.
///
/// # Errors
/// The parent has closed its pipe; `boot` is closed then.
pub fn serve_boot(card: &Rshim, image: File, contents: &Contents, mut replies: impl Write) -> io::Result<()> {
    let mut boot = match card.open_boot() {
        Ok(boot) => boot,
        Err(error) => return send(&mut replies, &Reply::OpenFailed(number(&error))),
    };
    send(&mut replies, &Reply::Opened)?;
    if let Err(reply) = write(&mut boot, image, contents, &mut replies)? {
        send(&mut replies, &reply)?;
    }
    drop(boot);
    send(&mut replies, &Reply::Closed)
}

/// Write the image and what follows it. The inner error is the reply to send; the outer one is a closed pipe. The
/// file's position is neither used nor moved, because workers of other cards have the same file open.
fn write(boot: &mut File, image: File, contents: &Contents, replies: &mut impl Write) -> io::Result<Result<(), Reply>> {
    let unreadable = |error: io::Error| Ok(Err(Reply::ImageFailed(error.to_string())));
    let mut digest = Sha256::new();
    let mut left = if contents.is_tail_only { 0 } else { contents.len_bytes };
    // A key may be in it.
    let mut buffer = Zeroizing::new(vec![0; CHUNK_LEN_BYTES]);
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let piece = &mut buffer[..len];
        match image.read_exact_at(piece, contents.len_bytes - left) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Err(Reply::ImageChanged)),
            Err(error) => return unreadable(error),
            Ok(()) => {}
        }
        digest.update(&*piece);
        left -= len as u64;
        if left == 0 && digest.finalize_reset()[..] != contents.sha256 {
            return Ok(Err(Reply::ImageChanged));
        }
        if let Err(reply) = write_piece(boot, piece, replies)? {
            return Ok(Err(reply));
        }
    }
    let mut left = contents.tail_len_bytes;
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let piece = &mut buffer[..len];
        if let Err(error) = image.read_exact_at(piece, contents.len_bytes + contents.tail_len_bytes - left) {
            return unreadable(error);
        }
        left -= len as u64;
        if let Err(reply) = write_piece(boot, piece, replies)? {
            return Ok(Err(reply));
        }
    }
    Ok(Ok(()))
}

/// Write a piece, as [`write`] does.
fn write_piece(boot: &mut File, piece: &[u8], replies: &mut impl Write) -> io::Result<Result<(), Reply>> {
    let mut rest = piece;
    while !rest.is_empty() {
        match boot.write(rest) {
            Ok(0) => return Ok(Err(Reply::WriteFailed(Errno::IO.raw_os_error()))),
            Ok(took) => {
                rest = &rest[took..];
                send(replies, &Reply::Wrote(took as u64))?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Ok(Err(Reply::WriteFailed(number(&error)))),
        }
    }
    Ok(Ok(()))
}

fn send(replies: &mut impl Write, reply: &Reply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    replies.write_all(&line)?;
    replies.flush()
}

fn number(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with ordinary files stands in for a card.
    #[test]
    fn changed_image_is_detected_before_its_last_piece_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let card = Rshim::new(&folder.path().display().to_string());
        let image: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
        let path = folder.path().join("image");
        let tail = [0xaa; 100];
        std::fs::write(&path, [&image[..], &tail].concat()).expect("written");
        let sha256 = Sha256::digest(&image).into();
        let tail_len_bytes = 100;
        let write = |len_bytes, sha256: &[u8; 32]| {
            std::fs::write(folder.path().join("boot"), "").expect("written");
            let mut replies = Vec::new();
            let file = File::open(&path).expect("there");
            let contents = Contents { len_bytes, sha256: *sha256, tail_len_bytes, is_tail_only: false };
            serve_boot(&card, file, &contents, &mut replies).expect("no error");
            let lines = String::from_utf8(replies).expect("text");
            let reply: Vec<Reply> = lines.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
            (reply, std::fs::read(folder.path().join("boot")).expect("there"))
        };
        std::fs::write(folder.path().join("boot"), "").expect("written");
        let contents = Contents { len_bytes: image.len() as u64, sha256, tail_len_bytes, is_tail_only: true };
        serve_boot(&card, File::open(&path).expect("there"), &contents, Vec::new()).expect("no error");
        assert_eq!(std::fs::read(folder.path().join("boot")).expect("there"), tail, "the tail alone");
        let (reply, boot) = write(image.len() as u64, &sha256);
        assert_eq!((&reply[0], reply.last()), (&Reply::Opened, Some(&Reply::Closed)));
        assert!(boot == [&image[..], &tail].concat(), "the tail follows the image");
        let pieces = image.len().div_ceil(CHUNK_LEN_BYTES);
        for (len_bytes, sha256) in [(image.len(), [0; 32]), (image.len() - 1, sha256), (image.len() + 1, sha256)] {
            let (reply, boot) = write(len_bytes as u64, &sha256);
            assert!(reply.contains(&Reply::ImageChanged), "{reply:?}");
            assert_eq!(boot.len(), (pieces - 1) * CHUNK_LEN_BYTES, "the last piece is held back");
        }
    }

    #[test]
    fn misc_worker_serves_requests_line_by_line() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("misc"), "BOOT_MODE       1\n").expect("written");
        let card = Rshim::new(&folder.path().display().to_string());
        let requests = [Request::Read, Setting::BootMode(2).into(), Request::Read];
        let lines: Vec<_> = requests.iter().map(|request| serde_json::to_string(request).expect("JSON")).collect();
        let mut replies = Vec::new();
        serve_misc(&card, lines.join("\n").as_bytes(), &mut replies).expect("no error");
        let text = String::from_utf8(replies).expect("text");
        let events: Vec<_> =
            text.lines().filter_map(|line| serde_json::from_str::<Reply>(line).expect("a line").event()).collect();
        assert_eq!(events[1], Event::Set(Setting::BootMode(2), Ok(())));
        let Event::Misc(Ok(misc)) = &events[0] else { panic!("{events:?}") };
        assert_eq!(misc.boot_mode, Some(1));
        assert_eq!(std::fs::read_to_string(folder.path().join("misc")).expect("there"), "BOOT_MODE 2\n    1\n");
    }
}
