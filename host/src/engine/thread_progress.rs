//! What the progress thread has begun, of what was submitted to it.

use super::submissions::Submissions;
use super::task::Task;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the progress thread has begun.
pub(super) struct ThreadProgress {
    pub(super) submissions: Arc<Submissions>,
    /// The submissions that have been begun and have not ended, in the order in which they began.
    pub(super) begun: Vec<(u64, Task)>,
}

impl ThreadProgress {
    pub(super) const fn new(submissions: Arc<Submissions>) -> Self {
        Self { submissions, begun: Vec::new() }
    }

    /// Return the number of messages that have been begun and not reported.
    pub(super) fn messages(&self) -> usize {
        self.begun.iter().filter(|(_, task)| matches!(task, Task::Message(_))).count()
    }

    /// Return the submission that has not ended in time, how long it had, and the task if it was begun.
    pub(super) fn overdue(&self) -> Option<(u64, Duration, Option<Task>)> {
        let (id, (at, limit)) = self.submissions.first_due()?;
        if at > Instant::now() {
            return None;
        }
        let begun = self.begun.iter().find(|(begun, _)| *begun == id).map(|&(_, task)| task);
        Some((id, limit, begun))
    }
}
