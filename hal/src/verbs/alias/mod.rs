//! Alias keys: one function of a device, such as a card's, accesses memory of another, such as the host's (cross-GVMI).
//!
//! The owner exports memory ([`ExportedMemory`]): it pins it, creates a memory key for it, and allows every function
//! that has the access key to use that. The other function attaches what it was granted ([`MemoryGrant`]) as an alias,
//! whose key is one of its own protection domain. [`MemcpyEngine::map_alias`](super::MemcpyEngine::map_alias) does so,
//! and copies from and to it. Each of these steps is a command to the device (DevX), which the library and the kernel
//! only pass on.
//!
//! Written from UCX (`src/uct/ib/mlx5/dv/ib_mlx5dv_md.c`), RC4ML/SmartNS (`src/devx/devx_mr.cpp`) and the kernel's
//! header, and tested on a double of the device. **No card has run it.** What no public source says, and no double can:
//! whether a device refuses further accesses by an alias as soon as the key is destroyed, and whether it waits for
//! copies in flight. UCX relies on it, and so does this.
//!
//! Invariants:
//! - Memory is unpinned only once its key is destroyed, and freed only once it is unpinned; if either fails, it is
//!   leaked.
//! - The key's protection domain has no queue pair, so the key opens the memory to aliases only, not to the network.
//! - An access key is used for one export, and comes from the system's random source.

mod commands;
#[cfg(test)]
pub(super) mod firmware;
#[cfg(test)]
mod tests;

use super::config::VerbsError;
use super::mlx5::{Devx, MemcpyError, Mlx5};
use super::objects::{Context, Domain};
use crate::dma::DmaMemory;
use commands::{
    ALIAS_CREATED_LEN, CAPABILITIES_LEN, CREATED_LEN, DONE_LEN, Group, MkeyRequest, NUMBER_MAX, allow_access,
    create_alias, create_mkey, created_alias, created_mkey, function_number, query_capabilities, sharing,
};
use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use thiserror::Error;

/// Why memory cannot be exported, or attached as an alias.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AliasError {
    /// The library or device is none of mlx5.
    #[error(transparent)]
    Mlx5(#[from] MemcpyError),
    /// Another verbs error.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// The device does not share memory keys between functions.
    #[error(
        "{device} cannot share memory keys between functions ({missing} lacks them): use BlueField-3, and see its firmware's settings"
    )]
    Unsupported {
        /// The device.
        device: String,
        /// The capability, by its name in the kernel.
        missing: &'static str,
    },
    /// The kernel refused a command.
    #[error(
        "{device} can't {what}: {source}; commands to the device (DevX) need CAP_NET_RAW, and firmware that allows them"
    )]
    Refused {
        /// What was tried.
        what: &'static str,
        /// The device.
        device: String,
        /// The system's error.
        source: io::Error,
    },
    /// The device's firmware refused a command.
    #[error("{device} can't {what}: {} (status {status:#x}, syndrome {syndrome:#x})", commands::describe(*status))]
    Rejected {
        /// What was tried.
        what: &'static str,
        /// The device.
        device: String,
        /// The status.
        status: u8,
        /// The firmware's own code.
        syndrome: u32,
    },
    /// The alias was created, but is not usable.
    #[error(
        "the alias on {device} is in state {state}: the grant is of another export, or its memory is not exported any more"
    )]
    BadState {
        /// The device.
        device: String,
        /// The state.
        state: u8,
    },
    /// The device answered with a number that nothing of this kind has.
    #[error("{device} numbers {what} {number:#x}; such numbers have 24 bits")]
    BadNumber {
        /// What it is the number of.
        what: &'static str,
        /// The device.
        device: String,
        /// The number.
        number: u32,
    },
    /// The memory could not be pinned.
    #[error(
        "can't pin {len_bytes} bytes for {device}: {source}; raise the limit of locked memory (ulimit -l, LimitMEMLOCK=)"
    )]
    Pin {
        /// The length in bytes.
        len_bytes: usize,
        /// The device.
        device: String,
        /// The system's error.
        source: io::Error,
    },
    /// The system has no random numbers.
    #[error("can't draw an access key: {0}")]
    Random(io::Error),
}

