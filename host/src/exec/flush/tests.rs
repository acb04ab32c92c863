//! Ranks that close connections with bytes that nobody has read, over TCP.

use crate::exec::tests::{LONG, context, meshes, on_ranks, with_memory};
use crate::exec::*;
use crate::schedule::{binomial, dissemination};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use std::io::Write;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;
use sumac_hal::op::{Dtype, OpDesc, Path};

fn barrier(mesh: &mut Mesh, op_index: u64, interrupt: &mut dyn Interrupt) -> Result<(), ExecError> {
    let ctx = context(op_index, OpDesc::barrier(), Path::Ring);
    execute(mesh, &dissemination::barrier(mesh.place()), None, &mut [][..], &ctx, interrupt)
}

/// Blocks its rank, once told to, until the test lets it go on.
struct Stop {
    stops: mpsc::Receiver<()>,
    stopped: mpsc::Sender<()>,
    resume: mpsc::Receiver<()>,
    checked: Instant,
}

impl Interrupt for Stop {
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn check(&mut self) -> Result<ControlFlow<()>, ExecError> {
        self.checked = Instant::now();
        if self.stops.try_recv().is_ok() {
            self.stopped.send(()).expect("the test listens");
            self.resume.recv().expect("the test goes on");
        }
        Ok(ControlFlow::Continue(()))
    }

    fn wake_at(&self) -> Option<Instant> {
        Some(self.checked + Duration::from_millis(1))
    }
}

/// The unread bytes are an announcement: rank 1 waits for rank 0 before rank 0 sends.
#[test]
fn slow_rank_receives_everything_from_a_rank_that_closes_with_unread_bytes() {
    with_memory(SharedMemory::Avoid, close_with_unread_bytes);
}

fn close_with_unread_bytes() {
    const LEN_BYTES: usize = 192 << 10;
    let mut meshes = meshes(2);
    on_ranks(&mut meshes, |mesh| barrier(mesh, 0, &mut NoInterrupt).expect("both ranks are here"));
    let mut slow = meshes.pop().expect("rank 1");
    let mut quick = meshes.pop().expect("rank 0");
    let broadcast = |mesh: &mut Mesh, bytes: &mut [u8], interrupt: &mut dyn Interrupt| {
        let desc = OpDesc::broadcast(Dtype::U8, Rank(0), LEN_BYTES as u64);
        let schedule = binomial::broadcast(mesh.place(), LEN_BYTES, Rank(0));
        execute(mesh, &schedule, None, bytes, &context(1, desc, Path::Binomial), interrupt)
    };
    // Rank 1 has room for a part, and rank 0 for the rest.
    let (sends, receives) = (quick.links[1].stream(), slow.links[0].stream());
    set_socket_recv_buffer_size(receives.expect("connected by the barrier"), 16 << 10).expect("a socket");
    set_socket_send_buffer_size(sends.expect("connected by the barrier"), LEN_BYTES).expect("a socket");
    let ((stop, stops), (stopped, is_stopped), (go_on, resume)) = (mpsc::channel(), mpsc::channel(), mpsc::channel());
    thread::scope(|scope| {
        let received = scope.spawn(move || {
            let mut bytes = vec![0; LEN_BYTES];
            broadcast(&mut slow, &mut bytes, &mut Stop { stops, stopped, resume, checked: Instant::now() })
                .map(|()| bytes)
        });
        let stream = quick.links[1].stream().expect("connected by the barrier").try_clone().expect("a descriptor");
        let mut fds = [PollFd::new(&stream, PollFlags::IN)];
        poll(&mut fds, None).expect("rank 1 announces its operation");
        stop.send(()).expect("rank 1 is there");
        is_stopped.recv().expect("rank 1 stops");
        broadcast(&mut quick, &mut vec![7; LEN_BYTES], &mut NoInterrupt).expect("the socket holds it");
        assert!(!quick.flush(Instant::now()), "rank 1 has not received everything");
        go_on.send(()).expect("rank 1 waits");
        assert!(quick.flush(Instant::now() + LONG));
        drop((quick, stream));
        assert!(received.join().expect("no panic") == Ok(vec![7; LEN_BYTES]), "rank 1 lost bytes");
    });
}

#[test]
fn rank_that_is_gone_is_not_waited_for() {
    let mut meshes = meshes(2);
    on_ranks(&mut meshes, |mesh| barrier(mesh, 0, &mut NoInterrupt).expect("both ranks are here"));
    let gone = meshes.pop().expect("rank 1");
    let mesh = &mut meshes[0];
    // More than rank 1 has room for, so some of it is never acknowledged.
    let mut stream = mesh.links[1].stream().expect("connected by the barrier");
    while stream.write(&[0; 4096]).is_ok() {}
    assert!(!mesh.flush(Instant::now()));
    drop(gone);
    assert!(mesh.flush(Instant::now() + LONG));
}
