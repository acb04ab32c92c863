//! The agent: the device runtime on the Linux of a BlueField-class card.
//!
//! ```text
//!   kernel
//!     |  /init, process 1
//!   init: mounts, modules, network, configuration ----> boot log (rsh_log), console
//!     |
//!   supervisor: reaps processes, restarts the runtime with backoff
//!     |  /init runtime, another process; its configuration on stdin, its status on stdout
//!   runtime: sumac-firmware's board, a thread per shard and one for the controller
//! ```
//!
//! The same program serves every role: as process 1 it is init and supervisor, elsewhere it is the supervisor alone (a
//! service of an existing Linux), and it starts itself as the runtime. A runtime that ends loses its groups; the next
//! one has another boot id, by which controller and ranks detect the restart.
//!
//! | module | what |
//! |---|---|
//! | [`config`] | the agent's configuration |
//! | [`store`] | its storage: two copies with checksums |
//! | [`log`] | the card's boot log, and the console |
//! | [`init`] | start-up, as process 1 or as a service |
//! | [`disks`], [`boot_order`], [`install`] | installing what follows a boot stream, starting from a slot |
//! | [`receive`] | installing what a host sends while the card runs |
//! | [`trial`], [`watchdog`] | confirming a version that runs from a slot, or going back |
//! | [`self_test`] | the runtime's self-test |
//! | [`system`] | mounts, modules, devices, restarting |
//! | [`network`] | the interface of the data ports |
//! | [`netlink`] | addresses and routes |
//! | [`supervisor`] | the runtime's process |
//! | [`runtime`] | the runtime itself |
//! | [`update`] | updates over the network, and the trial of a slot |
//!
//! Invariants:
//! - process 1 never ends: on an error that it cannot recover from, it logs the error and restarts the card;
//! - a configuration store is never trusted: a damaged copy counts as absent;
//! - no unsafe code: system calls go through rustix, netlink messages are bytes.
#![forbid(unsafe_code)]

#[cfg(all(feature = "verbs", target_feature = "crt-static"))]
compile_error!(
    "libibverbs loads its drivers at run time, which a static program can't: build the agent with `verbs` for a target \
     with shared libraries (aarch64-unknown-linux-gnu), and run it as a service of the card's Linux"
);

pub mod boot_order;
pub mod config;
pub mod disks;
pub mod init;
pub mod install;
pub mod log;
#[cfg(test)]
mod memory_variables;
pub mod netlink;
pub mod network;
pub mod receive;
pub mod runtime;
pub mod self_test;
pub mod store;
pub mod supervisor;
pub mod system;
pub mod trial;
pub mod update;
pub mod watchdog;
