//! Names the shared library: programs that link it ask for `libsumac.so.0` at run time. The number is that of the ABI,
//! and changes when a function is removed or changed, which `abi.txt` is there to prevent.
//!
//! rustc itself passes the linker a version script that exports what is `#[no_mangle]` and nothing else; GNU ld refuses
//! a second one.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libsumac.so.0");
}
