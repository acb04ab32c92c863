//! The cards, and what is on them.

use super::*;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::Ipv4Addr;

/// How many polls a card's delayed effects take.
const DELAY: u32 = 3;

thread_local! {
    static MACHINE: std::cell::RefCell<Machine> = std::cell::RefCell::default();
}

/// Access this thread's machine.
pub(in crate::verbs) fn machine<R>(does: impl FnOnce(&mut Machine) -> R) -> R {
    MACHINE.with_borrow_mut(does)
}

pub(super) fn new_event_file() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an event file")
}

pub(super) fn raise(file: &impl std::os::fd::AsFd) {
    let _ = rustix::io::write(file, &1_u64.to_ne_bytes());
}

/// Return the descriptor that a completion queue's next entry makes readable.
pub(super) fn flag(cq: *mut ibv_cq) -> Option<c_int> {
    // SAFETY: a queue, and its channel or none.
    unsafe { (*cq).channel.as_ref().map(|channel| channel.fd) }
}

/// A card with one port.
#[derive(Debug)]
pub(in crate::verbs) struct Card {
    pub(super) raw: *mut ibv_device,
    pub(super) ports: u8,
    pub(in crate::verbs) is_active: bool,
    pub(in crate::verbs) opens: bool,
    pub(in crate::verbs) speed: u8,
    pub(in crate::verbs) reads: i32,
    pub(in crate::verbs) vectors: c_int,
    pub(in crate::verbs) partition_keys: Vec<u16>,
    pub(in crate::verbs) gids: Vec<Option<[u8; 16]>>,
}

pub(super) struct Open {
    pub(super) raw: *mut ibv_context,
    pub(super) events: VecDeque<ibv_async_event>,
    pub(super) file: OwnedFd,
    pub(super) is_dead: bool,
    card: usize,
}

/// A posted receive buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Posted {
    pub(super) wr_id: u64,
    pub(super) addr: u64,
    pub(super) len: u32,
}

#[derive(Default)]
pub(super) struct Queue {
    pub(super) entries: VecDeque<ibv_wc>,
    /// Made readable by the next entry.
    pub(super) channel: Option<c_int>,
    pub(super) vector: c_int,
}

struct Memory {
    domain: usize,
    start: u64,
    end: u64,
    access: u32,
}

pub(super) struct Pair {
    raw: *mut ibv_qp,
    state: ibv_qp_state::Type,
    pub(super) buffers: VecDeque<Posted>,
    peer: u32,
    pub(super) attr: ibv_qp_attr,
    /// Inbound writes that have not reached memory.
    inbound: Vec<(u64, Vec<u8>)>,
    /// Polls until its last buffer is reached.
    stopping: Option<u32>,
}

impl Pair {
    /// Let all inbound writes reach memory.
    fn land(&mut self) {
        for (addr, bytes) in self.inbound.drain(..) {
            copy(bytes.as_ptr().expose_provenance() as u64, addr, bytes.len());
        }
    }
}

/// All cards of a thread, and faults to inject.
#[derive(Default)]
pub(in crate::verbs) struct Machine {
    pub(super) cards: Vec<Card>,
    pub(super) contexts: Vec<Open>,
    pub(super) cqs: BTreeMap<usize, Queue>,
    pub(super) srqs: BTreeMap<usize, VecDeque<Posted>>,
    pub(super) pairs: BTreeMap<u32, Pair>,
    pub(super) ahs: BTreeMap<usize, ibv_ah_attr>,
    memory: BTreeMap<u32, Memory>,
    /// Keys that were released, the last one first to be used again.
    released: Vec<u32>,
    keys: u32,
    numbers: u32,
    /// Deregistration fails.
    pub(in crate::verbs) refuses_deregistration: bool,
    /// Queue pairs cannot be stopped.
    pub(in crate::verbs) refuses_changes: bool,
    /// Nothing can be locked.
    pub(in crate::verbs) locks_no_memory: bool,
    /// Inbound writes reach memory only when something waits for them.
    pub(in crate::verbs) delays_writes: bool,
    /// A stopped queue pair never reports its last buffer.
    pub(in crate::verbs) loses_events: bool,
    /// A stopped queue pair goes on until it is destroyed.
    pub(in crate::verbs) stops_late: bool,
}

