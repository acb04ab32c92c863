//! Links the image as `link.ld` says, and again when that changes.

fn main() {
    println!("cargo:rerun-if-changed=link.ld");
    println!("cargo:rustc-link-arg-bins=-Tlink.ld");
}
