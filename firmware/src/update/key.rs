//! The key by which a card accepts images for its slots, over rshim and over the network.

use crate::manifest::envelope::{self, Trust};
use crate::manifest::{Manifest, ManifestError};
use crate::slots::Offer;
use ed25519_dalek::VerifyingKey;
use ed25519_dalek::pkcs8::DecodePublicKey;
use std::fmt;
use std::str::FromStr;
use thiserror::Error;

/// The operators' public key, by which a card accepts updates.
///
/// Its text is the line between the first and the last one of a PEM file (`openssl pkey -pubout`), so that it fits into
/// a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdateKey(VerifyingKey);

/// A text is no update key.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("not a public ed25519 key; give the middle line of the file that `openssl pkey -pubout` writes")]
pub struct UpdateKeyError;

impl FromStr for UpdateKey {
    type Err = UpdateKeyError;

    fn from_str(text: &str) -> Result<Self, UpdateKeyError> {
        let pem = format!("-----BEGIN PUBLIC KEY-----\n{text}\n-----END PUBLIC KEY-----\n");
        VerifyingKey::from_public_key_pem(&pem).map(Self).map_err(|_| UpdateKeyError)
    }
}

impl UpdateKey {
    /// Return the key.
    pub const fn verifying_key(&self) -> &VerifyingKey {
        &self.0
    }

    /// Verify a signed manifest, and return what it says of a slot's payload. The payload is compared with it while it
    /// is written ([`crate::slots::Updater`]).
    ///
    /// # Errors
    /// The key has not signed it, it is for another kind of card, or it describes no payload.
    pub fn open(&self, manifest: &[u8]) -> Result<Offer, ManifestError> {
        envelope::open::<Manifest>(manifest, Trust::Key(&self.0))?.offer()
    }
}

impl From<VerifyingKey> for UpdateKey {
    fn from(key: VerifyingKey) -> Self {
        Self(key)
    }
}

impl fmt::Display for UpdateKey {
    /// Shows its id.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&envelope::key_id(&self.0))
    }
}
