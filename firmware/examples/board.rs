//! A device in one file: a node, a UDP port and the controller's requests, in one thread.
//!
//! ```text
//! sumac controller
//! cargo run -p sumac-firmware --example board -- leaf0 127.0.0.1:7847
//! ```
//!
//! The controller plans trees over it, and ranks use it, as any other device. It is what a port to a new machine begins
//! with; `sumac device` adds shards, zero-copy, shared results, and dialling again. It ends when the controller does.

use std::error::Error;
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::time::{Instant as Clock, SystemTime, UNIX_EPOCH};
use sumac_device::{Memory, Node, NodeConfig, runtime};
use sumac_hal::ctrl::{Announce, Envelope, FrameBuffer, GroupConfig, Hello, Name, Request, Response, send};
use sumac_hal::ids::BootId;
use sumac_hal::port::{Port, WaitPort};
use sumac_hal::shard::Shard;
use sumac_hal::time::Instant;
use sumac_hal::udp::{UdpConfig, UdpPort};

/// Room for 4 groups of together 64 children, with 1024 chunks in flight in 16 MiB.
static MEMORY: Mutex<Memory<4, 64, 1024, { 16 << 20 }>> = Mutex::new(Memory::new());

#[allow(dead_code)] // A test calls `run`.
fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(name), Some(controller)) = (args.next(), args.next()) else { return Err("board NAME CONTROLLER".into()) };
    run(&name, controller.parse()?)
}

/// Serve until the controller ends.
pub(crate) fn run(name: &str, controller: SocketAddr) -> Result<(), Box<dyn Error>> {
    let mut port = UdpPort::bind((Ipv4Addr::LOCALHOST, 0).into(), &UdpConfig::default())?;
    let limits = port.capabilities();
    let config = NodeConfig {
        shard: Shard::WHOLE,
        // Differs after every restart.
        boot_id: BootId(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as u64),
        max_packet_len_bytes: limits.max_packet_len_bytes,
        receive_buffer_bytes: limits.receive_buffer_bytes,
    };
    let mut memory = MEMORY.lock().unwrap_or_else(PoisonError::into_inner);
    let mut node = Node::new(config, memory.storage());
    let announce = Announce {
        name: Name::try_from(name).map_err(|_| "the name is too long")?,
        boot_id: config.boot_id,
        capabilities: node.capabilities(),
        data_addrs: [port.local_addr()].into_iter().collect(),
        attach: None,
        slots: None,
    };
    let mut stream = TcpStream::connect(controller)?;
    send(&mut stream, &Hello::Device(announce.clone()))?;
    stream.set_nonblocking(true)?;
    port.watch(stream.try_clone()?.into());
    let (start, mut frames) = (Clock::now(), FrameBuffer::new(1 << 16));
    loop {
        let now = Instant::from_nanos(start.elapsed().as_nanos() as u64);
        let mut bytes = [0; 4096];
        match stream.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(len) => frames.push(&bytes[..len]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        while let Some(Envelope { id, message }) = frames.take_message()? {
            let message = match message {
                Request::Identify => Response::Announce(announce.clone()),
                Request::Claim(_) => Response::Done,
                // This port joins no shared addresses.
                Request::CreateGroup(group) => {
                    node.control(&Request::CreateGroup(GroupConfig { shared: None, parent_shared: None, ..group }), now)
                }
                request => node.control(&request, now),
            };
            send(&mut stream, &Envelope { id, message })?;
        }
        let next = runtime::poll(&mut node, &mut port, now);
        while let Some(event) = node.poll_event() {
            eprintln!("{name}: {event:?}");
        }
        port.wait(next.map(|at| at - now));
    }
}
