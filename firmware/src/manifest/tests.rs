//! Tests of what a manifest detects: changed bytes, other images, other keys, other kinds of documents.

use super::envelope::{key_id, open, seal};
use super::files::FileManifest;
use super::*;
use crate::bfb::{Builder, Source};
use ed25519_dalek::VerifyingKey;
use std::io::Cursor;
use std::path::PathBuf;

fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

fn stream(images: &[(&str, &[u8])], seal_with: Option<&SigningKey>) -> Vec<u8> {
    let mut builder = Builder::new();
    for (name, data) in images {
        builder.insert(name.parse().expect("a name"), Source::Bytes(data.to_vec())).expect("has a place");
    }
    let sealed = Manifest::of(&builder, "1.2.0", 3).and_then(|manifest| manifest.seal(seal_with)).expect("sealed");
    builder.insert(MANIFEST_IMAGE, Source::Bytes(sealed)).expect("has a place");
    let mut out = Cursor::new(Vec::new());
    builder.write_to(&mut out).expect("memory takes it");
    out.into_inner()
}

const IMAGES: &[(&str, &[u8])] =
    &[("bl2-v2", b"boot"), ("boot-args", b"a0"), ("boot-args-v2", b"a2"), ("image", b"KERNEL")];

fn verify(bytes: &[u8], key: &VerifyingKey) -> Result<Checked, ManifestError> {
    check(bytes, Policy::Strict, Trust::Key(key))
}

#[test]
fn signed_stream_verifies_and_returns_its_manifest() {
    let bytes = stream(IMAGES, Some(&key(1)));
    let checked = verify(&bytes, &key(1).verifying_key()).expect("as it was written");
    let manifest = checked.manifest.as_ref().expect("is there");
    assert_eq!((manifest.board.as_str(), manifest.version.as_str(), manifest.epoch), (BOARD, "1.2.0", 3));
    assert_eq!(manifest.images.len(), IMAGES.len());
    assert_eq!(checked.sha256[..], Sha256::digest(&bytes)[..]);
    assert!(checked.boots(Generation::BlueField3) && !checked.boots(Generation::BlueField2));
}

#[test]
fn damage_of_any_byte_is_detected() {
    let bytes = stream(IMAGES, Some(&key(1)));
    let key = key(1).verifying_key();
    for offset in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[offset] ^= 1 << bit;
            assert!(verify(&bad, &key).is_err(), "bit {bit} of offset {offset}");
        }
    }
}

/// The checksums are recomputed, as an attacker would.
#[test]
fn changed_data_with_correct_checksums_is_detected() {
    let changes: [&[(&str, &[u8])]; 4] = [
        &[("bl2-v2", b"b00t"), ("boot-args", b"a0"), ("boot-args-v2", b"a2"), ("image", b"KERNEL")],
        &[
            ("bl2-v2", b"boot"),
            ("boot-args", b"a0"),
            ("boot-args-v2", b"a2"),
            ("image", b"KERNEL"),
            ("initramfs", b"x"),
        ],
        &[("bl2-v2", b"boot"), ("boot-args", b"a0"), ("boot-args-v2", b"a2")],
        &[("bl2-v2", b"boot"), ("boot-args", b"a0"), ("boot-args-v1", b"a2"), ("image", b"KERNEL")],
    ];
    let good = stream(IMAGES, Some(&key(1)));
    let report = bfb::scan(good.as_slice(), Policy::Strict, |_, _| Ok(())).expect("whole");
    let info = report.find(MANIFEST_IMAGE).expect("is there");
    let at = info.data_offset() as usize;
    let sealed = good[at..at + info.header.len_bytes as usize].to_vec();
    for images in changes {
        let mut builder = Builder::new();
        for (name, data) in images {
            builder.insert(name.parse().expect("a name"), Source::Bytes(data.to_vec())).expect("has a place");
        }
        builder.insert(MANIFEST_IMAGE, Source::Bytes(sealed.clone())).expect("has a place");
        let mut out = Cursor::new(Vec::new());
        builder.write_to(&mut out).expect("memory takes it");
        let error = verify(out.get_ref(), &key(1).verifying_key()).expect_err("changed");
        assert!(matches!(error, ManifestError::Image { .. } | ManifestError::Images { .. }), "{error}");
    }
}

#[test]
fn signature_by_another_key_is_refused() {
    let (ours, theirs) = (key(1), key(2));
    let refused = |bytes: &[u8], key: &SigningKey| verify(bytes, &key.verifying_key()).expect_err("not trusted");
    let error = refused(&stream(IMAGES, Some(&theirs)), &ours);
    assert!(error.to_string().contains(&key_id(&theirs.verifying_key())), "{error}");
    let unsigned = stream(IMAGES, None);
    assert!(refused(&unsigned, &ours).to_string().contains("no key"));
    assert!(
        check(unsigned.as_slice(), Policy::Strict, Trust::AnySigner).is_ok_and(|checked| checked.manifest.is_some())
    );
}

