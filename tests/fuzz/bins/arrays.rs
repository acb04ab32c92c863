//! libFuzzer's program for the target `arrays`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::arrays::run(data));
