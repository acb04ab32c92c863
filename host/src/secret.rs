//! The secret of a job: 256 random bits that only the controller and the job's ranks know.
//!
//! The controller draws it and sends it inside control connections, which are encrypted where keys are used. It never
//! travels between ranks: they prove to each other that they know it.

use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::Sha256;
use std::fmt;
use zeroize::Zeroizing;

/// The secret of a job, or one that was derived from it. It is cleared when it is dropped, and `Debug` hides it.
#[derive(Clone)]
pub struct JobSecret(Zeroizing<[u8; 32]>);

impl JobSecret {
    /// Return the secret of these bytes, which must be random.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// Return a secret for one use. Who learns it learns nothing about this one, or about that of another use.
    pub(crate) fn derive(&self, purpose: &[u8; 16], numbers: &[u64]) -> Self {
        let mut mac = self.mac(purpose);
        numbers.iter().for_each(|number| mac.update(&number.to_le_bytes()));
        Self::new(mac.finalize().into_bytes().into())
    }

    /// Return a name of the secret that does not reveal it.
    pub(crate) fn fingerprint(&self) -> [u8; 32] {
        self.mac(b"fingerprint\0\0\0\0\0").finalize().into_bytes().into()
    }

    /// Return the bytes.
    pub(crate) fn bytes(&self) -> [u8; 32] {
        *self.0
    }

    /// Begin a MAC under this secret. `purpose` separates it from those of other uses.
    pub(crate) fn mac(&self, purpose: &[u8; 16]) -> Hmac<Sha256> {
        let mut mac = Hmac::new_from_slice(&self.0[..]).expect("HMAC takes keys of any length");
        mac.update(purpose);
        mac
    }
}

/// Takes the same time wherever secrets differ.
impl PartialEq for JobSecret {
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0.iter()).fold(0, |bits, (one, other)| bits | (one ^ other)) == 0
    }
}

impl Eq for JobSecret {}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

impl Serialize for JobSecret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JobSecret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Deserialize::deserialize(deserializer).map(Self::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secret_is_hidden_and_travels_as_its_bytes() {
        let secret = JobSecret::new(std::array::from_fn(|index| index as u8));
        assert_eq!(format!("{secret:?}"), "JobSecret(..)");
        let bytes = postcard::to_stdvec(&secret).expect("in memory");
        assert_eq!(bytes, (0..32).collect::<Vec<u8>>());
        assert_eq!(postcard::from_bytes(&bytes), Ok(secret));
    }

    #[test]
    fn derived_secrets_depend_on_the_secret_the_purpose_and_each_number() {
        let (secret, other) = (JobSecret::new([1; 32]), JobSecret::new([2; 32]));
        let all = [
            secret.clone(),
            other.clone(),
            secret.derive(b"one-------------", &[1, 2]),
            secret.derive(b"two-------------", &[1, 2]),
            secret.derive(b"one-------------", &[1, 3]),
            secret.derive(b"one-------------", &[2, 1]),
            other.derive(b"one-------------", &[1, 2]),
            JobSecret::new(secret.fingerprint()),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(all[index + 1..].iter().all(|other| other != one), "{index}");
        }
        assert_eq!(secret.derive(b"one-------------", &[1, 2]), all[2]);
    }
}
