//! libFuzzer's program for the target `wire`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::wire::run(data));
