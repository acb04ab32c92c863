//! Errors in fabric descriptions.
//!
//! Invariant: every error in a text names the line (from 1), what was found and what was expected; a contradiction
//! names both lines.

use super::similar;
use std::path::PathBuf;

/// Why a fabric description is refused. Lines count from 1.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The text does not follow the format.
    #[error("line {line}: found {found}, expected {expected}")]
    Syntax {
        /// The line.
        line: usize,
        /// What was found.
        found: String,
        /// What the format expects.
        expected: String,
    },
    /// Two records have the same GUID (or name, in formats without GUIDs).
    #[error("line {line}: `{id}` was already described on line {first_line}; remove or rename one of the two")]
    DuplicateNode {
        /// The second record.
        line: usize,
        /// The first record.
        first_line: usize,
        /// The GUID or name.
        id: String,
    },
    /// One port is listed twice.
    #[error("line {line}: port {port} of `{id}` was already listed on line {first_line}; a port holds one cable")]
    DuplicatePort {
        /// The second listing.
        line: usize,
        /// The first listing.
        first_line: usize,
        /// The node.
        id: String,
        /// The port's number.
        port: u16,
    },
    /// The two ends of a cable contradict each other.
    #[error("line {line} says `{near}`, but line {other_line} says `{far}`: the two sides of a link must agree")]
    LinkDisagrees {
        /// The listing at one end.
        line: usize,
        /// What it lists.
        near: String,
        /// The listing at the other end.
        other_line: usize,
        /// What that lists.
        far: String,
    },
    /// A link names a node that the text does not describe.
    #[error("line {line}: a link leads to `{id}`, which no record describes; add the record or remove the link")]
    UnknownNode {
        /// The link.
        line: usize,
        /// The missing node.
        id: String,
    },
    /// There is no switch in the text.
    #[error("no switch among the {records} records read; expected at least one `{expected}`")]
    Empty {
        /// Records of any kind.
        records: usize,
        /// What a switch looks like in the format.
        expected: &'static str,
    },
    /// No reader knows the text.
    #[error(
        "line {line}: found {found}, expected a fabric: output of ibnetdiscover, an ibsim .net file, TOML with \
         [[switch]], Slurm's topology.conf, or NetQ's JSON"
    )]
    UnknownFormat {
        /// The first line that tells nothing.
        line: usize,
        /// That line.
        found: String,
    },
    /// The text is of a known kind, but holds no fabric.
    #[error("this is {kind}, which holds no fabric; use {instead}")]
    Unfit {
        /// What it is.
        kind: &'static str,
        /// What to use.
        instead: String,
    },
    /// More nodes than a fabric may have.
    #[error("line {line}: the lists name more than {limit} nodes; a fabric has at most that many")]
    TooManyNodes {
        /// The line.
        line: usize,
        /// The limit.
        limit: usize,
    },
    /// A generator was given an invalid size.
    #[error("a fabric with {what} {value} cannot be built; expected {expected}")]
    Shape {
        /// The parameter.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The valid values.
        expected: &'static str,
    },
}

/// Why a fabric file could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file cannot be read.
    #[error("{}: cannot read the fabric file", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is too long.
    #[error("{}: the file has more than {} MiB; a fabric has at most that", path.display(), limit_bytes >> 20)]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The file was read, but its text is not a fabric.
    #[error("{}: {source}", path.display())]
    Fabric {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FabricError,
    },
}

/// Why hosts cannot be selected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// The selection is empty.
    #[error("no {unit} is selected; a tree needs at least one")]
    Empty {
        /// What is counted.
        unit: super::Unit,
    },
    /// More are requested than there are.
    #[error("{asked} {unit}s requested, but the fabric has {available}{}", left_out(*excluded))]
    TooMany {
        /// What is counted.
        unit: super::Unit,
        /// The requested number.
        asked: usize,
        /// The number that can be taken.
        available: usize,
        /// The number that the selection leaves out.
        excluded: usize,
    },
    /// Nothing has this name or GUID.
    #[error("no {unit} is named `{name}`{}", similar::hint(near))]
    Unknown {
        /// What is counted.
        unit: super::Unit,
        /// The requested name.
        name: String,
        /// Similar names, the nearest first.
        near: Vec<String>,
    },
    /// Several adapters have this description.
    #[error("{} hosts are named `{name}`; select one by its GUID: {}", guids.len(), similar::some_of(guids))]
    Ambiguous {
        /// The requested name.
        name: String,
        /// The GUIDs of those adapters.
        guids: Vec<String>,
    },
    /// One is listed twice.
    #[error("host `{name}` is listed twice; a host holds one rank")]
    Duplicate {
        /// Its name.
        name: String,
    },
    /// A list of names is malformed.
    #[error("`{list}` is not a list of hosts: {reason}")]
    List {
        /// The list.
        list: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A pattern matches nothing, so it is probably misspelt.
    #[error("nothing to exclude matches `{pattern}`")]
    UselessPattern {
        /// The pattern.
        pattern: String,
    },
}

fn left_out(excluded: usize) -> String {
    if excluded == 0 { String::new() } else { format!(" besides {excluded} left out") }
}

/// Why the inside of a server cannot be joined to a fabric.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// No server matches the pattern.
    #[error("no server of the fabric matches `{pattern}`{}", similar::hint(near))]
    NoServer {
        /// The pattern.
        pattern: String,
        /// Similar names.
        near: Vec<String>,
    },
    /// The topology names no adapter's GUID, so it does not say which server it is of.
    #[error("the topology names no GUIDs of adapters; say which servers it is of, as in SERVER=FILE")]
    NoGuids,
    /// No adapter of the fabric has one of the GUIDs.
    #[error(
        "no adapter of the fabric has one of the topology's GUIDs ({}); say which servers it is of, as in SERVER=FILE",
        similar::some_of(guids)
    )]
    UnknownGuids {
        /// The GUIDs.
        guids: Vec<String>,
    },
}

/// An oddity in a fabric description that does not prevent its use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The line, from 1; 0 if it concerns no single line.
    pub line: usize,
    /// The description, one sentence.
    pub text: String,
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            0 => f.write_str(&self.text),
            line => write!(f, "line {line}: {}", self.text),
        }
    }
}
