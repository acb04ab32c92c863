//! The steps of a chain, and their encoding as descriptors.
//!
//! A descriptor is one cache line of eight little-endian words:
//!
//! | word | bits | field |
//! |---|---|---|
//! | 0 | 0..7 | kind: 1 copy, 2 load, 3 reduce, 4 store, 5 publish |
//! | 0 | 7 | more: the next descriptor belongs to the same chain |
//! | 0 | 8..16 | operator, 0 for none |
//! | 0 | 16..24, 24..32, 32..40 | source, accumulator, output type, 0 for none |
//! | 0 | 40..48 | scope |
//! | 0 | 48..64 | the scope's generation: how often it has been aborted, modulo 2^16 |
//! | 1 | 0..64 | tag: seq |
//! | 2 | 0..32, 32..64 | tag: slot, attempt |
//! | 3 | 0..16, 32..64 | source: region's index, generation; or the first word to publish |
//! | 4 | 0..64 | source: offset in bytes; or the second word to publish |
//! | 5 | 0..16, 32..64 | destination: region's index, generation |
//! | 6 | 0..64 | destination: offset in bytes |
//! | 7 | 0..32 | length in elements, or in bytes (copy; bytes that a publication covers) |
//! | 7 | 32..64 | number of ranks (store), or the offset of the bytes that a publication covers |
//!
//! All other bits are 0. Invariant: `parse` is the exact inverse of `emit`.

use crate::crc::crc32c;
use crate::op::{Dtype, ReduceOp};

/// The length of a descriptor in words.
pub const DESCRIPTOR_WORDS: usize = 8;

/// The key of a region of registered memory. Generations of an index are never reused, so a stale key refers to
/// nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RegionKey {
    /// The region's index in the device's table.
    pub index: u16,
    /// Distinguishes the regions that have had this index.
    pub generation: u32,
}

impl RegionKey {
    /// Return the key as one word.
    pub const fn to_bits(self) -> u64 {
        self.index as u64 | (self.generation as u64) << 32
    }

    /// Return the key with this word; `None` if reserved bits are set.
    pub const fn from_bits(bits: u64) -> Option<Self> {
        let key = Self { index: bits as u16, generation: (bits >> 32) as u32 };
        if key.to_bits() == bits { Some(key) } else { None }
    }
}

/// An address in registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Address {
    /// The region.
    pub region: RegionKey,
    /// The offset from the start of the region.
    pub offset_bytes: u64,
}

/// Identifies a completion. The engine does not interpret it.
///
/// A slot's memory is reused only after all tags of earlier attempts have completed (PROTOCOL 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tag {
    /// The sequence number of the chunk.
    pub seq: u64,
    /// The slot that the chunk is reduced in.
    pub slot: u32,
    /// The number of the attempt.
    pub attempt: u32,
}

/// The set of chains that [`Engine::abort`](super::Engine::abort) ends together, such as those of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Scope(pub u8);

/// One step of a chain. Lengths are in elements, except for copies.
///
/// For operators with an index, an element is a pair of a value and an index, as in [`Kernel`](crate::reduce::Kernel).
/// Pairs are accumulated without widening, so their first contribution is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// `dst = src`, as bytes.
    Copy {
        /// The source.
        src: Address,
        /// The destination.
        dst: Address,
        /// The length in bytes.
        len_bytes: u32,
    },
    /// `dst = widen(src)`: the first contribution of a reduction.
    Load {
        /// The type of `src`.
        source: Dtype,
        /// The type of `dst`.
        accumulator: Dtype,
        /// The source.
        src: Address,
        /// The destination.
        dst: Address,
        /// The number of elements.
        count: u32,
    },
    /// `dst = dst op src`.
    Reduce {
        /// The operator.
        op: ReduceOp,
        /// The type of `src`.
        source: Dtype,
        /// The type of `dst`. If it is `source` and narrower than that type's accumulator, every step rounds.
        accumulator: Dtype,
        /// The source.
        src: Address,
        /// The accumulators.
        dst: Address,
        /// The number of elements.
        count: u32,
    },
    /// `dst = round(src)`: the result of `ranks` contributions. `dst` may equal `src` if both types have the same size.
    Store {
        /// The operator; averages are divided in this step.
        op: ReduceOp,
        /// The type of `src`.
        accumulator: Dtype,
        /// The type of `dst`.
        output: Dtype,
        /// The accumulators.
        src: Address,
        /// The destination.
        dst: Address,
        /// The number of elements.
        count: u32,
        /// The number of ranks that contributed.
        ranks: u32,
    },
    /// Write two 8-byte aligned words atomically, first the second, then the first. If the publication covers bytes, a
    /// third word is written before both: the bytes' CRC-32C (bits 0..32) and length (bits 32..64).
    Publish {
        /// The destination.
        dst: Address,
        /// The words.
        words: [u64; 2],
        /// The bytes that the third word covers.
        covers: Coverage,
    },
}

