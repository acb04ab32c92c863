//! Status codes: one for each error, for ever. Numbers are only ever added (`abi.txt`).

use sumac::comm::JoinError;
use sumac::{CreationError, Error, ShrinkError, SplitError};

/// What a function returns: SUMAC_OK, or a code for each error. The codes keep their numbers in all versions; later
/// versions add some, so treat an unknown one as an error.
///
/// Codes below 100 are of calls on a communicator, from 100 of joining, from 200 of making communicators from others,
/// and from 300 of this interface. sumac_status_is_rejection() tells which ones had no effect.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "names of C")]
pub enum Status {
    /// No error.
    SUMAC_OK = 0,
    /// Ranks called different operations. All ranks get this error; sumac_last_error_call() has both calls.
    SUMAC_ERROR_MISMATCH = 1,
    /// The peer of a message is lost, or any rank of a communicator that does not recover.
    SUMAC_ERROR_RANK_LOST = 2,
    /// Ranks failed. All survivors get this error; sumac_last_error_ranks() lists them. Go on with sumac_comm_shrink().
    SUMAC_ERROR_RANKS_FAILED = 3,
    /// This rank reaches too few ranks to go on without a controller.
    SUMAC_ERROR_PARTITIONED = 4,
    /// It cannot be determined whether the operation completed on other ranks.
    SUMAC_ERROR_OUTCOME_UNKNOWN = 5,
    /// A device on the path to the root of the tree stopped answering.
    SUMAC_ERROR_PATH_LOST = 6,
    /// A device of the tree no longer knows the job's group.
    SUMAC_ERROR_GROUP_LOST = 7,
    /// The leaf device is gone.
    SUMAC_ERROR_DEVICE_LOST = 8,
    /// The leaf device rejected a contribution or violated the protocol.
    SUMAC_ERROR_DEVICE = 9,
    /// Memory could not be registered. A rejection: nothing else has changed.
    SUMAC_ERROR_MEMORY = 10,
    /// Ranks were late for an operation; sumac_last_error_ranks() lists them.
    SUMAC_ERROR_STRAGGLERS = 11,
    /// This rank was late, and the others go on without it.
    SUMAC_ERROR_EXCLUDED = 12,
    /// The deadline passed.
    SUMAC_ERROR_DEADLINE = 13,
    /// Too many operations are in flight. A rejection.
    SUMAC_ERROR_TOO_MANY_IN_FLIGHT = 14,
    /// The requested algorithm is not possible. A rejection.
    SUMAC_ERROR_NOT_POSSIBLE = 15,
    /// A device does not support the operation.
    SUMAC_ERROR_UNSUPPORTED = 16,
    /// An argument is invalid: NULL, a wrong length, an unknown number. A rejection.
    SUMAC_ERROR_ARGUMENT = 17,
    /// A host collective or a message failed for another reason.
    SUMAC_ERROR_SCHEDULE = 18,
    /// This process was forked from the one that joined. Join a job from this process.
    SUMAC_ERROR_FORKED = 19,
    /// sumac_comm_abort() ended the communicator.
    SUMAC_ERROR_CANCELLED = 20,
    /// An earlier error ended the communicator; sumac_last_error_cause() is that error.
    SUMAC_ERROR_ENDED = 21,
    /// This rank has left the communicator, before it started a prepared operation for example.
    SUMAC_ERROR_LEFT = 22,
    /// An environment variable is missing or invalid.
    SUMAC_ERROR_ENVIRONMENT = 100,
    /// The configuration file that SUMAC_CONFIG names is invalid.
    SUMAC_ERROR_CONFIG_FILE = 101,
    /// This host has no address to bind to.
    SUMAC_ERROR_ADDRESS = 102,
    /// The controller cannot be reached, or refused the rank.
    SUMAC_ERROR_CONTROLLER = 103,
    /// Rank 0 cannot run the job's controller.
    SUMAC_ERROR_EMBEDDED_CONTROLLER = 104,
    /// The data port could not be opened.
    SUMAC_ERROR_PORT = 105,
    /// The port for connections between ranks could not be opened.
    SUMAC_ERROR_LISTEN = 106,
    /// The connections between ranks failed.
    SUMAC_ERROR_MESH = 107,
    /// Attaching to the leaf device failed.
    SUMAC_ERROR_ATTACH = 108,
    /// The controller's reply is invalid.
    SUMAC_ERROR_MEMBERSHIP = 109,
    /// A setting of sumac_config_set() is unknown or has an invalid value. A rejection.
    SUMAC_ERROR_SETTING = 110,
    /// The thread that drives started operations could not be started.
    SUMAC_ERROR_PROGRESS_THREAD = 111,
    /// This rank is no longer a member, so it cannot shrink the communicator.
    SUMAC_ERROR_NOT_MEMBER = 200,
    /// The controller does not report the survivors.
    SUMAC_ERROR_SURVIVORS = 201,
    /// A bug: the library panicked. The communicator has ended.
    SUMAC_ERROR_PANIC = 300,
    /// This rank has left, but other ranks may still have needed it.
    SUMAC_ERROR_UNCONFIRMED = 301,
    /// Nothing completed within the time limit of sumac_wait_any(). Everything goes on.
    SUMAC_ERROR_TIMEOUT = 302,
    /// The system refused a resource, such as a file descriptor. A rejection.
    SUMAC_ERROR_SYSTEM = 303,
    /// An error that this version of the interface has no code for.
    SUMAC_ERROR_OTHER = 399,
}

