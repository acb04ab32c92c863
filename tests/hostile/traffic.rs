//! Traffic of unknown peers: idle connections, garbage, and slow senders.

use crate::testbed::LONG;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use sumac_hal::ctrl::{Hello, send};
use sumac_hal::wire::crc32c;

/// A seeded pseudo-random generator (splitmix64).
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

/// Connect; `None` if the peer or this machine has no room.
pub(crate) fn dial(addr: SocketAddr) -> Option<TcpStream> {
    dial_within(addr, Duration::from_secs(1))
}

/// Connect within `limit`.
pub(crate) fn dial_within(addr: SocketAddr, limit: Duration) -> Option<TcpStream> {
    let stream = TcpStream::connect_timeout(&addr, limit).ok()?;
    stream.set_write_timeout(Some(LONG)).ok()?;
    stream.set_read_timeout(Some(LONG)).ok()?;
    Some(stream)
}

/// Start to connect without waiting.
fn connect_nonblocking(addr: SocketAddr) -> Option<TcpStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    match connect(&socket, &addr) {
        Ok(()) | Err(Errno::INPROGRESS) => Some(TcpStream::from(socket)),
        Err(_) => None,
    }
}

/// Open up to `count` connections that send nothing.
pub(crate) fn idle(addr: SocketAddr, count: usize) -> Vec<TcpStream> {
    (0..count).map_while(|_| dial(addr)).collect()
}

/// Return the handshake frame of a client.
pub(crate) fn client_handshake() -> Vec<u8> {
    let mut bytes = Vec::new();
    send(&mut bytes, &Hello::Client).expect("it is short");
    bytes
}

/// Return a frame with valid checksums and any body.
pub(crate) fn frame_of(body: &[u8]) -> Vec<u8> {
    let mut frame = client_handshake()[..4].to_vec();
    frame.extend((body.len() as u32).to_le_bytes());
    let mut summed = frame.clone();
    summed.extend(crc32c(body).to_le_bytes());
    frame.extend(crc32c(&summed).to_le_bytes());
    frame.extend(body);
    frame
}

/// Connect, send `bytes` and disconnect without reading the reply.
pub(crate) fn send_once(addr: SocketAddr, bytes: &[u8]) {
    if let Some(mut stream) = dial(addr) {
        // The peer may disconnect meanwhile.
        let _ = stream.write_all(bytes);
    }
}

/// Return whether the peer has disconnected.
pub(crate) fn is_closed(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let mut stream = stream;
    match stream.read(&mut [0; 64]) {
        Ok(0) => true,
        Ok(_) => false,
        Err(error) => error.kind() != ErrorKind::WouldBlock && error.kind() != ErrorKind::Interrupted,
    }
}

/// Send one byte at a time on each connection until all are disconnected or `limit` has passed; return the number still
/// open.
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

/// An attack that repeats on a thread until this is dropped.
pub(crate) struct Flood {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Flood {
    /// Run `attack` up to `a_second` times a second.
    pub(crate) fn start(a_second: u32, mut attack: impl FnMut() + Send + 'static) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let thread = thread::spawn(move || {
            let (begun, mut done) = (Instant::now(), 0);
            while !over.load(Ordering::Relaxed) {
                let due = begun.elapsed().as_millis() as u64 * u64::from(a_second) / 1000;
                // Skip what is late by more than a tenth of a second.
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

    /// Connect repeatedly, send random bytes, and keep up to `most` connections open.
    pub(crate) fn of_connections(to: Vec<SocketAddr>, a_second: u32, most: usize, seed: u64) -> Self {
        let (mut open, mut random, mut nth) = (std::collections::VecDeque::new(), Random(seed), 0_usize);
        Self::start(a_second, move || {
            if open.len() == most {
                open.pop_front();
            }
            nth += 1;
            let Some(mut stream) = connect_nonblocking(to[nth % to.len()]) else { return };
            let len = random.below(64) as usize;
            // The connection may be pending or closed.
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
