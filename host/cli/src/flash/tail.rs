//! What follows a boot stream: a device's key and the payload of a slot for our agent, or what a vendor's installer
//! reads.
//!
//! The payload is made from the stream's own kernel and initramfs, and the stream's signed manifest has its digest.
//!
//! The installer takes the text up to the signature of an xz file as its configuration (`bf.cfg`), and the rest as a
//! root file system. It runs the text as a shell script, so that none is sent with an image that is ours.

use super::FlashArgs;
use crate::exit::Failure;
use crate::image;
use anyhow::{Context, anyhow, ensure};
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::Path;

/// The longest configuration in bytes; those of installers have some kilobytes.
const CONFIG_MAX_BYTES: u64 = 1 << 20;
/// What a file of xz begins with.
const XZ: &[u8] = b"\xfd7zXZ\0";

/// Open what follows the stream. `key` are the bytes with the device's key, if there is one.
pub(super) fn open<'a>(args: &FlashArgs, key: &'a [u8]) -> Result<Box<dyn Read + 'a>, Failure> {
    if args.installs_slot() {
        return Ok(Box::new(key.chain(image::payload(&args.image)?)));
    }
    let config = args.config.as_deref().map_or(Ok(Vec::new()), config).map_err(Failure::Input)?;
    let tail = key.chain(Cursor::new(config));
    Ok(match args.rootfs.as_deref() {
        Some(path) => Box::new(tail.chain(rootfs(path).map_err(Failure::Input)?)),
        None => Box::new(tail),
    })
}

/// Read a configuration.
fn config(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut text = String::new();
    let read = File::open(path).and_then(|file| file.take(CONFIG_MAX_BYTES + 1).read_to_string(&mut text));
    read.with_context(|| format!("--config {}: it must be text", path.display()))?;
    let is_config = text.len() as u64 <= CONFIG_MAX_BYTES && !text.contains('\0');
    ensure!(is_config, "--config {}: it must be text of at most {CONFIG_MAX_BYTES} bytes", path.display());
    // Padding would otherwise join the last line and what follows.
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text.into_bytes())
}

/// Open a root file system.
fn rootfs(path: &Path) -> anyhow::Result<impl Read + use<>> {
    let open = || -> io::Result<(Vec<u8>, File)> {
        let mut file = File::open(path)?;
        let mut first = Vec::new();
        file.by_ref().take(XZ.len() as u64).read_to_end(&mut first)?;
        Ok((first, file))
    };
    let (first, file) = open().with_context(|| format!("--rootfs {}", path.display()))?;
    if first != XZ {
        return Err(anyhow!("--rootfs {}: not a file of xz, which installers look for", path.display()));
    }
    Ok(Cursor::new(first).chain(file))
}
