//! A view change step by step: the machine that ranks agree by, and what [`crate::comm`] makes of its events, without
//! connections. Messages are opaque to who carries them.

use super::super::{self as repair, Authority, Ballot, Dead, Event, Ledger, Message, View, ledger};
use super::{Chunk, Flaw, Left, chunks_of};
use crate::transport::packets::{Buffers, OpId};
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use sumac_hal::ids::Rank;
use sumac_hal::time::Instant;

/// One attempt to change a view; a later one is higher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(Ballot);

impl Attempt {
    /// Return its number, from 1.
    pub fn number(self) -> u32 {
        self.0.attempt
    }
}

/// What one rank says to another.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Said(Message<repair::Account, repair::Decision>);

/// What a rank promises with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Promise(repair::Account);

/// What all ranks that live have promised with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Promises(BTreeMap<Rank, repair::Account>);

/// Chunks that attempts have landed, beside what the tree had brought.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Landed(repair::Landed);

/// What is done in an attempt, and what it comes to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Settlement {
    /// The chunks to be moved or computed, in order.
    pub chunks: Vec<Chunk>,
    decision: repair::Decision,
}

/// What all that live have committed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// The ranks that are not part of it, in order.
    pub dead: Vec<Rank>,
    /// Operations of the tree that end here or below are complete.
    pub cut: u64,
    /// Where ranks are dead: the first call that fails at all that live, unless it had returned there.
    pub operation: u64,
    /// What all have said with [`Change::done`]; 0 if they said different things.
    pub word: u64,
}

/// How a view change ends for a rank that is out of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// Too few ranks are left, or the others go on without this one.
    Partitioned,
    /// It took too long, and nothing was committed.
    Deadline,
    /// It took too long, and others may have committed.
    Unknown,
}

/// What the driver has to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Say by [`Change::promise`] what there is. Nothing of an earlier attempt goes on.
    Promise(Attempt),
    /// Do what these promises come to, and say so by [`Change::done`] or [`Change::failed`].
    Run(Attempt, Promises),
    /// All that live are through.
    Committed(Outcome),
    /// This rank is out.
    Ended(End),
}

/// One rank's part in the change of one view.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Change(View<repair::Account, repair::Decision>);

impl Said {
    /// Return what a rank answers to this that takes no further part.
    pub fn answer_of_the_ended(&self) -> Option<Self> {
        let asks = matches!(self.0, Message::Call { .. } | Message::Prepare { .. } | Message::Promise { .. });
        asks.then_some(Self(Message::Farewell))
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |ballot: &Ballot| format!("{} of {}", ballot.attempt, ballot.coordinator);
        let out = |dead: &Dead| format!("{:?}", dead.keys().map(|rank| rank.0).collect::<Vec<_>>());
        match &self.0 {
            Message::Call { dead } => write!(f, "Call without {}", out(dead)),
            Message::Prepare { ballot, dead } => write!(f, "Prepare {} without {}", name(ballot), out(dead)),
            Message::Promise { ballot, done, .. } => {
                let done = done.as_ref().map_or("nothing".into(), |done| name(&done.ballot));
                write!(f, "Promise {}, done {done}", name(ballot))
            }
            Message::Refuse { ballot } => write!(f, "Refuse for {}", name(ballot)),
            Message::Plan { ballot, accounts, .. } => write!(f, "Plan {} for {} ranks", name(ballot), accounts.len()),
            Message::Done { ballot, word } => write!(f, "Done {} with {word}", name(ballot)),
            Message::Failed { ballot } => write!(f, "Failed {}", name(ballot)),
            Message::Commit { outcome, .. } => write!(f, "Commit {outcome:?}"),
            Message::Farewell => f.write_str("Farewell"),
            Message::Excluded => f.write_str("Excluded"),
        }
    }
}

