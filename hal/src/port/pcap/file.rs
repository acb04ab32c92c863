//! Captures in files, and in anything else that can be written to.

use super::PcapSink;
use std::io::{self, Write};

/// Writes a capture to a [`Write`]r. After an error nothing more is written, so the capture ends with a whole block if
/// the writer writes all or nothing.
#[derive(Debug)]
pub struct IoSink<W> {
    writer: W,
    error: Option<io::Error>,
}

impl<W: Write> IoSink<W> {
    /// Write to `writer`; it should be buffered, as a block is written in parts.
    pub const fn new(writer: W) -> Self {
        Self { writer, error: None }
    }

    /// Return the error that has ended the capture, if there is one.
    pub const fn error(&self) -> Option<&io::Error> {
        self.error.as_ref()
    }

    /// Flush, and return the writer.
    ///
    /// # Errors
    /// The first error of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush();
        self.error.map_or(Ok(self.writer), Err)
    }

    fn try_to(&mut self, action: impl FnOnce(&mut W) -> io::Result<()>) {
        if self.error.is_none() {
            self.error = action(&mut self.writer).err();
        }
    }
}

impl<W: Write> PcapSink for IoSink<W> {
    fn write(&mut self, parts: &[&[u8]]) {
        self.try_to(|writer| parts.iter().try_for_each(|part| writer.write_all(part)));
    }

    fn flush(&mut self) {
        self.try_to(W::flush);
    }
}
