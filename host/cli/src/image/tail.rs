//! `sumac image tail`: what `sumac flash` sends behind a boot stream that is to be installed.

use super::file::{ImageFile, Outputs};
use crate::exit::Failure;
use anyhow::anyhow;
use clap::Args;
use std::io::{self, Cursor, Read};
use std::path::{Path, PathBuf};
use sumac_firmware::bfb::{Policy, scan};
use sumac_firmware::manifest::envelope::{self, ENVELOPE_MAX_BYTES};
use sumac_firmware::manifest::{MANIFEST_IMAGE, Manifest, ManifestError, Trust};
use sumac_firmware::payload;

/// `sumac image tail`.
#[derive(Debug, Args)]
pub(super) struct TailArgs {
    /// Boot stream
    #[arg(value_name = "FILE")]
    image: PathBuf,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Write the tail of a stream.
pub(super) fn run(args: &TailArgs) -> Result<(), Failure> {
    let outputs = Outputs::new()?;
    let mut output = outputs.create(&args.output)?;
    io::copy(&mut payload(&args.image)?, &mut output).map_err(|error| outputs.failure(Failure::run(error)))?;
    output.publish()
}

/// Open the payload of a stream for the card's slots, with what precedes it behind the stream. The signature is checked
/// with the stream.
pub(crate) fn payload(path: &Path) -> Result<impl Read + use<>, Failure> {
    let file = ImageFile::open(path)?;
    let mut info = Vec::new();
    let report = scan(file.stream()?, Policy::Strict, |entry, piece| {
        if entry.header.name == MANIFEST_IMAGE && info.len() <= ENVELOPE_MAX_BYTES {
            info.extend_from_slice(piece);
        }
        Ok(())
    });
    let report = report.map_err(|error| file.failure(error))?;
    let advice = |error: anyhow::Error| file.failure(error.context("cannot be installed (--ram runs it from memory)"));
    if info.is_empty() {
        return Err(advice(anyhow!(ManifestError::Missing)));
    }
    let manifest = envelope::open::<Manifest>(&info, Trust::AnySigner).map_err(|error| file.failure(error))?;
    let offer = manifest.offer().map_err(|error| advice(anyhow!(error)))?;
    let [kernel, initramfs] = payload::images(path, &report).map_err(|error| advice(anyhow!(error)))?;
    let built = payload::build(&kernel, &initramfs).map_err(|error| advice(anyhow!(error)))?;
    if (built.len_bytes, built.sha256) != (offer.len_bytes, offer.sha256) {
        return Err(advice(anyhow!(
            "the payload differs from the manifest's: build the stream again, with this version"
        )));
    }
    let head = sumac_firmware::tail::emit(&info, built.len_bytes).map_err(|error| file.failure(error))?;
    // Of whole words, as its length is.
    Ok(Cursor::new(head).chain(built.file))
}
