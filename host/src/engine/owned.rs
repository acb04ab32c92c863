//! Buffers that the communicator owns while their operation is in flight.

use super::element::ErasedBuffer;
use super::extent::Extent;
use crate::exec::Buffers;

/// Buffers that the communicator owns while their operation is in flight.
pub(crate) struct Owned {
    /// The input, and also the output unless that is separate.
    pub(super) memory: Box<dyn ErasedBuffer>,
    pub(super) output: Option<Box<dyn ErasedBuffer>>,
    /// The scaled input, which is contributed instead.
    pub(super) scaled: Option<Vec<u8>>,
    pub(super) extent: Extent,
}

impl Owned {
    pub(super) fn borrow_buffers(&mut self) -> Buffers<'_> {
        match (&self.scaled, &mut self.output) {
            (Some(input), Some(output)) => Buffers::Separate { input, output: output.bytes_mut() },
            (Some(input), None) => {
                Buffers::Separate { input, output: &mut self.memory.bytes_mut()[self.extent.output.clone()] }
            }
            (None, Some(output)) => Buffers::Separate { input: self.memory.bytes(), output: output.bytes_mut() },
            (None, None) => Buffers::InPlace(self.memory.bytes_mut()),
        }
    }

    /// Return whether input and output share a buffer.
    pub(super) const fn is_in_place(&self) -> bool {
        self.scaled.is_none() && self.output.is_none()
    }

    pub(super) fn len_bytes(&self) -> usize {
        let output = self.output.as_ref().map_or(0, |output| output.bytes().len());
        self.memory.bytes().len() + output + self.scaled.as_ref().map_or(0, Vec::len)
    }

    /// Return the buffer that holds the result.
    pub(crate) fn into_result(self) -> Box<dyn ErasedBuffer> {
        self.output.unwrap_or(self.memory)
    }

    /// Return the buffer that the caller passed, and the separate output.
    pub(crate) fn into_parts(self) -> (Box<dyn ErasedBuffer>, Option<Box<dyn ErasedBuffer>>) {
        (self.memory, self.output)
    }

    /// Return the buffer that the caller passed.
    pub(crate) fn into_memory(self) -> Box<dyn ErasedBuffer> {
        self.memory
    }
}
