//! Errors in fabric descriptions.
//!
//! Invariant: every error in a text names the line (from 1), what was found and what was expected; a contradiction
//! names both lines.

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
    /// The file was read, but its text is not a fabric.
    #[error("{}: {source}", path.display())]
    Fabric {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FabricError,
    },
}

/// An oddity in a fabric description that does not prevent its use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The line, from 1.
    pub line: usize,
    /// The description, one sentence.
    pub text: String,
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.text)
    }
}
