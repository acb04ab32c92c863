//! The mailboxes of the commands for alias keys: requests as bytes, and what the device answers.
//!
//! A field is a range of bits, counted from the most significant bit of a mailbox's first byte; numbers are big-endian.
//! The layouts are those of UCX (`src/uct/ib/mlx5/dv/ib_mlx5_ifc.h`, commit 07076a6a), and the tests hold the bytes
//! against those of Linux (`include/linux/mlx5/mlx5_ifc.h`, 6.12), except for `mkey_umem_id`, which only UCX has.
//!
//! Invariant: what is not a named field is zero, as the device demands of reserved bits.

use super::AccessKey;

/// Bits of a mailbox.
#[derive(Clone, Copy)]
struct Field {
    at: usize,
    len: usize,
}

const fn field(at: usize, len: usize) -> Field {
    Field { at, len }
}

impl Field {
    /// The same field of a structure that starts at bit `at`.
    const fn inside(self, at: usize) -> Self {
        Self { at: at + self.at, len: self.len }
    }

    /// Write a number, which fits.
    fn set(self, mailbox: &mut [u8], value: u64) {
        assert!(self.len == 64 || value >> self.len == 0, "{value:#x} in {} bits", self.len);
        for nth in 0..self.len {
            let (byte, mask) = self.bit(nth);
            let is_set = value >> (self.len - 1 - nth) & 1 == 1;
            mailbox[byte] = if is_set { mailbox[byte] | mask } else { mailbox[byte] & !mask };
        }
    }

    /// Read a number; bits beyond the mailbox are zero.
    fn of(self, mailbox: &[u8]) -> u64 {
        (0..self.len).fold(0, |value, nth| {
            let (byte, mask) = self.bit(nth);
            value << 1 | u64::from(mailbox.get(byte).is_some_and(|found| found & mask != 0))
        })
    }

    const fn bit(self, nth: usize) -> (usize, u8) {
        ((self.at + nth) / 8, 0x80 >> ((self.at + nth) % 8))
    }
}

/// The start of every request.
const OPCODE: Field = field(0, 16);
const OP_MOD: Field = field(0x30, 16);

/// The start of every answer.
const STATUS: Field = field(0, 8);
const SYNDROME: Field = field(0x20, 32);

const QUERY_HCA_CAP: u64 = 0x100;
const CREATE_MKEY: u64 = 0x200;
const CREATE_GENERAL_OBJECT: u64 = 0xa00;
const ALLOW_OTHER_VHCA_ACCESS: u64 = 0xb16;

/// The type of memory keys among objects.
const OBJECT_MKEY: u64 = 0xff01;

/// The length of an answer with capabilities: a header, and a union of 4 KiB.
pub(super) const CAPABILITIES_LEN: usize = 16 + 0x8000 / 8;
/// The length of an answer with an object's number.
pub(super) const CREATED_LEN: usize = 16;
/// The length of the answer about an alias, which has its context.
pub(super) const ALIAS_CREATED_LEN: usize = 16 + 64;
/// The length of an answer that has nothing but its status.
pub(super) const DONE_LEN: usize = 16;

/// The highest number of a protection domain, and of a memory key: 24 bits, next to the key's low byte.
pub(super) const NUMBER_MAX: u32 = 0xff_ffff;

/// A group of capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Group {
    /// `cmd_hca_cap`
    General,
    /// `cmd_hca_cap_2`
    General2,
}

/// Ask for the current capabilities of a group.
pub(super) fn query_capabilities(group: Group) -> [u8; 16] {
    const CURRENT: u64 = 1;
    let group = match group {
        Group::General => 0,
        Group::General2 => 0x20,
    };
    let mut mailbox = [0; 16];
    OPCODE.set(&mut mailbox, QUERY_HCA_CAP);
    OP_MOD.set(&mut mailbox, group << 1 | CURRENT);
    mailbox
}

/// Read the function's number (`vhca_id`) from its general capabilities.
pub(super) fn function_number(answer: &[u8]) -> u16 {
    // 16 bits.
    field(0x30, 16).inside(CAPABILITY).of(answer) as u16
}

