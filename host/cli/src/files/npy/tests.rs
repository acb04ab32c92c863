//! Tests of arrays as another crate writes them, and of invalid files.

use super::*;
use crate::files::tests::TestFile;
use npyz::WriterBuilder;
use proptest::prelude::*;

/// Inspect a file with one array.
fn array(file: &TestFile) -> (ArrayFile, Tensor) {
    let array = ArrayFile::inspect(&file.0).expect("a good file");
    let tensor = array.tensor("").expect("one array").clone();
    (array, tensor)
}

fn read(file: &TestFile, fortran_order: bool) -> Vec<u8> {
    let (array, tensor) = array(file);
    let mut bytes = vec![0; tensor.len_bytes];
    array.read(&tensor, fortran_order, &mut bytes).expect("elements");
    bytes
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
    let file = TestFile::new(&format!("{name}.npy"), bytes);
    let message = ArrayFile::inspect(&file.0).expect_err("a bad file").to_string();
    assert!(message.contains(&file.0.display().to_string()), "{message}");
    message
}

#[test]
fn arrays_of_all_types_and_orders_are_read() {
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
        let file = TestFile::new(&format!("{}.npy", dtype.name()), &bytes);
        let (array, tensor) = array(&file);
        assert_eq!((tensor.dtype, &tensor.shape[..], tensor.fortran_order), (dtype, &shape[..], false));
        assert_eq!([&array.head[..], &read(&file, false)].concat(), bytes, "head and elements are the file");
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
        let file = TestFile::new("small.npy", &bytes);
        let (_, tensor) = array(&file);
        assert_eq!(
            (tensor.dtype, Shape(&tensor.shape).to_string().as_str(), tensor.len_bytes),
            (Dtype::F16, text, len)
        );
        assert_eq!(read(&file, false).len(), len);
    }
}

#[test]
fn invalid_npy_error_names_the_fault_and_lengths() {
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
    assert!(message(&npy(&[true; 4], &[4], npyz::Order::C), "bool").contains("element type |b1"));
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
fn npyz_crate_reads_generated_heads() {
    for (&(_, dtype), shape) in TYPES.iter().zip([vec![], vec![3], vec![2, 0], vec![1, 2, 3], vec![1 << 40]]) {
        let head = head(dtype, &shape).expect("a head");
        assert_eq!(head.len() % 64, 0);
        let file = npyz::NpyFile::new(&head[..]).expect("a header");
        assert_eq!((file.shape(), file.order()), (&shape[..], npyz::Order::C));
        assert_eq!(read_header(&mut &head[..], Path::new("x")).expect("a header").dtype, dtype);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// The oracle computes element (i, j, k) of either order independently.
    #[test]
    fn elements_are_read_in_the_requested_order(dims in [1_u64..4, 1..4, 1..4], fortran: bool) {
        let [a, b, c] = dims;
        let mut c_order = Vec::new();
        let mut f_order = vec![0_i32; (a * b * c) as usize];
        for (i, j, k) in (0..a).flat_map(|i| (0..b).flat_map(move |j| (0..c).map(move |k| (i, j, k)))) {
            let value = (100 * i + 10 * j + k) as i32;
            c_order.push(value);
            f_order[(i + a * (j + b * k)) as usize] = value;
        }
        let (values, order) = if fortran { (&f_order, npyz::Order::Fortran) } else { (&c_order, npyz::Order::C) };
        let file = TestFile::new("order.npy", &npy(values, &dims, order));
        let bytes = |values: &[i32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
        prop_assert_eq!(read(&file, false), bytes(&c_order));
        prop_assert_eq!(read(&file, true), bytes(&f_order));
    }

    #[test]
    fn arbitrary_header_is_an_error(head in "[{}()'a-z_:, 0-9<>\\[\\]TF]{0,60}", version in 0_u8..4) {
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        bytes.extend((head.len() as u16).to_le_bytes());
        if version > 1 { bytes.extend([0, 0]); }
        bytes.extend(head.bytes());
        prop_assert!(read_header(&mut &bytes[..], Path::new("x")).is_err());
    }
}
