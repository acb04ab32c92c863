//! Memory that stays its owner's while an operation works on it, such as that of a program in another language.
//!
//! Invariant: the memory is written to only between the start of the operation and the drop of its [`ForeignMemory`],
//! and an input beside an output is never written to.

use super::element::ErasedBuffer;
use super::error::Error;
use crate::exec::Buffers;
use crate::exec::message::MessageBuffer;
use std::any::Any;
use std::ptr::NonNull;

/// Memory of an operation that somebody else owns: in place, or an input and an output that do not overlap.
#[derive(Debug, Clone, Copy)]
pub enum RawBuffers {
    /// One buffer for input and output.
    InPlace {
        /// Its first byte. May be null if the buffer is empty.
        bytes: *mut u8,
        /// Its length in bytes.
        len: usize,
    },
    /// An input, which is only read, and an output.
    Separate {
        /// The first byte of the input. May be null if the input is empty.
        input: *const u8,
        /// The input's length in bytes.
        input_len: usize,
        /// The first byte of the output. May be null if the output is empty.
        output: *mut u8,
        /// The output's length in bytes.
        output_len: usize,
    },
}

impl From<&mut Buffers<'_>> for RawBuffers {
    fn from(buffers: &mut Buffers<'_>) -> Self {
        match buffers {
            Buffers::InPlace(buffer) => Self::InPlace { bytes: buffer.as_mut_ptr(), len: buffer.len() },
            Buffers::Separate { input, output } => Self::Separate {
                input: input.as_ptr(),
                input_len: input.len(),
                output: output.as_mut_ptr(),
                output_len: output.len(),
            },
        }
    }
}

impl RawBuffers {
    /// Check that this can be memory, as far as addresses tell.
    ///
    /// # Errors
    /// [`Error::Argument`] says what is wrong with it.
    pub fn check(&self) -> Result<(), Error> {
        let range = |name, bytes: *const u8, len: usize| {
            if bytes.is_null() && len > 0 {
                return Err(Error::Argument(format!("{name} is NULL, but this rank needs {len} bytes there")));
            }
            let end = bytes.addr().checked_add(len).filter(|_| isize::try_from(len).is_ok());
            let too_long = || Error::Argument(format!("{name} of {len} bytes exceeds the address space"));
            end.map(|end| bytes.addr()..end).ok_or_else(too_long)
        };
        match *self {
            Self::InPlace { bytes, len } => range("the buffer", bytes, len).map(|_| ()),
            Self::Separate { input, input_len, output, output_len } => {
                let (from, to) = (range("input", input, input_len)?, range("output", output, output_len)?);
                if input_len > 0 && output_len > 0 && from.start < to.end && to.start < from.end {
                    return Err(Error::Argument(format!(
                        "input and output overlap: {input_len} bytes at {:#x} and {output_len} at {:#x}; pass memory \
                         that lies apart, or one buffer for both where the collective has a form in place",
                        from.start, to.start
                    )));
                }
                Ok(())
            }
        }
    }

    /// Borrow the memory.
    ///
    /// # Safety
    /// While the result is in use, the memory is valid for reads and the output for writes, nobody else writes to it,
    /// and nobody else reads the output.
    ///
    /// # Errors
    /// As for [`RawBuffers::check`].
    pub unsafe fn buffers<'b>(self) -> Result<Buffers<'b>, Error> {
        self.check()?;
        let start = |bytes: *mut u8| NonNull::new(bytes).unwrap_or(NonNull::dangling());
        // SAFETY: no longer than an object can be, and NULL only if empty (`check`); otherwise the caller's promise.
        let input =
            |bytes: *const u8, len| unsafe { std::slice::from_raw_parts(start(bytes.cast_mut()).as_ptr(), len) };
        // SAFETY: the same.
        let output = |bytes, len| unsafe { std::slice::from_raw_parts_mut(start(bytes).as_ptr(), len) };
        Ok(match self {
            Self::InPlace { bytes, len } => Buffers::InPlace(output(bytes, len)),
            Self::Separate { input: from, input_len, output: to, output_len } => {
                Buffers::Separate { input: input(from, input_len), output: output(to, output_len) }
            }
        })
    }