/// Read from the second group whether other functions may be given access to memory keys, and whether memory keys may
/// be aliases of another function's.
pub(super) fn sharing(answer: &[u8]) -> (bool, bool) {
    const MKEY: u64 = 0x4;
    const MKEY_TO_MKEY: u64 = 0x100;
    let allowed = field(0x100, 64).inside(CAPABILITY).of(answer);
    let supported = field(0xe0, 32).inside(CAPABILITY).of(answer);
    (allowed & MKEY != 0, supported & MKEY_TO_MKEY != 0)
}

/// Where capabilities start in their answer.
const CAPABILITY: usize = 0x80;

/// A memory key for pinned memory (`umem`).
#[derive(Debug, Clone, Copy)]
pub(super) struct MkeyRequest {
    pub(super) umem: u32,
    /// The protection domain's number, of 24 bits.
    pub(super) domain: u32,
    /// Any value, which becomes the low byte of the key.
    pub(super) low_byte: u8,
    pub(super) addr: u64,
    pub(super) len_bytes: u64,
    /// The logarithm of the length of the pages in which the memory was pinned.
    pub(super) page_log: u8,
}

/// Ask for a memory key that this device, and those to which it is shared, may read and write by.
///
/// The number of translations is that of the pinned memory, so both fields for it have the least value, as in UCX.
pub(super) fn create_mkey(request: &MkeyRequest) -> [u8; 272] {
    /// Where the key's context (`mkc`) starts.
    const CONTEXT: usize = 0x80;
    const PAGE_TABLE: u64 = 1;
    const ANY_PAIR: u64 = 0xff_ffff;
    let mut mailbox = [0; 272];
    OPCODE.set(&mut mailbox, CREATE_MKEY);
    for (at, len, value) in [
        (0x61, 1, 1),                                  // mkey_umem_valid
        (CONTEXT + 0x12, 1, 1),                        // rw: remote write
        (CONTEXT + 0x13, 1, 1),                        // rr: remote read
        (CONTEXT + 0x14, 1, 1),                        // lw: local write
        (CONTEXT + 0x15, 1, 1),                        // lr: local read
        (CONTEXT + 0x16, 2, PAGE_TABLE),               // access_mode_1_0
        (CONTEXT + 0x20, 24, ANY_PAIR),                // qpn
        (CONTEXT + 0x38, 8, request.low_byte.into()),  // mkey_7_0
        (CONTEXT + 0x68, 24, request.domain.into()),   // pd
        (CONTEXT + 0x80, 64, request.addr),            // start_addr
        (CONTEXT + 0xc0, 64, request.len_bytes),       // len
        (CONTEXT + 0x1a0, 32, 1),                      // translations_octword_size
        (CONTEXT + 0x1db, 5, request.page_log.into()), // log_entity_size
        (0x300, 32, 1),                                // translations_octword_actual_size
        (0x320, 32, request.umem.into()),              // mkey_umem_id
    ] {
        field(at, len).set(&mut mailbox, value);
    }
    mailbox
}

/// Read a new memory key.
pub(super) fn created_mkey(answer: &[u8], low_byte: u8) -> u32 {
    // 24 bits.
    (field(0x48, 24).of(answer) as u32) << 8 | u32::from(low_byte)
}

/// Allow other functions that have this access key to use a memory key.
pub(super) fn allow_access(mkey: u32, access: &AccessKey) -> [u8; 64] {
    let mut mailbox = [0; 64];
    OPCODE.set(&mut mailbox, ALLOW_OTHER_VHCA_ACCESS);
    field(0x90, 16).set(&mut mailbox, OBJECT_MKEY); // object_type_to_be_accessed
    field(0xa0, 32).set(&mut mailbox, index(mkey)); // object_id_to_be_accessed
    mailbox[0x100 / 8..].copy_from_slice(&access.0);
    mailbox
}

