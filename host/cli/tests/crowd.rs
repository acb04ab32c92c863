//! A controller whose job has as many ranks as a job may have: each a connection of one process, which joins, is told the
//! places of all, and leaves.

mod common;

use common::{Server, serve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use sumac::controller::limits::{RANKS_MAX, REPLY_LEN_MAX};
use sumac::controller::proto::{Attach, ClientReply, ClientRequest, JoinRequest, Membership, Terms};
use sumac::controller::status;
use sumac_hal::ctrl::{FrameBuffer, Greeting, Order, encode_frames, send};
use sumac_hal::ids::Rank;
use sumac_hal::shm::DeviceUsers;

/// What a rank reads of: all check what they get frame by frame, every so many decode it.
const DECODED_EVERY: usize = 1024;

/// Longer than all of it takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// What this process has open beside its connections.
const DESCRIPTORS_BESIDE: u64 = 64;

/// One rank.
struct Member {
    stream: TcpStream,
    inbox: Inbox,
}

/// What came of its messages.
enum Inbox {
    /// The bytes of the header so far, and how much of the frame's message is to come, by a frame that goes on.
    Counted {
        header: Vec<u8>,
        left: usize,
        has_more: bool,
        bytes: usize,
    },
    Decoded {
        buffer: FrameBuffer,
        membership: Option<Box<Membership>>,
    },
    Done,
}

impl Inbox {
    fn new(rank: usize) -> Self {
        if rank.is_multiple_of(DECODED_EVERY) {
            return Self::Decoded { buffer: FrameBuffer::new(REPLY_LEN_MAX), membership: None };
        }
        Self::Counted { header: Vec::new(), left: 0, has_more: true, bytes: 0 }
    }

    /// Take what has come. Returns the length of the message, once it is whole.
    fn take(&mut self, mut came: &[u8]) -> Option<usize> {
        match self {
            Self::Done => panic!("more than one message"),
            Self::Decoded { buffer, membership } => {
                buffer.push(came);
                let ClientReply::Joined(joined) = buffer.take_message().expect("frames")? else {
                    panic!("all have joined")
                };
                let len = joined.mesh.len();
                *membership = Some(joined);
                Some(len)
            }
            Self::Counted { header, left, has_more, bytes } => {
                while !came.is_empty() {
                    if *left == 0 {
                        let missing = 12 - header.len();
                        let (head, rest) = came.split_at(missing.min(came.len()));
                        header.extend_from_slice(head);
                        came = rest;
                        if header.len() < 12 {
                            return None;
                        }
                        assert_eq!(header[..2], *b"Sc", "a frame begins");
                        let word = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
                        (*left, *has_more) = ((word & !(1 << 31)) as usize, word >> 31 == 1);
                        header.clear();
                    }
                    let len = came.len().min(*left);
                    (*left, *bytes, came) = (*left - len, *bytes + len, &came[len..]);
                    if *left == 0 && !*has_more {
                        assert!(came.is_empty(), "one message");
                        return Some(*bytes);
                    }
                }
                None
            }
        }
    }
}

fn request(rank: u32, world: u32) -> JoinRequest {
    let addr = |port: u32| SocketAddr::from(([127, 0, 0, 1], 1024 + port as u16));
    JoinRequest {
        job: "crowd".into(),
        rank: Rank(rank),
        world,
        host: None,
        order: Order::Arrival,
        mesh_addr: addr(rank),
        repair_addr: addr(rank + RANKS_MAX),
        max_packet_len_bytes: 1500,
        attach: Attach::Udp,
        machine: None,
        device_users: DeviceUsers::own(),
        terms: Terms::default(),
    }
}

/// Connect a rank, and let it ask to join.
fn join(addr: SocketAddr, rank: u32, world: u32) -> Member {
    let mut stream = TcpStream::connect(addr).expect("it is accepted");
    let mut said = encode_frames(&Greeting::Client).expect("a greeting");
    said.extend(encode_frames(&ClientRequest::Join(request(rank, world))).expect("a request"));
    stream.write_all(&said).expect("into an empty buffer");
    stream.set_nonblocking(true).expect("a socket");
    Member { stream, inbox: Inbox::new(rank as usize) }
}

/// Read until all members have their message. Returns the lengths of those that were not decoded.
fn read_all(members: &mut [Member]) -> Vec<usize> {
    let deadline = Instant::now() + LIMIT;
    let mut buffer = vec![0; 1 << 20];
    let mut lens = Vec::new();
    let mut open: Vec<usize> = (0..members.len()).collect();
    while !open.is_empty() {
        assert!(Instant::now() < deadline, "{} of {} have not been told", open.len(), members.len());
        let mut fds: Vec<PollFd<'_>> = open.iter().map(|&at| PollFd::new(&members[at].stream, PollFlags::IN)).collect();
        poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).expect("a wait");
        let ready: Vec<usize> =
            fds.iter().zip(&open).filter(|(fd, _)| !fd.revents().is_empty()).map(|(_, &at)| at).collect();
        drop(fds);
        for at in ready {
            let member = &mut members[at];
            loop {
                match (&member.stream).read(&mut buffer) {
                    Ok(0) => panic!("rank {at} is hung up on"),
                    Ok(len) => {
                        if let Some(len) = member.inbox.take(&buffer[..len]) {
                            if matches!(member.inbox, Inbox::Counted { .. }) {
                                lens.push(len);
                                member.inbox = Inbox::Done;
                            }
                            open.retain(|&other| other != at);
                            break;
                        }
                    }
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(error) => panic!("rank {at}: {error}"),
                }
            }
        }
    }
    lens
}

