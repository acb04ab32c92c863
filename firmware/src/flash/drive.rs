//! Moves what a session asks for between it and the workers, which talk to the driver.
//!
//! Nothing here waits for a worker longer than it is told to: one that hangs in the driver is killed, and left behind if
//! that has no effect yet.

use super::sealed::SealedImage;
use super::session::Session;
use super::verbs::{Command, Event, Outcome, Progress};
use super::worker::{Order, Said};
use crate::rshim::Misc;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;
use sumac_hal::time::Instant;

/// The stream to write, checked beforehand.
#[derive(Debug)]
pub struct Image {
    /// Its bytes, as they were checked.
    pub bytes: SealedImage,
    /// What its SHA-256 was when it was checked.
    pub sha256: [u8; 32],
}

/// What a worker process is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// [`serve_misc`](super::serve_misc), with orders on stdin and answers on stdout.
    Misc,
    /// [`serve_boot`](super::serve_boot), with the image as stdin and answers on stdout.
    Boot {
        /// Length of the image, in bytes.
        len_bytes: u64,
        /// Its SHA-256.
        sha256: [u8; 32],
    },
}

/// Lets another thread, such as one that waits for signals, end a flashing in order.
#[derive(Debug, Clone)]
pub struct Interrupter {
    events: Sender<Event>,
}

impl Interrupter {
    /// Tell of a signal.
    pub fn interrupt(&self, signal: i32) {
        // When it is over, nobody listens, and that is right.
        let _ = self.events.send(Event::Signal(signal));
    }
}

/// The workers of one card; they are killed when this is dropped.
#[derive(Debug)]
pub struct Workers<S> {
    spawn: S,
    sender: Sender<Event>,
    events: Receiver<Event>,
    misc: Worker,
    orders: Option<ChildStdin>,
    boot: Option<Worker>,
    /// The worker for `boot` was killed on purpose.
    is_stopped: Arc<AtomicBool>,
}

impl<S: FnMut(Role, Stdio) -> io::Result<Child>> Workers<S> {
    /// Start the worker for `misc`. `spawn` starts a process in a role, with this as its stdin and a pipe as its stdout.
    ///
    /// # Errors
    /// It can't be started.
    pub fn start(mut spawn: S) -> io::Result<Self> {
        let (sender, events) = channel();
        let mut process = spawn(Role::Misc, Stdio::piped())?;
        let orders = process.stdin.take();
        // Once it has ended, the next order fails; one that it has taken must not be waited for.
        let misc = Worker::watch(process, sender.clone(), || vec![Event::Misc(Err(Errno::PIPE))])?;
        Ok(Self { spawn, sender, events, misc, orders, boot: None, is_stopped: Arc::default() })
    }

