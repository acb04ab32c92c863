//! The aggregation runtime.
#![no_std]
#![forbid(unsafe_code)]
