//! The set-up of a connection over TCP: rank and device authenticate each other with the key of the child's link, and
//! exchange the addresses of their ends.
//!
//! ```text
//! rank                                             device
//!   | -- connect ------------------------------------> |
//!   | <--------------------- Challenge (nonce) ------- |
//!   | -- AttachRequest (group, child, nonce,           |
//!   |                   end, proof) -----------------> | looks up the child's key, verifies
//!   | <--- AttachReply (Attachment: end, ..., proof; --|
//!   |                   or the reason for refusal)     |
//! ```
//!
//! A proof is an HMAC-SHA256 under the child's key ([`key`](crate::key)) over everything that both sides have sent,
//! including a nonce from each. Without the key it is impossible to attach, to reply, or to alter the address of an
//! end, and a recorded exchange cannot be replayed. The key itself is never sent. The description of the memory that a
//! rank exposes travels over the resulting connection, whose ends the proofs cover.
//!
//! An attacker on the path who can inject packets into that connection is out of scope (PROTOCOL 10), as for RoCE.

use super::LinkEnd;
use crate::dma::Capabilities;
use crate::ids::{BootId, ChildIndex, GroupId};
use crate::shm::AttachRefusal;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// The version of the handshake and of the messages that follow.
pub const VERSION: u16 = 1;

/// A random number drawn for one handshake.
pub type Nonce = [u8; 16];

/// A message authentication code that proves knowledge of the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof([u8; 32]);

/// The device's first message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// [`VERSION`]
    pub version: u16,
    /// Drawn by the device for this handshake.
    pub nonce: Nonce,
}

/// The rank's request to attach.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The group.
    pub group: GroupId,
    /// The child of the device's node.
    pub child: ChildIndex,
    /// Drawn by the rank for this handshake.
    pub nonce: Nonce,
    /// The address of the rank's end.
    pub end: LinkEnd,
    /// [`AttachRequest::prove`]
    pub proof: Proof,
}

/// The device's reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttachReply {
    /// The rank is attached.
    Accepted(Attachment),
    /// The rank is refused.
    Refused(AttachRefusal),
}

/// What an attached rank receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// The address of the device's end.
    pub end: LinkEnd,
    /// The device's incarnation.
    pub boot_id: BootId,
    /// The depth of its rings.
    pub depth: u32,
    /// The alignment that the device's engine requires of addresses.
    pub alignment_bytes: u32,
    /// [`Attachment::prove`]
    pub proof: Proof,
}

fn mac(key: u64, who: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&key.to_le_bytes()).expect("HMAC takes keys of any length");
    mac.update(who);
    mac.update(&VERSION.to_le_bytes());
    // Each part has a fixed length, so the concatenation is unambiguous.
    parts.iter().for_each(|part| mac.update(part));
    mac
}

impl AttachRequest {
    /// Authenticate this request for the given challenge.
    #[must_use]
    pub fn prove(mut self, key: u64, challenge: &Challenge) -> Self {
        self.proof = Proof(self.mac(key, challenge).finalize().into_bytes().into());
        self
    }

    /// Return whether the proof is valid for the given challenge.
    pub fn is_proven(&self, key: u64, challenge: &Challenge) -> bool {
        self.mac(key, challenge).verify_slice(&self.proof.0).is_ok()
    }

    /// Create a request without a proof.
    pub const fn new(group: GroupId, child: ChildIndex, nonce: Nonce, end: LinkEnd) -> Self {
        Self { group, child, nonce, end, proof: Proof([0; 32]) }
    }

    fn mac(&self, key: u64, challenge: &Challenge) -> Hmac<Sha256> {
        let (group, child) = (self.group.0.to_le_bytes(), self.child.0.to_le_bytes());
        mac(key, b"rank", &[&challenge.nonce, &group, &child, &self.nonce, &self.end.0])
    }
}

impl Attachment {
    /// Create an attachment without a proof.
    pub const fn new(end: LinkEnd, boot_id: BootId, depth: u32, dma: &Capabilities) -> Self {
        Self { end, boot_id, depth, alignment_bytes: dma.alignment_bytes, proof: Proof([0; 32]) }
    }

    /// Authenticate this attachment for the given challenge and request.
    #[must_use]
    pub fn prove(mut self, key: u64, (challenge, request): (&Challenge, &AttachRequest)) -> Self {
        self.proof = Proof(self.mac(key, (challenge, request)).finalize().into_bytes().into());
        self
    }

    /// Return whether the proof is valid for the given challenge and request.
    pub fn is_proven(&self, key: u64, (challenge, request): (&Challenge, &AttachRequest)) -> bool {
        self.mac(key, (challenge, request)).verify_slice(&self.proof.0).is_ok()
    }

    fn mac(&self, key: u64, (challenge, request): (&Challenge, &AttachRequest)) -> Hmac<Sha256> {
        let (boot_id, depth) = (self.boot_id.0.to_le_bytes(), self.depth.to_le_bytes());
        let alignment = self.alignment_bytes.to_le_bytes();
        mac(
            key,
            b"device",
            &[&challenge.nonce, &request.nonce, &request.proof.0, &self.end.0, &boot_id, &depth, &alignment],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::Profile;

    const KEY: u64 = 0x0123_4567_89ab_cdef;
    const END: LinkEnd = LinkEnd([7; super::super::LINK_END_LEN_BYTES]);

    fn challenge(nonce: u8) -> Challenge {
        Challenge { version: VERSION, nonce: [nonce; 16] }
    }

    /// A changed field, another challenge or another key invalidates the proof.
    #[test]
    fn proof_covers_every_field_and_both_nonces() {
        let request = AttachRequest::new(GroupId(3), ChildIndex(4), [5; 16], END).prove(KEY, &challenge(1));
        assert!(request.is_proven(KEY, &challenge(1)));
        assert!(!request.is_proven(KEY ^ 1, &challenge(1)) && !request.is_proven(KEY, &challenge(2)));
        let forged = [
            AttachRequest { group: GroupId(2), ..request },
            AttachRequest { child: ChildIndex(5), ..request },
            AttachRequest { nonce: [6; 16], ..request },
            AttachRequest { end: LinkEnd([8; super::super::LINK_END_LEN_BYTES]), ..request },
        ];
        assert!(forged.iter().all(|request| !request.is_proven(KEY, &challenge(1))));
        let dma = Capabilities::new(Profile::CopyOnly, 8, 8);
        let transcript = (&challenge(1), &request);
        let attachment = Attachment::new(END, BootId(9), 1024, &dma).prove(KEY, transcript);
        assert!(attachment.is_proven(KEY, transcript) && !attachment.is_proven(KEY ^ 1, transcript));
        let other = AttachRequest::new(GroupId(3), ChildIndex(4), [6; 16], END).prove(KEY, &challenge(1));
        assert!(
            !attachment.is_proven(KEY, (&challenge(1), &other))
                && !attachment.is_proven(KEY, (&challenge(2), &request))
        );
        let forged = [
            Attachment { end: LinkEnd([8; super::super::LINK_END_LEN_BYTES]), ..attachment },
            Attachment { boot_id: BootId(8), ..attachment },
            Attachment { depth: 8, ..attachment },
            Attachment { alignment_bytes: 2, ..attachment },
        ];
        assert!(forged.iter().all(|attachment| !attachment.is_proven(KEY, transcript)));
        // A rank's proof reflected as the device's is refused.
        let reflected = Attachment { proof: request.proof, ..attachment };
        assert!(!reflected.is_proven(KEY, transcript));
    }
}
