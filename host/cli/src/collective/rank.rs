//! One rank of a collective on files: read, run the operation and write, bucket by bucket.
//!
//! Invariants: only the operation is timed. A rank writes only after the head of its own output, each tensor in its
//! place. A file that has changed since the supervisor inspected it is an error.

use super::bucket::Bucket;
use crate::exit::Failure;
use crate::files::ArrayFile;
use crate::job::{FileWork, Report};
use anyhow::{Context, anyhow};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};
use sumac::comm::Buffers;
use sumac::{CallOptions, Collective, Communicator, OpDesc};
use sumac_hal::ids::Rank;
use sumac_hal::op::Path as OpPath;
use sumac_hal::wire::crc32c;

/// Run all operations of a job.
pub(crate) fn run(communicator: &Communicator, work: &FileWork) -> Result<Report, Failure> {
    let inspect = |path: &std::path::PathBuf| ArrayFile::inspect(path).map_err(Failure::input);
    let input = work.input.as_ref().map(inspect).transpose()?;
    let open = |path: &Path| OpenOptions::new().write(true).open(path).with_context(|| cannot_write(path));
    let output = work.output.as_deref().map(|path| open(path).map(|file| (path, file)));
    let output = output.transpose().map_err(Failure::Run)?;
    let options = CallOptions { algo: Some(work.algo), ..CallOptions::default() };
    let (mut time, mut checksums) = (Duration::ZERO, Vec::new());
    let (mut paths, mut fallback) = (Vec::<(OpPath, u32)>::new(), None);
    for bucket in Bucket::all(work.collective, communicator.size() as usize, &work.pieces) {
        let mut input_buffer = vec![0; bucket.input_len_bytes()];
        // In place if input and output have the same length.
        let is_in_place = matches!(work.collective, Collective::AllReduce | Collective::Broadcast);
        let mut output_buffer = vec![0; if is_in_place { 0 } else { bucket.output_len_bytes() }];
        if let Some(file) = &input {
            fill(&bucket, file, communicator.rank(), &mut input_buffer).map_err(Failure::Input)?;
        }
        // Without it, the time would include waiting for ranks that are still reading.
        communicator.barrier().map_err(Failure::run)?;
        let desc = describe(work, &bucket);
        let buffers = match is_in_place {
            true => Buffers::InPlace(&mut input_buffer),
            false => Buffers::Separate { input: &input_buffer, output: &mut output_buffer },
        };
        let start = Instant::now();
        let outcome = communicator.run(&desc, buffers, &options).map_err(Failure::run)?;
        time += start.elapsed();
        let result = if is_in_place { &input_buffer } else { &output_buffer };
        checksums.extend(crc32c(result).to_le_bytes());
        match paths.iter_mut().find(|(path, _)| *path == outcome.path) {
            Some((_, count)) => *count += 1,
            None => paths.push((outcome.path, 1)),
        }
        fallback = fallback.or(outcome.fallback.map(|why| why.to_string()));
        if let Some((path, file)) = &output {
            write(&bucket, result, file).with_context(|| cannot_write(path)).map_err(Failure::Run)?;
        }
    }
    Ok(Report::Combined {
        crc: crc32c(&checksums),
        time_ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
        paths,
        fallback,
    })
}

/// Read a bucket's tensors into this rank's input.
fn fill(bucket: &Bucket<'_>, file: &ArrayFile, rank: u32, input: &mut [u8]) -> anyhow::Result<()> {
    for (nth, piece) in bucket.pieces.iter().enumerate() {
        let tensor = file
            .tensor(&piece.name)
            .filter(|tensor| (tensor.dtype, Some(&tensor.count())) == (piece.dtype, piece.counts.get(rank as usize)));
        let changed = || anyhow!("{}: changed while it was in use", file.path.display());
        let tensor = tensor.ok_or_else(changed)?;
        if let Some(to) = bucket.whole(nth, tensor.len_bytes, input) {
            file.read(tensor, piece.fortran_order, to)?;
        } else {
            let mut elements = vec![0; tensor.len_bytes];
            file.read(tensor, piece.fortran_order, &mut elements)?;
            bucket.pack(nth, &elements, input);
        }
    }
    Ok(())
}

/// Describe a bucket's operation.
fn describe(work: &FileWork, bucket: &Bucket<'_>) -> OpDesc {
    let Bucket { dtype, .. } = *bucket;
    let count = |len_bytes: usize| (len_bytes / dtype.size_bytes()) as u64;
    let (input, output) = (count(bucket.input_len_bytes()), count(bucket.output_len_bytes()));
    match work.collective {
        Collective::ReduceScatter => OpDesc::reduce_scatter(dtype, work.op, input),
        Collective::AllGather => OpDesc::all_gather(dtype, output),
        Collective::Broadcast => OpDesc::broadcast(dtype, Rank(work.root), input),
        _ => OpDesc::all_reduce(dtype, work.op, input),
    }
}

/// Write a bucket's results to their places.
fn write(bucket: &Bucket<'_>, output: &[u8], file: &File) -> anyhow::Result<()> {
    for (nth, piece) in bucket.pieces.iter().enumerate() {
        let mut at = piece.offset;
        for run in bucket.unpack(nth, output) {
            file.write_all_at(run, at)?;
            at += run.len() as u64;
        }
    }
    Ok(())
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
