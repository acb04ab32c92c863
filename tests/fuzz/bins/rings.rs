//! libFuzzer's program for the target `rings`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::rings::run(data));