impl Status {
    /// All codes with their names.
    pub(crate) const ALL: &'static [(Self, &'static std::ffi::CStr)] = &all_statuses();

    /// Return whether the call had no effect, so that it can be corrected and made again.
    pub(crate) const fn is_rejection(self) -> bool {
        matches!(
            self,
            Self::SUMAC_ERROR_MEMORY
                | Self::SUMAC_ERROR_TOO_MANY_IN_FLIGHT
                | Self::SUMAC_ERROR_NOT_POSSIBLE
                | Self::SUMAC_ERROR_ARGUMENT
                | Self::SUMAC_ERROR_SETTING
                | Self::SUMAC_ERROR_SYSTEM
        )
    }

    /// Return the code of an error of a call.
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            Error::Mismatch { .. } => Self::SUMAC_ERROR_MISMATCH,
            Error::RankLost { .. } => Self::SUMAC_ERROR_RANK_LOST,
            Error::RanksFailed { .. } => Self::SUMAC_ERROR_RANKS_FAILED,
            Error::Partitioned { .. } => Self::SUMAC_ERROR_PARTITIONED,
            Error::OutcomeUnknown { .. } => Self::SUMAC_ERROR_OUTCOME_UNKNOWN,
            Error::PathLost => Self::SUMAC_ERROR_PATH_LOST,
            Error::GroupLost => Self::SUMAC_ERROR_GROUP_LOST,
            Error::DeviceLost { .. } => Self::SUMAC_ERROR_DEVICE_LOST,
            Error::Device { .. } => Self::SUMAC_ERROR_DEVICE,
            Error::Memory { .. } => Self::SUMAC_ERROR_MEMORY,
            Error::Stragglers { .. } => Self::SUMAC_ERROR_STRAGGLERS,
            Error::Excluded => Self::SUMAC_ERROR_EXCLUDED,
            Error::Deadline { .. } => Self::SUMAC_ERROR_DEADLINE,
            Error::TooManyInFlight { .. } => Self::SUMAC_ERROR_TOO_MANY_IN_FLIGHT,
            Error::NotPossible(_) => Self::SUMAC_ERROR_NOT_POSSIBLE,
            Error::Unsupported(_) => Self::SUMAC_ERROR_UNSUPPORTED,
            Error::Argument(_) => Self::SUMAC_ERROR_ARGUMENT,
            Error::Schedule(_) => Self::SUMAC_ERROR_SCHEDULE,
            Error::Forked => Self::SUMAC_ERROR_FORKED,
            Error::Cancelled => Self::SUMAC_ERROR_CANCELLED,
            Error::Left => Self::SUMAC_ERROR_LEFT,
            Error::Ended(_) => Self::SUMAC_ERROR_ENDED,
            Error::Creation(error) => Self::of_creation(error),
            _ => Self::SUMAC_ERROR_OTHER,
        }
    }

    /// Return the code of an error of joining.
    pub(crate) fn of_join(error: &JoinError) -> Self {
        match error {
            JoinError::Environment { .. } => Self::SUMAC_ERROR_ENVIRONMENT,
            JoinError::ConfigFile(_) => Self::SUMAC_ERROR_CONFIG_FILE,
            JoinError::Address(_) => Self::SUMAC_ERROR_ADDRESS,
            JoinError::Controller(_) => Self::SUMAC_ERROR_CONTROLLER,
            JoinError::EmbeddedController(_) => Self::SUMAC_ERROR_EMBEDDED_CONTROLLER,
            JoinError::Port(_) => Self::SUMAC_ERROR_PORT,
            JoinError::Listen { .. } => Self::SUMAC_ERROR_LISTEN,
            JoinError::Mesh(_) => Self::SUMAC_ERROR_MESH,
            JoinError::Attach { .. } => Self::SUMAC_ERROR_ATTACH,
            JoinError::ProgressThread { .. } => Self::SUMAC_ERROR_PROGRESS_THREAD,
            JoinError::Membership(_) => Self::SUMAC_ERROR_MEMBERSHIP,
            _ => Self::SUMAC_ERROR_OTHER,
        }
    }

    /// Return the code of an error of shrinking.
    pub(crate) fn of_shrink(error: &ShrinkError) -> Self {
        match error {
            ShrinkError::NotMember { .. } => Self::SUMAC_ERROR_NOT_MEMBER,
            ShrinkError::Survivors { .. } => Self::SUMAC_ERROR_SURVIVORS,
            ShrinkError::Join { source, .. } => Self::of_join(source),
            _ => Self::SUMAC_ERROR_OTHER,
        }
    }

    fn of_creation(error: &CreationError) -> Self {
        let error = error.get();
        if let Some(error) = error.downcast_ref::<JoinError>() {
            Self::of_join(error)
        } else if let Some(error) = error.downcast_ref::<ShrinkError>() {
            Self::of_shrink(error)
        } else if let Some(error) = error.downcast_ref::<SplitError>() {
            Self::of_split(error)
        } else {
            Self::SUMAC_ERROR_OTHER
        }
    }

    /// Return the code of an error of splitting: that of the exchange or of the join.
    pub(crate) fn of_split(error: &SplitError) -> Self {
        match error {
            SplitError::Exchange { source, .. } => Self::of(source),
            SplitError::Join { source, .. } => Self::of_join(source),
            _ => Self::SUMAC_ERROR_OTHER,
        }
    }
}

