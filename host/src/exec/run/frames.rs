//! Frames of a run: headers, and whether they belong to the operation; aborts, and why a peer stopped reading.

use super::{Failure, Run};
use crate::exec::auth::Purpose;
use crate::exec::error::{Call, ExecError};
use crate::exec::frame::{AbortFrame, FrameKind, HEADER_BYTES, Header};
use crate::exec::link::{IoOutcome, Reference, State};
use crate::exec::regions::RegionPlace;
use sumac_hal::ids::Rank;

impl Run<'_> {
    /// Receive a header; `None` if it is not complete.
    pub(in crate::exec) fn receive_header(&mut self, peer: Rank) -> Result<Option<Header>, Failure> {
        let mut header = loop {
            let link = &mut self.mesh.links[peer.0 as usize];
            match link.fill_header(HEADER_BYTES) {
                IoOutcome::WouldBlock => return Ok(None),
                IoOutcome::Ended => {
                    self.note_taken(peer);
                    self.mesh.links[peer.0 as usize].state = State::Ended;
                    return if self.needs(peer) || self.mesh.messages.awaits_channel(peer) {
                        Err(ExecError::RankLost { rank: peer }.into())
                    } else {
                        Ok(None)
                    };
                }
                IoOutcome::Bytes(_) => {}
            }
            let header = Header::parse(peer, &link.rx.header())?;
            if header.kind != FrameKind::Shared {
                break header;
            }
            // The peer may have accepted the memory and switched before this rank has seen its answer.
            self.mesh.finish_offer(peer, Purpose::Peer);
            if !self.mesh.links[peer.0 as usize].switch_rx() {
                return Err(ExecError::protocol(peer, "a switch to memory that is not shared").into());
            }
        };
        let link = &mut self.mesh.links[peer.0 as usize];
        link.rx.left_bytes = header.len_bytes;
        link.rx.reference = match header.kind {
            FrameKind::Reference => Some(Reference::Address(header.address)),
            FrameKind::MappedReference => Some(Reference::Mapped(RegionPlace::from_wire(header.address))),
            _ => None,
        };
        if link.rx.reference.is_some() {
            header.kind = FrameKind::Data;
        }
        if let (true, Some(shared)) = (header.has_news, &mut link.shared) {
            shared.receive_regions();
        }
        link.rx.frame = Some(header);
        self.check_frame(&header)?;
        Ok((header.kind == FrameKind::Data).then_some(header))
    }

    /// Check a frame against the operation: use it, hold it for later, or fail.
    pub(in crate::exec) fn check_frame(&mut self, header: &Header) -> Result<(), Failure> {
        let peer = header.call.rank;
        if header.kind == FrameKind::Abort {
            return self.receive_abort(peer);
        }
        let is_announce = header.kind == FrameKind::Announce;
        let theirs = &header.call;
        if self.messages_only && is_announce && theirs.op_index < self.mesh.next_op {
            // Stale. Held, it would hide the end of the connection until the next operation.
            self.mesh.links[peer.0 as usize].rx.frame = None;
            return Ok(());
        }
        if self.messages_only || theirs.op_index > self.call.op_index && !self.awaits(peer) {
            return Ok(());
        }
        // An announcement may be stale: the awaited data was in flight.
        if !(is_announce && theirs.op_index < self.call.op_index) {
            self.check_same_operation(theirs)?;
        }
        if is_announce {
            self.mesh.links[peer.0 as usize].rx.frame = None;
            return Ok(());
        }
        let turn = self.mesh.links[peer.0 as usize].rx.transfers;
        if header.step != turn {
            return Err(ExecError::protocol(peer, format!("transfer {} where {turn} is next", header.step)).into());
        }
        Ok(())
    }

    /// Check that a peer is in the same operation.
    pub(in crate::exec) fn check_same_operation(&self, theirs: &Call) -> Result<(), ExecError> {
        if theirs.op_index != self.call.op_index || theirs.signature != self.call.signature {
            return Err(ExecError::mismatch(self.call, *theirs));
        }
        Ok(())
    }

    /// Receive the payload of an abort; once complete, fails with the error in it.
    pub(in crate::exec) fn receive_abort(&mut self, peer: Rank) -> Result<(), Failure> {
        let link = &mut self.mesh.links[peer.0 as usize];
        let number = link.rx.frame.map(|header| header.number);
        while link.rx.left_bytes != 0 {
            let mut piece = [0; 64];
            match link.read_payload(&mut piece) {
                IoOutcome::Bytes(n) => link.rx.abort.extend_from_slice(&piece[..n]),
                IoOutcome::WouldBlock => return Ok(()),
                IoOutcome::Ended => return Err(ExecError::RankLost { rank: peer }.into()),
            }
        }
        let error = AbortFrame::parse(peer, &link.rx.abort);
        self.mesh.aborted = number;
        Err(Failure::Remote(error))
    }

    /// Find out why `peer` stopped reading: an abort that it sent before it closed may say so.
    pub(in crate::exec) fn closing_error(&mut self, peer: Rank) -> Failure {
        let index = peer.0 as usize;
        loop {
            // Its bytes do not come over the connection, and may be gone.
            self.mesh.links[index].forget_reference();
            match self.mesh.links[index].rx.frame {
                Some(Header { kind: FrameKind::Data | FrameKind::Announce, .. })
                    if self.mesh.links[index].rx.left_bytes == 0 =>
                {
                    self.mesh.links[index].rx.frame = None;
                }
                Some(Header { kind: FrameKind::Data, .. }) => {
                    let moved = self.mesh.links[index].read_payload(&mut self.mesh.scratch);
                    if !matches!(moved, IoOutcome::Bytes(_)) {
                        return ExecError::RankLost { rank: peer }.into();
                    }
                }
                Some(_) => match self.receive_abort(peer) {
                    Ok(()) => return ExecError::RankLost { rank: peer }.into(),
                    Err(failure) => return failure,
                },
                None => match self.receive_header(peer) {
                    // The order of frames no longer matters, only whether there is an abort.
                    Ok(Some(_)) | Err(Failure::Local(ExecError::Protocol { .. })) => {}
                    Ok(None) => return ExecError::RankLost { rank: peer }.into(),
                    Err(failure) => return failure,
                },
            }
        }
    }
}
