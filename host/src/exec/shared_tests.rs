//! Connections in shared memory: what takes over when, peers that leave in the middle, and peers that break the rules.

use super::auth::{Purpose, shared_key, shared_name};
use super::message::{self, Direction, Message, Transfer};
use super::shared::REFERENCE_MIN_BYTES;
use super::tests::{LONG, all_reduce, connected_meshes, context, meshes, on_ranks, secret};
use super::*;
use crate::schedule::{binomial, dissemination, ring};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ids::{ChildIndex, GroupId, Rank};
use sumac_hal::op::{Dtype, OpDesc, Path, ReduceOp};
use sumac_hal::reduce::Kernel;
use sumac_hal::shm::{Bell, Connection, Duplex, Message as ShmMessage};

fn barrier(mesh: &mut Mesh, op_index: u64) -> Result<(), ExecError> {
    let ctx = context(op_index, OpDesc::barrier(), Path::Ring);
    execute(mesh, &dissemination::barrier(mesh.place()), None, &mut [][..], &ctx, &mut NoInterrupt)
}

/// Lengths around those of a frame, a stream and a reference.
fn lengths() -> impl Iterator<Item = usize> {
    let around = [1, 64, REFERENCE_MIN_BYTES, 64 << 10, 256 << 10, 1 << 20];
    [0, 3 << 20].into_iter().chain(around.into_iter().flat_map(|len| [len - 1, len, len + 1]))
}

#[test]
fn transfers_of_any_length_arrive_in_shared_memory() {
    let mut meshes = connected_meshes(3);
    on_ranks(&mut meshes, |mesh| {
        for (nth, len) in lengths().enumerate() {
            let (root, rank) = (Rank(nth as u32 % 3), mesh.place().rank());
            let sent: Vec<u8> = (0..len).map(|at| (at * 7 + nth) as u8).collect();
            let mut bytes = if rank == root { sent.clone() } else { vec![0; len] };
            let schedule = binomial::broadcast(mesh.place(), len, root);
            let desc = OpDesc::broadcast(Dtype::U8, root, len as u64);
            let ctx = context(nth as u64, desc, Path::Binomial);
            execute(mesh, &schedule, None, &mut bytes[..], &ctx, &mut NoInterrupt).expect("no error");
            assert!(bytes == sent, "{len} bytes from {root} at {rank}");
        }
    });
}

#[test]
fn messages_of_any_length_arrive_in_shared_memory() {
    let mut meshes = connected_meshes(2);
    on_ranks(&mut meshes, |mesh| {
        let peer = Rank(1 - mesh.place().rank().0);
        // The first messages go over the channel's socket, the last ones do not.
        for round in 0..20_u32 {
            for len in lengths() {
                let bytes: Vec<u8> = (0..len).map(|at| (at * 5) as u8 ^ round as u8).collect();
                let mut received = vec![0; len];
                let mut both = [
                    Message::Send { peer, tag: round, bytes: &bytes },
                    Message::Receive { peer, tag: round, bytes: &mut received },
                ];
                let mut transfer = Transfer::new(mesh, &mut both, Instant::now() + LONG).expect("valid");
                assert_eq!(transfer.drive(&mut NoInterrupt), Ok(Status::Done));
                assert!(received == bytes, "{len} bytes in round {round}");
            }
        }
        assert!(mesh.messages.out[peer.0 as usize].link.tx.is_shared);
        assert!(mesh.messages.from[peer.0 as usize].link.rx.is_shared);
    });
}

/// A rank that shares no memory and others that do are one mesh.
#[test]
fn rank_without_shared_memory_gets_tcp_and_the_others_do_not() {
    let mut meshes = meshes(3);
    meshes[1].sharing = Err("not in this test".into());
    for op_index in 0..200 {
        on_ranks(&mut meshes, |mesh| {
            let mut buf = 1_i32.to_le_bytes().repeat(100_000);
            all_reduce(mesh, op_index, Path::Ring, Dtype::I32, ReduceOp::Sum, &mut buf).expect("no error");
            assert_eq!(buf, 3_i32.to_le_bytes().repeat(100_000));
        });
    }
    // In a ring, rank 0 sends nothing to rank 2 but announcements.
    assert_eq!([1, 2].map(|rank: usize| meshes[rank].shared_links()), [(0, 2), (1, 2)]);
    assert!(meshes[0].links[2].rx.is_shared && !meshes[0].links[1].tx.is_shared);
}

