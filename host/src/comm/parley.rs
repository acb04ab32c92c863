//! What ranks say to each other about their view, kept for whoever changes it ([`super::change`]), be it a call or a
//! thread; and the answers to ranks that are behind, which need neither.
//!
//! Views are numbered; every message names the one that it would change. One of a later view waits: its sender has heard
//! of a commit that is still on its way here. To one of the view before, the answer is how that one was changed.
//!
//! Beside views, ranks ask here which results all of them have, when they leave ([`super::leave`]): rank 0 asks those
//! whom it does not know of, and says so to all that want to know. Each answers without asking anybody.

use crate::exec::JobToken;
use crate::exec::notes::{Heard, Notes, Sender};
use crate::recovery::{Account, Authority, Dead, Decision, Message};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, VecDeque};
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use sumac_hal::ids::Rank;

/// What one rank says to another about a view.
pub(super) type Said = Message<Account, Decision>;

/// The rank that knows which results all ranks have.
const COORDINATOR: Rank = Rank(0);

/// How soon rank 0 asks a rank again.
const ASK_AGAIN: Duration = Duration::from_millis(15);

/// Up to where a rank has results: below a chunk of the tree that it has come to, and everything of trees before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Landed(u64);

impl Landed {
    /// Below chunk `seq` in the tree of `view`, both far below what is kept of them: 2^20 trees, 2^44 chunks.
    pub(super) const fn new(view: u32, seq: u64) -> Self {
        Self((view as u64) << 44 | seq & ((1 << 44) - 1))
    }
}

/// What one rank sends another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Note<S> {
    /// About a view.
    View(u64, S),
    /// To rank 0: the sender leaves when all ranks have as much as it has.
    Leaves(Landed),
    /// From rank 0: what do you have?
    Ask,
    /// The answer.
    Has(Landed),
    /// From rank 0: all ranks have that.
    Stable(Landed),
}

/// What rank 0 knows of the results that ranks have.
#[derive(Debug)]
struct Known {
    has: Vec<Landed>,
    asked: Vec<Option<Instant>>,
    /// Who has to be told.
    leaves: BTreeSet<Rank>,
}

/// The longest account of one rank that is taken: its ledger is runs of chunks, not chunks.
const ACCOUNT_MAX_BYTES: usize = 1 << 20;

/// Messages of a rank that wait.
const WAITING_MAX: usize = 16;

/// Something for whoever changes the view.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Mail {
    Said(Rank, Box<Said>),
    /// Nobody listens there any more.
    Gone(Rank),
    /// It does not answer.
    Silent(Rank),
}

/// What came and was not taken, and what is answered without asking anybody.
#[derive(Debug)]
struct Desk {
    /// The view.
    epoch: u64,
    mail: VecDeque<(u64, Mail)>,
    /// How the view before was changed: to the ranks that are not dead to this one.
    settled: Option<(Dead, Said)>,
    /// This rank takes no further part.
    is_over: bool,
    /// It waits until it can go: that others have gone is no death.
    is_leaving: bool,
    is_coordinator_gone: bool,
    /// What all ranks have.
    stable: Landed,
    /// Rank 0's alone.
    known: Known,
    ranks: usize,
}

impl Desk {
    fn new(ranks: usize) -> Self {
        Self {
            epoch: 0,
            mail: VecDeque::new(),
            settled: None,
            is_over: false,
            is_leaving: false,
            is_coordinator_gone: false,
            stable: Landed::new(0, 0),
            known: Known { has: vec![Landed::new(0, 0); ranks], asked: vec![None; ranks], leaves: BTreeSet::new() },
            ranks,
        }
    }

    /// Rank 0 has heard what a rank has; `own` is what itself has. Returns whom to tell what.
    fn learn(&mut self, from: Rank, has: Landed, own: Landed) -> Vec<(Rank, Landed)> {
        let own = (COORDINATOR, own);
        for (rank, landed) in [(from, has), own] {
            if let Some(known) = self.known.has.get_mut(rank.0 as usize) {
                *known = landed.max(*known);
            }
        }
        let stable = self.known.has.iter().copied().min().unwrap_or(own.1);
        if stable <= self.stable {
            return Vec::new();
        }
        self.stable = stable;
        self.known.leaves.iter().map(|&rank| (rank, stable)).collect()
    }