/// `struct ibv_wc`, some of whose fields the bindings keep private.
#[repr(C)]
#[derive(Default)]
struct RawCompletion {
    wr_id: u64,
    status: u32,
    opcode: u32,
    vendor_err: u32,
    byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

/// Vendor errors of mlx5: a remote access error, and no acknowledgement.
const VENDOR_ACCESS: u32 = 0x88;
const VENDOR_RETRY: u32 = 0x81;

/// The GID of an IPv4 address.
fn gid(addr: Ipv4Addr) -> [u8; 16] {
    addr.to_ipv6_mapped().octets()
}

impl Machine {
    /// Add a card; its first GID is that of `addr`.
    pub(in crate::verbs) fn add(&mut self, name: &str, addr: Ipv4Addr) -> &mut Card {
        let mut device: ibv_device = zeroed();
        device.name.iter_mut().zip(name.bytes()).for_each(|(to, byte)| *to = byte as c_char);
        let raw = boxed(device);
        let gids = vec![Some(gid(addr))];
        self.cards.push(Card {
            raw,
            ports: 1,
            is_active: true,
            opens: true,
            speed: 64,
            reads: 16,
            vectors: 4,
            partition_keys: vec![0xffff],
            gids,
        });
        self.cards.last_mut().expect("just added")
    }

    pub(in crate::verbs) fn card(&mut self, at: usize) -> &mut Card {
        &mut self.cards[at]
    }

    /// Make a card one of iWARP.
    pub(in crate::verbs) fn set_iwarp(&mut self, card: usize) {
        // SAFETY: a card's own structure.
        unsafe { (*self.cards[card].raw).transport_type = IBV_TRANSPORT_IWARP };
    }

    /// Change a card's address table, and report it.
    pub(in crate::verbs) fn set_gids(&mut self, card: usize, addrs: &[Option<Ipv4Addr>]) {
        self.cards[card].gids = addrs.iter().map(|addr| addr.map(gid)).collect();
        self.report(card, IBV_EVENT_GID_CHANGE);
    }

    /// Reset a card: all that was created on it is dead, and it can be opened again.
    pub(in crate::verbs) fn reset(&mut self, card: usize) {
        self.contexts.iter_mut().filter(|open| open.card == card).for_each(|open| open.is_dead = true);
        self.report(card, IBV_EVENT_DEVICE_FATAL);
    }

    /// Let a card answer nothing any more, without an event.
    pub(in crate::verbs) fn hang(&mut self, card: usize) {
        self.contexts.iter_mut().filter(|open| open.card == card).for_each(|open| open.is_dead = true);
    }

    fn report(&mut self, card: usize, event_type: ibv_event_type) {
        for open in self.contexts.iter_mut().filter(|open| open.card == card) {
            open.events.push_back(ibv_async_event { event_type, ..zeroed() });
            raise(&open.file);
        }
    }

    /// Return the attributes that a queue pair was given.
    pub(in crate::verbs) fn attr(&self, number: u32) -> ibv_qp_attr {
        self.pairs[&number].attr
    }

    /// Return the completion vectors of all queues, each once.
    pub(in crate::verbs) fn vectors(&self) -> BTreeSet<c_int> {
        self.cqs.values().map(|queue| queue.vector).collect()
    }

    /// Return whether a key opens memory, with which access.
    pub(in crate::verbs) fn access(&self, key: u32) -> Option<u32> {
        self.memory.get(&key).map(|memory| memory.access)
    }

    /// Return how many bytes are registered.
    pub(in crate::verbs) fn registered_bytes(&self) -> u64 {
        self.memory.values().map(|memory| (memory.end - memory.start).next_multiple_of(4096)).sum()
    }

    pub(super) fn open(&mut self, raw: *mut ibv_context, card: usize, file: OwnedFd) {
        self.contexts.push(Open { raw, events: VecDeque::new(), file, is_dead: false, card });
    }

