//! The library as its users meet it: errors and log lines of programs, started operations, buckets, clusters for tests,
//! and training that goes on when a device dies.

mod buckets;
mod clusters;
mod errors;
mod logging;
mod messages;
mod prepared;
mod programs;
mod progress;
mod relays;
mod settled;
mod started;
#[path = "../../host/examples/train.rs"]
mod train;
mod training;
mod uneven;
