//! The data plane's keys (PROTOCOL 10).
//!
//! A group on a node has one secret, known to its controller and that node; each child gets 64 bits of
//! HMAC-SHA256(secret, group, epoch, child). A packet without the right key is dropped unanswered, so only who
//! was admitted can contribute. This keeps strangers out, not an attacker on the path, who reads the key.

use crate::ids::{ChildIndex, Epoch, GroupId};
use core::fmt;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

/// What the keys of one group on one node are made of. Its `Debug` output does not show it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupSecret(pub [u8; 16]);

impl GroupSecret {
    /// Return the key of one child's link; for [`ChildIndex::ALL`] that of what goes down to all children, which each
    /// of them knows.
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
    fn keys_differ_by_each_input_and_stay_stable() {
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
