use super::*;
use crate::exec::MeshError;
use crate::{JoinError, ShrinkError, SplitError};

#[test]
fn ranks_failed_display_names_ranks_call_and_output() {
    let failed = |ranks: &[u32], output| Error::RanksFailed {
        ranks: ranks.iter().copied().map(Rank).collect(),
        operation: 7,
        output,
    };
    let text = failed(&[3], OutputState::Elements(std::iter::once(0..64).collect())).to_string();
    assert!(text.starts_with("rank 3 is lost: collective #7 and all later ones were aborted"), "{text}");
    assert!(text.ends_with("output elements 0..64 hold results, all others are unchanged"), "{text}");
    let text = failed(&[1, 2, 5], OutputState::Elements(vec![4..8, 12..16])).to_string();
    assert!(text.starts_with("ranks 1, 2 and 5 are lost: "), "{text}");
    assert!(
        text.ends_with("2 ranges of output elements within 4..16 hold results, all others are unchanged"),
        "{text}"
    );
}

#[test]
fn debug_prints_the_message_and_causes_it_lacks() {
    let listener = MeshError::Listener(std::io::ErrorKind::AddrInUse.into());
    let join = JoinError::Mesh(listener);
    assert_eq!(format!("{join:?}"), "cannot make the listener non-blocking: address in use");
    assert_eq!(format!("{join:#?}"), "Mesh: cannot make the listener non-blocking: address in use");
    let error = Error::from(SplitError::Join { name: "job/0.1".into(), source: Box::new(join) });
    let text = "joining job/0.1: cannot make the listener non-blocking: address in use";
    assert_eq!(format!("{error:?}"), text);
    assert_eq!(format!("{error:#?}"), format!("Creation: {text}"));
    assert_eq!(
        format!("{:?}", Error::Ended(Box::new(Error::PathLost))),
        Error::Ended(Box::new(Error::PathLost)).to_string()
    );
}

#[test]
fn creation_error_equals_its_clone_and_downcasts() {
    let make = || Error::from(ShrinkError::NotMember { name: "job".into() });
    let error = make();
    assert_eq!(error, error.clone());
    assert_ne!(error, make());
    let Error::Creation(inner) = error else { panic!("{error:#?}") };
    assert!(matches!(inner.get().downcast_ref(), Some(ShrinkError::NotMember { name }) if name == "job"));
}

/// A failed recovery leaves ranks at different points, whatever the error was.
#[test]
fn ending_error_is_no_rejection_and_keeps_its_text() {
    for error in [Error::Argument("no schedule".into()), Error::PathLost, Error::Cancelled] {
        let text = error.to_string();
        let ending = error.ending();
        assert!(!ending.is_rejection() && ending.to_string().contains(&text), "{ending}");
    }
}
