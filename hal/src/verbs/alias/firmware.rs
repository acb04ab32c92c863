//! A double of a device with several functions, which takes the commands for alias keys as bytes.
//!
//! Its offsets are those of Linux's `include/linux/mlx5/mlx5_ifc.h` (6.12), computed by hand, as bytes; the code's are
//! those of UCX, as bits. It refuses what the header does not allow: other lengths, opcodes and object types, bits
//! that are set where the header has reserved ones, objects and domains that are not there, wrong access keys, and
//! aliases of keys to which access was not allowed. What it answers then (which status, whether at once or by a bad
//! state) is its own guess, as is that an alias ends with its key.

use super::super::objects::Domain;
use super::Commands;
use crate::dma::DmaMemory;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;

const BAD_PARAM: u8 = 0x03;
const BAD_RESOURCE: u8 = 0x05;
const BAD_INPUT_LEN: u8 = 0x50;
const BAD_OUTPUT_LEN: u8 = 0x51;
const BAD_OPCODE: u8 = 0x02;

/// A memory key, or an alias of one.
#[derive(Debug, Clone)]
pub(in crate::verbs) enum Key {
    Memory { umem: u32, addr: u64, len_bytes: u64, low_byte: u8, access: Option<[u8; 32]> },
    Alias { function: u16, object: u32 },
}

/// A function of the device.
#[derive(Debug)]
pub(in crate::verbs) struct Function {
    pub(in crate::verbs) allowed_objects: u64,
    pub(in crate::verbs) supported_pairs: u32,
    /// Keys by their numbers, with their domains.
    pub(in crate::verbs) keys: BTreeMap<u32, (u32, Key)>,
    /// Pinned memory by its number: address and length.
    pub(in crate::verbs) pinned: BTreeMap<u32, (usize, usize)>,
    /// Protection domains by their handles.
    domains: BTreeMap<usize, u32>,
    pub(in crate::verbs) next: u32,
    pub(in crate::verbs) fails_to_destroy: bool,
    pub(in crate::verbs) pins_at_most: usize,
    /// The kernel takes no commands.
    pub(in crate::verbs) has_no_devx: bool,
    /// The state in which new aliases are.
    pub(in crate::verbs) alias_state: u8,
    /// The status in the answer about a new object, although the kernel reports success.
    pub(in crate::verbs) created_status: u8,
}

/// The device, shared by its functions.
#[derive(Debug, Clone, Default)]
pub(in crate::verbs) struct Firmware(pub(in crate::verbs) Rc<RefCell<BTreeMap<u16, Function>>>);

/// One function's interface.
#[derive(Debug, Clone)]
pub(in crate::verbs) struct FunctionHandle {
    pub(in crate::verbs) firmware: Firmware,
    pub(in crate::verbs) number: u16,
}

impl Firmware {
    /// Add a function that supports all of it.
    pub(in crate::verbs) fn add(&self, number: u16) -> FunctionHandle {
        let function = Function {
            allowed_objects: 0x4,
            supported_pairs: 0x100,
            keys: BTreeMap::new(),
            pinned: BTreeMap::new(),
            domains: BTreeMap::new(),
            // Numbers of different functions do not meet.
            next: u32::from(number) * 0x1000,
            fails_to_destroy: false,
            pins_at_most: usize::MAX,
            has_no_devx: false,
            alias_state: 0,
            created_status: 0,
        };
        self.0.borrow_mut().insert(number, function);
        FunctionHandle { firmware: self.clone(), number }
    }

    /// Return the address of a range that a function accesses by a local key, if it may.
    pub(in crate::verbs) fn resolve(&self, number: u16, lkey: u32, addr: u64, len_bytes: u64) -> Option<u64> {
        let functions = self.0.borrow();
        let (_, key) = functions.get(&number)?.keys.get(&(lkey >> 8))?;
        let (owner, key, low_byte) = match key {
            Key::Alias { function, object } => {
                let owner = functions.get(function)?;
                (owner, &owner.keys.get(object)?.1, 0)
            }
            key @ Key::Memory { low_byte, .. } => (functions.get(&number)?, key, *low_byte),
        };
        let Key::Memory { umem, addr: start, len_bytes: len, .. } = key else { return None };
        let is_pinned = owner.pinned.contains_key(umem);
        let is_inside = addr >= *start && addr.checked_add(len_bytes)? <= start + len;
        (is_pinned && is_inside && lkey as u8 == low_byte).then_some(addr)
    }
}

impl Function {
    fn number(&mut self) -> u32 {
        self.next += 1;
        self.next
    }
}

fn be(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte))
}

