//! One function of a device: serves a rank's rings between shared memory and the [`Node`].
//!
//! ```text
//! rank ---- submission rings ----> poll ---- Node::submit --------> node
//!   ^                                |
//!   |                                '------ Mappings: how the board maps a rank's memory
//!   '------ completion rings ---- publish <--- queue <-- Node::poll_answer
//! ```
//!
//! The board decides where the rings are, how it learns of new submissions, how it wakes a rank, and what a memory
//! handle means ([`Mappings`]): a file descriptor that the rank passed, or an offset in memory that both sides share.
//!
//! Invariants:
//! - the work of each call and the state kept for a rank are bounded, whatever the rank submits or leaves unread;
//! - memory is mapped once it fits the rank's share, and unmapped after its last use was released;
//! - unanswered chunks never exceed the completion ring, so every answer has room.

mod board;

pub use board::{Backlog, Mappings};

use crate::Node;
use heapless::{Deque, Vec};
use sumac_hal::dma::{RegionError, RegionKey, RegionTable, RegisterError};
use sumac_hal::ids::{ChunkNo, Epoch, FunctionId, GroupId};
use sumac_hal::mmio::{
    AdminCommand, COMPLETION_WORDS, CompletionEntry, Contribution, EntryError, EntryStatus, SUBMISSION_WORDS,
    SubmissionEntry,
};
use sumac_hal::ring::{Consumer, Memory, Poisoned, Producer};
use sumac_hal::time::Instant;
use sumac_hal::wire::pack_op;
use thiserror::Error;

/// Entries taken from one ring before other rings get their turn.
const ENTRIES_PER_TURN: usize = 64;

/// Maximum number of unanswered commands. It exceeds the number of regions per rank, so that a fence has room behind
/// the deregistration of all of them.
const COMMANDS_MAX: usize = 288;

/// An error after which a function must be closed: the rank broke the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// The rank corrupted a ring.
    #[error(transparent)]
    Ring(#[from] Poisoned),
    /// Malformed entry.
    #[error("{0}")]
    Entry(#[from] EntryError),
    /// An entry of the wrong kind for its queue.
    #[error("wrong queue: contributions go to the data queue, commands to the admin queue")]
    Queue,
    /// The rank does not consume its completions, and there is no room for more.
    #[error("completion backlog is full: {0} completions wait for the rank to consume its ring")]
    Backlog(usize),
}

/// The device's ends of a queue.
#[derive(Debug)]
struct DeviceQueue<S, C, B> {
    submissions: Consumer<S, SUBMISSION_WORDS>,
    completions: Producer<C, COMPLETION_WORDS>,
    /// Completions to publish.
    pending: B,
    /// Chunks answered so far, modulo 2^32.
    answered: u32,
}

/// Completions were published on a queue: tells the board whether to wake the rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notification {
    /// The queue; 0 is the admin queue.
    pub queue: u32,
    /// Chunks answered on it so far, modulo 2^32. Compare with the count up to which the rank wants to sleep
    /// ([`WakeThreshold`](sumac_hal::ring::WakeThreshold)).
    pub answered: u32,
    /// Wake the rank whatever count it waits for.
    pub urgent: bool,
}

impl<S: Memory<SUBMISSION_WORDS>, C: Memory<COMPLETION_WORDS>, B: Backlog> DeviceQueue<S, C, B> {
    fn new(submissions: S, completions: C, pending: B) -> Self {
        let (submissions, completions) = (Consumer::new(submissions), Producer::new(completions));
        Self { submissions, completions, pending, answered: 0 }
    }

    /// Publish as many completions as the ring has room for; `None` if that is none.
    fn publish(&mut self, queue: u32) -> Result<Option<Notification>, Poisoned> {
        let (mut published, mut urgent) = (false, false);
        while let Some(entry) = self.pending.first() {
            if !self.completions.push(&entry.emit())? {
                break;
            }
            let is_success =
                matches!(entry, CompletionEntry::Answer { status: EntryStatus::Result | EntryStatus::Done, .. });
            if let CompletionEntry::Answer { count, .. } = entry {
                self.answered = self.answered.wrapping_add(u32::from(*count));
            }
            urgent |= !is_success;
            self.pending.pop();
            published = true;
        }
        Ok(published.then_some(Notification { queue, answered: self.answered, urgent }))
    }

