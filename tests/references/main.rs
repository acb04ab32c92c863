//! Contributions by reference from end to end: controller, boards with their engines, and ranks in one process, against
//! the oracle.
//!
//! | file | what |
//! |---|---|
//! | `calls` | operations, the memory that a rank calls them with, and what has to be there afterwards |
//! | `grid` | the whole table of collectives, types and operators |
//! | `seats` | what the controller gives to jobs |
//! | `orders` | declared orders: the same bits whichever way the bytes take |
//! | `levels` | two levels, and how many bytes move where |
//! | `liar` | a rank on another host that lies about its memory |
//! | `flight` | operations in flight, and registered memory that comes and goes |
//! | `far` | ranks on other hosts than their devices, over the double of links |
//! | `sharing` | groups that share a device, calls that differ, and devices without room |

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod far;
mod flight;
mod grid;
mod levels;
mod liar;
mod orders;
mod seats;
mod sharing;
