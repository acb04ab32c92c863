//! A task of a service, as its resource or its monitor shows it (DSP0266, "Asynchronous operations"; the schema Task).

use super::super::targets::shown;
use super::error::{MESSAGES_MAX, message_of};
use super::http::Answer;
use serde_json::Value;

/// How far a task is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Task {
    /// It goes on.
    Running(Progress),
    /// It is done.
    Done,
    /// It failed: its state, and its messages.
    Failed { state: String, message: String },
}

/// What a task that goes on shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) state: Option<String>,
    /// From 0 to 100.
    pub(super) percent: Option<u64>,
    pub(super) messages: Vec<String>,
}

/// Read the state of a task from an answer to a request for its resource or its monitor.
pub(super) fn read(answer: &Answer) -> Task {
    let body = &answer.body;
    let state = body["TaskState"].as_str().map(shown);
    let messages = messages(body);
    match state.as_deref() {
        Some("Completed") if !matches!(body["TaskStatus"].as_str(), Some("Critical")) => Task::Done,
        Some(ended @ ("Completed" | "Killed" | "Exception" | "Cancelled")) => {
            let state = match ended {
                "Completed" => "Completed with the status Critical".into(),
                ended => ended.into(),
            };
            Task::Failed { state, message: messages.join("; ") }
        }
        // A monitor answers 202 while the task goes on, and with the result, which is no task, afterwards.
        None if answer.status != 202 => Task::Done,
        _ => {
            let percent = body["PercentComplete"].as_u64().filter(|percent| *percent <= 100);
            Task::Running(Progress { state, percent, messages })
        }
    }
}

/// Return the path by which to watch the task of an accepted request; `None` if there is nothing to watch.
pub(super) fn link(answer: &Answer) -> Option<String> {
    let is_task = answer.body["TaskState"].is_string() || is_of_type(&answer.body, "Task");
    let resource = answer.body["@odata.id"].as_str().filter(|_| is_task);
    resource.or(answer.location.as_deref()).map(str::to_owned)
}

fn is_of_type(body: &Value, name: &str) -> bool {
    body["@odata.type"].as_str().and_then(|text| text.strip_prefix('#')?.split('.').next()) == Some(name)
}

fn messages(body: &Value) -> Vec<String> {
    body["Messages"].as_array().into_iter().flatten().filter_map(message_of).take(MESSAGES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn answer(status: u16, body: Value) -> Answer {
        Answer { status, location: Some("/monitor".into()), body }
    }

    #[test]
    fn state_of_a_task_is_read_from_its_resource_and_from_its_monitor() {
        let task = |state: &str, status: &str| answer(200, json!({ "TaskState": state, "TaskStatus": status }));
        for state in ["New", "Starting", "Running", "Pending", "Suspended", "Stopping", "Unheard-of"] {
            assert!(matches!(read(&task(state, "OK")), Task::Running(_)), "{state}");
        }
        assert_eq!(read(&task("Completed", "OK")), Task::Done);
        assert_eq!(read(&task("Completed", "Warning")), Task::Done);
        for state in ["Killed", "Exception", "Cancelled"] {
            assert!(matches!(read(&task(state, "OK")), Task::Failed { state: found, .. } if found == state));
        }
        assert!(matches!(read(&task("Completed", "Critical")), Task::Failed { .. }));
        assert_eq!(read(&answer(202, Value::Null)), Task::Running(Progress::default()));
        assert_eq!((read(&answer(204, Value::Null)), read(&answer(200, json!({})))), (Task::Done, Task::Done));
        let running = json!({ "TaskState": "Running", "PercentComplete": 40,
            "Messages": [{ "Message": "Writing" }, { "Message": "\u{1b}[2J" }, 7] });
        let Task::Running(progress) = read(&answer(202, running)) else { panic!("it runs") };
        assert_eq!((progress.percent, progress.messages), (Some(40), vec!["Writing".into(), "[2J".into()]));
    }

    #[test]
    fn task_is_watched_by_its_resource_or_else_by_its_monitor() {
        let resource = json!({ "@odata.type": "#Task.v1_4_3.Task", "@odata.id": "/tasks/7" });
        assert_eq!(link(&answer(202, resource)).as_deref(), Some("/tasks/7"));
        let other = json!({ "@odata.type": "#Message.v1_1_1.Message", "@odata.id": "/x" });
        assert_eq!(link(&answer(202, other)).as_deref(), Some("/monitor"));
        assert_eq!(link(&Answer { status: 202, location: None, body: Value::Null }), None);
    }

    proptest! {
        #[test]
        fn arbitrary_task_does_not_panic(status: u16, text in ".{0,40}", number: i64, number_is_text: bool) {
            let percent = if number_is_text { json!(text) } else { json!(number) };
            let body = json!({ "TaskState": text, "PercentComplete": percent, "Messages": [{ "Message": text }, text] });
            if let Task::Running(Progress { percent: Some(percent), .. }) = read(&answer(status, body)) {
                prop_assert!(percent <= 100);
            }
        }
    }
}