    fn has_submissions(&mut self) -> bool {
        self.submissions.available() != Ok(0)
    }
}

/// A command that completes later.
#[derive(Debug, Clone, Copy)]
enum PendingCommand {
    Deregister { cookie: u64, key: RegionKey },
    Fence { cookie: u64, group: GroupId },
}

/// The rings of one rank, and the commands and chunks in progress.
#[derive(Debug)]
pub struct Function<S, C, B> {
    id: FunctionId,
    admin: DeviceQueue<S, C, Deque<CompletionEntry, COMMANDS_MAX>>,
    data: DeviceQueue<S, C, B>,
    pending_commands: Vec<PendingCommand, COMMANDS_MAX>,
    /// A contribution that the node's window does not admit yet.
    parked: Option<Contribution>,
    /// Chunks taken and not answered.
    outstanding: u32,
    /// A completion found no room; the function is closed.
    has_overflowed: bool,
}

impl<S: Memory<SUBMISSION_WORDS>, C: Memory<COMPLETION_WORDS>, B: Backlog> Function<S, C, B> {
    /// Serve a fresh admin queue and data queue, each as (submissions, completions). `backlog` holds completions of the
    /// data queue while its ring is full.
    pub fn new(id: FunctionId, admin: (S, C), data: (S, C), backlog: B) -> Self {
        Self {
            id,
            admin: DeviceQueue::new(admin.0, admin.1, Deque::new()),
            data: DeviceQueue::new(data.0, data.1, backlog),
            pending_commands: Vec::new(),
            parked: None,
            outstanding: 0,
            has_overflowed: false,
        }
    }

    /// Return the function's id.
    pub const fn id(&self) -> FunctionId {
        self.id
    }

