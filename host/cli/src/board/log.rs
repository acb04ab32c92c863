//! `sumac log`: decode a board's log frames (defmt).
//!
//! The frames refer to strings in the image that wrote them, so decoding needs that image. Frames of another image
//! decode to wrong text or not at all.

use crate::exit::Failure;
use anyhow::{Context, anyhow};
use clap::Args;
use defmt_decoder::{DecodeError, Location, Locations, StreamDecoder, Table};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// `sumac log`.
#[derive(Debug, Args)]
pub(crate) struct LogArgs {
    /// Image that wrote the log
    #[arg(long, value_name = "FILE")]
    elf: PathBuf,
    /// Output of the board's serial port; `-` reads stdin to its end
    #[arg(value_name = "FILE", default_value = "-")]
    input: PathBuf,
}

/// Decode and print a log.
pub(crate) fn run(args: &LogArgs) -> Result<(), Failure> {
    let text = LogText::of_image(&args.elf).map_err(Failure::Input)?;
    let from: Box<dyn Read> = match args.input.to_str() {
        Some("-") => Box::new(io::stdin()),
        _ => {
            let name = args.input.display();
            Box::new(File::open(&args.input).with_context(|| format!("cannot read {name}")).map_err(Failure::Input)?)
        }
    };
    text.copy(from, &mut io::stdout().lock())?;
    Ok(())
}

/// The log strings of an image.
pub(crate) struct LogText {
    table: Table,
    locations: Locations,
}

impl LogText {
    /// Read the log strings of an image.
    ///
    /// # Errors
    /// The file cannot be read, or is not an image with log strings.
    pub(crate) fn of_image(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let elf = fs::read(path).with_context(|| format!("cannot read {name}"))?;
        let table = Table::parse(&elf).with_context(|| format!("{name} is not an image with a log"))?;
        let table = table.filter(|table| !table.is_empty());
        let table =
            table.ok_or_else(|| anyhow!("{name} has no log strings; name the image as it was built, not stripped"))?;
        let locations =
            table.get_locations(&elf).with_context(|| format!("{name}: cannot read its source locations"))?;
        Ok(Self { table, locations })
    }

    /// Decode frames to lines until the input ends.
    ///
    /// # Errors
    /// Reading or writing fails.
    pub(crate) fn copy(&self, mut from: impl Read, to: &mut impl Write) -> io::Result<()> {
        let mut decoder = self.table.new_stream_decoder();
        let mut bytes = [0; 4096];
        loop {
            match from.read(&mut bytes) {
                Ok(0) => return to.flush(),
                Ok(len) => decoder.received(&bytes[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            self.print(&mut *decoder, to)?;
            to.flush()?;
        }
    }

    /// Print all complete frames.
    fn print(&self, decoder: &mut dyn StreamDecoder, to: &mut impl Write) -> io::Result<()> {
        loop {
            match decoder.decode() {
                Ok(frame) => {
                    let time = frame.display_timestamp().map(|time| time.to_string()).unwrap_or_default();
                    let level = frame.level().map_or("print", |level| level.as_str());
                    let place = self.locations.get(&frame.index()).map(place).unwrap_or_default();
                    writeln!(to, "{time:>12} {level:<5} {}{place}", frame.display_message())?;
                }
                Err(DecodeError::UnexpectedEof) => return Ok(()),
                // Frames end with a zero, so decoding resumes at the next one.
                Err(DecodeError::Malformed) => writeln!(to, "             ----- not a frame of this image")?,
            }
        }
    }
}

fn place(location: &Location) -> String {
    let file = location.file.to_string_lossy();
    // Only the path below the board's folder: the rest depends on where it was built.
    let short = file.rfind("src/").map_or(&*file, |at| &file[at..]);
    format!("  ({short}:{})", location.line)
}
