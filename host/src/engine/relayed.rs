//! All-to-alls of blocks of any length through relays: `hier-pairwise`, by name or by an override.
//!
//! A rank knows how much it sends and receives itself, and must learn what it relays. So an operation is one call of
//! the communicator, in three parts ([`relayed`] has their schedules, and the proofs):
//!
//! ```text
//!   counts inside the server    what each rank sends through each other one of its server
//!   counts between servers      what each rank gets, from everybody
//!   the elements
//! ```
//!
//! `auto` takes pairwise exchange otherwise: no rank knows beforehand how much a relay would pass on.
//!
//! A count is 8 bytes in little-endian order, and zeros up to whole elements of the operation's type.
//!
//! Invariants:
//! - a rank moves no element before it has compared all counts with its own: those that differ are the error of
//!   pairwise exchange, though their sums may agree;
//! - what others say sizes nothing beyond [`RELAYED_MAX_BYTES`]: a rank that would have to hold more ends the operation
//!   on all ranks.

use super::core::Core;
use super::data_path::Deadline;
use super::error::Error;
use crate::exec::{Buffers, ExecError, Execution};
use crate::schedule::hierarchical_pairwise::relayed;
use crate::schedule::{Buffer, Place, Schedule};
use crate::transport::packets::OpId;
use sumac_hal::ids::Rank;
use sumac_hal::op::{OpDesc, Path};

/// The most that a rank holds of what others send through it.
const RELAYED_MAX_BYTES: u64 = 1 << 30;

/// The length of a count.
const COUNT_BYTES: usize = size_of::<u64>();

/// What one rank sends and receives, in elements of `element_bytes`.
struct Exchange<'a> {
    place: Place,
    /// The number of servers, and of ranks on each.
    servers: [usize; 2],
    send: &'a [usize],
    recv: &'a [usize],
    element_bytes: usize,
}

impl Exchange<'_> {
    /// The number of elements that a count takes.
    const fn count_elements(&self) -> usize {
        COUNT_BYTES.div_ceil(self.element_bytes)
    }

    fn encode(&self, counts: impl Iterator<Item = u64>) -> Vec<u8> {
        let mut bytes = Vec::new();
        for count in counts {
            bytes.extend_from_slice(&count.to_le_bytes());
            bytes.resize(bytes.len() + self.count_elements() * self.element_bytes - COUNT_BYTES, 0);
        }
        bytes
    }

    fn decode(&self, bytes: &[u8]) -> Vec<u64> {
        let counts = bytes.chunks_exact(self.count_elements() * self.element_bytes);
        counts
            .map(|count| count.iter().take(COUNT_BYTES).rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte)))
            .collect()
    }

    /// What goes through each rank of the own server, by index: to each server.
    fn counts_inside(&self) -> Vec<u8> {
        let [servers, each] = self.servers;
        let through = |index: usize| (0..servers).map(move |server| self.send[server * each + index] as u64);
        self.encode((0..each).flat_map(through))
    }

    /// Turn what each rank of the own server sends through this one, to each server, into what each server gets from
    /// each of them.
    fn by_server(&self, told: &[u64]) -> Vec<u64> {
        let [servers, each] = self.servers;
        (0..servers).flat_map(|server| (0..each).map(move |index| told[index * servers + server])).collect()
    }

    /// Check that this rank can hold what it relays; returns the counts.
    fn check_relayed(&self, relayed: &[u64]) -> Result<Vec<usize>, ExecError> {
        let (rank, each) = (self.place.rank(), self.servers[1]);
        let own = rank.0 as usize / each;
        let others = relayed.iter().enumerate().filter(|(at, _)| at / each != own).map(|(_, &count)| count);
        let bytes = others.fold(0_u64, u64::saturating_add).saturating_mul(self.element_bytes as u64);
        let counts: Result<Vec<usize>, _> = relayed.iter().map(|&count| usize::try_from(count)).collect();
        match counts {
            Ok(counts) if bytes <= RELAYED_MAX_BYTES => Ok(counts),
            _ => Err(ExecError::Interrupted {
                rank,
                reason: format!(
                    "{bytes} bytes of others go through this rank, which holds {RELAYED_MAX_BYTES} at most: use \
                     pairwise, or send less at a time"
                ),
            }),
        }
    }

    /// Return a rank that sends this one another number of elements than it expects, with both numbers.
    fn difference(&self, received: &[u64]) -> Option<(Rank, u64, u64)> {
        let pairs = received.iter().zip(self.recv).map(|(&sent, &expected)| (sent, expected as u64)).enumerate();
        let found = pairs.into_iter().find(|(_, (sent, expected))| sent != expected);
        found.map(|(from, (sent, expected))| (Rank(from as u32), sent, expected))
    }

    /// Return the error for such a rank, in the operation of this index.
    fn length_error(&self, (from, sent, expected): (Rank, u64, u64), op_index: u64) -> ExecError {
        let bytes = |count: u64| count.saturating_mul(self.element_bytes as u64);
        let (sent_bytes, expected_bytes) = (bytes(sent), bytes(expected));
        ExecError::Length { from, to: self.place.rank(), op_index, sent_bytes, expected_bytes }
    }
}

