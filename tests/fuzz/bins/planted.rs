//! libFuzzer's program for the target `wire` with a planted bug.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sumac_fuzz::wire::planted(data));
