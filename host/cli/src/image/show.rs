//! `sumac image list` and `sumac image verify`.

use super::{ImageFile, read_public_key};
use crate::exit::Failure;
use clap::Args;
use serde::Serialize;
use std::io::{self, Write};
use std::path::PathBuf;
use sumac_firmware::bfb::{Generation, Policy};
use sumac_firmware::manifest::{self, Checked, Trust, envelope, hex};

/// `sumac image list`.
#[derive(Debug, Args)]
pub(super) struct ListArgs {
    /// Boot stream
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// `sumac image verify`.
#[derive(Debug, Args)]
pub(super) struct VerifyArgs {
    /// Boot stream
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Public key (PEM) that must have signed the manifest; without it, only the digests in the manifest are verified
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

/// The JSON form of `image list`.
#[derive(Serialize)]
struct Listing {
    form: &'static str,
    len_bytes: u64,
    sha256: String,
    boots: Vec<&'static str>,
    images: Vec<Image>,
    manifest: Option<manifest::Manifest>,
    notes: Vec<String>,
}

#[derive(Serialize)]
struct Image {
    name: String,
    id: u8,
    version: u8,
    offset: u64,
    len_bytes: u32,
    crc32: String,
    next_version: u8,
    following: String,
}

/// List the images in a stream.
pub(super) fn list(args: &ListArgs) -> Result<(), Failure> {
    let file = ImageFile::open(&args.file)?;
    let checked = manifest::check(file.stream()?, Policy::Repairable, Trust::AnySigner);
    let checked = checked.map_err(|error| file.failure(error))?;
    let listing = Listing::new(checked, file.is_emmc);
    let mut out = io::stdout().lock();
    if args.json {
        serde_json::to_writer(&mut out, &listing).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        print(&listing, &mut out)?;
    }
    Ok(out.flush()?)
}

impl Listing {
    fn new(checked: Checked, is_emmc: bool) -> Self {
        let boots = Generation::ALL.into_iter().filter(|card| checked.boots(*card)).map(Generation::name).collect();
        let images = checked.report.entries.iter().map(|entry| {
            let header = entry.header;
            Image {
                name: header.name.to_string(),
                id: header.name.id.0,
                version: header.name.version,
                offset: entry.offset,
                len_bytes: header.len_bytes,
                crc32: format!("{:08x}", header.crc),
                next_version: header.next_version,
                following: format!("{:016x}", header.following),
            }
        });
        Self {
            form: if is_emmc { "emmc" } else { "bfb" },
            len_bytes: checked.report.len_bytes,
            sha256: hex(&checked.sha256),
            boots,
            images: images.collect(),
            notes: checked.report.notes.iter().map(ToString::to_string).collect(),
            manifest: checked.manifest,
        }
    }
}

fn print(listing: &Listing, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{:<22} {:>12} {:>12} {:>9}", "image", "offset", "bytes", "crc-32")?;
    for image in &listing.images {
        let Image { name, offset, len_bytes, crc32, .. } = image;
        writeln!(out, "{name:<22} {offset:>12} {len_bytes:>12} {crc32:>9}")?;
    }
    let boots = if listing.boots.is_empty() { "no card on its own".into() } else { listing.boots.join(", ") };
    writeln!(out, "{} bytes ({}), boots {boots}", listing.len_bytes, listing.form)?;
    match &listing.manifest {
        Some(manifest) => {
            let manifest::Manifest { board, version, epoch, .. } = manifest;
            writeln!(
                out,
                "manifest: version {version}, epoch {epoch}, for {board}; digests match, signature not checked"
            )?;
        }
        None => writeln!(out, "no manifest")?,
    }
    listing.notes.iter().try_for_each(|note| writeln!(out, "note: {note}"))
}

/// Verify a stream and print the result.
pub(super) fn verify(args: &VerifyArgs) -> Result<(), Failure> {
    let key = args.key.as_deref().map(read_public_key).transpose()?;
    let file = ImageFile::open(&args.file)?;
    let trust = key.as_ref().map_or(Trust::AnySigner, Trust::Key);
    // With a key, the policy is strict.
    let checked = manifest::check(file.stream()?, Policy::Vendor, trust).map_err(|error| file.failure(error))?;
    let manifest = match (&checked.manifest, &key) {
        (Some(manifest), Some(key)) => {
            format!("version {}, epoch {}, signed by {}", manifest.version, manifest.epoch, envelope::key_id(key))
        }
        (Some(manifest), None) => {
            format!("version {}, epoch {}; signature not checked (--key)", manifest.version, manifest.epoch)
        }
        (None, _) => "no manifest".into(),
    };
    let (count, len_bytes) = (checked.report.entries.len(), checked.report.len_bytes);
    let mut out = io::stdout().lock();
    writeln!(out, "{}: ok, {count} images, {len_bytes} bytes, {manifest}", args.file.display())?;
    writeln!(out, "sha256 {}", hex(&checked.sha256))?;
    for note in &checked.report.notes {
        writeln!(out, "note: {note}")?;
    }
    Ok(out.flush()?)
}
