//! A rank's end of the tree: by packets, or zero-copy over memory shared with the leaf device.

use super::error::Error;
use super::extent::Extent;
use crate::controller::proto::TreeMembership;
use crate::exec::Buffers;
use crate::recovery::RecoverySource;
use crate::transport::memory::{AttachParams, Places, Transfer, ZeroCopyDriver};
use crate::transport::packets::{self, CompletionInfo, EndpointError, EndpointStats, Event, OpId, TreeDriver};
use crate::wait_policy::WaitPolicy;
use std::os::fd::BorrowedFd;
use std::time::Duration;
use sumac_hal::hosted::HostedPort;
use sumac_hal::ids::{ChunkNo, Rank};
use sumac_hal::op::{OpDesc, Path};
use sumac_hal::wire::{RankMask, StragglerLimit};

/// How often a host collective polls a zero-copy tree, or one over verbs: doorbells and completions have no file
/// descriptor to wait on.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The rank's end of the tree.
#[derive(Debug)]
pub(super) enum Tree {
    Packets(Box<TreeDriver<HostedPort>>),
    ZeroCopy(Box<ZeroCopyDriver>),
}

impl Tree {
    /// Post an operation: with buffers if it runs in the tree, without to announce to the tree what runs elsewhere.
    pub(super) fn post(
        &mut self,
        desc: &OpDesc,
        path: Path,
        limit: Option<StragglerLimit>,
        buffers: Option<(&Extent, &mut Buffers<'_>)>,
    ) -> Result<(OpId, Transfer), Error> {
        match self {
            Self::Packets(driver) => match driver.endpoint_mut().post(*desc, path, limit) {
                Ok(op) => Ok((op, Transfer::Packets)),
                Err(error) => Err(self.rejected(error)),
            },
            Self::ZeroCopy(driver) => {
                let (mut places, mut lens) = (Places::default(), (0, 0));
                if let Some((extent, buffers)) = buffers {
                    let input = extent.input(buffers);
                    (places.input, lens.0) = (driver.place(input, desc), input.len());
                    let output = extent.output(buffers);
                    (places.output, lens.1) = (driver.place(output, desc), output.len());
                    places.writable = driver.whole_pages(output);
                }
                match driver.post(*desc, path, limit, places) {
                    Ok(op) => Ok((op, driver.transfer(&places, lens.0, lens.1))),
                    Err(error) => Err(self.rejected(error)),
                }
            }
        }
    }

    fn rejected(&self, error: packets::PostError) -> Error {
        match error {
            packets::PostError::Failed(error) => self.to_error(error),
            packets::PostError::TooMany { limit } => Error::TooManyInFlight { limit, waited: Duration::ZERO },
        }
    }

    /// Make progress without blocking.
    pub(super) fn pump(&mut self, buffers: &mut impl packets::Buffers) -> Option<Duration> {
        match self {
            Self::Packets(driver) => driver.pump(buffers),
            Self::ZeroCopy(driver) => driver.pump(buffers),
        }
    }

    pub(super) fn poll_event(&mut self) -> Option<Event> {
        match self {
            Self::Packets(driver) => driver.endpoint_mut().poll_event(),
            Self::ZeroCopy(driver) => driver.poll_event(),
        }
    }

    /// Block until there is something to do or `timeout` has passed. May return earlier.
    pub(super) fn wait(&mut self, timeout: Option<Duration>) {
        match self {
            Self::Packets(driver) => driver.wait(timeout),
            Self::ZeroCopy(driver) => driver.wait(timeout),
        }
    }

    pub(super) fn error(&self) -> Option<EndpointError> {
        match self {
            Self::Packets(driver) => driver.endpoint().error(),
            Self::ZeroCopy(driver) => driver.error(),
        }
    }

    /// Return whether the tree is lost because its packets are longer than this rank's path carries.
    pub(super) fn is_path_narrow(&self) -> bool {
        match self {
            Self::Packets(driver) => driver.endpoint().is_path_narrow(),
            Self::ZeroCopy(_) => false,
        }
    }

    pub(super) fn stats(&self) -> EndpointStats {
        match self {
            Self::Packets(driver) => *driver.endpoint().stats(),
            Self::ZeroCopy(driver) => *driver.stats(),
        }
    }

    /// Return the details of the completion that [`Tree::poll_event`] returned last.
    pub(super) fn completion_info(&self) -> CompletionInfo {
        match self {
            Self::Packets(driver) => driver.endpoint().completion_info(),
            Self::ZeroCopy(driver) => driver.completion_info(),
        }
    }

    /// Return the ranks that were excluded from the group.
    pub(super) fn excluded_ranks(&self) -> RankMask {
        match self {
            Self::Packets(driver) => driver.endpoint().excluded_ranks(),
            Self::ZeroCopy(driver) => driver.excluded_ranks(),
        }
    }

    /// Return whether another operation can be posted.
    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Packets(driver) => driver.endpoint().has_room(),
            Self::ZeroCopy(driver) => driver.endpoint().has_room(),
        }
    }

    /// Return the first chunk whose result this rank does not have.
    pub(super) fn have(&self) -> ChunkNo {
        match self {
            Self::Packets(driver) => driver.endpoint().have(),
            Self::ZeroCopy(driver) => driver.endpoint().have(),
        }
    }

    /// Return the chunk behind the last one that was posted.
    pub(super) fn end(&self) -> ChunkNo {
        ChunkNo(self.recovery_source().ops().end())
    }

    /// Return a file descriptor that a host collective can poll beside its own sockets.
    pub(super) fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Packets(driver) => driver.port().poll_fd(),
            Self::ZeroCopy(_) => None,
        }
    }

    /// Return when a host collective must poll the tree again, where `next` is the result of [`Tree::pump`].
    pub(super) fn next_poll_after(&self, next: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Packets(driver) if driver.port().poll_fd().is_some() => next,
            Self::Packets(_) | Self::ZeroCopy(_) => Some(next.map_or(POLL_INTERVAL, |next| next.min(POLL_INTERVAL))),
        }
    }

    /// End the group: from now on, nothing touches the buffers of operations in flight.
    pub(super) fn retire(&mut self) {
        match self {
            // Only this side copies payload from packets.
            Self::Packets(_) => {}
            Self::ZeroCopy(driver) => driver.retire(),
        }
    }

    /// End the group, and copy the results that its device has published for this rank to the rank's buffers. Nothing
    /// touches them afterwards.
    pub(super) fn salvage(&mut self, buffers: &mut impl packets::Buffers) {
        match self {
            Self::Packets(driver) => driver.endpoint_mut().close(),
            Self::ZeroCopy(driver) => driver.salvage(buffers),
        }
    }

    /// Return this rank's side of the group, as a source for recovery.
    pub(super) fn recovery_source(&self) -> &dyn RecoverySource {
        match self {
            Self::Packets(driver) => driver.endpoint(),
            Self::ZeroCopy(driver) => &**driver,
        }
    }

    /// Convert the error of the group for a caller.
    pub(super) fn to_error(&self, error: EndpointError) -> Error {
        let device = match self {
            Self::Packets(_) => "the leaf",
            Self::ZeroCopy(driver) => driver.device(),
        };
        Error::in_tree(error, device)
    }
}

/// Return the parameters to attach to the leaf device for zero-copy; `None` if this rank contributes by packets.
pub(super) fn attach_params(
    tree: &TreeMembership,
    (rank, ranks): (Rank, u32),
    (ranks_here, wait_policy): (usize, WaitPolicy),
    table_version: u32,
) -> Option<AttachParams> {
    let bus = tree.attach.as_ref()?;
    Some(AttachParams {
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
        wait_policy,
        chunk_len_bytes: tree.chunk_len_bytes,
        window_max: tree.window_max,
        table_version,
    })
}
