//! Keys and their text form, `sumac-key-v1 ID SECRET` in hexadecimal digits.

use core::fmt;
use core::str::FromStr;
use thiserror::Error;
use zeroize::Zeroizing;

/// The id of a key. It travels in clear, so it says nothing about the secret.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyId(pub u64);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

impl FromStr for KeyId {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        Ok(Self(u64::from_be_bytes(*hex::<8>(text).ok_or(KeyError::Id)?)))
    }
}

/// A pre-shared key. Its secret is cleared when it is dropped.
#[derive(Clone)]
pub struct Key {
    id: KeyId,
    secret: Zeroizing<[u8; 32]>,
}

/// Why a text is not a key. No message contains the text, which may be a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The text does not begin as keys do, or has other than three words.
    #[error("not a key: it must be one line, `sumac-key-v1 ID SECRET`, as `sumac key new` writes it")]
    Form,
    /// The id is malformed.
    #[error("a key's id is 16 hexadecimal digits")]
    Id,
    /// The secret is malformed.
    #[error("a key's secret is 64 hexadecimal digits")]
    Secret,
}

impl Key {
    /// Return the key of this id and secret.
    pub fn new(id: KeyId, secret: [u8; 32]) -> Self {
        Self { id, secret: Zeroizing::new(secret) }
    }

    /// The id.
    pub const fn id(&self) -> KeyId {
        self.id
    }

    pub(super) fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// Return a value whose `Display` is the key as text, with the secret.
    pub const fn reveal(&self) -> impl fmt::Display {
        Revealed(self)
    }

    /// Return a value whose `Display` is the secret in hexadecimal digits.
    pub fn reveal_secret(&self) -> impl fmt::Display {
        Digits(&self.secret)
    }
}

/// Compares ids and secrets; it takes the same time wherever secrets differ.
impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        let differing = self.secret.iter().zip(other.secret.iter()).fold(0, |bits, (one, other)| bits | (one ^ other));
        self.id == other.id && differing == 0
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("id", &self.id).finish_non_exhaustive()
    }
}

impl FromStr for Key {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let mut words = text.split_ascii_whitespace();
        let (form, id, secret) = (words.next(), words.next(), words.next());
        let (Some(FORM), Some(id), Some(secret), None) = (form, id, secret, words.next()) else {
            return Err(KeyError::Form);
        };
        Self::from_parts(id.parse()?, secret)
    }
}

impl Key {
    /// Return the key of an id and a secret in hexadecimal digits.
    ///
    /// # Errors
    /// [`KeyError::Secret`].
    pub fn from_parts(id: KeyId, secret: &str) -> Result<Self, KeyError> {
        Ok(Self { id, secret: hex(secret).ok_or(KeyError::Secret)? })
    }
}

/// The first word of a key as text.
const FORM: &str = "sumac-key-v1";

struct Revealed<'a>(&'a Key);

impl fmt::Display for Revealed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{FORM} {} {}", self.0.id, Digits(&self.0.secret))
    }
}

struct Digits<'a>(&'a [u8; 32]);

impl fmt::Display for Digits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Parse exactly `N` bytes in hexadecimal digits.
fn hex<const N: usize>(text: &str) -> Option<Zeroizing<[u8; N]>> {
    let mut bytes = Zeroizing::new([0; N]);
    if text.len() != 2 * N {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |index: usize| char::from(digits[index]).to_digit(16);
        *byte = (digit(0)? << 4 | digit(1)?) as u8;
    }
    Some(bytes)
}
