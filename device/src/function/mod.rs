//! One function of a device: a rank's rings, and what they bring to the node and back.
//!
//! ```text
//! rank ---- submission rings ----> take ---- Node::submit --------> node
//!   ^                                |
//!   |                                '------ Mappings: what the board reaches a rank's memory by
//!   '------ completion rings ---- publish <--- tell <--- Node::poll_answer
//! ```
//!
//! Where the rings lie, who hears that something is in them and what wakes a rank is the board's. What a rank calls its
//! memory by is the board's too ([`Mappings`]): a file that it was handed, or a place in memory that both have.
//!
//! Invariants:
//! - what a rank makes a call do is bounded, and so is what is kept for it, whatever it sends and leaves unread;
//! - memory is mapped once the rank's share has room for it, and unmapped when its last use has been released;
//! - chunks taken and not answered never exceed the completion ring, so that an answer always has its place.

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

/// Entries taken from a ring before others get their turn.
const ENTRIES_PER_TURN: usize = 64;

/// Commands taken and not answered: more than the regions that a board gives to a rank, so that a fence finds room behind
/// the deregistration of all of them.
const COMMANDS_MAX: usize = 288;

/// Why a function is at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FunctionEnd {
    /// The rank has broken a ring.
    #[error(transparent)]
    Ring(#[from] Poisoned),
    /// It submits what is none.
    #[error("{0}")]
    Entry(#[from] EntryError),
    /// It submits on a queue what that does not take.
    #[error("an entry on a queue that does not take it")]
    Queue,
    /// It takes no answers out, and there is no room for more.
    #[error("{0} answers wait for the rank to take them out of its ring")]
    Backlog(usize),
}

/// The ends of a queue that the device holds.
#[derive(Debug)]
struct Ends<S, C, B> {
    submissions: Consumer<S, SUBMISSION_WORDS>,
    completions: Producer<C, COMPLETION_WORDS>,
    /// What is to be published.
    pending: B,
    /// Chunks answered, modulo 2^32.
    answered: u32,
}

/// What was published on a queue, for whoever wakes the rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// The queue: 0 is the admin queue.
    pub queue: u32,
    /// How many chunks were ever answered on it, modulo 2^32: a rank says how far it wants to sleep
    /// ([`Wanted`](sumac_hal::ring::Wanted)).
    pub answered: u32,
    /// It is to be woken however far that is.
    pub urgent: bool,
}

impl<S: Memory<SUBMISSION_WORDS>, C: Memory<COMPLETION_WORDS>, B: Backlog> Ends<S, C, B> {
    fn new(submissions: S, completions: C, pending: B) -> Self {
        let (submissions, completions) = (Consumer::new(submissions), Producer::new(completions));
        Self { submissions, completions, pending, answered: 0 }
    }

    /// Publish what there is room for. `None` if that was nothing.
    fn publish(&mut self, queue: u32) -> Result<Option<Told>, Poisoned> {
        let (mut told, mut urgent) = (false, false);
        while let Some(entry) = self.pending.first() {
            if !self.completions.push(&entry.emit())? {
                break;
            }
            let landed =
                matches!(entry, CompletionEntry::Answer { status: EntryStatus::Result | EntryStatus::Done, .. });
            if let CompletionEntry::Answer { count, .. } = entry {
                self.answered = self.answered.wrapping_add(u32::from(*count));
            }
            urgent |= !landed;
            self.pending.pop();
            told = true;
        }
        Ok(told.then_some(Told { queue, answered: self.answered, urgent }))
    }

    fn has_submissions(&mut self) -> bool {
        self.submissions.available() != Ok(0)
    }
}

/// A command that waits for something.
#[derive(Debug, Clone, Copy)]
enum Waiting {
    Deregister { cookie: u64, key: RegionKey },
    Fence { cookie: u64, group: GroupId },
}

/// A rank's rings.
#[derive(Debug)]
pub struct Function<S, C, B> {
    id: FunctionId,
    admin: Ends<S, C, Deque<CompletionEntry, COMMANDS_MAX>>,
    data: Ends<S, C, B>,
    waiting: Vec<Waiting, COMMANDS_MAX>,
    /// What the node's window does not let in yet.
    parked: Option<Contribution>,
    /// Chunks taken and not answered.
    owed: u32,
    /// An answer found no room.
    is_over: bool,
}

impl<S: Memory<SUBMISSION_WORDS>, C: Memory<COMPLETION_WORDS>, B: Backlog> Function<S, C, B> {
    /// Serve the rings of an admin queue and a data queue that nobody has used; `backlog` keeps answers of the second.
    pub fn new(id: FunctionId, admin: (S, C), data: (S, C), backlog: B) -> Self {
        Self {
            id,
            admin: Ends::new(admin.0, admin.1, Deque::new()),
            data: Ends::new(data.0, data.1, backlog),
            waiting: Vec::new(),
            parked: None,
            owed: 0,
            is_over: false,
        }
    }

