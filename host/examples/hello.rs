//! The program that README.md shows, word for word (`tests/docs/run` compares them, and runs it).

use sumac::{Communicator, JoinConfig, ReduceOp};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // From what torchrun, mpirun, srun or `sumac run` set, and SUMAC_*.
    let comm = Communicator::join(JoinConfig::from_env()?)?;
    let mut gradients = vec![comm.rank() as f32; 1 << 20];
    let outcome = comm.all_reduce(&mut gradients, ReduceOp::Sum)?;
    println!("rank {} by {}: {}", comm.rank(), outcome.path.name(), gradients[0]);
    comm.leave();
    Ok(())
}
