//! Programs of users as children: started in a process group of their own, with their output passed on line by line.
//!
//! Invariants:
//! - A program whose supervisor ends is killed by the kernel: the child that becomes the program asks for it first
//!   ([`become_program`]).
//! - When a program ends, what is left of its process group is killed before the program is reaped, so the group's
//!   number is still its own.

use super::events::Event;
use super::process::{Child, SUPERVISOR_VARIABLE, supervised};
use super::{ChildId, ClusterError, Limit, Supervisor};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::ffi::{OsStr, OsString};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;

/// The hidden subcommand that becomes a program.
const BECOME: &str = "become";

/// The longest piece of a line that is passed on at once, in bytes.
const PIECE_MAX_BYTES: u64 = 64 << 10;

/// A program to start.
#[derive(Debug)]
pub(crate) struct Program<'a> {
    /// Its name in messages.
    pub(crate) name: String,
    /// The program and its arguments.
    pub(crate) command: &'a [OsString],
    /// Variables beside those of this process.
    pub(crate) variables: Vec<(&'static str, String)>,
    /// Variables of this process that it does not get.
    pub(crate) hidden: &'static [&'static str],
    /// What precedes each of its lines.
    pub(crate) label: String,
    /// Dropped when all output has been passed on.
    pub(crate) output: Sender<()>,
}

impl Supervisor {
    /// Start a program in a process group of its own, whose number is that of the process. It may end with status 0.
    ///
    /// # Errors
    /// [`ClusterError::System`] if it cannot be started.
    pub(crate) fn spawn_program(&mut self, program: Program<'_>) -> Result<ChildId, ClusterError> {
        let id = ChildId(self.children.len());
        let name = program.name.clone();
        let child = spawn(id, program, &self.sender)
            .map_err(|source| ClusterError::System { what: format!("start {name}"), source })?;
        self.children.push(child);
        Ok(id)
    }

    /// Start another program than this one, with a standard input that stays open for [`Supervisor::write`]. Its lines
    /// on stdout are events, like those of other children.
    ///
    /// # Errors
    /// [`ClusterError::System`] if it cannot be started.
    pub(crate) fn spawn_other(&mut self, name: &str, command: &[String]) -> Result<ChildId, ClusterError> {
        let id = ChildId(self.children.len());
        let args: Vec<String> = [BECOME, "--"].into_iter().map(str::to_owned).chain(command.iter().cloned()).collect();
        let child = Child::spawn(id, name, &args, &self.sender, &self.bar)
            .map_err(|source| ClusterError::System { what: format!("start {name}"), source })?;
        self.children.push(child);
        Ok(id)
    }

    /// Wait until all of these children have ended, and pass each line of theirs to `to`.
    ///
    /// # Errors
    /// Those of [`Supervisor::next_line`], and an error of `to`.
    pub(crate) fn pass_on_lines(
        &mut self,
        ids: &[ChildId],
        limit: Limit,
        mut to: impl FnMut(&str) -> io::Result<()>,
    ) -> Result<(), ClusterError> {
        while let Some(&awaited) = ids.iter().find(|id| !self.children[id.0].ended) {
            if let Some((_, line)) = self.next_event(limit, awaited, "end")? {
                to(&line).map_err(|source| ClusterError::System { what: "write to stdout".into(), source })?;
            }
        }
        Ok(())
    }

    /// Wait until one more of these programs has ended with status 0, and return those that have ended.
    ///
    /// # Errors
    /// Those of [`Supervisor::next_line`], and any line.
    pub(crate) fn wait_any_ended(&mut self, ids: &[ChildId], limit: Limit) -> Result<Vec<ChildId>, ClusterError> {
        let ended = |children: &[Child]| ids.iter().copied().filter(|id| children[id.0].ended).collect::<Vec<_>>();
        let before = ended(&self.children).len();
        let awaited = ids.iter().copied().find(|id| !self.children[id.0].ended);
        while let Some(awaited) = awaited.filter(|_| ended(&self.children).len() == before) {
            if let Some((id, line)) = self.next_event(limit, awaited, "end")? {
                let name = self.name(id).to_owned();
                return Err(ClusterError::Unexpected { name, line, expected: "no further line" });
            }
        }
        Ok(ended(&self.children))
    }

