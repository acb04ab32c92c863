//! Binds `noise-protocol` to the primitives: X25519, ChaCha20-Poly1305 and SHA-256.
//!
//! The crate `noise-rust-crypto` does the same for older releases of these crates. Golden vectors of other
//! implementations (in `tests`) show that the bindings are right.

use chacha20poly1305::ChaCha20Poly1305;
use chacha20poly1305::aead::{AeadInOut, KeyInit, Nonce, Tag};
use noise_protocol::{Cipher, DH, Hash, U8Array};
use sha2::Digest;
use x25519_dalek::{PublicKey, StaticSecret};
use zeroize::Zeroizing;

/// Bytes that are cleared when they are dropped.
pub(super) struct Sensitive(Zeroizing<[u8; 32]>);

impl Sensitive {
    pub(super) fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }
}

impl U8Array for Sensitive {
    fn new() -> Self {
        Self::new([0; 32])
    }

    fn new_with(byte: u8) -> Self {
        Self::new([byte; 32])
    }

    fn from_slice(bytes: &[u8]) -> Self {
        let mut array = Self::new([0; 32]);
        array.0.copy_from_slice(bytes);
        array
    }

    fn len() -> usize {
        32
    }

    fn as_slice(&self) -> &[u8] {
        &self.0[..]
    }

    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.0[..]
    }
}

/// Diffie-Hellman on Curve25519.
pub(super) enum X25519 {}

impl DH for X25519 {
    type Key = Sensitive;
    type Pubkey = [u8; 32];
    type Output = Sensitive;

    fn name() -> &'static str {
        "25519"
    }

    fn genkey() -> Sensitive {
        unreachable!("handshakes are given their ephemeral keys")
    }

    fn pubkey(key: &Sensitive) -> [u8; 32] {
        PublicKey::from(&StaticSecret::from(*key.0)).to_bytes()
    }

    fn dh(key: &Sensitive, public: &[u8; 32]) -> Result<Sensitive, ()> {
        let shared = StaticSecret::from(*key.0).diffie_hellman(&PublicKey::from(*public));
        // A point of small order would make the result known to all.
        if shared.was_contributory() { Ok(Sensitive::new(*shared.as_bytes())) } else { Err(()) }
    }
}

/// ChaCha20-Poly1305 (RFC 8439).
pub(super) enum ChaChaPoly {}

impl ChaChaPoly {
    fn nonce(number: u64) -> Nonce<ChaCha20Poly1305> {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&number.to_le_bytes());
        nonce.into()
    }

    fn cipher(key: &Sensitive) -> ChaCha20Poly1305 {
        ChaCha20Poly1305::new((&*key.0).into())
    }
}

impl Cipher for ChaChaPoly {
    type Key = Sensitive;

    fn name() -> &'static str {
        "ChaChaPoly"
    }

    fn encrypt(key: &Sensitive, nonce: u64, ad: &[u8], plaintext: &[u8], out: &mut [u8]) {
        out[..plaintext.len()].copy_from_slice(plaintext);
        Self::encrypt_in_place(key, nonce, ad, out, plaintext.len());
    }

    fn encrypt_in_place(key: &Sensitive, nonce: u64, ad: &[u8], in_out: &mut [u8], plaintext_len: usize) -> usize {
        let (text, tag) = in_out[..plaintext_len + TAG_LEN].split_at_mut(plaintext_len);
        let sealed = Self::cipher(key).encrypt_inout_detached(&Self::nonce(nonce), ad, text.into());
        tag.copy_from_slice(&sealed.expect("far less than the 256 GiB that the cipher encrypts at once"));
        plaintext_len + TAG_LEN
    }

    fn decrypt(key: &Sensitive, nonce: u64, ad: &[u8], ciphertext: &[u8], out: &mut [u8]) -> Result<(), ()> {
        let (text, tag) = ciphertext.split_at(out.len());
        out.copy_from_slice(text);
        Self::open(key, nonce, ad, out, tag)
    }

    fn decrypt_in_place(
        key: &Sensitive,
        nonce: u64,
        ad: &[u8],
        in_out: &mut [u8],
        ciphertext_len: usize,
    ) -> Result<usize, ()> {
        let len = ciphertext_len.checked_sub(TAG_LEN).ok_or(())?;
        let (text, tag) = in_out[..ciphertext_len].split_at_mut(len);
        Self::open(key, nonce, ad, text, tag)?;
        Ok(len)
    }
}

impl ChaChaPoly {
    fn open(key: &Sensitive, nonce: u64, ad: &[u8], text: &mut [u8], tag: &[u8]) -> Result<(), ()> {
        let tag = Tag::<ChaCha20Poly1305>::try_from(tag).map_err(|_| ())?;
        let opened = Self::cipher(key).decrypt_inout_detached(&Self::nonce(nonce), ad, text.into(), &tag);
        opened.map_err(|_| ())
    }
}

/// The length of a tag, in bytes.
pub(super) const TAG_LEN: usize = 16;

/// SHA-256.
#[derive(Default)]
pub(super) struct Sha256(sha2::Sha256);

impl Hash for Sha256 {
    type Block = [u8; 64];
    type Output = Sensitive;

    fn name() -> &'static str {
        "SHA256"
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self) -> Sensitive {
        Sensitive::new(self.0.finalize_reset().into())
    }
}
