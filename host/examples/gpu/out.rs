//! Tables that are printed row by row within a time limit. A failed row does not stop the others.

use std::io::Write;
use std::time::{Duration, Instant};
use sumac::gpu::GpuError;

/// The output of a run.
pub(super) struct Out {
    until: Instant,
    /// A dry run prints no figures.
    is_dry_run: bool,
    failed: usize,
    left_out: usize,
}

impl Out {
    /// Print rows that begin within `limit`.
    pub(super) fn new(limit: Duration) -> Self {
        Self { until: Instant::now() + limit, is_dry_run: false, failed: 0, left_out: 0 }
    }

    /// Print nothing.
    pub(super) fn dry_run() -> Self {
        Self { is_dry_run: true, ..Self::new(Duration::from_secs(3600)) }
    }

    /// Return the number of failed rows.
    pub(super) const fn failed(&self) -> usize {
        self.failed
    }

    /// Return the number of rows that were left out for lack of time or memory.
    pub(super) const fn left_out(&self) -> usize {
        self.left_out
    }

    /// Return whether the time limit has passed.
    pub(super) fn is_late(&self) -> bool {
        Instant::now() >= self.until
    }

    pub(super) fn head(&self, columns: &[&str]) {
        self.line(&format!("\n| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len())));
    }

    pub(super) fn note(&self, text: &str) {
        self.line(&format!("\n{text}"));
    }

    /// Measure and print a row: its name, its parameters, and its figures or why there are none.
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
            Err(error @ GpuError::OutOfMemory { .. }) => {
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
        if self.is_dry_run {
            return;
        }
        println!("{line}");
        // Rows must survive if the process is killed.
        let _ = std::io::stdout().flush();
    }
}
