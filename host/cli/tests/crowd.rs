//! A job with the maximum number of ranks. Each rank is a connection of this process that joins, receives the
//! membership and leaves.

mod common;

use common::{Server, serve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use sumac::controller::limits::{RANKS_MAX, REPLY_LEN_MAX};
use sumac::controller::proto::{ClientReply, ClientRequest, JoinRequest, Membership, Terms, Transport};
use sumac::controller::status;
use sumac_hal::ctrl::{FrameBuffer, Hello, Order, encode_frames, send};
use sumac_hal::ids::Rank;
use sumac_hal::shm::DeviceUsers;

/// All ranks check the frames of their reply; one in this many decodes it.
const DECODED_EVERY: usize = 1024;

/// Longer than the test takes on a loaded machine.
const LIMIT: Duration = Duration::from_secs(300);

/// An upper bound of the other descriptors of this process.
const OTHER_DESCRIPTORS: u64 = 64;

/// One rank.
struct Member {
    stream: TcpStream,
    inbox: Inbox,
}

/// The state of its reply.
enum Inbox {
    /// Checks frames: the header so far, the bytes left in the frame, whether more frames follow, and the bytes
    /// received.
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

    /// Process received bytes. Returns the length of the message once it is complete.
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
        recovery_addr: addr(rank + RANKS_MAX),
        max_packet_len_bytes: 1500,
        transport: Transport::Udp,
        machine: None,
        device_users: DeviceUsers::own(),
        terms: Terms::default(),
    }
}

/// Connect a rank and send its request to join.
fn join(addr: SocketAddr, rank: u32, world: u32) -> Member {
    let mut stream = TcpStream::connect(addr).expect("it is accepted");
    let mut bytes = encode_frames(&Hello::Client).expect("a hello");
    bytes.extend(encode_frames(&ClientRequest::Join(request(rank, world))).expect("a request"));
    stream.write_all(&bytes).expect("into an empty buffer");
    stream.set_nonblocking(true).expect("a socket");
    Member { stream, inbox: Inbox::new(rank as usize) }
}

/// Read until all members have their reply. Returns the lengths of those that were not decoded.
fn read_all(members: &mut [Member]) -> Vec<usize> {
    let deadline = Instant::now() + LIMIT;
    let mut buffer = vec![0; 1 << 20];
    let mut lens = Vec::new();
    let mut open: Vec<usize> = (0..members.len()).collect();
    while !open.is_empty() {
        assert!(Instant::now() < deadline, "{} of {} ranks have no reply", open.len(), members.len());
        let mut fds: Vec<PollFd<'_>> = open.iter().map(|&at| PollFd::new(&members[at].stream, PollFlags::IN)).collect();
        poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).expect("a wait");
        let ready: Vec<usize> =
            fds.iter().zip(&open).filter(|(fd, _)| !fd.revents().is_empty()).map(|(_, &at)| at).collect();
        drop(fds);
        for at in ready {
            let member = &mut members[at];
            loop {
                match (&member.stream).read(&mut buffer) {
                    Ok(0) => panic!("the controller closed the connection of rank {at}"),
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

/// Return the peak resident memory of a process, in KiB.
fn peak_kib(server: &Server) -> u64 {
    let path = format!("/proc/{}/status", server.pid().as_raw_nonzero());
    let text = std::fs::read_to_string(path).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn maximum_number_of_ranks_join_and_a_larger_job_is_refused() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = u64::from(RANKS_MAX) + OTHER_DESCRIPTORS;
    let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).expect("descriptors for all ranks");

    let (controller, addr) = controller();
    let began = Instant::now();
    let mut members: Vec<Member> = (0..RANKS_MAX).map(|rank| join(addr, rank, RANKS_MAX)).collect();
    let requested = began.elapsed();
    let lens = read_all(&mut members);
    eprintln!(
        "{RANKS_MAX} ranks: requested within {requested:?}, replied within {:?}, {} bytes each; the controller's peak: {} KiB",
        began.elapsed(),
        lens[0],
        peak_kib(&controller)
    );
    assert!(lens.iter().all(|len| *len == lens[0]), "all replies have the same length");
    for (rank, member) in members.iter().enumerate().step_by(DECODED_EVERY) {
        let Inbox::Decoded { membership: Some(joined), .. } = &member.inbox else {
            panic!("rank {rank} has no membership")
        };
        assert!(joined.tree.as_ref().is_err_and(|why| why.contains("no device")), "{:?}", joined.tree);
        assert_eq!((joined.mesh.len(), joined.recovery_mesh.len()), (RANKS_MAX as usize, RANKS_MAX as usize));
        assert!((0..).zip(&joined.mesh).all(|(rank, addr)| *addr == request(rank, 1).mesh_addr));
        assert!((0..).zip(&joined.recovery_mesh).all(|(rank, addr)| *addr == request(rank, 1).recovery_addr));
    }
    let report = status(addr).expect("a report");
    assert_eq!((report.jobs[0].joined, report.jobs[0].running), (RANKS_MAX, true));

    let refused = sumac::controller::Session::join(addr, request(0, RANKS_MAX + 1), LIMIT, |_| None);
    let why = refused.expect_err("too many").to_string();
    assert!(why.contains("16385 ranks requested; a job has at most 16384"), "{why}");

    // Half of the ranks leave, the others disconnect.
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
