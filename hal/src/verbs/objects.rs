//! Owners of libibverbs objects, which destroy them when dropped.
//!
//! Invariants:
//! - Each object keeps its parents alive and is destroyed before them.
//! - Pointers into the library do not leave this folder.

use super::config::VerbsError;
use super::events::{self, Events};
use super::ibv;
use super::quarantine::Quarantine;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An open device.
pub(super) struct Context {
    pub(super) raw: NonNull<ibv::ibv_context>,
    pub(super) name: String,
    pub(super) events: Events,
}

// SAFETY: the library's calls on a context may come from any thread (ibv_open_device(3): "thread-safe").
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The attributes of a port.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortAttr {
    pub(super) is_active: bool,
    pub(super) is_ethernet: bool,
    pub(super) mtu_bytes: usize,
    pub(super) lid: u16,
    /// Its speed, in units that only compare.
    pub(super) rate: u32,
}

/// An entry of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GidEntry {
    pub(super) gid: [u8; 16],
    pub(super) port: u8,
    pub(super) index: u8,
    /// RoCE version 2 (over UDP); else InfiniBand or RoCE version 1.
    pub(super) is_v2: bool,
}

/// The maximum number of GID entries read from a device.
const MAX_GIDS: usize = 1024;

/// Call `visit` with the names and handles of this machine's devices, which are valid only during the call.
pub(super) fn with_devices<R>(visit: impl FnOnce(&[(String, *mut ibv::ibv_device)]) -> R) -> Result<R, VerbsError> {
    let mut count = 0;
    // SAFETY: the count is writable; the list is freed below.
    let list = unsafe { ibv::ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        return Err(VerbsError::Devices { source: io::Error::last_os_error() });
    }
    let devices: Vec<_> = (0..usize::try_from(count).unwrap_or(0))
        .map(|nth| {
            // SAFETY: the list has `count` devices, whose names are strings that are valid as long as the list is.
            let (device, name) = unsafe {
                let device = *list.add(nth);
                (device, CStr::from_ptr(ibv::ibv_get_device_name(device)))
            };
            (name.to_string_lossy().into_owned(), device)
        })
        .collect();
    let result = visit(&devices);
    // SAFETY: from ibv_get_device_list, freed once. Opened devices stay valid.
    unsafe { ibv::ibv_free_device_list(list) };
    Ok(result)
}

impl Context {
    /// Open the device called `name`.
    pub(super) fn open(name: &str) -> Result<Arc<Self>, VerbsError> {
        with_devices(|devices| {
            let have = || devices.iter().map(|(name, _)| name.clone()).collect();
            let found = devices.iter().find(|(known, _)| known == name);
            let (name, device) = found.ok_or_else(|| VerbsError::NoDevice { wanted: name.into(), have: have() })?;
            // SAFETY: a device of the list, which is not freed yet.
            let raw = NonNull::new(unsafe { ibv::ibv_open_device(*device) });
            let raw = raw.ok_or_else(|| VerbsError::last("open the device", name))?;
            let context = Arc::new(Self { raw, name: name.clone(), events: Events::default() });
            match events::set_nonblocking(raw) {
                Ok(()) => Ok(context),
                Err(source) => {
                    Err(VerbsError::Refused { what: "read the device's events", device: name.clone(), source })
                }
            }
        })?
    }

    /// Read the device's events.
    pub(super) fn poll_events(&self) {
        self.events.poll(self.raw);
    }

    /// Return whether the device is iWARP.
    pub(super) fn is_iwarp(&self) -> bool {
        // SAFETY: an open device, whose description is valid as long as it.
        unsafe { (*self.raw.as_ref().device).transport_type == ibv::IBV_TRANSPORT_IWARP }
    }

