//! A cluster as child processes of this one: a controller, emulated devices and ranks, or programs as ranks.
//!
//! Invariants:
//! - **No child outlives its supervisor.** Dropping a [`Supervisor`] kills and reaps every child. If the supervisor
//!   itself is killed, the kernel kills the children ([`die_with_supervisor`]). That is tied to the *thread* that
//!   started them, so all children are started from the main thread.
//! - Ctrl-C reaches only the supervisor, because each child has its own process group. The supervisor then ends all
//!   children.
//! - The supervisor waits in one place ([`Supervisor::next_line`]) for lines, ends of children and signals.
//! - Every wait has a limit.

mod bind;
mod events;
mod given;
mod keys;
mod process;
mod program;
mod start;

pub(crate) use bind::Parts;
pub(crate) use given::{GivenDevice, places};
pub(crate) use keys::{ClusterKeys, OPERATOR_KEY_FILE, controller_addr, describe_controller};
pub(crate) use process::{SUPERVISOR_VARIABLE, die_with_supervisor, is_supervised, supervised};
pub(crate) use program::{Program, become_program};
pub(crate) use start::{
    ClusterConfig, LISTENING, Preference, READY, START_LIMIT, Started, spawn_controller, start, start_controller,
    start_device,
};

use crate::exit::{Failure, is_quiet};
use events::Event;
use indicatif::ProgressBar;
use process::Child;
use std::io;
use std::net::SocketAddr;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use sumac::controller::ClientError;
use sumac_hal::port::Addr;
use thiserror::Error;

/// The number of a child, in order of its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ChildId(usize);

