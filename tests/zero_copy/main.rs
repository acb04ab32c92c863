//! Zero-copy from end to end: controller, boards with their engines, and ranks in one process; results are compared
//! with the oracle's.
//!
//! | file | tests |
//! |---|---|
//! | `call` | (helper) an operation, the memory of each rank, and the expected contents of that memory afterwards |
//! | `grid` | every combination of collective, element type and operator |
//! | `membership` | (helper) joins ranks without a communicator and returns what the controller assigned |
//! | `orders` | declared orders: the same bits over every transport |
//! | `levels` | two-level trees, and the number of bytes sent on each hop |
//! | `false_bounds` | a remote rank that announces more memory than it has |
//! | `in_flight` | overlapping operations, and registered memory that is allocated and dropped meanwhile |
//! | `remote` | ranks on other hosts than their device, over emulated links |
//! | `shared_device` | groups that share a device, mismatched calls, and devices without enough redo memory |

#[path = "../common/mod.rs"]
mod common;

mod call;
mod false_bounds;
mod grid;
mod in_flight;
mod levels;
mod membership;
mod orders;
mod remote;
mod shared_device;
