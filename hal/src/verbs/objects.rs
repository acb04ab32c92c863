//! The library's objects, each owned by one value that gives it back.
//!
//! Invariants:
//! - What an object was made from lives as long as it does: each holds its parents, and lets go of itself first.
//! - Pointers into the library stay in this folder; nothing outside sees one.

use super::config::VerbsError;
use ibverbs_sys as ibv;
use std::ffi::CStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// An open device.
pub(super) struct Context {
    pub(super) raw: NonNull<ibv::ibv_context>,
    pub(super) name: String,
}

// SAFETY: the library's calls on a context may come from any thread (ibv_open_device(3): "thread-safe").
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// A port of a device, as the library describes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortAttr {
    pub(super) is_active: bool,
    pub(super) is_ethernet: bool,
    pub(super) mtu_bytes: usize,
    pub(super) lid: u16,
}

/// An entry of a port's table of identifiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GidEntry {
    pub(super) gid: [u8; 16],
    pub(super) port: u8,
    pub(super) index: u8,
    /// RoCE version 2, over UDP; else InfiniBand's own, or RoCE version 1.
    pub(super) is_v2: bool,
}

/// The most entries of a device's tables that are looked at.
const MAX_GIDS: usize = 1024;

/// Return the names of this machine's devices, and open one: the library gives both by a list of its own.
pub(super) fn with_devices<R>(look: impl FnOnce(&[(String, *mut ibv::ibv_device)]) -> R) -> Result<R, VerbsError> {
    let mut count = 0;
    // SAFETY: the count is a valid place; the list is given back below.
    let list = unsafe { ibv::ibv_get_device_list(&raw mut count) };
    if list.is_null() {
        return Err(VerbsError::Devices { source: io::Error::last_os_error() });
    }
    let devices: Vec<_> = (0..usize::try_from(count).unwrap_or(0))
        .map(|nth| {
            // SAFETY: the list has `count` devices, whose names are strings that live as long as it.
            let (device, name) = unsafe {
                let device = *list.add(nth);
                (device, CStr::from_ptr(ibv::ibv_get_device_name(device)))
            };
            (name.to_string_lossy().into_owned(), device)
        })
        .collect();
    let result = look(&devices);
    // SAFETY: from ibv_get_device_list, given back once. Devices that were opened stay.
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
            // SAFETY: a device of the list, which is still there.
            let raw = NonNull::new(unsafe { ibv::ibv_open_device(*device) });
            let raw = raw.ok_or_else(|| VerbsError::last("open the device", name))?;
            Ok(Arc::new(Self { raw, name: name.clone() }))
        })?
    }

    pub(super) fn device_attr(&self) -> Result<ibv::ibv_device_attr, VerbsError> {
        let mut attr = MaybeUninit::zeroed();
        // SAFETY: an open device, and room for its attributes.
        let status = unsafe { ibv::ibv_query_device(self.raw.as_ptr(), attr.as_mut_ptr()) };
        self.check(status, "query the device")?;
        // SAFETY: filled in; and zeros are a value of it as well.
        Ok(unsafe { attr.assume_init() })
    }

    pub(super) fn port_attr(&self, port: u8) -> Result<PortAttr, VerbsError> {
        let mut attr = ibv::ibv_port_attr::default();
        // SAFETY: an open device; the function fills in the older, shorter form of the structure (verbs.h wraps it in the
        // same way), which the whole one begins with.
        let status = unsafe { ibv::ibv_query_port(self.raw.as_ptr(), port, (&raw mut attr).cast()) };
        self.check(status, "query the port")?;
        Ok(PortAttr {
            is_active: attr.state == ibv::ibv_port_state::IBV_PORT_ACTIVE,
            is_ethernet: u32::from(attr.link_layer) == ibv::IBV_LINK_LAYER_ETHERNET,
            // 1 is 256 bytes, each further one twice as much (enum ibv_mtu).
            mtu_bytes: 128 << attr.active_mtu.min(5),
            lid: attr.lid,
        })
    }

    /// Return the valid entries of the tables of all ports.
    pub(super) fn gids(&self) -> Result<Vec<GidEntry>, VerbsError> {
        let mut entries: Vec<ibv::ibv_gid_entry> = Vec::with_capacity(MAX_GIDS);
        // SAFETY: room for as many entries, of the size that is told; the function writes whole entries and returns how
        // many.
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
                // SAFETY: every 16 bytes are an identifier.
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

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: open, closed once, and all that was made from it is gone: each holds this.
        unsafe { ibv::ibv_close_device(self.raw.as_ptr()) };
    }
}

