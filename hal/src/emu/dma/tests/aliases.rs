//! Memory that is registered twice: one file mapped at two addresses.

use super::*;
use crate::dma::DmaMemory;
use crate::emu::dma::MapError;
use crate::shm::{Pages, Region};

const LEN_BYTES: usize = 8192;

/// Map one file twice, as regions 0 and 1 of an engine; the second mapping starts at the file's second page.
fn twice(profile: Profile) -> (EmuEngine, Arc<Region>) {
    let whole = Arc::new(Region::create(LEN_BYTES, Pages::Normal).expect("memory"));
    let file = whole.file().try_clone_to_owned().expect("a descriptor");
    let part = Arc::new(Region::open_at(std::os::fd::AsFd::as_fd(&file), 4096, 4096).expect("a part of it"));
    assert_ne!(part.base(), whole.base().map_addr(|at| at.saturating_add(4096)), "at another address");
    let mut engine = EmuEngine::start(config(profile, 1)).expect("threads");
    engine.map(key(0), whole.clone()).expect("a free entry");
    engine.map(key(1), part).expect("a free entry");
    (engine, whole)
}

fn read<const N: usize>(memory: &Region, offset_bytes: usize) -> [u8; N] {
    let mut bytes = [0; N];
    memory.read(offset_bytes, &mut bytes);
    bytes
}

#[test]
fn step_between_two_mappings_of_the_same_bytes_is_refused() {
    let (mut engine, whole) = twice(Profile::Full);
    let copy = |src, dst| [Step::Copy { src, dst, len_bytes: 16 }];
    let overlap = |engine: &mut _, steps: &[Step]| run(engine, 1, steps).status;
    assert_eq!(overlap(&mut engine, &copy(at(0, 4096), at(1, 8))), Status::Overlap);
    assert_eq!(overlap(&mut engine, &copy(at(1, 0), at(0, 4096 - 15))), Status::Overlap);
    assert_eq!(overlap(&mut engine, &copy(at(1, 0), at(0, 4096))), Status::Overlap, "the same bytes");
    whole.write(4096, &[7; 16]);
    assert_eq!(overlap(&mut engine, &copy(at(1, 0), at(0, 4096 - 16))), Status::Done, "adjacent");
    assert_eq!(read::<16>(&whole, 4096 - 16), [7; 16]);
}

#[test]
fn chain_through_two_mappings_runs_its_steps_in_order() {
    // Elements of the second copy depend on other elements of the first; tile by tile, some would be stale.
    const COUNT: u32 = 1024;
    let (mut engine, whole) = twice(Profile::Full);
    let values: Vec<u8> = (0..COUNT).map(|at| (at % 251) as u8 + 1).collect();
    whole.write(0, &values);
    let steps = [
        Step::Copy { src: at(0, 0), dst: at(0, 4096 + 4), len_bytes: COUNT },
        Step::Copy { src: at(1, 4 + 64), dst: at(0, 2048), len_bytes: COUNT },
    ];
    // The last bytes that the second copy reads lie after those that the first one writes.
    assert_eq!(run(&mut engine, 1, &steps).status, Status::Done);
    let expected = [&values[64..], &[0; 64]].concat();
    assert_eq!(read::<{ COUNT as usize }>(&whole, 2048)[..], expected);
}

#[test]
fn result_replaces_accumulators_through_another_mapping() {
    let (mut engine, whole) = twice(Profile::Full);
    let (op, accumulator, output) = (ReduceOp::Avg, Dtype::F32, Dtype::F32);
    whole.write(4096, &[6_f32, 9.0].map(f32::to_le_bytes).concat());
    let steps = [Step::Store { op, accumulator, output, src: at(0, 4096), dst: at(1, 0), count: 2, ranks: 3 }];
    assert_eq!(run(&mut engine, 1, &steps).status, Status::Done);
    assert_eq!(read::<8>(&whole, 4096)[..], [2_f32, 3.0].map(f32::to_le_bytes).concat());
}

#[test]
fn local_memory_overlapping_another_region_is_refused() {
    let (mut engine, whole) = twice(Profile::CopyOnly);
    let shared = |index, other| Err(MapError::Overlap { index, other });
    assert_eq!(engine.map_local_memory(key(2), whole.clone()), shared(2, 0));
    assert!(engine.unmap(key(0)) && engine.unmap(key(1)));
    assert_eq!(engine.map_local_memory(key(2), whole.clone()), Ok(()));
    assert_eq!(engine.map(key(3), whole.clone()), shared(3, 2));
    assert!(engine.unmap(key(2)));
    assert_eq!(engine.map(key(3), whole), Ok(()));
}
