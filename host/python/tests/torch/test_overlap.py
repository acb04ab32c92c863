"""Gradient buckets overlap with the backward pass: by the order of events, not by a clock."""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from sumac.torch.work import SumacWork

WIDTH, LAYERS = 256, 6


def overlapping():
    """Hold the backward pass at its last layer until the first bucket is summed over all ranks."""
    started, events = [], []
    init = SumacWork.__init__

    def recorded(work, what, rank, requests, *arguments):
        init(work, what, rank, requests, *arguments)
        number = len(started)
        started.append(requests)
        events.append(("started", number))
        requests[0].add_done_callback(lambda: events.append(("completed", number)))

    class Held(torch.autograd.Function):
        """Between the first layer and the second: the first layer's gradients are the last to be computed."""

        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            events.append(("held", len(started)))
            if is_traced:
                assert started, "no bucket was started while gradients were left to compute"
                # Without a thread that drives it, or if a rank had not started it, this would not end.
                outcome = started[0][0].wait(60)
                events.append(("released", outcome.path))
            return gradient

    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    held = nn.Module()
    held.forward = Held.apply
    model = nn.Sequential(layers[0], held, *layers[1:])
    size_mb = layers[0].weight.nbytes / 2**20
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2 * size_mb)
    layers[0].weight.register_post_accumulate_grad_hook(lambda _: events.append(("last gradient", None)))
    x = torch.full((8, WIDTH), float(dist.get_rank()))
    is_traced = False
    # DDP orders its buckets by the first step, and the ranks agree on that in the second.
    for _ in range(2):
        model(x).sum().backward()
    SumacWork.__init__ = recorded
    is_traced = True
    events.clear()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        model(x).sum().backward()
    assert len(started) >= 3, f"{len(started)} buckets"
    order = [event for event, _ in events]
    assert events.index(("started", 0)) < order.index("held") < order.index("released") < order.index("last gradient")
    assert order.index("last gradient") < events.index(("started", len(started) - 1))
    # The same in the trace of torch: operations between the gradients of layers.
    begun = sorted((event.time_range.start, event.name) for event in trace.events())
    names = [name for _, name in begun if name in ("c10d::allreduce_", "AddmmBackward0")]
    assert names.index("c10d::allreduce_") < max(at for at, name in enumerate(names) if name == "AddmmBackward0"), names
    assert names.count("c10d::allreduce_") == len(started)


def test_first_bucket_is_summed_before_the_last_gradient_is_computed(run_ranks):
    run_ranks(overlapping)
