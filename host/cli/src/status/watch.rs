//! `sumac status --watch`: one report after another until a signal.
//!
//! Reports are requested on a thread of their own, so that Ctrl-C ends the command at once even while a controller does
//! not answer. The first request must succeed; later failures are shown, because the controller may come back.

use super::rates::Sample;
use super::{json, text};
use crate::exit::Failure;
use anyhow::Context;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, SystemTime};
use sumac::controller::{ClientError, ControllerAddr, status};

enum Event {
    Sample(Result<Sample, ClientError>),
    /// The command is to end.
    Signal,
}

/// How reports follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Style {
    /// Each replaces the one before.
    Redraw,
    /// Each follows the one before, below a line with the time.
    Append,
    /// One JSON object per line.
    Json,
}

/// Print a report every `interval` until a signal, which is how the command is meant to end.
pub(super) fn run(controller: ControllerAddr, interval: Duration, json: bool) -> Result<(), Failure> {
    let style = match json {
        true => Style::Json,
        false if io::stdout().is_terminal() => Style::Redraw,
        false => Style::Append,
    };
    let (sender, events) = channel();
    start(&sender, controller, interval).context("cannot start a thread").map_err(Failure::Run)?;
    drop(sender);
    show(&events, style, &mut io::stdout())
}

/// Start the threads that wait for signals and request reports.
fn start(sender: &Sender<Event>, controller: ControllerAddr, interval: Duration) -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    let interrupted = sender.clone();
    thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_some() {
            // If the receiver is gone, the command is ending.
            let _ = interrupted.send(Event::Signal);
        }
    })?;
    let samples = sender.clone();
    thread::Builder::new().name("reports".into()).spawn(move || {
        while samples.send(Event::Sample(status(controller.clone()).map(Sample::new))).is_ok() {
            thread::sleep(interval);
        }
    })?;
    Ok(())
}

/// Print samples as they arrive.
fn show(events: &Receiver<Event>, style: Style, out: &mut impl Write) -> Result<(), Failure> {
    let mut before: Option<Sample> = None;
    let mut is_first = true;
    // Both threads run until the command ends.
    while let Ok(Event::Sample(sample)) = events.recv() {
        match sample {
            Ok(sample) => {
                let rates = before.as_ref().map(|before| sample.rates_since(before));
                let mut frame = Vec::new();
                match style {
                    Style::Json => {
                        serde_json::to_writer(&mut frame, &json::value(&sample, rates.as_ref())?)
                            .map_err(io::Error::from)?;
                        writeln!(frame)?;
                    }
                    Style::Redraw | Style::Append => {
                        writeln!(frame, "--- {} UTC", time_of_day(SystemTime::now()))?;
                        text::write_report(&mut frame, &sample.report, rates.as_ref())?;
                    }
                }
                draw(out, style, &frame)?;
                before = Some(sample);
            }
            Err(error) if is_first => return Err(Failure::run(error)),
            Err(error) => {
                message!("{}: {error}", time_of_day(SystemTime::now()));
                // Rates across an outage would be those of the time before it.
                before = None;
            }
        }
        is_first = false;
    }
    Ok(())
}

/// Write a frame at once, so that a terminal shows no half one.
fn draw(out: &mut impl Write, style: Style, frame: &[u8]) -> io::Result<()> {
    if style == Style::Redraw {
        // Go to the top left, and erase what the frame before has left: to the end of each line, and below the last.
        let mut redrawn = b"\x1b[H".to_vec();
        for line in frame.split_inclusive(|byte| *byte == b'\n') {
            redrawn.extend_from_slice(line.strip_suffix(b"\n").unwrap_or(line));
            redrawn.extend_from_slice(b"\x1b[K\n");
        }
        redrawn.extend_from_slice(b"\x1b[J");
        out.write_all(&redrawn)?;
    } else {
        out.write_all(frame)?;
    }
    out.flush()
}

/// Return the time of day in UTC, as in 21:04:59.
fn time_of_day(now: SystemTime) -> String {
    let seconds = now.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    format!("{:02}:{:02}:{:02}", seconds / 3600 % 24, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::super::text::tests::{device, report};
    use super::*;
    use std::net::SocketAddr;
    use sumac::controller::proto::StatusReport;

    fn shown(style: Style, events: impl IntoIterator<Item = Event>) -> (Result<(), Failure>, String) {
        let (sender, receiver) = channel();
        events.into_iter().for_each(|event| sender.send(event).expect("it listens"));
        drop(sender);
        let mut out = Vec::new();
        let outcome = show(&receiver, style, &mut out);
        (outcome, String::from_utf8(out).expect("UTF-8"))
    }

    fn sample() -> Event {
        Event::Sample(Ok(Sample::new(StatusReport { devices: vec![device("leaf0")], ..report() })))
    }

    fn lost() -> Event {
        let addr = SocketAddr::from(([127, 0, 0, 1], 9));
        Event::Sample(Err(ClientError::Connect { addr, source: io::ErrorKind::ConnectionRefused.into() }))
    }

    #[test]
    fn appended_reports_have_rates_from_the_second_on_until_the_signal() {
        let (outcome, text) = shown(Style::Append, [sample(), sample(), Event::Signal, sample()]);
        assert!(outcome.is_ok());
        assert_eq!((text.matches("--- ").count(), text.matches("per second").count()), (2, 1), "{text}");
        assert!(!text.contains('\x1b'), "{text:?}");
    }

    #[test]
    fn redrawn_report_erases_the_one_before() {
        let (_, text) = shown(Style::Redraw, [sample(), Event::Signal]);
        assert!(text.starts_with("\x1b[H--- ") && text.ends_with("\x1b[J"), "{text:?}");
        assert_eq!(text.matches("\x1b[K\n").count(), text.lines().count() - 1, "{text:?}");
    }

    #[test]
    fn json_has_one_object_per_line() {
        let (_, text) = shown(Style::Json, [sample(), sample(), Event::Signal]);
        let values: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
        assert_eq!(values.len(), 2);
        assert!(values[0]["interval_s"].is_null() && values[1]["interval_s"].is_f64(), "{text}");
    }

    #[test]
    fn controller_must_answer_first_and_may_be_gone_later() {
        assert!(matches!(shown(Style::Append, [lost()]), (Err(Failure::Run(_)), _)));
        let (outcome, text) = shown(Style::Append, [sample(), lost(), sample(), Event::Signal]);
        assert!(outcome.is_ok());
        assert_eq!((text.matches("--- ").count(), text.matches("per second").count()), (2, 0), "{text}");
    }

    #[test]
    fn time_of_day_is_that_of_utc() {
        assert_eq!(time_of_day(SystemTime::UNIX_EPOCH + Duration::from_secs(86_400 * 3 + 3_600 * 21 + 65)), "21:01:05");
    }
}