impl Core {
    /// Run an all-to-all of blocks of any length through relays, which was announced to the tree.
    pub(super) fn run_relayed(
        &mut self,
        (desc, send, recv): (&OpDesc, &[usize], &[usize]),
        buffers: Buffers<'_>,
        announced: Option<OpId>,
        deadline: Deadline,
    ) -> Result<(), Error> {
        let place = self.data.place;
        let shape = self.data.selection.context().shape_of(place.ranks());
        let no_servers = || Error::Argument(format!("{desc} through relays without servers")).ending();
        let servers = relayed::servers(shape, place.ranks()).ok_or_else(no_servers)?;
        let element_bytes = desc.element_bytes().max(1);
        let exchange = Exchange { place, servers: servers.map(|extent| extent as usize), send, recv, element_bytes };
        let mut call = (desc, announced, deadline);
        let inside = relayed::counts_inside(place, exchange.count_elements(), shape);
        let told = self.exchange_counts(&mut call, &inside, &exchange.counts_inside())?;
        let relayed = exchange.by_server(&exchange.decode(&told));
        let between = relayed::counts_between(place, exchange.count_elements(), shape);
        let held = match exchange.check_relayed(&relayed) {
            Ok(held) => held,
            Err(error) => return Err(self.end_counts(&call, &between, |_| error)),
        };
        let received = self.exchange_counts(&mut call, &between, &exchange.encode(relayed.into_iter()))?;
        if let Some(found) = exchange.difference(&exchange.decode(&received)) {
            return Err(self.end_counts(&call, &between, |op_index| exchange.length_error(found, op_index)));
        }
        let schedule = relayed::all_to_all_v(place, shape, [send, recv, &held]);
        let schedule = schedule.map_err(|error| Error::Argument(error.to_string()).ending())?;
        self.run_announced((desc, Path::HierarchicalPairwise), &schedule, buffers, call.1, deadline)
    }

    /// Run an exchange of counts; returns what arrived.
    fn exchange_counts(
        &mut self,
        (desc, announced, deadline): &mut Call<'_>,
        schedule: &Schedule,
        input: &[u8],
    ) -> Result<Vec<u8>, Error> {
        let (view, mut output) = (self.data.tree.view(), vec![0; input.len()]);
        let buffers = Buffers::Separate { input, output: &mut output };
        self.run_announced((desc, Path::HierarchicalPairwise), schedule, buffers, *announced, *deadline)?;
        // A new tree does not know the announcement.
        *announced = announced.filter(|_| self.data.tree.view() == view);
        Ok(output)
    }

    /// End the operation on all ranks, in the place of a part with this schedule, with the error for one of its index.
    fn end_counts(
        &mut self,
        (desc, announced, deadline): &Call<'_>,
        schedule: &Schedule,
        error: impl FnOnce(u64) -> ExecError,
    ) -> Error {
        let operation = (*desc, Path::HierarchicalPairwise, self.data.operations.scheduled_number());
        let version = self.data.selection.context().table.version;
        let len = |buffer| vec![0; schedule.layout().len(buffer) * desc.element_bytes()];
        let (input, mut output) = (len(Buffer::Input), len(Buffer::Output));
        let buffers = Buffers::Separate { input: &input, output: &mut output };
        let ended = self.with_connections(|_, connections| {
            let ctx = connections.next(operation, version, deadline.0);
            let error = error(ctx.op_index);
            Execution::new(&mut connections.mesh, schedule, None, buffers, &ctx)?.cancel(error.clone());
            Ok(error)
        });
        let error = ended.map_or_else(|error| error, Error::from).ending();
        let error = self.wait_for_group_error(*announced, error, *deadline);
        self.agreed_loss_error(error, *deadline)
    }
}

/// A call, its announcement in the tree, and its deadline.
type Call<'a> = (&'a OpDesc, Option<OpId>, Deadline);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_take_whole_elements_of_any_size_and_come_back() {
        let counts = [0, 1, u64::MAX, 0x0102_0304_0506_0708];
        for element_bytes in [1, 2, 3, 4, 8, 16, 24] {
            let place = Place::new(Rank(0), 4).expect("inside");
            let exchange = Exchange { place, servers: [2, 2], send: &[0; 4], recv: &[0; 4], element_bytes };
            let bytes = exchange.encode(counts.into_iter());
            assert_eq!(bytes.len(), 4 * exchange.count_elements() * element_bytes);
            assert_eq!(exchange.decode(&bytes), counts, "elements of {element_bytes} bytes");
        }
    }

    /// What no rank of the job sends in earnest.
    #[test]
    fn counts_without_bound_size_nothing() {
        let place = Place::new(Rank(0), 4).expect("inside");
        let exchange = Exchange { place, servers: [2, 2], send: &[0; 4], recv: &[0; 4], element_bytes: 8 };
        for relayed in [[0, 0, u64::MAX, u64::MAX], [0, 0, 1 << 27, 1]] {
            let error = exchange.check_relayed(&relayed).expect_err("too much").to_string();
            assert!(error.contains("1073741824 at most"), "{error}");
        }
        // What the own server sends to this rank is its own output.
        assert_eq!(exchange.check_relayed(&[u64::MAX >> 1, 0, 1 << 27, 0]), Ok(vec![usize::MAX >> 1, 0, 1 << 27, 0]));
    }
}
