//! The parsed header, [`Repr`], and its kinds, flags and reasons.

use super::compact::{lag_of, late_from_wire, late_to_wire, mark_of};
use super::packet::field;
use super::{HEADER_LEN, Header, Packet, SHORT_HEADER_LEN, WireError};
use crate::ids::{ChildIndex, ChunkNo, Epoch, GroupId, Rank};
use crate::op::{Collective, Dtype, OpDesc, ReduceOp};
use bitflags::bitflags;
use core::ops::Range;

/// The kind of a packet (PROTOCOL 1 and 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Up: an inline contribution.
    Data = 1,
    /// Up: a zero-copy contribution.
    Ref = 2,
    /// Up: the sender has posted the operation and has nothing to add.
    Empty = 3,
    /// Down: the result of a seq.
    Result = 4,
    /// Down: a seq is complete, and no rank below receives its result.
    Done = 5,
    /// Up: a request for the state of some seqs. Also carries `have`.
    Probe = 6,
    /// Down: the reply to a Probe.
    Status = 7,
    /// Both directions: see [`NakReason`].
    Nak = 8,
    /// Up, with a [`RankMask`](super::RankMask): these ranks below have not posted the operation that starts at `seq`.
    /// Their contributions are held back until the root decides. Up, without a mask: request decision number `view`
    /// again. Down: asks which ranks below have not posted the operation at `seq`; also acknowledges the first form
    /// until the root decides.
    Late = 9,
    /// Down, with a [`RankMask`](super::RankMask): from the operation at `seq` on, the group continues without these
    /// ranks.
    Cut = 10,
    /// Up: the sender's Data names this operation by its signature from now on.
    Operation = 11,
}

impl Kind {
    /// Return the kind with this wire number, if this version knows it.
    pub const fn from_wire(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Data,
            2 => Self::Ref,
            3 => Self::Empty,
            4 => Self::Result,
            5 => Self::Done,
            6 => Self::Probe,
            7 => Self::Status,
            8 => Self::Nak,
            9 => Self::Late,
            10 => Self::Cut,
            11 => Self::Operation,
            _ => return None,
        })
    }
}

/// What a Nak reports or requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum NakReason {
    /// Down: the child's contribution to `seq` is missing, but later ones have arrived. Up: the answer to `seq` is
    /// missing.
    Missing = 1,
    /// Down: the child is to send its contribution to `seq` again, with the attempt of this packet (PROTOCOL 7).
    Resend = 2,
    /// Down: the packet's epoch is not the group's. `epoch` echoes that of the packet.
    WrongEpoch = 3,
    /// Down: the device does not have the group: it has restarted, or the group was released.
    UnknownGroup = 4,
    /// Up: ranks below the sender called different operations at `seq`. Down: some ranks did.
    Mismatch = 5,
    /// Down: the hop towards the root is dead.
    PathLost = 6,
    /// Both directions: a node does not support the operation's collective, type or operator.
    Unsupported = 7,
    /// Down, with a [`RankMask`](super::RankMask): these ranks did not post the operation at `seq` in time, and it
    /// fails because of them.
    Stragglers = 8,
    /// Down: the group continues without the receiver.
    Excluded = 9,
    /// Down: the node does not know the operation that the child's Data at `seq` names. The child is to describe it,
    /// and to send that contribution again.
    UnknownOperation = 10,
}

impl NakReason {
    /// Return the reason with this wire number, if this version knows it.
    pub const fn from_wire(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Missing,
            2 => Self::Resend,
            3 => Self::WrongEpoch,
            4 => Self::UnknownGroup,
            5 => Self::Mismatch,
            6 => Self::PathLost,
            7 => Self::Unsupported,
            8 => Self::Stragglers,
            9 => Self::Excluded,
            10 => Self::UnknownOperation,
            _ => return None,
        })
    }
}

bitflags! {
    /// Flags of a packet.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Flags: u8 {
        /// The payload holds partial results in the accumulator type, not elements of the operation's type.
        const PARTIAL = 1 << 0;
        /// Up: the sender or a rank below it receives the result of this seq.
        const WANT = 1 << 1;
        /// The packet experienced congestion (ECN-CE).
        const CONGESTED = 1 << 2;
        /// Up, on a contribution: the sender listens at the shared address, and the result may be sent there. On a
        /// Result: it was sent there.
        const SHARED = 1 << 3;
        /// On Data, Empty and Late: the operation waits for stragglers only up to a limit.
        const LIMITED = 1 << 4;
        /// With `LIMITED`: the operation then completes without them. Otherwise it fails.
        const CUTS = 1 << 5;
        /// On Data and Result: the header has the short form.
        const SHORT = 1 << 7;
    }
}