/// Ask for an alias of the memory key `mkey` of `function` in this function's protection domain.
pub(super) fn create_alias(function: u16, mkey: u32, access: &AccessKey, domain: u32) -> [u8; 80] {
    const CONTEXT: usize = 0x80;
    let mut mailbox = [0; 80];
    OPCODE.set(&mut mailbox, CREATE_GENERAL_OBJECT);
    field(0x30, 16).set(&mut mailbox, OBJECT_MKEY); // obj_type
    field(0x60, 1).set(&mut mailbox, 1); // alias_object
    field(0, 16).inside(CONTEXT).set(&mut mailbox, function.into()); // vhca_id_to_be_accessed
    field(0x20, 32).inside(CONTEXT).set(&mut mailbox, index(mkey)); // object_id_to_be_accessed
    mailbox[(CONTEXT + 0x80) / 8..][..32].copy_from_slice(&access.0);
    field(0x180, 32).inside(CONTEXT).set(&mut mailbox, domain.into()); // metadata_1
    mailbox
}

/// Read the number of a new alias, or the state in which it is not usable.
pub(super) fn created_alias(answer: &[u8]) -> Result<u32, u8> {
    // 3 bits.
    match field(0x1d, 3).inside(0x80).of(answer) as u8 {
        // 32 bits.
        0 => Ok(field(0x40, 32).of(answer) as u32),
        state => Err(state),
    }
}

/// Read the status of an answer; on failure with the syndrome.
pub(super) fn status(answer: &[u8]) -> Result<(), (u8, u32)> {
    // 8 and 32 bits.
    match STATUS.of(answer) as u8 {
        0 => Ok(()),
        status => Err((status, SYNDROME.of(answer) as u32)),
    }
}

/// Describe a status (`MLX5_CMD_STAT_*` in Linux's `include/linux/mlx5/device.h`).
pub(super) const fn describe(status: u8) -> &'static str {
    match status {
        0x01 => "internal error",
        0x02 => "unknown command",
        0x03 => "bad parameter",
        0x04 => "bad system state",
        0x05 => "bad resource",
        0x06 => "resource busy",
        0x07 => "not ready",
        0x08 => "limit exceeded",
        0x09 => "bad state of the resource",
        0x0a => "bad index",
        0x0f => "no resources",
        0x50 => "bad length of the request",
        0x51 => "bad length of the answer",
        _ => "unknown status",
    }
}