    /// Return whom rank 0 has to ask to find out whether all have as much as that.
    fn ranks_to_ask(&mut self, wanted: Landed, now: Instant) -> Vec<Rank> {
        let Known { has, asked, .. } = &mut self.known;
        let ranks = (0_u32..).zip(has.iter().zip(asked)).skip(1);
        let due = ranks.filter(|(_, (has, asked))| {
            **has < wanted && asked.is_none_or(|at| now.saturating_duration_since(at) >= ASK_AGAIN)
        });
        due.map(|(rank, (_, asked))| {
            *asked = Some(now);
            Rank(rank)
        })
        .collect()
    }
}

/// The desk, and who waits for mail.
#[derive(Debug)]
pub(super) struct Inbox {
    desk: Mutex<Desk>,
    changed: Condvar,
    sender: OnceLock<Arc<Sender>>,
    own: Rank,
    /// The rank behind this one.
    next: Rank,
    /// What this rank has.
    landed: AtomicU64,
}

impl Inbox {
    fn new(own: Rank, ranks: usize) -> Self {
        let next = Rank((own.0 + 1) % ranks as u32);
        let (desk, sender) = (Mutex::new(Desk::new(ranks)), OnceLock::new());
        Self { desk, changed: Condvar::new(), sender, own, next, landed: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the view.
    pub(super) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    /// Let who waits look around.
    pub(super) fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Watch these ranks; none: the next one, if nobody else would say that it is dead.
    pub(super) fn watch(&self, ranks: Vec<Rank>, has_controller: bool) {
        let next = (ranks.is_empty() && !has_controller && !self.lock().is_over).then_some(self.next);
        self.sender.get().iter().for_each(|sender| sender.watch(ranks.iter().copied().chain(next)));
    }

    /// Note what this rank has: its view's tree or another never has less than before.
    pub(super) fn publish(&self, landed: Landed) {
        self.landed.fetch_max(landed.0, Ordering::Release);
    }

    fn landed(&self) -> Landed {
        Landed(self.landed.load(Ordering::Acquire))
    }

    /// Tell whether all ranks have that much.
    pub(super) fn is_stable(&self, wanted: Landed) -> bool {
        self.lock().stable >= wanted
    }

    /// Wait until they do, at most `timeout`.
    pub(super) fn wait_for_stable(&self, wanted: Landed, timeout: Duration) {
        let desk = self.lock();
        if desk.stable < wanted {
            drop(self.changed.wait_timeout(desk, timeout).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// This rank does not go yet: who is gone is dead again.
    pub(super) fn stay(&self) {
        self.lock().is_leaving = false;
    }

    /// Tell whether rank 0 is gone, which would know.
    pub(super) fn is_coordinator_gone(&self) -> bool {
        self.lock().is_coordinator_gone
    }

    fn send(&self, to: Rank, note: &Note<Said>) {
        match (postcard::to_allocvec(note), self.sender.get()) {
            (Ok(note), Some(sender)) => sender.send(to, note),
            (Ok(_), None) => {}
            (Err(error), _) => tracing::error!(%error, "a message that can't be written"),
        }
    }

    /// Take in what a rank says of the results that it has, or asks; returns the answer.
    fn on_results(&self, from: Rank, note: &Note<Said>) -> Option<Note<Said>> {
        let (own, is_coordinator) = (self.landed(), self.own == COORDINATOR);
        let mut desk = self.lock();
        let (to_tell, to_ask) = match *note {
            Note::Ask => return Some(Note::Has(own)),
            Note::Stable(stable) if from == COORDINATOR => {
                desk.stable = desk.stable.max(stable);
                drop(desk);
                self.changed.notify_all();
                return None;
            }
            Note::Has(has) if is_coordinator => (desk.learn(from, has, own), Vec::new()),
            Note::Leaves(has) if is_coordinator => {
                let to_tell = desk.learn(from, has, own);
                desk.known.leaves.insert(from);
                if desk.stable >= has {
                    (to_tell.into_iter().chain([(from, desk.stable)]).collect(), Vec::new())
                } else {
                    (to_tell, desk.ranks_to_ask(has, Instant::now()))
                }
            }
            _ => return None,
        };
        drop(desk);
        self.changed.notify_all();
        to_tell.into_iter().for_each(|(to, stable)| self.send(to, &Note::Stable(stable)));
        to_ask.into_iter().for_each(|to| self.send(to, &Note::Ask));
        None
    }

    /// Take what comes in; returns the view that somebody wants to change, and the answer.
    fn take_in(&self, heard: Heard) -> (Option<u64>, Option<Vec<u8>>) {
        if let Heard::Note(from, bytes) = &heard
            && let Ok(note @ (Note::Leaves(_) | Note::Ask | Note::Has(_) | Note::Stable(_))) =
                postcard::from_bytes(bytes)
        {
            let answer = self.on_results(*from, &note);
            return (None, answer.and_then(|note| postcard::to_allocvec(&note).ok()));
        }
        let mut desk = self.lock();
        if let Heard::Gone(rank) | Heard::Silent(rank) = heard
            && desk.is_leaving
        {
            desk.is_coordinator_gone |= rank == COORDINATOR && matches!(heard, Heard::Gone(_));
            return (None, None);
        }
        let (epoch, mail) = match heard {
            Heard::Gone(rank) => (desk.epoch, Mail::Gone(rank)),
            Heard::Silent(rank) => (desk.epoch, Mail::Silent(rank)),
            Heard::Note(from, bytes) => match postcard::from_bytes::<Note<Said>>(&bytes) {
                Ok(Note::View(epoch, said)) => (epoch, Mail::Said(from, Box::new(said))),
                Ok(_) => return (None, None),
                Err(error) => {
                    tracing::warn!(%from, %error, "a note that makes no sense");
                    return (None, None);
                }
            },
        };
        if let Mail::Said(from, said) = &mail {
            let asks = matches!(**said, Message::Call { .. } | Message::Prepare { .. } | Message::Promise { .. });
            let answer = match &desk.settled {
                Some((dead, _)) if asks && epoch < desk.epoch && dead.contains_key(from) => Some(Message::Excluded),
                Some((_, settled)) if asks && epoch + 1 == desk.epoch => Some(settled.clone()),
                _ if asks && epoch >= desk.epoch && desk.is_over => Some(Message::Farewell),
                _ => None,
            };
            if answer.is_some() || epoch < desk.epoch {
                return (None, answer.and_then(|said| postcard::to_allocvec(&Note::View(epoch, said)).ok()));
            }
        }
        if desk.is_over {
            return (None, None);
        }
        if desk.mail.len() >= WAITING_MAX * desk.ranks {
            // It is said again if it matters.
            desk.mail.pop_front();
        }
        desk.mail.push_back((epoch, mail));
        drop(desk);
        self.changed.notify_all();
        (Some(epoch), None)
    }

    /// Return what came first, waiting for it, or for [`Inbox::wake`], at most `timeout`.
    pub(super) fn next(&self, timeout: Duration) -> Option<Mail> {
        let mut desk = self.lock();
        if desk.mail.iter().all(|(epoch, _)| *epoch > desk.epoch) {
            desk = self.changed.wait_timeout(desk, timeout).unwrap_or_else(PoisonError::into_inner).0;
        }
        let at = desk.mail.iter().position(|(epoch, _)| *epoch <= desk.epoch)?;
        desk.mail.remove(at).map(|(_, mail)| mail)
    }

    /// Tell whether something came of this view.
    pub(super) fn has_mail(&self) -> bool {
        let desk = self.lock();
        desk.mail.iter().any(|(epoch, _)| *epoch <= desk.epoch)
    }

    /// Tell whether something came that ends what is done for a plan: a higher ballot, or a rank that is dead and is not
    /// among these. What is silent is dead only if nobody else would know.
    pub(super) fn is_pressing(&self, dead: &Dead, has_controller: bool) -> bool {
        let desk = self.lock();
        let is_news = |rank: &Rank| !dead.contains_key(rank);
        desk.mail.iter().filter(|(epoch, _)| *epoch <= desk.epoch).any(|(_, mail)| match mail {
            Mail::Gone(rank) => is_news(rank),
            Mail::Silent(rank) => !has_controller && is_news(rank),
            Mail::Said(from, said) => match &**said {
                Message::Call { dead } => dead.keys().any(is_news),
                Message::Farewell => is_news(from),
                said => matches!(
                    said,
                    Message::Prepare { .. } | Message::Refuse { .. } | Message::Commit { .. } | Message::Excluded
                ),
            },
        })
    }
}

/// A rank's part in what is said.
#[derive(Debug)]
pub(super) struct Parley {
    notes: Notes,
    inbox: Arc<Inbox>,
}

impl Parley {
    /// Begin. `on_call` is told of every view that somebody wants to change.
    pub(super) fn start(
        (rank, token): (Rank, JobToken),
        listener: TcpListener,
        addresses: Vec<SocketAddr>,
        on_call: impl Fn(u64) + Send + 'static,
    ) -> std::io::Result<Self> {
        let ranks = addresses.len();
        let inbox = Arc::new(Inbox::new(rank, ranks));
        let to = Arc::clone(&inbox);
        let max_len_bytes = ACCOUNT_MAX_BYTES.saturating_mul(ranks).min(u32::MAX as usize);
        let notes = Notes::start((rank, token, max_len_bytes), listener, addresses, move |heard| {
            let (called, answer) = to.take_in(heard);
            called.into_iter().for_each(&on_call);
            answer
        })?;
        inbox.sender.get_or_init(|| Arc::clone(notes.sender()));
        Ok(Self { notes, inbox })
    }

    /// Return where mail comes in.
    pub(super) const fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Say something about the present view.
    pub(super) fn say(&self, to: Rank, said: &Said) {
        let epoch = self.inbox.lock().epoch;
        self.inbox.send(to, &Note::View(epoch, said.clone()));
    }

    /// Find out whether all ranks have that much ([`Inbox::is_stable`]), as this one does, to leave.
    pub(super) fn ask_for_stable(&self, wanted: Landed) {
        let inbox = &self.inbox;
        let mut desk = inbox.lock();
        desk.is_leaving = true;
        if inbox.own != COORDINATOR {
            drop(desk);
            inbox.watch(vec![COORDINATOR], true);
            return inbox.send(COORDINATOR, &Note::Leaves(wanted));
        }
        let to_tell = desk.learn(COORDINATOR, wanted, wanted);
        let to_ask = desk.ranks_to_ask(wanted, Instant::now());
        drop(desk);
        to_tell.into_iter().for_each(|(to, stable)| inbox.send(to, &Note::Stable(stable)));
        to_ask.into_iter().for_each(|to| inbox.send(to, &Note::Ask));
    }

    /// This rank leaves, and all have what it has: rank 0 says so to all, as nobody can ask it any more.
    pub(super) fn say_goodbye(&self) {
        let (ranks, stable) = {
            let desk = self.inbox.lock();
            (desk.ranks as u32, desk.stable)
        };
        if self.inbox.own == COORDINATOR && stable > Landed::new(0, 0) {
            (1..ranks).for_each(|rank| self.inbox.send(Rank(rank), &Note::Stable(stable)));
        }
    }

    /// The view has changed: answer who has not heard of it with `commit`.
    pub(super) fn settle(&self, dead: Dead, commit: Said) {
        let mut desk = self.inbox.lock();
        desk.epoch += 1;
        desk.settled = Some((dead, commit));
        let epoch = desk.epoch;
        desk.mail.retain(|(of, mail)| *of >= epoch && matches!(mail, Mail::Said(..)));
    }

    /// This rank takes no further part.
    pub(super) fn end(&self) {
        self.inbox.lock().is_over = true;
        self.notes.sender().watch([]);
    }
}

/// Return with what authority a rank is dead whose process has ended, or that does not answer.
pub(super) const fn authority(has_controller: bool) -> Authority {
    // Who hears of the controller is not cut off: what the host of the other says of it is true.
    if has_controller { Authority::Word } else { Authority::Suspicion }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recovery::{Ballot, Outcome};

    fn inbox() -> Inbox {
        let inbox = Inbox::new(Rank(0), 3);
        inbox.lock().epoch = 3;
        inbox
    }

    fn note(from: u32, epoch: u64, said: &Said) -> Heard {
        Heard::Note(Rank(from), postcard::to_allocvec(&Note::View(epoch, said)).expect("in memory"))
    }

    fn call() -> Said {
        Message::Call { dead: Dead::new() }
    }

    fn answered(inbox: &Inbox, heard: Heard) -> Option<(u64, Said)> {
        inbox.take_in(heard).1.map(|note| match postcard::from_bytes(&note).expect("as it was") {
            Note::View(epoch, said) => (epoch, said),
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn what_is_of_a_later_view_waits_for_it() {
        let inbox = inbox();
        assert_eq!(inbox.take_in(note(1, 4, &call())), (Some(4), None));
        assert!(!inbox.has_mail());
        assert_eq!(inbox.next(Duration::ZERO), None);
        assert_eq!(inbox.take_in(note(2, 3, &Message::Farewell)), (Some(3), None));
        assert_eq!(inbox.next(Duration::ZERO), Some(Mail::Said(Rank(2), Box::new(Message::Farewell))));
        inbox.lock().epoch = 4;
        assert_eq!(inbox.next(Duration::ZERO), Some(Mail::Said(Rank(1), Box::new(call()))));
    }

    #[test]
    fn who_is_behind_is_answered_without_asking() {
        let inbox = inbox();
        let decision = Decision { cut: 7, operation: 1, failure: None };
        let dead = Dead::from([(Rank(2), Authority::Suspicion)]);
        let outcome = Outcome { dead: vec![Rank(2)], decision, word: 0 };
        let commit = Message::Commit { outcome, dead: dead.clone() };
        inbox.lock().settled = Some((dead, commit.clone()));
        assert_eq!(answered(&inbox, note(1, 2, &call())), Some((2, commit)));
        assert_eq!(answered(&inbox, note(2, 2, &call())), Some((2, Message::Excluded)));
        assert_eq!(answered(&inbox, note(1, 1, &call())), None);
        let ballot = Ballot { attempt: 1, coordinator: Rank(1) };
        // What asks for nothing is only late.
        assert_eq!(inbox.take_in(note(1, 2, &Message::Done { ballot, word: 0 })), (None, None));
        inbox.lock().is_over = true;
        assert_eq!(answered(&inbox, note(1, 3, &call())), Some((3, Message::Farewell)));
        assert!(!inbox.has_mail());
    }

    #[test]
    fn nonsense_is_no_mail() {
        let inbox = inbox();
        assert_eq!(inbox.take_in(Heard::Note(Rank(1), vec![0, 3, 77])), (None, None));
        assert_eq!(inbox.take_in(Heard::Note(Rank(1), vec![99])), (None, None));
        assert!(!inbox.has_mail());
    }

    fn heard(from: u32, note: &Note<Said>) -> Heard {
        Heard::Note(Rank(from), postcard::to_allocvec(note).expect("in memory"))
    }

    /// Rank 0 knows what all have when each has said so, itself included; views count before chunks.
    #[test]
    fn results_are_stable_when_the_last_rank_has_them() {
        let inbox = inbox();
        let wanted = Landed::new(1, 40);
        inbox.take_in(heard(1, &Note::Leaves(wanted)));
        inbox.publish(Landed::new(1, 44));
        inbox.take_in(heard(2, &Note::Has(Landed::new(0, 1 << 40))));
        assert!(!inbox.is_stable(wanted));
        inbox.take_in(heard(2, &Note::Has(Landed::new(1, 39))));
        assert!(!inbox.is_stable(wanted) && inbox.is_stable(Landed::new(1, 39)));
        inbox.take_in(heard(2, &Note::Has(Landed::new(1, 44))));
        assert!(inbox.is_stable(wanted) && !inbox.is_stable(Landed::new(1, 41)));
        // Nobody else says what all have, and no rank beyond the last has anything.
        inbox.take_in(heard(2, &Note::Stable(Landed::new(1, 44))));
        inbox.take_in(heard(7, &Note::Has(Landed::new(9, 0))));
        assert!(!inbox.is_stable(Landed::new(1, 41)));
    }

    #[test]
    fn rank_answers_what_it_has() {
        let inbox = inbox();
        inbox.publish(Landed::new(0, 7));
        inbox.publish(Landed::new(0, 5));
        let answer = inbox.take_in(heard(0, &Note::Ask)).1.expect("an answer");
        assert_eq!(postcard::from_bytes::<Note<Said>>(&answer), Ok(Note::Has(Landed::new(0, 7))));
        assert!(!inbox.has_mail());
    }

    #[test]
    fn departed_rank_is_no_death_to_one_that_leaves() {
        let inbox = inbox();
        inbox.lock().is_leaving = true;
        assert_eq!(inbox.take_in(Heard::Gone(COORDINATOR)), (None, None));
        assert!(inbox.is_coordinator_gone() && !inbox.has_mail());
    }

    /// A plan goes on under what belongs to it, and under what is known.
    #[test]
    fn what_ends_a_plan_is_pressing() {
        let known = Dead::from([(Rank(2), Authority::Word)]);
        let ballot = Ballot { attempt: 2, coordinator: Rank(0) };
        let is_pressing = |heard, has_controller| {
            let inbox = inbox();
            inbox.take_in(heard);
            inbox.is_pressing(&known, has_controller)
        };
        let newly = Dead::from([(Rank(1), Authority::Word)]);
        assert!(is_pressing(note(1, 3, &Message::Call { dead: newly }), true));
        assert!(is_pressing(note(0, 3, &Message::Prepare { ballot, dead: Dead::new() }), true));
        assert!(is_pressing(Heard::Gone(Rank(1)), true) && is_pressing(Heard::Silent(Rank(1)), false));
        assert!(!is_pressing(Heard::Gone(Rank(2)), true) && !is_pressing(Heard::Silent(Rank(1)), true));
        assert!(!is_pressing(note(1, 3, &Message::Done { ballot, word: 0 }), true));
        assert!(!is_pressing(note(1, 3, &Message::Call { dead: known.clone() }), true));
        assert!(!is_pressing(note(0, 4, &Message::Prepare { ballot, dead: Dead::new() }), true));
    }
}
