//! What a chain is made of, and its descriptors' 64 bytes.
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
//! | 0 | 48..64 | the scope's generation: how often it was aborted before, modulo 2^16 |
//! | 1 | 0..64 | tag: seq |
//! | 2 | 0..32, 32..64 | tag: slot, attempt |
//! | 3 | 0..16, 32..64 | source: region's index, generation; or the first word to publish |
//! | 4 | 0..64 | source: offset in bytes; or the second word to publish |
//! | 5 | 0..16, 32..64 | destination: region's index, generation |
//! | 6 | 0..64 | destination: offset in bytes |
//! | 7 | 0..32, 32..64 | length in bytes (copy, and what a publication covers) or elements; number of ranks (store), or
//! how far behind the words a publication covers |
//!
//! All other bits are 0. Invariant: `parse` gives back what `emit` was given, and takes nothing else.

use crate::op::{Dtype, ReduceOp};
use crate::wire::crc32c;

/// The words of a descriptor.
pub const DESCRIPTOR_WORDS: usize = 8;

/// The name of a region of registered memory. A generation is never given out twice for an index, so a name that was
/// kept too long names nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct RegionKey {
    /// Where the region is in the table of its device.
    pub index: u16,
    /// Which of the regions that were there.
    pub generation: u32,
}

impl RegionKey {
    /// Return the word that travels.
    pub const fn to_bits(self) -> u64 {
        self.index as u64 | (self.generation as u64) << 32
    }

    /// Rebuild a key from its word; `None` if that has bits that no key has.
    pub const fn from_bits(bits: u64) -> Option<Self> {
        let key = Self { index: bits as u16, generation: (bits >> 32) as u32 };
        if key.to_bits() == bits { Some(key) } else { None }
    }
}

/// A place in registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Address {
    /// The region.
    pub region: RegionKey,
    /// The distance from its beginning.
    pub offset_bytes: u64,
}

/// What a completion is recognised by. The engine does not look at it.
///
/// A slot's memory is used again only when all tags of its former attempts have come back (PROTOCOL 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tag {
    /// The sequence number of the chunk.
    pub seq: u64,
    /// The slot that it is reduced in.
    pub slot: u32,
    /// Which try this is.
    pub attempt: u32,
}

/// What [`Engine::abort`](super::Engine::abort) ends together: a group, or the device's all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Scope(pub u8);

/// One step of a chain. Lengths are of elements, except for copies.
///
/// Where the operator is a location, an element is a pair of the named type and an index, as for
/// [`Kernel`](crate::reduce::Kernel). Pairs accumulate as they are, so their first contribution is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Step {
    /// `dst = src`, byte by byte.
    Copy {
        /// Where from.
        src: Address,
        /// Where to.
        dst: Address,
        /// How many bytes.
        len_bytes: u32,
    },
    /// `dst = src`, the first contribution of a reduction, widened.
    Load {
        /// The type of `src`.
        source: Dtype,
        /// The type of `dst`.
        accumulator: Dtype,
        /// Where from.
        src: Address,
        /// Where to.
        dst: Address,
        /// How many elements.
        count: u32,
    },
    /// `dst = dst op src`.
    Reduce {
        /// The operator.
        op: ReduceOp,
        /// The type of `src`.
        source: Dtype,
        /// The type of `dst`. Where it is `source` and narrower than that type's usual accumulator, each step rounds.
        accumulator: Dtype,
        /// Where from.
        src: Address,
        /// The accumulators.
        dst: Address,
        /// How many elements.
        count: u32,
    },
    /// `dst = round(src)`: the result of `ranks` contributions. `dst` may be `src` if both types are of one size.
    Store {
        /// The operator: averages are divided here.
        op: ReduceOp,
        /// The type of `src`.
        accumulator: Dtype,
        /// The type of `dst`.
        output: Dtype,
        /// The accumulators.
        src: Address,
        /// Where to.
        dst: Address,
        /// How many elements.
        count: u32,
        /// How many ranks contributed.
        ranks: u32,
    },
    /// Write two words, 8-byte aligned; the second, then the first, each in one piece. Where it covers bytes, a third
    /// word comes before both: their CRC-32C (bits 0..32), and their length (bits 32..64).
    Publish {
        /// Where to.
        dst: Address,
        /// What.
        words: [u64; 2],
        /// What the third word is about.
        covers: Covers,
    },
}

/// The bytes that a publication vouches for, in the region that it is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Covers {
    /// How far behind the publication's first byte they begin; at least [`Covers::SKIP_MIN_BYTES`].
    pub skip_bytes: u32,
    /// How many they are; 0 for none, and then there is no third word.
    pub len_bytes: u32,
}