#[test]
fn stream_without_a_manifest_is_refused_unless_allowed() {
    for info in [None, Some(&br#"{"Name":"a vendor's bundle"}"#[..])] {
        let mut builder = Builder::new();
        builder.insert("image".parse().expect("a name"), Source::Bytes(b"KERNEL".to_vec())).expect("fits");
        if let Some(info) = info {
            builder.insert(MANIFEST_IMAGE, Source::Bytes(info.to_vec())).expect("fits");
        }
        let mut out = Cursor::new(Vec::new());
        builder.write_to(&mut out).expect("memory takes it");
        let allowed = check(out.get_ref().as_slice(), Policy::Strict, Trust::AnySigner).expect("allowed");
        assert!(allowed.manifest.is_none());
        assert!(verify(out.get_ref(), &key(1).verifying_key()).is_err());
    }
}

/// The signed bytes are those of DSSE's protocol.md.
#[test]
fn envelope_signs_the_dsse_encoding() {
    #[derive(Serialize, Deserialize)]
    struct Hello(String);
    impl Document for Hello {
        const TYPE: &'static str = "http://example.com/HelloWorld";
    }
    let key = key(7);
    let sealed = seal(&Hello("hello world".into()), Some(&key)).expect("sealed");
    let json: serde_json::Value = serde_json::from_slice(&sealed).expect("JSON");
    assert_eq!(json["payload"], "ImhlbGxvIHdvcmxkIg==");
    let signature = json["signatures"][0]["sig"].as_str().expect("text");
    let bytes = <base64ct::Base64 as base64ct::Encoding>::decode_vec(signature).expect("base64");
    let signature = ed25519_dalek::Signature::from_slice(&bytes).expect("64 bytes");
    let signed = b"DSSEv1 29 http://example.com/HelloWorld 13 \"hello world\"";
    key.verifying_key().verify_strict(signed, &signature).expect("signed over the pre-authentication encoding");
    assert!(open::<Hello>(&sealed, Trust::Key(&key.verifying_key())).is_ok());
    // The same bytes opened as another kind of document.
    assert!(matches!(open::<Manifest>(&sealed, Trust::AnySigner), Err(EnvelopeError::Type { .. })));
}

#[test]
fn changed_envelope_is_refused() {
    let files = FileManifest { version: "1".into(), epoch: 0, files: Vec::new() };
    let key = key(1);
    let sealed = String::from_utf8(seal(&files, Some(&key)).expect("sealed")).expect("JSON");
    let trust = key.verifying_key();
    let open = |text: &str| open::<FileManifest>(text.as_bytes(), Trust::Key(&trust));
    assert_eq!(open(&sealed).expect("as it was"), files);
    let payload = serde_json::from_str::<serde_json::Value>(&sealed).expect("JSON")["payload"].clone();
    let other = br#"{"version":"2","epoch":0,"files":[]}"#;
    let other = <base64ct::Base64 as base64ct::Encoding>::encode_string(other);
    let forged = sealed.replace(payload.as_str().expect("text"), &other);
    assert!(matches!(open(&forged), Err(EnvelopeError::Forged { .. })));
    assert!(matches!(open("{}"), Err(EnvelopeError::Form(_))));
    assert!(matches!(open(&" ".repeat(ENVELOPE_MAX_BYTES + 1)), Err(EnvelopeError::TooLong)));
}

#[test]
fn packed_files_verify_and_changed_ones_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("agent");
    std::fs::write(&source, b"#!agent").expect("written");
    let key = key(1);
    let trust = key.verifying_key();
    let files = |path: &str| vec![(path.to_owned(), source.clone())];
    let mut archive = Vec::new();
    files::write_archive(&files("/usr/bin/agent"), "1.0", 2, Some(&key), &mut archive).expect("packed");
    let root = folder.path().join("root");
    let names = unpack(&archive, &root);
    assert_eq!(names, ["usr", "usr/bin", "usr/bin/agent", "etc", "etc/sumac", "etc/sumac/manifest.json"]);
    let manifest = files::check(&root, Trust::Key(&trust)).expect("as packed");
    assert_eq!((manifest.epoch, manifest.files[0].len_bytes), (2, 7));
    for changed in [&b"#!agenT"[..], b"#!agent!", b""] {
        std::fs::write(root.join("usr/bin/agent"), changed).expect("written");
        assert!(matches!(files::check(&root, Trust::Key(&trust)), Err(files::FilesError::Differs { .. })));
    }
    for path in ["", "/", "../x", "/a/../b", "/a/", "a//b", "/a/./b"] {
        let packed = files::write_archive(&files(path), "1.0", 2, None, &mut Vec::new());
        assert!(matches!(packed, Err(files::FilesError::Path(_))), "{path:?}");
    }
}

/// Unpack an archive; return the names in it.
fn unpack(mut archive: &[u8], root: &std::path::Path) -> Vec<String> {
    let mut names = Vec::new();
    loop {
        let reader = cpio::NewcReader::new(archive).expect("an entry");
        if reader.entry().is_trailer() {
            return names;
        }
        let path: PathBuf = root.join(reader.entry().name());
        names.push(reader.entry().name().to_owned());
        if reader.entry().mode() & 0o170_000 == 0o040_000 {
            std::fs::create_dir_all(path).expect("a folder");
            archive = reader.finish().expect("no data");
        } else {
            let mut file = std::fs::File::create(path).expect("a file");
            archive = reader.to_writer(&mut file).expect("data");
        }
    }
}
