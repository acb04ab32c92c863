//! A whole cluster as child processes of this one: a controller, emulated devices, ranks.
//!
//! Invariants:
//! - **No child outlives its supervisor.** Dropping a [`Supervisor`] kills and reaps every child. Should the supervisor
//!   be killed itself, the kernel kills the children ([`die_with_supervisor`]); as that is tied to the *thread* that
//!   started them, all children are started from the main thread.
//! - Ctrl-C reaches the supervisor alone, for each child has a process group of its own; so there is one place
//!   that decides what is left behind: nothing.
//! - The supervisor waits in one place ([`Supervisor::next_line`]), for lines, ends of children and signals alike.
//! - Every wait has a limit.

mod bind;
mod events;
mod given;
mod process;
mod start;

pub(crate) use bind::Parts;
pub(crate) use given::{GivenDevice, places};
pub(crate) use process::{die_with_supervisor, supervised};
pub(crate) use start::{
    ClusterConfig, LISTENING, Preference, READY, START_LIMIT, Started, spawn_controller, start, start_controller,
    start_device,
};

use crate::exit::Failure;
use events::Event;
use indicatif::ProgressBar;
use process::Child;
use std::io;
use std::net::SocketAddr;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};
use sumac::controller::ClientError;
use sumac_hal::port::Addr;
use thiserror::Error;

/// The number of a child, in order of its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ChildId(usize);

/// Why a cluster can't start, or broke.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum ClusterError {
    /// The system refused to start or watch a process.
    #[error("can't {what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// A child ended although it was still needed.
    #[error("{name} ended early ({status}){}", stderr_tail(stderr))]
    Died {
        /// Which.
        name: String,
        /// How.
        status: ExitStatus,
        /// The last lines that it wrote to stderr.
        stderr: Vec<String>,
    },
    /// A child did not say what was waited for.
    #[error("{name} did not {what} within {} s{}", limit.as_secs(), stderr_tail(stderr))]
    Silent {
        /// Which.
        name: String,
        /// What was waited for.
        what: &'static str,
        /// For how long.
        limit: Duration,
        /// The last lines that it wrote to stderr.
        stderr: Vec<String>,
    },
    /// A child said something that is no answer.
    #[error("{name} printed {line:?} where {expected} was expected")]
    Unexpected {
        /// Which.
        name: String,
        /// What it said.
        line: String,
        /// What it should have said.
        expected: &'static str,
    },
    /// A device that should be there does not dial the controller.
    #[error("no device {name} has dialled the controller at {controller} within {} s; there are: {}", limit.as_secs(), list(names))]
    Absent {
        /// Its name.
        name: String,
        /// Whom it should have dialled.
        controller: SocketAddr,
        /// For how long.
        limit: Duration,
        /// Who has.
        names: Vec<String>,
    },
    /// A device of that name is somewhere else.
    #[error("device {name} receives packets at {}, not at {addr}", found.map_or_else(|| "no address".into(), |found| found.to_string()))]
    Stranger {
        /// Its name.
        name: String,
        /// Where it should be.
        addr: SocketAddr,
        /// Where it is.
        found: Option<Addr>,
    },
    /// The controller does not say who is there.
    #[error("asking the controller for its devices: {0}")]
    Controller(Box<ClientError>),
    /// Somebody wants this process to end.
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
    /// Is taken off the terminal while a child's line is passed on to stderr.
    bar: ProgressBar,
    /// How often `-v` is handed on.
    verbose: u8,
}

impl Supervisor {
    /// Get ready to start children, and take over SIGINT, SIGTERM and SIGHUP.
    ///
    /// # Errors
    /// [`ClusterError::System`] if signals can't be taken over.
    pub(crate) fn new(bar: ProgressBar, verbose: u8) -> Result<Self, ClusterError> {
        let (sender, events) = channel();
        events::watch_signals(sender.clone())
            .map_err(|source| ClusterError::System { what: "watch for signals".into(), source })?;
        Ok(Self { children: Vec::new(), events, sender, bar, verbose })
    }

    /// Start this binary again with `args`, `stdin` to be read to its end.
    ///
    /// # Errors
    /// [`ClusterError::System`] if it can't be started.
    pub(crate) fn spawn(&mut self, name: &str, args: &[String], stdin: Vec<u8>) -> Result<ChildId, ClusterError> {
        let id = self.spawn_to_talk_to(name, args)?;
        self.say(id, stdin);
        self.children[id.0].stdin = None;
        Ok(id)
    }

    /// Start this binary again with `args`, and a stdin that stays open for [`Supervisor::say`].
    ///
    /// # Errors
    /// [`ClusterError::System`] if it can't be started.
    pub(crate) fn spawn_to_talk_to(&mut self, name: &str, args: &[String]) -> Result<ChildId, ClusterError> {
        let id = ChildId(self.children.len());
        let args: Vec<String> = args.iter().cloned().chain((0..self.verbose).map(|_| "-v".to_owned())).collect();
        let child = Child::spawn(id, name, &args, &self.sender, &self.bar)
            .map_err(|source| ClusterError::System { what: format!("start {name}"), source })?;
        self.children.push(child);
        Ok(id)
    }