    /// Return the descriptor that is readable while there are events.
    pub(super) fn event_file(&self) -> BorrowedFd<'_> {
        events::file_of(&self.raw)
    }

    pub(super) fn device_attr(&self) -> Result<ibv::ibv_device_attr, VerbsError> {
        let mut attr = MaybeUninit::zeroed();
        // SAFETY: an open device, and room for its attributes.
        let status = unsafe { ibv::ibv_query_device(self.raw.as_ptr(), attr.as_mut_ptr()) };
        self.check(status, "query the device")?;
        // SAFETY: filled in, and all zeros would be valid too.
        Ok(unsafe { attr.assume_init() })
    }

    pub(super) fn port_attr(&self, port: u8) -> Result<PortAttr, VerbsError> {
        let mut attr = ibv::ibv_port_attr::default();
        // SAFETY: an open device; the function fills in the older, shorter form of the structure (verbs.h wraps it in
        // the same way), which is a prefix of the full one.
        let status = unsafe { ibv::ibv_query_port(self.raw.as_ptr(), port, (&raw mut attr).cast()) };
        self.check(status, "query the port")?;
        Ok(PortAttr {
            is_active: attr.state == ibv::ibv_port_state::IBV_PORT_ACTIVE,
            is_ethernet: u32::from(attr.link_layer) == ibv::IBV_LINK_LAYER_ETHERNET,
            // `enum ibv_mtu`: 1 is 256 bytes, each further value twice as much.
            mtu_bytes: 128 << attr.active_mtu.min(5),
            lid: attr.lid,
            rate: rate(attr.active_width, attr.active_speed),
        })
    }

    /// Return the index of a partition key in a port's table, whatever its membership bit; `None` if it is not there.
    pub(super) fn partition_index(&self, port: u8, key: u16) -> Result<Option<u16>, VerbsError> {
        let mut limited = None;
        for index in 0..self.partitions(port)? {
            let mut found = 0;
            // SAFETY: an open device, and room for a key.
            if unsafe { ibv::ibv_query_pkey(self.raw.as_ptr(), port, i32::from(index), &raw mut found) } != 0 {
                return Err(VerbsError::last("query a partition key", &self.name));
            }
            match u16::from_be(found) {
                found if found == key => return Ok(Some(index)),
                found if found & !FULL_MEMBER == key & !FULL_MEMBER && key & !FULL_MEMBER != 0 => {
                    limited = limited.or(Some(index));
                }
                _ => {}
            }
        }
        Ok(limited)
    }

    /// Return the length of a port's table of partition keys.
    fn partitions(&self, port: u8) -> Result<u16, VerbsError> {
        let mut attr = ibv::ibv_port_attr::default();
        // SAFETY: as in `port_attr`.
        let status = unsafe { ibv::ibv_query_port(self.raw.as_ptr(), port, (&raw mut attr).cast()) };
        self.check(status, "query the port")?;
        Ok(attr.pkey_tbl_len)
    }

    /// Return the valid entries of the tables of all ports.
    pub(super) fn gids(&self) -> Result<Vec<GidEntry>, VerbsError> {
        let mut entries: Vec<ibv::ibv_gid_entry> = Vec::with_capacity(MAX_GIDS);
        // SAFETY: room for as many entries, of the given size; the function writes whole entries and returns their
        // number.
        let count = unsafe {
            let len = size_of::<ibv::ibv_gid_entry>();
            let count = ibv::_ibv_query_gid_table(self.raw.as_ptr(), entries.as_mut_ptr(), MAX_GIDS, 0, len);
            entries.set_len(usize::try_from(count).unwrap_or(0).min(MAX_GIDS));
            count
        };
        if count < 0 {
            let source = io::Error::from_raw_os_error(i32::try_from(-count).unwrap_or(0));
            return Err(VerbsError::Refused { what: "query the GID table", device: self.name.clone(), source });
        }
        let entry = |entry: &ibv::ibv_gid_entry| {
            Some(GidEntry {
                // SAFETY: any 16 bytes are a valid GID.
                gid: unsafe { entry.gid.raw },
                port: u8::try_from(entry.port_num).ok()?,
                index: u8::try_from(entry.gid_index).ok()?,
                is_v2: entry.gid_type == ibv::IBV_GID_TYPE_ROCE_V2,
            })
        };
        Ok(entries.iter().filter_map(entry).collect())
    }

    pub(super) fn check(&self, status: i32, what: &'static str) -> Result<(), VerbsError> {
        match status {
            0 => Ok(()),
            // Some drivers return -1 and set errno, others return its value.
            _ if status < 0 => Err(VerbsError::last(what, &self.name)),
            errno => Err(VerbsError::Refused {
                what,
                device: self.name.clone(),
                source: io::Error::from_raw_os_error(errno),
            }),
        }
    }
}

/// The bit of a partition key for full members (InfiniBand Architecture Specification, 10.9.1.1).
const FULL_MEMBER: u16 = 0x8000;

/// Return lanes times their speed in hundreds of Mbit/s (the codes are those of PortInfo, InfiniBand Architecture
/// Specification, 14.2.5.6).
const fn rate(width: u8, speed: u8) -> u32 {
    let lanes = match width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    let lane = match speed {
        2 => 50,
        4 | 8 => 100,
        16 => 140,
        32 => 250,
        64 => 500,
        128 => 1000,
        _ => 25,
    };
    lanes * lane
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: open, closed once, and all objects created from it are gone, as each holds this.
        unsafe { ibv::ibv_close_device(self.raw.as_ptr()) };
    }
}