impl Flags {
    /// Those that belong to the description of an operation. The short form has none.
    const OF_OPERATION: Self = Self::LIMITED.union(Self::CUTS);
}

/// How long an operation waits for stragglers, and what happens then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StragglerLimit {
    /// The time in microseconds, starting with the first rank's contribution.
    pub us: u32,
    /// The operation completes without the missing ranks. Otherwise it fails.
    pub cuts: bool,
}

impl StragglerLimit {
    /// Return the signature of an operation with this limit, given its `signature` without one. Calls with different
    /// limits are different calls.
    pub fn sign(self, signature: u32) -> u32 {
        let mut bytes = [u8::from(self.cuts); 9];
        bytes[..4].copy_from_slice(&signature.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.us.to_le_bytes());
        super::crc32c(&bytes)
    }
}

/// A parsed header. The payload, `payload_len_bytes` long, follows it in the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Repr {
    /// The kind of packet.
    pub kind: Kind,
    /// The flags.
    pub flags: Flags,
    /// The operation's collective; `None` where it does not apply.
    pub collective: Option<Collective>,
    /// The operation's element type, if it has one.
    pub dtype: Option<Dtype>,
    /// The operation's operator, if it has one.
    pub op: Option<ReduceOp>,
    /// The reason; present exactly in a Nak.
    pub reason: Option<NakReason>,
    /// The group.
    pub group: GroupId,
    /// The group's epoch at the sender.
    pub epoch: Epoch,
    /// The child whose link the packet belongs to.
    pub child: ChildIndex,
    /// The number of seqs that the packet covers.
    pub count: u16,
    /// The first seq.
    pub seq: ChunkNo,
    /// Up: `have`. Down: `stable`.
    pub mark: ChunkNo,
    /// The child's key.
    pub key: u64,
    /// The operation's signature.
    pub signature: u32,
    /// Chosen by the child, echoed by the node.
    pub token: u32,
    /// Down: the granted window, in contributions.
    pub window: u16,
    /// The payload's length in bytes.
    pub payload_len_bytes: u16,
    /// The attempt at the seq (PROTOCOL 7), modulo 256.
    pub attempt: u8,
    /// Decisions to continue without stragglers. Down: how many were made. Up, in a Late without a mask: which one is
    /// requested.
    pub view: u16,
    /// See the table in [`wire`](crate::wire).
    pub bits: u64,
    /// See the table in [`wire`](crate::wire).
    pub bits2: u64,
    /// The operation's root, or rank 0 if it has none.
    pub root: Rank,
    /// The last rank to contribute, if known. Up: among the ranks at or below the sender. Down: as the root saw it.
    pub slowest: Option<Rank>,
    /// How long after the first rank it contributed, in microseconds.
    pub late_us: u32,
}

impl Repr {
    /// Return a header of `kind` for one link of a group, with all other fields zero or `None`.
    pub const fn new(kind: Kind, group: GroupId, epoch: Epoch, child: ChildIndex, key: u64) -> Self {
        Self {
            kind,
            flags: Flags::empty(),
            collective: None,
            dtype: None,
            op: None,
            reason: None,
            group,
            epoch,
            child,
            count: 0,
            seq: ChunkNo(0),
            mark: ChunkNo(0),
            key,
            signature: 0,
            token: 0,
            window: 0,
            payload_len_bytes: 0,
            attempt: 0,
            view: 0,
            bits: 0,
            bits2: 0,
            root: Rank(0),
            slowest: None,
            late_us: 0,
        }
    }

