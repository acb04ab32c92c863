//! Collectives on files: outputs, and errors that leave no output.
//!
//! Each test runs a cluster of processes on loopback and compares results, read by other crates, with sums computed
//! here.

mod common;

use common::{Dir, exit_status, npy_f32, stderr, stdout, sumac};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use std::fs;

/// Return a file of an f32 tensor `w` (4, 2), an i64 tensor `step` () and a bf16 tensor `b` (6,), of a rank's values.
fn state(rank: u8) -> Vec<u8> {
    let w: Vec<u8> = (0..8_u8).flat_map(|i| (f32::from(i) + 100.0 * f32::from(rank)).to_le_bytes()).collect();
    let step = i64::from(rank).to_le_bytes();
    let b: Vec<u8> = (0..6).flat_map(|i| bf16(i + rank)).collect();
    let view = |dtype, shape: &[usize], data| TensorView::new(dtype, shape.to_vec(), data).expect("a view");
    let views = [
        ("w", view(Dtype::F32, &[4, 2], &w)),
        ("step", view(Dtype::I64, &[], &step)),
        ("b", view(Dtype::BF16, &[6], &b)),
    ];
    let metadata = [("format".to_owned(), "pt".to_owned()), ("rank".to_owned(), rank.to_string())];
    serialize(views, Some(metadata.into_iter().collect())).expect("memory")
}

/// Return a small integer as bf16: the upper half of the f32.
fn bf16(value: u8) -> [u8; 2] {
    let [.., low, high] = f32::from(value).to_le_bytes();
    [low, high]
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four"))).collect()
}

#[test]
fn all_reduce_adds_tensor_by_tensor_and_keeps_the_metadata() {
    let dir = Dir::new("tensors");
    let inputs: Vec<_> = (0..3).map(|rank| dir.write(&format!("r{rank}.safetensors"), &state(rank))).collect();
    let out = dir.path("sum.safetensors");
    let mut args = vec!["all-reduce", "--algo", "tree", "--output", out.as_str()];
    inputs.iter().for_each(|input| args.extend(["--input", input]));
    let output = sumac(&args);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    // One operation per element type.
    assert!(stdout(&output).contains("sum of 3 files of 3 tensors, 52 bytes, paths tree x 3, "), "{}", stdout(&output));
    let bytes = fs::read(&out).expect("the output");
    let sum = SafeTensors::deserialize(&bytes).expect("a good file");
    let w: Vec<f32> = (0..8_u8).map(|i| 300.0 + 3.0 * f32::from(i)).collect();
    assert_eq!(f32s(sum.tensor("w").expect("w").data()), w);
    assert_eq!(sum.tensor("step").expect("step").data(), 3_i64.to_le_bytes());
    let b: Vec<u8> = (0..6).flat_map(|i| bf16(3 * i + 3)).collect();
    assert_eq!(sum.tensor("b").expect("b").data(), b);
    let (_, head) = SafeTensors::read_metadata(&bytes).expect("a header");
    let kept = head.metadata().as_ref().expect("metadata");
    assert_eq!((kept.get("format").map(String::as_str), kept.get("rank").map(String::as_str)), (Some("pt"), Some("0")));
    assert_eq!(dir.names(), ["r0.safetensors", "r1.safetensors", "r2.safetensors", "sum.safetensors"]);
}

#[test]
fn mismatched_inputs_exit_with_2_and_no_output() {
    let dir = Dir::new("mixed");
    let good = dir.write("good.safetensors", &state(0));
    let w = [0; 32];
    let only_w = [("w", TensorView::new(Dtype::F32, vec![4, 2], &w).expect("a view"))];
    let fewer = dir.write("fewer.safetensors", &serialize(only_w, None).expect("memory"));
    let array = dir.write("array.npy", &npy_f32(&[1.0; 4], "(4,)"));
    let (out, npy) = (dir.path("out.safetensors"), dir.path("out.npy"));
    let cases = [
        (&good, &fewer, &out, vec!["fewer.safetensors: lacks tensors \"b\", \"step\"", "good.safetensors has"]),
        (&good, &array, &out, vec!["array.npy: a .npy file", "good.safetensors is .safetensors"]),
        (&good, &good, &npy, vec!["out.npy: a .npy file", "good.safetensors is .safetensors"]),
    ];
    for (one, other, out, named) in cases {
        let output = sumac(&["all-reduce", "--input", one, "--input", other, "--output", out]);
        let text = stderr(&output);
        assert_eq!(exit_status(&output), 2, "{text}");
        assert!(named.iter().all(|named| text.contains(named)), "{text}");
    }
    let output = sumac(&["all-reduce", "--op", "band", "--input", &good, "--output", &out]);
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("cannot apply band to "), "{}", stderr(&output));
    assert_eq!(dir.names(), ["array.npy", "fewer.safetensors", "good.safetensors"]);
}

