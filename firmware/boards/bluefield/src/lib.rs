//! The agent: the device runtime on the Linux of a BlueField-class card.
//!
//! ```text
//!   kernel
//!     |  /init, process 1
//!   init: mounts, modules, network, configuration ----> boot log (rsh_log), console
//!     |
//!   supervisor: reaps, starts again with back-off
//!     |  /init runtime, another process; its configuration on stdin, what becomes of it on stdout
//!   runtime: sumac-firmware's board, a thread a shard, one for the controller
//! ```
//!
//! The program is the same in each place: process 1 is init and supervisor, elsewhere it is the supervisor alone (a service of
//! somebody else's Linux), and what it starts is the runtime. A runtime that dies has lost its groups; the next one has
//! another boot id, by which controller and ranks notice.
//!
//! | module | what |
//! |---|---|
//! | [`config`] | what the agent is told |
//! | [`store`] | where it is kept: two checked copies |
//! | [`log`] | the card's boot log, and the console |
//! | [`init`] | process 1 and the service, from the first step to the runtime |
//! | [`system`] | mounts, modules, devices, restarting |
//! | [`network`] | interfaces, by netlink |
//! | [`supervisor`] | the runtime's process |
//! | [`runtime`] | what runs in it |
//!
//! Invariants:
//! - process 1 never ends: what can't be put right is told, and then the card restarts;
//! - a configuration store is never trusted: a copy that is damaged is as if it was not there;
//! - no unsafe code: system calls go through rustix, netlink messages are bytes.
#![forbid(unsafe_code)]

#[cfg(all(feature = "verbs", target_feature = "crt-static"))]
compile_error!(
    "libibverbs loads its drivers at run time, which a static program can't: build the agent with `verbs` for a target \
     with shared libraries (aarch64-unknown-linux-gnu), and run it as a service of the card's Linux"
);

pub mod config;
pub mod init;
pub mod log;
pub mod network;
pub mod runtime;
pub mod store;
pub mod supervisor;
pub mod system;