/// Ends the operation once the peer has a reference and does not copy it.
struct OnReference {
    wake_at: Instant,
    checks: u32,
}

impl Interrupt for OnReference {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        self.checks += 1;
        self.wake_at = Instant::now() + Duration::from_millis(1);
        if self.checks < 20 {
            return Ok(ControlFlow::Continue(()));
        }
        Err(ExecError::Interrupted { rank: Rank(0), reason: "too slow".into() })
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.wake_at)
    }
}

/// Rank 0 leaves while its reference is not taken, and its caller overwrites the memory. Rank 1, which comes too late,
/// gets the error and never the overwritten bytes.
#[test]
fn withdrawn_reference_is_an_error_at_the_rank_that_comes_late() {
    let len = 1 << 20;
    let mut meshes = connected_meshes(2);
    let (left, enters) = mpsc::channel();
    let enters = std::sync::Mutex::new(enters);
    let results = on_ranks(&mut meshes, |mesh| {
        let desc = OpDesc::broadcast(Dtype::U8, Rank(0), len as u64);
        let (schedule, ctx) = (binomial::broadcast(mesh.place(), len, Rank(0)), context(7, desc, Path::Binomial));
        let mut bytes = vec![1; len];
        if mesh.place().rank() == Rank(0) {
            let mut interrupt = OnReference { wake_at: Instant::now(), checks: 0 };
            let result = execute(mesh, &schedule, None, &mut bytes[..], &ctx, &mut interrupt);
            bytes.fill(2);
            left.send(()).expect("rank 1 is there");
            return result;
        }
        enters.lock().expect("no panic").recv().expect("rank 0 is there");
        execute(mesh, &schedule, None, &mut bytes[..], &ctx, &mut NoInterrupt)
    });
    let error = Err(ExecError::Interrupted { rank: Rank(0), reason: "too slow".into() });
    assert_eq!(results, [error.clone(), error]);
}

/// The same without a word: the rank's mesh is dropped, as when its process ends.
#[test]
fn rank_that_ends_with_a_reference_is_named() {
    let len = 1 << 20;
    let mut meshes = connected_meshes(2);
    let mut late = meshes.pop().expect("rank 1");
    let mut gone = meshes.pop().expect("rank 0");
    let mut first = vec![0; len];
    // Until the channel is in shared memory, which takes the other rank's help.
    while !gone.messages.out[1].link.tx.is_shared {
        let bytes: Box<dyn message::MessageBuffer> = Box::new(vec![1_u8; 8]);
        gone.post(Rank(1), Direction::Send, 0, bytes).expect("valid");
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut receive = [Message::Receive { peer: Rank(0), tag: 0, bytes: &mut first[..8] }];
                let mut transfer = Transfer::new(&mut late, &mut receive, Instant::now() + LONG).expect("valid");
                assert_eq!(transfer.drive(&mut NoInterrupt), Ok(Status::Done));
            });
            while !gone.messages.is_idle() {
                assert_eq!(message::poll(&mut gone, &mut NoInterrupt), Ok(Status::Done));
            }
        });
        assert_eq!(message::poll(&mut late, &mut NoInterrupt), Ok(Status::Done));
    }
    let bytes: Box<dyn message::MessageBuffer> = Box::new(vec![2_u8; len]);
    gone.post(Rank(1), Direction::Send, 1, bytes).expect("valid");
    assert_eq!(message::poll(&mut gone, &mut NoInterrupt), Ok(Status::Done));
    drop(gone);
    let mut receive = [Message::Receive { peer: Rank(0), tag: 1, bytes: &mut first }];
    let mut transfer = Transfer::new(&mut late, &mut receive, Instant::now() + LONG).expect("valid");
    assert_eq!(transfer.drive(&mut NoInterrupt), Err(ExecError::RankLost { rank: Rank(0) }));
}