    /// Return whose it is.
    pub const fn id(&self) -> FunctionId {
        self.id
    }

    /// Return how many chunks were taken and not answered.
    pub const fn owed(&self) -> u32 {
        self.owed
    }

    /// Take what was submitted, as far as it can be; true if there was something.
    ///
    /// # Errors
    /// Why the rank is at its end.
    pub fn take<M: Mappings, const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        mappings: &mut M,
        now: Instant,
    ) -> Result<bool, M::End> {
        let commands = self.take_commands(node, regions, mappings)?;
        Ok(self.take_contributions(node, regions, now)? || commands)
    }

    fn take_commands<M: Mappings, const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        mappings: &mut M,
    ) -> Result<bool, M::End> {
        let mut taken = false;
        for _ in 0..ENTRIES_PER_TURN {
            if !self.takes_commands() {
                break;
            }
            let Some(words) = self.admin.submissions.pop().map_err(FunctionEnd::from)? else { break };
            let SubmissionEntry::Admin { cookie, command } =
                SubmissionEntry::parse(&words).map_err(FunctionEnd::from)?
            else {
                return Err(FunctionEnd::Queue.into());
            };
            taken = true;
            if let Some((status, value)) = self.carry_out(cookie, command, node, regions, mappings)? {
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
    ) -> Result<bool, FunctionEnd> {
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
                        _ => return Err(FunctionEnd::Queue),
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

    /// Tell whether there is a place for another command's answer. A rank that takes none out gets none in.
    fn takes_commands(&self) -> bool {
        let places = COMMANDS_MAX.min(self.admin.completions.capacity() as usize);
        self.admin.pending.iter().len() + self.waiting.len() < places
    }

    /// Hand an entry to the node; false if it has to wait.
    fn submit<const N: usize>(
        &mut self,
        entry: Contribution,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        now: Instant,
    ) -> bool {
        let places = self.data.completions.capacity() as usize;
        // One for each chunk, and one for what a failure names. A rank that takes nothing out gets nothing more in.
        if self.owed as usize + self.data.pending.len() + usize::from(entry.count) + 1 > places {
            self.parked = Some(entry);
            return false;
        }
        match node.submit(self.id, &entry, regions, now) {
            Ok(()) => {
                self.owed += u32::from(entry.count);
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
                self.owed += u32::from(count);
                self.tell(answer);
                true
            }
        }
    }

    /// Carry a command out; `None` if its answer has to wait.
    fn carry_out<M: Mappings, const N: usize>(
        &mut self,
        cookie: u64,
        command: AdminCommand,
        node: &mut Node<'_>,
        regions: &mut RegionTable<N>,
        mappings: &mut M,
    ) -> Result<Option<(EntryStatus, u64)>, M::End> {
        Ok(match command {
            AdminCommand::Register { handle, offset_bytes, len_bytes } => {
                Some(match self.register(handle, (offset_bytes, len_bytes), regions, mappings)? {
                    Ok(key) => (EntryStatus::Result, key.to_bits()),
                    Err(status) => (status, 0),
                })
            }
            AdminCommand::Deregister { region } => match regions.deregister(self.id, region) {
                Ok(gone) => {
                    // Its place may be given to the next one before this one's answer is out.
                    if gone {
                        mappings.unmap(region);
                    }
                    self.wait_for(Waiting::Deregister { cookie, key: region });
                    None
                }
                Err(RegionError::Stale { .. }) => Some((EntryStatus::StaleRegion, 0)),
                Err(_) => Some((EntryStatus::BadRegion, 0)),
            },
            AdminCommand::Fence { group, epoch } => self.fence(cookie, (group, epoch), node),
            // A command of a later version.
            _ => Some((EntryStatus::Malformed, 0)),
        })
    }

    /// Map what the rank calls by a handle, and register it; or the status that refuses it.
    ///
    /// # Errors
    /// Why the rank is at its end.
    pub fn register<M: Mappings, const N: usize>(
        &mut self,
        handle: u64,
        (offset_bytes, len_bytes): (u64, u64),
        regions: &mut RegionTable<N>,
        mappings: &mut M,
    ) -> Result<Result<RegionKey, EntryStatus>, M::End> {
        let memory = match mappings.find(handle)? {
            Ok(memory) => memory,
            Err(status) => return Ok(Err(status)),
        };
        let key = match regions.register(self.id, len_bytes) {
            Ok(key) => key,
            Err(RegisterError::Empty) => return Ok(Err(EntryStatus::OutOfBounds)),
            Err(RegisterError::ShareBytes { .. }) => return Ok(Err(EntryStatus::Quota)),
            Err(_) => return Ok(Err(EntryStatus::NoRoom)),
        };
        if let Err(status) = mappings.map(key, memory, offset_bytes, len_bytes) {
            // Nobody has used it.
            let _ = regions.deregister(self.id, key);
            return Ok(Err(status));
        }
        Ok(Ok(key))
    }

    /// Let go of the rank's memory in a group. One that is gone touches nothing.
    fn fence(
        &mut self,
        cookie: u64,
        (group, epoch): (GroupId, Epoch),
        node: &mut Node<'_>,
    ) -> Option<(EntryStatus, u64)> {
        let known = node.withdraw(group, epoch, self.id) || node.holds(group, self.id);
        if !known && node.has_group(group) {
            return Some((EntryStatus::UnknownGroup, 0));
        }
        self.wait_for(Waiting::Fence { cookie, group });
        None
    }

    fn wait_for(&mut self, command: Waiting) {
        // `takes_commands` has seen to it that there is room.
        self.is_over |= self.waiting.push(command).is_err();
    }

    /// Answer the commands whose time has come.
    pub fn finish<M: Mappings, const N: usize>(
        &mut self,
        node: &mut Node<'_>,
        regions: &RegionTable<N>,
        mappings: &mut M,
    ) {
        let mut at = 0;
        while let Some(&waiting) = self.waiting.get(at) {
            let (waits, cookie) = match waiting {
                Waiting::Deregister { cookie, key } => (regions.contains(key), cookie),
                Waiting::Fence { cookie, group } => (node.holds(group, self.id), cookie),
            };
            if waits {
                at += 1;
                continue;
            }
            self.waiting.remove(at);
            if let Waiting::Deregister { key, .. } = waiting {
                mappings.unmap(key);
            }
            self.reply(EntryStatus::Result, cookie, 0);
        }
    }

    fn reply(&mut self, status: EntryStatus, cookie: u64, value: u64) {
        self.is_over |= !self.admin.pending.push(CompletionEntry::Admin { status, cookie, value });
    }

    /// Tell whether an answer is to become part of the one before it.
    fn continues(&mut self, entry: &CompletionEntry) -> bool {
        let (
            Some(&mut CompletionEntry::Answer { status: last, seq: first, count: many, .. }),
            // What names a rank begins an operation, and speaks of that alone.
            &CompletionEntry::Answer { status, seq, count, slowest: None, .. },
        ) = (self.data.pending.last_mut(), entry)
        else {
            return false;
        };
        let follows = first.0.checked_add(many.into()) == Some(seq.0);
        last == status && follows && many.checked_add(count).is_some()
    }

    /// Note an entry for the rank; answers in a row become one.
    fn tell(&mut self, entry: CompletionEntry) {
        if let CompletionEntry::Answer { count, .. } = entry {
            self.owed -= u32::from(count);
        }
        if self.continues(&entry)
            && let (
                Some(CompletionEntry::Answer { count: many, window, stable, .. }),
                CompletionEntry::Answer { count, window: now, stable: newest, .. },
            ) = (self.data.pending.last_mut(), entry)
        {
            // `continues` has seen that it fits.
            (*many, *window, *stable) = (many.saturating_add(count), now, newest);
            return;
        }
        self.is_over |= !self.data.pending.push(entry);
    }

    /// Publish what is to be told, and say so for each queue; true if something was.
    ///
    /// # Errors
    /// [`FunctionEnd`].
    pub fn publish(&mut self, told: impl FnMut(Told)) -> Result<bool, FunctionEnd> {
        let published = [self.admin.publish(0)?, self.data.publish(1)?];
        let any = published.iter().any(Option::is_some);
        published.into_iter().flatten().for_each(told);
        if self.is_over { Err(FunctionEnd::Backlog(self.data.pending.len())) } else { Ok(any) }
    }

    /// Tell whether its rings hold something that may be taken.
    pub fn has_news(&mut self) -> bool {
        self.takes_commands() && self.admin.has_submissions() || self.parked.is_none() && self.data.has_submissions()
    }

    /// Tell whether something waits for a place in its rings.
    pub fn is_full(&self) -> bool {
        !self.admin.pending.is_empty() || !self.data.pending.is_empty()
    }
}

/// Hand the node's answers to the functions that they are for; true if there were any.
pub fn hand_out<S, C, B, F, const N: usize>(
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
        // Nobody hears the answers of those that are gone.
        let Some(function) = functions.iter_mut().map(AsMut::as_mut).find(|function| function.id == answer.function)
        else {
            continue;
        };
        // What the answers of a failed group speak of is the same for all in a row.
        if !function.continues(&answer.entry) {
            if let Some((first, other)) = answer.operations {
                function.tell(CompletionEntry::Operations { first: pack_op(&first), other: pack_op(&other) });
            }
            if let (Some(missing), CompletionEntry::Answer { seq, .. }) = (answer.missing, answer.entry) {
                CompletionEntry::missing(0, seq, &missing).into_iter().for_each(|half| function.tell(half));
            }
        }
        function.tell(answer.entry);
    }
    any
}