    /// Return a handle that ends [`Workers::run`] in order.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { events: self.sender.clone() }
    }

    /// Read `misc`; nothing if the driver does not answer within `limit`.
    pub fn read_misc(&mut self, limit: Duration) -> Option<Result<Box<Misc>, Errno>> {
        self.order(Order::Read);
        match self.events.recv_timeout(limit) {
            Ok(Event::Misc(misc)) => Some(misc),
            _ => None,
        }
    }

    /// Flash: carry out what the session asks for until it ends. `show` is called with all that can be shown.
    pub fn run(
        mut self,
        mut session: Session,
        image: Image,
        clock: impl Fn() -> Instant,
        mut show: impl FnMut(Progress),
    ) -> Outcome {
        let mut image = Some(image);
        loop {
            while let Some(command) = session.poll_transmit() {
                match command {
                    Command::Set(setting) => self.order(setting.into()),
                    Command::ReadMisc => self.order(Order::Read),
                    Command::Write => self.write(image.take()),
                    Command::StopWriting => self.stop_writing(),
                }
            }
            while let Some(progress) = session.poll_event() {
                show(progress);
            }
            if let Some(outcome) = session.outcome() {
                return outcome;
            }
            let received = match session.poll_timeout() {
                Some(at) => self.events.recv_timeout(at.saturating_since(clock())),
                None => self.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            if let Ok(event) = received {
                session.handle(event, clock());
            }
            // Events that come without a pause must not keep the time from being looked at.
            if session.poll_timeout().is_some_and(|at| clock() >= at) {
                session.handle_timeout(clock());
            }
        }
    }

    fn order(&mut self, order: Order) {
        let mut give = || -> io::Result<()> {
            let orders = self.orders.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
            writeln!(orders, "{}", serde_json::to_string(&order)?)?;
            orders.flush()
        };
        if give().is_err() {
            let number = Err(Errno::IO.raw_os_error());
            let said =
                if order == Order::Read { Said::Misc(Err(Errno::IO.raw_os_error())) } else { Said::Set(order, number) };
            self.tell(said.event());
        }
    }

    fn write(&mut self, image: Option<Image>) {
        let is_stopped = self.is_stopped.clone();
        let at_end = move || match is_stopped.load(Ordering::Relaxed) {
            true => vec![Event::Closed],
            false => vec![Event::WriteFailed(Errno::PIPE), Event::Closed],
        };
        let spawned = image.ok_or(io::ErrorKind::NotFound.into()).and_then(|Image { bytes, sha256 }| {
            let len_bytes = bytes.len_bytes();
            let process = (self.spawn)(Role::Boot { len_bytes, sha256 }, bytes.into_stdin())?;
            Worker::watch(process, self.sender.clone(), at_end)
        });
        match spawned {
            Err(error) => self.tell(Some(Event::OpenFailed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))),
            Ok(boot) => self.boot = Some(boot),
        }
    }

    /// End the worker: the driver closes `boot` for it.
    fn stop_writing(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        if let Some(boot) = &self.boot {
            boot.kill();
        }
    }

    fn tell(&self, event: Option<Event>) {
        if let Some(event) = event {
            // This holds the other end.
            let _ = self.sender.send(event);
        }
    }
}

impl<S> Drop for Workers<S> {
    fn drop(&mut self) {
        self.boot.iter().chain([&self.misc]).for_each(Worker::kill);
    }
}

/// A worker process; a thread passes on what it says and waits for its end.
#[derive(Debug)]
struct Worker {
    /// Stands for the process even when it has ended and its number is another's.
    handle: OwnedFd,
}

impl Worker {
    /// Watch a process. What `at_end` returns is told when it has ended without having said that it is done; by then
    /// all that it had open is closed.
    fn watch(
        mut process: Child,
        events: Sender<Event>,
        at_end: impl FnOnce() -> Vec<Event> + Send + 'static,
    ) -> io::Result<Self> {
        let handle = match pidfd_open(Pid::from_child(&process), PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(error) => {
                // Nobody could watch it, so it must not go on.
                let _ = process.kill();
                let _ = process.wait();
                return Err(error.into());
            }
        };
        let answers = process.stdout.take();
        thread::spawn(move || {
            let is_done = answers.is_some_and(|answers| forward(answers, &events));
            // It has closed its pipe, so it has ended, or says what it must not.
            let _ = process.kill();
            let _ = process.wait();
            if !is_done {
                // Nobody may be listening any more, and that is right.
                at_end().into_iter().for_each(|event| drop(events.send(event)));
            }
        });
        Ok(Self { handle })
    }

    /// End it: at once, or, if it hangs in the driver, once that answers.
    fn kill(&self) {
        // It may have ended by itself.
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }
}

/// Pass on what a worker says until it ends, and return whether it has said that it is done.
fn forward(answers: ChildStdout, events: &Sender<Event>) -> bool {
    for line in BufReader::new(answers).lines() {
        let said = line.ok().and_then(|line| serde_json::from_str::<Said>(&line).ok());
        let Some(event) = said.and_then(Said::event) else { return false };
        let is_done = matches!(event, Event::Closed | Event::OpenFailed(_));
        if events.send(event).is_err() || is_done {
            return true;
        }
    }
    false
}
