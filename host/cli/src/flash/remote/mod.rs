//! `sumac flash --host`: flash the cards of other hosts by `ssh`.
//!
//! On each host, `ssh` starts `sumac flash`, which gets image and key on stdin ([`stream`]) and prints its events. They
//! are this command's, with the host's name. Records are the host's own.
//!
//! Invariants:
//! - the image goes to a host once, and into no file there;
//! - a host without a word for as long as a card may take, and some more, counts as lost, and its `ssh` is ended;
//! - a signal here ends flashing there in order: stdin ends, which is a signal there.

mod forward;
pub(super) mod stream;

use super::interrupts::Interrupts;
use super::one::Job;
use super::targets::{self, Reporter, Row, shown};
use crate::exit::Failure as Exit;
use crate::ssh;
use anyhow::{Context, anyhow};
use ed25519_dalek::VerifyingKey;
use serde_json::Value;
use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// The hidden option with which a host gets the image on stdin.
const FOLLOW: &str = "--follow-stdin";
/// What ends an `ssh` whose host does not answer any more.
const SSH_OPTIONS: [&str; 6] =
    ["-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"];
/// How many hosts are flashed at once: each has a process and six pipes or threads.
const HOSTS_AT_ONCE: usize = 16;
/// The longest line of a host.
const LINE_MAX_BYTES: u64 = 1 << 20;
/// How many lines of a host's stderr are kept.
const ERROR_LINES: usize = 8;
/// How much longer than a card's time limits a host may be silent: to connect, and to check the image.
const SILENCE: Duration = Duration::from_secs(300);
/// The exit status of `ssh` if it fails itself (ssh(1), "EXIT STATUS").
const SSH_FAILED: i32 = 255;

/// What happens to a host's process.
enum Message {
    /// A line on its stdout.
    Line(String),
    /// A line on its stderr.
    Error(String),
    /// A stream has ended.
    End,
    /// The image was sent, and this is where it went, or sending it failed.
    Sent(anyhow::Result<ChildStdin>),
    /// This command got a signal.
    Signal,
}

/// Flash the cards of the hosts that the options name.
pub(super) fn run(job: &Job<'_>, key: Option<&VerifyingKey>) -> Result<(), Exit> {
    let hosts = &job.args.hosts;
    for (index, host) in hosts.iter().enumerate() {
        if !ssh::is_host(host) {
            return Err(Exit::Input(anyhow!("--host: {host:?} is no name of a host")));
        }
        if hosts[..index].contains(host) {
            return Err(Exit::Input(anyhow!("--host names {host} twice")));
        }
    }
    let program = ssh::program(job.args.sumac_path.as_deref()).map_err(Exit::Input)?;
    let options = forward::options(std::env::args_os()).map_err(Exit::Input)?;
    let words = [program, "flash".into(), "-".into(), "--json".into(), FOLLOW.into()];
    let command: Vec<_> =
        ["exec".into()].into_iter().chain(words).chain(options).map(|word| ssh::quoted(&word)).collect();
    let command = command.join(" ");
    let interrupts = Interrupts::watch()?;
    targets::run(("host", hosts), HOSTS_AT_ONCE, job.args.json, &interrupts, |index, reporter| {
        let start = Instant::now();
        let flashed =
            Host::start(&hosts[index], &command, job, key, &interrupts).and_then(|host| host.follow(reporter));
        flashed.unwrap_or_else(|error| {
            let message = crate::exit::chain(&error);
            vec![Row::failed("host-failed", 1, &message, start.elapsed().as_secs_f64())]
        })
    })
}

/// A host's process.
struct Host {
    process: Child,
    messages: Receiver<Message>,
    /// How long it may be silent.
    silence: Duration,
}