/// What opens exported memory to another function. Its `Debug` output does not reveal it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AccessKey(pub(super) [u8; 32]);

impl AccessKey {
    fn random() -> Result<Self, AliasError> {
        let mut bytes = [0; 32];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
                Ok(count) => filled += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(AliasError::Random(errno.into())),
            }
        }
        Ok(Self(bytes))
    }
}

impl fmt::Debug for AccessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessKey(..)")
    }
}

/// What another function of the device needs to access exported memory. Whoever has it can read and write the memory:
/// send it over an encrypted connection only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryGrant {
    /// The number of the function that exports the memory (`vhca_id`).
    pub function: u16,
    /// The memory key.
    pub mkey: u32,
    /// The address of the memory, as the exporting process uses it.
    pub addr: u64,
    /// The length in bytes.
    pub len_bytes: u64,
    /// What opens it.
    pub access: AccessKey,
}

/// The length of a grant in bytes.
const GRANT_LEN: usize = 2 + 4 + 8 + 8 + 32;

impl MemoryGrant {
    /// Return the grant as hexadecimal digits, which [`FromStr`] reads.
    pub fn to_hex(&self) -> String {
        let mut bytes = Vec::with_capacity(GRANT_LEN);
        bytes.extend(self.function.to_be_bytes());
        bytes.extend(self.mkey.to_be_bytes());
        bytes.extend(self.addr.to_be_bytes());
        bytes.extend(self.len_bytes.to_be_bytes());
        bytes.extend(self.access.0);
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The text is not a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a grant of memory has {} hexadecimal digits", 2 * GRANT_LEN)]
pub struct ParseGrantError;

impl FromStr for MemoryGrant {
    type Err = ParseGrantError;

    fn from_str(text: &str) -> Result<Self, ParseGrantError> {
        let mut bytes = [0; GRANT_LEN];
        if text.len() != 2 * GRANT_LEN || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(ParseGrantError);
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
            let digits = str::from_utf8(digits).map_err(|_| ParseGrantError)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| ParseGrantError)?;
        }
        let part = |at: usize, len: usize| &bytes[at..at + len];
        let number = |at: usize, len: usize| part(at, len).iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        let mut access = AccessKey([0; 32]);
        access.0.copy_from_slice(part(22, 32));
        // As many bits.
        Ok(Self {
            function: number(0, 2) as u16,
            mkey: number(2, 4) as u32,
            addr: number(6, 8),
            len_bytes: number(14, 8),
            access,
        })
    }
}

/// What a function can do with alias keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AliasSupport {
    /// The function's number (`vhca_id`).
    pub function: u16,
}

/// Return what the device `name` can do with alias keys.
///
/// # Errors
/// [`AliasError`] if it can neither export memory nor attach it.
pub fn alias_support(name: &str) -> Result<AliasSupport, AliasError> {
    let context = Context::open(name)?;
    let mlx5 = Mlx5::load()?;
    mlx5.check_is_mlx5(&context)?;
    support(&mlx5.devx(&context)?)
}

/// Commands to a device (DevX), which the library passes on.
pub(super) trait Commands {
    /// An object that the device created.
    type Object;
    /// Pinned memory.
    type Pinned;

    /// The device.
    fn name(&self) -> &str;

    /// Execute a command that creates nothing. The answer has a status even if this fails.
    fn execute(&self, request: &[u8], answer: &mut [u8]) -> io::Result<()>;

    /// Execute a command that creates an object.
    fn create(&self, request: &[u8], answer: &mut [u8]) -> io::Result<Self::Object>;

    /// Destroy an object; on failure it exists on.
    ///
    /// # Safety
    /// The object was created through this interface, and was not destroyed.
    unsafe fn destroy(&self, object: &mut Self::Object) -> io::Result<()>;

    /// Pin memory in pages of a length of which `page_log` is the logarithm; returns also its number.
    ///
    /// # Safety
    /// The memory is valid until it is unpinned.
    unsafe fn pin(&self, memory: &dyn DmaMemory, page_log: u8) -> io::Result<(Self::Pinned, u32)>;

