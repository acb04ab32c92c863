//! The keys of the data plane (PROTOCOL 10).
//!
//! A group has one secret per node, known to the controller and that node. Each child gets a 64-bit key:
//! HMAC-SHA256(secret, group, epoch, child), truncated. A packet with a wrong key is dropped without a reply, so that
//! only admitted children can contribute. Keys do not protect against an attacker on the path, who can read them.

use crate::ids::{ChildIndex, Epoch, GroupId};
use core::fmt;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// The secret from which the keys of one group on one node are derived. Its `Debug` output does not reveal it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupSecret(pub [u8; 16]);

impl GroupSecret {
    /// Return the key of one child's link. For [`ChildIndex::ALL`] this is the key of packets to all children, which
    /// every child knows.
    pub fn child_key(&self, group: GroupId, epoch: Epoch, child: ChildIndex) -> u64 {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        mac.update(&group.0.to_le_bytes());
        mac.update(&epoch.to_bits().to_le_bytes());
        mac.update(&child.0.to_le_bytes());
        let digest = mac.finalize().into_bytes();
        let mut head = [0; 8];
        head.copy_from_slice(&digest[..8]);
        u64::from_le_bytes(head)
    }
}

impl fmt::Debug for GroupSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupSecret(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_depends_on_every_input_and_matches_its_golden_value() {
        let secret = GroupSecret([7; 16]);
        let (group, epoch, child) = (GroupId(1), Epoch { term: 1, counter: 1 }, ChildIndex(0));
        let key = secret.child_key(group, epoch, child);
        assert_ne!(key, GroupSecret([8; 16]).child_key(group, epoch, child));
        assert_ne!(key, secret.child_key(GroupId(2), epoch, child));
        assert_ne!(key, secret.child_key(group, Epoch { term: 1, counter: 2 }, child));
        assert_ne!(key, secret.child_key(group, epoch, ChildIndex(1)));
        // HMAC-SHA256(07 x 16, 01000000 01000100 0000), first 8 bytes, little-endian: frozen with the wire.
        assert_eq!(key, GOLDEN);
    }

    const GOLDEN: u64 = 0x432f_b1a5_7701_bf48;
}