    /// Write to the stdin of a child. One that has ended misses it.
    pub(crate) fn say(&self, id: ChildId, bytes: Vec<u8>) {
        let told = self.children[id.0].stdin.as_ref().map(|stdin| stdin.send(bytes));
        if let Some(Err(error)) = told {
            tracing::debug!(name = self.name(id), %error, "not told: it no longer listens");
        }
    }

    /// Wait for the next line that any child prints on stdout.
    ///
    /// A child that ends with status 0 after [`Supervisor::may_end`], or anyhow after [`Supervisor::may_fail`], is not an
    /// event.
    ///
    /// # Errors
    /// A signal, the early end of a child, or the passing of `deadline`, which is laid to `awaited` and `what`.
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

    /// Wait for the next event: a line, or the end of a child, which is in order.
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

    /// See that all children run and nobody wants this process to end, without waiting: for those who do something
    /// else than wait for lines.
    ///
    /// # Errors
    /// As [`Supervisor::next_line`], and any line.
    pub(crate) fn check(&mut self) -> Result<(), ClusterError> {
        while let Ok(event) = self.events.try_recv() {
            self.in_order(event)?;
        }
        Ok(())
    }

    /// Take an event where no line is due.
    fn in_order(&mut self, event: Event) -> Result<(), ClusterError> {
        match event {
            Event::Closed(id) => self.closed(id),
            Event::Line(id, line) => {
                let name = self.name(id).to_owned();
                Err(ClusterError::Unexpected { name, line, expected: "no further line" })
            }
            Event::Signal(signal) => Err(ClusterError::Signal(signal)),
        }
    }

    /// Let time pass.
    ///
    /// # Errors
    /// As [`Supervisor::check`], and at once.
    fn pass(&mut self, time: Duration) -> Result<(), ClusterError> {
        let limit = Limit::new(time);
        loop {
            match self.events.recv_timeout(limit.left()) {
                Ok(event) => self.in_order(event)?,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Say that a child has done its work: from now on, its end with status 0 is in order.
    pub(crate) fn may_end(&mut self, id: ChildId) {
        self.children[id.0].may_end = true;
    }

    /// Wait until these children have ended, each with status 0.
    ///
    /// # Errors
    /// As [`Supervisor::next_line`], and any further line.
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

    /// Kill a child, as nothing in it can notice, and wait until the system has taken back what it had: who is started in
    /// its place may want the same ports. Its end is in order, whatever its status.
    ///
    /// # Errors
    /// [`ClusterError::System`] if it can't be killed.
    pub(crate) fn kill(&mut self, id: ChildId) -> Result<(), ClusterError> {
        let child = &mut self.children[id.0];
        child.may_fail = true;
        let what = || format!("kill {}", child.name);
        let killed = child.process.kill().and_then(|()| child.process.wait());
        killed.map(|_| ()).map_err(|source| ClusterError::System { what: what(), source })
    }

    /// Say that a child may fail: its end is in order, whatever its status.
    pub(crate) fn may_fail(&mut self, id: ChildId) {
        self.children[id.0].may_fail = true;
    }

    /// Return a child's process.
    pub(crate) fn pid(&self, id: ChildId) -> u32 {
        self.children[id.0].process.id()
    }

    /// Wait until a child that may fail has ended, whatever it and others print meanwhile. Returns its status and the
    /// last lines that it wrote to stderr.
    ///
    /// # Errors
    /// As [`Supervisor::next_line`].
    pub(crate) fn ending(&mut self, id: ChildId, limit: Limit) -> Result<(ExitStatus, Vec<String>), ClusterError> {
        while !self.children[id.0].ended {
            self.next_event(limit, id, "end")?;
        }
        let child = &mut self.children[id.0];
        let what = || format!("wait for {}", child.name);
        let status = child.process.wait().map_err(|source| ClusterError::System { what: what(), source })?;
        Ok((status, child.stderr_to_its_end()))
    }

    /// Return a child's name.
    pub(crate) fn name(&self, id: ChildId) -> &str {
        &self.children[id.0].name
    }

    /// Take note that a child's stdout is closed: it has ended, or is about to.
    fn closed(&mut self, id: ChildId) -> Result<(), ClusterError> {
        let child = &mut self.children[id.0];
        let what = || format!("wait for {}", child.name);
        let status = child.process.wait().map_err(|source| ClusterError::System { what: what(), source })?;
        child.ended = true;
        if child.may_fail || child.may_end && status.success() {
            return Ok(());
        }
        Err(ClusterError::Died { name: child.name.clone(), status, stderr: child.stderr_to_its_end() })
    }
}

impl Drop for Supervisor {
    /// End every child: first all are told, then all are waited for.
    fn drop(&mut self) {
        let mut left: Vec<_> = self.children.iter_mut().filter(|child| !child.ended).collect();
        for child in &mut left {
            // It may have ended by itself, which is what is wanted.
            let _ = child.process.kill();
        }
        for child in &mut left {
            let _ = child.process.wait();
        }
    }
}

/// A time limit, and how long it was, for the message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limit {
    end: Instant,
    length: Duration,
}

impl Limit {
    /// Start to count.
    pub(crate) fn new(length: Duration) -> Self {
        Self { end: Instant::now() + length, length }
    }

    /// Tell whether it has passed.
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
    if lines.is_empty() { String::new() } else { format!("; its last words:\n  {}", lines.join("\n  ")) }
}