/// Play a rank that offers memory. Returns its end of it, and the connection.
fn offer_by_hand(name: &str, key: u64, from: Rank) -> (Duplex, Connection) {
    let connection = Connection::open(name, LONG).expect("rank 1 listens");
    let duplex = Duplex::create(64 << 10, 1).expect("memory");
    let child = ChildIndex(Purpose::Peer.to_wire());
    // A rank that has refused it may be gone.
    let _ = connection.send(&ShmMessage::Attach { group: GroupId(from.0), child, key }, None);
    let _ = connection.send(&ShmMessage::Memory { handle: 0 }, Some(duplex.file()));
    let bell = Bell::create().expect("a descriptor");
    let _ = connection.send(&ShmMessage::Bell { queue: 0 }, Some(bell.as_fd()));
    (duplex, connection)
}

#[test]
fn memory_of_strangers_and_of_unconnected_ranks_is_refused() {
    let mut meshes = meshes(2);
    let name = shared_name(&secret(), Rank(1), meshes[1].addresses[1]);
    let key = shared_key(&secret(), Purpose::Peer, Rank(0), Rank(1));
    let other = shared_key(&secret(), Purpose::PointToPoint, Rank(0), Rank(1));
    let offers = [(key ^ 1, 0), (other, 0), (key, 1), (key, 2), (key, 0)];
    let played: Vec<_> = offers.into_iter().map(|(key, from)| offer_by_hand(&name, key, Rank(from))).collect();
    // Rank 1 is called, and nobody else: it has no link that memory could take over.
    let mut ctx = context(0, OpDesc::barrier(), Path::Ring);
    ctx.deadline = Instant::now() + Duration::from_millis(300);
    let schedule = dissemination::barrier(meshes[1].place());
    let result = execute(&mut meshes[1], &schedule, None, &mut [][..], &ctx, &mut NoInterrupt);
    assert_eq!(result, Err(ExecError::Deadline { op_index: 0, rank: Rank(1), peer: Rank(0) }));
    for (nth, (_, connection)) in played.iter().enumerate() {
        let answer = connection.receive(LONG);
        assert!(answer.is_err(), "offer {nth}: {answer:?}");
    }
    assert_eq!(meshes[1].foreign_dropped(), 4);
}

/// A rank of the job that does not keep to the rules: its peer names it as lost, and reads nothing out of bounds.
#[test]
fn garbage_in_shared_memory_ends_the_operation_with_a_named_rank() {
    for (nth, garbage) in [0xff_u8, 0x01, 0x80].into_iter().enumerate() {
        let mut meshes = connected_meshes(2);
        let (mut hostile, mut mesh) = (meshes.remove(0), meshes.remove(0));
        // Frames of garbage.
        let link = &mut hostile.links[1];
        let sent = link.write(&[garbage; 640], &[]);
        assert_eq!(sent, super::link::IoOutcome::Bytes(640));
        let result = barrier(&mut mesh, 3);
        assert!(matches!(&result, Err(ExecError::Protocol { rank: Rank(0), .. })), "{nth}: {result:?}");
    }
}

#[test]
fn reference_to_memory_that_is_not_there_is_a_lost_rank() {
    use super::error::Call;
    use super::frame::{FrameKind, Header};
    for address in [0, 8, 1 << 46, u64::MAX, u64::MAX - 4096] {
        let mut meshes = connected_meshes(2);
        let (mut hostile, mut mesh) = (meshes.remove(0), meshes.remove(0));
        let len = 1_usize << 20;
        let desc = OpDesc::broadcast(Dtype::U8, Rank(0), len as u64);
        let ctx = context(9, desc, Path::Binomial);
        let call = Call::new(Rank(0), 9, ctx.signature, &desc, Path::Binomial);
        let bare = Header::bare(FrameKind::Reference, call, 0);
        let header = Header { len_bytes: len, transfer_bytes: len as u64, address, ..bare };
        let _ = hostile.links[1].write(&header.emit(), &[]);
        let mut bytes = vec![0; len];
        // The abort that rank 1 expects after a withdrawal does not come either.
        drop(hostile);
        let schedule = binomial::broadcast(mesh.place(), len, Rank(0));
        let result = execute(&mut mesh, &schedule, None, &mut bytes[..], &ctx, &mut NoInterrupt);
        assert_eq!(result, Err(ExecError::RankLost { rank: Rank(0) }), "{address:#x}");
    }
}