    /// Unpin memory; on failure it stays pinned.
    ///
    /// # Safety
    /// The memory was pinned through this interface, and was not unpinned.
    unsafe fn unpin(&self, pinned: &mut Self::Pinned) -> io::Result<()>;

    /// Return the number of a protection domain.
    fn domain_number(&self, domain: &Domain) -> io::Result<u32>;
}

/// Explain a failed command: by the firmware's status if it got so far.
fn failed(device: &str, what: &'static str, source: io::Error, answer: &[u8]) -> AliasError {
    let device = device.to_owned();
    match commands::status(answer) {
        Err((status, syndrome)) => AliasError::Rejected { what, device, status, syndrome },
        Ok(()) => AliasError::Refused { what, device, source },
    }
}

fn execute(commands: &impl Commands, what: &'static str, request: &[u8], answer: &mut [u8]) -> Result<(), AliasError> {
    let done = commands.execute(request, answer);
    done.map_err(|source| failed(commands.name(), what, source, answer))?;
    check(commands, what, answer)
}

/// Check the status of an answer of which the kernel has said nothing.
fn check(commands: &impl Commands, what: &'static str, answer: &[u8]) -> Result<(), AliasError> {
    commands::status(answer).map_err(|_| failed(commands.name(), what, io::ErrorKind::Other.into(), answer))
}

/// Check a number that the device or the kernel gave.
fn numbered(commands: &impl Commands, what: &'static str, number: u32) -> Result<u32, AliasError> {
    if number <= NUMBER_MAX {
        return Ok(number);
    }
    Err(AliasError::BadNumber { what, device: commands.name().to_owned(), number })
}

/// Create an object. Hand it to what destroys it, and [`check`] the answer then.
fn create<C: Commands>(
    commands: &C,
    what: &'static str,
    request: &[u8],
    answer: &mut [u8],
) -> Result<C::Object, AliasError> {
    commands.create(request, answer).map_err(|source| failed(commands.name(), what, source, answer))
}

/// Ask what the function can do. As in UCX and the kernel's own aliases, either side needs both capabilities.
pub(super) fn support(commands: &impl Commands) -> Result<AliasSupport, AliasError> {
    let what = "query its capabilities";
    let mut answer = vec![0; CAPABILITIES_LEN];
    execute(commands, what, &query_capabilities(Group::General), &mut answer)?;
    let function = function_number(&answer);
    answer.fill(0);
    execute(commands, what, &query_capabilities(Group::General2), &mut answer)?;
    let missing = match sharing(&answer) {
        (true, true) => return Ok(AliasSupport { function }),
        (false, _) => "allowed_object_for_other_vhca_access",
        (true, false) => "cross_vhca_object_to_object_supported",
    };
    Err(AliasError::Unsupported { device: commands.name().to_owned(), missing })
}

/// Memory that other functions of the device can access, until this is dropped.
pub struct ExportedMemory {
    export: Export<Devx>,
}

impl ExportedMemory {
    /// Export memory through the device `name`.
    ///
    /// # Errors
    /// [`AliasError`]
    pub fn new(name: &str, memory: Arc<dyn DmaMemory>) -> Result<Self, AliasError> {
        let context = Context::open(name)?;
        let mlx5 = Mlx5::load()?;
        mlx5.check_is_mlx5(&context)?;
        let domain = Domain::new(&context, false)?;
        Ok(Self { export: Export::new(mlx5.devx(&context)?, &domain, memory)? })
    }

    /// Return what another function needs to access the memory.
    pub const fn grant(&self) -> MemoryGrant {
        self.export.grant
    }
}

impl fmt::Debug for ExportedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportedMemory").field("grant", &self.export.grant).finish_non_exhaustive()
    }
}

/// Exported memory, through these commands.
struct Export<C: Commands> {
    commands: C,
    /// The memory key; `None` before it is created.
    key: Option<C::Object>,
    pinned: C::Pinned,
    memory: Arc<dyn DmaMemory>,
    grant: MemoryGrant,
    _domain: Arc<Domain>,
}

