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
use sumac_firmware::payload::{self, Payload};

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

/// The payload of a stream for a card's slots, and the manifest that describes it.
#[derive(Debug)]
pub(crate) struct SlotImage {
    /// The stream's manifest.
    pub(crate) manifest: Manifest,
    /// As it is in the stream.
    pub(crate) sealed: Vec<u8>,
    /// The payload, in memory.
    pub(crate) payload: Payload,
}

impl SlotImage {
    /// Build it from a stream whose manifest is trusted. `without` says what that means where the stream has none.
    pub(crate) fn build(
        file: &ImageFile,
        path: &Path,
        trust: Trust<'_>,
        without: &'static str,
    ) -> Result<Self, Failure> {
        let mut sealed = Vec::new();
        let report = scan(file.stream()?, Policy::Strict, |entry, piece| {
            if entry.header.name == MANIFEST_IMAGE && sealed.len() <= ENVELOPE_MAX_BYTES {
                sealed.extend_from_slice(piece);
            }
            Ok(())
        });
        let report = report.map_err(|error| file.failure(error))?;
        let advice = |error: anyhow::Error| file.failure(error.context(without));
        if sealed.is_empty() {
            return Err(advice(anyhow!(ManifestError::Missing)));
        }
        let manifest = envelope::open::<Manifest>(&sealed, trust).map_err(|error| file.failure(error))?;
        let offer = manifest.offer().map_err(|error| advice(anyhow!(error)))?;
        let [kernel, initramfs] = payload::images(path, &report).map_err(|error| advice(anyhow!(error)))?;
        let payload = payload::build(&kernel, &initramfs).map_err(|error| advice(anyhow!(error)))?;
        if (payload.len_bytes, payload.sha256) != (offer.len_bytes, offer.sha256) {
            return Err(advice(anyhow!(
                "the payload differs from the manifest's: build the stream again, with this version"
            )));
        }
        Ok(Self { manifest, sealed, payload })
    }
}

/// Open the payload of a stream for the card's slots, with what precedes it behind the stream. The signature is checked
/// with the stream.
pub(crate) fn payload(path: &Path) -> Result<impl Read + use<>, Failure> {
    let file = ImageFile::open(path)?;
    let image = SlotImage::build(&file, path, Trust::AnySigner, "cannot be installed (--ram runs it from memory)")?;
    let head = sumac_firmware::tail::emit(&image.sealed, image.payload.len_bytes);
    // Of whole words, as its length is.
    Ok(Cursor::new(head.map_err(|error| file.failure(error))?).chain(image.payload.file))
}