/// Why a cluster cannot start, or failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum ClusterError {
    /// The system could not start or watch a process.
    #[error("cannot {what}: {source}")]
    System {
        /// The action that failed.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// A child ended while it was still needed.
    #[error("{name} ended early ({status}){}", stderr_tail(stderr))]
    Died {
        /// The child's name.
        name: String,
        /// Its exit status.
        status: ExitStatus,
        /// The last lines of its stderr.
        stderr: Vec<String>,
    },
    /// A child did not print the expected line in time.
    #[error("{name} did not {what} within {} s{}", limit.as_secs(), stderr_tail(stderr))]
    Silent {
        /// The child's name.
        name: String,
        /// What it was expected to do.
        what: &'static str,
        /// The time limit.
        limit: Duration,
        /// The last lines of its stderr.
        stderr: Vec<String>,
    },
    /// A child printed an unexpected line.
    #[error("unexpected line from {name}: {line:?}; expected {expected}")]
    Unexpected {
        /// The child's name.
        name: String,
        /// The line.
        line: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A given device did not register with the controller in time.
    #[error("device {name} did not register with the controller at {controller} within {} s; registered devices: {}", limit.as_secs(), list(names))]
    Absent {
        /// The device's name.
        name: String,
        /// The controller.
        controller: SocketAddr,
        /// The time limit.
        limit: Duration,
        /// The devices that have registered.
        names: Vec<String>,
    },
    /// A device of that name receives packets at another address.
    #[error("device {name} receives packets at {}, not at {addr} as --device says", found.map_or_else(|| "no address".into(), |found| found.to_string()))]
    WrongAddress {
        /// The device's name.
        name: String,
        /// The expected address.
        addr: SocketAddr,
        /// The address that it registered.
        found: Option<Addr>,
    },
    /// The controller did not report its devices.
    #[error("cannot get the devices of the controller: {0}")]
    Controller(Box<ClientError>),
    /// A signal asked this process to end.
    #[error("ended by signal {0}")]
    Signal(i32),
}

impl From<ClusterError> for Failure {
    fn from(error: ClusterError) -> Self {
        if let ClusterError::Signal(signal) = error { Self::Signal(signal) } else { Self::run(error) }
    }
}

/// The parent of a cluster's processes.
#[derive(Debug)]
pub(crate) struct Supervisor {
    children: Vec<Child>,
    events: Receiver<Event>,
    sender: Sender<Event>,
    /// Hidden while a child's line is copied to stderr.
    bar: ProgressBar,
    /// How often `-v` is passed to children.
    verbose: u8,
    /// The keys of the cluster, whose files are as long there as its controller.
    keys: Option<Arc<ClusterKeys>>,
}

impl Supervisor {
    /// Prepare to start children, and handle SIGINT, SIGTERM and SIGHUP.
    ///
    /// # Errors
    /// [`ClusterError::System`] if the signal handlers cannot be installed.
    pub(crate) fn new(bar: ProgressBar, verbose: u8) -> Result<Self, ClusterError> {
        let (sender, events) = channel();
        events::watch_signals(sender.clone())
            .map_err(|source| ClusterError::System { what: "install signal handlers".into(), source })?;
        Ok(Self { children: Vec::new(), events, sender, bar, verbose, keys: None })
    }

    /// Start this binary with `args`, and with `stdin` as its whole standard input.
    ///
    /// # Errors
    /// [`ClusterError::System`] if it cannot be started.
    pub(crate) fn spawn(&mut self, name: &str, args: &[String], stdin: Vec<u8>) -> Result<ChildId, ClusterError> {
        let id = self.spawn_with_stdin(name, args)?;
        self.write(id, stdin);
        self.children[id.0].stdin = None;
        Ok(id)
    }

    /// Start this binary with `args`, and with a standard input that stays open for [`Supervisor::write`].
    ///
    /// # Errors
    /// [`ClusterError::System`] if it cannot be started.
    pub(crate) fn spawn_with_stdin(&mut self, name: &str, args: &[String]) -> Result<ChildId, ClusterError> {
        let id = ChildId(self.children.len());
        let quiet = is_quiet().then(|| "--quiet".to_owned());
        let verbose = (0..self.verbose).map(|_| "-v".to_owned());
        let args: Vec<String> = args.iter().cloned().chain(verbose).chain(quiet).collect();
        let child = Child::spawn(id, name, &args, &self.sender, &self.bar)
            .map_err(|source| ClusterError::System { what: format!("start {name}"), source })?;
        self.children.push(child);
        Ok(id)
    }

    /// Write to the standard input of a child, unless it has ended.
    pub(crate) fn write(&self, id: ChildId, bytes: Vec<u8>) {
        let queued = self.children[id.0].stdin.as_ref().map(|stdin| stdin.send(bytes));
        if let Some(Err(error)) = queued {
            tracing::debug!(name = self.name(id), %error, "cannot write to a child that has closed its standard input");
        }
    }

    /// Wait for the next line that any child prints on stdout.
    ///
    /// A child may end with status 0 after [`Supervisor::may_end`], and with any status after [`Supervisor::may_fail`].
    ///
    /// # Errors
    /// A signal, the early end of a child, or the end of `limit`, which is reported as `awaited` not having done
    /// `what`.
    pub(crate) fn next_line(
        &mut self,
        limit: Limit,
        awaited: ChildId,
        what: &'static str,
    ) -> Result<(ChildId, String), ClusterError> {
        loop {
            if let Some(line) = self.next_event(limit, awaited, what)? {
                return Ok(line);
            }
        }
    }

    /// Wait for the next event: a line, or the permitted end of a child.
    fn next_event(
        &mut self,
        limit: Limit,
        awaited: ChildId,
        what: &'static str,
    ) -> Result<Option<(ChildId, String)>, ClusterError> {
        match self.events.recv_timeout(limit.left()) {
            Ok(Event::Line(id, line)) => Ok(Some((id, line))),
            Ok(Event::Closed(id)) => self.closed(id).map(|()| None),
            Ok(Event::Signal(signal)) => Err(ClusterError::Signal(signal)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                let child = &mut self.children[awaited.0];
                let (name, stderr) = (child.name.clone(), child.stderr_so_far());
                Err(ClusterError::Silent { name, what, limit: limit.length, stderr })
            }
        }
    }

    /// Check without waiting that all children run and that no signal has arrived.
    ///
    /// # Errors
    /// Those of [`Supervisor::next_line`], and any line.
    pub(crate) fn check(&mut self) -> Result<(), ClusterError> {
        while let Ok(event) = self.events.try_recv() {
            self.expect_no_line(event)?;
        }
        Ok(())
    }

    /// Handle an event while no line is expected.
    fn expect_no_line(&mut self, event: Event) -> Result<(), ClusterError> {
        match event {
            Event::Closed(id) => self.closed(id),
            Event::Line(id, line) => {
                let name = self.name(id).to_owned();
                Err(ClusterError::Unexpected { name, line, expected: "no further line" })
            }
            Event::Signal(signal) => Err(ClusterError::Signal(signal)),
        }
    }

    /// Wait for this time.
    ///
    /// # Errors
    /// Those of [`Supervisor::check`], without delay.
    fn sleep(&mut self, time: Duration) -> Result<(), ClusterError> {
        let limit = Limit::new(time);
        loop {
            match self.events.recv_timeout(limit.left()) {
                Ok(event) => self.expect_no_line(event)?,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Note that a child has done its work: from now on it may end with status 0.
    pub(crate) fn may_end(&mut self, id: ChildId) {
        self.children[id.0].may_end = true;
    }

    /// Wait until these children have ended, each with status 0.
    ///
    /// # Errors
    /// Those of [`Supervisor::next_line`], and any further line.
    pub(crate) fn wait_ended(&mut self, ids: &[ChildId], limit: Limit) -> Result<(), ClusterError> {
        ids.iter().for_each(|&id| self.may_end(id));
        while let Some(&awaited) = ids.iter().find(|id| !self.children[id.0].ended) {
            if let Some((id, line)) = self.next_event(limit, awaited, "end")? {
                let name = self.name(id).to_owned();
                return Err(ClusterError::Unexpected { name, line, expected: "no further line" });
            }
        }
        Ok(())
    }

    /// Kill a child with SIGKILL and wait until the system has freed its resources, because its successor may need the
    /// same ports. The child may end with any status.
    ///
    /// # Errors
    /// [`ClusterError::System`] if it cannot be killed.
    pub(crate) fn kill(&mut self, id: ChildId) -> Result<(), ClusterError> {
        let child = &mut self.children[id.0];
        child.may_fail = true;
        let what = || format!("kill {}", child.name);
        let killed = child.process.kill().and_then(|()| child.process.wait());
        killed.map(|_| ()).map_err(|source| ClusterError::System { what: what(), source })
    }

    /// Ask a child to end, as Ctrl-C does. It may end with any status.
    ///
    /// # Errors
    /// [`ClusterError::System`] if it cannot be asked.
    pub(crate) fn terminate(&mut self, id: ChildId) -> Result<(), ClusterError> {
        let child = &mut self.children[id.0];
        child.may_fail = true;
        if child.ended {
            return Ok(());
        }
        let what = || format!("end {}", child.name);
        let pid = rustix::process::Pid::from_child(&child.process);
        rustix::process::kill_process(pid, rustix::process::Signal::INT)
            .map_err(|error| ClusterError::System { what: what(), source: error.into() })
    }

    /// Let a child end in order when the supervisor is dropped: what it uses outlives this process.
    pub(crate) fn end_in_order(&mut self, id: ChildId) {
        self.children[id.0].ends_in_order = true;
    }

    /// Note that a child may end with any status.
    pub(crate) fn may_fail(&mut self, id: ChildId) {
        self.children[id.0].may_fail = true;
    }

    /// Return a child's process id.
    pub(crate) fn pid(&self, id: ChildId) -> u32 {
        self.children[id.0].process.id()
    }

    /// Wait until a child that may fail has ended, and ignore all lines meanwhile. Returns its status and the last
    /// lines of its stderr.
    ///
    /// # Errors
    /// Those of [`Supervisor::next_line`].
    pub(crate) fn ending(&mut self, id: ChildId, limit: Limit) -> Result<(ExitStatus, Vec<String>), ClusterError> {
        while !self.children[id.0].ended {
            self.next_event(limit, id, "end")?;
        }
        let child = &mut self.children[id.0];
        let what = || format!("wait for {}", child.name);
        let status = child.process.wait().map_err(|source| ClusterError::System { what: what(), source })?;
        Ok((status, child.final_stderr()))
    }

    /// Return a child's name.
    pub(crate) fn name(&self, id: ChildId) -> &str {
        &self.children[id.0].name
    }

    /// Reap a child whose stdout is closed: it has ended or is about to.
    fn closed(&mut self, id: ChildId) -> Result<(), ClusterError> {
        let child = &mut self.children[id.0];
        let what = || format!("wait for {}", child.name);
        let status = child.process.wait().map_err(|source| ClusterError::System { what: what(), source })?;
        child.ended = true;
        if child.may_fail || child.may_end && status.success() {
            return Ok(());
        }
        Err(ClusterError::Died { name: child.name.clone(), status, stderr: child.final_stderr() })
    }
}

impl Drop for Supervisor {
    /// Kill all children, those that end in order once they have had [`END_LIMIT`] for it, then reap them.
    fn drop(&mut self) {
        let mut running: Vec<_> = self.children.iter_mut().enumerate().filter(|(_, child)| !child.ended).collect();
        // Those that are killed at once come first.
        running.sort_by_key(|(_, child)| child.ends_in_order);
        for (index, child) in &mut running {
            if child.ends_in_order {
                let pid = rustix::process::Pid::from_child(&child.process);
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
                wait_until_closed(&self.events, ChildId(*index));
            }
            // Killing fails if it has already ended.
            let _ = child.process.kill();
        }
        for (_, child) in &mut running {
            let _ = child.process.wait();
        }
    }
}

/// Wait until a child has closed its stdout, at most for [`END_LIMIT`].
fn wait_until_closed(events: &Receiver<Event>, id: ChildId) {
    let limit = Instant::now() + END_LIMIT;
    while let Ok(event) = events.recv_timeout(limit.saturating_duration_since(Instant::now())) {
        if matches!(event, Event::Closed(closed) if closed == id) {
            return;
        }
    }
}

/// How long a child that ends in order may take for it.
const END_LIMIT: Duration = Duration::from_secs(2);

/// A time limit, with its length for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    end: Instant,
    length: Duration,
}

impl Limit {
    /// Start the clock.
    pub(crate) fn new(length: Duration) -> Self {
        Self { end: Instant::now() + length, length }
    }

    /// Whether it has passed.
    pub(crate) fn is_over(&self) -> bool {
        self.left().is_zero()
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn stderr_tail(lines: &[String]) -> String {
    if lines.is_empty() { String::new() } else { format!("; its last messages:\n  {}", lines.join("\n  ")) }
}
