//! Updates of a device that boots from two slots: what a controller asks of it, and what it reports.
//!
//! ```text
//!   Begin -> Piece ... Piece -> Finish -> (Status until Ready) -> Restart -> (trial) -> Confirm, or by itself
//! ```
//!
//! The pieces carry the image's signed manifest and then the image. The device has the manifest checked before it
//! writes anything. Every request is answered at once with an [`UpdateStatus`]; the device writes in the background,
//! so that renewals of groups wait for no disk. What was received and not yet written is bounded by
//! [`UPDATE_WINDOW_BYTES`].
//!
//! A transfer is named by the digest of its image: a requester that lost its connection asks for the status, and goes
//! on at [`Transfer::Receiving`]'s `received_bytes`. A transfer of which nothing arrives for [`TRANSFER_LEASE`] is
//! dropped, and its requester starts over.

use core::time::Duration;
use heapless::String;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The longest piece, in bytes: half a frame. Each piece costs a request and a response.
pub const PIECE_MAX_BYTES: usize = 32 << 10;

/// How much a device accepts beyond what it has written, in bytes.
pub const UPDATE_WINDOW_BYTES: u64 = 256 << 10;

/// How long a device keeps a transfer, and with it the slot that it writes, after the last request of it or the last
/// write. Longer than a requester needs to find a controller again, and than a write takes.
pub const TRANSFER_LEASE: Duration = Duration::from_secs(60);

/// The longest manifest that a device accepts, in bytes: it is kept in memory.
pub const UPDATE_MANIFEST_MAX_BYTES: u32 = 64 << 10;

/// The longest version of a slot's image, in bytes.
pub const SLOT_VERSION_MAX_LEN: usize = 44;

/// The longest reason, in bytes.
pub const UPDATE_TEXT_MAX_LEN: usize = 256;

/// A reason, for display. It is the device's text: escape it.
pub type UpdateText = String<UPDATE_TEXT_MAX_LEN>;

/// SHA-256.
pub type Sha256Digest = [u8; 32];

/// One of a device's two slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlotId {
    /// The first.
    A,
    /// The second.
    B,
}

impl SlotId {
    /// Return the other one.
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

impl core::fmt::Display for SlotId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::A => "A",
            Self::B => "B",
        })
    }
}

/// How far a slot's image is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlotTrust {
    /// It may be started this many more times before it has to be confirmed.
    Trial {
        /// The remaining number of starts.
        tries_left: u8,
    },
    /// It has been healthy, or an operator has confirmed it.
    Confirmed,
}

/// A slot's image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotImage {
    /// The version in its manifest.
    pub version: String<SLOT_VERSION_MAX_LEN>,
    /// The epoch in its manifest. A device starts no lower one than it has run.
    pub epoch: u64,
    /// The digest of the image.
    pub sha256: Sha256Digest,
    /// How far it is trusted.
    pub trust: SlotTrust,
}

/// A device's slots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotsStatus {
    /// The slot that runs; `None` if the device was started in another way, such as over rshim.
    pub running: Option<SlotId>,
    /// The images of slot A and B; `None`: nothing that could be started.
    pub images: [Option<SlotImage>; 2],
}

impl SlotsStatus {
    /// Return a slot's image.
    pub const fn image(&self, slot: SlotId) -> Option<&SlotImage> {
        self.images[slot as usize].as_ref()
    }

    /// Return the image that runs.
    pub fn running_image(&self) -> Option<&SlotImage> {
        self.image(self.running?)
    }
}

/// An update that is offered to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateOffer {
    /// The length of the manifest, which precedes the image, in bytes; at most [`UPDATE_MANIFEST_MAX_BYTES`].
    pub manifest_len_bytes: u32,
    /// The length of the image in bytes.
    pub len_bytes: u64,
    /// The digest of the image.
    pub sha256: Sha256Digest,
}

impl UpdateOffer {
    /// Return the length of manifest and image together, in bytes.
    pub const fn total_bytes(&self) -> u64 {
        self.len_bytes.saturating_add(self.manifest_len_bytes as u64)
    }
}

/// The bytes of a piece, at most [`PIECE_MAX_BYTES`]. Their length is checked before they take memory.
///
/// They are on the heap (feature `std`), so that a [`Request`](super::Request) stays small. A device without a heap has
/// room for 512 bytes, and takes a request with more for an invalid one; no controller sends it pieces, as long as it
/// announces no slots.
#[derive(Clone, PartialEq, Eq)]
pub struct PieceBytes(Bytes);

#[cfg(feature = "std")]
type Bytes = std::vec::Vec<u8>;
#[cfg(not(feature = "std"))]
type Bytes = heapless::Vec<u8, 512>;

impl PieceBytes {
    /// Copy these bytes; `None` if they are too many.
    pub fn copy_of(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > PIECE_MAX_BYTES {
            return None;
        }
        #[cfg(feature = "std")]
        return Some(Self(bytes.to_vec()));
        #[cfg(not(feature = "std"))]
        return Bytes::from_slice(bytes).ok().map(Self);
    }
}

impl core::ops::Deref for PieceBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Without the bytes.
impl core::fmt::Debug for PieceBytes {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl Serialize for PieceBytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self)
    }
}

impl<'de> Deserialize<'de> for PieceBytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl de::Visitor<'_> for Visitor {
            type Value = PieceBytes;

            fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "at most {PIECE_MAX_BYTES} bytes")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<PieceBytes, E> {
                PieceBytes::copy_of(bytes).ok_or_else(|| E::invalid_length(bytes.len(), &self))
            }
        }

        deserializer.deserialize_bytes(Visitor)
    }
}

/// A request about the slots of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
// See `Request` on the size.
#[allow(clippy::large_enum_variant)]
pub enum UpdateRequest {
    /// Report the status.
    Status,
    /// Start a transfer. Another one in progress is dropped.
    Begin(UpdateOffer),
    /// The bytes of manifest and image from `offset` on, which is where the last piece ended.
    Piece {
        /// Where the bytes belong, counted from the beginning of the manifest.
        offset: u64,
        /// The bytes.
        bytes: PieceBytes,
    },
    /// All pieces were sent: check the image, and put it on trial.
    Finish,
    /// Restart into the image of this digest, which is on trial.
    Restart {
        /// The digest.
        sha256: Sha256Digest,
    },
    /// Restart into the other slot.
    RollBack,
    /// Confirm the running image, which is on trial.
    Confirm,
}

/// The state of a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
// See `Request` on the size.
#[allow(clippy::large_enum_variant)]
pub enum Transfer {
    /// None since the device has started.
    None,
    /// Pieces are awaited.
    Receiving {
        /// The image.
        sha256: Sha256Digest,
        /// Where the next piece starts.
        received_bytes: u64,
        /// How much of that is written.
        written_bytes: u64,
    },
    /// The image is complete, and is being checked.
    Checking {
        /// The image.
        sha256: Sha256Digest,
    },
    /// The image is on trial: it is started by [`UpdateRequest::Restart`], or by any other restart.
    Ready {
        /// The image.
        sha256: Sha256Digest,
        /// Its slot.
        slot: SlotId,
    },
    /// The update was refused or failed. The running slot is unchanged.
    Failed {
        /// The image.
        sha256: Sha256Digest,
        /// The reason.
        why: UpdateText,
    },
    /// The device is about to restart.
    Restarting,
}

/// A device's answer to an [`UpdateRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateStatus {
    /// Its slots.
    pub slots: SlotsStatus,
    /// The last transfer.
    pub transfer: Transfer,
}
