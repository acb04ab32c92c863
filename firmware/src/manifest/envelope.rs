//! A signed JSON document: DSSE (secure-systems-lab/dsse, protocol version 1), signed with ed25519.
//!
//! What is signed is `DSSEv1 <type length> <type> <body length> <body>`: the type is part of it, so that a document of one
//! kind can't stand in for one of another, and the body is the bytes as they are, so that nothing depends on how JSON is
//! written. Nothing of a body is looked at before its signature is.

use super::hex;
use base64ct::{Base64, Encoding};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use thiserror::Error;

/// The longest envelope, in bytes: it is read into memory before anything of it is checked.
pub const ENVELOPE_MAX_BYTES: usize = 1 << 20;

/// Whom to believe.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Trust<'a> {
    /// Only what this key has signed.
    Key(&'a VerifyingKey),
    /// Anybody: digests are checked, but whoever changed the data could have changed them too.
    Anybody,
}

/// A document of one kind.
pub trait Document: Serialize + DeserializeOwned {
    /// The kind, as a media type.
    const TYPE: &'static str;
}

/// Why an envelope can't be believed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EnvelopeError {
    /// Longer than any that is written.
    #[error("the manifest has more than {ENVELOPE_MAX_BYTES} bytes")]
    TooLong,
    /// Not JSON, or not of this form.
    #[error("it is no signed manifest (DSSE): {0}")]
    Form(String),
    /// Another kind of document.
    #[error("it is a {found:?} where a {expected:?} is due")]
    Type {
        /// What it says that it is.
        found: String,
        /// What is due.
        expected: &'static str,
    },
    /// No signature by the key.
    #[error("it is not signed by the key {key_id}; its signatures are by: {}", signers(found))]
    NotSigned {
        /// The key's id.
        key_id: String,
        /// The ids of the keys that it says have signed it.
        found: Vec<String>,
    },
    /// A signature by the key that is wrong.
    #[error("the signature by the key {key_id} is wrong: the manifest was changed after it was signed")]
    Forged {
        /// The key's id.
        key_id: String,
    },
    /// What was signed can't be read.
    #[error("the manifest cannot be read: {0}")]
    Body(#[from] serde_json::Error),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Envelope {
    payload_type: String,
    payload: String,
    signatures: Vec<Signed>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Signed {
    keyid: String,
    sig: String,
}

/// Return a short name of a key: the first 8 bytes of its SHA-256, in hexadecimal digits.
pub fn key_id(key: &VerifyingKey) -> String {
    hex(&Sha256::digest(key.as_bytes())[..8])
}

/// Write a document, signed if there is a key.
///
/// # Errors
/// The document has no JSON form, or is too long.
pub fn seal<T: Document>(document: &T, key: Option<&SigningKey>) -> Result<Vec<u8>, EnvelopeError> {
    let body = serde_json::to_vec(document)?;
    let signatures = key
        .map(|key| {
            let signature = key.sign(&signed_bytes(T::TYPE, &body));
            Signed { keyid: key_id(&key.verifying_key()), sig: Base64::encode_string(&signature.to_bytes()) }
        })
        .into_iter()
        .collect();
    let envelope = Envelope { payload_type: T::TYPE.into(), payload: Base64::encode_string(&body), signatures };
    let bytes = serde_json::to_vec(&envelope)?;
    if bytes.len() > ENVELOPE_MAX_BYTES { Err(EnvelopeError::TooLong) } else { Ok(bytes) }
}

/// Read a document that is trusted.
///
/// # Errors
/// It is none, of another kind, or not signed by whom to trust.
pub fn open<T: Document>(bytes: &[u8], trust: Trust<'_>) -> Result<T, EnvelopeError> {
    if bytes.len() > ENVELOPE_MAX_BYTES {
        return Err(EnvelopeError::TooLong);
    }
    let envelope: Envelope = serde_json::from_slice(bytes).map_err(|error| EnvelopeError::Form(error.to_string()))?;
    if envelope.payload_type != T::TYPE {
        return Err(EnvelopeError::Type { found: envelope.payload_type, expected: T::TYPE });
    }
    let body = Base64::decode_vec(&envelope.payload).map_err(|error| EnvelopeError::Form(error.to_string()))?;
    if let Trust::Key(key) = trust {
        check(&envelope.signatures, key, &signed_bytes(T::TYPE, &body))?;
    }
    Ok(serde_json::from_slice(&body)?)
}

fn check(signatures: &[Signed], key: &VerifyingKey, message: &[u8]) -> Result<(), EnvelopeError> {
    let key_id = key_id(key);
    let found = || signatures.iter().map(|signed| signed.keyid.clone()).collect();
    let signed = signatures.iter().find(|signed| signed.keyid == key_id);
    let signed = signed.ok_or_else(|| EnvelopeError::NotSigned { key_id: key_id.clone(), found: found() })?;
    let mut bytes = [0; Signature::BYTE_SIZE];
    let whole = Base64::decode(&signed.sig, &mut bytes).is_ok_and(|decoded| decoded.len() == Signature::BYTE_SIZE);
    // Strict: no keys of small order, and one signature for one message.
    if whole && key.verify_strict(message, &Signature::from_bytes(&bytes)).is_ok() {
        Ok(())
    } else {
        Err(EnvelopeError::Forged { key_id })
    }
}

/// DSSE's pre-authentication encoding.
fn signed_bytes(kind: &str, body: &[u8]) -> Vec<u8> {
    let mut bytes = format!("DSSEv1 {} {kind} {} ", kind.len(), body.len()).into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

fn signers(ids: &[String]) -> String {
    if ids.is_empty() { "nobody".into() } else { ids.join(", ") }
}
