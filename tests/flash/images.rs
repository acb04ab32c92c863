//! `sumac image` as a process: invalid images, partial output, and the files that an image contains.

use super::Bench;
use super::rshim::{Script, When};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Stdio;

/// Run `sumac image` in the bench's folder; return the exit status and stderr.
fn image(bench: &Bench, args: &[&str]) -> (Option<i32>, String) {
    let output = bench.command(&[&["image"], args].concat()).current_dir(bench.folder.path()).output().expect("runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = folder.read_dir().expect("a folder");
    entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn damaged_image_is_refused_with_its_offset_before_any_write() {
    let bench = Bench::new();
    let mut bad = bench.image.clone();
    let at = bad.len() - 5;
    bad[at] ^= 0x40;
    fs::write(bench.path("bad.bfb"), &bad).expect("written");
    fs::write(bench.path("cut.bfb"), &bench.image[..bad.len() - 8]).expect("written");
    fs::write(bench.path("tail.bfb"), [&bench.image[..], b"ubuntu_PASSWORD=x\n"].concat()).expect("written");
    fs::write(bench.path("empty.bfb"), b"").expect("written");
    let before = names(bench.folder.path());
    for (file, parts) in [
        ("bad.bfb", ["image_crc", "initramfs-v0"]),
        ("cut.bfb", ["image_len", "truncated"]),
        ("empty.bfb", ["header", "empty"]),
    ] {
        let out = ["repack", file, "-o", "out.bfb"];
        for args in [&["list", file][..], &["verify", file], &["extract", file, "-o", "dump"], &out] {
            let (status, stderr) = image(&bench, args);
            assert_eq!(status, Some(2), "{args:?}: {stderr}");
            assert!(stderr.contains("offset 0x") && parts.iter().all(|part| stderr.contains(part)), "{stderr}");
        }
        assert_eq!(names(&bench.path("dump")), BTreeSet::new());
        fs::remove_dir(bench.path("dump")).expect("removed");
    }
    assert_eq!(names(bench.folder.path()), before);
    // A signed image has nothing behind it; what an installer of an unsigned one reads is noted.
    let (status, stderr) = image(&bench, &["verify", "tail.bfb", "--key", "pub.pem"]);
    assert!(status == Some(2) && stderr.contains("magic") && stderr.contains("bf.cfg"), "{stderr}");
    assert_eq!(image(&bench, &["list", "tail.bfb"]).0, Some(0));
    assert_eq!(image(&bench, &["verify", "tail.bfb"]).0, Some(0));
    // Missing files and unknown names are refused.
    for args in [
        &["list", "none.bfb"][..],
        &["extract", "image.bfb", "-n", "nicfw"],
        &["repack", "--text", "kernel=x", "-o", "x"],
    ] {
        assert_eq!(image(&bench, args).0, Some(2), "{args:?}");
    }
}

#[test]
fn image_signature_is_checked_against_the_given_key() {
    let bench = Bench::new();
    assert_eq!(image(&bench, &["verify", "image.bfb", "--key", "pub.pem"]).0, Some(0));
    let (status, stderr) = image(&bench, &["verify", "image.bfb", "--key", "key.pem"]);
    assert!(status == Some(2) && stderr.contains("not a public ed25519 key"), "{stderr}");
    // The same images without a signature.
    let unsigned = ["repack", "image.bfb", "--image-version", "1.2.3", "--epoch", "3", "-o", "unsigned.bfb"];
    assert_eq!(image(&bench, &unsigned).0, Some(0));
    assert_eq!(image(&bench, &["verify", "unsigned.bfb"]).0, Some(0));
    let (status, stderr) = image(&bench, &["verify", "unsigned.bfb", "--key", "pub.pem"]);
    assert!(status == Some(2) && stderr.contains("not signed by the key"), "{stderr}");
    // Repacking keeps the signature if no signed image changes, and drops it otherwise.
    assert_eq!(image(&bench, &["repack", "image.bfb", "--format", "emmc", "-o", "image.emmc"]).0, Some(0));
    assert_eq!(image(&bench, &["verify", "image.emmc", "--key", "pub.pem"]).0, Some(0));
    let (status, stderr) = image(&bench, &["repack", "image.bfb", "--for", "bluefield-3", "-o", "three.bfb"]);
    assert!(status == Some(0) && stderr.contains("the manifest does not match the images"), "{stderr}");
    let args = ["flash", "image.emmc", "--rshim", "./rshim0", "--key", "pub.pem"];
    let output = bench.command(&args).current_dir(bench.folder.path()).output().expect("runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn image_larger_than_a_boot_partition_is_refused() {
    let bench = Bench::new();
    let (status, stderr) = image(&bench, &["repack", "image.bfb", "--format", "emmc", "--max-size", "128K", "-o", "x"]);
    assert!(status == Some(2) && stderr.contains("131072"), "{stderr}");
    assert!(!bench.path("x").exists());
}

/// The kernel unpacks an archive appended to the user's initramfs over its files; an unpacker stands in for the kernel.
#[test]
fn agent_image_carries_a_manifest_that_the_card_checks() {
    let bench = Bench::new();
    fs::write(bench.path("agent"), b"#!agent").expect("written");
    let args = ["build", "--kernel", "kernel", "--initramfs", "initramfs", "--agent", "/usr/bin/agent=agent"];
    let sign = ["--image-version", "2.0", "--epoch", "4", "--sign-key", "key.pem", "-o", "agent.bfb"];
    let (status, stderr) = image(&bench, &[&args[..], &sign].concat());
    assert_eq!(status, Some(0), "{stderr}");
    assert_eq!(image(&bench, &["verify", "agent.bfb", "--key", "pub.pem"]).0, Some(0));
    assert_eq!(image(&bench, &["extract", "agent.bfb", "-n", "initramfs"]).0, Some(0));
    let initramfs = fs::read(bench.path("dump-initramfs-v0")).expect("extracted");
    // The user's archive comes first, unmodified, padded with zeros to a multiple of 4.
    let (user, agent) = initramfs.split_at(8);
    assert!(user == b"files\0\0\0" && agent.starts_with(b"070701"));
    let root = bench.path("root");
    let mut archive = &initramfs[8..];
    loop {
        let entry = cpio::NewcReader::new(archive).expect("an entry");
        let path = root.join(entry.entry().name());
        if entry.entry().is_trailer() {
            break;
        }
        if entry.entry().mode() & 0o170_000 == 0o040_000 {
            fs::create_dir_all(path).expect("made");
            archive = entry.finish().expect("no data");
        } else {
            archive = entry.to_writer(fs::File::create(path).expect("made")).expect("data");
        }
    }
    let check = ["verify-files", "root", "--key", "pub.pem"];
    assert_eq!(image(&bench, &check).0, Some(0));
    fs::write(root.join("usr/bin/agent"), b"#!other").expect("written");
    let (status, stderr) = image(&bench, &check);
    assert!(status == Some(2) && stderr.contains("usr/bin/agent"), "{stderr}");
}

#[test]
fn file_that_uefi_cannot_start_is_no_kernel() {
    let bench = Bench::new();
    let before = names(bench.folder.path());
    let kernel = super::kernel();
    for (bytes, why) in [
        (vec![0x5a; 5000], "neither an arm64 Image"),
        ([b"\x1f\x8b\x08\0", &kernel[..]].concat(), "compressed with gzip"),
        ([&kernel[..0x44], b"\x64\x86", &kernel[0x46..]].concat(), "machine 0x8664"),
    ] {
        fs::write(bench.path("kernel"), bytes).expect("written");
        let args = ["build", "--kernel", "kernel", "--initramfs", "initramfs", "-o", "out.bfb"];
        let (status, stderr) = image(&bench, &args);
        assert!(status == Some(2) && stderr.contains("--kernel kernel") && stderr.contains(why), "{stderr}");
    }
    assert_eq!(names(bench.folder.path()), before);
}

#[test]
fn firmware_of_the_base_is_named_and_left_out_unless_kept() {
    let bench = Bench::new();
    let with = ["repack", "base.bfb", "--text", "capsule=update", "--text", "nicfw-v2=nic", "-o", "vendor.bfb"];
    assert_eq!(image(&bench, &with).0, Some(0));
    let build = ["build", "--kernel", "kernel", "--initramfs", "initramfs", "-o", "out.bfb", "--base"];
    let list = || {
        let output = bench.sumac(&["image", "list", &bench.path("out.bfb").display().to_string()]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let (status, stderr) = image(&bench, &[&build[..], &["vendor.bfb"]].concat());
    assert!(status == Some(0) && stderr.contains("left out firmware"), "{stderr}");
    assert!(stderr.contains("capsule-v0 (6 bytes), nicfw-v2 (3 bytes)"), "{stderr}");
    assert!(!list().contains("capsule") && !list().contains("nicfw") && list().contains("bl2-v2"), "{}", list());
    let (status, stderr) = image(&bench, &[&build[..], &["vendor.bfb", "--keep-firmware"]].concat());
    assert!(status == Some(0) && stderr.contains("the card will install firmware"), "{stderr}");
    assert!(list().contains("capsule-v0") && list().contains("nicfw-v2"), "{}", list());
    let (_, stderr) = image(&bench, &[&build[..], &["base.bfb"]].concat());
    assert!(!stderr.contains("firmware"), "{stderr}");
}

/// The parts of a bundle that `bfb-tool extract --psid` puts into a folder (Mellanox/rshim-user-space,
/// `rebuild_bfb_flat`), each with its place in a flat stream.
#[test]
fn flat_stream_of_a_bundles_parts_is_assembled_and_taken_by_a_card_in_nic_mode() {
    let bench = Bench::new();
    let parts = [
        ("capsule", "boot_update2.cap"),
        ("nicfw", "fw-BlueField-3-rel-32_44_1036-900-9D3B6-00CV-A.bin"),
        ("ramdisk", "fw-BlueField-3-rel-32_44_1036-900-9D3B6-00CV-A-gi.pldm"),
        ("dpu-gi", "bf3-bmc-preboot-install.pldm"),
        ("cfg-gi", "config-image.pldm"),
        ("info", "info.json"),
        ("image", "bf3-bmc-fw.fwpkg"),
        ("upgrade-image", "bf3-cec-fw.fwpkg"),
    ];
    let sets: Vec<String> = parts.iter().rev().map(|(name, file)| format!("{name}={file}")).collect();
    for (name, file) in parts {
        fs::write(bench.path(file), format!("{{\"Name\":\"{name}\"}}")).expect("written");
    }
    let mut repack = vec!["repack", "base.bfb", "-o", "image.bfb"];
    sets.iter().for_each(|set| repack.extend(["--set", set]));
    let (status, stderr) = image(&bench, &repack);
    assert_eq!(status, Some(0), "{stderr}");
    let listed = bench.sumac(&["image", "list", &bench.path("image.bfb").display().to_string()]);
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let at = |name: &str| listed.find(&format!("{name}-v0")).unwrap_or_else(|| panic!("no {name}: {listed}"));
    assert!(parts.windows(2).all(|pair| at(pair[0].0) < at(pair[1].0)), "{listed}");
    let bench = Bench { image: fs::read(bench.path("image.bfb")).expect("written"), ..bench };
    let log = [(When::Reading(2), "INFO[MISC]: In Enhanced NIC mode")];
    let card = Script { bf_mode: "NIC mode", ..Script::with_log(bench.image.len(), &log) };
    let Some(ran) = bench.flash(card, &["--allow-unsigned", "--nic-mode"]) else { return };
    ran.check(&bench, 0, "ready");
    assert!(ran.seen.received == bench.image, "not the stream");
}

#[test]
fn interrupted_build_leaves_no_partial_image() {
    let bench = Bench::new();
    // Long enough to be still writing; the agent's archive is the first output.
    fs::File::create(bench.path("long")).and_then(|file| file.set_len(512 << 20)).expect("made");
    let before = names(bench.folder.path());
    let args = ["image", "build", "--kernel", "kernel", "--initramfs", "long", "--agent", "/a=kernel", "-o", "out.bfb"];
    let mut command = bench.command(&args);
    let process = command.current_dir(bench.folder.path()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut process = process.expect("started");
    while names(bench.folder.path()) == before {
        assert!(process.try_wait().expect("a child").is_none(), "it has ended by itself");
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&process), Signal::INT).expect("sent");
    assert_eq!(process.wait().expect("ended").code(), Some(130));
    assert_eq!(names(bench.folder.path()), before);
}
