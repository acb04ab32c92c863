//! `sumac log`: a board's log frames (defmt) as text.
//!
//! The texts are not in the frames but in the image that wrote them, so that is needed; a frame of another image makes
//! nonsense, or none.

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
    /// The image that wrote the log
    #[arg(long, value_name = "FILE")]
    elf: PathBuf,
    /// What the board's serial port said; `-` for stdin, which is read until it ends
    #[arg(value_name = "FILE", default_value = "-")]
    input: PathBuf,
}

/// Print a log.
pub(crate) fn run(args: &LogArgs) -> Result<(), Failure> {
    let text = LogText::of_image(&args.elf).map_err(Failure::Input)?;
    let from: Box<dyn Read> = match args.input.to_str() {
        Some("-") => Box::new(io::stdin()),
        _ => {
            let name = args.input.display();
            Box::new(File::open(&args.input).with_context(|| format!("can't read {name}")).map_err(Failure::Input)?)
        }
    };
    text.copy(from, &mut io::stdout().lock())?;
    Ok(())
}

/// The texts of an image.
pub(crate) struct LogText {
    table: Table,
    locations: Locations,
}

impl LogText {
    /// Read the texts of an image.
    ///
    /// # Errors
    /// A file that can't be read, or that is no image with a log.
    pub(crate) fn of_image(path: &Path) -> anyhow::Result<Self> {
        let name = path.display();
        let elf = fs::read(path).with_context(|| format!("can't read {name}"))?;
        let table = Table::parse(&elf).with_context(|| format!("{name} is no image that logs"))?;
        let table = table.filter(|table| !table.is_empty());
        let table = table.ok_or_else(|| anyhow!("{name} has no texts of a log; name the image as it was built"))?;
        let locations = table.get_locations(&elf).with_context(|| format!("{name}: where its texts come from"))?;
        Ok(Self { table, locations })
    }

    /// Decode what comes, line by line, until it ends.
    ///
    /// # Errors
    /// What reading or writing said.
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

    /// Print the frames that are whole.
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
                // Frames end in a zero, so the next one is found again.
                Err(DecodeError::Malformed) => {
                    writeln!(to, "             ----- something that is no frame of this image")?
                }
            }
        }
    }
}

fn place(location: &Location) -> String {
    let file = location.file.to_string_lossy();
    // From the board's folder on: how long the way there is depends on who built it.
    let short = file.rfind("src/").map_or(&*file, |at| &file[at..]);
    format!("  ({short}:{})", location.line)
}
