//! Timeline of a GPU's streams by its own clock: for viewing in Perfetto or Chrome, and to measure how much
//! communication overlapped with computation.
//!
//! A [`Trace`] records an event before and after each span and reads them when all work is complete, so the host never
//! waits. [`Group::start_trace`](super::Group::start_trace) traces a group's passes; [`Trace::span`] is for streams of
//! producers and consumers.
//!
//! Invariant: the number of spans is bounded ([`SPANS_MAX`]); further ones are counted, not kept.

use super::Gpu;
use super::error::GpuError;
use std::io::{self, Write};

/// Maximum number of spans of a trace.
pub const SPANS_MAX: usize = 1 << 16;

/// Category of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Computation: producers and consumers.
    Compute,
    /// Communication between ranks.
    Communication,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Communication => "communication",
        }
    }
}

/// A trace being recorded.
pub struct Trace<G: Gpu> {
    zero: G::Event,
    spans: Vec<(Label, G::Event, G::Event)>,
    dropped: usize,
}

/// Label of a span: stream, name and category.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Label {
    lane: String,
    name: String,
    kind: Kind,
}

impl<G: Gpu> Trace<G> {
    /// Start a trace; time 0 is when `on` reaches this point.
    ///
    /// # Errors
    /// The driver's error, here and below.
    pub fn new(gpu: &G, on: &G::Stream) -> Result<Self, GpuError> {
        let zero = gpu.timer()?;
        gpu.record(&zero, on)?;
        Ok(Self { zero, spans: Vec::new(), dropped: 0 })
    }

    /// Record what `body` enqueues to `on` as one span, on the line `lane`.
    ///
    /// # Errors
    /// As above, and those of `body`.
    pub fn span(
        &mut self,
        gpu: &G,
        on: &G::Stream,
        (lane, name, kind): (&str, &str, Kind),
        body: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        if self.spans.len() >= SPANS_MAX {
            self.dropped += 1;
            return body();
        }
        let (begin, end) = (gpu.timer()?, gpu.timer()?);
        gpu.record(&begin, on)?;
        body()?;
        gpu.record(&end, on)?;
        self.spans.push((Label { lane: lane.into(), name: name.into(), kind }, begin, end));
        Ok(())
    }

    /// Return whether everything recorded is complete.
    ///
    /// # Errors
    /// As for [`Gpu::is_done`].
    pub fn is_done(&self, gpu: &G) -> Result<bool, GpuError> {
        for (_, _, end) in &self.spans {
            if !gpu.is_done(end)? {
                return Ok(false);
            }
        }
        gpu.is_done(&self.zero)
    }

    /// Read the times.
    ///
    /// # Errors
    /// [`GpuError::Invalid`] if recorded work is not complete; otherwise as above.
    pub fn finish(self, gpu: &G) -> Result<Timeline, GpuError> {
        if !self.is_done(gpu)? {
            return Err(GpuError::Invalid("traced work is still running; wait for it first".into()));
        }
        let mut spans = Vec::with_capacity(self.spans.len());
        for (Label { lane, name, kind }, begin, end) in self.spans {
            let start_us = gpu.elapsed_us(&self.zero, &begin)?;
            spans.push(Span { lane, name, kind, start_us, len_us: gpu.elapsed_us(&begin, &end)?.max(0.0) });
        }
        Ok(Timeline { spans, dropped: self.dropped })
    }
}

/// A recorded span.
#[derive(Debug, Clone, PartialEq)]
pub struct Span {
    /// The line that it belongs to: a stream.
    pub lane: String,
    /// Its name.
    pub name: String,
    /// Its category.
    pub kind: Kind,
    /// Start in microseconds since the start of the trace.
    pub start_us: f64,
    /// Duration in microseconds.
    pub len_us: f64,
}

/// A completed trace.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Timeline {
    /// All spans, in order of enqueueing.
    pub spans: Vec<Span>,
    /// Number of spans that were dropped.
    pub dropped: usize,
}

/// Overlap of computation and communication, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Overlap {
    /// Time with computation.
    pub compute_us: f64,
    /// Time with communication.
    pub communication_us: f64,
    /// Time with both.
    pub both_us: f64,
}

impl Overlap {
    /// Return the fraction of the shorter of the two that overlapped with the other: at most 1.
    pub fn efficiency(&self) -> f64 {
        let most = self.compute_us.min(self.communication_us);
        if most > 0.0 { self.both_us / most } else { 0.0 }
    }
}

impl Timeline {
    /// Return how much communication overlapped with computation.
    pub fn overlap(&self) -> Overlap {
        let (compute, communication) = (self.busy(Kind::Compute), self.busy(Kind::Communication));
        let total = |parts: &[(f64, f64)]| parts.iter().map(|(start, end)| end - start).sum();
        let meet = |&(start, end): &(f64, f64)| {
            compute.iter().map(|&(a, b)| (end.min(b) - start.max(a)).max(0.0)).sum::<f64>()
        };
        Overlap {
            compute_us: total(&compute),
            communication_us: total(&communication),
            both_us: communication.iter().map(meet).sum(),
        }
    }

    /// Return the busy intervals of a category, sorted and disjoint.
    fn busy(&self, kind: Kind) -> Vec<(f64, f64)> {
        let of_kind = self.spans.iter().filter(|span| span.kind == kind);
        let mut all: Vec<(f64, f64)> = of_kind.map(|span| (span.start_us, span.start_us + span.len_us)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut apart: Vec<(f64, f64)> = Vec::new();
        for (start, end) in all {
            match apart.last_mut().filter(|last| start <= last.1) {
                Some(last) => last.1 = last.1.max(end),
                None => apart.push((start, end)),
            }
        }
        apart
    }

    /// Write it in the trace event format of Chrome and Perfetto: complete events, one line for each stream.
    ///
    /// # Errors
    /// Errors of `out`.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut lanes: Vec<&str> = Vec::new();
        for span in &self.spans {
            if !lanes.contains(&span.lane.as_str()) {
                lanes.push(&span.lane);
            }
        }
        writeln!(out, "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"dropped\":{}}},\"traceEvents\":[", self.dropped)?;
        write!(out, "{{\"ph\":\"M\",\"pid\":0,\"name\":\"process_name\",\"args\":{{\"name\":\"GPU\"}}}}")?;
        for (tid, lane) in lanes.iter().enumerate() {
            let name = quoted(lane);
            write!(
                out,
                ",\n{{\"ph\":\"M\",\"pid\":0,\"tid\":{tid},\"name\":\"thread_name\",\"args\":{{\"name\":{name}}}}}"
            )?;
        }
        for span in &self.spans {
            let tid = lanes.iter().position(|lane| *lane == span.lane).unwrap_or(0);
            let (name, kind) = (quoted(&span.name), span.kind.name());
            let (start, len) = (span.start_us, span.len_us);
            write!(out, ",\n{{\"ph\":\"X\",\"pid\":0,\"tid\":{tid},\"name\":{name},\"cat\":\"{kind}\"")?;
            write!(out, ",\"ts\":{start:.3},\"dur\":{len:.3}}}")?;
        }
        writeln!(out, "\n]}}")
    }
}

/// Write a string as JSON.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control < ' ' => quoted.push_str(&format!("\\u{:04x}", control as u32)),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}
