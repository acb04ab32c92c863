//! Limits on what a controller accepts from outside. Every count, name and length is checked against this table before
//! it determines an allocation.
//!
//! | what | limit | if exceeded |
//! |---|---|---|
//! | ranks of a job | [`RANKS_MAX`] | [`JoinRefusal::TooManyRanks`](super::proto::JoinRefusal::TooManyRanks) |
//! | a name | [`NAME_LEN_MAX`] characters of a [`NameKind`] ([`check_name`]) | [`JoinRefusal::Name`](super::proto::JoinRefusal::Name); a device is disconnected |
//! | pinned devices of a job | [`PINNED_MAX`] | [`JoinRefusal::Limit`](super::proto::JoinRefusal::Limit) |
//! | trees of a job | [`TREES_MAX`] | fewer trees |
//! | adapters for which a rank has addresses | [`TREES_MAX`] | further ones are not used |
//! | memberships of a connection | 1 | [`JoinRefusal::AlreadyJoined`](super::proto::JoinRefusal::AlreadyJoined) |
//! | a reason in a request | [`REASON_CHARS_MAX`] characters | truncated; control characters are replaced |
//! | a request | [`REQUEST_LEN_MAX`] | disconnected |
//! | a reply | [`REPLY_LEN_MAX`] | a report leaves out jobs and counts them |
//! | children of a node | what the device announces, at most 256 | no tree, with that reason |
//! | connections, jobs, devices, bytes | [`Limits`], configurable | [`JoinRefusal::Limit`](super::proto::JoinRefusal::Limit), or disconnected |

use std::time::Duration;

/// The maximum number of ranks in a job.
pub const RANKS_MAX: u32 = 16_384;

/// The maximum length of a job, tenant, host or device name, in bytes.
pub const NAME_LEN_MAX: usize = 64;

/// The maximum number of pinned devices of a job: the levels of its tree.
pub const PINNED_MAX: usize = 16;

/// The maximum number of trees that a job's operations are spread over.
pub const TREES_MAX: u8 = 16;

/// How much is kept of a reason that a peer gives, in characters.
pub const REASON_CHARS_MAX: usize = 300;

/// The maximum length of a client's request, in bytes: fits a declared expression over [`RANKS_MAX`] ranks.
pub const REQUEST_LEN_MAX: usize = 256 * 1024;

/// The maximum length of a reply to a client, in bytes: fits two addresses for each of [`RANKS_MAX`] ranks, and their
/// expression.
pub const REPLY_LEN_MAX: usize = 4 << 20;

/// Configurable limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of connections from clients and devices. Each takes a file descriptor.
    pub connections: usize,
    /// Maximum number of key exchanges in progress. If exceeded, the oldest one is ended.
    pub handshakes: usize,
    /// How many key exchanges a second may fail, once as many as may be in progress have failed. One address takes at
    /// most half of either number. Connections beyond them are closed unread; peers with a key try again.
    pub handshake_rate: u32,
    /// Maximum number of jobs, including sub-communicators.
    pub jobs: usize,
    /// Maximum number of connected devices.
    pub devices: usize,
    /// Maximum bytes queued for one peer. A peer that reads too slowly is disconnected.
    pub peer_output_bytes: usize,
    /// Maximum bytes queued for all peers together; a message queued for several peers counts once. If exceeded, the
    /// peers with the longest queues are disconnected.
    pub output_bytes: usize,
    /// Maximum bytes of incomplete requests from all peers together. If exceeded, the peers that have sent most are
    /// disconnected.
    pub input_bytes: usize,
    /// How long a new connection may take to send its handshake.
    pub greeting: Duration,
    /// How long a client that has not joined a job may stay idle, and how long an incomplete message may take.
    pub idle: Duration,
    /// How long a peer may read nothing while messages are queued for it.
    pub stalled: Duration,
    /// The maximum backoff for a crash-looping device, during which no job is placed on it. The backoff starts at one
    /// second and doubles up to this limit. Zero disables it.
    pub device_backoff: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 20_000,
            handshakes: 1024,
            handshake_rate: 2000,
            jobs: 4096,
            devices: 1024,
            peer_output_bytes: 4 << 20,
            output_bytes: 256 << 20,
            input_bytes: 64 << 20,
            greeting: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            stalled: Duration::from_secs(30),
            device_backoff: Duration::from_secs(32),
        }
    }
}