    /// Parse the header of a checked packet.
    ///
    /// # Errors
    /// [`WireError::UnknownNumber`] for the first field whose number this version does not know.
    pub fn parse<T: AsRef<[u8]>>(packet: &Packet<T>) -> Result<Self, WireError> {
        fn known<V>(number: u8, from: fn(u8) -> Option<V>, field: &'static str) -> Result<Option<V>, WireError> {
            match (number, from(number)) {
                (0, _) => Ok(None),
                (_, Some(value)) => Ok(Some(value)),
                (_, None) => Err(WireError::UnknownNumber { field, number }),
            }
        }
        let (header, payload) = packet.split()?;
        // The form's length is that of the slice, so neither of these is shorter than what is read of it below.
        let truncated = WireError::Truncated { len: header.len(), header_len: SHORT_HEADER_LEN };
        let short = header.first_chunk::<SHORT_HEADER_LEN>().ok_or(truncated)?;
        let kind = known(short[field::KIND.start], Kind::from_wire, "kind")?;
        let kind = kind.ok_or(WireError::UnknownNumber { field: "kind", number: 0 })?;
        let flags = Flags::from_bits_truncate(short[field::FLAGS.start]);
        let (seq, is_result) = (u64::from_le_bytes(read(short, field::SEQ)), kind == Kind::Result);
        let is_shared = is_result && flags.contains(Flags::SHARED);
        let slowest = u16::from_le_bytes(read(short, field::SLOWEST));
        let mut repr = Self {
            flags,
            seq: ChunkNo(seq),
            signature: u32::from_le_bytes(read(short, field::SIGNATURE)),
            payload_len_bytes: payload.len() as u16,
            attempt: short[field::ATTEMPT.start],
            slowest: slowest.checked_sub(1).map(|rank| Rank(rank.into())),
            late_us: late_from_wire(u16::from_le_bytes(read(short, field::LATE))),
            ..Self::new(
                kind,
                GroupId(u32::from_le_bytes(read(short, field::GROUP))),
                Epoch::from_bits(u32::from_le_bytes(read(short, field::EPOCH))),
                if is_shared { ChildIndex::ALL } else { ChildIndex(short[field::CHILD.start].into()) },
                u64::from_le_bytes(read(short, field::KEY)),
            )
        };
        if flags.contains(Flags::SHORT) {
            if !matches!(kind, Kind::Data | Kind::Result) {
                return Err(WireError::UnknownNumber { field: "flags", number: flags.bits() });
            }
            repr.flags.remove(Flags::OF_OPERATION);
            repr.count = 1;
            repr.mark = mark_of(seq, u16::from_le_bytes(read(short, field::LAG)));
            if is_result {
                repr.window = u16::from_le_bytes(read(short, field::SHORT_WINDOW));
                repr.view = short[field::SHORT_VIEW.start].into();
            } else {
                repr.token = u32::from_le_bytes(read(short, field::TOKEN));
            }
            return Ok(repr);
        }
        let full = header.first_chunk::<HEADER_LEN>().ok_or(truncated)?;
        let reason = full[field::REASON.start];
        repr.reason = known(reason, NakReason::from_wire, "reason")?;
        if (kind == Kind::Nak) != repr.reason.is_some() {
            return Err(WireError::UnknownNumber { field: "reason", number: reason });
        }
        repr.collective = known(full[field::COLLECTIVE.start], Collective::from_wire, "collective")?;
        repr.dtype = known(full[field::DTYPE.start], Dtype::from_wire, "dtype")?;
        repr.op = known(full[field::OP.start], ReduceOp::from_wire, "op")?;
        repr.count = u16::from_le_bytes(read(full, field::COUNT));
        repr.mark = ChunkNo(u64::from_le_bytes(read(full, field::MARK)));
        repr.token = u32::from_le_bytes(read(full, field::TOKEN));
        repr.window = u16::from_le_bytes(read(full, field::WINDOW));
        repr.view = u16::from_le_bytes(read(full, field::VIEW));
        repr.bits = u64::from_le_bytes(read(full, field::BITS));
        repr.bits2 = u64::from_le_bytes(read(full, field::BITS2));
        repr.root = Rank(u32::from_le_bytes(read(full, field::ROOT)));
        Ok(repr)
    }

    /// Return the length of the header in bytes.
    pub const fn header_len(&self) -> usize {
        super::packet::header_len(self.flags.bits())
    }

    /// Return the length of the whole packet in bytes.
    pub const fn packet_len(&self) -> usize {
        self.header_len() + self.payload_len_bytes as usize
    }

    /// Write the header and its checksum to the start of the packet's buffer. `payload_crc` is the
    /// [`payload_crc`](super::payload_crc) of the payload, which may be written before or afterwards, behind
    /// [`Repr::header_len`].
    ///
    /// # Panics
    /// If the buffer is shorter than the header.
    pub fn emit<T: AsRef<[u8]> + AsMut<[u8]>>(&self, packet: &mut Packet<T>, payload_crc: u32) {
        packet.write(&self.header(payload_crc));
    }