    /// Send a signal to a program and all others in its process group, unless the program has ended.
    pub(crate) fn signal_group(&self, id: ChildId, signal: Signal) {
        let child = &self.children[id.0];
        if !child.ended {
            // It fails only if no process is left.
            let _ = kill_process_group(Pid::from_child(&child.process), signal);
        }
    }
}

fn spawn(id: ChildId, program: Program<'_>, events: &Sender<Event>) -> io::Result<Child> {
    let Program { name, command, variables, hidden, label, output } = program;
    let mut starter = supervised()?;
    starter.arg(BECOME).arg("--").args(command).envs(variables);
    for variable in hidden {
        starter.env_remove(variable);
    }
    let mut process = starter.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (stdout, stderr, pid) = (process.stdout.take(), process.stderr.take(), Pid::from_child(&process));
    let mut child = Child {
        name,
        process,
        may_end: true,
        may_fail: false,
        ends_in_order: false,
        ended: false,
        stdin: None,
        stderr: Arc::default(),
        stderr_reader: None,
    };
    let start = |what: &str| thread::Builder::new().name(format!("{} {what}", child.name));
    let pass_on = |from, to: fn(&[u8]) -> io::Result<()>| {
        let (label, output) = (label.clone(), output.clone());
        move || {
            pass_on(from, label.as_bytes(), to);
            drop(output);
        }
    };
    let (Some(stdout), Some(stderr)) = (stdout, stderr) else { return Ok(child) };
    let (stdout, stderr): (Box<dyn Read + Send>, Box<dyn Read + Send>) = (Box::new(stdout), Box::new(stderr));
    let events = events.clone();
    let started = start("stdout")
        .spawn(pass_on(stdout, to_stdout))
        .and_then(|_| start("stderr").spawn(pass_on(stderr, to_stderr)))
        .and_then(|_| start("end").spawn(move || await_end(id, pid, &events)));
    if let Err(error) = started {
        let _ = child.process.kill();
        let _ = child.process.wait();
        return Err(error);
    }
    Ok(child)
}

/// Wait until a program ends, without reaping it, and kill the rest of its group.
fn await_end(id: ChildId, pid: Pid, events: &Sender<Event>) {
    while let Err(rustix::io::Errno::INTR) =
        waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).map(|_| ())
    {}
    let _ = kill_process_group(pid, Signal::KILL);
    // If the receiver is gone, the supervisor has ended.
    let _ = events.send(Event::Closed(id));
}

/// Become a program: the last thing that a child of this binary does. Returns only if that is impossible.
pub(crate) fn become_program(program: &OsStr, args: &[OsString]) -> io::Error {
    Command::new(program).args(args).env_remove(SUPERVISOR_VARIABLE).exec()
}

/// Pass complete lines on, each after `label`, until the end. Longer lines than [`PIECE_MAX_BYTES`] come in pieces.
fn pass_on(from: impl Read, label: &[u8], to: fn(&[u8]) -> io::Result<()>) {
    let mut from = BufReader::new(from);
    let mut is_new = true;
    loop {
        let mut text = if is_new { label.to_vec() } else { Vec::new() };
        match from.by_ref().take(PIECE_MAX_BYTES).read_until(b'\n', &mut text) {
            Ok(len) if len > 0 => is_new = text.ends_with(b"\n"),
            _ => return,
        }
        // Whoever reads the output has gone: so does the pipe, and the program gets the signal for it.
        if to(&text).is_err() {
            return;
        }
    }
}

fn to_stdout(text: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text)?;
    out.flush()
}

fn to_stderr(text: &[u8]) -> io::Result<()> {
    io::stderr().lock().write_all(text)
}