/// Run a command that must succeed, and return its stdout.
fn expect_success(args: &[&str]) -> String {
    let output = sumac(args);
    assert_eq!(exit_status(&output), 0, "{args:?}: {}", stderr(&output));
    stdout(&output)
}

/// Read the shape and the elements of a .npy file with the npyz crate.
fn read_npy(path: &str) -> (Vec<u64>, Vec<f32>) {
    let bytes = fs::read(path).expect("a file");
    let file = npyz::NpyFile::new(&bytes[..]).expect("an array");
    assert_eq!(file.order(), npyz::Order::C);
    (file.shape().to_vec(), file.into_vec().expect("f32"))
}

/// Return a file of the tensors `w` (4, 2) of f32 and `b` (6,) of bf16, of a rank's values.
fn cuttable(rank: u8) -> Vec<u8> {
    let whole = state(rank);
    let tensors = SafeTensors::deserialize(&whole).expect("a good file");
    let kept = ["w", "b"].map(|name| (name, tensors.tensor(name).expect("a tensor")));
    let metadata = [("format".to_owned(), "pt".to_owned())];
    serialize(kept, Some(metadata.into_iter().collect())).expect("memory")
}

#[test]
fn all_gather_restores_the_parts_of_reduce_scatter() {
    let dir = Dir::new("scatter");
    let values = |rank: u8| (0..12_u8).map(|i| f32::from(i * (rank + 1))).collect::<Vec<_>>();
    let inputs: Vec<_> =
        (0..3).map(|rank| dir.write(&format!("r{rank}.npy"), &npy_f32(&values(rank), "(6, 2)"))).collect();
    let pattern = dir.path("part-{rank}.npy");
    let mut args = vec!["reduce-scatter", "--output", &pattern];
    inputs.iter().for_each(|input| args.extend(["--input", input]));
    let text = expect_success(&args);
    assert!(text.contains("sum of 3 arrays (6, 2) of f32, in 3 parts of (2, 2), path "), "{text}");
    let sum: Vec<f32> = (0..12_u8).map(|i| f32::from(i) * 6.0).collect();
    let parts: Vec<_> = (0..3).map(|rank| dir.path(&format!("part-{rank}.npy"))).collect();
    for (part, expected) in parts.iter().zip(sum.chunks(4)) {
        assert_eq!(read_npy(part), (vec![2, 2], expected.to_vec()));
    }
    let whole = dir.path("whole.npy");
    let mut args = vec!["all-gather", "--output", &whole];
    parts.iter().for_each(|part| args.extend(["--input", part]));
    let text = expect_success(&args);
    assert!(text.contains("3 files concatenated to array (6, 2) of f32, path "), "{text}");
    assert_eq!(read_npy(&whole), (vec![6, 2], sum));
    let names = ["part-0.npy", "part-1.npy", "part-2.npy", "r0.npy", "r1.npy", "r2.npy", "whole.npy"];
    assert_eq!(dir.names(), names);
}

#[test]
fn tensors_are_split_and_concatenated_one_by_one() {
    let dir = Dir::new("parts");
    let inputs = [0, 1].map(|rank| dir.write(&format!("r{rank}.safetensors"), &cuttable(rank)));
    let parts = dir.path("parts");
    fs::create_dir(&parts).expect("made");
    expect_success(&["reduce-scatter", "--input", &inputs[0], "--input", &inputs[1], "--output-dir", &parts]);
    let parts = [0, 1].map(|rank| format!("{parts}/part-{rank}.safetensors"));
    for (rank, part) in (0_u8..).zip(&parts) {
        let bytes = fs::read(part).expect("a part");
        let part = SafeTensors::deserialize(&bytes).expect("a good file");
        let (w, b) = (part.tensor("w").expect("w"), part.tensor("b").expect("b"));
        assert_eq!((w.shape(), b.shape()), (&[2, 2][..], &[3][..]));
        let expected: Vec<f32> = (0..4).map(|i| f32::from(4 * rank + i) * 2.0 + 100.0).collect();
        assert_eq!(f32s(w.data()), expected);
        let expected: Vec<u8> = (0..3).flat_map(|i| bf16((3 * rank + i) * 2 + 1)).collect();
        assert_eq!(b.data(), expected);
    }
    let (whole, sum) = (dir.path("whole.safetensors"), dir.path("sum.safetensors"));
    expect_success(&["all-gather", "--input", &parts[0], "--input", &parts[1], "--output", &whole]);
    expect_success(&["all-reduce", "--input", &inputs[0], "--input", &inputs[1], "--output", &sum]);
    let (whole, sum) = (fs::read(whole).expect("joined"), fs::read(sum).expect("reduced"));
    let (whole, sum) = [&whole, &sum].map(|bytes| SafeTensors::deserialize(bytes).expect("a good file")).into();
    for name in ["w", "b"] {
        assert_eq!(whole.tensor(name).expect("there"), sum.tensor(name).expect("there"), "{name}");
    }
}