/// A protection domain.
pub(super) struct Domain {
    pub(super) raw: NonNull<ibv::ibv_pd>,
    pub(super) context: Arc<Context>,
}

// SAFETY: as of `Context`.
unsafe impl Send for Domain {}
// SAFETY: as of `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(super) fn new(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: an open device.
        let raw = NonNull::new(unsafe { ibv::ibv_alloc_pd(context.raw.as_ptr()) });
        let raw = raw.ok_or_else(|| VerbsError::last("allocate a protection domain", &context.name))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: given back once, after all that was made in it.
        unsafe { ibv::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}

/// What becomes readable when a completion queue that was armed has something.
pub(super) struct Channel {
    raw: NonNull<ibv::ibv_comp_channel>,
    /// The channel's own descriptor, doubled: it can be lent as long as this lives.
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
        // SAFETY: the channel was just made, and its descriptor is open as long as it.
        let doubled = unsafe { BorrowedFd::borrow_raw(raw.as_ref().fd.as_raw_fd()) }.try_clone_to_owned();
        let nonblocking = doubled.and_then(|fd| {
            let flags = rustix::fs::fcntl_getfl(&fd)?;
            // Of the open file, which both descriptors are of.
            rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
            Ok(fd)
        });
        match nonblocking {
            Ok(fd) => Ok(Arc::new(Self { raw, fd, _context: Arc::clone(context) })),
            Err(source) => {
                // SAFETY: just made, and nobody else has it.
                unsafe { ibv::ibv_destroy_comp_channel(raw.as_ptr()) };
                Err(VerbsError::Refused { what, device: context.name.clone(), source })
            }
        }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.fd)
    }

    /// Take the events that there are. One queue hangs on this channel, so they are all its.
    pub(super) fn take_events(&self) {
        loop {
            let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: a channel, and two places for what it says; it does not block.
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
        // SAFETY: given back once, after the queue that hung on it.
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
    /// Make a queue of `entries`, which tells `channel` if there is one.
    pub(super) fn new(
        context: &Arc<Context>,
        entries: usize,
        channel: Option<&Arc<Channel>>,
    ) -> Result<Arc<Self>, VerbsError> {
        let entries = i32::try_from(entries).unwrap_or(i32::MAX);
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.raw.as_ptr());
        // SAFETY: an open device, and a channel of it or none; vector 0 is always there.
        let raw = unsafe { ibv::ibv_create_cq(context.raw.as_ptr(), entries, ptr::null_mut(), raw_channel, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("create a completion queue", &context.name))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context), _channel: channel.cloned() }))
    }

    /// Take completions into `into`; returns how many.
    pub(super) fn poll(&self, into: &mut [ibv::ibv_wc]) -> usize {
        // SAFETY: the driver's own function for this device; it writes at most as many completions as there is room for.
        // Each driver has one.
        let polled = unsafe {
            let ops = &self.context.raw.as_ref().ops;
            let room = i32::try_from(into.len()).unwrap_or(i32::MAX);
            ops.poll_cq.map(|poll| poll(self.raw.as_ptr(), room, into.as_mut_ptr()))
        };
        // Negative: the device is gone, and nothing comes from it any more.
        usize::try_from(polled.unwrap_or(0)).unwrap_or(0).min(into.len())
    }

    /// Ask for an event on the channel for the next completion. What came before it makes none.
    pub(super) fn arm(&self) {
        // SAFETY: as in `poll`. What could fail is the device, which then does not wake anybody.
        unsafe {
            let ops = &self.context.raw.as_ref().ops;
            ops.req_notify_cq.map(|arm| arm(self.raw.as_ptr(), 0));
        }
    }
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: given back once, after the queue pairs that used it; all events are acknowledged as they are taken.
        unsafe { ibv::ibv_destroy_cq(self.raw.as_ptr()) };
    }
}
