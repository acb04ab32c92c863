//! Connects a session to the worker processes, which access the driver.
//!
//! Nothing here waits for a worker without a timeout: a worker that hangs in the driver is killed, and abandoned if
//! that has no effect yet.

use super::messages::{Command, Event, Outcome, Progress};
use super::sealed::SealedImage;
use super::session::Session;
use super::worker::{Contents, Reply, Request};
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

/// The checked stream to write.
#[derive(Debug)]
pub struct Image {
    /// The bytes that were checked, and what follows them.
    pub bytes: SealedImage,
    /// The SHA-256 of the stream when it was checked.
    pub sha256: [u8; 32],
    /// Whether only what follows the stream is written.
    pub is_tail_only: bool,
}

impl Image {
    /// Return the same stream for another card.
    ///
    /// # Errors
    /// The system's error.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { bytes: self.bytes.try_clone()?, ..*self })
    }
}

/// The role of a worker process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// [`serve_misc`](super::serve_misc), with requests on stdin and replies on stdout.
    Misc,
    /// [`serve_boot`](super::serve_boot), with these contents as stdin and replies on stdout.
    Boot(Contents),
}

/// Lets another thread, such as a signal handler's, end flashing in order.
#[derive(Debug, Clone)]
pub struct Interrupter {
    events: Sender<Event>,
}

impl Interrupter {
    /// Report a signal.
    pub fn interrupt(&self, signal: i32) {
        // This fails only once flashing has ended.
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
    requests: Option<ChildStdin>,
    boot: Option<Worker>,
    /// The worker for `boot` was stopped deliberately.
    is_stopped: Arc<AtomicBool>,
}

impl<S: FnMut(Role, Stdio) -> io::Result<Child>> Workers<S> {
    /// Start the worker for `misc`. `spawn` starts a process in a role, with the given stdin and a pipe as stdout.
    ///
    /// # Errors
    /// The worker could not be started.
    pub fn start(mut spawn: S) -> io::Result<Self> {
        let (sender, events) = channel();
        let mut process = spawn(Role::Misc, Stdio::piped())?;
        let requests = process.stdin.take();
        // If the worker ends, the next request fails; a request that it has received must not be waited for.
        let misc = Worker::watch(process, sender.clone(), || vec![Event::Misc(Err(Errno::PIPE))])?;
        Ok(Self { spawn, sender, events, misc, requests, boot: None, is_stopped: Arc::default() })
    }

    /// Return a handle that ends [`Workers::run`] in order.
    pub fn interrupter(&self) -> Interrupter {
        Interrupter { events: self.sender.clone() }
    }

    /// Read `misc`; `None` if the driver does not respond within `limit`.
    pub fn read_misc(&mut self, limit: Duration) -> Option<Result<Box<Misc>, Errno>> {
        self.send_request(Request::Read);
        match self.events.recv_timeout(limit) {
            Ok(Event::Misc(misc)) => Some(misc),
            _ => None,
        }
    }

    /// Flash: execute the session's commands until it ends. `show` is called with each progress report.
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
                    Command::Set(setting) => self.send_request(setting.into()),
                    Command::ReadMisc => self.send_request(Request::Read),
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
            // A continuous flow of events must not delay timeouts.
            if session.poll_timeout().is_some_and(|at| clock() >= at) {
                session.handle_timeout(clock());
            }
        }
    }

    fn send_request(&mut self, request: Request) {
        let mut give = || -> io::Result<()> {
            let requests = self.requests.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
            writeln!(requests, "{}", serde_json::to_string(&request)?)?;
            requests.flush()
        };
        if give().is_err() {
            let number = Err(Errno::IO.raw_os_error());
            let reply = if request == Request::Read {
                Reply::Misc(Err(Errno::IO.raw_os_error()))
            } else {
                Reply::Set(request, number)
            };
            self.send_event(reply.event());
        }
    }

    fn write(&mut self, image: Option<Image>) {
        let is_stopped = self.is_stopped.clone();
        let at_end = move || match is_stopped.load(Ordering::Relaxed) {
            true => vec![Event::Closed],
            false => vec![Event::WriteFailed(Errno::PIPE), Event::Closed],
        };
        let spawned = image.ok_or(io::ErrorKind::NotFound.into()).and_then(|Image { bytes, sha256, is_tail_only }| {
            let (len_bytes, tail_len_bytes) = (bytes.len_bytes(), bytes.tail_len_bytes());
            let contents = Contents { len_bytes, sha256, tail_len_bytes, is_tail_only };
            let process = (self.spawn)(Role::Boot(contents), bytes.into_stdin())?;
            Worker::watch(process, self.sender.clone(), at_end)
        });
        match spawned {
            Err(error) => self.send_event(Some(Event::OpenFailed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))),
            Ok(boot) => self.boot = Some(boot),
        }
    }

    /// Kill the worker, which closes `boot`.
    fn stop_writing(&mut self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        if let Some(boot) = &self.boot {
            boot.kill();
        }
    }

    fn send_event(&self, event: Option<Event>) {
        if let Some(event) = event {
            // Cannot fail: `self` holds the receiver.
            let _ = self.sender.send(event);
        }
    }
}

impl<S> Drop for Workers<S> {
    fn drop(&mut self) {
        self.boot.iter().chain([&self.misc]).for_each(Worker::kill);
    }
}

/// A worker process; a thread forwards its replies and waits for its end.
#[derive(Debug)]
struct Worker {
    /// A pidfd, which never refers to another process.
    handle: OwnedFd,
}

impl Worker {
    /// Watch a process. The events of `at_end` are sent if it ends without having reported that it is done; by then all
    /// its files are closed.
    fn watch(
        mut process: Child,
        events: Sender<Event>,
        at_end: impl FnOnce() -> Vec<Event> + Send + 'static,
    ) -> io::Result<Self> {
        let handle = match pidfd_open(Pid::from_child(&process), PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(error) => {
                // A process that cannot be watched must not run.
                let _ = process.kill();
                let _ = process.wait();
                return Err(error.into());
            }
        };
        let replies = process.stdout.take();
        thread::spawn(move || {
            let is_done = replies.is_some_and(|replies| forward(replies, &events));
            // It has closed its pipe or sent an invalid reply.
            let _ = process.kill();
            let _ = process.wait();
            if !is_done {
                // The receiver may be gone, which is fine.
                at_end().into_iter().for_each(|event| drop(events.send(event)));
            }
        });
        Ok(Self { handle })
    }

    /// Kill it: at once, or, if it hangs in the driver, once the driver responds.
    fn kill(&self) {
        // It may have ended already.
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
    }
}

/// Forward a worker's replies until it ends; return whether it has reported that it is done.
fn forward(replies: ChildStdout, events: &Sender<Event>) -> bool {
    for line in BufReader::new(replies).lines() {
        let reply = line.ok().and_then(|line| serde_json::from_str::<Reply>(&line).ok());
        let Some(event) = reply.and_then(Reply::event) else { return false };
        let is_done = matches!(event, Event::Closed | Event::OpenFailed(_));
        if events.send(event).is_err() || is_done {
            return true;
        }
    }
    false
}
