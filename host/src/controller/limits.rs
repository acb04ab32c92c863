//! What a controller takes from outside, at most: every count, name and byte is checked against this table before it sizes
//! anything.
//!
//! | what | limit | beyond it |
//! |---|---|---|
//! | ranks of a job | [`RANKS_MAX`] | [`JoinRefusal::Ranks`](super::proto::JoinRefusal::Ranks) |
//! | a name | [`NAME_LEN_MAX`] plain characters ([`check_name`]) | [`JoinRefusal::Name`](super::proto::JoinRefusal::Name); a device is hung up on |
//! | devices that a job pins | [`PINNED_MAX`] | [`JoinRefusal::Limit`](super::proto::JoinRefusal::Limit) |
//! | memberships of a connection | 1 | [`JoinRefusal::Member`](super::proto::JoinRefusal::Member) |
//! | a reason that is given | [`REASON_CHARS_MAX`] printable characters | cut, and others replaced |
//! | a request | [`REQUEST_LEN_MAX`] | hung up on |
//! | a reply | [`REPLY_LEN_MAX`] | a report leaves jobs out, and says how many |
//! | children of a node | what the device says, at most 256 | no tree, for that reason |
//! | connections, jobs, devices, bytes | [`Limits`], configurable | [`JoinRefusal::Limit`](super::proto::JoinRefusal::Limit), or hung up on |

use std::time::Duration;

/// The most ranks of a job.
pub const RANKS_MAX: u32 = 16_384;

/// The longest name of a job, tenant, host or device in bytes.
pub const NAME_LEN_MAX: usize = 64;

/// The most devices that a job is pinned to: the levels of its tree.
pub const PINNED_MAX: usize = 16;

/// What is kept of a reason that a peer gives, in characters.
pub const REASON_CHARS_MAX: usize = 300;

/// The longest request of a client in bytes: a job's declared expression over [`RANKS_MAX`] ranks, and its nodes.
pub const REQUEST_LEN_MAX: usize = 256 * 1024;

/// The longest reply to a client in bytes: the addresses of [`RANKS_MAX`] ranks, twice, and their expression.
pub const REPLY_LEN_MAX: usize = 4 << 20;

/// Limits that an administrator may choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections of clients and devices at a time. Each takes a descriptor of the process.
    pub connections: usize,
    /// Jobs at a time, sub-communicators too.
    pub jobs: usize,
    /// Devices at a time.
    pub devices: usize,
    /// What waits to be sent to one peer, in bytes: who reads slower than that is hung up on.
    pub peer_output_bytes: usize,
    /// What waits to be sent to all peers, in bytes; what several wait for counts once.
    pub output_bytes: usize,
    /// Parts of requests that all peers have sent so far, in bytes.
    pub input_bytes: usize,
    /// How long a connection may take to say who it is.
    pub greeting: Duration,
    /// How long a client that has joined nothing may ask for nothing, and how long the rest of a message may take.
    pub idle: Duration,
    /// How long a peer may read nothing of what waits for it.
    pub stalled: Duration,
    /// The longest that a device which ends soon after it has come, again and again, is given no job. The back-off begins
    /// with one second and doubles up to this; zero: none.
    pub device_backoff: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 20_000,
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

/// Names of what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum NameKind {
    /// A job: letters, digits, `.`, `_`, `-`, `:`, `/`, and `~`, which sub-communicators' names have.
    Job,
    /// A host, device or machine, as a fabric calls it: printable ASCII.
    Fabric,
}

impl NameKind {
    const fn takes(self, byte: u8) -> bool {
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

/// Check a name.
///
/// # Errors
/// [`BadName`] if it is empty, longer than [`NAME_LEN_MAX`], or of other characters than its kind takes.
pub fn check_name(kind: NameKind, what: &str, name: &str) -> Result<(), BadName> {
    if (1..=NAME_LEN_MAX).contains(&name.len()) && name.bytes().all(|byte| kind.takes(byte)) {
        return Ok(());
    }
    Err(BadName { what: what.to_owned(), kind, len: name.len(), begin: name.chars().take(NAME_LEN_MAX).collect() })
}

/// A name that is not taken.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, thiserror::Error)]
#[error("{begin:?} ({len} bytes) is no name of a {what}; it has 1 to {NAME_LEN_MAX} {}", kind.alphabet())]
pub struct BadName {
    /// Of what.
    pub what: String,
    /// What it may be made of.
    pub kind: NameKind,
    /// Its length in bytes.
    pub len: usize,
    /// How it begins.
    pub begin: String,
}

/// Return a name that is made of another one: of the job with `suffix` behind it, or, if that is too long, of its beginning
/// and a checksum of the whole. The same at all ranks.
pub fn derived_name(job: &str, suffix: &str) -> String {
    let whole = format!("{job}{suffix}");
    if whole.len() <= NAME_LEN_MAX {
        return whole;
    }
    // FNV-1a, 64 bits: names of one job's sub-communicators do not meet by chance.
    let hash = whole
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    let begin: String = job.chars().take_while(char::is_ascii).take(NAME_LEN_MAX - 18).collect();
    format!("{begin}~{hash:016x}")
}

/// Return what is kept of a reason that a peer gives: its beginning, without what a terminal would act on.
pub(super) fn plain_reason(why: &str) -> String {
    why.chars().take(REASON_CHARS_MAX).map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_other_characters_or_too_long_is_refused_with_what_is_allowed() {
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
    fn derived_name_stays_within_the_limit_and_differs() {
        assert_eq!(derived_name("job", "/0.1"), "job/0.1");
        let long = "j".repeat(64);
        let names = ["/0.1", "/0.2", "~1"].map(|suffix| derived_name(&long, suffix));
        assert!(names.iter().all(|name| check_name(NameKind::Job, "job", name).is_ok()), "{names:?}");
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2]);
    }

    #[test]
    fn reason_with_control_characters_is_made_plain() {
        assert_eq!(plain_reason("a\u{1b}[2Jb\n"), "a\u{fffd}[2Jb\u{fffd}");
        assert_eq!(plain_reason(&"x".repeat(1000)).len(), REASON_CHARS_MAX);
    }
}
