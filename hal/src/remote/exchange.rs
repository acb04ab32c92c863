//! An in-process link for tests: two queues, and memory that both sides find by its key. It behaves as a reliable
//! connection as far as [`Link`] and [`RankLink`] specify, so that everything but the hardware is tested on any
//! machine.
//!
//! Invariant: a result is complete when it is announced to a rank, and announced before the device learns that it is
//! written.

#[cfg(feature = "emu")]
mod device;

#[cfg(feature = "emu")]
pub use device::ExchangeDevice;

use super::message::MESSAGE_LEN_BYTES;
use super::{Access, Arrived, LINK_END_LEN_BYTES, Link, LinkEnd, LinkError, LinkFailure, RankLink, RemoteRegion};
use crate::shm::Region;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The prefix of exchanges' names.
const PREFIX: &str = "exchange:";

/// The maximum number of parcels in flight to an end, as the depth of a queue pair is bounded.
const PARCELS_MAX: usize = 4096;

enum Parcel {
    Message(Vec<u8>),
    Landed(u32),
}

struct End {
    peer: Option<usize>,
    is_open: bool,
    inbox: VecDeque<Parcel>,
    event: Arc<OwnedFd>,
}

#[derive(Default)]
struct State {
    ends: Vec<End>,
    memory: BTreeMap<u32, Arc<Region>>,
    next_key: u32,
}

/// A registry of ends and of the memory that they expose.
#[derive(Clone, Default)]
pub struct Exchange(Arc<Mutex<State>>);

/// One end of an in-process link.
pub struct ExchangeLink {
    exchange: Exchange,
    number: usize,
    event: Arc<OwnedFd>,
    keys: Vec<u32>,
}