/// Refuse bits that are set outside `named` ranges of bytes, and outside single bits of other bytes.
fn reserved_bits_are_zero(request: &[u8], named: &[std::ops::Range<usize>], bits: &[(usize, u8)]) -> Result<(), u8> {
    for (at, byte) in request.iter().enumerate() {
        let allowed = bits.iter().find(|(byte, _)| *byte == at).map_or(0, |(_, mask)| *mask);
        if !named.iter().any(|range| range.contains(&at)) && byte & !allowed != 0 {
            return Err(BAD_PARAM);
        }
    }
    Ok(())
}

impl FunctionHandle {
    pub(in crate::verbs) fn with<R>(&self, work: impl FnOnce(&mut Function) -> R) -> R {
        work(self.firmware.0.borrow_mut().get_mut(&self.number).expect("a function"))
    }

    /// Give memory a key that cannot be shared, as `ibv_reg_mr` does; returns it.
    pub(in crate::verbs) fn register(&self, memory: &dyn DmaMemory) -> u32 {
        let (addr, len) = (memory.base().as_ptr().expose_provenance(), memory.len_bytes());
        self.with(|function| {
            let (umem, object) = (function.number(), function.number());
            function.pinned.insert(umem, (addr, len));
            let key = Key::Memory { umem, addr: addr as u64, len_bytes: len as u64, low_byte: 0, access: None };
            function.keys.insert(object, (0, key));
            object << 8
        })
    }

    /// Process a command; returns the number of a new key.
    fn command(&self, request: &[u8], answer: &mut [u8]) -> Result<Option<u32>, u8> {
        let opcode = be(request.get(0..2).ok_or(BAD_INPUT_LEN)?);
        let lengths = match opcode {
            0x100 => (16, 16 + 4096),
            0x200 => (272, 16),
            0xb16 => (64, 16),
            // The kernel's own aliases have an answer of 16 bytes, UCX's one with the context.
            0xa00 => (80, 16 + 64),
            _ => return Err(BAD_OPCODE),
        };
        match (request.len() == lengths.0, answer.len() == lengths.1) {
            (false, _) => return Err(BAD_INPUT_LEN),
            (_, false) => return Err(BAD_OUTPUT_LEN),
            _ => {}
        }
        match opcode {
            0x100 => self.query_hca_cap(request, answer).map(|()| None),
            0x200 => self.create_mkey(request, answer).map(Some),
            0xb16 => self.allow_other_vhca_access(request).map(|()| None),
            _ => self.create_alias(request, answer).map(Some),
        }
    }

    fn query_hca_cap(&self, request: &[u8], answer: &mut [u8]) -> Result<(), u8> {
        reserved_bits_are_zero(request, &[0..2, 6..8], &[])?;
        let (pairs, objects) = self.with(|function| (function.supported_pairs, function.allowed_objects));
        match be(&request[6..8]) {
            // cmd_hca_cap.vhca_id, at bit 0x30.
            0x01 => answer[22..24].copy_from_slice(&self.number.to_be_bytes()),
            // cmd_hca_cap_2, at bits 0xe0 and 0x100.
            0x41 => {
                answer[44..48].copy_from_slice(&pairs.to_be_bytes());
                answer[48..56].copy_from_slice(&objects.to_be_bytes());
            }
            _ => return Err(BAD_PARAM),
        }
        Ok(())
    }

    fn create_mkey(&self, request: &[u8], answer: &mut [u8]) -> Result<u32, u8> {
        let named = [0..2, 20..24, 29..32, 32..48, 68..72, 96..100, 100..104];
        // pg_access and mkey_umem_valid; a to access_mode_1_0; log_page_size.
        reserved_bits_are_zero(request, &named, &[(12, 0xc0), (18, 0x7f), (75, 0x3f)])?;
        let (umem, domain) = (be(&request[100..104]) as u32, be(&request[29..32]) as u32);
        let (addr, len_bytes) = (be(&request[32..40]), be(&request[40..48]));
        let has_local_access = request[18] & 0x0c == 0x0c;
        let is_page_table = request[18] & 0x03 == 1 && request[12] & 0x40 != 0 && be(&request[20..23]) == 0xff_ffff;
        self.with(|function| {
            let (start, len) = *function.pinned.get(&umem).ok_or(BAD_RESOURCE)?;
            if !function.domains.values().any(|known| *known == domain) {
                return Err(BAD_RESOURCE);
            }
            let is_whole = (addr, len_bytes) == (start as u64, len as u64);
            let pages = usize::from(request[75]) == rustix::param::page_size().trailing_zeros() as usize;
            if !has_local_access || !is_page_table || !is_whole || !pages {
                return Err(BAD_PARAM);
            }
            let object = function.number();
            let key = Key::Memory { umem, addr, len_bytes, low_byte: request[23], access: None };
            function.keys.insert(object, (domain, key));
            // mkey_index, at bit 0x48.
            answer[9..12].copy_from_slice(&object.to_be_bytes()[1..]);
            Ok(object)
        })
    }

