//! A fake of libibverbs for unit tests: cards in this thread's memory that behave as mlx5 cards do where Soft-RoCE
//! differs, and faults that no test can ask of a real card.
//!
//! Behaviour taken from rdma-core's provider (`providers/mlx5`) and the kernel's `mlx5_ib`:
//! - destroying a queue pair discards its unread completions, and with them the numbers of the shared receive buffers
//!   that they name;
//! - a shared receive queue's queue pair that stops raises `LAST_WQE_REACHED` later; inbound writes that were accepted
//!   before reach memory by then, and not necessarily earlier;
//! - a key that was released is given to the next registration;
//! - polls of a card that was reset return nothing, and posts to it succeed;
//! - a datagram from a source address that is gone from the port's table completes, and reaches nobody.
//!
//! Everything else has no delay. A machine belongs to the thread that uses it, so tests do not meet.

mod machine;

pub(in crate::verbs) use ibverbs_sys::*;
pub(in crate::verbs) use machine::machine;

use machine::{Posted, flag, new_event_file, raise};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

fn fail<T>(errno: c_int, result: T) -> T {
    // SAFETY: this thread's own variable.
    unsafe { *libc::__errno_location() = errno };
    result
}

fn boxed<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

/// Return a structure of the library of zeros, which all of these allow.
fn zeroed<T>() -> T {
    // SAFETY: only used for C structures of integers and pointers.
    unsafe { std::mem::zeroed() }
}

pub(super) unsafe fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let list: Box<[*mut ibv_device]> = machine(|machine| machine.cards.iter().map(|card| card.raw).collect());
    // SAFETY: the caller's variable.
    unsafe { *count = list.len() as c_int };
    Box::into_raw(list).cast()
}

pub(super) unsafe fn ibv_free_device_list(_list: *mut *mut ibv_device) {}

pub(super) unsafe fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a card's own structure, which is never freed.
    unsafe { (&raw const (*device).name).cast() }
}

pub(super) unsafe fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    machine(|machine| {
        let card = machine.cards.iter().position(|card| card.raw == device).expect("a card");
        if !machine.cards[card].opens {
            return fail(libc::ENODEV, ptr::null_mut());
        }
        let mut context: ibv_context = zeroed();
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        context.ops.post_srq_recv = Some(post_srq_recv);
        let file = new_event_file();
        (context.device, context.async_fd) = (device, file.as_raw_fd());
        context.num_comp_vectors = machine.cards[card].vectors;
        let context = boxed(context);
        machine.open(context, card, file);
        context
    })
}

pub(super) unsafe fn ibv_close_device(context: *mut ibv_context) -> c_int {
    machine(|machine| machine.contexts.retain(|open| open.raw != context));
    0
}

pub(super) unsafe fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    machine(|machine| {
        let card = machine.card_of(context);
        // SAFETY: the caller's structure, filled with zeros.
        let attr = unsafe { &mut *attr };
        (attr.phys_port_cnt, attr.max_qp_wr, attr.max_cqe) = (card.ports, 32768, 4_194_303);
        (attr.max_qp_rd_atom, attr.max_qp_init_rd_atom, attr.max_srq_wr) = (card.reads, card.reads, 32767);
        0
    })
}

pub(super) unsafe fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int {
    machine(|machine| {
        let card = machine.card_of(context);
        // SAFETY: the caller passes the structure's prefix, which has these fields.
        let attr = unsafe { &mut *attr.cast::<ibv_port_attr>() };
        attr.state = if card.is_active { ibv_port_state::IBV_PORT_ACTIVE } else { ibv_port_state::IBV_PORT_DOWN };
        (attr.active_mtu, attr.lid) = (IBV_MTU_4096, u16::from(port));
        (attr.active_width, attr.active_speed) = (2, card.speed);
        attr.pkey_tbl_len = card.partition_keys.len() as u16;
        attr.link_layer = IBV_LINK_LAYER_ETHERNET as u8;
        0
    })
}

