//! Updates of devices, which an operator commands and the controller relays.

use serde::{Deserialize, Serialize};
use std::fmt;
use sumac_hal::ctrl::update::{PIECE_MAX_BYTES, Sha256Digest, UpdateOffer, UpdateStatus};
use thiserror::Error;

/// The longest piece of an image in a command, in bytes: what devices take in one request.
pub const UPDATE_PIECE_MAX_BYTES: usize = PIECE_MAX_BYTES;

/// A command of an operator for a device that boots from slots.
///
/// A client has one command at a time; the reply is [`UpdateReply`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateDevice {
    /// The device.
    pub device: String,
    /// Who commands, for others that want to: user, host and process.
    pub operator: String,
    /// The command.
    pub command: UpdateCommand,
}

/// What a device is to do.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum UpdateCommand {
    /// Report its slots and the transfer.
    Status,
    /// Start a transfer.
    Begin(UpdateOffer),
    /// Take the bytes of manifest and image from `offset` on.
    Piece {
        /// Where they belong.
        offset: u64,
        /// The bytes, at most [`UPDATE_PIECE_MAX_BYTES`].
        bytes: Vec<u8>,
    },
    /// Check the image, and put it on trial.
    Finish,
    /// Restart into the image, after jobs have moved off the device.
    Restart(Sha256Digest),
    /// Restart into the other slot, after jobs have moved off the device.
    RollBack,
    /// Confirm the running slot.
    Confirm,
}

/// Without the bytes of a piece.
impl fmt::Debug for UpdateCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status => f.write_str("Status"),
            Self::Begin(offer) => f.debug_tuple("Begin").field(offer).finish(),
            Self::Piece { offset, bytes } => write!(f, "Piece {{ offset: {offset}, {} bytes }}", bytes.len()),
            Self::Finish => f.write_str("Finish"),
            Self::Restart(_) => f.write_str("Restart"),
            Self::RollBack => f.write_str("RollBack"),
            Self::Confirm => f.write_str("Confirm"),
        }
    }
}

/// The reply to an [`UpdateDevice`].
pub type UpdateReply = Result<UpdateStatus, UpdateRefusal>;

/// Why a command for a device is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum UpdateRefusal {
    /// No device of that name is connected.
    #[error("device {device:?} is not connected to the controller")]
    NotConnected {
        /// The device.
        device: String,
    },
    /// The device cannot update itself.
    #[error(
        "device {device:?} does not boot from slots, so it cannot be updated over the network: install it with `sumac \
         flash`, or give a service's agent `slots` and `update-key`"
    )]
    NoSlots {
        /// The device.
        device: String,
    },
    /// Another operator updates the device.
    #[error("device {device:?} is being updated by {operator} since {for_s} s; wait until that command has ended")]
    Busy {
        /// The device.
        device: String,
        /// The other operator.
        operator: String,
        /// For how long, in seconds.
        for_s: u64,
    },
    /// The client's last command has not been answered.
    #[error("the last command for a device has not been answered; send one at a time")]
    OneAtATime,
    /// A piece is empty or too long.
    #[error("a piece of {len} bytes; it must have 1 to {UPDATE_PIECE_MAX_BYTES}")]
    Piece {
        /// Its length.
        len: u64,
    },
    /// The device has not answered.
    #[error("device {device:?} has not answered, or was disconnected")]
    NoAnswer {
        /// The device.
        device: String,
    },
    /// The device refuses.
    #[error("{why}")]
    Device {
        /// The device's reason.
        why: String,
    },
}

impl UpdateRefusal {
    /// Return whether the device is away, so that the command may be repeated once it is back.
    pub const fn is_away(&self) -> bool {
        matches!(self, Self::NotConnected { .. } | Self::NoAnswer { .. })
    }
}
