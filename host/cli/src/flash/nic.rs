//! Cards in NIC mode: the host's network driver is taken off the card while it is flashed, as `bfb-install` does.

use super::identity;
use std::io;
use std::path::{Path, PathBuf};

/// The PCI functions of a card, unbound from the network driver. Dropping binds them again.
#[derive(Debug)]
pub(super) struct Unbound {
    driver: PathBuf,
    functions: Vec<String>,
}

impl Unbound {
    /// Unbind those functions of a card that are bound.
    ///
    /// # Errors
    /// The system's error; what was unbound is bound again.
    pub(super) fn unbind(sysfs: &Path, dev_name: Option<&str>) -> io::Result<Self> {
        let driver = sysfs.join("bus/pci/drivers/mlx5_core");
        let mut unbound = Self { driver, functions: Vec::new() };
        let first = dev_name.and_then(identity::function);
        for number in first.iter().flat_map(|_| 0..2) {
            let function =
                first.as_deref().map_or_else(String::new, |first| first.replace(".0", &format!(".{number}")));
            if unbound.driver.join(&function).exists() {
                write(&unbound.driver.join("unbind"), &function)?;
                unbound.functions.push(function);
            }
        }
        Ok(unbound)
    }
}

impl Drop for Unbound {
    fn drop(&mut self) {
        for function in &self.functions {
            let bind = self.driver.join("bind");
            // An installer may have reset the card, which binds it by itself.
            if !self.driver.join(function).exists()
                && let Err(error) = write(&bind, function)
            {
                message!("cannot bind the network driver again ({error}): echo {function} > {}", bind.display());
            }
        }
    }
}

/// Write to a file of sysfs, which exists.
fn write(path: &Path, text: &str) -> io::Result<()> {
    io::Write::write_all(&mut std::fs::OpenOptions::new().append(true).open(path)?, text.as_bytes())
}
