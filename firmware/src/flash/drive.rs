//! Moves what a session asks for between it and a card.
//!
//! Calls into the driver can hang, so none is made on the thread that watches the time: one thread reads and sets
//! `misc`, one writes `boot`, and the caller's thread has the session. A thread that hangs in the driver is left behind;
//! it ends with the process, and the driver closes `boot` then.

use super::failure::Failure;
use super::session::{Command, Event, Outcome, Progress, Session};
use crate::rshim::Rshim;
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;
use sumac_hal::time::Instant;

/// Bytes of one write. The driver takes a write whole before it answers, and a signal waits for that.
const CHUNK_LEN_BYTES: usize = 32 << 10;

/// The stream to write, checked beforehand.
#[derive(Debug)]
pub struct Image {
    /// The file, read from its first byte.
    pub file: File,
    /// How long it is, in bytes.
    pub len_bytes: u64,
    /// What its SHA-256 was when it was checked.
    pub sha256: [u8; 32],
}

/// Lets another thread, such as one that waits for signals, end a flashing in order.
#[derive(Debug, Clone)]
pub struct Interrupter {
    events: Sender<Event>,
}

impl Interrupter {
    /// Make one, and the other end for [`run`].
    pub fn new() -> (Self, Receiver<Event>) {
        let (events, receiver) = channel();
        (Self { events }, receiver)
    }

    /// Tell of a signal.
    pub fn interrupt(&self, signal: i32) {
        // When it is over, nobody listens, and that is right.
        let _ = self.events.send(Event::Signal(signal));
    }
}

/// Ask the driver for something, and wait no longer than `limit`; nothing if it has not answered by then.
pub fn within<T: Send + 'static>(limit: Duration, ask: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (answer, receiver) = channel();
    // Nobody may be waiting any more, and that is right.
    thread::spawn(move || drop(answer.send(ask())));
    receiver.recv_timeout(limit).ok()
}

/// Flash: carry out what the session asks for until it ends. `show` is called with all that can be shown.
pub fn run(
    mut session: Session,
    card: &Rshim,
    image: Image,
    (interrupter, events): (Interrupter, Receiver<Event>),
    clock: impl Fn() -> Instant,
    mut show: impl FnMut(Progress),
) -> Outcome {
    let sender = interrupter.events;
    let misc = spawn_misc(card.clone(), sender.clone());
    let stop = Arc::new(AtomicBool::new(false));
    let mut image = Some(image);
    loop {
        while let Some(command) = session.poll_transmit() {
            match command {
                // The thread lives as long as this function listens.
                Command::Set(_) | Command::ReadMisc => drop(misc.send(command)),
                Command::Write => {
                    if let Some(image) = image.take() {
                        spawn_writer(card.clone(), image, stop.clone(), sender.clone());
                    }
                }
                Command::StopWriting => stop.store(true, Ordering::Relaxed),
            }
        }
        while let Some(progress) = session.poll_event() {
            show(progress);
        }
        if let Some(outcome) = session.outcome() {
            return outcome;
        }
        let received = match session.poll_timeout() {
            Some(at) => events.recv_timeout(at.saturating_since(clock())),
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match received {
            Ok(event) => session.handle(event, clock()),
            // This function holds a sender: only time passes.
            Err(_) => session.handle_timeout(clock()),
        }
        // Events that come without a pause must not keep the time from being looked at.
        if session.poll_timeout().is_some_and(|at| clock() >= at) {
            session.handle_timeout(clock());
        }
    }
}

/// Start the thread that reads and sets `misc`; it ends when the returned sender is dropped.
fn spawn_misc(card: Rshim, events: Sender<Event>) -> Sender<Command> {
    let (commands, receiver) = channel();
    thread::spawn(move || {
        for command in receiver {
            let event = match command {
                Command::Set(setting) => Event::Set(setting, card.set(setting).map_err(|error| errno(&error))),
                _ => Event::Misc(card.read_misc().map(Box::new).map_err(|error| errno(&error))),
            };
            if events.send(event).is_err() {
                break;
            }
        }
    });
    commands
}

/// Start the thread that opens `boot` and writes.
fn spawn_writer(card: Rshim, image: Image, stop: Arc<AtomicBool>, events: Sender<Event>) {
    thread::spawn(move || {
        // Without a listener there is nothing left to do but to close.
        let send = |event| drop(events.send(event));
        match card.open_boot() {
            Err(error) => send(Event::OpenFailed(errno(&error))),
            Ok(mut boot) => {
                send(Event::Opened);
                let written = write(&mut boot, image, &stop, |bytes| send(Event::Wrote(bytes)));
                if let Err(event) = written {
                    send(event);
                }
                drop(boot);
                send(Event::Closed);
            }
        }
    });
}

/// Write the image; its last piece only if all of it is what was checked.
fn write(boot: &mut File, mut image: Image, stop: &AtomicBool, wrote: impl Fn(u64)) -> Result<(), Event> {
    let unreadable = |error: io::Error| Event::ImageFailed(Failure::Image(error.to_string()));
    image.file.seek(SeekFrom::Start(0)).map_err(unreadable)?;
    let mut digest = Sha256::new();
    let mut left = image.len_bytes;
    let mut buffer = vec![0; CHUNK_LEN_BYTES];
    while left > 0 {
        let len = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let piece = &mut buffer[..len];
        match image.file.read_exact(piece) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(Event::ImageFailed(Failure::ImageChanged));
            }
            read => read.map_err(unreadable)?,
        }
        digest.update(&*piece);
        left -= len as u64;
        if left == 0 && digest.finalize_reset()[..] != image.sha256 {
            return Err(Event::ImageFailed(Failure::ImageChanged));
        }
        let mut rest = &*piece;
        while !rest.is_empty() {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            match boot.write(rest) {
                Ok(0) => return Err(Event::WriteFailed(Errno::IO)),
                Ok(took) => {
                    rest = &rest[took..];
                    wrote(took as u64);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Event::WriteFailed(errno(&error))),
            }
        }
    }
    Ok(())
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
