//! The files of `sumac image`: streams in either form, keys, and outputs that appear whole or not at all.

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
    /// As in an eMMC boot partition.
    pub(crate) is_emmc: bool,
}

impl ImageFile {
    /// Open a file and look which form it has.
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

    /// Say of which file an error is.
    pub(crate) fn failure(&self, error: impl Into<anyhow::Error>) -> Failure {
        Failure::Input(error.into().context(self.path.display().to_string()))
    }

    /// Copy the stream into memory that nobody can change: check and use that, not the file, which may change in between.
    pub(crate) fn seal(&self) -> Result<SealedImage, Failure> {
        SealedImage::copy(self.stream()?).map_err(|error| self.failure(error))
    }
}

/// Read a private key as `openssl genpkey -algorithm ed25519` writes it.
pub(super) fn read_signing_key(path: &Path) -> Result<SigningKey, Failure> {
    let text = read_key(path)?;
    SigningKey::from_pkcs8_pem(&text).map_err(|error| {
        let what = "no private ed25519 key in PEM form; make one with `openssl genpkey -algorithm ed25519`";
        Failure::Input(anyhow!("{}: {what}: {error}", path.display()))
    })
}

/// Read a public key as `openssl pkey -pubout` writes it.
pub(crate) fn read_public_key(path: &Path) -> Result<VerifyingKey, Failure> {
    let text = read_key(path)?;
    VerifyingKey::from_public_key_pem(&text).map_err(|error| {
        let what = "no public ed25519 key in PEM form; take it from the private one with `openssl pkey -pubout`";
        Failure::Input(anyhow!("{}: {what}: {error}", path.display()))
    })
}

fn read_key(path: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(KEY_MAX_BYTES).read_to_string(&mut text));
    read.with_context(|| format!("cannot read the key {}", path.display())).map_err(Failure::Input)?;
    Ok(text)
}

/// Files that get their names when they are whole, and are gone otherwise; Ctrl-C ends their writing in order.
#[derive(Debug)]
pub(super) struct Outputs {
    interrupted: Arc<AtomicBool>,
}

impl Outputs {
    /// From here on, Ctrl-C makes writing fail.
    pub(super) fn new() -> Result<Self, Failure> {
        let interrupted = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(SIGINT, interrupted.clone()).context("watch for Ctrl-C").map_err(Failure::Run)?;
        Ok(Self { interrupted })
    }

    /// Begin a file beside `path`; it goes away unless it is published.
    pub(super) fn create(&self, path: &Path) -> Result<Output, Failure> {
        let create = || -> anyhow::Result<Output> {
            anyhow::ensure!(path.file_name().is_some() && !path.is_dir(), "not the name of a file");
            // A device would be replaced by a file beside it, and never be written.
            anyhow::ensure!(!path.exists() || path.is_file(), "is there, and is no ordinary file");
            let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
            let mode = Permissions::from_mode(0o666);
            let file = tempfile::Builder::new().prefix(".sumac-").permissions(mode).tempfile_in(folder)?;
            Ok(Output { path: path.into(), file, interrupted: self.interrupted.clone() })
        };
        create().with_context(|| format!("cannot write {}", path.display())).map_err(Failure::Input)
    }

    /// Turn a failure into that of the signal, if there was one.
    pub(super) fn failure(&self, failure: Failure) -> Failure {
        if self.interrupted.load(Ordering::Relaxed) { Failure::Signal(SIGINT) } else { failure }
    }
}

/// A file in the making.
#[derive(Debug)]
pub(super) struct Output {
    path: PathBuf,
    file: NamedTempFile,
    interrupted: Arc<AtomicBool>,
}

impl Output {
    /// Where the bytes are until it is published.
    pub(super) fn temporary(&self) -> &Path {
        self.file.path()
    }

    /// Give the file its name; a name must not survive a power cut that its bytes do not.
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

/// Split `PLACE=FILE`; the place has no `=`.
pub(super) fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((left, right)) if !left.is_empty() => Ok((left.into(), right.into())),
        _ => Err("write NAME=VALUE".into()),
    }
}

/// Make a folder for outputs, if it is not there.
pub(super) fn create_folder(path: &Path) -> Result<(), Failure> {
    fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display())).map_err(Failure::Input)
}
