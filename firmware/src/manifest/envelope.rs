//! A signed JSON document: DSSE (secure-systems-lab/dsse, protocol version 1), signed with ed25519.
//!
//! The signed bytes are `DSSEv1 <type length> <type> <body length> <body>`. They include the type, so that a document
//! of one kind cannot be passed off as another, and the body as it is, so that nothing depends on the formatting of
//! JSON. A body is not parsed before its signature is verified.

use super::hex;
use base64ct::{Base64, Encoding};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};
use thiserror::Error;

/// The maximum length of an envelope in bytes: it is read into memory before it is checked.
pub const ENVELOPE_MAX_BYTES: usize = 1 << 20;

/// Whose signature to trust.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Trust<'a> {
    /// Only documents signed by this key.
    Key(&'a VerifyingKey),
    /// Any document: digests are checked, but data and digests could have been changed together.
    AnySigner,
}

/// A kind of document.
pub trait Document: Serialize + DeserializeOwned {
    /// Its media type.
    const TYPE: &'static str;
}

/// Why an envelope is rejected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EnvelopeError {
    /// It is too long.
    #[error("the manifest exceeds {ENVELOPE_MAX_BYTES} bytes")]
    TooLong,
    /// It is not JSON of the expected form.
    #[error("not a signed manifest (DSSE): {0}")]
    Form(String),
    /// It is another kind of document.
    #[error("the document is {found:?}, not {expected:?}")]
    Type {
        /// Its type.
        found: String,
        /// The expected type.
        expected: &'static str,
    },
    /// It is not signed by the key.
    #[error("not signed by the key {key_id}; signed by: {}", signer_list(found))]
    NotSigned {
        /// The key's id.
        key_id: String,
        /// The ids of the keys in its signatures.
        found: Vec<String>,
    },
    /// The key's signature is invalid.
    #[error("the signature by the key {key_id} is invalid: the manifest was changed after it was signed")]
    Forged {
        /// The key's id.
        key_id: String,
    },
    /// The signed document cannot be parsed.
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

/// Return the id of a key: the first 8 bytes of its SHA-256, in hexadecimal.
pub fn key_id(key: &VerifyingKey) -> String {
    hex(&Sha256::digest(key.as_bytes())[..8])
}

/// Encode a document, signed if there is a key.
///
/// # Errors
/// The document cannot be encoded, or is too long.
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

/// Verify and parse a document.
///
/// # Errors
/// It is malformed, of another kind, or not signed as required.
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
    // Strict: rejects keys of small order, and allows one signature per message.
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

fn signer_list(ids: &[String]) -> String {
    if ids.is_empty() { "no key".into() } else { ids.join(", ") }
}
