//! `sumac image extract`.

use super::ImageFile;
use super::file::{Output, Outputs, create_folder};
use crate::exit::Failure;
use anyhow::anyhow;
use clap::Args;
use std::io::{self, Write};
use std::path::PathBuf;
use sumac_firmware::bfb::{BfbError, ImageName, Policy, scan};

/// `sumac image extract`.
#[derive(Debug, Args)]
pub(super) struct ExtractArgs {
    /// Boot stream
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Image to extract, as in boot-args-v2; may be repeated [default: all images]
    #[arg(short, long = "name", value_name = "NAME")]
    names: Vec<ImageName>,
    /// Folder for the files
    #[arg(short, long, value_name = "FOLDER", default_value = ".")]
    output: PathBuf,
    /// Prefix of the files' names
    #[arg(short, long, value_name = "TEXT", default_value = "dump-")]
    prefix: String,
}

/// Extract images: all requested ones, or none if the stream is damaged.
pub(super) fn run(args: &ExtractArgs) -> Result<(), Failure> {
    if args.prefix.contains('/') {
        return Err(Failure::Input(anyhow!("--prefix {:?} contains a /; name a folder with --output", args.prefix)));
    }
    let file = ImageFile::open(&args.file)?;
    let outputs = Outputs::new()?;
    create_folder(&args.output)?;
    let mut written: Vec<(ImageName, Output)> = Vec::new();
    let mut refused = None;
    let report = scan(file.stream()?, Policy::Repairable, |entry, piece| {
        let name = entry.header.name;
        if !args.names.is_empty() && !args.names.contains(&name) {
            return Ok(());
        }
        if piece.is_empty() {
            let created = outputs.create(&args.output.join(format!("{}{name}", args.prefix)));
            // The failure is kept aside; this error only ends the scan.
            let output = created.map_err(|failure| {
                refused = Some(failure);
                io::Error::other("cannot write")
            })?;
            written.push((name, output));
        }
        written.last_mut().map_or(Ok(()), |(_, output)| output.write_all(piece))
    });
    let report = match (report, refused) {
        (_, Some(failure)) => return Err(failure),
        (Err(error @ BfbError::Take { .. }), _) => return Err(outputs.failure(Failure::run(error))),
        (report, _) => report.map_err(|error| file.failure(error))?,
    };
    if let Some(missing) = args.names.iter().find(|name| report.find(**name).is_none()) {
        return Err(Failure::Input(anyhow!("{}: no image {missing}", args.file.display())));
    }
    for (name, output) in written {
        output.publish()?;
        writeln!(io::stdout(), "{}", args.output.join(format!("{}{name}", args.prefix)).display())?;
    }
    Ok(())
}
