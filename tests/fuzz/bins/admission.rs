//! libFuzzer's program for the target `admission`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::admission::run(data));