/// What a name refers to, which determines its alphabet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum NameKind {
    /// A job: letters, digits, `.`, `_`, `-`, `:`, `/`, and `~`, which names of sub-communicators contain.
    Job,
    /// A host, device or machine of a fabric: printable ASCII.
    Fabric,
}

impl NameKind {
    pub(crate) const fn allows(self, byte: u8) -> bool {
        match self {
            Self::Job => byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b':' | b'/' | b'~'),
            Self::Fabric => byte.is_ascii_graphic() || byte == b' ',
        }
    }

    const fn alphabet(self) -> &'static str {
        match self {
            Self::Job => "letters, digits, `.`, `_`, `-`, `:`, `/` or `~`",
            Self::Fabric => "printable ASCII characters",
        }
    }
}

/// Check a name; `what` appears in the error.
///
/// # Errors
/// [`InvalidName`] if it is empty, longer than [`NAME_LEN_MAX`], or contains characters that its kind does not allow.
pub fn check_name(kind: NameKind, what: &str, name: &str) -> Result<(), InvalidName> {
    if (1..=NAME_LEN_MAX).contains(&name.len()) && name.bytes().all(|byte| kind.allows(byte)) {
        return Ok(());
    }
    Err(invalid_name(kind, what, name))
}

/// Describe a name that is not valid.
pub(super) fn invalid_name(kind: NameKind, what: &str, name: &str) -> InvalidName {
    InvalidName { what: what.to_owned(), kind, len: name.len(), begin: name.chars().take(NAME_LEN_MAX).collect() }
}

/// An invalid name.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[error("{begin:?} ({len} bytes) is not a valid {what} name; use 1 to {NAME_LEN_MAX} {}", kind.alphabet())]
pub struct InvalidName {
    /// What the name is for, such as "job".
    pub what: String,
    /// The kind of name, which determines its alphabet.
    pub kind: NameKind,
    /// The length of the name in bytes.
    pub len: usize,
    /// The beginning of the name.
    pub begin: String,
}

/// Derive a job name by appending `suffix`. If the result is too long, return its beginning and a hash of the whole.
/// The result is the same on all ranks.
pub fn derived_name(job: &str, suffix: &str) -> String {
    let whole = format!("{job}{suffix}");
    if whole.len() <= NAME_LEN_MAX {
        return whole;
    }
    // FNV-1a, 64 bits: collisions among the sub-communicators of one job are negligible.
    let hash = whole
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let begin: String = job.chars().take_while(char::is_ascii).take(NAME_LEN_MAX - 18).collect();
    format!("{begin}~{hash:016x}")
}

/// Truncate a reason from a peer and replace control characters, which a terminal would act on.
pub(super) fn sanitize_reason(why: &str) -> String {
    why.chars().take(REASON_CHARS_MAX).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_too_long_or_with_other_characters_is_refused_with_the_allowed_ones() {
        for name in ["job", "job/0.1/2.7~3", "a:b-c_d", &"x".repeat(64)] {
            assert_eq!(check_name(NameKind::Job, "job", name), Ok(()));
        }
        for name in ["", "a b", "a\u{1b}[31m", "caf\u{e9}", "a\nb", &"x".repeat(65)] {
            let why = check_name(NameKind::Job, "job", name).expect_err("refused").to_string();
            assert!(why.contains("1 to 64 letters") && !why.contains('\u{1b}'), "{why}");
        }
        assert_eq!(check_name(NameKind::Fabric, "host", "n1 mlx5_0"), Ok(()));
        assert!(check_name(NameKind::Fabric, "host", "n1\u{7f}").is_err());
    }

    #[test]
    fn derived_names_stay_within_the_limit_and_differ() {
        assert_eq!(derived_name("job", "/0.1"), "job/0.1");
        let long = "j".repeat(64);
        let names = ["/0.1", "/0.2", "~1"].map(|suffix| derived_name(&long, suffix));
        assert!(names.iter().all(|name| check_name(NameKind::Job, "job", name).is_ok()), "{names:?}");
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2]);
    }

    #[test]
    fn reason_is_truncated_and_control_characters_are_replaced() {
        assert_eq!(sanitize_reason("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(sanitize_reason(&"x".repeat(1000)).len(), REASON_CHARS_MAX);
    }
}
