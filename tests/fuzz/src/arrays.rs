//! Array files, `.npy` and `.safetensors`, as the command reads them.
//!
//! Input: a byte (even: `.npy`), then the file.

use std::path::Path;

// The command has no library, so its readers are compiled into this crate.
#[path = "../../../host/cli/src/files/mod.rs"]
#[allow(dead_code, unused_imports, unreachable_pub)]
mod files;

use files::{ArrayFile, Format};

/// Run the target.
///
/// # Panics
/// If an invariant is violated.
pub fn run(data: &[u8]) {
    let Some((kind, file)) = data.split_first() else { return };
    let path = Path::new(if kind % 2 == 0 { "a.npy" } else { "a.safetensors" });
    match ArrayFile::inspect_from(&mut &file[..], file.len() as u64, path) {
        Ok(array) => check(&array, file),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// Check that an accepted file contains exactly its elements.
fn check(array: &ArrayFile, file: &[u8]) {
    assert!(file.starts_with(&array.head));
    let mut end = array.head.len();
    for tensor in &array.tensors {
        let elements = tensor.shape.iter().try_fold(1_u64, |n, &dim| n.checked_mul(dim));
        assert_eq!(elements, Some(tensor.count()), "{tensor:?}");
        assert_eq!(tensor.offset, end as u64, "no gaps");
        end += tensor.len_bytes;
        assert_eq!(tensor.name.is_empty(), array.format == Format::Npy);
    }
    assert_eq!(end, file.len());
}
