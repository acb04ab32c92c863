//! The files of `sumac image`: streams in either form, keys, and outputs that are written atomically.

use crate::exit::Failure;
use anyhow::{Context, anyhow};
use ed25519_dalek::pkcs8::{DecodePrivateKey, DecodePublicKey};
use ed25519_dalek::{SigningKey, VerifyingKey};
use signal_hook::consts::SIGINT;
use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use sumac_firmware::emmc;
use sumac_firmware::flash::SealedImage;
use tempfile::NamedTempFile;

/// The longest key file, in bytes.
const KEY_MAX_BYTES: u64 = 64 << 10;

/// A boot stream in a file, in one of its two forms.
#[derive(Debug)]
pub(crate) struct ImageFile {
    path: PathBuf,
    file: File,
    /// Whether it has the form of an eMMC boot partition.
    pub(crate) is_emmc: bool,
}

impl ImageFile {
    /// Open a file and detect its form.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let open = || -> anyhow::Result<Self> {
            let file = File::open(path)?;
            anyhow::ensure!(!file.metadata()?.is_dir(), "is a directory");
            let mut first = Vec::new();
            (&file).take(emmc::FIRST_WORD.len() as u64).read_to_end(&mut first)?;
            Ok(Self { path: path.into(), file, is_emmc: first == emmc::FIRST_WORD })
        };
        open().with_context(|| format!("cannot read {}", path.display())).map_err(Failure::Input)
    }

    /// Read the stream from its beginning.
    pub(crate) fn stream(&self) -> Result<Box<dyn Read + '_>, Failure> {
        let start = if self.is_emmc { emmc::FIRST_WORD.len() as u64 } else { 0 };
        let mut file = &self.file;
        file.seek(SeekFrom::Start(start)).map_err(|error| self.failure(error))?;
        Ok(if self.is_emmc { Box::new(emmc::Reader::after_first_word(file)) } else { Box::new(file) })
    }

    /// Add the file's path to an error.
    pub(crate) fn failure(&self, error: impl Into<anyhow::Error>) -> Failure {
        Failure::Input(error.into().context(self.path.display().to_string()))
    }

    /// Copy the stream into sealed memory, so that the checked bytes cannot change before they are used, with what
    /// follows it.
    pub(crate) fn seal(&self, tail: impl Read) -> Result<SealedImage, Failure> {
        SealedImage::copy(self.stream()?, tail).map_err(|error| self.failure(error))
    }
}

/// Read a private key in the form of `openssl genpkey -algorithm ed25519`.
pub(super) fn read_signing_key(path: &Path) -> Result<SigningKey, Failure> {
    let text = read_key(path)?;
    SigningKey::from_pkcs8_pem(&text).map_err(|error| {
        let what = "not a private ed25519 key in PEM form; create one with `openssl genpkey -algorithm ed25519`";
        Failure::Input(anyhow!("{}: {what}: {error}", path.display()))
    })
}

/// Read a public key in the form of `openssl pkey -pubout`.
pub(crate) fn read_public_key(path: &Path) -> Result<VerifyingKey, Failure> {
    let text = read_key(path)?;
    VerifyingKey::from_public_key_pem(&text).map_err(|error| {
        let what = "not a public ed25519 key in PEM form; derive it from the private one with `openssl pkey -pubout`";
        Failure::Input(anyhow!("{}: {what}: {error}", path.display()))
    })
}

fn read_key(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(KEY_MAX_BYTES).read_to_string(&mut text));
    read.with_context(|| format!("cannot read the key {}", path.display())).map_err(Failure::Input)?;
    Ok(text)
}

/// Creates output files. Ctrl-C stops writing and leaves no file behind.
#[derive(Debug)]
pub(super) struct Outputs {
    interrupted: Arc<AtomicBool>,
}

impl Outputs {
    /// Handle Ctrl-C from here on: it makes writing fail.
    pub(super) fn new() -> Result<Self, Failure> {
        let interrupted = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGINT, interrupted.clone())
            .context("cannot handle Ctrl-C")
            .map_err(Failure::Run)?;
        Ok(Self { interrupted })
    }

    /// Create a temporary file next to `path`. It is removed unless it is published.
    pub(super) fn create(&self, path: &Path) -> Result<Output, Failure> {
        let create = || -> anyhow::Result<Output> {
            anyhow::ensure!(path.file_name().is_some() && !path.is_dir(), "not the name of a file");
            // The rename would replace a device instead of writing to it.
            anyhow::ensure!(!path.exists() || path.is_file(), "exists and is not a regular file");
            let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
            let mode = Permissions::from_mode(0o666);
            let file = tempfile::Builder::new().prefix(".sumac-").permissions(mode).tempfile_in(folder)?;
            Ok(Output { path: path.into(), file, interrupted: self.interrupted.clone() })
        };
        create().with_context(|| format!("cannot write {}", path.display())).map_err(Failure::Input)
    }

    /// Return the failure of the signal if there was one, else the given failure.
    pub(super) fn failure(&self, failure: Failure) -> Failure {
        if self.interrupted.load(Ordering::Relaxed) { Failure::Signal(SIGINT) } else { failure }
    }
}

/// An output file in progress.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    file: NamedTempFile,
    interrupted: Arc<AtomicBool>,
}

impl Output {
    /// Return the path of its bytes until it is published.
    pub(super) fn temporary(&self) -> &Path {
        self.file.path()
    }

    /// Rename the file to its final name. Its bytes are synced before, so that a power cut cannot leave a name without
    /// them.
    pub(super) fn publish(self) -> Result<(), Failure> {
        let Self { path, file, interrupted } = self;
        if interrupted.load(Ordering::Relaxed) {
            return Err(Failure::Signal(SIGINT));
        }
        let publish = || -> io::Result<()> {
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
            Ok(())
        };
        publish().with_context(|| format!("cannot write {}", path.display())).map_err(Failure::Run)
    }
}

impl Write for Output {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(io::Error::other("interrupted"));
        }
        self.file.as_file_mut().write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.as_file_mut().flush()
    }
}

impl Seek for Output {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.as_file_mut().seek(to)
    }
}

/// Split `NAME=VALUE`; the name has no `=`.
pub(super) fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((left, right)) if !left.is_empty() => Ok((left.into(), right.into())),
        _ => Err("expected NAME=VALUE".into()),
    }
}

/// Create a folder for outputs, if it does not exist.
pub(super) fn create_folder(path: &Path) -> Result<(), Failure> {
    fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display())).map_err(Failure::Input)
}
