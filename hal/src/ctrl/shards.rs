//! A device with several shards: every shard carries out every request, and their responses are merged into one.

use super::{Request, Response, Stats};

/// Merge the shards' responses to one request: the first refusal if there is one, else the sum of their stats, or the
/// narrowest of their paths once all are known. `None` if there are no responses.
pub fn merge(answers: impl IntoIterator<Item = Response>) -> Option<Response> {
    answers.into_iter().reduce(|merged, answer| match (merged, answer) {
        (Response::Refused(refusal), _) | (_, Response::Refused(refusal)) => Response::Refused(refusal),
        (Response::Stats(mut sum), Response::Stats(stats)) => {
            let Stats { slots_used, slot_memory_used_bytes, ref counters, stack, .. } = stats;
            sum.slots_used += slots_used;
            sum.slot_memory_used_bytes += slot_memory_used_bytes;
            sum.counters.merge(counters);
            // All stacks of a device have the same size.
            sum.stack = sum.stack.into_iter().chain(stack).max_by_key(|stack| stack.used_bytes);
            Response::Stats(sum)
        }
        (Response::Path { max_packet_len_bytes: a }, Response::Path { max_packet_len_bytes: b }) => {
            Response::Path { max_packet_len_bytes: a.zip(b).map(|(a, b)| a.min(b)) }
        }
        (merged, _) => merged,
    })
}

/// Return the request that undoes `request` on the shards that carried it out, for when another shard has refused it. A
/// group exists on all shards or on none.
pub const fn undo(request: &Request) -> Option<Request> {
    match request {
        Request::CreateGroup(config) => Some(Request::ReleaseGroup(config.group)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Counters, Refusal, StackUsage};
    use super::*;
    use crate::ids::{BootId, GroupId, TreeId};

    #[test]
    fn one_refusing_shard_refuses_for_the_device() {
        let refused = Response::Refused(Refusal::NoGroup(GroupId(1)));
        assert_eq!(merge([Response::Done, refused.clone(), Response::Done]), Some(refused));
        assert_eq!(merge([Response::Done, Response::Done]), Some(Response::Done));
        assert_eq!(merge([]), None);
    }

    #[test]
    fn merged_stats_are_summed_over_shards() {
        let stats = |slots_used| {
            let counters = Counters { packets_in: 5, ..Counters::default() };
            let stack = (slots_used < 5).then_some(StackUsage { used_bytes: 100 - slots_used, size_bytes: 200 });
            Stats { boot_id: BootId(1), groups: 1, trees: 1, slots_used, slot_memory_used_bytes: 100, counters, stack }
        };
        let Some(Response::Stats(sum)) = merge([3, 4, 5].map(|slots| Response::Stats(stats(slots)))) else {
            panic!("no sum");
        };
        assert_eq!((sum.slots_used, sum.slot_memory_used_bytes, sum.counters.packets_in), (12, 300, 15));
        assert_eq!(sum.stack.map(|stack| stack.used_bytes), Some(97), "the stack with the least room left");
    }

    #[test]
    fn merged_path_is_the_narrowest_once_all_are_known() {
        let path = |max_packet_len_bytes| Response::Path { max_packet_len_bytes };
        assert_eq!(merge([Some(1472), Some(1296), Some(1440)].map(path)), Some(path(Some(1296))));
        assert_eq!(merge([Some(1472), None, Some(1440)].map(path)), Some(path(None)));
    }

    #[test]
    fn requests_that_reserve_nothing_have_no_undo() {
        assert_eq!(undo(&Request::RemoveTree(TreeId(1))), None);
        assert_eq!(undo(&Request::Stats), None);
    }
}
