//! A rank's way into the tree: by packets, or by reference over memory that it shares with its leaf device.

use super::error::Error;
use super::extent::Extent;
use crate::controller::proto::TreeMembership;
use crate::exec::Buffers;
use crate::recovery::Remains;
use crate::transport::memory::{Places, ReferenceDriver, Seating, Transfer};
use crate::transport::packets::{self, EndpointError, EndpointStats, Event, OpId, TreeDriver, Verdict};
use std::os::fd::BorrowedFd;
use std::time::Duration;
use sumac_hal::hosted::HostedPort;
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::{Limit, RankMask};

/// How often a schedule looks at a tree by reference, or over verbs: doorbells and completions are nothing that can be polled
/// without more ado.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// The rank's end of the tree.
#[derive(Debug)]
pub(super) enum Tree {
    Packets(Box<TreeDriver<HostedPort>>),
    Reference(Box<ReferenceDriver>),
}

impl Tree {
    /// Post an operation; with buffers if it runs in the tree, without if it only tells the tree what runs elsewhere.
    pub(super) fn post(
        &mut self,
        desc: &OpDesc,
        path: Path,
        limit: Option<Limit>,
        buffers: Option<(&Extent, &mut Buffers<'_>)>,
    ) -> Result<(OpId, Transfer), Error> {
        match self {
            Self::Packets(driver) => match driver.endpoint_mut().post_within(*desc, path, limit) {
                Ok(op) => Ok((op, Transfer::Packets)),
                Err(error) => Err(self.refused(error)),
            },
            Self::Reference(driver) => {
                let (mut places, mut lens) = (Places::default(), (0, 0));
                if let Some((extent, buffers)) = buffers {
                    let input = extent.input(buffers);
                    (places.input, lens.0) = (driver.place(input, desc), input.len());
                    let output = extent.output(buffers);
                    (places.output, lens.1) = (driver.place(output, desc), output.len());
                    places.writable = driver.whole_pages(output);
                }
                match driver.post_within(*desc, path, limit, places) {
                    Ok(op) => Ok((op, driver.transfer(&places, lens.0, lens.1))),
                    Err(error) => Err(self.refused(error)),
                }
            }
        }
    }

    fn refused(&self, error: packets::PostError) -> Error {
        match error {
            packets::PostError::Failed(error) => self.named(error),
            packets::PostError::TooMany { limit } => Error::TooManyInFlight { limit, waited: Duration::ZERO },
        }
    }

    /// Do what can be done without waiting.
    pub(super) fn pump(&mut self, buffers: &mut impl packets::Buffers) -> Option<Duration> {
        match self {
            Self::Packets(driver) => driver.pump(buffers),
            Self::Reference(driver) => driver.pump(buffers),
        }
    }

    pub(super) fn poll_event(&mut self) -> Option<Event> {
        match self {
            Self::Packets(driver) => driver.endpoint_mut().poll_event(),
            Self::Reference(driver) => driver.poll_event(),
        }
    }

    /// Sleep until there is something to do, or `timeout` has passed; it may return earlier.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        match self {
            Self::Packets(driver) => driver.wait(timeout),
            Self::Reference(driver) => driver.wait(timeout),
        }
    }

    pub(super) fn error(&self) -> Option<EndpointError> {
        match self {
            Self::Packets(driver) => driver.endpoint().error(),
            Self::Reference(driver) => driver.error(),
        }
    }

    pub(super) fn stats(&self) -> EndpointStats {
        match self {
            Self::Packets(driver) => *driver.endpoint().stats(),
            Self::Reference(driver) => *driver.stats(),
        }
    }

    /// Return what is known of the operation whose completion was told last.
    pub(super) fn verdict(&self) -> Verdict {
        match self {
            Self::Packets(driver) => driver.endpoint().verdict(),
            Self::Reference(driver) => driver.verdict(),
        }
    }

    /// Return the ranks that have left the group.
    pub(super) fn gone(&self) -> RankMask {
        match self {
            Self::Packets(driver) => driver.endpoint().gone(),
            Self::Reference(driver) => driver.gone(),
        }
    }

    /// Tell whether another operation can be posted.
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Packets(driver) => driver.endpoint().has_room(),
            Self::Reference(driver) => driver.endpoint().has_room(),
        }
    }

    /// Return the first chunk whose result this rank does not have.
    pub(super) fn have(&self) -> ChunkNo {
        match self {
            Self::Packets(driver) => driver.endpoint().have(),
            Self::Reference(driver) => driver.endpoint().have(),
        }
    }

    /// Return the chunk behind the last that was posted.
    pub(super) fn end(&self) -> ChunkNo {
        ChunkNo(self.remains().ops().end())
    }

    /// Return how many shards the leaf device has; those of a tree have equally many.
    pub(super) fn shards(&self) -> usize {
        match self {
            Self::Packets(driver) => driver.endpoint().shards(),
            // Its leaf's are behind one queue; what is of packets above is not seen from here.
            Self::Reference(_) => 1,
        }
    }

    /// Return what a schedule can poll beside its own sockets.
    pub(super) fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Packets(driver) => driver.port().poll_fd(),
            Self::Reference(_) => None,
        }
    }

    /// Return when a schedule has to look again, where `next` is what [`Tree::pump`] said.
    pub(super) fn look_after(&self, next: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Packets(driver) if driver.port().poll_fd().is_some() => next,
            Self::Packets(_) | Self::Reference(_) => Some(next.map_or(LOOK_EVERY, |next| next.min(LOOK_EVERY))),
        }
    }

    /// No operation that is in flight may touch its buffers any more.
    pub(super) fn retire(&mut self) {
        match self {
            // What is in packets is copied by this side alone.
            Self::Packets(_) => {}
            Self::Reference(driver) => driver.retire(),
        }
    }

    /// End the group; what its device had for this rank is in the rank's buffers afterwards, and nothing follows.
    pub(super) fn salvage(&mut self, buffers: &mut impl packets::Buffers) {
        match self {
            Self::Packets(driver) => driver.endpoint_mut().close(),
            Self::Reference(driver) => driver.salvage(buffers),
        }
    }

    /// Return what is left of the group at this rank.
    pub(super) fn remains(&self) -> &dyn Remains {
        match self {
            Self::Packets(driver) => driver.endpoint(),
            Self::Reference(driver) => &**driver,
        }
    }

    /// Say what the end of the group is to a caller.
    pub(super) fn named(&self, error: EndpointError) -> Error {
        let device = match self {
            Self::Packets(_) => "the leaf",
            Self::Reference(driver) => driver.device(),
        };
        Error::in_tree(error, device)
    }
}

/// Describe a rank's place at its leaf; `None` if it contributes by packets.
pub(super) fn seating(
    tree: &TreeMembership,
    (rank, ranks): (Rank, u32),
    ranks_here: usize,
    table_version: u32,
) -> Option<Seating> {
    let bus = tree.bus.as_ref()?;
    Some(Seating {
        device: tree.leaf.clone(),
        socket: bus.socket.as_str().into(),
        remote: None,
        group: tree.group,
        epoch: tree.epoch,
        child: tree.child,
        key: tree.key,
        rank,
        ranks,
        ranks_here,
        chunk_len_bytes: tree.chunk_len_bytes,
        window_max: tree.window_max,
        table_version,
    })
}
