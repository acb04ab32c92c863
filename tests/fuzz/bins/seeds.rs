//! Writes the initial inputs of searches: `seeds FOLDER` writes `FOLDER/<target>/<name>` for each.

use std::io;
use std::path::PathBuf;

fn main() -> io::Result<()> {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "usage: seeds FOLDER"));
    };
    for (target, name, bytes) in sumac_fuzz::seeds::all() {
        let folder = folder.join(target);
        std::fs::create_dir_all(&folder)?;
        std::fs::write(folder.join(name), bytes)?;
    }
    Ok(())
}
