//! Telling all ranks that an operation has failed.
//!
//! The rank that finds an error tells every rank: those it is connected to over their connection, the others by a
//! courier (a connection that carries one frame). Ranks that are told pass it on to those they are connected to.
//!
//! Invariant: a peer that is in the middle of a frame gets the rest of it, the true bytes, before the abort: it may
//! be the last thing that its own result needs.

use super::frame::{AbortFrame, HELLO_BYTES, HelloKind};
use super::greet::ACCEPTS_PER_ROUND;
use super::link::{Link, Moved, State, read, write};
use super::run::{Failure, Run, is_next};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// One peer that is being told.
struct Telling {
    peer: Rank,
    /// The connection of a courier; `None`: over the link.
    courier: Option<TcpStream>,
    hello: [u8; HELLO_BYTES],
    hello_left: usize,
    abort_left: usize,
}

impl Run<'_> {
    /// Tell the others, for at most [`GRACE`]; a peer that takes nothing by then finds its connection closed.
    pub(super) fn abort(&mut self, failure: &Failure) {
        let (Failure::Found(error) | Failure::Told(error)) = failure;
        let frame = AbortFrame::new(self.call, error);
        // Who is at the door is told here, instead of finding it closed.
        let now = Instant::now();
        for _ in 0..ACCEPTS_PER_ROUND {
            if self.mesh.accept(now).is_none_or(|is_last| is_last) {
                break;
            }
        }
        for index in (0..self.mesh.pending.len()).rev() {
            self.mesh.greet(index);
        }
        let mut tellings = self.tellings(matches!(failure, Failure::Found(_)), &frame);
        let until = Instant::now() + GRACE;
        loop {
            tellings.retain_mut(|telling| !self.tell(telling, &frame));
            let rest = until.saturating_duration_since(Instant::now());
            if tellings.is_empty() || rest.is_zero() {
                break;
            }
            let streams = tellings.iter().filter_map(|telling| telling.stream(&self.mesh.links));
            let mut fds: Vec<_> = streams.map(|stream| PollFd::new(stream, PollFlags::IN | PollFlags::OUT)).collect();
            let timeout = Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() };
            // An interrupted poll only means another round.
            let _ = poll(&mut fds, Some(&timeout));
        }
        for telling in tellings {
            if telling.courier.is_none() {
                self.mesh.links[telling.peer.0 as usize].state = State::Ended;
            }
        }
    }

    /// Collect those to tell.
    fn tellings(&self, couriers: bool, frame: &AbortFrame) -> Vec<Telling> {
        let mut tellings = Vec::new();
        for (index, link) in self.mesh.links.iter().enumerate() {
            let peer = Rank(index as u32);
            let hello = self.mesh.hello(HelloKind::Courier, peer).emit();
            let telling = Telling { peer, courier: None, hello, hello_left: 0, abort_left: frame.bytes().len() };
            match link.state {
                // The peer reads frames once it has read our hello.
                State::Ready(_) | State::Greeting(_) => tellings.push(telling),
                State::Connecting(_) => tellings.push(Telling { hello_left: HELLO_BYTES, ..telling }),
                State::Idle if couriers && peer != self.mesh.rank() => {
                    // A rank that can't be reached is not there to be told.
                    if let Ok(Some(stream)) = self.mesh.connecting(peer) {
                        tellings.push(Telling { courier: Some(stream), hello_left: HELLO_BYTES, ..telling });
                    }
                }
                State::Idle | State::Ended => {}
            }
        }
        tellings
    }

    /// Move bytes both ways; return whether nothing is left to say, or nobody to say it to.
    fn tell(&mut self, telling: &mut Telling, frame: &AbortFrame) -> bool {
        let finished = match telling.courier {
            Some(_) => Moved::Bytes(0),
            None => self.finish_frame(telling.peer),
        };
        let Some(stream) = telling.stream(&self.mesh.links) else { return true };
        // A peer that is telling us something can only listen once we have taken it.
        if finished == Moved::Ended || !drain(stream, &mut self.mesh.scratch) {
            return true;
        }
        if finished == Moved::WouldBlock {
            return false;
        }
        let head = &telling.hello[HELLO_BYTES - telling.hello_left..];
        let body = &frame.bytes()[frame.bytes().len() - telling.abort_left..];
        let sent = match write(stream, head, body) {
            Moved::WouldBlock => return false,
            Moved::Ended => return true,
            Moved::Bytes(sent) => sent,
        };
        let hello = sent.min(telling.hello_left);
        let told = hello == telling.hello_left && sent - hello == telling.abort_left;
        if told {
            // The end of the stream follows the abort; that it can't be said changes nothing.
            let _ = stream.shutdown(Shutdown::Write);
        }
        telling.hello_left -= hello;
        telling.abort_left -= sent - hello;
        told
    }

    /// Send what is left of the frame that a peer is in the middle of.
    fn finish_frame(&mut self, peer: Rank) -> Moved {
        let mesh = &mut *self.mesh;
        let link = &mut mesh.links[peer.0 as usize];
        match link.flush_want() {
            Moved::Bytes(_) => {}
            other => return other,
        }
        while !link.tx.is_between_frames() {
            let sends = self.step.sends;
            let slot = (0..sends.len()).find(|&slot| sends[slot].peer == peer && is_next(sends, &mesh.sends, slot));
            let Some(slot) = slot else { return Moved::Ended };
            let bytes = self.memory.outgoing(sends[slot].from);
            match link.write_transfer(&self.call, bytes, mesh.sends[slot].bytes) {
                Moved::Bytes(n) => mesh.sends[slot].bytes += n,
                other => return other,
            }
        }
        Moved::Bytes(0)
    }
}

impl Telling {
    fn stream<'a>(&'a self, links: &'a [Link]) -> Option<&'a TcpStream> {
        self.courier.as_ref().or_else(|| links[self.peer.0 as usize].stream())
    }
}

/// Take and forget what has come; return whether the peer is still there.
fn drain(stream: &TcpStream, scratch: &mut [u8]) -> bool {
    for _ in 0..DRAINS_PER_ROUND {
        match read(stream, scratch) {
            Moved::Bytes(_) => {}
            Moved::WouldBlock => return true,
            Moved::Ended => return false,
        }
    }
    true
}

/// How long a peer may take to listen.
const GRACE: Duration = Duration::from_secs(1);
/// Reads from one peer before the others get their turn.
const DRAINS_PER_ROUND: usize = 64;