impl fmt::Debug for ExchangeLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExchangeLink").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Exchange {
    /// Return this process's exchange of this name; `None` if the name does not begin with `exchange:`.
    pub fn named(name: &str) -> Option<Self> {
        static ALL: Mutex<BTreeMap<String, Exchange>> = Mutex::new(BTreeMap::new());
        let name = name.strip_prefix(PREFIX)?;
        Some(ALL.lock().unwrap_or_else(PoisonError::into_inner).entry(name.to_owned()).or_default().clone())
    }

    /// Create an end.
    ///
    /// # Errors
    /// [`LinkFailure`] if the system has no eventfd left.
    pub fn rank_link(&self) -> Result<ExchangeLink, LinkFailure> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        let event = Arc::new(event.map_err(|errno| LinkFailure(format!("an event: {errno}")))?);
        let mut state = self.lock();
        let number = state.ends.len();
        state.ends.push(End { peer: None, is_open: true, inbox: VecDeque::new(), event: Arc::clone(&event) });
        drop(state);
        Ok(ExchangeLink { exchange: self.clone(), number, event, keys: Vec::new() })
    }

    /// Take all existing links down for good: nothing in flight arrives.
    pub fn cut(&self) {
        let mut state = self.lock();
        for end in &mut state.ends {
            end.is_open = false;
            wake(&end.event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere leaves these queues and tables consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn wake(event: &OwnedFd) {
    // This fails only if the counter is full, and then it is readable.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

impl State {
    /// Put a parcel into the peer's inbox; false if there is no room.
    fn put(&mut self, from: usize, parcel: Parcel) -> Result<bool, LinkError> {
        if !self.ends[from].is_open {
            return Err(LinkError::Fenced);
        }
        let peer = self.ends[from].peer.ok_or(LinkError::PeerGone)?;
        let back = self.ends[peer].peer == Some(from);
        let end = self.ends.get_mut(peer).filter(|end| end.is_open && back).ok_or(LinkError::PeerGone)?;
        if end.inbox.len() == PARCELS_MAX {
            return Ok(false);
        }
        end.inbox.push_back(parcel);
        wake(&end.event);
        Ok(true)
    }
}

impl ExchangeLink {
    /// Read memory of the peer, as RDMA READ does.
    ///
    /// # Panics
    /// If there is no such memory, or not as much.
    #[track_caller]
    pub fn read_peer(&self, region: &RemoteRegion, offset: u64, into: &mut [u8]) {
        let memory = self.exchange.lock().memory.get(&region.rkey).cloned().expect("memory of the peer");
        memory.read(offset as usize, into);
    }

    /// Write a result into the peer's landing area and announce it, as RDMA WRITE with immediate data does.
    ///
    /// # Panics
    /// If there is no such memory, or not as much.
    #[track_caller]
    pub fn land(&mut self, region: &RemoteRegion, offset: u32, result: &[u8]) {
        let mut state = self.exchange.lock();
        state.memory.get(&region.rkey).expect("memory of the peer").write(offset as usize, result);
        // If the peer has closed the connection, it needs no notification.
        let _ = state.put(self.number, Parcel::Landed(offset));
    }
}

impl Link for ExchangeLink {
    fn send(&mut self, message: &[u8]) -> Result<bool, LinkError> {
        assert!(message.len() <= MESSAGE_LEN_BYTES, "a message of {} bytes", message.len());
        self.exchange.lock().put(self.number, Parcel::Message(message.to_vec()))
    }

    fn receive(&mut self, into: &mut [u8; MESSAGE_LEN_BYTES]) -> Result<Option<Arrived>, LinkError> {
        let mut state = self.exchange.lock();
        let end = &mut state.ends[self.number];
        match end.inbox.pop_front() {
            Some(Parcel::Message(bytes)) => {
                into[..bytes.len()].copy_from_slice(&bytes);
                Ok(Some(Arrived::Message(bytes.len())))
            }
            Some(Parcel::Landed(offset)) => Ok(Some(Arrived::Landed(offset))),
            None if !end.is_open => Err(LinkError::Fenced),
            None => {
                let is_gone = end.peer.is_some_and(|peer| !state.ends[peer].is_open);
                if is_gone { Err(LinkError::PeerGone) } else { Ok(None) }
            }
        }
    }
}

impl RankLink for ExchangeLink {
    fn end(&self) -> LinkEnd {
        let mut bytes = [0; LINK_END_LEN_BYTES];
        bytes[..8].copy_from_slice(&(self.number as u64).to_le_bytes());
        LinkEnd(bytes)
    }

    fn connect(&mut self, device: &LinkEnd) -> Result<(), LinkFailure> {
        let number = u64::from_le_bytes(std::array::from_fn(|at| device.0[at])) as usize;
        let mut state = self.exchange.lock();
        if number >= state.ends.len() {
            return Err(LinkFailure(format!("there is no end {number} in this exchange")));
        }
        state.ends[self.number].peer = Some(number);
        Ok(())
    }

    fn expose(&mut self, memory: Region, _access: Access) -> Result<RemoteRegion, LinkFailure> {
        use crate::dma::DmaMemory;
        let mut state = self.exchange.lock();
        state.next_key += 1;
        let (rkey, len_bytes) = (state.next_key, memory.len_bytes() as u64);
        state.memory.insert(rkey, Arc::new(memory));
        self.keys.push(rkey);
        Ok(RemoteRegion { addr: 0, len_bytes, rkey, generation: 0 })
    }

    fn withdraw(&mut self, rkey: u32) {
        if self.keys.contains(&rkey) {
            self.keys.retain(|key| *key != rkey);
            self.exchange.lock().memory.remove(&rkey);
        }
    }

    fn fence(&mut self) -> Result<(), LinkFailure> {
        let mut state = self.exchange.lock();
        let end = &mut state.ends[self.number];
        end.is_open = false;
        let peer = end.peer;
        peer.into_iter().for_each(|peer| wake(&state.ends[peer].event));
        for key in self.keys.drain(..) {
            state.memory.remove(&key);
        }
        Ok(())
    }

    fn arm(&mut self) {
        // The caller polls after this.
        let _ = rustix::io::read(&*self.event, &mut [0; 8]);
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Drop for ExchangeLink {
    fn drop(&mut self) {
        let _ = self.fence();
    }
}