    fn allow_other_vhca_access(&self, request: &[u8]) -> Result<(), u8> {
        reserved_bits_are_zero(request, &[0..2, 18..20, 20..24, 32..64], &[])?;
        self.with(|function| {
            if be(&request[18..20]) != 0xff01 || function.allowed_objects & 0x4 == 0 {
                return Err(BAD_PARAM);
            }
            match function.keys.get_mut(&(be(&request[20..24]) as u32)) {
                // Keys of `ibv_reg_mr`, which are in domain 0 here, are not shared.
                Some((1.., Key::Memory { access, .. })) => {
                    *access = Some(request[32..64].try_into().expect("32 bytes"));
                    Ok(())
                }
                _ => Err(BAD_RESOURCE),
            }
        })
    }

    fn create_alias(&self, request: &[u8], answer: &mut [u8]) -> Result<u32, u8> {
        reserved_bits_are_zero(request, &[0..2, 6..8, 16..18, 20..24, 32..64, 64..68], &[(12, 0x80)])?;
        let (function, object) = (be(&request[16..18]) as u16, be(&request[20..24]) as u32);
        let domain = be(&request[64..68]) as u32;
        if be(&request[6..8]) != 0xff01 || request[12] != 0x80 {
            return Err(BAD_PARAM);
        }
        let owners = self.firmware.0.borrow();
        let owner = owners.get(&function).ok_or(BAD_RESOURCE)?;
        let Some((_, Key::Memory { access: Some(access), .. })) = owner.keys.get(&object) else {
            return Err(BAD_RESOURCE);
        };
        if access[..] != request[32..64] {
            return Err(BAD_RESOURCE);
        }
        drop(owners);
        self.with(|own| {
            if own.supported_pairs & 0x100 == 0 || !own.domains.values().any(|known| *known == domain) {
                return Err(BAD_PARAM);
            }
            let number = own.number();
            own.keys.insert(number, (domain, Key::Alias { function, object }));
            answer[8..12].copy_from_slice(&number.to_be_bytes());
            answer[19] = own.alias_state;
            Ok(number)
        })
    }

    fn answered(&self, request: &[u8], answer: &mut [u8]) -> io::Result<Option<u32>> {
        if self.with(|function| function.has_no_devx) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let done = self.command(request, answer);
        done.map_err(|status| {
            answer[0] = status;
            answer[4..8].copy_from_slice(&0x00c0_ffee_u32.to_be_bytes());
            io::Error::from_raw_os_error(libc::EREMOTEIO)
        })
    }
}

impl Commands for FunctionHandle {
    type Object = u32;
    type Pinned = u32;

    fn name(&self) -> &str {
        "mlx5_2"
    }

    fn execute(&self, request: &[u8], answer: &mut [u8]) -> io::Result<()> {
        assert_eq!(self.answered(request, answer)?, None, "objects are created by `create`");
        Ok(())
    }

    fn create(&self, request: &[u8], answer: &mut [u8]) -> io::Result<u32> {
        let object = self.answered(request, answer)?.expect("an object");
        answer[0] = self.with(|function| function.created_status);
        Ok(object)
    }

    unsafe fn destroy(&self, object: &mut u32) -> io::Result<()> {
        self.with(|function| {
            if function.fails_to_destroy {
                return Err(io::Error::from_raw_os_error(libc::EBUSY));
            }
            assert!(function.keys.remove(object).is_some(), "destroyed twice");
            Ok(())
        })
    }

    unsafe fn pin(&self, memory: &dyn DmaMemory, page_log: u8) -> io::Result<(u32, u32)> {
        assert_eq!(1 << page_log, rustix::param::page_size());
        let (addr, len) = (memory.base().as_ptr().expose_provenance(), memory.len_bytes());
        self.with(|function| {
            if len > function.pins_at_most {
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
            let number = function.number();
            function.pinned.insert(number, (addr, len));
            Ok((number, number))
        })
    }

    unsafe fn unpin(&self, pinned: &mut u32) -> io::Result<()> {
        self.with(|function| {
            let is_used = |(_, key): &(u32, Key)| matches!(key, Key::Memory { umem, .. } if umem == pinned);
            assert!(!function.keys.values().any(is_used), "a key opens memory that is unpinned");
            assert!(function.pinned.remove(pinned).is_some(), "unpinned twice");
            Ok(())
        })
    }

    fn domain_number(&self, domain: &Domain) -> io::Result<u32> {
        let handle = domain.raw.as_ptr().expose_provenance();
        Ok(self.with(|function| {
            let next = function.next + 1;
            function.next = next;
            *function.domains.entry(handle).or_insert(next)
        }))
    }
}