/// The bytes that a publication's checksum covers, in the region that it is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Coverage {
    /// The offset of the bytes from the publication; at least [`Coverage::OFFSET_MIN_BYTES`].
    pub offset_bytes: u32,
    /// The number of bytes. If it is 0, there is no third word.
    pub len_bytes: u32,
}

impl Coverage {
    /// No bytes.
    pub const NONE: Self = Self { offset_bytes: 0, len_bytes: 0 };

    /// The smallest offset: the length of the three words.
    pub const OFFSET_MIN_BYTES: u32 = 24;

    /// Return the third word of a publication that covers `bytes`.
    pub fn checksum_word(bytes: &[u8]) -> u64 {
        Self::checksum_word_of(crc32c(bytes), bytes.len())
    }

    pub(crate) const fn checksum_word_of(crc: u32, len_bytes: usize) -> u64 {
        (len_bytes as u64) << 32 | crc as u64
    }

    /// Return the address of the bytes for a publication at `dst`, or `None` on overflow.
    pub const fn at(self, dst: Address) -> Option<Address> {
        match dst.offset_bytes.checked_add(self.offset_bytes as u64) {
            Some(offset_bytes) => Some(Address { offset_bytes, ..dst }),
            None => None,
        }
    }

    /// Return whether no bytes are covered.
    pub const fn is_empty(self) -> bool {
        self.len_bytes == 0
    }
}

/// A list of steps with one tag.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    /// The tag of the chain's completion.
    pub tag: Tag,
    /// The scope that aborts the chain.
    pub scope: Scope,
    /// The steps, in order.
    pub steps: &'a [Step],
}

/// A step in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// The chain's tag.
    pub tag: Tag,
    /// The chain's scope.
    pub scope: Scope,
    /// How often the scope had been aborted when the chain was submitted, modulo 2^16.
    pub scope_generation: u16,
    /// Whether the next descriptor belongs to the same chain.
    pub more: bool,
    /// The step.
    pub step: Step,
}

/// Why words are not a valid descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// This version does not know the kind.
    #[error("unknown descriptor kind {0}")]
    Kind(u8),
    /// An operator or a type is unknown, or not allowed for the kind.
    #[error("word 0 of the descriptor is {0:#x}: unknown or unexpected operator or type")]
    Types(u64),
    /// Reserved bits are set.
    #[error("reserved bits are set in word {0} of the descriptor")]
    Reserved(u8),
}

const COPY: u8 = 1;
const LOAD: u8 = 2;
const REDUCE: u8 = 3;
const STORE: u8 = 4;
const PUBLISH: u8 = 5;

/// Flag in the first word: the next descriptor belongs to the same chain.
const MORE: u64 = 1 << 7;

/// The fields of a descriptor that depend on its kind.
#[derive(Default)]
struct Fields {
    kind: u8,
    op: Option<ReduceOp>,
    types: [Option<Dtype>; 3],
    src: [u64; 2],
    dst: [u64; 2],
    length: u32,
    ranks: u32,
}

impl Step {
    /// Return the address that the step writes to.
    pub const fn dst(&self) -> Address {
        match *self {
            Self::Copy { dst, .. }
            | Self::Load { dst, .. }
            | Self::Reduce { dst, .. }
            | Self::Store { dst, .. }
            | Self::Publish { dst, .. } => dst,
        }
    }

    /// Return the address that the step reads from, other than accumulators.
    pub const fn src(&self) -> Option<Address> {
        match *self {
            Self::Copy { src, .. } | Self::Load { src, .. } | Self::Reduce { src, .. } | Self::Store { src, .. } => {
                Some(src)
            }
            Self::Publish { .. } => None,
        }
    }

    /// Return how many bytes the step writes.
    pub const fn dst_len_bytes(&self) -> u64 {
        match *self {
            Self::Copy { len_bytes, .. } => len_bytes as u64,
            Self::Load { accumulator: dtype, count, .. } => len_bytes(dtype, None, count),
            Self::Reduce { op, accumulator: dtype, count, .. } | Self::Store { op, output: dtype, count, .. } => {
                len_bytes(dtype, Some(op), count)
            }
            Self::Publish { covers, .. } if covers.is_empty() => 16,
            Self::Publish { .. } => Coverage::OFFSET_MIN_BYTES as u64,
        }
    }

    /// Return how many bytes the step reads at [`Step::src`].
    pub const fn src_len_bytes(&self) -> u64 {
        match *self {
            Self::Copy { len_bytes, .. } => len_bytes as u64,
            Self::Load { source: dtype, count, .. } => len_bytes(dtype, None, count),
            Self::Reduce { op, source: dtype, count, .. } | Self::Store { op, accumulator: dtype, count, .. } => {
                len_bytes(dtype, Some(op), count)
            }
            Self::Publish { .. } => 0,
        }
    }

