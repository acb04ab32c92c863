//! What ranks that a launcher has started tell each other: reports for rank 0, and figures that all of them need.

use crate::exit::Failure;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sumac::{Communicator, ReduceOp};

/// Return the reports of all ranks in order of rank, at rank 0.
///
/// # Errors
/// The communicator failed.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(
    communicator: &Communicator,
    report: &T,
) -> Result<Option<Vec<T>>, Failure> {
    let mut text = serde_json::to_vec(report).map_err(Failure::run)?;
    let mut longest = [text.len() as u64];
    communicator.all_reduce(&mut longest, ReduceOp::Max).map_err(Failure::run)?;
    // Blocks have one length. White space after a value is none of it.
    let len = usize::try_from(longest[0]).map_err(Failure::run)?;
    text.resize(len, b' ');
    let is_root = communicator.rank() == 0;
    let mut all = vec![0_u8; if is_root { len * communicator.size() as usize } else { 0 }];
    communicator.gather(&text, &mut all, 0).map_err(Failure::run)?;
    let reports = all.chunks_exact(len).map(serde_json::from_slice).collect::<Result<_, _>>().map_err(Failure::run)?;
    Ok(is_root.then_some(reports))
}

/// Add figures up over the ranks.
///
/// # Errors
/// The communicator failed.
pub(crate) fn sum<const N: usize>(communicator: &Communicator, mut figures: [u64; N]) -> Result<[u64; N], Failure> {
    communicator.all_reduce(&mut figures, ReduceOp::Sum).map_err(Failure::run)?;
    Ok(figures)
}

/// Return the failure of joining: addresses that this host does not have are invalid input.
pub(crate) fn joining(error: sumac::JoinError) -> Failure {
    match error {
        sumac::JoinError::Address(_) | sumac::JoinError::Environment { .. } => Failure::input(error),
        error => Failure::run(error),
    }
}
