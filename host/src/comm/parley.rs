//! What ranks say to each other about their view, kept for whoever changes it ([`super::change`]), be it a call or a
//! thread; and the answers to ranks that are behind, which need neither.
//!
//! Views are numbered; every message names the one that it would change. One of a later view waits: its sender has heard
//! of a commit that is still on its way here. To one of the view before, the answer is how that one was changed.

use crate::exec::JobToken;
use crate::exec::notes::{Heard, Notes, Sender};
use crate::repair::{Account, Authority, Dead, Decision, Message};
use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use sumac_hal::ids::Rank;

/// What one rank says to another about a view.
pub(super) type Said = Message<Account, Decision>;

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
    ranks: usize,
}

/// The desk, and who waits for mail.
#[derive(Debug)]
pub(super) struct Inbox {
    desk: Mutex<Desk>,
    changed: Condvar,
    sender: OnceLock<Arc<Sender>>,
    /// The rank behind this one.
    next: Rank,
}

impl Inbox {
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

    /// Take what comes in; returns the view that somebody wants to change, and the answer.
    fn take_in(&self, heard: Heard) -> (Option<u64>, Option<Vec<u8>>) {
        let mut desk = self.lock();
        let (epoch, mail) = match heard {
            Heard::Gone(rank) => (desk.epoch, Mail::Gone(rank)),
            Heard::Silent(rank) => (desk.epoch, Mail::Silent(rank)),
            Heard::Note(from, bytes) => match postcard::from_bytes::<(u64, Said)>(&bytes) {
                Ok((epoch, said)) => (epoch, Mail::Said(from, Box::new(said))),
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
                return (None, answer.and_then(|said| postcard::to_allocvec(&(epoch, said)).ok()));
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
        let desk = Desk { epoch: 0, mail: VecDeque::new(), settled: None, is_over: false, ranks };
        let next = Rank((rank.0 + 1) % ranks as u32);
        let sender = OnceLock::new();
        let inbox = Arc::new(Inbox { desk: Mutex::new(desk), changed: Condvar::new(), sender, next });
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
        match postcard::to_allocvec(&(epoch, said)) {
            Ok(note) => self.notes.sender().send(to, note),
            Err(error) => tracing::error!(%error, "a message that can't be written"),
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
    use crate::repair::{Ballot, Outcome};

    fn inbox() -> Inbox {
        let desk = Desk { epoch: 3, mail: VecDeque::new(), settled: None, is_over: false, ranks: 3 };
        Inbox { desk: Mutex::new(desk), changed: Condvar::new(), sender: OnceLock::new(), next: Rank(1) }
    }

    fn note(from: u32, epoch: u64, said: &Said) -> Heard {
        Heard::Note(Rank(from), postcard::to_allocvec(&(epoch, said)).expect("in memory"))
    }

    fn call() -> Said {
        Message::Call { dead: Dead::new() }
    }

    fn answered(inbox: &Inbox, heard: Heard) -> Option<(u64, Said)> {
        inbox.take_in(heard).1.map(|note| postcard::from_bytes(&note).expect("as it was"))
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
        assert_eq!(inbox.take_in(Heard::Note(Rank(1), vec![3, 77])), (None, None));
        assert!(!inbox.has_mail());
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