pub(super) unsafe fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max: usize,
    _flags: u32,
    _len: usize,
) -> isize {
    machine(|machine| {
        let gids = machine.card_of(context).gids.iter().enumerate();
        let all: Vec<_> = gids.filter_map(|(index, gid)| Some((index, (*gid)?))).take(max).collect();
        for (at, &(index, gid)) in all.iter().enumerate() {
            let entry = ibv_gid_entry {
                gid: ibv_gid { raw: gid },
                gid_index: index as u32,
                port_num: 1,
                gid_type: IBV_GID_TYPE_ROCE_V2,
                ndev_ifindex: 0,
            };
            // SAFETY: the caller has room for `max` entries.
            unsafe { entries.add(at).write(entry) };
        }
        all.len() as isize
    })
}

pub(super) unsafe fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    machine(|machine| {
        machine.tick();
        let open = machine.context(context);
        let Some(next) = open.events.pop_front() else { return fail(libc::EAGAIN, -1) };
        let _ = rustix::io::read(&open.file, &mut [0; 8]);
        if !open.events.is_empty() {
            raise(&open.file);
        }
        // SAFETY: the caller's structure.
        unsafe { event.write(next) };
        0
    })
}

pub(super) unsafe fn ibv_ack_async_event(_event: *mut ibv_async_event) {}

pub(super) unsafe fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    boxed(ibv_pd { context, handle: 0 })
}

pub(super) unsafe fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: from `ibv_alloc_pd`.
    drop(unsafe { Box::from_raw(pd) });
    0
}

pub(super) unsafe fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    machine(|machine| {
        let Some(key) = machine.register(pd, addr.addr(), length, access as c_uint) else {
            return fail(libc::ENOMEM, ptr::null_mut());
        };
        // SAFETY: the caller's domain.
        let context = unsafe { (*pd).context };
        boxed(ibv_mr { context, pd, addr, length, handle: key, lkey: key, rkey: key })
    })
}

pub(super) unsafe fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    assert_eq!(iova, addr.addr() as u64);
    // SAFETY: as of the caller.
    unsafe { ibv_reg_mr(pd, addr, length, access.cast_signed()) }
}

pub(super) unsafe fn ibv_query_pkey(context: *mut ibv_context, _port: u8, index: c_int, pkey: *mut u16) -> c_int {
    machine(|machine| {
        let key = machine.card_of(context).partition_keys[index as usize];
        // SAFETY: the caller's variable.
        unsafe { *pkey = key.to_be() };
        0
    })
}

pub(super) unsafe fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    machine(|machine| {
        if machine.refuses_deregistration {
            return libc::EBUSY;
        }
        // SAFETY: from `ibv_reg_mr`.
        machine.deregister(unsafe { Box::from_raw(mr) }.handle);
        0
    })
}

pub(super) unsafe fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    use std::os::fd::IntoRawFd;
    boxed(ibv_comp_channel { context, fd: new_event_file().into_raw_fd(), refcnt: 0 })
}

pub(super) unsafe fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: from `ibv_create_comp_channel`, and so is its descriptor.
    drop(unsafe { OwnedFd::from_raw_fd(Box::from_raw(channel).fd) });
    0
}

pub(super) unsafe fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    _cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: an open context.
    assert!((0..unsafe { (*context).num_comp_vectors }).contains(&vector), "no completion vector {vector}");
    machine(|machine| {
        if machine.locks_no_memory {
            return fail(libc::ENOMEM, ptr::null_mut());
        }
        let cq = boxed(ibv_cq { context, channel, handle: 0, cqe, ..zeroed() });
        machine.cqs.insert(cq.addr(), machine::Queue { vector, ..machine::Queue::default() });
        cq
    })
}

pub(super) unsafe fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    machine(|machine| machine.cqs.remove(&cq.addr()));
    // SAFETY: from `ibv_create_cq`.
    drop(unsafe { Box::from_raw(cq) });
    0
}

pub(super) unsafe fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    _cq: *mut *mut ibv_cq,
    _context: *mut *mut c_void,
) -> c_int {
    // The descriptor counts events of all queues: one call takes all, and none needs an acknowledgement.
    // SAFETY: the channel's own descriptor.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw((*channel).fd) };
    let _ = rustix::io::read(file, &mut [0; 8]);
    -1
}