/// List codes with their names.
macro_rules! statuses {
    ($($name:ident)*) => {
        const fn all_statuses() -> [(Status, &'static std::ffi::CStr); [$(stringify!($name)),*].len()] {
            [$((Status::$name, {
                match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name has no NUL inside"),
                }
            })),*]
        }

        /// Fails to compile if a code is missing from the list.
        #[cfg(test)]
        pub(crate) const fn is_listed(status: Status) -> bool {
            match status {
                $(Status::$name => true,)*
            }
        }
    };
}

statuses! {
    SUMAC_OK SUMAC_ERROR_MISMATCH SUMAC_ERROR_RANK_LOST SUMAC_ERROR_RANKS_FAILED SUMAC_ERROR_PARTITIONED
    SUMAC_ERROR_OUTCOME_UNKNOWN SUMAC_ERROR_PATH_LOST SUMAC_ERROR_GROUP_LOST SUMAC_ERROR_DEVICE_LOST SUMAC_ERROR_DEVICE
    SUMAC_ERROR_MEMORY SUMAC_ERROR_STRAGGLERS SUMAC_ERROR_EXCLUDED SUMAC_ERROR_DEADLINE SUMAC_ERROR_TOO_MANY_IN_FLIGHT
    SUMAC_ERROR_NOT_POSSIBLE SUMAC_ERROR_UNSUPPORTED SUMAC_ERROR_ARGUMENT SUMAC_ERROR_SCHEDULE SUMAC_ERROR_FORKED
    SUMAC_ERROR_CANCELLED SUMAC_ERROR_ENDED SUMAC_ERROR_LEFT SUMAC_ERROR_ENVIRONMENT SUMAC_ERROR_CONFIG_FILE
    SUMAC_ERROR_ADDRESS SUMAC_ERROR_CONTROLLER SUMAC_ERROR_EMBEDDED_CONTROLLER SUMAC_ERROR_PORT SUMAC_ERROR_LISTEN
    SUMAC_ERROR_MESH SUMAC_ERROR_ATTACH SUMAC_ERROR_MEMBERSHIP SUMAC_ERROR_SETTING SUMAC_ERROR_PROGRESS_THREAD
    SUMAC_ERROR_NOT_MEMBER SUMAC_ERROR_SURVIVORS SUMAC_ERROR_PANIC SUMAC_ERROR_UNCONFIRMED SUMAC_ERROR_TIMEOUT
    SUMAC_ERROR_SYSTEM SUMAC_ERROR_OTHER
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_code_is_listed_once_with_a_number_of_its_own() {
        let mut numbers: Vec<i32> = Status::ALL.iter().map(|(status, _)| *status as i32).collect();
        assert!(numbers.is_sorted() && Status::ALL.iter().all(|(status, _)| is_listed(*status)));
        numbers.dedup();
        assert_eq!(numbers.len(), Status::ALL.len());
    }

    /// The library's enums are non-exhaustive, so the compiler does not find a variant that has no code.
    #[test]
    fn each_variant_of_the_library_has_a_code() {
        let listed = |source: &str, after: &str| {
            let (_, list) = source.split_once(after).expect("the list of variants");
            let (list, _) = list.split_once(");").expect("its end");
            list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        let arms = include_str!("status.rs");
        for (ty, source, after) in [
            ("Error", include_str!("../../src/engine/error.rs"), "readable_debug!(Error: "),
            ("JoinError", include_str!("../../src/engine/config.rs"), "creation_error!(JoinError: "),
            ("ShrinkError", include_str!("../../src/comm/shrink.rs"), "creation_error!(ShrinkError: "),
            ("SplitError", include_str!("../../src/comm/split.rs"), "creation_error!(SplitError: "),
        ] {
            for variant in listed(source, after) {
                let arm = |end: char| arms.contains(&format!(" {ty}::{variant}{end}"));
                assert!(arm(' ') || arm('('), "{ty}::{variant} has no code in Status");
            }
        }
    }
}
