//! What jobs recovered from, for status reports: the latest lost trees, lost ranks and takeovers.

use crate::controller::proto::{RecoveryOutcome, RecoveryStatus};
use std::collections::VecDeque;
use std::time::Duration;
use sumac_hal::time::Instant;

/// How many recoveries are kept. They outlive their jobs.
const KEPT: usize = 32;

/// How much of a cause or a reason is kept, in characters.
const TEXT_CHARS_MAX: usize = 200;

/// The latest recoveries, oldest first. A job has at most one that is unfinished.
#[derive(Debug, Default)]
pub(super) struct RecoveryLog {
    entries: VecDeque<Recovery>,
}

#[derive(Debug)]
struct Recovery {
    job: String,
    view: u32,
    cause: String,
    began: Instant,
    ended: Option<(Instant, RecoveryOutcome)>,
}

impl RecoveryLog {
    /// A job has lost something in `view`. While it is recovering already, this belongs to the same recovery.
    pub(super) fn begin(&mut self, job: &str, view: u32, cause: &str, now: Instant) {
        if self.unfinished(job).is_some() {
            return;
        }
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(Recovery {
            job: job.to_owned(),
            view,
            cause: shortened(cause),
            began: now,
            ended: None,
        });
    }

    /// A job's recovery is finished; without one, this does nothing.
    pub(super) fn end(&mut self, job: &str, outcome: RecoveryOutcome, now: Instant) {
        if let Some(recovery) = self.unfinished(job) {
            recovery.ended = Some((now, outcome));
        }
    }

    /// A job's recovery is finished, with a tree or the reason why there is none.
    pub(super) fn end_with_tree<T>(&mut self, job: &str, tree: &Result<T, String>, now: Instant) {
        let outcome = match tree {
            Ok(_) => RecoveryOutcome::NewTree,
            Err(reason) => RecoveryOutcome::NoTree { reason: shortened(reason) },
        };
        self.end(job, outcome, now);
    }

    fn unfinished(&mut self, job: &str) -> Option<&mut Recovery> {
        self.entries.iter_mut().rev().find(|recovery| recovery.job == job && recovery.ended.is_none())
    }

    /// Return the recoveries, the latest first.
    pub(super) fn report(&self, now: Instant) -> Vec<RecoveryStatus> {
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let report = |recovery: &Recovery| RecoveryStatus {
            job: recovery.job.clone(),
            view: recovery.view,
            cause: recovery.cause.clone(),
            began_ms_ago: ms(now.saturating_since(recovery.began)),
            took_ms: recovery.ended.as_ref().map(|(at, _)| ms(at.saturating_since(recovery.began))),
            outcome: recovery.ended.as_ref().map(|(_, outcome)| outcome.clone()),
        };
        self.entries.iter().rev().map(report).collect()
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(TEXT_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn recovery_reports_cause_start_duration_and_outcome() {
        let (mut log, start) = (RecoveryLog::default(), Instant::ZERO);
        log.begin("job", 3, "device leaf0 did not reconnect", start);
        // Its ranks notice it, too.
        log.begin("job", 3, "reported by rank 1", start + SECOND);
        let unfinished = &log.report(start + SECOND)[0];
        assert_eq!((unfinished.took_ms, unfinished.outcome.as_ref()), (None, None));
        log.end_with_tree("other", &Ok(()), start + SECOND);
        log.end_with_tree("job", &Err::<(), _>("no device".into()), start + 2 * SECOND);
        log.end_with_tree("job", &Ok(()), start + 3 * SECOND);
        let expected = RecoveryStatus {
            job: "job".into(),
            view: 3,
            cause: "device leaf0 did not reconnect".into(),
            began_ms_ago: 5000,
            took_ms: Some(2000),
            outcome: Some(RecoveryOutcome::NoTree { reason: "no device".into() }),
        };
        assert_eq!(log.report(start + 5 * SECOND), [expected]);
    }

    #[test]
    fn latest_recoveries_are_kept_and_come_first() {
        let (mut log, now) = (RecoveryLog::default(), Instant::ZERO);
        for view in 0..2 * KEPT as u32 {
            log.begin("job", view, "x", now);
            log.end_with_tree("job", &Ok(()), now);
        }
        let views: Vec<u32> = log.report(now).iter().map(|recovery| recovery.view).collect();
        assert!(views.iter().copied().eq((KEPT as u32..2 * KEPT as u32).rev()), "{views:?}");
    }
}
