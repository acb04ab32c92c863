//! Letters: what ranks tell each other and the controller, and it them. They take a while, and come in order for each
//! pair.

use super::cluster::Cluster;
use super::controller::Ask;
use super::coverage::Mark;
use super::repair::{Part, Way};
use super::report::Violation;
use super::trial::Piece;
use std::time::Duration;
use sumac::rehearsal::{Attempt, Said};

/// What ranks tell each other, and what the controller tells them.
#[derive(Debug, Clone)]
pub(super) enum Mail {
    /// To the controller.
    Ask { rank: usize, group: usize, view: u32, ask: Ask },
    /// The tree of this view is lost.
    Word { rank: usize, group: usize, view: u32 },
    /// Another tree, or none.
    Found { rank: usize, group: usize, view: u32, tree: Option<usize> },
    /// From rank to rank.
    Peer { from: usize, to: usize, group: usize, view: u32, what: Part },
    /// From rank to rank, about the change of a view.
    View { from: usize, to: usize, group: usize, view: u32, said: Box<Said> },
    /// From rank to rank, in an attempt to change a view.
    Piece { from: usize, to: usize, group: usize, view: u32, attempt: Attempt, piece: Piece },
    /// A rank has come to an operation that runs by a schedule.
    Entered { to: usize, group: usize, op: usize, from: usize },
}

impl Mail {
    /// Return the ranks that it is from and to.
    pub(super) const fn between_ranks(&self) -> Option<(usize, usize)> {
        match self {
            Self::Ask { .. } | Self::Word { .. } | Self::Found { .. } => None,
            Self::Peer { from, to, .. }
            | Self::Entered { from, to, .. }
            | Self::View { from, to, .. }
            | Self::Piece { from, to, .. } => Some((*from, *to)),
        }
    }

    /// Return the rank that it is to.
    pub(super) const fn to_rank(&self) -> Option<usize> {
        match self {
            Self::Ask { .. } => None,
            Self::Word { rank, .. } | Self::Found { rank, .. } => Some(*rank),
            Self::Peer { to, .. } | Self::Entered { to, .. } | Self::View { to, .. } | Self::Piece { to, .. } => {
                Some(*to)
            }
        }
    }
}

impl Cluster<'_, '_> {
    /// Send something on its way; between the same two it does not overtake.
    pub(super) fn mail(&mut self, mail: Mail) {
        let ends = match &mail {
            Mail::Ask { rank, .. } => (*rank, usize::MAX),
            other => other.between_ranks().or(other.to_rank().map(|rank| (usize::MAX, rank))).expect("to a rank"),
        };
        let most = self.mail_draw.one_of(&[20_000, 300_000, 5_000_000]);
        let at = self.now + Duration::from_nanos(1_000 + self.mail_draw.below(most));
        let last = self.mail_last.entry(ends).or_default();
        *last = at.max(*last);
        self.mail_numbers += 1;
        self.letters.insert((*last, self.mail_numbers), mail);
        self.letters_most = self.letters_most.max(self.letters.len() as u64);
    }

    pub(super) fn mail_due(&mut self) -> Result<(), Violation> {
        while let Some(entry) = self.letters.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let mail = entry.remove();
            let Some(mail) = self.intercept(mail) else { continue };
            match mail {
                Mail::Ask { rank, group, view, ask } => self.ask_controller((rank, group), view, ask),
                Mail::Word { rank, group, view } => {
                    if self.options.ranks_die() {
                        self.hear_of_loss((rank, group), view)?;
                        continue;
                    }
                    let member = &self.members[rank][group];
                    if member.view == view && member.repair.is_none() && member.way != Way::Schedules {
                        let is_idle = member.done == member.called as u64;
                        self.seen.note(if is_idle { Mark::FrozenIdle } else { Mark::FrozenByWord });
                        self.freeze(rank, group)?;
                    }
                }
                Mail::Found { rank, group, view, tree } => {
                    self.inbox(rank, group, view).found = Some(tree);
                    self.advance(rank, group)?;
                    self.finish_trial((rank, group), false)?;
                }
                Mail::Peer { from, to, group, view, what } => {
                    let inbox = self.inbox(to, group, view);
                    match what {
                        Part::Account(account) => _ = inbox.accounts.insert(from, account),
                        Part::Contribution(seq, bytes) => {
                            _ = inbox.contributions.entry(seq).or_default().insert(from, bytes);
                        }
                        Part::Result(seq, bytes) => _ = inbox.results.insert(seq, bytes),
                        Part::Vote(found) => _ = inbox.votes.insert(from, found),
                    }
                    self.advance(to, group)?;
                }
                Mail::View { from, to, group, view, said } => self.hear((from, to, group), view, *said)?,
                Mail::Piece { from, to, group, view, attempt, piece } => {
                    self.take_piece((from, to, group), (view, attempt), piece)?;
                }
                Mail::Entered { to, group, op, from } => {
                    self.members[to][group].entered.entry(op).or_default().insert(from);
                    self.run_schedules(to, group)?;
                }
            }
        }
        Ok(())
    }
}
