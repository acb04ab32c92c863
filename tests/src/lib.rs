//! Whole-cluster tests.
#![forbid(unsafe_code)]