/// A protection domain.
pub(super) struct Domain {
    pub(super) raw: NonNull<ibv::ibv_pd>,
    pub(super) context: Arc<Context>,
    /// The device may write to memory in any order.
    pub(super) is_relaxed: bool,
    /// Keys that were revoked recently.
    quarantine: Mutex<Quarantine>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Domain {}
// SAFETY: as of `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(context: &Arc<Context>, is_relaxed: bool) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: an open device.
        let raw = NonNull::new(unsafe { ibv::ibv_alloc_pd(context.raw.as_ptr()) });
        let raw = raw.ok_or_else(|| VerbsError::last("allocate a protection domain", &context.name))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context), is_relaxed, quarantine: Mutex::default() }))
    }

    /// Return the keys that were revoked recently.
    pub(super) fn quarantine(&self) -> MutexGuard<'_, Quarantine> {
        // A panic elsewhere leaves the list consistent.
        self.quarantine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: deallocated once, after all objects in it.
        unsafe { ibv::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// A completion channel, whose descriptor becomes readable when an armed completion queue has an entry.
pub(super) struct Channel {
    raw: NonNull<ibv::ibv_comp_channel>,
    /// A duplicate of the channel's descriptor, which can be borrowed from this value.
    fd: OwnedFd,
    _context: Arc<Context>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Channel {}
// SAFETY: as of `Context`.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        let what = "create a completion channel";
        // SAFETY: an open device.
        let raw = NonNull::new(unsafe { ibv::ibv_create_comp_channel(context.raw.as_ptr()) });
        let raw = raw.ok_or_else(|| VerbsError::last(what, &context.name))?;
        // SAFETY: the channel was just created, and its descriptor is open as long as it exists.
        let duplicate = unsafe { BorrowedFd::borrow_raw(raw.as_ref().fd.as_raw_fd()) }.try_clone_to_owned();
        let nonblocking = duplicate.and_then(|fd| {
            let flags = rustix::fs::fcntl_getfl(&fd)?;
            // The flag belongs to the open file, which both descriptors share.
            rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
            Ok(fd)
        });
        match nonblocking {
            Ok(fd) => Ok(Arc::new(Self { raw, fd, _context: Arc::clone(context) })),
            Err(source) => {
                // SAFETY: just created, and not shared.
                unsafe { ibv::ibv_destroy_comp_channel(raw.as_ptr()) };
                Err(VerbsError::Refused { what, device: context.name.clone(), source })
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.fd)
    }

    /// Consume all pending events. One completion queue uses this channel, so they are all its.
    pub(super) fn take_events(&self) {
        loop {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: a channel, and two writable results; the call does not block.
            if unsafe { ibv::ibv_get_cq_event(self.raw.as_ptr(), &raw mut cq, &raw mut context) } != 0 {
                return;
            }
            // SAFETY: an event of that queue, acknowledged once.
            unsafe { ibv::ibv_ack_cq_events(cq, 1) };
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: destroyed once, after the queue that used it.
        unsafe { ibv::ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// A completion queue.
pub(super) struct Completions {
    pub(super) raw: NonNull<ibv::ibv_cq>,
    context: Arc<Context>,
    _channel: Option<Arc<Channel>>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Completions {}
// SAFETY: as of `Context`.
unsafe impl Sync for Completions {}

impl Completions {
    /// Create a completion queue of `entries`, which notifies `channel` if given, from the first completion vector.
    pub(super) fn new(
        context: &Arc<Context>,
        entries: usize,
        channel: Option<&Arc<Channel>>,
    ) -> Result<Arc<Self>, VerbsError> {
        Self::with_vector(context, entries, channel, 0)
    }

    /// The same from a completion vector, modulo how many the device has.
    pub(super) fn with_vector(
        context: &Arc<Context>,
        entries: usize,
        channel: Option<&Arc<Channel>>,
        vector: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.raw.as_ptr());
        let raw_context = context.raw.as_ptr();
        // SAFETY: an open device.
        let vectors = u32::try_from(unsafe { (*raw_context).num_comp_vectors }).unwrap_or(0).max(1);
        let vector = (vector % vectors) as i32;
        // SAFETY: an open device, and its channel or none; it has this vector.
        let raw = unsafe { ibv::ibv_create_cq(raw_context, entries, ptr::null_mut(), raw_channel, vector) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("create a completion queue", &context.name))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context), _channel: channel.cloned() }))
    }

    /// Poll completions into `into`; returns how many.
    pub(super) fn poll(&self, into: &mut [ibv::ibv_wc]) -> usize {
        // SAFETY: the driver's own function for this device, which every driver has; it writes at most as many
        // completions as fit.
        let polled = unsafe {
            let ops = &self.context.raw.as_ref().ops;
            let room = i32::try_from(into.len()).unwrap_or(i32::MAX);
            ops.poll_cq.map(|poll| poll(self.raw.as_ptr(), room, into.as_mut_ptr()))
        };
        // Negative: the device is gone, and no completions come any more.
        usize::try_from(polled.unwrap_or(0)).unwrap_or(0).min(into.len())
    }

    /// Request an event on the channel for the next completion. Earlier completions cause none.
    pub(super) fn arm(&self) {
        // SAFETY: as in `poll`. If the device fails, no thread is woken.
        unsafe {
            let ops = &self.context.raw.as_ref().ops;
            ops.req_notify_cq.map(|arm| arm(self.raw.as_ptr(), 0));
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: destroyed once, after the queue pairs that used it; every event is acknowledged when it is consumed.
        unsafe { ibv::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}
