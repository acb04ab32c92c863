//! libFuzzer's program for the target `fabrics`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::fabrics::run(data));
