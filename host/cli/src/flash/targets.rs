//! Several hosts or BMCs at once. What happens to one has no effect on the others.
//!
//! Output has the form of that for several cards ([`super::table`]): lines on stderr and a table on stdout, or one JSON
//! object on stdout for each event as it happens, with the host or BMC as `host` or `bmc`.
//!
//! Invariants: each target is tried once; targets whose turn has not come when a signal arrives are not begun; what a
//! target reports is printed without control characters, which a terminal would obey.

use super::interrupts::Interrupts;
use super::table::emit;
use crate::exit::Failure as Exit;
use serde_json::{Value, json};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;

/// The longest text of a target that is shown, in characters.
const TEXT_MAX_CHARS: usize = 2000;

/// How a card of a target ended, or a target without cards: a line of the table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) card: Option<String>,
    pub(super) serial: Option<String>,
    /// A word, as in the table for several cards.
    pub(super) outcome: String,
    pub(super) exit_status: u8,
    pub(super) message: Option<String>,
    pub(super) seconds: f64,
}

impl Row {
    /// A target that failed as a whole.
    pub(super) fn failed(outcome: &str, exit_status: u8, message: &str, seconds: f64) -> Self {
        let (outcome, message) = (outcome.into(), Some(shown(message)));
        Self { card: None, serial: None, outcome, exit_status, message, seconds }
    }
}

/// What a target's thread sends.
enum Message {
    Event(Value),
    Note(String),
    Ended(Vec<Row>),
}

/// Reports what happens to a target.
#[derive(Debug)]
pub(super) struct Reporter {
    index: usize,
    sender: Sender<(usize, Message)>,
}

impl Reporter {
    /// Report an event: an object with its kind as `event`.
    pub(super) fn event(&self, event: Value) {
        self.send(Message::Event(event));
    }

    /// Report a line of text, which is not shown as JSON.
    pub(super) fn note(&self, text: &str) {
        self.send(Message::Note(shown(text)));
    }

    fn send(&self, message: Message) {
        // The receiver lives until all targets have ended.
        let _ = self.sender.send((self.index, message));
    }
}

/// Work on the targets, at most `parallel` at once, and print what happens. `kind` is the key of a target's label in
/// JSON. `work` returns a row for each card.
pub(super) fn run(
    (kind, labels): (&'static str, &[String]),
    parallel: usize,
    json: bool,
    interrupts: &Interrupts,
    work: impl Fn(usize, &Reporter) -> Vec<Row> + Sync,
) -> Result<(), Exit> {
    let next = AtomicUsize::new(0);
    let (sender, messages) = channel();
    let mut table = Table { kind, labels, json, rows: vec![None; labels.len()], error: None };
    thread::scope(|scope| {
        for _ in 0..labels.len().min(parallel) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                while interrupts.signal().is_none() {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= labels.len() {
                        return;
                    }
                    let reporter = Reporter { index, sender: sender.clone() };
                    reporter.send(Message::Ended(work(index, &reporter)));
                }
            });
        }
        drop(sender);
        for (index, message) in messages {
            table.show(index, message);
        }
    });
    table.finish()?;
    match interrupts.signal() {
        _ if table.is_done() => Ok(()),
        Some(signal) => Err(Exit::Signal(signal)),
        None => Err(Exit::Reported),
    }
}

/// The targets and how far they are.
struct Table<'a> {
    kind: &'static str,
    labels: &'a [String],
    json: bool,
    rows: Vec<Option<Vec<Row>>>,
    /// The first error of writing to stdout.
    error: Option<io::Error>,
}

