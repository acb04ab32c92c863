//! The processes that talk to the driver: what they do, and the lines in which they say it.
//!
//! A call into the driver can hang, and then nothing, not even SIGKILL, ends the process that made it until the driver
//! answers (Linux, fs/fuse/dev.c: a request that the driver has taken is waited for). So the process that watches the
//! time makes none: one worker reads and sets `misc`, one writes `boot`, and whoever started them can leave them behind.
//!
//! Workers are trusted, as they are the same program; a line that can't be read counts as the worker's end.

use super::failure::Failure;
use super::verbs::Event;
use crate::rshim::{Misc, Rshim, Setting};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, BufRead, Read, Seek, SeekFrom, Write};

/// Bytes of one write. The driver takes a write whole before it answers.
const CHUNK_LEN_BYTES: usize = 32 << 10;

/// What a worker is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
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
}

impl From<Setting> for Order {
    fn from(setting: Setting) -> Self {
        match setting {
            Setting::DisplayLevel(level) => Self::DisplayLevel(level),
            Setting::ClearOnRead(clears) => Self::ClearOnRead(clears),
            Setting::BootMode(mode) => Self::BootMode(mode),
            Setting::Reset => Self::Reset,
        }
    }
}

impl Order {
    fn setting(self) -> Option<Setting> {
        match self {
            Self::Read => None,
            Self::DisplayLevel(level) => Some(Setting::DisplayLevel(level)),
            Self::ClearOnRead(clears) => Some(Setting::ClearOnRead(clears)),
            Self::BootMode(mode) => Some(Setting::BootMode(mode)),
            Self::Reset => Some(Setting::Reset),
        }
    }
}

/// What a worker says; errors are numbers of the system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Said {
    /// The text of `misc`.
    Misc(Result<String, i32>),
    /// A setting was made, or not.
    Set(Order, Result<(), i32>),
    /// See [`Event`].
    Opened,
    /// See [`Event`].
    OpenFailed(i32),
    /// See [`Event`].
    Wrote(u64),
    /// See [`Event`].
    WriteFailed(i32),
    /// The image is not what was checked.
    ImageChanged,
    /// The image can't be read.
    ImageFailed(String),
    /// See [`Event`].
    Closed,
}