#[test]
fn all_gather_concatenates_arrays_of_different_lengths() {
    let dir = Dir::new("joins");
    let values: Vec<f32> = (0..12_u8).map(f32::from).collect();
    // Rank 1's array is in Fortran order: its rows are 6 8 10 and 7 9 11.
    let fortran = String::from_utf8(npy_f32(&[], "(2, 3)")[10..].to_vec()).expect("text").replace("False", "True ");
    let fortran = [&npy_f32(&[], "(2, 3)")[..10], fortran.as_bytes()].concat();
    let fortran: Vec<u8> = fortran.into_iter().chain(values[6..].iter().flat_map(|v| v.to_le_bytes())).collect();
    let one = dir.write("one.npy", &npy_f32(&values[..3], "(1, 3)"));
    let two = dir.write("two.npy", &fortran);
    let none = dir.write("none.npy", &npy_f32(&[], "(0, 3)"));
    let out = dir.path("out.npy");
    let args = ["all-gather", "--output", &out, "--input", &one, "--input", &two, "--input", &none, "--algo", "tree"];
    expect_success(&args);
    assert_eq!(read_npy(&out), (vec![3, 3], vec![0., 1., 2., 6., 8., 10., 7., 9., 11.]));
}

#[test]
fn broadcast_writes_the_bytes_that_another_rank_received() {
    let dir = Dir::new("broadcast");
    let values: Vec<f32> = (0..=255_u8).map(f32::from).collect();
    for (name, bytes) in [("a.npy", npy_f32(&values, "(16, 16)")), ("a.safetensors", state(3))] {
        let input = dir.write(name, &bytes);
        let out = dir.path(&format!("copy-of-{name}"));
        let text = expect_success(&["broadcast", "--input", &input, "--output", &out, "--root", "1", "--ranks", "3"]);
        assert!(text.contains("from rank 1 to all of 3"), "{text}");
        assert_eq!(fs::read(&out).expect("the output"), bytes);
    }
}

#[test]
fn invalid_collectives_on_files_exit_with_2_and_no_output() {
    let dir = Dir::new("uncut");
    let five = dir.write("five.npy", &npy_f32(&[1.0; 10], "(5, 2)"));
    let other = dir.write("other.npy", &npy_f32(&[1.0; 15], "(5, 3)"));
    let scalar = dir.write("scalar.safetensors", &state(0));
    let (out, parts) = (dir.path("out.npy"), dir.path("out-{rank}.npy"));
    let tensors = dir.path("out-{rank}.safetensors");
    let nowhere = dir.path("nowhere");
    let cases: [(&[&str], &[&str]); 8] = [
        (
            &["reduce-scatter", "--input", &five, "--input", &five, "--output", &parts],
            &["five.npy", "axis 0 has 5", "2"],
        ),
        (&["reduce-scatter", "--input", &five, "--output", &out], &["out.npy: must contain {rank}", "1 ranks"]),
        (&["reduce-scatter", "--input", &five, "--output-dir", &nowhere], &["nowhere: no such directory"]),
        (&["reduce-scatter", "--input", &scalar, "--output", &tensors], &["tensor \"step\": shape () has no axis 0"]),
        (&["reduce-scatter", "--input", &five], &["--output"]),
        (
            &["all-gather", "--input", &five, "--input", &other, "--output", &out],
            &["other.npy: shape (5, 3)", "(5, 2)"],
        ),
        (&["broadcast", "--input", &five, "--root", "4", "--output", &out], &["--root 4", "4 ranks"]),
        (&["broadcast", "--input", &five, "--output", &tensors], &["is .npy; all inputs"]),
    ];
    for (args, named) in cases {
        let output = sumac(args);
        let text = stderr(&output);
        assert_eq!(exit_status(&output), 2, "{args:?}: {text}");
        assert!(named.iter().all(|named| text.contains(named)), "{args:?}: {text}");
    }
    assert_eq!(dir.names(), ["five.npy", "other.npy", "scalar.safetensors"]);
}