    /// Return the header as bytes, with its checksum. `payload_crc` is the [`payload_crc`](super::payload_crc) of the
    /// payload.
    ///
    /// Fields that the form has no room for are left out; the table in [`wire`](crate::wire) has their widths.
    pub fn header(&self, payload_crc: u32) -> Header {
        let mut bytes = [0; HEADER_LEN];
        let is_shared = self.kind == Kind::Result && self.child == ChildIndex::ALL;
        let mut flags = self.flags;
        flags.set(Flags::SHARED, is_shared || flags.contains(Flags::SHARED));
        if flags.contains(Flags::SHORT) {
            flags.remove(Flags::OF_OPERATION);
        }
        let slowest = self.slowest.and_then(|rank| u16::try_from(rank.0).ok()?.checked_add(1)).unwrap_or(0);
        write(&mut bytes, field::KIND, [self.kind as u8]);
        write(&mut bytes, field::FLAGS, [flags.bits()]);
        write(&mut bytes, field::GROUP, self.group.0.to_le_bytes());
        write(&mut bytes, field::EPOCH, self.epoch.to_bits().to_le_bytes());
        write(&mut bytes, field::SIGNATURE, self.signature.to_le_bytes());
        write(&mut bytes, field::SEQ, self.seq.0.to_le_bytes());
        write(&mut bytes, field::KEY, self.key.to_le_bytes());
        write(&mut bytes, field::CHILD, [if is_shared { 0 } else { self.child.0 as u8 }]);
        write(&mut bytes, field::ATTEMPT, [self.attempt]);
        write(&mut bytes, field::SLOWEST, slowest.to_le_bytes());
        write(&mut bytes, field::LATE, late_to_wire(self.late_us).to_le_bytes());
        if flags.contains(Flags::SHORT) {
            write(&mut bytes, field::LAG, lag_of(self.seq.0, self.mark.0).to_le_bytes());
            if self.kind == Kind::Result {
                write(&mut bytes, field::SHORT_WINDOW, self.window.to_le_bytes());
                // Each decision excludes at least one of 256 ranks, and one stays.
                write(&mut bytes, field::SHORT_VIEW, [u8::try_from(self.view).unwrap_or(u8::MAX)]);
            } else {
                write(&mut bytes, field::TOKEN, self.token.to_le_bytes());
            }
        } else {
            write(&mut bytes, field::TOKEN, self.token.to_le_bytes());
            write(&mut bytes, field::COUNT, self.count.to_le_bytes());
            write(&mut bytes, field::WINDOW, self.window.to_le_bytes());
            write(&mut bytes, field::MARK, self.mark.0.to_le_bytes());
            write(&mut bytes, field::BITS, self.bits.to_le_bytes());
            write(&mut bytes, field::BITS2, self.bits2.to_le_bytes());
            write(&mut bytes, field::ROOT, self.root.0.to_le_bytes());
            write(&mut bytes, field::COLLECTIVE, [self.collective.map_or(0, Collective::to_wire)]);
            write(&mut bytes, field::DTYPE, [self.dtype.map_or(0, Dtype::to_wire)]);
            write(&mut bytes, field::OP, [self.op.map_or(0, ReduceOp::to_wire)]);
            write(&mut bytes, field::REASON, [self.reason.map_or(0, |reason| reason as u8)]);
            write(&mut bytes, field::VIEW, self.view.to_le_bytes());
        }
        Header::seal(bytes, payload_crc)
    }

    /// Choose the form of a Data with `chunk_len_bytes` as the limit of payloads: the full one if the packet is then no
    /// longer than others, and the operation has to be described (`describe`), or the packet would else be shorter than
    /// the Nak that asks for its operation. Returns false if the operation has to be described in a packet before this
    /// one.
    ///
    /// The fields that describe the operation must be set, and the payload's length.
    pub fn choose_form(&mut self, chunk_len_bytes: u16, describe: bool) -> bool {
        let full_len = HEADER_LEN + usize::from(self.payload_len_bytes);
        let fits = full_len <= SHORT_HEADER_LEN + usize::from(chunk_len_bytes);
        let is_tiny = usize::from(self.payload_len_bytes) < HEADER_LEN - SHORT_HEADER_LEN;
        let is_full = is_tiny || describe && fits;
        self.flags.set(Flags::SHORT, !is_full);
        is_full || !describe
    }