/// The number of the object behind a memory key.
const fn index(mkey: u32) -> u64 {
    (mkey >> 8) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: AccessKey = AccessKey(*b"0123456789abcdefghijklmnopqrstuv");

    /// A mailbox of zeros, apart from bytes at offsets that were computed by hand from Linux's `mlx5_ifc.h`.
    fn bytes<const LEN: usize>(parts: &[(usize, &[u8])]) -> [u8; LEN] {
        let mut mailbox = [0; LEN];
        for (at, part) in parts {
            mailbox[*at..at + part.len()].copy_from_slice(part);
        }
        mailbox
    }

    #[test]
    fn allow_access_has_the_kernels_layout() {
        // opcode; reserved_at_40[0x50] ends at 0x90: object type; 0xa0: object id; 0x100: access key.
        let wanted = [(0, &b"\x0b\x16"[..]), (18, b"\xff\x01"), (20, b"\x00\x12\x34\x56"), (32, &KEY.0)];
        assert_eq!(allow_access(0x1234_5678, &KEY), bytes(&wanted));
    }

    #[test]
    fn create_alias_has_the_kernels_layout() {
        // general_obj_in_cmd_hdr: opcode, 0x30: obj_type, 0x60: op_param.create.alias_object. From byte 16 on,
        // alias_context: vhca_id_to_be_accessed, 0x20: object_id_to_be_accessed, 0x80: access_key, 0x180: metadata.
        let wanted = [
            (0, &b"\x0a\x00"[..]),
            (6, b"\xff\x01"),
            (12, b"\x80"),
            (16, b"\x00\x07"),
            (20, b"\x00\x12\x34\x56"),
            (32, &KEY.0),
            (64, b"\x00\x00\x00\x2a"),
        ];
        assert_eq!(create_alias(7, 0x1234_5678, &KEY, 42), bytes(&wanted));
    }

    #[test]
    fn create_mkey_has_the_kernels_layout() {
        let request = MkeyRequest {
            umem: 0x0a0b_0c0d,
            domain: 0x00a1_b2c3,
            low_byte: 0x66,
            addr: 0x7f00_1122_3344_5566,
            len_bytes: 0x0123_4567_89ab_cdef,
            page_log: 12,
        };
        // Bit 0x61 is mkey_umem_valid. From byte 16 on, mkc: bits 0x10 to 0x17 are umr_en, a, rw, rr, lw, lr and
        // access_mode_1_0; 0x20: qpn and mkey_7_0; 0x68: pd; 0x80: start_addr; 0xc0: len; 0x1a0:
        // translations_octword_size; 0x1da: log_page_size. Then 0x300: translations_octword_actual_size. Byte 100, the
        // number of the pinned memory, is UCX's alone.
        let wanted = [
            (0, &b"\x02\x00"[..]),
            (12, b"\x40"),
            (18, b"\x3d"),
            (20, b"\xff\xff\xff\x66"),
            (28, b"\x00\xa1\xb2\xc3"),
            (32, b"\x7f\x00\x11\x22\x33\x44\x55\x66"),
            (40, b"\x01\x23\x45\x67\x89\xab\xcd\xef"),
            (68, b"\x00\x00\x00\x01"),
            (75, b"\x0c"),
            (96, b"\x00\x00\x00\x01"),
            (100, b"\x0a\x0b\x0c\x0d"),
        ];
        assert_eq!(create_mkey(&request), bytes(&wanted));
        assert_eq!(created_mkey(&bytes::<16>(&[(8, b"\xff\x12\x34\x56")]), 0x66), 0x1234_5666);
    }

    #[test]
    fn capabilities_are_read_where_the_kernel_has_them() {
        // op_mod: the group shifted by one, and 1 for the current values.
        assert_eq!(query_capabilities(Group::General), bytes(&[(0, b"\x01\x00"), (6, b"\x00\x01")]));
        assert_eq!(query_capabilities(Group::General2), bytes(&[(0, b"\x01\x00"), (6, b"\x00\x41")]));
        // Capabilities start at byte 16: cmd_hca_cap.vhca_id at 0x30; cmd_hca_cap_2 at 0xe0 and 0x100.
        let general = bytes::<CAPABILITIES_LEN>(&[(22, b"\x01\x02")]);
        assert_eq!(function_number(&general), 0x0102);
        let wanted = [
            ((b"\0\0\x01\0", b"\0\0\0\0\0\0\0\x04"), (true, true)),
            ((b"\0\0\0\0", b"\0\0\0\0\0\0\0\x04"), (true, false)),
            ((b"\0\0\x01\0", b"\xff\xff\xff\xff\xff\xff\xff\xfb"), (false, true)),
            ((b"\xff\xff\xfe\xff", b"\0\0\0\0\0\0\0\0"), (false, false)),
        ];
        for ((supported, allowed), found) in wanted {
            let second = bytes::<CAPABILITIES_LEN>(&[(44, supported), (48, allowed)]);
            assert_eq!(sharing(&second), found);
        }
    }

    #[test]
    fn answers_yield_keys_states_and_syndromes() {
        // general_obj_out_cmd_hdr: status, 0x20: syndrome, 0x40: obj_id; then alias_context with its status at 0x1d.
        assert_eq!(created_alias(&bytes::<ALIAS_CREATED_LEN>(&[(8, b"\x00\x00\x12\x34")])), Ok(0x1234));
        assert_eq!(created_alias(&bytes::<ALIAS_CREATED_LEN>(&[(19, b"\x05")])), Err(5));
        assert_eq!(status(&[0; 16]), Ok(()));
        assert_eq!(status(&bytes::<16>(&[(0, b"\x03"), (4, b"\x00\x0a\x0b\x0c")])), Err((3, 0x000a_0b0c)));
        assert_eq!((describe(3), describe(0x50)), ("bad parameter", "bad length of the request"));
    }
}
