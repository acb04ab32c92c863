//! The set-up of a connection, over TCP: who one is, proven by the key of the child's link, and where one's end is.
//!
//! ```text
//! rank                                            device
//!   | -- connect -----------------------------------> |
//!   | <---------------- Challenge (its number) ------ |
//!   | -- Call (group, child, its number, end, proof)-> | looks the child's key up, checks
//!   | <----------- Answer (Seat: end, proof; or why not)
//! ```
//!
//! A proof is HMAC-SHA256 by the child's key ([`key`](crate::key)) over all that both have said, with numbers that each has
//! drawn: nobody without the key gets or takes a seat, nobody can change where an end is, and what was heard once opens
//! nothing again. The key is never sent. Which memory a rank exposes travels over the connection that was set up, whose
//! ends the proofs name.
//!
//! An attacker on the path who can send packets of the connection itself is out of scope (PROTOCOL 10), as RoCE is.

use super::LinkEnd;
use crate::dma::Capabilities;
use crate::ids::{BootId, ChildIndex, GroupId};
use crate::shm::AttachRefusal;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// The version of the set-up and of the messages behind it.
pub const VERSION: u16 = 1;

/// What is drawn for one set-up.
pub type Number = [u8; 16];

/// What shows that somebody has the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof([u8; 32]);

/// What a device says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// [`VERSION`]
    pub version: u16,
    /// Drawn for this rank.
    pub number: Number,
}

/// What a rank says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The group.
    pub group: GroupId,
    /// Which child it is.
    pub child: ChildIndex,
    /// Drawn for this set-up.
    pub number: Number,
    /// Where its end is.
    pub end: LinkEnd,
    /// [`Call::prove`]
    pub proof: Proof,
}

/// What a device answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// It lets the rank in.
    Seat(Seat),
    /// It does not.
    Refused(AttachRefusal),
}

/// What a rank gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seat {
    /// Where the device's end is.
    pub end: LinkEnd,
    /// The device's life.
    pub boot_id: BootId,
    /// The depth of its rings.
    pub depth: u32,
    /// What addresses have to be multiples of, for its engine.
    pub alignment_bytes: u32,
    /// [`Seat::prove`]
    pub proof: Proof,
}

fn mac(key: u64, who: &[u8], said: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&key.to_le_bytes()).expect("HMAC takes keys of any length");
    mac.update(who);
    mac.update(&VERSION.to_le_bytes());
    // Each of a length that does not change.
    said.iter().for_each(|part| mac.update(part));
    mac
}

impl Call {
    /// Prove that this is said by who has the key, to who has drawn the challenge.
    #[must_use]
    pub fn prove(mut self, key: u64, challenge: &Challenge) -> Self {
        self.proof = Proof(self.mac(key, challenge).finalize().into_bytes().into());
        self
    }

    /// Tell whether it is.
    pub fn is_proven(&self, key: u64, challenge: &Challenge) -> bool {
        self.mac(key, challenge).verify_slice(&self.proof.0).is_ok()
    }

    /// Describe a call that nothing proves yet.
    pub const fn new(group: GroupId, child: ChildIndex, number: Number, end: LinkEnd) -> Self {
        Self { group, child, number, end, proof: Proof([0; 32]) }
    }

    fn mac(&self, key: u64, challenge: &Challenge) -> Hmac<Sha256> {
        let (group, child) = (self.group.0.to_le_bytes(), self.child.0.to_le_bytes());
        mac(key, b"rank", &[&challenge.number, &group, &child, &self.number, &self.end.0])
    }
}

impl Seat {
    /// Describe a seat that nothing proves yet.
    pub const fn new(end: LinkEnd, boot_id: BootId, depth: u32, dma: &Capabilities) -> Self {
        Self { end, boot_id, depth, alignment_bytes: dma.alignment_bytes, proof: Proof([0; 32]) }
    }

    /// Prove that this is said by who has the key, to who has made the call.
    #[must_use]
    pub fn prove(mut self, key: u64, (challenge, call): (&Challenge, &Call)) -> Self {
        self.proof = Proof(self.mac(key, (challenge, call)).finalize().into_bytes().into());
        self
    }

    /// Tell whether it is.
    pub fn is_proven(&self, key: u64, (challenge, call): (&Challenge, &Call)) -> bool {
        self.mac(key, (challenge, call)).verify_slice(&self.proof.0).is_ok()
    }

    fn mac(&self, key: u64, (challenge, call): (&Challenge, &Call)) -> Hmac<Sha256> {
        let (boot_id, depth) = (self.boot_id.0.to_le_bytes(), self.depth.to_le_bytes());
        let alignment = self.alignment_bytes.to_le_bytes();
        mac(
            key,
            b"device",
            &[&challenge.number, &call.number, &call.proof.0, &self.end.0, &boot_id, &depth, &alignment],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dma::Profile;

    const KEY: u64 = 0x0123_4567_89ab_cdef;
    const END: LinkEnd = LinkEnd([7; super::super::LINK_END_LEN_BYTES]);

    fn challenge(number: u8) -> Challenge {
        Challenge { version: VERSION, number: [number; 16] }
    }

    /// Whoever changes anything, says it again to another challenge, or has another key, proves nothing.
    #[test]
    fn a_proof_is_of_all_that_was_said_and_of_this_set_up() {
        let call = Call::new(GroupId(3), ChildIndex(4), [5; 16], END).prove(KEY, &challenge(1));
        assert!(call.is_proven(KEY, &challenge(1)));
        assert!(!call.is_proven(KEY ^ 1, &challenge(1)) && !call.is_proven(KEY, &challenge(2)));
        let forged = [
            Call { group: GroupId(2), ..call },
            Call { child: ChildIndex(5), ..call },
            Call { number: [6; 16], ..call },
            Call { end: LinkEnd([8; super::super::LINK_END_LEN_BYTES]), ..call },
        ];
        assert!(forged.iter().all(|call| !call.is_proven(KEY, &challenge(1))));
        let dma = Capabilities::new(Profile::CopyOnly, 8, 8);
        let said = (&challenge(1), &call);
        let seat = Seat::new(END, BootId(9), 1024, &dma).prove(KEY, said);
        assert!(seat.is_proven(KEY, said) && !seat.is_proven(KEY ^ 1, said));
        let other = Call::new(GroupId(3), ChildIndex(4), [6; 16], END).prove(KEY, &challenge(1));
        assert!(!seat.is_proven(KEY, (&challenge(1), &other)) && !seat.is_proven(KEY, (&challenge(2), &call)));
        let forged = [
            Seat { end: LinkEnd([8; super::super::LINK_END_LEN_BYTES]), ..seat },
            Seat { boot_id: BootId(8), ..seat },
            Seat { depth: 8, ..seat },
            Seat { alignment_bytes: 2, ..seat },
        ];
        assert!(forged.iter().all(|seat| !seat.is_proven(KEY, said)));
        // What one side says proves nothing of the other.
        let echo = Seat { proof: call.proof, ..seat };
        assert!(!echo.is_proven(KEY, said));
    }
}