    pub(super) fn context(&mut self, raw: *mut ibv_context) -> &mut Open {
        self.contexts.iter_mut().find(|open| open.raw == raw).expect("an open device")
    }

    pub(super) fn card_of(&mut self, raw: *mut ibv_context) -> &mut Card {
        let card = self.context(raw).card;
        &mut self.cards[card]
    }

    pub(super) fn next_number(&mut self) -> u32 {
        self.numbers += 1;
        0x100 + self.numbers
    }

    pub(super) fn register(&mut self, pd: *mut ibv_pd, addr: usize, len: usize, access: u32) -> Option<u32> {
        if self.locks_no_memory {
            return None;
        }
        let key = self.released.pop().unwrap_or_else(|| {
            self.keys += 1;
            self.keys << 8
        });
        let (start, end) = (addr as u64, (addr + len) as u64);
        self.memory.insert(key, Memory { domain: pd.addr(), start, end, access });
        Some(key)
    }

    pub(super) fn deregister(&mut self, key: u32) {
        self.memory.remove(&key);
        self.released.push(key);
    }

    pub(super) fn create_pair(&mut self, raw: *mut ibv_qp) {
        // SAFETY: just created.
        let number = unsafe { (*raw).qp_num };
        let state = ibv_qp_state::IBV_QPS_RESET;
        let pair = Pair {
            raw,
            state,
            buffers: VecDeque::new(),
            peer: 0,
            attr: ibv_qp_attr::default(),
            inbound: Vec::new(),
            stopping: None,
        };
        self.pairs.insert(number, pair);
    }

    pub(super) fn modify(&mut self, number: u32, attr: &ibv_qp_attr, mask: u32) {
        let pair = self.pairs.get_mut(&number).expect("a pair");
        let has = |bit: ibv_qp_attr_mask| mask & bit.0 != 0;
        if attr.qp_state == ibv_qp_state::IBV_QPS_ERR {
            return self.stop(number);
        }
        pair.state = attr.qp_state;
        if has(ibv_qp_attr_mask::IBV_QP_DEST_QPN) {
            pair.peer = attr.dest_qp_num;
            pair.attr = ibv_qp_attr { pkey_index: pair.attr.pkey_index, ..*attr };
        }
        if has(ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC) {
            pair.attr.max_rd_atomic = attr.max_rd_atomic;
        }
        if has(ibv_qp_attr_mask::IBV_QP_PKEY_INDEX) {
            pair.attr.pkey_index = attr.pkey_index;
        }
        if attr.qp_state == ibv_qp_state::IBV_QPS_RESET {
            (pair.stopping, pair.buffers) = (None, VecDeque::new());
            self.clean(number);
        }
    }

    /// Move a queue pair to the error state.
    fn stop(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        if pair.state != ibv_qp_state::IBV_QPS_ERR {
            (pair.state, pair.stopping) = (ibv_qp_state::IBV_QPS_ERR, Some(DELAY));
        }
    }

    /// Post receive buffers to a queue pair.
    pub(super) fn post(&mut self, number: u32, buffers: Vec<Posted>) {
        let pair = self.pairs.get_mut(&number).expect("a pair");
        pair.buffers.extend(buffers);
        if pair.state == ibv_qp_state::IBV_QPS_ERR && pair.stopping.is_none() {
            self.flush(number);
        }
    }

    /// Return the buffers of a stopped queue pair.
    fn flush(&mut self, number: u32) {
        let Some(pair) = self.pairs.get_mut(&number) else { return };
        let flushed: Vec<_> = pair.buffers.drain(..).collect();
        // SAFETY: a queue pair that exists.
        let queue = unsafe { (*pair.raw).recv_cq.addr() };
        let status = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
        for Posted { wr_id, .. } in flushed {
            self.complete(queue, RawCompletion { wr_id, status, qp_num: number, ..RawCompletion::default() });
        }
    }

    pub(super) fn destroy_pair(&mut self, number: u32) {
        self.clean(number);
        self.pairs.remove(&number).into_iter().for_each(|mut pair| pair.land());
    }

