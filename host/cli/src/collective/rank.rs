//! The rank's side of a collective on files: read, operate and write, bucket by bucket.
//!
//! Invariants: what is timed is the operation alone; a rank writes only behind the head of its own output, each tensor in
//! its place; a file that is not what it was when the supervisor looked at it is an error, at all ranks alike.

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
use sumac_hal::op::Path as Way;
use sumac_hal::wire::crc32c;

/// Do all operations of a job.
pub(crate) fn run(communicator: &Communicator, work: &FileWork) -> Result<Report, Failure> {
    let inspect = |path: &std::path::PathBuf| ArrayFile::inspect(path).map_err(Failure::input);
    let input = work.input.as_ref().map(inspect).transpose()?;
    let open = |path: &Path| OpenOptions::new().write(true).open(path).with_context(|| cannot_write(path));
    let output = work.output.as_deref().map(|path| open(path).map(|file| (path, file)));
    let output = output.transpose().map_err(Failure::Run)?;
    let options = CallOptions { algo: Some(work.algo), ..CallOptions::default() };
    let (mut time, mut checksums) = (Duration::ZERO, Vec::new());
    let (mut paths, mut fallback) = (Vec::<(Way, u32)>::new(), None);
    for bucket in Bucket::all(work.collective, communicator.size() as usize, &work.pieces) {
        let mut given = vec![0; bucket.input_len_bytes()];
        // Result in place of contribution, unless one is a part of the other.
        let is_in_place = matches!(work.collective, Collective::AllReduce | Collective::Broadcast);
        let mut got = vec![0; if is_in_place { 0 } else { bucket.output_len_bytes() }];
        if let Some(file) = &input {
            fill(&bucket, file, communicator.rank(), &mut given).map_err(Failure::Input)?;
        }
        // So that the time is the operation's, and not that of waiting for who is still reading.
        communicator.barrier().map_err(Failure::run)?;
        let desc = describe(work, &bucket);
        let buffers = match is_in_place {
            true => Buffers::InPlace(&mut given),
            false => Buffers::Separate { input: &given, output: &mut got },
        };
        let start = Instant::now();
        let outcome = communicator.run(&desc, buffers, &options).map_err(Failure::run)?;
        time += start.elapsed();
        let got = if is_in_place { &given } else { &got };
        checksums.extend(crc32c(got).to_le_bytes());
        match paths.iter_mut().find(|(path, _)| *path == outcome.path) {
            Some((_, count)) => *count += 1,
            None => paths.push((outcome.path, 1)),
        }
        fallback = fallback.or(outcome.fallback);
        if let Some((path, file)) = &output {
            write(&bucket, got, file).with_context(|| cannot_write(path)).map_err(Failure::Run)?;
        }
    }
    Ok(Report::Combined {
        crc: crc32c(&checksums),
        time_ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
        paths,
        fallback,
    })
}

/// Read a bucket's tensors into what this rank gives.
fn fill(bucket: &Bucket<'_>, file: &ArrayFile, rank: u32, given: &mut [u8]) -> anyhow::Result<()> {
    for (nth, piece) in bucket.pieces.iter().enumerate() {
        let tensor = file
            .tensor(&piece.name)
            .filter(|tensor| (tensor.dtype, Some(&tensor.count())) == (piece.dtype, piece.counts.get(rank as usize)));
        let changed = || anyhow!("{}: changed since it was looked at", file.path.display());
        let tensor = tensor.ok_or_else(changed)?;
        if let Some(to) = bucket.whole(nth, tensor.len_bytes, given) {
            file.read(tensor, piece.fortran_order, to)?;
        } else {
            let mut elements = vec![0; tensor.len_bytes];
            file.read(tensor, piece.fortran_order, &mut elements)?;
            bucket.pack(nth, &elements, given);
        }
    }
    Ok(())
}

/// Describe a bucket's operation.
fn describe(work: &FileWork, bucket: &Bucket<'_>) -> OpDesc {
    let Bucket { dtype, .. } = *bucket;
    let count = |len_bytes: usize| (len_bytes / dtype.size_bytes()) as u64;
    let (given, got) = (count(bucket.input_len_bytes()), count(bucket.output_len_bytes()));
    match work.collective {
        Collective::ReduceScatter => OpDesc::reduce_scatter(dtype, work.op, given),
        Collective::AllGather => OpDesc::all_gather(dtype, got),
        Collective::Broadcast => OpDesc::broadcast(dtype, Rank(work.root), given),
        _ => OpDesc::all_reduce(dtype, work.op, given),
    }
}

/// Write a bucket's results to their places.
fn write(bucket: &Bucket<'_>, got: &[u8], file: &File) -> anyhow::Result<()> {
    for (nth, piece) in bucket.pieces.iter().enumerate() {
        let mut at = piece.offset;
        for run in bucket.unpack(nth, got) {
            file.write_all_at(run, at)?;
            at += run.len() as u64;
        }
    }
    Ok(())
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}
