//! Tables that are printed row by row, within a time, whatever becomes of single rows.

use std::io::Write;
use std::time::{Duration, Instant};
use sumac::gpu::GpuError;

/// Where rows go.
pub(super) struct Out {
    until: Instant,
    /// Of a rehearsal no figure is printed.
    is_rehearsal: bool,
    failed: usize,
    left_out: usize,
}

impl Out {
    /// Print rows that begin within `limit`.
    pub(super) fn new(limit: Duration) -> Self {
        Self { until: Instant::now() + limit, is_rehearsal: false, failed: 0, left_out: 0 }
    }

    /// Print no row.
    pub(super) fn rehearsal() -> Self {
        Self { is_rehearsal: true, ..Self::new(Duration::from_secs(3600)) }
    }

    /// Return how many rows failed.
    pub(super) const fn failed(&self) -> usize {
        self.failed
    }

    /// Return how many rows there was no time or no room for.
    pub(super) const fn left_out(&self) -> usize {
        self.left_out
    }

    /// Tell whether the time is up.
    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    pub(super) fn head(&self, columns: &[&str]) {
        self.line(&format!("\n| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len())));
    }

    pub(super) fn note(&self, words: &str) {
        self.line(&format!("\n{words}"));
    }

    /// Measure and print a row: what it is called, what it is about, and its figures, or why there are none.
    pub(super) fn row(
        &mut self,
        name: &str,
        about: &[String],
        measure: impl FnOnce() -> Result<Vec<String>, GpuError>,
    ) {
        let cells: Vec<&str> = std::iter::once(name).chain(about.iter().map(String::as_str)).collect();
        let cells = cells.join(" | ");
        if self.is_late() {
            self.left_out += 1;
            self.line(&format!("| {cells} | left out: the section's time is up |"));
            return;
        }
        match measure() {
            Ok(figures) => self.line(&format!("| {cells} | {} |", figures.join(" | "))),
            Err(error @ (GpuError::OutOfMemory { .. } | GpuError::Kernel { .. })) => {
                self.left_out += 1;
                self.line(&format!("| {cells} | left out: {error} |"));
            }
            Err(error) => {
                self.failed += 1;
                eprintln!("{cells}: {error}");
                self.line(&format!("| {cells} | FAILED: {error} |"));
            }
        }
    }

    fn line(&self, line: &str) {
        if self.is_rehearsal {
            return;
        }
        println!("{line}");
        // Whoever ends this process must not take the rows that there are with it.
        let _ = std::io::stdout().flush();
    }
}