impl<C: Commands> Export<C> {
    /// Export memory under a key of `domain`, in which there is no queue pair.
    fn new(commands: C, domain: &Arc<Domain>, memory: Arc<dyn DmaMemory>) -> Result<Self, AliasError> {
        let AliasSupport { function } = support(&commands)?;
        let access = AccessKey::random()?;
        let number = domain_number(&commands, domain)?;
        let page_log = rustix::param::page_size().trailing_zeros() as u8;
        let (len_bytes, addr) = (memory.len_bytes(), memory.base().as_ptr().expose_provenance() as u64);
        // SAFETY: `DmaMemory` is valid until it is dropped, which is after it is unpinned.
        let (pinned, umem) = unsafe { commands.pin(&*memory, page_log) }.map_err(|source| AliasError::Pin {
            len_bytes,
            device: commands.name().to_owned(),
            source,
        })?;
        let grant = MemoryGrant { function, mkey: 0, addr, len_bytes: len_bytes as u64, access };
        // From here on, dropping it unpins the memory.
        let mut export = Self { commands, key: None, pinned, memory, grant, _domain: Arc::clone(domain) };
        // Another low byte each time: the rest of a destroyed key is soon used again.
        let low_byte = AccessKey::random()?.0[0];
        let request = MkeyRequest { umem, domain: number, low_byte, addr, len_bytes: len_bytes as u64, page_log };
        let mut answer = [0; CREATED_LEN];
        let what = "create a memory key";
        export.key = Some(create(&export.commands, what, &create_mkey(&request), &mut answer)?);
        check(&export.commands, what, &answer)?;
        export.grant.mkey = created_mkey(&answer, low_byte);
        let request = allow_access(export.grant.mkey, &access);
        execute(&export.commands, "allow other functions to use a memory key", &request, &mut [0; DONE_LEN])?;
        Ok(export)
    }
}

impl<C: Commands> Drop for Export<C> {
    fn drop(&mut self) {
        // SAFETY: created by these commands, and destroyed here only.
        let is_destroyed = self.key.as_mut().is_none_or(|key| unsafe { self.commands.destroy(key) }.is_ok());
        // SAFETY: pinned by these commands, and unpinned here only.
        if !is_destroyed || unsafe { self.commands.unpin(&mut self.pinned) }.is_err() {
            // A card could still write it.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

/// An alias of another function's memory, in a protection domain of this one, until it is dropped.
pub(super) struct Alias<C: Commands> {
    commands: C,
    object: C::Object,
    lkey: u32,
    _domain: Arc<Domain>,
}

impl<C: Commands> Alias<C> {
    /// Attach granted memory.
    pub(super) fn attach(commands: C, domain: &Arc<Domain>, grant: &MemoryGrant) -> Result<Self, AliasError> {
        support(&commands)?;
        let number = domain_number(&commands, domain)?;
        let mut answer = [0; ALIAS_CREATED_LEN];
        let request = create_alias(grant.function, grant.mkey, &grant.access, number);
        let what = "attach the memory of another function";
        let object = create(&commands, what, &request, &mut answer)?;
        // From here on, dropping it destroys the alias.
        let mut alias = Self { commands, object, lkey: 0, _domain: Arc::clone(domain) };
        check(&alias.commands, what, &answer)?;
        let number = created_alias(&answer)
            .map_err(|state| AliasError::BadState { device: alias.commands.name().to_owned(), state })?;
        // The low byte of an alias is 0, whatever that of the key is.
        alias.lkey = numbered(&alias.commands, "an alias", number)? << 8;
        Ok(alias)
    }

    /// Return the key by which this function accesses the memory.
    pub(super) const fn lkey(&self) -> u32 {
        self.lkey
    }
}

impl<C: Commands> Drop for Alias<C> {
    fn drop(&mut self) {
        // Should that fail, the memory is still not this process's: nothing here depends on it.
        // SAFETY: created by these commands, and destroyed here only.
        let _ = unsafe { self.commands.destroy(&mut self.object) };
    }
}

fn domain_number(commands: &impl Commands, domain: &Domain) -> Result<u32, AliasError> {
    let refused =
        |source| AliasError::Refused { what: "number a protection domain", device: commands.name().to_owned(), source };
    numbered(commands, "a protection domain", commands.domain_number(domain).map_err(refused)?)
}