fn controller() -> (Server, SocketAddr) {
    let mut controller = serve(&["controller", "--listen", "127.0.0.1:0", "--max-connections", "16448"]);
    let line = controller.line();
    let addr = line.strip_prefix("listening ").and_then(|addr| addr.parse().ok()).expect("an address");
    (controller, addr)
}

/// The most memory that a process has had in RAM, in KiB.
fn peak_kib(server: &Server) -> u64 {
    let path = format!("/proc/{}/status", server.pid().as_raw_nonzero());
    let text = std::fs::read_to_string(path).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn ranks_up_to_the_limit_join_and_one_more_is_refused_by_name() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = u64::from(RANKS_MAX) + DESCRIPTORS_BESIDE;
    let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).expect("descriptors for all ranks");

    let (controller, addr) = controller();
    let began = Instant::now();
    let mut members: Vec<Member> = (0..RANKS_MAX).map(|rank| join(addr, rank, RANKS_MAX)).collect();
    let asked = began.elapsed();
    let lens = read_all(&mut members);
    eprintln!(
        "{RANKS_MAX} ranks: asked within {asked:?}, told within {:?}, {} bytes each; the controller's peak: {} KiB",
        began.elapsed(),
        lens[0],
        peak_kib(&controller)
    );
    assert!(lens.iter().all(|len| *len == lens[0]), "all are told as much");
    for (rank, member) in members.iter().enumerate().step_by(DECODED_EVERY) {
        let Inbox::Decoded { membership: Some(told), .. } = &member.inbox else { panic!("rank {rank} is told") };
        assert!(told.tree.as_ref().is_err_and(|why| why.contains("no device")), "{:?}", told.tree);
        assert_eq!((told.mesh.len(), told.repair_mesh.len()), (RANKS_MAX as usize, RANKS_MAX as usize));
        assert!((0..).zip(&told.mesh).all(|(rank, addr)| *addr == request(rank, 1).mesh_addr));
        assert!((0..).zip(&told.repair_mesh).all(|(rank, addr)| *addr == request(rank, 1).repair_addr));
    }
    let report = status(addr).expect("a report beside them");
    assert_eq!((report.jobs[0].joined, report.jobs[0].running), (RANKS_MAX, true));

    let refused = sumac::controller::Session::join(addr, request(0, RANKS_MAX + 1), LIMIT, |_| None);
    let why = refused.expect_err("too many").to_string();
    assert!(why.contains("16385 ranks; a job has at most 16384"), "{why}");

    // Half of them leave, and half die at once.
    for member in members.iter_mut().step_by(2) {
        send(&mut member.stream, &ClientRequest::Leave).expect("into an empty buffer");
    }
    drop(members);
    let deadline = Instant::now() + LIMIT;
    while !status(addr).expect("a report").jobs.is_empty() {
        assert!(Instant::now() < deadline, "the job ends with its last rank");
    }
    drop(controller);
}
