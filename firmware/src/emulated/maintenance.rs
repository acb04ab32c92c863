//! What a board needs to update the system that it runs on.

use std::fmt;
use sumac_hal::ctrl::update::{SlotsStatus, UPDATE_TEXT_MAX_LEN, UpdateRequest, UpdateStatus, UpdateText};

/// Updates the system that a board runs on, at its controller's request.
///
/// The control thread calls it between other requests, such as renewals of groups, so none of the calls may wait for a
/// disk.
pub trait Maintenance: fmt::Debug + Send + Sync {
    /// Return the system's slots, for the announcement.
    fn slots(&self) -> SlotsStatus;

    /// Carry out a request, or begin to.
    ///
    /// # Errors
    /// The reason why the request is refused. Nothing has changed then.
    fn handle(&self, request: UpdateRequest) -> Result<UpdateStatus, String>;

    /// The response to a request was sent: what would have kept it from being sent, such as a restart, may begin now.
    fn handle_sent(&self);
}

/// Return the beginning of a reason, as much as a message holds.
pub(crate) fn update_text(why: &str) -> UpdateText {
    let mut text = UpdateText::new();
    for character in why.chars() {
        if text.len() + character.len_utf8() > UPDATE_TEXT_MAX_LEN || text.push(character).is_err() {
            break;
        }
    }
    text
}
