//! The calls in which other ranks wait, seen by a rank that is elsewhere: in the tree.
//!
//! Short collectives of one machine's ranks are not announced to the tree ([`crate::engine`]), so the tree's nodes
//! cannot compare them with what other ranks call. A rank that waits in the tree looks here instead, now and then: at
//! the frames that others have sent for their operation, and at the board. Their numbers tell whether they are in the
//! same call. An abort that has arrived ends the mesh as in any operation.

use super::error::{Call, ExecError};
use super::frame::Header;
use super::mesh::Mesh;
use super::message::{cancel, without_schedule};
use super::run::Interrupt;
use sumac_hal::op::{OpDesc, Path};

/// Return the calls in which other ranks are, as far as they have sent or posted something, with their numbers
/// ([`super::Context::number`]). Does not wait.
///
/// # Errors
/// The error that has ended the mesh, or ends it now.
pub(crate) fn other_calls(mesh: &mut Mesh, interrupt: &mut dyn Interrupt) -> Result<Vec<(u32, Call)>, ExecError> {
    without_schedule(mesh, |run| run.poll_sockets(false, interrupt).map(|_| ()))?;
    let announced = std::mem::take(&mut mesh.announced);
    let held = mesh.links.iter().filter_map(|link| link.rx.frame);
    let headers = held.chain(mesh.posted_calls());
    Ok(headers.map(|header: Header| (header.number, header.call)).chain(announced).collect())
}

/// End the mesh on all ranks because this rank is in the tree with another operation than `theirs`. Returns the error.
pub(crate) fn end_different(mesh: &mut Mesh, (desc, signature): (&OpDesc, u32), theirs: Call) -> ExecError {
    let ours = Call::new(mesh.rank(), theirs.op_index, signature, desc, Path::Tree);
    let error = ExecError::mismatch(ours, theirs);
    cancel(mesh, error.clone());
    error
}