impl Covers {
    /// No bytes.
    pub const NOTHING: Self = Self { skip_bytes: 0, len_bytes: 0 };

    /// The length of the three words.
    pub const SKIP_MIN_BYTES: u32 = 24;

    /// Return the third word of a publication that covers `bytes`: what its reader compares it with.
    pub fn word(bytes: &[u8]) -> u64 {
        Self::word_of(crc32c(bytes), bytes.len())
    }

    pub(crate) const fn word_of(crc: u32, len_bytes: usize) -> u64 {
        (len_bytes as u64) << 32 | crc as u64
    }

    /// Return where the bytes begin, of a publication at `dst`; `None` where there is no such address.
    pub const fn at(self, dst: Address) -> Option<Address> {
        match dst.offset_bytes.checked_add(self.skip_bytes as u64) {
            Some(offset_bytes) => Some(Address { offset_bytes, ..dst }),
            None => None,
        }
    }

    /// Tell whether there are none.
    pub const fn is_nothing(self) -> bool {
        self.len_bytes == 0
    }
}

/// A list of steps under one tag.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    /// What its completion will say.
    pub tag: Tag,
    /// What aborts it.
    pub scope: Scope,
    /// What to do, in order.
    pub steps: &'a [Step],
}

/// A step as it travels through a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// The chain's tag.
    pub tag: Tag,
    /// The chain's scope.
    pub scope: Scope,
    /// How often the scope was aborted before the chain was submitted, modulo 2^16.
    pub scope_generation: u16,
    /// Whether the next descriptor belongs to the same chain.
    pub more: bool,
    /// What to do.
    pub step: Step,
}

/// Why eight words are no descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The kind is none of this version's.
    #[error("descriptor kind {0} is unknown")]
    Kind(u8),
    /// An operator or a type is none of this version's, or is given where none belongs.
    #[error("word 0 of the descriptor, {0:#x}, names an operator or a type that this version does not know")]
    Types(u64),
    /// Bits that must be 0 are not.
    #[error("bits that must be 0 are set in word {0} of the descriptor")]
    Reserved(u8),
}

const COPY: u8 = 1;
const LOAD: u8 = 2;
const REDUCE: u8 = 3;
const STORE: u8 = 4;
const PUBLISH: u8 = 5;

/// The bit of the first word that says that a chain goes on.
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
    /// Return what the step writes.
    pub const fn dst(&self) -> Address {
        match *self {
            Self::Copy { dst, .. }
            | Self::Load { dst, .. }
            | Self::Reduce { dst, .. }
            | Self::Store { dst, .. }
            | Self::Publish { dst, .. } => dst,
        }
    }

    /// Return what the step reads, apart from accumulators.
    pub const fn src(&self) -> Option<Address> {
        match *self {
            Self::Copy { src, .. } | Self::Load { src, .. } | Self::Reduce { src, .. } | Self::Store { src, .. } => {
                Some(src)
            }
            Self::Publish { .. } => None,
        }
    }

    /// Return the length of what the step writes, in bytes.
    pub const fn dst_len_bytes(&self) -> u64 {
        match *self {
            Self::Copy { len_bytes, .. } => len_bytes as u64,
            Self::Load { accumulator: dtype, count, .. } => len_bytes(dtype, None, count),
            Self::Reduce { op, accumulator: dtype, count, .. } | Self::Store { op, output: dtype, count, .. } => {
                len_bytes(dtype, Some(op), count)
            }
            Self::Publish { covers, .. } if covers.is_nothing() => 16,
            Self::Publish { .. } => Covers::SKIP_MIN_BYTES as u64,
        }
    }

    /// Return the length of what the step reads at [`Step::src`], in bytes.
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
                ranks: covers.skip_bytes,
                ..Fields::default()
            },
        }
    }
}

/// Return the length of `count` elements: values, or pairs.
const fn len_bytes(dtype: Dtype, op: Option<ReduceOp>, count: u32) -> u64 {
    let values = if matches!(op, Some(op) if op.is_located()) { 2 } else { 1 };
    values * count as u64 * dtype.size_bytes() as u64
}

impl Descriptor {
    /// Return the words that travel.
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

    /// Read a descriptor from the words that travel.
    ///
    /// # Errors
    /// [`DescriptorError`], if no descriptor of this version has these words.
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
        // What a kind has no use for must be 0: then a later version can give it a meaning.
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
        // What covers nothing begins nowhere.
        PUBLISH if length == 0 && ranks != 0 => return Err(DescriptorError::Reserved(7)),
        PUBLISH => Step::Publish {
            dst: at(5)?,
            words: [words[3], words[4]],
            covers: Covers { skip_bytes: ranks, len_bytes: length },
        },
        kind => return Err(DescriptorError::Kind(kind)),
    })
}