impl Promise {
    /// Describe what is left at a rank; `first_call` is the number of the call that was posted there first.
    pub fn of<'r>(left: impl Into<Left<'r>>, landed: &Landed, first_call: u64) -> Self {
        let left = left.into();
        let remains = landed.0.over(&left);
        let ops = repair::Remains::ops(&remains);
        let calls = ops.in_flight().map(|op| (op.end(), first_call + op.id.0)).collect();
        Self::new(ledger(&remains), calls, first_call + ops.next_id().0)
    }

    /// Describe a rank that has no tree; `open` is the number of its first call that is not complete.
    pub fn without_tree(open: u64) -> Self {
        Self::new(Ledger::new(0), Vec::new(), open)
    }

    /// Tell whether a rank that has told `told` still has all of that, and nothing of its own has changed. It may read more
    /// from redo slots by now: its device goes on for others until they freeze, too.
    pub fn keeps(&self, told: &Self) -> bool {
        let (now, then) = (&self.0.ledger, &told.0.ledger);
        let is_kept = |seq: u64| {
            let ((now, _), (then, _)) = (now.class(seq), then.class(seq));
            (now.needs, now.gives) == (then.needs, then.gives) && (now.holds || !then.holds)
        };
        let same = (&self.0.calls, self.0.open) == (&told.0.calls, told.0.open) && now.ops == then.ops;
        same && (now.from, now.posted()) == (then.from, then.posted()) && (now.from..now.posted()).all(is_kept)
    }

    fn new(ledger: Ledger, calls: Vec<(u64, u64)>, open: u64) -> Self {
        // Nobody connects here.
        let address = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        Self(repair::Account { ledger, calls, open, address, trees: 0, offered: None })
    }
}

impl Promises {
    /// Collect what the ranks that live have promised with, where a caller knows itself who lives.
    pub fn of(promises: impl IntoIterator<Item = (Rank, Promise)>) -> Self {
        Self(promises.into_iter().map(|(rank, promise)| (rank, promise.0)).collect())
    }

    /// Return the ranks that live, in order.
    pub fn ranks(&self) -> Vec<Rank> {
        self.0.keys().copied().collect()
    }
}

impl Landed {
    /// Note that a chunk has landed.
    pub fn note(&mut self, seq: u64) {
        self.0.note(seq..seq + 1);
    }

    /// Return which elements of an operation's output are results by now, as an error says of them.
    pub fn fresh<'r>(&self, left: impl Into<Left<'r>>, op: OpId) -> Vec<Range<u64>> {
        repair::fresh(&self.0.over(&left.into()), op)
    }
}

impl Settlement {
    /// Work out what an attempt comes to, of `ranks` ranks, at one that has this of its tree; none has, or all have.
    ///
    /// # Errors
    /// Why nothing can be done, in words.
    pub fn of<'r>(promises: &Promises, left: Option<impl Into<Left<'r>>>, ranks: u32) -> Result<Self, String> {
        let left = left.map(Into::into);
        if let Some(left) = left {
            let lens = |desc: &_| left.chunks(desc);
            if let Some((rank, _)) = promises.0.iter().find(|(_, account)| !account.ledger.is_sound(ranks, lens)) {
                return Err(format!("the ledger of {rank} makes no sense"));
            }
        }
        let (plan, decision) = repair::decide(&promises.0, ranks);
        match (decision.failure, left) {
            (Some(why), _) => Err(why.to_string()),
            (None, Some(left)) => Ok(Self { chunks: chunks_of(&plan, &left), decision }),
            (None, None) if plan.pieces.is_empty() => Ok(Self { chunks: Vec::new(), decision }),
            (None, None) => Err("pieces of a plan without a tree".to_owned()),
        }
    }

    /// Return where the tree is cut: operations that end there or below are complete.
    pub fn cut(&self) -> u64 {
        self.decision.cut
    }

    /// Return, where ranks are dead, the first call that fails at all that live, unless it had returned there.
    pub fn operation(&self) -> u64 {
        self.decision.operation
    }
}

