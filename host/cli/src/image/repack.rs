//! `sumac image repack`, and the stream builder that it shares with `build`.

use super::ImageFile;
use super::file::{Output, Outputs, parse_pair, read_signing_key};
use crate::exit::Failure;
use crate::size::SizeBytes;
use anyhow::{Context, anyhow};
use clap::Args;
use ed25519_dalek::SigningKey;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use sumac_firmware::bfb::{Builder, Generation, ImageId, ImageName, Policy, Report, Source, WriteError, scan};
use sumac_firmware::emmc;
use sumac_firmware::manifest::envelope::ENVELOPE_MAX_BYTES;
use sumac_firmware::manifest::{self, MANIFEST_IMAGE, Manifest, ManifestError, Trust, envelope};

/// `sumac image repack`.
#[derive(Debug, Args)]
pub(super) struct RepackArgs {
    /// Boot streams with images to include
    #[arg(value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// Image from a file, as in image=vmlinuz or boot-args-v2=args.txt; may be repeated
    #[arg(long, value_name = "NAME=FILE", value_parser = parse_pair)]
    set: Vec<(String, String)>,
    /// Image from a text, as in boot-desc="Linux from rshim"; may be repeated
    #[arg(long, value_name = "NAME=TEXT", value_parser = parse_pair)]
    text: Vec<(String, String)>,
    /// Drop all versions of an image, as in boot-timeout or id99; may be repeated
    #[arg(long, value_name = "NAME", value_parser = parse_id)]
    drop: Vec<ImageId>,
    /// Keep only images that this card uses: of each the highest version up to its own, as `mlx-mkbfb --filter` does
    #[arg(long = "for", value_name = "CARD", value_parser = parse_generation)]
    card: Option<Generation>,
    #[command(flatten)]
    manifest: ManifestArgs,
    /// Output format: a boot stream, or its form in an eMMC boot partition
    #[arg(long, value_enum, default_value_t = Form::Bfb)]
    format: Form,
    /// Size of the boot partition, for --format emmc
    #[arg(long, value_name = "BYTES", default_value_t = SizeBytes(emmc::STREAM_MAX_BYTES))]
    max_size: SizeBytes,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// The form of a stream in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    /// For rshim
    Bfb,
    /// For an eMMC boot partition
    Emmc,
}

/// The contents of the manifest and its signature.
#[derive(Debug, Args)]
pub(super) struct ManifestArgs {
    /// Version to write into the manifest
    #[arg(long, value_name = "VERSION")]
    pub(super) image_version: Option<String>,
    /// Epoch to write into the manifest; `flash` refuses images with a lower epoch than the card has had
    #[arg(long, value_name = "N", default_value_t = 0, requires = "image_version")]
    pub(super) epoch: u64,
    /// Private key (PEM) with which to sign the manifest
    #[arg(long, value_name = "FILE", requires = "image_version")]
    pub(super) sign_key: Option<PathBuf>,
}

impl ManifestArgs {
    /// Read the key, if there is one.
    pub(super) fn key(&self) -> Result<Option<SigningKey>, Failure> {
        self.sign_key.as_deref().map(read_signing_key).transpose()
    }
}

/// Combine the inputs.
pub(super) fn run(args: &RepackArgs) -> Result<(), Failure> {
    let key = args.manifest.key()?;
    let outputs = Outputs::new()?;
    let mut stream_builder = StreamBuilder::default();
    for input in &args.inputs {
        stream_builder.take(input, &args.drop, &args.output, &outputs)?;
    }
    for (name, file) in &args.set {
        let name = name.parse::<ImageName>().map_err(Failure::input)?;
        let source = Source::file(Path::new(file)).with_context(|| format!("cannot read {file}"));
        stream_builder.builder.insert(name, source.map_err(Failure::Input)?).map_err(Failure::input)?;
    }
    for (name, text) in &args.text {
        let name = name.parse::<ImageName>().map_err(Failure::input)?;
        stream_builder.builder.insert(name, Source::Bytes(text.clone().into_bytes())).map_err(Failure::input)?;
    }
    for id in &args.drop {
        stream_builder.builder.remove(*id);
    }
    if let Some(card) = args.card {
        stream_builder.builder.keep_for(card);
    }
    match &args.manifest.image_version {
        Some(version) => stream_builder.add_manifest(version, args.manifest.epoch, key.as_ref())?,
        None => stream_builder.drop_stale_manifest()?,
    }
    let stream = stream_builder.write(&args.output, key.as_ref(), &outputs)?;
    match args.format {
        Form::Bfb => stream.publish(),
        Form::Emmc => {
            let mut partition = outputs.create(&args.output)?;
            let read = File::open(stream.temporary()).and_then(|file| Ok((file.metadata()?.len(), file)));
            let (len_bytes, file) = read.map_err(Failure::run)?;
            let written = emmc::write(file, len_bytes, args.max_size.0, &mut partition);
            written.map_err(|error| match error {
                emmc::EmmcError::Io(error) => outputs.failure(Failure::run(error)),
                error => Failure::input(error),
            })?;
            partition.publish()
        }
    }
}

