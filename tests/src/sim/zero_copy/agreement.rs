//! The agreement of the surviving ranks, with the state machine of a communicator. Messages between ranks arrive at
//! once here.

use super::world::World;
use crate::sim::report::Violation;
use std::collections::BTreeMap;
use std::time::Duration;
use sumac::harness::{Action, Attempt, Change, Outcome, Plan, RankReport};
use sumac_hal::ids::Rank;

/// The state machines of the ranks whose tree is lost, and what they have decided.
#[derive(Debug, Default)]
pub(super) struct Agreement {
    changes: BTreeMap<usize, Change>,
    plans: BTreeMap<usize, (Attempt, Plan)>,
    outcomes: BTreeMap<usize, Outcome>,
}

impl World<'_, '_> {
    /// All survivors are frozen: let them report, and return the plan that follows on all of them.
    pub(super) fn agree_on_plan(&mut self, live: &[usize]) -> Result<Plan, Violation> {
        let (now, ranks, trees) = (self.now, self.options.ranks as u32, self.incarnation as u32);
        let dead: Vec<Rank> = (0..ranks).map(Rank).filter(|rank| !live.contains(&(rank.0 as usize))).collect();
        let Agreement { changes, plans, .. } = &mut self.agreement;
        plans.clear();
        changes.retain(|rank, _| live.contains(rank));
        for &rank in live {
            let is_new = !changes.contains_key(&rank);
            let new = || Change::new((Rank(rank as u32), ranks), trees, true, now + LIMIT);
            let change = changes.entry(rank).or_insert_with(new);
            change.report_deaths(&dead, true);
            if is_new {
                change.begin();
            }
        }
        self.exchange()?;
        let disagreement = Violation::Disagreement { group: 0, view: trees };
        let Some(first) = self.agreement.plans.values().next() else { return Err(disagreement) };
        let is_same =
            self.agreement.plans.len() == live.len() && self.agreement.plans.values().all(|plan| plan == first);
        if is_same { Ok(first.1.clone()) } else { Err(disagreement) }
    }

    /// All survivors have executed the plan: return what they commit.
    pub(super) fn agree_on_outcome(&mut self, live: &[usize]) -> Result<Outcome, Violation> {
        let Agreement { changes, plans, .. } = &mut self.agreement;
        for (rank, (attempt, _)) in std::mem::take(plans) {
            changes.get_mut(&rank).expect("it has planned").executed(attempt, 0);
        }
        self.exchange()?;
        let Agreement { outcomes, .. } = std::mem::take(&mut self.agreement);
        let disagreement = Violation::Disagreement { group: 0, view: self.incarnation as u32 };
        let Some(first) = outcomes.values().next() else { return Err(disagreement) };
        let is_same = outcomes.len() == live.len() && outcomes.values().all(|outcome| outcome == first);
        if is_same { Ok(first.clone()) } else { Err(disagreement) }
    }

    /// The survivors give up: nothing can be recovered.
    pub(super) fn end_agreement(&mut self) {
        self.agreement = Agreement::default();
    }

    /// Deliver messages, and do what the state machines ask for, until they wait.
    fn exchange(&mut self) -> Result<(), Violation> {
        let Self { agreement: Agreement { changes, plans, outcomes }, members, now, incarnation, .. } = self;
        let ranks: Vec<usize> = changes.keys().copied().collect();
        let mut is_busy = true;
        while std::mem::take(&mut is_busy) {
            for &rank in &ranks {
                let member = &members[rank];
                let change = changes.get_mut(&rank).expect("of these ranks");
                while let Some(action) = change.poll_action(Some(member.transport.tree_source()), *now) {
                    is_busy = true;
                    match action {
                        Action::Report(attempt) => {
                            let (source, first) = (member.transport.tree_source(), member.memory.first as u64);
                            let report = RankReport::of(source, &member.landed, first, *incarnation as u32);
                            change.report(attempt, report);
                        }
                        Action::Execute(attempt, plan) => _ = plans.insert(rank, (attempt, plan)),
                        Action::Commit(outcome) => _ = outcomes.insert(rank, outcome),
                        Action::Unsound(of) => {
                            let why = format!("the chunk inventory of {of} is invalid");
                            return Err(Violation::Unrecoverable { group: 0, rank, why });
                        }
                        Action::End(end) => {
                            let (done, end) = (member.done as u64, format!("{end:?}"));
                            return Err(Violation::RankEnd { group: 0, rank, done, end });
                        }
                    }
                }
                let messages: Vec<_> = std::iter::from_fn(|| change.poll_transmit()).collect();
                for (to, message) in messages {
                    is_busy = true;
                    if let Some(receiver) = changes.get_mut(&(to.0 as usize)) {
                        receiver.handle(Rank(rank as u32), message, *now);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Limit of a view change: longer than any run.
const LIMIT: Duration = Duration::from_secs(1_000);
