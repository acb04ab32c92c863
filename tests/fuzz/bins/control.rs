//! libFuzzer's program for the target `control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::control::run(data));
