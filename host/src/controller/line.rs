//! The way to somebody who is told things: a connection, or what a rehearsal carries in its place.

use std::fmt::Debug;
use std::io::Write;
use std::net::{Shutdown, TcpStream};

/// Takes frames, each in one write, towards one peer.
pub(super) trait Line: Write + Send + Debug {
    /// End the connection from the side of its writer, which ends its reader too.
    fn hang_up(&self);
}

impl Line for TcpStream {
    fn hang_up(&self) {
        // Fails only if the peer was faster.
        let _ = self.shutdown(Shutdown::Both);
    }
}