/// Takes a rank's reference and leaves, as a peer that needs nothing more, before the rank has looked again.
struct TakesAndLeaves(Option<Mesh>, Instant);

impl Interrupt for TakesAndLeaves {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        let Some(peer) = &mut self.0 else { return Ok(ControlFlow::Continue(())) };
        let link = &mut peer.links[0];
        if let super::link::IoOutcome::Bytes(_) = link.fill_header(super::frame::HEADER_BYTES) {
            assert!(link.shared.as_ref().expect("shared memory").take_reference(), "it is there");
            self.0 = None;
        }
        Ok(ControlFlow::Continue(()))
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.1)
    }
}

/// The peer has all that it needs, and so has this rank.
#[test]
fn peer_that_leaves_with_the_last_reference_is_not_missed() {
    let mut meshes = connected_meshes(2);
    let (peer, mesh) = (meshes.pop().expect("rank 1"), &mut meshes[0]);
    let len = 2 * REFERENCE_MIN_BYTES;
    let desc = OpDesc::broadcast(Dtype::U8, Rank(0), len as u64);
    let (schedule, ctx) = (binomial::broadcast(mesh.place(), len, Rank(0)), context(7, desc, Path::Binomial));
    let mut interrupt = TakesAndLeaves(Some(peer), Instant::now());
    assert_eq!(execute(mesh, &schedule, None, &mut vec![1; len][..], &ctx, &mut interrupt), Ok(()));
    assert!(interrupt.0.is_none(), "the peer has left meanwhile");
}

/// Both ranks copy at the same time only if each sends its reference before it copies the other's.
#[test]
fn own_reference_is_sent_before_the_peers_is_copied() {
    use super::error::Call;
    use super::frame::{FrameKind, HEADER_BYTES, Header};
    let mut meshes = connected_meshes(2);
    let (mut peer, mut mesh) = (meshes.remove(0), meshes.remove(0));
    let count = REFERENCE_MIN_BYTES;
    let desc = OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, count as u64);
    let ctx = context(3, desc, Path::Ring);
    let len = count / 2 * desc.element_bytes();
    let bare = Header::bare(FrameKind::Reference, Call::new(Rank(0), 3, ctx.signature, &desc, Path::Ring), 0);
    // Copying fails at once.
    let header = Header { len_bytes: len, transfer_bytes: len as u64, address: 8, ..bare };
    let _ = peer.links[1].write(&header.emit(), &[]);
    let mut bytes = vec![0; count * desc.element_bytes()];
    let (schedule, kernel) = (ring::all_reduce(mesh.place(), count), Kernel::new(Dtype::I32, ReduceOp::Sum));
    let result = execute(&mut mesh, &schedule, kernel.as_ref(), &mut bytes[..], &ctx, &mut NoInterrupt);
    assert_eq!(result, Err(ExecError::RankLost { rank: Rank(0) }));
    let _ = peer.links[1].fill_header(HEADER_BYTES);
    let first = Header::parse(Rank(1), &peer.links[1].rx.header()).expect("a frame");
    assert_eq!((first.kind, first.transfer_bytes), (FrameKind::Reference, len as u64));
}

/// Ranks that sleep are woken through shared memory: more of them than processors, and a schedule with many steps.
#[test]
fn sleeping_ranks_are_woken_by_shared_memory() {
    let mut meshes = connected_meshes(9);
    on_ranks(&mut meshes, |mesh| {
        for op_index in 0..50 {
            let schedule = ring::all_reduce(mesh.place(), 90);
            let ctx = context(op_index, OpDesc::all_reduce(Dtype::I32, ReduceOp::Sum, 90), Path::Ring);
            let mut buf = 1_i32.to_le_bytes().repeat(90);
            if mesh.place().rank() == Rank(op_index as u32 % 9) {
                // Long enough for the others to sleep.
                thread::park_timeout(Duration::from_millis(2));
            }
            let kernel = Kernel::new(Dtype::I32, ReduceOp::Sum);
            execute(mesh, &schedule, kernel.as_ref(), &mut buf[..], &ctx, &mut NoInterrupt).expect("no error");
            assert_eq!(buf, 9_i32.to_le_bytes().repeat(90));
        }
    });
}