impl Drop for Host {
    fn drop(&mut self) {
        // It has ended, unless this command gave up on it.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Host {
    fn start(
        host: &str,
        command: &str,
        job: &Job<'_>,
        key: Option<&VerifyingKey>,
        interrupts: &Interrupts,
    ) -> anyhow::Result<Self> {
        let words = [&ssh::words(&SSH_OPTIONS)[..], &[host.to_owned(), command.to_owned()]].concat();
        let (program, arguments) = words.split_first().context("SUMAC_SSH is empty")?;
        let mut start = Command::new(program);
        start.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = start.spawn().with_context(|| format!("cannot start {program}"))?;
        let (sender, messages) = channel();
        if let Some(stdout) = process.stdout.take() {
            forward_lines(stdout, sender.clone(), Message::Line);
        }
        if let Some(stderr) = process.stderr.take() {
            forward_lines(stderr, sender.clone(), Message::Error);
        }
        let signals = sender.clone();
        interrupts.listen(move |_| drop(signals.send(Message::Signal)));
        if let Some(mut stdin) = process.stdin.take() {
            let (image, key) = (job.image.bytes.try_clone()?, key.copied());
            let send = move || stream::send(&image, key.as_ref(), &mut stdin).map(|()| stdin);
            thread::spawn(move || drop(sender.send(Message::Sent(send()))));
        }
        let limits = job.args.limits();
        Ok(Self { process, messages, silence: limits.total + limits.restore + SILENCE })
    }

    /// Report the host's events until it has ended.
    fn follow(mut self, reporter: &Reporter) -> anyhow::Result<Vec<Row>> {
        let (mut stdin, mut rows, mut ends) = (None, None, 0);
        let (mut is_over, mut is_interrupted, mut unsent, mut refused) = (false, false, None, None);
        let mut errors = VecDeque::new();
        while ends < 2 {
            match self.messages.recv_timeout(self.silence) {
                Ok(Message::Line(line)) => match event(&line) {
                    Some(Event::Summary(found)) => (rows, is_over) = (Some(found), true),
                    Some(Event::Refused(why)) => (refused, is_over) = (Some(why), true),
                    Some(Event::Other(event)) => {
                        line_of(&event).iter().for_each(|line| reporter.note(line));
                        reporter.event(event);
                    }
                    None => errors.push_back(shown(&line)),
                },
                Ok(Message::Error(line)) => errors.push_back(shown(&line)),
                Ok(Message::End) => ends += 1,
                Ok(Message::Sent(Ok(pipe))) => stdin = Some(pipe).filter(|_| !is_interrupted),
                // Why it has ended comes on its stderr.
                Ok(Message::Sent(Err(error))) => unsent = Some(error),
                Ok(Message::Signal) => {
                    is_interrupted = true;
                    // While it gets the image it has not touched a card.
                    if stdin.take().is_none() {
                        let _ = self.process.kill();
                    }
                }
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    return Err(anyhow!("not a word for {} s; its cards may still be flashed", self.silence.as_secs()));
                }
            }
            errors.drain(..errors.len().saturating_sub(ERROR_LINES));
            if is_over {
                // What else reads it there ends, too.
                drop(stdin.take());
            }
        }
        drop(stdin);
        let status = self.process.wait().context("cannot wait for ssh")?;
        if let Some(rows) = rows {
            return Ok(rows);
        }
        if let Some(why) = refused {
            return Err(anyhow!(why));
        }
        let mut why: Vec<_> = errors.into_iter().filter(|line| !line.is_empty()).collect();
        why.extend(unsent.filter(|_| why.is_empty()).map(|error| error.to_string()));
        let what = match status.code() {
            _ if is_interrupted => "interrupted before it began".into(),
            Some(SSH_FAILED) => "ssh failed".into(),
            Some(code) => format!("sumac ended with status {code}"),
            None => format!("ssh ended: {status}"),
        };
        Err(anyhow!("{}", [&[what][..], &why].concat().join(": ")))
    }
}

/// Send the lines of a stream, and that it has ended, from a thread.
fn forward_lines(from: impl Read + Send + 'static, to: Sender<Message>, message: fn(String) -> Message) {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        while let Ok(Some(line)) = read_line(&mut from) {
            // The receiver has given up.
            if to.send(message(line)).is_err() {
                return;
            }
        }
        let _ = to.send(Message::End);
    });
}

