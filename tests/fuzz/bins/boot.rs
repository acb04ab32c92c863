//! libFuzzer's program for the target `boot`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::boot::run(data));
