//! Why an update over Redfish fails.

use super::super::targets::shown;
use serde_json::Value;
use std::time::Duration;
use thiserror::Error;

/// Why an update failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(super) enum RedfishError {
    /// The URL names no service.
    #[error("{url:?} is not https://HOST or https://HOST:PORT{reason}")]
    Url { url: String, reason: &'static str },
    /// No connection, or it ended early.
    #[error("cannot reach {path}: {why}")]
    Unreachable { path: String, why: String },
    /// The service's certificate is not trusted.
    #[error("the service's certificate is not trusted: {why}; name its issuer with --ca")]
    Certificate { why: String },
    /// The service redirects.
    #[error("{path} redirects to {location:?}, which is not followed: it may be another host's")]
    Redirect { path: String, location: String },
    /// The service names a resource of another host.
    #[error("the service refers to {link:?}, which is not its own: credentials and image are sent to it alone")]
    ForeignLink { link: String },
    /// An answer is too long.
    #[error("the answer to {path} exceeds {limit_bytes} bytes")]
    TooLong { path: String, limit_bytes: u64 },
    /// An answer is not what the protocol says.
    #[error("the answer to {path} is not Redfish: {why}")]
    Malformed { path: String, why: String },
    /// The service refuses a request.
    #[error("{path}: status {status}{}", suffix(message))]
    Status { path: String, status: u16, message: String },
    /// The service cannot update anything.
    #[error("the service offers no updates: {why}")]
    NotOffered { why: &'static str },
    /// The service takes no image of this length.
    #[error("the image has {len_bytes} bytes, the service takes at most {limit_bytes}")]
    ImageTooLong { len_bytes: u64, limit_bytes: u64 },
    /// What the URI of the image has is not the image.
    #[error("{uri} has another file than the one that was checked (SHA-256 {found}, not {expected})")]
    OtherImage { uri: String, found: String, expected: String },
    /// The update failed.
    #[error("the update ended as {state}{}", suffix(message))]
    Task { state: String, message: String },
    /// The task of the update cannot be found any more.
    #[error("the task {path} has gone while it was {state}; compare the versions with `--dry-run`")]
    TaskGone { path: String, state: String },
    /// The time limit has passed.
    #[error("not done after {} s ({doing}); the update may go on: do not cut the card's power", limit.as_secs())]
    TimeLimit { limit: Duration, doing: String },
    /// A signal.
    #[error("interrupted {doing}")]
    Interrupted { doing: &'static str },
}

impl RedfishError {
    /// Return the word for it in tables.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Url { .. } => "refused",
            Self::Unreachable { .. } => "unreachable",
            Self::Certificate { .. } => "certificate",
            Self::Redirect { .. } | Self::ForeignLink { .. } | Self::TooLong { .. } | Self::Malformed { .. } => {
                "protocol"
            }
            Self::Status { status: 401 | 403, .. } => "permission",
            Self::Status { .. } => "status",
            Self::NotOffered { .. } | Self::ImageTooLong { .. } | Self::OtherImage { .. } => "refused",
            Self::Task { .. } | Self::TaskGone { .. } => "task",
            Self::TimeLimit { .. } => "time-limit",
            Self::Interrupted { .. } => "interrupted",
        }
    }
}

fn suffix(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

/// Return the messages of an error's body (DSP0266, "Error responses"), or nothing.
pub(super) fn messages_of_error(body: &Value) -> String {
    let error = &body["error"];
    let extended = error["@Message.ExtendedInfo"].as_array();
    let texts: Vec<_> = extended.into_iter().flatten().filter_map(message_of).take(MESSAGES_MAX).collect();
    match texts.is_empty() {
        true => error["message"].as_str().map(shown).unwrap_or_default(),
        false => texts.join("; "),
    }
}

/// How many messages of one answer are shown.
pub(super) const MESSAGES_MAX: usize = 16;

/// Return the text of a message object, with what the service advises.
pub(super) fn message_of(message: &Value) -> Option<String> {
    let text = shown(message["Message"].as_str().or(message["MessageId"].as_str())?);
    let advice = message["Resolution"].as_str().map(shown).filter(|text| !text.is_empty() && *text != "None.");
    Some(advice.map_or(text.clone(), |advice| format!("{text} ({advice})")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn error_body_is_shown_with_the_advice_of_the_service() {
        let body = json!({ "error": {
            "code": "Base.1.8.GeneralError",
            "message": "See the extended information.",
            "@Message.ExtendedInfo": [
                { "MessageId": "Base.1.8.ResourceInUse", "Message": "In use.", "Resolution": "Try later." },
                { "MessageId": "Base.1.8.Other", "Resolution": "None." },
            ],
        } });
        assert_eq!(messages_of_error(&body), "In use. (Try later.); Base.1.8.Other");
        assert_eq!(messages_of_error(&json!({ "error": { "message": "Alone." } })), "Alone.");
        for other in [json!(null), json!([1]), json!({ "error": 5 }), json!({ "error": { "message": {} } })] {
            assert_eq!(messages_of_error(&other), "", "{other}");
        }
    }
}
