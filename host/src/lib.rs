//! The host's side of Sumac.
