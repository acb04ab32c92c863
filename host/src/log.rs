//! Log events, and what prints them in programs that have no subscriber.
//!
//! Events go to the `tracing` subscriber of the program. Where it has none, this module prints them to stderr:
//! warnings and errors, or what [`VARIABLE`] selects. Most users of a library set no subscriber, and would otherwise
//! not learn why a job runs without a tree, or that it lost a device.
//!
//! Nothing is installed that the program or another library could want: there is no default subscriber for the process
//! or for a thread. An event that finds no subscriber enters this module's own for as long as it takes to print it. So
//! a program may set a subscriber at any time, before or after it joins, and from then on nothing is printed here. Two
//! copies of this crate in a process print independently, in whole lines.
//!
//! Limit: `tracing` cannot tell that its `log` feature passes events on to a logger of the `log` crate. Such a program
//! sets `SUMAC_LOG=off`.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::OnceLock;
use tracing::dispatcher::{self, Dispatch};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{NoSubscriber, Subscriber};
use tracing::{Event, Level, Metadata};

/// The variable that selects events: a level (`off`, `error`, `warn`, `info`, `debug`, `trace`), or a comma-separated
/// list of levels and of `TARGET=LEVEL`, as in `warn,sumac::comm=debug`. The longest target that matches counts.
const VARIABLE: &str = "SUMAC_LOG";

/// What is printed unless the variable says otherwise: one line for each fault that changes what the program gets.
const DEFAULT: LevelFilter = LevelFilter::WARN;

macro_rules! log_error { ($($event:tt)*) => { $crate::log::emit(|| tracing::error!($($event)*)) }; }
macro_rules! log_warn { ($($event:tt)*) => { $crate::log::emit(|| tracing::warn!($($event)*)) }; }
macro_rules! log_info { ($($event:tt)*) => { $crate::log::emit(|| tracing::info!($($event)*)) }; }
macro_rules! log_debug { ($($event:tt)*) => { $crate::log::emit(|| tracing::debug!($($event)*)) }; }

pub(crate) use {log_debug as debug, log_error as error, log_info as info, log_warn as warn};

/// Run `event`, which logs one event, so that the program's subscriber gets it or else the printer.
pub(crate) fn emit(event: impl FnOnce()) {
    static PRINTER: OnceLock<Option<Dispatch>> = OnceLock::new();
    let has_subscriber = dispatcher::get_default(|current| !current.is::<NoSubscriber>());
    if has_subscriber {
        return event();
    }
    let printer = PRINTER.get_or_init(|| {
        let value = std::env::var(VARIABLE).unwrap_or_default();
        let filter = Filter::parse(&value).unwrap_or_else(|directive| {
            print(format_args!("sumac: warning: {VARIABLE}: {directive:?} is not LEVEL or TARGET=LEVEL"));
            Filter::default()
        });
        (filter.max() != LevelFilter::OFF).then(|| Dispatch::new(Printer(filter)))
    });
    if let Some(printer) = printer {
        dispatcher::with_default(printer, event);
    }
}

/// Print a line to stderr, whole. There is no other place to report a failure.
fn print(line: fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Which events are printed.
#[derive(Debug, PartialEq)]
struct Filter {
    /// Targets without their own level.
    others: LevelFilter,
    targets: Vec<(String, LevelFilter)>,
}

impl Default for Filter {
    fn default() -> Self {
        Self { others: DEFAULT, targets: Vec::new() }
    }
}

impl Filter {
    /// Parse the variable's value; empty is the default.
    ///
    /// # Errors
    /// The part that is invalid.
    fn parse(text: &str) -> Result<Self, String> {
        let mut filter = Self::default();
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let mut has_default = false;
        for part in parts {
            let (target, level) = part.split_once('=').map_or((None, part), |(target, level)| (Some(target), level));
            let level: LevelFilter = level.parse().map_err(|_| part.to_owned())?;
            match target {
                Some(target) => filter.targets.push((target.to_owned(), level)),
                None => (filter.others, has_default) = (level, true),
            }
        }
        if !has_default && !filter.targets.is_empty() {
            filter.others = LevelFilter::OFF;
        }
        Ok(filter)
    }

    fn of(&self, target: &str) -> LevelFilter {
        let is_within =
            |prefix: &str| target.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"));
        let matching = self.targets.iter().filter(|(prefix, _)| is_within(prefix));
        matching.max_by_key(|(prefix, _)| prefix.len()).map_or(self.others, |&(_, level)| level)
    }

    fn max(&self) -> LevelFilter {
        self.targets.iter().map(|&(_, level)| level).fold(self.others, LevelFilter::max)
    }
}

/// Prints events; the crate has no spans.
struct Printer(Filter);

impl Subscriber for Printer {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && *metadata.level() <= self.0.of(metadata.target())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0.max())
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        print(format_args!("{}", line(event)));
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Return an event as a line: `sumac: warning: MESSAGE (FIELD=VALUE, ...)`; below warnings with the target.
fn line(event: &Event<'_>) -> String {
    let (level, target) = (*event.metadata().level(), event.metadata().target());
    let mut text = Text::default();
    event.record(&mut text);
    let origin = if level > Level::WARN { format!("{target}: ") } else { String::new() };
    let fields = if text.fields.is_empty() { String::new() } else { format!(" ({})", text.fields) };
    let name = if level == Level::WARN { "warning".into() } else { level.to_string().to_lowercase() };
    one_line(&format!("sumac: {name}: {origin}{}{fields}", text.message))
}

/// Escape control characters: texts may come from peers, and must neither break the line nor reach a terminal as
/// commands.
fn one_line(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut line, c| {
        if c.is_control() {
            line.extend(c.escape_default())
        } else {
            line.push(c)
        }
        line
    })
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Text {
    fn add(&mut self, name: &str, value: fmt::Arguments<'_>) {
        let separator = if self.fields.is_empty() { "" } else { ", " };
        // Writing to a string cannot fail.
        let _ = match name {
            "message" => self.message.write_fmt(value),
            _ => write!(self.fields, "{separator}{name}={value}"),
        };
    }
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field.name(), format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field.name(), format_args!("{value}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_takes_the_longest_target() {
        let filter = Filter::parse("info, sumac::comm=debug,sumac::comm::join=off").expect("valid");
        assert_eq!(filter.of("sumac::select"), LevelFilter::INFO);
        assert_eq!(filter.of("sumac::comm"), LevelFilter::DEBUG);
        assert_eq!(filter.of("sumac::commerce"), LevelFilter::INFO);
        assert_eq!(filter.of("sumac::comm::join::x"), LevelFilter::OFF);
        assert_eq!(filter.max(), LevelFilter::DEBUG);
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(one_line("why=\u{1b}[2J\nsumac: \u{e9}"), "why=\\u{1b}[2J\\nsumac: \u{e9}");
    }

    #[test]
    fn unset_filter_is_warnings_and_targets_alone_are_all() {
        assert_eq!(Filter::parse(""), Ok(Filter::default()));
        assert_eq!(Filter::default().of("sumac"), LevelFilter::WARN);
        assert_eq!(Filter::parse("sumac::comm=info").expect("valid").of("sumac::select"), LevelFilter::OFF);
        assert_eq!(Filter::parse("off").expect("valid").max(), LevelFilter::OFF);
        assert_eq!(Filter::parse("warn,sumac=loud"), Err("sumac=loud".into()));
    }
}
