//! Runs `sumac image`, and `sumac flash` and `sumac card` on simulated cards. Their scripts cause each failure in the
//! table of exit statuses that a driver can cause, as the driver's sources and issues describe them
//! (Mellanox/rshim-user-space).
//!
//! Needs FUSE: root or fusermount3. Without it the tests print that and are skipped; with CI=true they fail.
//!
//! Invariants of every script ([`Ran::check`]): exit status and name match the failure; the message gives advice; the
//! card's settings are restored; the card has received a prefix of the image.

mod failures;
mod fleet;
mod hosts;
mod images;
#[cfg(feature = "redfish")]
mod redfish;
mod rshim;
mod runtime;
mod success;

use ed25519_dalek::SigningKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{EncodePrivateKey, EncodePublicKey};
use rshim::{Script, Seen, SimulatedCard};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// Length of the kernel in the image: the stream takes several writes.
const KERNEL_LEN_BYTES: usize = 200_000;

/// Among the arguments of [`Bench::flash`]: install the image instead of running it from memory.
const INSTALL: &str = "install";

/// Return a kernel with the header that UEFI on arm64 requires.
fn kernel() -> Vec<u8> {
    let mut kernel: Vec<u8> = (0..KERNEL_LEN_BYTES).map(|at| (at * 7 + at / 251) as u8).collect();
    kernel[..2].copy_from_slice(b"MZ");
    kernel[0x3c..0x46].copy_from_slice(b"\x40\0\0\0PE\0\0\x64\xaa");
    kernel
}

/// A folder with a signed image, its keys, and a mount point for a card.
struct Bench {
    folder: TempDir,
    image: Vec<u8>,
}

impl Bench {
    fn new() -> Self {
        Self::with_epoch(3)
    }

    /// Create a signed image of this epoch.
    fn with_epoch(epoch: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let bench = Self { folder, image: Vec::new() };
        let key = SigningKey::from_bytes(&[7; 32]);
        fs::write(bench.path("key.pem"), key.to_pkcs8_pem(LineEnding::LF).expect("PEM").as_bytes()).expect("written");
        let public = key.verifying_key().to_public_key_pem(LineEnding::LF).expect("PEM");
        fs::write(bench.path("pub.pem"), public).expect("written");
        let kernel = kernel();
        fs::write(bench.path("kernel"), kernel).expect("written");
        fs::write(bench.path("initramfs"), b"files").expect("written");
        fs::create_dir(bench.path("rshim0")).expect("made");
        let text = |name: &str| bench.path(name).display().to_string();
        let base = bench.sumac(&[
            "image",
            "repack",
            "--text",
            "bl2-v1=two",
            "--text",
            "bl2-v2=three",
            "-o",
            &text("base.bfb"),
        ]);
        assert!(base.status.success(), "{base:?}");
        let (kernel, initramfs, base, key, out) =
            (text("kernel"), text("initramfs"), text("base.bfb"), text("key.pem"), text("image.bfb"));
        let epoch = epoch.to_string();
        let mut args = vec!["image", "build", "--kernel", &kernel, "--initramfs", &initramfs, "--base", &base];
        args.extend(["--image-version", "1.2.3", "--epoch", &epoch, "--sign-key", &key, "-o", &out]);
        let built = bench.sumac(&args);
        assert!(built.status.success(), "{built:?}");
        let image = fs::read(bench.path("image.bfb")).expect("built");
        Self { image, ..bench }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sumac"));
        command.args(args).env("SUMAC_CARDS", self.path("cards")).stdin(Stdio::null());
        command
    }

    fn sumac(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the command runs")
    }

    /// Mount a card in this folder; `None` without FUSE.
    fn card(&self, script: Script) -> Option<SimulatedCard> {
        self.card_at("rshim0", script)
    }

    /// Mount a card in a folder of this one; `None` without FUSE.
    fn card_at(&self, name: &str, script: Script) -> Option<SimulatedCard> {
        match SimulatedCard::mount(&self.path(name), script) {
            Ok(card) => Some(card),
            Err(error) => {
                let why = format!("SKIPPED: no simulated card without FUSE ({error}); run as root, or install fuse3");
                assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
                eprintln!("{why}");
                None
            }
        }
    }

    /// The arguments that flash the image to the card: to its memory, unless `more` has [`INSTALL`].
    fn flash_args(&self, more: &[&str]) -> Vec<String> {
        let path = |name: &str| self.path(name).display().to_string();
        let (image, card, key) = (path("image.bfb"), path("rshim0"), path("pub.pem"));
        let sysfs = path("sys");
        let args = ["flash", &image, "--rshim", &card, "--json", "--poll-ms", "20", "--sysfs", &sysfs];
        let more_args = more.iter().filter(|text| **text != INSTALL);
        let mut args: Vec<_> = args.iter().chain(more_args).map(|text| text.to_string()).collect();
        if !more.contains(&"--allow-unsigned") {
            args.extend(["--key".into(), key]);
            args.extend((!more.contains(&INSTALL)).then(|| "--ram".to_owned()));
        }
        // Long defaults, so that a stalled machine has no effect; tests of timeouts set their own.
        for (option, value) in [("--timeout", "600"), ("--gone-polls", "30000")] {
            if !more.contains(&option) {
                args.extend([option.into(), value.into()]);
            }
        }
        args
    }

    /// Flash to a card that follows the script.
    fn flash(&self, script: Script, more: &[&str]) -> Option<Ran> {
        let card = self.card(script)?;
        let args = self.flash_args(more);
        let output = self.sumac(&args.iter().map(String::as_str).collect::<Vec<_>>());
        Some(Ran::new(output, card))
    }
}

/// The result of a run of `sumac flash`.
struct Ran {
    status: i32,
    json: serde_json::Value,
    stderr: String,
    seen: Seen,
}

impl Ran {
    fn new(output: Output, card: SimulatedCard) -> Self {
        let status = output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"));
        let json = serde_json::from_slice(&output.stdout).unwrap_or(serde_json::Value::Null);
        Self { status, json, stderr: String::from_utf8_lossy(&output.stderr).into_owned(), seen: card.seen() }
    }

    /// Check the invariants of every script.
    fn check(&self, bench: &Bench, status: i32, name: &str) {
        let context = format!("{}\n{}", self.stderr, self.json);
        assert_eq!(self.status, status, "{context}");
        assert_eq!(
            (self.json["outcome"].as_str(), &self.json["exit_status"]),
            (Some(name), &status.into()),
            "{context}"
        );
        if status != 0 {
            assert!(self.stderr.contains("what to do: "), "{context}");
            let message = self.json["message"].as_str().expect("a message");
            assert!(self.stderr.contains(message), "{context}");
        }
        assert!(bench.image.starts_with(&self.seen.received), "the card has got something else");
        // A writer that was stopped may not have counted its last write.
        let reported = self.json["written_bytes"].as_u64().expect("a number");
        assert!(reported <= self.seen.received.len() as u64, "{context}");
    }

    /// Check that the card's settings are restored.
    fn check_restored(&self, boot_mode: u32) {
        let Seen { boot_mode: now, display_level, clear_on_read, is_open, .. } = self.seen;
        assert_eq!((now, display_level, clear_on_read, is_open), (boot_mode, 0, false, false), "{}", self.stderr);
        assert_ne!(self.json["restored"], false, "{}", self.json);
    }
}