    /// Return the packet that describes the operation of this Data.
    pub fn operation(&self) -> Self {
        let flags = self.flags & (Flags::OF_OPERATION | Flags::CONGESTED);
        Self { kind: Kind::Operation, flags, payload_len_bytes: 0, slowest: None, late_us: 0, attempt: 0, ..*self }
    }

    /// Set the fields that describe the operation.
    pub fn set_op(&mut self, desc: &OpDesc) {
        self.collective = Some(desc.collective);
        self.dtype = desc.dtype;
        self.op = desc.op;
        self.root = desc.root;
        self.bits = desc.count;
    }

    /// Set the operation's straggler limit. `distance` is the number of seqs between the operation's first seq and this
    /// one.
    pub fn set_limit(&mut self, limit: StragglerLimit, distance: u32) {
        self.flags |= Flags::LIMITED;
        self.flags.set(Flags::CUTS, limit.cuts);
        self.bits2 = u64::from(limit.us) << 32 | u64::from(distance);
    }

    /// Return the operation's straggler limit, if it has one, and the distance of this seq from the operation's first
    /// seq.
    pub fn limit(&self) -> Option<(StragglerLimit, u32)> {
        let limit = StragglerLimit { us: (self.bits2 >> 32) as u32, cuts: self.flags.contains(Flags::CUTS) };
        self.flags.contains(Flags::LIMITED).then_some((limit, self.bits2 as u32))
    }

    /// Return the operation that the packet describes; `None` if it names no collective.
    pub fn op_desc(&self) -> Option<OpDesc> {
        let collective = self.collective?;
        Some(OpDesc { collective, dtype: self.dtype, op: self.op, root: self.root, count: self.bits })
    }
}

/// Read a field.
fn read<const LEN: usize, const FIELD: usize>(header: &[u8; LEN], field: Range<usize>) -> [u8; FIELD] {
    let mut bytes = [0; FIELD];
    bytes.copy_from_slice(&header[field]);
    bytes
}

/// Write a field.
fn write<const FIELD: usize>(header: &mut [u8; HEADER_LEN], field: Range<usize>, value: [u8; FIELD]) {
    header[field].copy_from_slice(&value);
}

/// Pack an operation into 64 bits for Nak(Mismatch). From the lowest bit: 4 bits collective, 5 type, 5 operator, 14
/// root, 36 count. Root and count saturate; they only appear in an error message.
pub fn pack_op(desc: &OpDesc) -> u64 {
    let number = |wire: u8, bits: u32| u64::from(wire) & ((1 << bits) - 1);
    let root = u64::from(desc.root.0).min((1 << 14) - 1);
    number(desc.collective.to_wire(), 4)
        | number(desc.dtype.map_or(0, Dtype::to_wire), 5) << 4
        | number(desc.op.map_or(0, ReduceOp::to_wire), 5) << 9
        | root << 14
        | desc.count.min((1 << 36) - 1) << 28
}

/// Unpack an operation that [`pack_op`] packed; `None` if this version does not know one of the numbers.
pub fn unpack_op(packed: u64) -> Option<OpDesc> {
    let bits = |from: u32, bits: u32| packed >> from & ((1 << bits) - 1);
    let some = |number: u64| (number != 0).then_some(number as u8);
    Some(OpDesc {
        collective: Collective::from_wire(bits(0, 4) as u8)?,
        dtype: some(bits(4, 5)).map(|n| Dtype::from_wire(n).ok_or(())).transpose().ok()?,
        op: some(bits(9, 5)).map(|n| ReduceOp::from_wire(n).ok_or(())).transpose().ok()?,
        root: Rank(bits(14, 14) as u32),
        count: bits(28, 36),
    })
}

// All wire numbers must fit their fields in a packed operation.
const _: () = {
    let mut i = 0;
    while i < Collective::ALL.len() {
        assert!((Collective::ALL[i].to_wire() as u32) < 1 << 4);
        i += 1;
    }
    let mut i = 0;
    while i < Dtype::ALL.len() {
        assert!((Dtype::ALL[i].to_wire() as u32) < 1 << 5);
        i += 1;
    }
    let mut i = 0;
    while i < ReduceOp::ALL.len() {
        assert!((ReduceOp::ALL[i].to_wire() as u32) < 1 << 5);
        i += 1;
    }
};