    /// Return how many chunks were taken and not answered yet.
    pub const fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Take submissions, as far as the node and the rings have room. Returns true if there were any.
    ///
    /// # Errors
    /// The rank broke the contract of its rings, or `mappings` failed: close the function.
    pub fn poll_submissions<M: Mappings, const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        mappings: &mut M,
        now: Instant,
    ) -> Result<bool, M::Error> {
        let commands = self.take_commands(node, regions, mappings)?;
        Ok(self.take_contributions(node, regions, now)? || commands)
    }

    fn take_commands<M: Mappings, const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        mappings: &mut M,
    ) -> Result<bool, M::Error> {
        let mut taken = false;
        for _ in 0..ENTRIES_PER_TURN {
            if !self.has_command_room() {
                break;
            }
            let Some(words) = self.admin.submissions.pop().map_err(FunctionError::from)? else { break };
            let SubmissionEntry::Admin { cookie, command } =
                SubmissionEntry::parse(&words).map_err(FunctionError::from)?
            else {
                return Err(FunctionError::Queue.into());
            };
            taken = true;
            if let Some((status, value)) = self.execute(cookie, command, node, regions, mappings)? {
                self.reply(status, cookie, value);
            }
        }
        Ok(taken)
    }

    fn take_contributions<const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        now: Instant,
    ) -> Result<bool, FunctionError> {
        let mut taken = false;
        for _ in 0..ENTRIES_PER_TURN {
            let entry = match self.parked.take() {
                Some(entry) => entry,
                None => match self.data.submissions.pop()? {
                    None => break,
                    Some(words) => match SubmissionEntry::parse(&words)? {
                        SubmissionEntry::Contribution(entry) => entry,
                        SubmissionEntry::Limit(limit) => {
                            node.announce(self.id, &limit);
                            taken = true;
                            continue;
                        }
                        _ => return Err(FunctionError::Queue),
                    },
                },
            };
            if !self.submit(entry, node, regions, now) {
                break;
            }
            taken = true;
        }
        Ok(taken)
    }

    /// Return whether another command's completion has room. A rank that consumes no completions gets no more commands
    /// in.
    fn has_command_room(&self) -> bool {
        let places = COMMANDS_MAX.min(self.admin.completions.capacity() as usize);
        self.admin.pending.iter().len() + self.pending_commands.len() < places
    }

    /// Submit a contribution to the node; false if it has to wait.
    fn submit<const N: usize>(
        &mut self,
        entry: Contribution,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        now: Instant,
    ) -> bool {
        let places = self.data.completions.capacity() as usize;
        // One completion per chunk, and one that may name a failure. A rank that consumes none gets nothing more in.
        if self.outstanding as usize + self.data.pending.len() + usize::from(entry.count) + 1 > places {
            self.parked = Some(entry);
            return false;
        }
        match node.submit(self.id, &entry, regions, now) {
            Ok(()) => {
                self.outstanding += u32::from(entry.count);
                true
            }
            Err(EntryStatus::Window) => {
                self.parked = Some(entry);
                false
            }
            Err(status) => {
                let Contribution { group, epoch, seq, count, .. } = entry;
                let (window, stable, slowest) = (0, ChunkNo(0), None);
                let answer = CompletionEntry::Answer { status, group, epoch, seq, count, window, stable, slowest };
                self.outstanding += u32::from(count);
                self.queue_answer(answer);
                true
            }
        }
    }

    /// Execute a command; `None` if its completion comes later.
    fn execute<M: Mappings, const N: usize>(
        &mut self,
        cookie: u64,
        command: AdminCommand,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        mappings: &mut M,
    ) -> Result<Option<(EntryStatus, u64)>, M::Error> {
        Ok(match command {
            AdminCommand::Register { handle, offset_bytes, len_bytes } => {
                Some(match self.register(handle, (offset_bytes, len_bytes), regions, mappings)? {
                    Ok(key) => (EntryStatus::Result, key.to_bits()),
                    Err(status) => (status, 0),
                })
            }
            AdminCommand::Deregister { region } => match regions.deregister(self.id, region) {
                Ok(gone) => {
                    // Unmap now: the key's slot may be reused before this command completes.
                    if gone {
                        mappings.unmap(region);
                    }
                    self.defer(PendingCommand::Deregister { cookie, key: region });
                    None
                }
                Err(RegionError::Stale { .. }) => Some((EntryStatus::StaleRegion, 0)),
                Err(_) => Some((EntryStatus::BadRegion, 0)),
            },
            AdminCommand::Fence { group, epoch } => self.fence(cookie, (group, epoch), node),
            // A command of a later protocol version.
            _ => Some((EntryStatus::Malformed, 0)),
        })
    }

    /// Map the memory that the rank named by `handle` and register it, or return the status to complete the command
    /// with.
    ///
    /// # Errors
    /// `mappings` failed: close the function.
    pub fn register<M: Mappings, const N: usize>(
        &mut self,
        handle: u64,
        (offset_bytes, len_bytes): (u64, u64),
        regions: &mut RegionTable<N>,
        mappings: &mut M,
    ) -> Result<Result<RegionKey, EntryStatus>, M::Error> {
        let memory = match mappings.find(handle)? {
            Ok(memory) => memory,
            Err(status) => return Ok(Err(status)),
        };
        let key = match regions.register(self.id, len_bytes) {
            Ok(key) => key,
            Err(RegisterError::Empty) => return Ok(Err(EntryStatus::OutOfBounds)),
            Err(RegisterError::ByteQuota { .. }) => return Ok(Err(EntryStatus::Quota)),
            Err(_) => return Ok(Err(EntryStatus::NoResources)),
        };
        if let Err(status) = mappings.map(key, memory, offset_bytes, len_bytes) {
            // Nothing has used the key yet.
            let _ = regions.deregister(self.id, key);
            return Ok(Err(status));
        }
        Ok(Ok(key))
    }

    /// Release the rank's memory in a group. Completes at once for a group that no longer exists, as nothing touches
    /// the memory then.
    fn fence(
        &mut self,
        cookie: u64,
        (group, epoch): (GroupId, Epoch),
        node: &mut Node<'_>,
    ) -> Option<(EntryStatus, u64)> {
        let known = node.withdraw(group, epoch, self.id) || node.has_unanswered(group, self.id);
        if !known && node.has_group(group) {
            return Some((EntryStatus::UnknownGroup, 0));
        }
        self.defer(PendingCommand::Fence { cookie, group });
        None
    }

    fn defer(&mut self, command: PendingCommand) {
        // `has_command_room` guarantees room.
        self.has_overflowed |= self.pending_commands.push(command).is_err();
    }

    /// Complete the commands that no longer wait for anything.
    pub fn complete_commands<M: Mappings, const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &RegionTable<N>,
        mappings: &mut M,
    ) {
        let mut at = 0;
        while let Some(&waiting) = self.pending_commands.get(at) {
            let (waits, cookie) = match waiting {
                PendingCommand::Deregister { cookie, key } => (regions.contains(key), cookie),
                PendingCommand::Fence { cookie, group } => (node.has_unanswered(group, self.id), cookie),
            };
            if waits {
                at += 1;
                continue;
            }
            self.pending_commands.remove(at);
            if let PendingCommand::Deregister { key, .. } = waiting {
                mappings.unmap(key);
            }
            self.reply(EntryStatus::Result, cookie, 0);
        }
    }

    fn reply(&mut self, status: EntryStatus, cookie: u64, value: u64) {
        self.has_overflowed |= !self.admin.pending.push(CompletionEntry::Admin { status, cookie, value });
    }

    /// Return whether an answer can be merged into the previous one.
    fn continues(&mut self, entry: &CompletionEntry) -> bool {
        let (
            Some(&mut CompletionEntry::Answer { status: last, seq: first, count: many, .. }),
            // An entry that names a rank starts an operation and stands alone.
            &CompletionEntry::Answer { status, seq, count, slowest: None, .. },
        ) = (self.data.pending.last_mut(), entry)
        else {
            return false;
        };
        let follows = first.0.checked_add(many.into()) == Some(seq.0);
        last == status && follows && many.checked_add(count).is_some()
    }

    /// Queue a completion for the rank. Consecutive answers are merged.
    fn queue_answer(&mut self, entry: CompletionEntry) {
        if let CompletionEntry::Answer { count, .. } = entry {
            self.outstanding -= u32::from(count);
        }
        if self.continues(&entry)
            && let (
                Some(CompletionEntry::Answer { count: many, window, stable, .. }),
                CompletionEntry::Answer { count, window: now, stable: newest, .. },
            ) = (self.data.pending.last_mut(), entry)
        {
            // `continues` has checked the sum.
            (*many, *window, *stable) = (many.saturating_add(count), now, newest);
            return;
        }
        self.has_overflowed |= !self.data.pending.push(entry);
    }

    /// Publish pending completions and call `notify` once for each queue that got any. Returns true if there were any.
    ///
    /// # Errors
    /// The rank broke the contract of its rings, or consumes no completions: close the function.
    pub fn publish(&mut self, notify: impl FnMut(Notification)) -> Result<bool, FunctionError> {
        let published = [self.admin.publish(0)?, self.data.publish(1)?];
        let any = published.iter().any(Option::is_some);
        published.into_iter().flatten().for_each(notify);
        if self.has_overflowed { Err(FunctionError::Backlog(self.data.pending.len())) } else { Ok(any) }
    }

    /// Return whether its rings hold submissions that can be taken.
    pub fn has_work(&mut self) -> bool {
        self.has_command_room() && self.admin.has_submissions() || self.parked.is_none() && self.data.has_submissions()
    }

    /// Return whether completions wait for room in its rings.
    pub fn has_backlog(&self) -> bool {
        !self.admin.pending.is_empty() || !self.data.pending.is_empty()
    }
}

/// Move the node's answers to the functions that they are for. Returns true if there were any.
pub fn dispatch_answers<S, C, B, F, const N: usize>(
    node: &mut Node<'_>,
    regions: &mut RegionTable<N>,
    functions: &mut [F],
) -> bool
where
    S: Memory<SUBMISSION_WORDS>,
    C: Memory<COMPLETION_WORDS>,
    B: Backlog,
    F: AsMut<Function<S, C, B>>,
{
    let mut any = false;
    while let Some(answer) = node.poll_answer(regions) {
        any = true;
        // Answers of closed functions are dropped.
        let Some(function) = functions.iter_mut().map(AsMut::as_mut).find(|function| function.id == answer.function)
        else {
            continue;
        };
        // Consecutive answers of a failed group share the same details.
        if !function.continues(&answer.entry) {
            if let Some((first, other)) = answer.operations {
                function.queue_answer(CompletionEntry::Operations { first: pack_op(&first), other: pack_op(&other) });
            }
            if let (Some(missing), CompletionEntry::Answer { seq, .. }) = (answer.missing, answer.entry) {
                CompletionEntry::missing(0, seq, &missing).into_iter().for_each(|half| function.queue_answer(half));
            }
        }
        function.queue_answer(answer.entry);
    }
    any
}