    fn fields(&self) -> Fields {
        let at = |address: Address| [address.region.to_bits(), address.offset_bytes];
        match *self {
            Self::Copy { src, dst, len_bytes } => {
                Fields { kind: COPY, src: at(src), dst: at(dst), length: len_bytes, ..Fields::default() }
            }
            Self::Load { source, accumulator, src, dst, count } => Fields {
                kind: LOAD,
                types: [Some(source), Some(accumulator), None],
                src: at(src),
                dst: at(dst),
                length: count,
                ..Fields::default()
            },
            Self::Reduce { op, source, accumulator, src, dst, count } => Fields {
                kind: REDUCE,
                op: Some(op),
                types: [Some(source), Some(accumulator), None],
                src: at(src),
                dst: at(dst),
                length: count,
                ranks: 0,
            },
            Self::Store { op, accumulator, output, src, dst, count, ranks } => Fields {
                kind: STORE,
                op: Some(op),
                types: [None, Some(accumulator), Some(output)],
                src: at(src),
                dst: at(dst),
                length: count,
                ranks,
            },
            Self::Publish { dst, words, covers } => Fields {
                kind: PUBLISH,
                src: words,
                dst: at(dst),
                length: covers.len_bytes,
                ranks: covers.offset_bytes,
                ..Fields::default()
            },
        }
    }
}

/// Return the length of `count` elements, each a value or a pair, in bytes.
const fn len_bytes(dtype: Dtype, op: Option<ReduceOp>, count: u32) -> u64 {
    let values = if matches!(op, Some(op) if op.is_located()) { 2 } else { 1 };
    values * count as u64 * dtype.size_bytes() as u64
}

impl Descriptor {
    /// Return the descriptor's words.
    pub fn emit(&self) -> [u64; DESCRIPTOR_WORDS] {
        let Fields { kind, op, types, src, dst, length, ranks } = self.step.fields();
        let number = |dtype: Option<Dtype>| u64::from(dtype.map_or(0, Dtype::to_wire));
        let head = u64::from(kind)
            | if self.more { MORE } else { 0 }
            | u64::from(op.map_or(0, ReduceOp::to_wire)) << 8
            | number(types[0]) << 16
            | number(types[1]) << 24
            | number(types[2]) << 32
            | u64::from(self.scope.0) << 40
            | u64::from(self.scope_generation) << 48;
        let tag = u64::from(self.tag.slot) | u64::from(self.tag.attempt) << 32;
        let length = u64::from(length) | u64::from(ranks) << 32;
        [head, self.tag.seq, tag, src[0], src[1], dst[0], dst[1], length]
    }

    /// Parse a descriptor from its words.
    ///
    /// # Errors
    /// [`DescriptorError`] if the words are not a valid descriptor of this version.
    pub fn parse(words: &[u64; DESCRIPTOR_WORDS]) -> Result<Self, DescriptorError> {
        let step = parse_step(words)?;
        let tag = Tag { seq: words[1], slot: words[2] as u32, attempt: (words[2] >> 32) as u32 };
        let descriptor = Self {
            tag,
            scope: Scope((words[0] >> 40) as u8),
            scope_generation: (words[0] >> 48) as u16,
            more: words[0] & MORE != 0,
            step,
        };
        // Unused fields must be 0, so that later versions can assign them.
        match descriptor.emit().iter().zip(words).position(|(ours, theirs)| ours != theirs) {
            None => Ok(descriptor),
            Some(0) => Err(DescriptorError::Types(words[0])),
            Some(word) => Err(DescriptorError::Reserved(word as u8)),
        }
    }
}

fn parse_step(words: &[u64; DESCRIPTOR_WORDS]) -> Result<Step, DescriptorError> {
    let head = words[0];
    let unknown = DescriptorError::Types(head);
    let dtype = |shift: u32| Dtype::from_wire((head >> shift) as u8).ok_or(unknown);
    let op = || ReduceOp::from_wire((head >> 8) as u8).ok_or(unknown);
    let at = |word: usize| match RegionKey::from_bits(words[word]) {
        Some(region) => Ok(Address { region, offset_bytes: words[word + 1] }),
        None => Err(DescriptorError::Reserved(word as u8)),
    };
    let (length, ranks) = (words[7] as u32, (words[7] >> 32) as u32);
    Ok(match (head & (MORE - 1)) as u8 {
        COPY => Step::Copy { src: at(3)?, dst: at(5)?, len_bytes: length },
        LOAD => Step::Load { source: dtype(16)?, accumulator: dtype(24)?, src: at(3)?, dst: at(5)?, count: length },
        REDUCE => Step::Reduce {
            op: op()?,
            source: dtype(16)?,
            accumulator: dtype(24)?,
            src: at(3)?,
            dst: at(5)?,
            count: length,
        },
        STORE => Step::Store {
            op: op()?,
            accumulator: dtype(24)?,
            output: dtype(32)?,
            src: at(3)?,
            dst: at(5)?,
            count: length,
            ranks,
        },
        // Without covered bytes, the offset must be 0.
        PUBLISH if length == 0 && ranks != 0 => return Err(DescriptorError::Reserved(7)),
        PUBLISH => Step::Publish {
            dst: at(5)?,
            words: [words[3], words[4]],
            covers: Coverage { offset_bytes: ranks, len_bytes: length },
        },
        kind => return Err(DescriptorError::Kind(kind)),
    })
}