impl Said {
    /// Return what it means to a session.
    pub(super) fn event(self) -> Option<Event> {
        let errno = Errno::from_raw_os_error;
        Some(match self {
            Self::Misc(text) => Event::Misc(text.map(|text| Box::new(Misc::parse(&text))).map_err(errno)),
            Self::Set(order, result) => Event::Set(order.setting()?, result.map_err(errno)),
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

/// Be the worker for `misc`: orders in, answers out, until there are no more orders.
///
/// # Errors
/// Whoever gives the orders is gone.
pub fn serve_misc(card: &Rshim, orders: impl BufRead, mut answers: impl Write) -> io::Result<()> {
    for line in orders.lines() {
        let order: Order = serde_json::from_str(&line?)?;
        let said = match order.setting() {
            Some(setting) => Said::Set(order, card.set(setting).map_err(|error| number(&error))),
            None => Said::Misc(card.read_misc_text().map_err(|error| number(&error))),
        };
        say(&mut answers, &said)?;
    }
    Ok(())
}

/// Be the worker for `boot`: reset the card and write the image, of `len_bytes` bytes. Its last piece goes out only if
/// all of it has the SHA-256 that it had when it was checked.
///
/// # Errors
/// Whoever listens is gone; then `boot` is closed.
pub fn serve_boot(
    card: &Rshim,
    image: File,
    len_bytes: u64,
    sha256: &[u8; 32],
    mut answers: impl Write,
) -> io::Result<()> {
    let mut boot = match card.open_boot() {
        Ok(boot) => boot,
        Err(error) => return say(&mut answers, &Said::OpenFailed(number(&error))),
    };
    say(&mut answers, &Said::Opened)?;
    if let Err(said) = write(&mut boot, image, len_bytes, sha256, &mut answers)? {
        say(&mut answers, &said)?;
    }
    drop(boot);
    say(&mut answers, &Said::Closed)
}

/// Write the image; the inner error is what to say, the outer one that nobody listens.
fn write(
    boot: &mut File,
    mut image: File,
    len_bytes: u64,
    sha256: &[u8; 32],
    answers: &mut impl Write,
) -> io::Result<Result<(), Said>> {
    let unreadable = |error: io::Error| Ok(Err(Said::ImageFailed(error.to_string())));
    if let Err(error) = image.seek(SeekFrom::Start(0)) {
        return unreadable(error);
    }
    let mut digest = Sha256::new();
    let mut left = len_bytes;
    let mut buffer = vec![0; CHUNK_LEN_BYTES];
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let piece = &mut buffer[..len];
        match image.read_exact(piece) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Err(Said::ImageChanged)),
            Err(error) => return unreadable(error),
            Ok(()) => {}
        }
        digest.update(&*piece);
        left -= len as u64;
        if left == 0 && digest.finalize_reset()[..] != *sha256 {
            return Ok(Err(Said::ImageChanged));
        }
        let mut rest = &*piece;
        while !rest.is_empty() {
            match boot.write(rest) {
                Ok(0) => return Ok(Err(Said::WriteFailed(Errno::IO.raw_os_error()))),
                Ok(took) => {
                    rest = &rest[took..];
                    say(answers, &Said::Wrote(took as u64))?;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Ok(Err(Said::WriteFailed(number(&error)))),
            }
        }
    }
    Ok(Ok(()))
}

fn say(answers: &mut impl Write, said: &Said) -> io::Result<()> {
    let mut line = serde_json::to_vec(said)?;
    line.push(b'\n');
    answers.write_all(&line)?;
    answers.flush()
}

fn number(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(Errno::IO.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with ordinary files takes what a card would.
    #[test]
    fn the_image_goes_out_whole_only_if_it_is_what_was_checked() {
        let folder = tempfile::tempdir().expect("a folder");
        let card = Rshim::new(&folder.path().display().to_string());
        let image: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
        let path = folder.path().join("image");
        std::fs::write(&path, &image).expect("written");
        let sha256 = Sha256::digest(&image).into();
        let write = |len_bytes, sha256: &[u8; 32]| {
            std::fs::write(folder.path().join("boot"), "").expect("written");
            let mut answers = Vec::new();
            let file = File::open(&path).expect("there");
            serve_boot(&card, file, len_bytes, sha256, &mut answers).expect("listened to");
            let lines = String::from_utf8(answers).expect("text");
            let said: Vec<Said> = lines.lines().map(|line| serde_json::from_str(line).expect("a line")).collect();
            (said, std::fs::read(folder.path().join("boot")).expect("there"))
        };
        let (said, boot) = write(image.len() as u64, &sha256);
        assert_eq!((&said[0], said.last()), (&Said::Opened, Some(&Said::Closed)));
        assert!(boot == image);
        let pieces = image.len().div_ceil(CHUNK_LEN_BYTES);
        for (len_bytes, sha256) in [(image.len(), [0; 32]), (image.len() - 1, sha256), (image.len() + 1, sha256)] {
            let (said, boot) = write(len_bytes as u64, &sha256);
            assert!(said.contains(&Said::ImageChanged), "{said:?}");
            assert_eq!(boot.len(), (pieces - 1) * CHUNK_LEN_BYTES, "the last piece is held back");
        }
    }

    #[test]
    fn settings_and_readings_go_through_lines() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("misc"), "BOOT_MODE       1\n").expect("written");
        let card = Rshim::new(&folder.path().display().to_string());
        let orders = [Order::Read, Setting::BootMode(2).into(), Order::Read];
        let lines: Vec<_> = orders.iter().map(|order| serde_json::to_string(order).expect("JSON")).collect();
        let mut answers = Vec::new();
        serve_misc(&card, lines.join("\n").as_bytes(), &mut answers).expect("listened to");
        let text = String::from_utf8(answers).expect("text");
        let events: Vec<_> =
            text.lines().filter_map(|line| serde_json::from_str::<Said>(line).expect("a line").event()).collect();
        assert_eq!(events[1], Event::Set(Setting::BootMode(2), Ok(())));
        let Event::Misc(Ok(misc)) = &events[0] else { panic!("{events:?}") };
        assert_eq!(misc.boot_mode, Some(1));
        assert_eq!(std::fs::read_to_string(folder.path().join("misc")).expect("there"), "BOOT_MODE 2\n    1\n");
    }
}