impl Table<'_> {
    fn show(&mut self, index: usize, message: Message) {
        match message {
            Message::Event(event) => self.emit(Some(index), event),
            Message::Note(text) => note!("{}: {text}", self.labels[index]),
            Message::Ended(rows) => {
                for row in rows.iter().filter(|row| row.exit_status != 0) {
                    let message = row.message.as_deref().unwrap_or(&row.outcome);
                    let card = row.card.as_ref().map_or_else(String::new, |card| format!("{card}: "));
                    message!("error: {}: {card}{message}", self.labels[index]);
                }
                self.rows[index] = Some(rows);
            }
        }
    }

    /// Return each row with the label of its target.
    fn rows(&self) -> impl Iterator<Item = (&str, Row)> {
        let not_started = || vec![Row::failed("not-started", 1, "interrupted before its turn", 0.0)];
        let all = self.labels.iter().zip(&self.rows);
        all.flat_map(move |(label, rows)| {
            rows.clone().unwrap_or_else(not_started).into_iter().map(move |row| (label.as_str(), row))
        })
    }

    fn is_done(&self) -> bool {
        self.rows().all(|(_, row)| row.exit_status == 0)
    }

    /// Print the table, or the last event.
    fn finish(&mut self) -> io::Result<()> {
        let of = |row: &Row| match (row.outcome.as_str(), row.exit_status) {
            ("not-started", _) => 3,
            ("unchanged", _) => 1,
            (_, 0) => 0,
            _ => 2,
        };
        let mut counts = [0; 4];
        self.rows().for_each(|(_, row)| counts[of(&row)] += 1);
        let [done, unchanged, failed, not_started] = counts;
        if self.json {
            let counts = json!({ "done": done, "unchanged": unchanged, "failed": failed, "not_started": not_started });
            let card = |(label, row): (&str, Row)| {
                let Row { card, serial, outcome, exit_status, message, seconds } = row;
                json!({ self.kind: label, "card": card, "serial": serial, "outcome": outcome,
                    "exit_status": exit_status, "message": message, "seconds": seconds })
            };
            let cards: Vec<_> = self.rows().map(card).collect();
            self.emit(None, json!({ "event": "summary", "counts": counts, "cards": cards }));
            return self.error.take().map_or(Ok(()), Err);
        }
        let mut out = io::stdout().lock();
        self.write(&mut out)?;
        writeln!(out, "{done} done, {unchanged} unchanged, {failed} failed, {not_started} not started")?;
        out.flush()
    }

    /// Print a line for each row.
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let cells = |label: &str, row: &Row| {
            let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
            [label.to_owned(), text(&row.card), text(&row.serial), row.outcome.clone()]
        };
        let lines: Vec<_> = self.rows().map(|(label, row)| (cells(label, &row), row)).collect();
        let head = [self.kind, "card", "serial", "outcome"].map(str::to_owned);
        let all = || lines.iter().map(|(cells, _)| cells).chain([&head]);
        let width = |column: usize| all().map(|cells| cells[column].chars().count()).max().unwrap_or(0);
        let widths = [0, 1, 2, 3].map(width);
        let joined = |cells: &[String; 4]| {
            let cells = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
            cells.collect::<Vec<_>>().join("  ")
        };
        writeln!(out, "{} {:>7}", joined(&head), "seconds")?;
        for (cells, row) in &lines {
            let line = format!("{} {:>7.0}", joined(cells), row.seconds);
            match &row.message {
                Some(message) => writeln!(out, "{line}  {message}")?,
                None => writeln!(out, "{line}")?,
            }
        }
        Ok(())
    }

    /// Print an event as JSON, if that is wanted.
    fn emit(&mut self, index: Option<usize>, mut value: Value) {
        if !self.json || self.error.is_some() {
            return;
        }
        if let (Value::Object(fields), Some(index)) = (&mut value, index) {
            fields.insert(self.kind.into(), self.labels[index].clone().into());
        }
        self.error = emit(value).err();
    }
}

/// Return a target's text in a form that may be printed: one line, of limited length.
pub(super) fn shown(text: &str) -> String {
    let plain = |character: char| if character.is_control() { ' ' } else { character };
    let text: String = text.chars().take(TEXT_MAX_CHARS).map(plain).collect();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_target_is_printed_without_what_a_terminal_obeys() {
        assert_eq!(shown("a\x1b[2J\r\nb\n"), "a [2J  b");
        assert_eq!(shown(&"x".repeat(1 << 20)).len(), TEXT_MAX_CHARS);
    }

    #[test]
    fn table_has_a_line_for_each_card_of_a_host_and_for_a_host_without() {
        let row = |card: &str| Row {
            card: Some(card.into()),
            serial: Some("MT1".into()),
            outcome: "ready".into(),
            exit_status: 0,
            message: None,
            seconds: 12.4,
        };
        let labels = ["h1".to_owned(), "host2".to_owned(), "h3".to_owned()];
        let rows = vec![
            Some(vec![row("rshim0"), row("rshim11")]),
            Some(vec![Row::failed("unreachable", 1, "no\troute", 3.0)]),
            None,
        ];
        let table = Table { kind: "host", labels: &labels, json: false, rows, error: None };
        let mut out = Vec::new();
        table.write(&mut out).expect("memory");
        let expected = "\
host   card     serial  outcome     seconds
h1     rshim0   MT1     ready            12
h1     rshim11  MT1     ready            12
host2  -        -       unreachable       3  no route
h3     -        -       not-started       0  interrupted before its turn
";
        assert_eq!(String::from_utf8_lossy(&out), expected);
        assert!(!table.is_done());
    }
}