pub(super) unsafe fn ibv_ack_cq_events(_cq: *mut ibv_cq, _count: c_uint) {}

pub(super) unsafe fn ibv_create_srq(pd: *mut ibv_pd, _init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: the caller's domain.
    let srq = boxed(ibv_srq { context: unsafe { (*pd).context }, pd, ..zeroed() });
    machine(|machine| machine.srqs.insert(srq.addr(), Default::default()));
    srq
}

pub(super) unsafe fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    machine(|machine| machine.srqs.remove(&srq.addr()));
    // SAFETY: from `ibv_create_srq`.
    drop(unsafe { Box::from_raw(srq) });
    0
}

pub(super) unsafe fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    machine(|machine| {
        // SAFETY: the caller's structures.
        let (context, init) = unsafe { ((*pd).context, &*init) };
        let qp_num = machine.next_number();
        let qp = ibv_qp {
            context,
            pd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            srq: init.srq,
            qp_num,
            qp_type: init.qp_type,
            ..zeroed()
        };
        let qp = boxed(qp);
        machine.create_pair(qp);
        qp
    })
}

pub(super) unsafe fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller's structures.
    let (qp_num, context, attr) = unsafe { ((*qp).qp_num, (*qp).context, &*attr) };
    machine(|machine| {
        if machine.refuses_changes || machine.context(context).is_dead {
            return libc::EIO;
        }
        machine.modify(qp_num, attr, mask as c_uint);
        0
    })
}

pub(super) unsafe fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: from `ibv_create_qp`.
    let number = unsafe { Box::from_raw(qp) }.qp_num;
    machine(|machine| machine.destroy_pair(number));
    0
}

pub(super) unsafe fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: the caller's structures.
    let (context, attr) = unsafe { ((*pd).context, *attr) };
    let ah = boxed(ibv_ah { context, pd, handle: 0 });
    machine(|machine| machine.ahs.insert(ah.addr(), attr));
    ah
}

pub(super) unsafe fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    machine(|machine| machine.ahs.remove(&ah.addr()));
    // SAFETY: from `ibv_create_ah`.
    drop(unsafe { Box::from_raw(ah) });
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, into: *mut ibv_wc) -> c_int {
    machine(|machine| {
        machine.tick();
        // SAFETY: from `ibv_create_cq`.
        if machine.context(unsafe { (*cq).context }).is_dead {
            return 0;
        }
        let queue = machine.cqs.get_mut(&cq.addr()).expect("a queue");
        let count = queue.entries.len().min(room as usize);
        for (at, completion) in queue.entries.drain(..count).enumerate() {
            // SAFETY: the caller has room.
            unsafe { into.add(at).write(completion) };
        }
        count as c_int
    })
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _solicited: c_int) -> c_int {
    machine(|machine| machine.cqs.get_mut(&cq.addr()).expect("a queue").channel = flag(cq));
    0
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, first: *mut ibv_send_wr, _bad: *mut *mut ibv_send_wr) -> c_int {
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the caller's chain.
        let (qp_num, request) = unsafe { ((*qp).qp_num, &*next) };
        machine(|machine| machine.send(qp_num, request));
        next = request.next;
    }
    0
}

/// Collect a chain of buffers.
fn buffers(first: *mut ibv_recv_wr) -> Vec<Posted> {
    let (mut next, mut all) = (first, Vec::new());
    while !next.is_null() {
        // SAFETY: the caller's chain, with one piece each or none.
        let (request, piece) = unsafe { (&*next, (*next).sg_list.as_ref().copied().unwrap_or_default()) };
        all.push(Posted { wr_id: request.wr_id, addr: piece.addr, len: piece.length });
        next = request.next;
    }
    all
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, first: *mut ibv_recv_wr, _bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: from `ibv_create_qp`.
    let number = unsafe { (*qp).qp_num };
    machine(|machine| machine.post(number, buffers(first)));
    0
}

unsafe extern "C" fn post_srq_recv(srq: *mut ibv_srq, first: *mut ibv_recv_wr, _bad: *mut *mut ibv_recv_wr) -> c_int {
    machine(|machine| machine.srqs.get_mut(&srq.addr()).expect("a queue").extend(buffers(first)));
    0
}
