//! Arrays as another crate writes them, and files that are none.

use super::*;
use npyz::WriterBuilder;
use proptest::prelude::*;

/// A file that is gone with the test.
struct TestFile(PathBuf);

impl TestFile {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("sumac-npy-{}-{name}.npy", std::process::id()));
        std::fs::write(&path, bytes).expect("a writable temporary directory");
        Self(path)
    }
}

impl Drop for TestFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn npy<T: npyz::AutoSerialize + Copy>(values: &[T], shape: &[u64], order: npyz::Order) -> Vec<u8> {
    let mut bytes = Vec::new();
    let options = npyz::WriteOptions::new().default_dtype().shape(shape).order(order).writer(&mut bytes);
    let mut writer = options.begin_nd().expect("memory");
    writer.extend(values.iter().copied()).expect("memory");
    writer.finish().expect("memory");
    bytes
}

fn message(bytes: &[u8], name: &str) -> String {
    let file = TestFile::new(name, bytes);
    let message = Array::inspect(&file.0).expect_err("a bad file").to_string();
    assert!(message.contains(&file.0.display().to_string()), "{message}");
    message
}

#[test]
fn arrays_of_every_type_are_read() {
    let shape = [2, 3];
    let files = [
        (Dtype::F32, npy(&[1_f32, 2., 3., 4., 5., 6.], &shape, npyz::Order::C)),
        (Dtype::F64, npy(&[1_f64, 2., 3., 4., 5., 6.], &shape, npyz::Order::C)),
        (Dtype::I8, npy(&[1_i8, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
        (Dtype::U8, npy(&[1_u8, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
        (Dtype::I16, npy(&[1_i16, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
        (Dtype::U16, npy(&[1_u16, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
        (Dtype::I32, npy(&[1_i32, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
        (Dtype::U32, npy(&[1_u32, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
        (Dtype::U64, npy(&[1_u64, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
        (Dtype::I64, npy(&[1_i64, 2, 3, 4, 5, 6], &shape, npyz::Order::C)),
    ];
    for (dtype, bytes) in files {
        let file = TestFile::new(dtype.name(), &bytes);
        let array = Array::inspect(&file.0).expect("a good file");
        assert_eq!((array.dtype(), array.shape().as_str(), array.fortran_order()), (dtype, "(2, 3)", false));
        let elements = array.read(false).expect("elements");
        assert_eq!([array.head(), &elements].concat(), bytes, "head and elements are the file");
    }
}

#[test]
fn scalars_empty_arrays_and_half_floats_are_read() {
    for (shape, text, len) in [("()", "()", 2), ("(0,)", "(0,)", 0), ("(1, 1,)", "(1, 1)", 2)] {
        let mut bytes = b"\x93NUMPY\x01\0\0\0".to_vec();
        let head = format!("{{\"shape\":{shape},'descr': '<f2', 'fortran_order': True}}  \n");
        bytes[8] = head.len() as u8;
        bytes.extend(head.bytes());
        bytes.extend(vec![0; len]);
        let file = TestFile::new("small", &bytes);
        let array = Array::inspect(&file.0).expect("a good file");
        assert_eq!((array.dtype(), array.shape().as_str(), array.len_bytes), (Dtype::F16, text, len));
        assert_eq!(array.read(false).expect("elements").len(), len);
    }
}

#[test]
fn bad_files_are_named_with_both_values() {
    let good = npy(&[1_f32; 6], &[2, 3], npyz::Order::C);
    let truncated = message(&good[..good.len() - 5], "truncated");
    assert!(
        truncated.contains("19 bytes") && truncated.contains("24") && truncated.contains("truncated"),
        "{truncated}"
    );
    let longer = message(&[&good[..], &[0]].concat(), "longer");
    assert!(longer.contains("25 bytes") && longer.contains("longer than its header"), "{longer}");
    assert!(message(b"PK\x03\x04 a zip file", "zip").contains("not a .npy file"));
    assert!(message(b"", "empty").contains("ends within"));
    assert!(message(&good[..40], "head").contains("ends within its header"));
    assert!(message(&npy(&[true; 4], &[4], npyz::Order::C), "bool").contains("|b1"));
    let big_endian: Vec<u8> = String::from_utf8_lossy(&good[10..]).replace('<', ">").into_bytes();
    assert!(message(&[&good[..10], &big_endian].concat(), "big").contains("element type >f4"));
    let huge =
        String::from_utf8_lossy(&good[10..118]).replace("(2, 3)", "(18446744073709551615, 18446744073709551615)");
    let mut bytes = good[..10].to_vec();
    bytes[8..10].copy_from_slice(&(huge.len() as u16).to_le_bytes());
    bytes.extend(huge.bytes());
    assert!(message(&bytes, "huge").contains("truncated"));
}

#[test]
fn arrays_that_differ_name_both_files() {
    let a = TestFile::new("a", &npy(&[1_f32; 6], &[2, 3], npyz::Order::C));
    let b = TestFile::new("b", &npy(&[1_f32; 6], &[3, 2], npyz::Order::C));
    let c = TestFile::new("c", &npy(&[1_i32; 6], &[2, 3], npyz::Order::C));
    let shape = Array::inspect_all(&[a.0.clone(), b.0.clone()]).expect_err("shapes").to_string();
    assert!(shape.contains("shape (3, 2)") && shape.contains("has (2, 3)") && shape.contains("-b.npy"), "{shape}");
    let dtype = Array::inspect_all(&[a.0.clone(), c.0.clone()]).expect_err("types").to_string();
    assert!(dtype.contains("element type i32") && dtype.contains("has f32") && dtype.contains("-a.npy"), "{dtype}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// The oracle: element (i, j, k) of either order, by its own arithmetic.
    #[test]
    fn both_orders_are_read_as_asked(dims in [1_u64..4, 1..4, 1..4], fortran: bool) {
        let [a, b, c] = dims;
        let mut c_order = Vec::new();
        let mut f_order = vec![0_i32; (a * b * c) as usize];
        for (i, j, k) in (0..a).flat_map(|i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k)))) {
            let value = (100 * i + 10 * j + k) as i32;
            c_order.push(value);
            f_order[(i + a * (j + b * k)) as usize] = value;
        }
        let (values, order) = if fortran { (&f_order, npyz::Order::Fortran) } else { (&c_order, npyz::Order::C) };
        let file = TestFile::new("order", &npy(values, &dims, order));
        let array = Array::inspect(&file.0).expect("a good file");
        let bytes = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        prop_assert_eq!(array.read(false).expect("elements"), bytes(&c_order));
        prop_assert_eq!(array.read(true).expect("elements"), bytes(&f_order));
    }

    #[test]
    fn no_header_panics(head in "[{}()'a-z_:, 0-9<>\\[\\]TF]{0,60}", version in 0_u8..4) {
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        bytes.extend((head.len() as u16).to_le_bytes());
        if version > 1 { bytes.extend([0, 0]); }
        bytes.extend(head.bytes());
        prop_assert!(read_header(&mut &bytes[..], Path::new("x")).is_err());
    }
}
