//! What strangers do at any port: connections that say nothing, nonsense, or next to nothing.

use crate::place::LONG;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{Greeting, send};
use sumac_hal::wire::crc32c;

/// Numbers that a seed makes (splitmix64).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

/// Connect; `None` where the other side, or this machine, has no room.
pub(crate) fn dial(addr: SocketAddr) -> Option<TcpStream> {
    dial_within(addr, Duration::from_secs(1))
}

/// The same, however long the other side takes to have room.
pub(crate) fn dial_within(addr: SocketAddr, limit: Duration) -> Option<TcpStream> {
    let stream = TcpStream::connect_timeout(&addr, limit).ok()?;
    stream.set_write_timeout(Some(LONG)).ok()?;
    stream.set_read_timeout(Some(LONG)).ok()?;
    Some(stream)
}

/// Begin to connect, and do not wait for it.
fn knock(addr: SocketAddr) -> Option<TcpStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    match connect(&socket, &addr) {
        Ok(()) | Err(Errno::INPROGRESS) => Some(TcpStream::from(socket)),
        Err(_) => None,
    }
}

/// So many connections that say nothing, or as many as there is room for.
pub(crate) fn idle(addr: SocketAddr, count: usize) -> Vec<TcpStream> {
    (0..count).map_while(|_| dial(addr)).collect()
}

/// Return the bytes of a frame that greets as a client.
pub(crate) fn client_greeting() -> Vec<u8> {
    let mut bytes = Vec::new();
    send(&mut bytes, &Greeting::Client).expect("it is short");
    bytes
}

/// A frame whose checksums are right, whatever it holds.
pub(crate) fn frame_of(body: &[u8]) -> Vec<u8> {
    let mut frame = client_greeting()[..4].to_vec();
    frame.extend((body.len() as u32).to_le_bytes());
    let mut summed = frame.clone();
    summed.extend(crc32c(body).to_le_bytes());
    frame.extend(crc32c(&summed).to_le_bytes());
    frame.extend(body);
    frame
}

/// Say something on a connection of its own, and hang up; what is answered is not read.
pub(crate) fn blurt(addr: SocketAddr, bytes: &[u8]) {
    if let Some(mut stream) = dial(addr) {
        // It may be hung up on in the middle.
        let _ = stream.write_all(bytes);
    }
}

/// Tell whether the other side has hung up.
pub(crate) fn is_closed(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let mut stream = stream;
    match stream.read(&mut [0; 64]) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock && error.kind() != ErrorKind::Interrupted,
    }
}

/// Say a little on each connection now and then, until all are hung up on or the time is up; returns how many are left.
pub(crate) fn drip(streams: &mut Vec<TcpStream>, bytes: &[u8], every: Duration, limit: Duration) -> usize {
    let deadline = Instant::now() + limit;
    for byte in bytes {
        streams.retain_mut(|stream| stream.write_all(&[*byte]).is_ok() && !is_closed(stream));
        if streams.is_empty() || Instant::now() + every > deadline {
            break;
        }
        thread::sleep(every);
    }
    streams.retain(|stream| !is_closed(stream));
    streams.len()
}

/// Something that goes on on a thread of its own until this is dropped.
pub(crate) struct Flood {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// Do something so many times a second, as far as the machine goes.
    pub(crate) fn start(a_second: u32, mut attack: impl FnMut() + Send + 'static) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            let (begun, mut done) = (Instant::now(), 0);
            while !over.load(Ordering::Relaxed) {
                let due = begun.elapsed().as_millis() as u64 * u64::from(a_second) / 1000;
                // Who is late by more than a tenth of a second does not catch up.
                done = u64::max(done, due.saturating_sub(u64::from(a_second) / 10));
                while done < due && !over.load(Ordering::Relaxed) {
                    attack();
                    done += 1;
                }
                thread::sleep(Duration::from_millis(1));
            }
        });
        Self { is_over, thread: Some(thread) }
    }

    /// Connect again and again, each time with something to say, and keep so many connections open.
    pub(crate) fn of_connections(to: Vec<SocketAddr>, a_second: u32, most: usize, seed: u64) -> Self {
        let (mut open, mut random, mut nth) = (std::collections::VecDeque::new(), Random(seed), 0_usize);
        Self::start(a_second, move || {
            if open.len() == most {
                open.pop_front();
            }
            nth += 1;
            let Some(mut stream) = knock(to[nth % to.len()]) else { return };
            let len = random.below(64) as usize;
            // It may not be there yet, or be hung up on.
            let _ = stream.write(&random.bytes(len));
            open.push_back(stream);
        })
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || thread::panicking(), "the attacker has panicked");
        }
    }
}