    /// Discard the unread completions of a queue pair.
    fn clean(&mut self, number: u32) {
        for queue in self.cqs.values_mut() {
            queue.entries.retain(|completion| completion.qp_num != number);
        }
    }

    /// Let time pass: what is delayed takes effect.
    pub(in crate::verbs) fn tick(&mut self) {
        let mut reached = Vec::new();
        for pair in self.pairs.values_mut() {
            let Some(left) = pair.stopping.as_mut().filter(|_| !self.stops_late) else { continue };
            *left = left.saturating_sub(1);
            if *left == 0 {
                pair.land();
                pair.stopping = None;
                reached.push(pair.raw);
            }
        }
        for raw in reached {
            // SAFETY: a queue pair that exists.
            let (number, is_sharing) = unsafe { ((*raw).qp_num, !(*raw).srq.is_null()) };
            self.flush(number);
            if !is_sharing || self.loses_events {
                continue;
            }
            let element = ibv_async_event__bindgen_ty_1 { qp: raw };
            // SAFETY: a queue pair that exists.
            let open = self.context(unsafe { (*raw).context });
            open.events.push_back(ibv_async_event { element, event_type: IBV_EVENT_QP_LAST_WQE_REACHED });
            raise(&open.file);
        }
    }

    fn complete(&mut self, queue: usize, completion: RawCompletion) {
        let Some(queue) = self.cqs.get_mut(&queue) else { return };
        const { assert!(size_of::<RawCompletion>() == size_of::<ibv_wc>()) };
        // SAFETY: the same fields in the same order, of the same sizes.
        queue.entries.push_back(unsafe { std::mem::transmute::<RawCompletion, ibv_wc>(completion) });
        if let Some(file) = queue.channel.take() {
            // SAFETY: the channel outlives its queue.
            raise(&unsafe { std::os::fd::BorrowedFd::borrow_raw(file) });
        }
    }

    /// Perform a send request.
    pub(super) fn send(&mut self, number: u32, request: &ibv_send_wr) {
        let pair = &self.pairs[&number];
        // SAFETY: a queue pair that exists, and the caller's request, which has one piece.
        let (raw, piece) = unsafe { (&*pair.raw, *request.sg_list) };
        if self.contexts.iter().any(|open| open.raw == raw.context && open.is_dead) {
            return;
        }
        let done = if pair.state == ibv_qp_state::IBV_QPS_ERR {
            Err((ibv_wc_status::IBV_WC_WR_FLUSH_ERR, 0))
        } else if raw.qp_type == ibv_qp_type::IBV_QPT_UD {
            self.send_datagram(number, request, &piece);
            Ok(())
        } else {
            self.send_reliable(pair.peer, request, &piece)
        };
        let is_signaled = request.send_flags & ibv_send_flags::IBV_SEND_SIGNALED.0 != 0;
        let (status, vendor_err) = done.err().unwrap_or((ibv_wc_status::IBV_WC_SUCCESS, 0));
        if is_signaled || done.is_err() {
            let (wr_id, queue) = (request.wr_id, raw.send_cq.addr());
            let completion = RawCompletion { wr_id, status, vendor_err, qp_num: number, ..RawCompletion::default() };
            self.complete(queue, completion);
        }
        if done.is_err() {
            self.stop(number);
        }
    }