impl Chunk {
    /// Return what a rank gives, as [`Chunk::give`] does, of what it has with all that has landed.
    pub fn give_landed<'r>(
        &self,
        left: impl Into<Left<'r>>,
        landed: &Landed,
        rank: Rank,
        buffers: &mut dyn Buffers,
    ) -> Vec<u8> {
        self.give_of(&landed.0.over(&left.into()), rank, buffers)
    }

    /// Land the whole result, if the rank waits for it still, and note it.
    pub fn land_once<'r>(
        &self,
        left: impl Into<Left<'r>>,
        landed: &mut Landed,
        result: &[u8],
        buffers: &mut dyn Buffers,
    ) {
        repair::land(&landed.0.over(&left.into()), self.seq, result, buffers);
        landed.note(self.seq);
    }
}

impl Change {
    /// Take part, as `rank` of `ranks`, until `deadline` at most.
    pub fn new(own: (Rank, u32), has_controller: bool, deadline: Instant) -> Self {
        Self(View::new(own, Dead::new(), has_controller, deadline))
    }

    /// Break a rule from the start, to see what it is for.
    #[must_use]
    pub fn with_flaw(mut self, flaw: Option<Flaw>) -> Self {
        self.0.set_flaw(flaw);
        self
    }

    /// Forget moments: what is due after a while is due as if that while began at [`Instant::ZERO`].
    pub fn rest(&mut self) {
        self.0.forget_time();
    }

    /// Return the highest attempt that this rank takes part in.
    pub fn attempt(&self) -> Option<Attempt> {
        self.0.promised().map(Attempt)
    }

    /// The view has to change.
    pub fn begin(&mut self) {
        self.0.begin();
    }

    /// A rank is dead: by word of who knows, or because nothing is heard of it.
    pub fn rank_died(&mut self, rank: Rank, by_word: bool) {
        self.0.rank_died(rank, if by_word { Authority::Word } else { Authority::Suspicion });
    }

    /// Nobody says any more who is dead.
    pub fn controller_lost(&mut self) {
        self.0.controller_lost();
    }

    /// Take in what another rank says.
    pub fn handle(&mut self, from: Rank, said: Said, now: Instant) {
        self.0.handle(from, said.0, now);
    }

    /// Do what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.0.handle_timeout(now);
    }

    /// Return when [`Change::handle_timeout`] has something to do.
    pub fn poll_timeout(&self) -> Instant {
        self.0.poll_timeout()
    }

    /// Return what is to be said to whom next.
    pub fn poll_transmit(&mut self) -> Option<(Rank, Said)> {
        self.0.poll_transmit().map(|(to, message)| (to, Said(message)))
    }

    /// Return what is to be done next.
    pub fn poll_step(&mut self) -> Option<Step> {
        self.0.poll_event().map(|event| match event {
            Event::Promise { ballot } => Step::Promise(Attempt(ballot)),
            Event::Run { ballot, accounts } => Step::Run(Attempt(ballot), Promises(accounts)),
            Event::Committed(repair::Outcome { dead, decision, word }) => {
                Step::Committed(Outcome { dead, cut: decision.cut, operation: decision.operation, word })
            }
            Event::Ended(repair::End::Partitioned) => Step::Ended(End::Partitioned),
            Event::Ended(repair::End::Deadline) => Step::Ended(End::Deadline),
            Event::Ended(repair::End::Unknown) => Step::Ended(End::Unknown),
        })
    }

    /// The answer to [`Step::Promise`].
    pub fn promise(&mut self, attempt: Attempt, promise: Promise) {
        self.0.promise(attempt.0, promise.0);
    }

    /// An attempt's plan is done here; `word` is whatever ranks have to have in common.
    pub fn done(&mut self, attempt: Attempt, settlement: &Settlement, word: u64) {
        self.0.done(attempt.0, settlement.decision.clone(), word);
    }

    /// An attempt's plan came to nothing here.
    pub fn failed(&mut self, attempt: Attempt, now: Instant) {
        self.0.failed(attempt.0, now);
    }
}
