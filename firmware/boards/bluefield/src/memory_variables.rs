//! EFI variables in memory, for tests.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use sumac_firmware::boot::Variables;

/// The variables; clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct MemoryVariables(pub(crate) Rc<RefCell<BTreeMap<String, Vec<u8>>>>);

impl Variables for MemoryVariables {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.borrow().get(name).cloned())
    }

    fn write(&mut self, name: &str, value: &[u8]) -> io::Result<()> {
        self.0.borrow_mut().insert(name.into(), value.into());
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.0.borrow_mut().remove(name);
        Ok(())
    }
}