/// Read a line of limited length; an error if it is longer.
fn read_line(from: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let len = from.take(LINE_MAX_BYTES).read_until(b'\n', &mut line)?;
    match len as u64 {
        0 => Ok(None),
        LINE_MAX_BYTES if line.last() != Some(&b'\n') => Err(io::ErrorKind::InvalidData.into()),
        _ => Ok(Some(String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']).to_owned())),
    }
}

/// A line of a host.
#[derive(Debug, PartialEq)]
enum Event {
    /// How its cards ended.
    Summary(Vec<Row>),
    /// Nothing was begun, for this reason.
    Refused(String),
    Other(Value),
}

/// Read a line of a host; `None` if it is no event.
fn event(line: &str) -> Option<Event> {
    let event: Value = serde_json::from_str(line).ok()?;
    if event["outcome"] == "refused" && event["event"].is_null() {
        return Some(Event::Refused(shown(event["message"].as_str()?)));
    }
    if event["event"] != "summary" {
        return event["event"].is_string().then_some(Event::Other(event));
    }
    let text = |value: &Value| value.as_str().map(shown);
    let row = |card: &Value| Row {
        card: text(&card["card"]),
        serial: text(&card["serial"]),
        outcome: text(&card["outcome"]).unwrap_or_else(|| "?".into()),
        // A number that is missing is no success.
        exit_status: card["exit_status"].as_u64().and_then(|status| u8::try_from(status).ok()).unwrap_or(1),
        message: text(&card["message"]),
        seconds: card["seconds"].as_f64().unwrap_or(0.0),
    };
    let rows: Vec<_> = event["cards"].as_array()?.iter().map(row).collect();
    // A host without cards has done nothing.
    (!rows.is_empty()).then_some(Event::Summary(rows))
}

/// Return what to print of an event; errors are printed at the end.
fn line_of(event: &Value) -> Option<String> {
    let card = event["card"].as_str().unwrap_or("?");
    match event["event"].as_str()? {
        "stage" => Some(format!("{card}: {}", event["stage"].as_str()?)),
        "different" => Some(format!("{card}: flashing it: {}", event["reason"].as_str()?)),
        "end" if event["exit_status"] == 0 => Some(format!("{card}: {}", event["outcome"].as_str()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_a_host_is_an_event_a_summary_or_neither() {
        let summary = r#"{"event":"summary","cards":[{"card":"/dev/rshim0","serial":"MT1","outcome":"ready",
            "exit_status":0,"message":null,"seconds":2.5},{"outcome":"x"}]}"#;
        let Some(Event::Summary(rows)) = event(summary) else { panic!("a summary") };
        assert_eq!((rows[0].card.as_deref(), rows[0].exit_status, rows[0].seconds), (Some("/dev/rshim0"), 0, 2.5));
        assert_eq!((rows[1].outcome.as_str(), rows[1].exit_status), ("x", 1), "what is missing is no success");
        for none in ["", "Last login: today", "[]", "{}", r#"{"event":"summary"}"#, r#"{"event":"summary","cards":[]}"#]
        {
            assert_eq!(event(none), None, "{none}");
        }
        let refused = r#"{"outcome":"refused","exit_status":2,"message":"no cards"}"#;
        assert_eq!(event(refused), Some(Event::Refused("no cards".into())));
        let stage = r#"{"event":"stage","card":"/dev/rshim0","stage":"writing"}"#;
        let Some(Event::Other(value)) = event(stage) else { panic!("an event") };
        assert_eq!(line_of(&value).as_deref(), Some("/dev/rshim0: writing"));
    }

    #[test]
    fn endless_line_of_a_host_is_an_error() {
        let mut long = BufReader::new(io::repeat(b'x'));
        assert!(read_line(&mut long).is_err());
        let mut short = BufReader::new(&b"a\r\nb"[..]);
        let mut next = || read_line(&mut short).expect("short");
        assert_eq!((next(), next(), next()), (Some("a".into()), Some("b".into()), None));
    }
}
