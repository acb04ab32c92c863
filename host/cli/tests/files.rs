//! Collectives on files, as a user meets them: what is written, and what is refused with nothing written.
//!
//! Whole clusters of processes on loopback; results are compared with sums computed here, read by the formats' own crates.

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
    let mut args = vec!["all-reduce", "--output", out.as_str()];
    inputs.iter().for_each(|input| args.extend(["--input", input]));
    let output = sumac(&args);
    assert_eq!(exit_status(&output), 0, "{}", stderr(&output));
    // One operation a type.
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
fn inputs_that_do_not_go_together_end_with_2_and_no_output() {
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
        let said = stderr(&output);
        assert_eq!(exit_status(&output), 2, "{said}");
        assert!(named.iter().all(|named| said.contains(named)), "{said}");
    }
    let output = sumac(&["all-reduce", "--op", "band", "--input", &good, "--output", &out]);
    assert_eq!(exit_status(&output), 2);
    assert!(stderr(&output).contains("no band of "), "{}", stderr(&output));
    assert_eq!(dir.names(), ["array.npy", "fewer.safetensors", "good.safetensors"]);
}