/// A boot stream in progress, with the temporary files that it refers to.
#[derive(Debug, Default)]
pub(super) struct StreamBuilder {
    pub(super) builder: Builder,
    /// Temporary files, which are removed with this.
    spools: Vec<Output>,
}

impl StreamBuilder {
    /// Add all images of a stream except the dropped ones; return its contents.
    pub(super) fn take(
        &mut self,
        path: &Path,
        drop: &[ImageId],
        beside: &Path,
        outputs: &Outputs,
    ) -> Result<Report, Failure> {
        let file = ImageFile::open(path)?;
        let mut source = path.to_owned();
        let report = if file.is_emmc {
            let mut spool = outputs.create(beside)?;
            io::copy(&mut file.stream()?, &mut spool).map_err(|error| outputs.failure(file.failure(error)))?;
            source = spool.temporary().to_owned();
            self.spools.push(spool);
            let spooled = File::open(&source).map_err(Failure::run)?;
            scan(spooled, Policy::Repairable, |_, _| Ok(()))
        } else {
            scan(file.stream()?, Policy::Repairable, |_, _| Ok(()))
        };
        let report = report.map_err(|error| file.failure(error))?;
        for note in &report.notes {
            note!("note: {}: {note}", path.display());
        }
        if report.tail_len_bytes > 0 {
            note!("note: {}: only the images are taken, not what follows them", path.display());
        }
        self.builder.insert_stream(&source, &report, drop).map_err(|error| file.failure(error))?;
        Ok(report)
    }

    /// Keep a temporary file and return it as a source.
    pub(super) fn spool(&mut self, mut spool: Output) -> Result<Source, Failure> {
        spool.flush().map_err(Failure::run)?;
        let source = Source::file(spool.temporary()).map_err(Failure::run)?;
        self.spools.push(spool);
        Ok(source)
    }

    /// Add a manifest of all images.
    pub(super) fn add_manifest(&mut self, version: &str, epoch: u64, key: Option<&SigningKey>) -> Result<(), Failure> {
        let sealed = Manifest::of(&self.builder, version, epoch).and_then(|manifest| manifest.seal(key));
        let sealed = sealed.map_err(Failure::input)?;
        self.builder.insert(MANIFEST_IMAGE, Source::Bytes(sealed)).map_err(Failure::input)
    }

    /// Drop a manifest that does not match the images.
    fn drop_stale_manifest(&mut self) -> Result<(), Failure> {
        let Some((_, info)) = self.builder.images().find(|(name, _)| *name == MANIFEST_IMAGE) else { return Ok(()) };
        let mut sealed = Vec::new();
        let limit = ENVELOPE_MAX_BYTES as u64;
        info.open().and_then(|reader| reader.take(limit).read_to_end(&mut sealed)).map_err(Failure::run)?;
        if !manifest::is_envelope(&sealed) {
            return Ok(());
        }
        let manifest = envelope::open::<Manifest>(&sealed, Trust::AnySigner).ok();
        let fits = match &manifest {
            Some(manifest) => {
                Manifest::of(&self.builder, &manifest.version, manifest.epoch).map_err(Failure::input)? == *manifest
            }
            None => false,
        };
        if !fits {
            note!("note: the manifest does not match the images and is dropped; create a new one with --image-version");
            self.builder.remove(ImageId::INFO);
        }
        Ok(())
    }

    /// Write the stream to a temporary file next to `path` and verify it; only a verified stream is published.
    pub(super) fn write(&self, path: &Path, key: Option<&SigningKey>, outputs: &Outputs) -> Result<Output, Failure> {
        let mut output = outputs.create(path)?;
        self.builder.write_to(&mut output).map_err(|error| match error {
            WriteError::Write(error) => {
                outputs.failure(Failure::Run(anyhow!(error).context(format!("cannot write {}", path.display()))))
            }
            error => Failure::input(error),
        })?;
        let key = key.map(SigningKey::verifying_key);
        let trust = key.as_ref().map_or(Trust::AnySigner, Trust::Key);
        let written = File::open(output.temporary()).map_err(Failure::run)?;
        manifest::check(written, Policy::Strict, trust).map_err(|error| match error {
            // An input file has changed since it was hashed.
            ManifestError::Image { name, .. } => {
                Failure::Input(anyhow!("{name}: its file changed while it was read; nothing was written"))
            }
            error => Failure::Run(anyhow!(error).context("the written stream does not verify")),
        })?;
        Ok(output)
    }
}

fn parse_id(text: &str) -> Result<ImageId, String> {
    let unnamed = || text.strip_prefix("id")?.parse().ok().map(ImageId);
    ImageId::from_name(text).or_else(unnamed).ok_or_else(|| "not the name of an image; try image or boot-args".into())
}

fn parse_generation(text: &str) -> Result<Generation, String> {
    let names = Generation::ALL.map(Generation::name).join(", ");
    Generation::from_name(text).ok_or_else(|| format!("not a card; choose one of {names}"))
}
