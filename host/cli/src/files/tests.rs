//! Tests of files of both formats as other crates write them, invalid files, and files that do not match.

use super::*;
use ::safetensors::tensor::{Dtype as Stored, TensorView, serialize};
use proptest::prelude::*;

/// A file that is removed when it is dropped.
pub(super) struct TestFile(pub(super) PathBuf);

impl TestFile {
    pub(super) fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("sumac-files-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).expect("a writable temporary directory");
        Self(path)
    }

    fn path(&self) -> PathBuf {
        self.0.clone()
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Return a file of zero tensors, as the `safetensors` crate writes it.
fn tensors(tensors: &[(&str, Stored, &[usize])]) -> Vec<u8> {
    let zeros = vec![0; 1 << 12];
    let metadata = [("format".to_owned(), "pt".to_owned())];
    let views: Vec<_> = tensors
        .iter()
        .map(|&(name, dtype, shape)| {
            let len = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (name, TensorView::new(dtype, shape.to_vec(), &zeros[..len]).expect("a view"))
        })
        .collect();
    serialize(views, Some(metadata.into_iter().collect())).expect("memory")
}

fn npy_f32(shape: &str, count: usize) -> Vec<u8> {
    let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n");
    let len = (text.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\0", &len[..], text.as_bytes(), &vec![0; count * 4]].concat()
}

fn safetensors_file(name: &str, bytes: &[u8]) -> TestFile {
    TestFile::new(&format!("{name}.safetensors"), bytes)
}

fn refused(name: &str, bytes: &[u8]) -> String {
    let file = safetensors_file(name, bytes);
    let message = ArrayFile::inspect(&file.0).expect_err("a bad file").to_string();
    assert!(message.contains(&file.0.display().to_string()), "{message}");
    message
}

fn disagree(files: &[&TestFile], axis0: Axis0) -> String {
    let paths: Vec<_> = files.iter().map(|file| file.path()).collect();
    inspect_all(&paths, axis0).expect_err("they do not go together").to_string()
}

#[test]
fn tensors_and_metadata_are_read() {
    let bytes = tensors(&[("a.weight", Stored::F32, &[2, 3]), ("b", Stored::BF16, &[]), ("c", Stored::I64, &[0, 4])]);
    let file = safetensors_file("found", &bytes);
    let found = ArrayFile::inspect(&file.0).expect("a good file");
    let get = |name: &str| found.tensor(name).map(|tensor| (tensor.dtype, &tensor.shape[..], tensor.len_bytes));
    assert_eq!(get("a.weight"), Some((Dtype::F32, &[2, 3][..], 24)));
    assert_eq!(get("b"), Some((Dtype::Bf16, &[][..], 2)));
    assert_eq!(get("c"), Some((Dtype::I64, &[0, 4][..], 0)));
    assert_eq!(found.metadata, Some(BTreeMap::from([("format".to_owned(), "pt".to_owned())])));
    assert_eq!(found.head, &bytes[..found.head.len()]);
    assert_eq!(found.head.len() + 26, bytes.len());
}

#[test]
fn invalid_safetensors_error_names_the_fault() {
    let good = tensors(&[("x", Stored::F32, &[4])]);
    let short = refused("short", &good[..good.len() - 3]);
    assert!(short.contains("13 bytes") && short.contains("16") && short.contains("truncated"), "{short}");
    let long = refused("long", &[&good[..], &[0]].concat());
    assert!(long.contains("17 bytes") && long.contains("longer than its header"), "{long}");
    assert!(refused("empty", b"").contains("ends within its header's length"));
    let header = refused("header", &[&200_u64.to_le_bytes()[..], &good[8..]].concat());
    assert!(header.contains("the header length 200 exceeds the limit of"), "{header}");
    let huge = refused("huge", &[&u64::MAX.to_le_bytes()[..], &good[8..]].concat());
    assert!(huge.contains(&u64::MAX.to_string()), "{huge}");
    assert!(refused("json", b"\x02\0\0\0\0\0\0\0{]").contains("invalid header"));
    let gap = String::from_utf8_lossy(&good).replace("[0,16]", "[1,17]");
    assert!(refused("gap", gap.as_bytes()).contains("invalid header"));
    let other = refused("type", &tensors(&[("x.y", Stored::F8_E8M0, &[4])]));
    assert!(other.contains("tensor \"x.y\": element type F8_E8M0") && other.contains("BF16"), "{other}");
    assert!(refused("nameless", &tensors(&[("", Stored::F32, &[4])])).contains("without a name"));
}

#[test]
fn differing_arrays_error_names_both_files_and_values() {
    let a = TestFile::new("a.npy", &npy_f32("(2, 3)", 6));
    let b = TestFile::new("b.npy", &npy_f32("(3, 2)", 6));
    let ints = npy_f32("(2, 3)", 6);
    let ints: Vec<u8> = String::from_utf8_lossy(&ints[10..]).replace("<f4", "<i4").into_bytes();
    let c = TestFile::new("c.npy", &[&npy_f32("(2, 3)", 6)[..10], &ints].concat());
    let shape = disagree(&[&a, &b], Axis0::Keep);
    assert!(shape.contains("shape (3, 2)") && shape.contains("has (2, 3)") && shape.contains("-b.npy"), "{shape}");
    let dtype = disagree(&[&a, &c], Axis0::Keep);
    assert!(dtype.contains("element type i32") && dtype.contains("has f32") && dtype.contains("-a.npy"), "{dtype}");
}

#[test]
fn differing_tensors_error_names_file_tensor_and_both_values() {
    let a = safetensors_file("a", &tensors(&[("x", Stored::F32, &[4]), ("y", Stored::F16, &[2, 2])]));
    let shape = safetensors_file("b", &tensors(&[("x", Stored::F32, &[4]), ("y", Stored::F16, &[2, 3])]));
    let dtype = safetensors_file("c", &tensors(&[("x", Stored::I32, &[4]), ("y", Stored::F16, &[2, 2])]));
    let fewer = safetensors_file("d", &tensors(&[("x", Stored::F32, &[4])]));
    let array = TestFile::new("e.npy", &npy_f32("(4,)", 4));
    let error = disagree(&[&a, &shape], Axis0::Keep);
    assert!(
        error.contains("-b.safetensors: tensor \"y\": shape (2, 3), but") && error.contains("has (2, 2)"),
        "{error}"
    );
    let error = disagree(&[&a, &dtype], Axis0::Keep);
    assert!(error.contains("-c.safetensors: tensor \"x\": element type i32") && error.contains("has f32"), "{error}");
    let error = disagree(&[&a, &fewer], Axis0::Keep);
    assert!(
        error.contains("-d.safetensors: lacks tensor \"y\", which") && error.contains("-a.safetensors has"),
        "{error}"
    );
    let error = disagree(&[&fewer, &a], Axis0::Keep);
    assert!(error.contains("-d.safetensors: lacks tensor \"y\", which"), "{error}");
    let error = disagree(&[&a, &array], Axis0::Keep);
    assert!(error.contains("-e.npy: a .npy file, but") && error.contains("is .safetensors"), "{error}");
}

#[test]
fn axis_0_may_differ_when_concatenated_and_must_divide_when_split() {
    let (a, b) = (TestFile::new("j.npy", &npy_f32("(2, 3)", 6)), TestFile::new("k.npy", &npy_f32("(5, 3)", 15)));
    let scalar = TestFile::new("s.npy", &npy_f32("()", 1));
    let files = inspect_all(&[a.path(), b.path()], Axis0::Join).expect("they match");
    let head = OutputHead::new(&files, Axis0::Join).expect("a head");
    assert_eq!((&head.tensors[0].shape[..], head.tensors[0].len_bytes), (&[7, 3][..], 84));
    let error = disagree(&[&a, &scalar], Axis0::Join);
    assert!(error.contains("-s.npy: shape () has no axis 0 to concatenate along"), "{error}");
    let files = inspect_all(&[a.path(), a.path()], Axis0::Cut).expect("they match");
    assert_eq!(OutputHead::new(&files, Axis0::Cut).expect("a head").tensors[0].shape, [1, 3]);
    let error = disagree(&[&b, &b], Axis0::Cut);
    assert!(error.contains("cannot split shape (5, 3) into 2 equal parts: axis 0 has 5"), "{error}");
}

#[test]
fn safetensors_crate_reads_generated_heads() {
    let bytes = tensors(&[("x", Stored::F32, &[4, 2]), ("y", Stored::BF16, &[2]), ("z", Stored::F64, &[6])]);
    let file = safetensors_file("cut", &bytes);
    let files = inspect_all(&[file.path(), file.path()], Axis0::Cut).expect("they match");
    let head = OutputHead::new(&files, Axis0::Cut).expect("a head");
    let len: usize = head.tensors.iter().map(|tensor| tensor.len_bytes).sum();
    assert!(head.bytes.len().is_multiple_of(8), "elements are aligned to 8 bytes");
    let whole = [&head.bytes[..], &vec![0; len]].concat();
    let read = ::safetensors::SafeTensors::deserialize(&whole).expect("a good file");
    assert_eq!(read.tensor("x").map(|x| x.shape().to_vec()).ok(), Some(vec![2, 2]));
    assert_eq!(read.tensor("z").map(|z| z.dtype()).ok(), Some(Stored::F64));
    let (_, metadata) = ::safetensors::SafeTensors::read_metadata(&whole).expect("a header");
    assert_eq!(metadata.metadata().as_ref().and_then(|kept| kept.get("format")).map(String::as_str), Some("pt"));
    for tensor in &head.tensors {
        let written = metadata.info(&tensor.name).expect("the tensor").data_offsets;
        assert_eq!(written.0 + head.bytes.len(), tensor.offset as usize, "{}", tensor.name);
    }
}

proptest! {
    #[test]
    fn arbitrary_header_does_not_panic(text in "[{}\\[\\]\"a-z_:,0-9F]{0,60}", data in 0_usize..20) {
        let bytes = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &vec![0; data]].concat();
        let file = safetensors_file("fuzz", &bytes);
        // Some headers are valid: `{}` without data.
        if let Ok(found) = ArrayFile::inspect(&file.0) {
            prop_assert_eq!(found.head.len() + data, bytes.len());
        }
    }
}