    /// Return the memory of the input, or of both, and that of a separate output. `keep` lives as long as the first.
    ///
    /// # Safety
    /// As for [`ForeignMemory::new`], for both; the input is not written to.
    pub(crate) unsafe fn into_memory(self, keep: Option<Keep>) -> (ForeignMemory, Option<ForeignMemory>) {
        match self {
            // SAFETY: the caller's promise.
            Self::InPlace { bytes, len } => (unsafe { ForeignMemory::new(bytes, len, keep) }, None),
            Self::Separate { input, input_len, output, output_len } => {
                // SAFETY: the caller's promise. An input beside an output is only read.
                let input = unsafe { ForeignMemory::new(input.cast_mut(), input_len, keep) };
                // SAFETY: the caller's promise.
                (input, Some(unsafe { ForeignMemory::new(output, output_len, None) }))
            }
        }
    }
}

/// What keeps memory alive.
pub(crate) type Keep = Box<dyn Any + Send>;

/// Memory that somebody else owns, for an operation or a message.
pub(crate) struct ForeignMemory {
    bytes: NonNull<u8>,
    len: usize,
    _keep: Option<Keep>,
}

// SAFETY: who makes it promises that the memory may be used from any thread (`ForeignMemory::new`).
unsafe impl Send for ForeignMemory {}

impl ForeignMemory {
    /// Take memory for the duration of an operation. `bytes` may be null if `len` is 0.
    ///
    /// # Safety
    /// Until this is dropped, the memory is valid for reads by any thread and, unless it is only an input, for writes;
    /// nobody else writes to it, nor reads it where it is written. Dropping `keep` may end that.
    pub(crate) unsafe fn new(bytes: *mut u8, len: usize, keep: Option<Keep>) -> Self {
        Self { bytes: NonNull::new(bytes).unwrap_or(NonNull::dangling()), len, _keep: keep }
    }

    const fn as_slice(&self) -> &[u8] {
        // SAFETY: valid for reads until this is dropped (`ForeignMemory::new`); a dangling pointer only if it is empty.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr(), self.len) }
    }

    const fn as_slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and valid for writes: this is not called for an input.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_ptr(), self.len) }
    }
}

impl ErasedBuffer for ForeignMemory {
    fn bytes(&self) -> &[u8] {
        self.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.as_slice_mut()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

impl MessageBuffer for ForeignMemory {
    fn bytes(&self) -> &[u8] {
        self.as_slice()
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self.as_slice_mut()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn separate(input: usize, input_len: usize, output: usize, output_len: usize) -> RawBuffers {
        let (input, output) = (std::ptr::without_provenance(input), std::ptr::without_provenance_mut(output));
        RawBuffers::Separate { input, input_len, output, output_len }
    }

    #[test]
    fn impossible_memory_is_refused_with_the_reason() {
        for (buffers, why) in [
            (separate(0, 8, 64, 8), "NULL"),
            (separate(64, 8, 0, 8), "NULL"),
            (separate(64, 16, 72, 8), "overlap"),
            (separate(72, 8, 64, 16), "overlap"),
            (separate(64, 8, 64, 8), "overlap"),
            (separate(usize::MAX - 3, 8, 64, 8), "address space"),
            (RawBuffers::InPlace { bytes: std::ptr::null_mut(), len: 1 }, "NULL"),
            (RawBuffers::InPlace { bytes: std::ptr::without_provenance_mut(1), len: usize::MAX / 2 + 1 }, "space"),
        ] {
            let error = buffers.check().expect_err(why).to_string();
            assert!(error.contains(why), "{buffers:?}: {error}");
        }
        for buffers in [separate(0, 0, 64, 8), separate(64, 8, 72, 8), separate(64, 8, 64, 0), separate(0, 0, 0, 0)] {
            buffers.check().expect("possible");
        }
    }

    #[test]
    fn empty_memory_at_address_0_is_an_empty_slice() {
        // SAFETY: the memory is empty.
        let mut memory = unsafe { ForeignMemory::new(std::ptr::null_mut(), 0, None) };
        assert!(memory.as_slice().is_empty() && memory.as_slice_mut().is_empty());
    }
}