    fn send_reliable(&mut self, to: u32, request: &ibv_send_wr, piece: &ibv_sge) -> Result<(), (u32, u32)> {
        use ibv_wr_opcode as op;
        let refused = (ibv_wc_status::IBV_WC_REM_ACCESS_ERR, VENDOR_ACCESS);
        let is_up = |pair: &Pair| [ibv_qp_state::IBV_QPS_RTR, ibv_qp_state::IBV_QPS_RTS].contains(&pair.state);
        let pair = self.pairs.get(&to).filter(|pair| is_up(pair));
        let pair = pair.ok_or((ibv_wc_status::IBV_WC_RETRY_EXC_ERR, VENDOR_RETRY))?;
        // SAFETY: a queue pair that exists; the request is one of a reliable queue pair.
        let (raw, remote) = unsafe { (&*pair.raw, request.wr.rdma) };
        let (queue, srq, len) = (raw.recv_cq.addr(), raw.srq, piece.length as usize);
        if request.opcode != op::IBV_WR_SEND {
            let end = remote.remote_addr + u64::from(piece.length);
            let fits = |memory: &&Memory| {
                memory.domain == raw.pd.addr() && memory.start <= remote.remote_addr && end <= memory.end
            };
            if self.memory.get(&remote.rkey).filter(fits).is_none() {
                self.stop(to);
                return Err(refused);
            }
        }
        if request.opcode == op::IBV_WR_RDMA_READ {
            copy(remote.remote_addr, piece.addr, len);
            return Ok(());
        }
        let has_word = request.opcode == op::IBV_WR_RDMA_WRITE_WITH_IMM;
        let buffer = match request.opcode {
            op::IBV_WR_RDMA_WRITE => None,
            _ => {
                let none = (ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR, 0);
                let shared = self.srqs.get_mut(&srq.addr()).and_then(VecDeque::pop_front);
                Some(shared.ok_or(none)?)
            }
        };
        match buffer {
            Some(buffer) if !has_word => copy(piece.addr, buffer.addr, len.min(buffer.len as usize)),
            _ if self.delays_writes => {
                let mut bytes = vec![0; len];
                copy(piece.addr, bytes.as_mut_ptr().expose_provenance() as u64, len);
                self.pairs.get_mut(&to).expect("found").inbound.push((remote.remote_addr, bytes));
            }
            _ => copy(piece.addr, remote.remote_addr, len),
        }
        if let Some(buffer) = buffer {
            // SAFETY: immediate data, or as many other bytes.
            let imm_data = unsafe { request.__bindgen_anon_1.imm_data };
            let wc_flags = if has_word { ibv_wc_flags::IBV_WC_WITH_IMM.0 } else { 0 };
            let (wr_id, byte_len) = (buffer.wr_id, piece.length);
            let arrived = RawCompletion { wr_id, byte_len, imm_data, qp_num: to, wc_flags, ..RawCompletion::default() };
            self.complete(queue, arrived);
        }
        Ok(())
    }

    fn send_datagram(&mut self, from: u32, request: &ibv_send_wr, piece: &ibv_sge) {
        // SAFETY: a queue pair that exists, and a request of datagrams.
        let (context, to) = unsafe { ((*self.pairs[&from].raw).context, request.wr.ud) };
        let attr = self.ahs[&to.ah.addr()];
        let source = self.card_of(context).gids.get(usize::from(attr.grh.sgid_index)).copied().flatten();
        // SAFETY: any bytes are a GID.
        let target = unsafe { attr.grh.dgid.raw };
        let Some(source) = source else { return };
        let Some(pair) = self.pairs.get_mut(&to.remote_qpn) else { return };
        // SAFETY: a queue pair that exists.
        let (to_context, queue) = unsafe { ((*pair.raw).context, (*pair.raw).recv_cq.addr()) };
        let buffer = pair.buffers.pop_front();
        let is_here = self.card_of(to_context).gids.contains(&Some(target));
        let Some(buffer) = buffer.filter(|_| is_here) else { return };
        let mut header = [0; 40];
        header[20] = 0x45;
        header[32..36].copy_from_slice(&source[12..]);
        copy(header.as_ptr().expose_provenance() as u64, buffer.addr, header.len());
        copy(piece.addr, buffer.addr + 40, piece.length as usize);
        let arrived = RawCompletion {
            wr_id: buffer.wr_id,
            byte_len: piece.length + 40,
            qp_num: to.remote_qpn,
            src_qp: from,
            wc_flags: ibv_wc_flags::IBV_WC_GRH.0,
            ..RawCompletion::default()
        };
        self.complete(queue, arrived);
    }
}

fn copy(from: u64, to: u64, len: usize) {
    let at = |addr: u64| ptr::with_exposed_provenance_mut::<u8>(addr as usize);
    // SAFETY: memory that the test has registered, of at least this length.
    unsafe { at(to).copy_from(at(from), len) };
}
