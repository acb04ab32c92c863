"""Arrays of jax on the CPU: inputs without a copy, and never outputs, since jax's arrays do not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sumac


def refuse(*_):
    raise AssertionError("jax copies the array")


def inputs():
    # jax's view is a copy.
    type(jnp.zeros(1)).view = refuse
    with sumac.init() as comm:
        for dtype in (jnp.float32, jnp.bfloat16, jnp.int32, jnp.complex64):
            x = (jnp.arange(4) + comm.rank).astype(dtype)
            out = np.zeros(4, dtype)
            comm.all_reduce(x, out=out)
            assert (out == np.asarray(2 * jnp.arange(4) + 1).astype(dtype)).all()
            # A result goes back to jax as any array of numpy does.
            assert (jnp.asarray(out) == out).all() and x[0] == comm.rank
        flags = jnp.array([comm.rank == 1, False])
        out = np.zeros(2, bool)
        comm.all_reduce(flags, "max", out=out)
        assert out.tolist() == [True, False]
        # The operation holds an array that nobody else does.
        out = np.zeros(1 << 16, "f4")
        request = comm.start_all_reduce(jax.jit(lambda: jnp.ones(1 << 16) * 2)(), out=out)
        request.wait()
        assert (out == 4).all()
        comm.send(jnp.ones(3), to=1) if comm.rank == 0 else comm.receive(out[:3], source=0)


def outputs():
    with sumac.init() as comm:
        for x in (jnp.zeros(3), jnp.zeros(3, jnp.bfloat16)):
            for call in (lambda: comm.all_reduce(x), lambda: comm.broadcast(x), lambda: comm.receive(x, 1 - comm.rank)):
                with pytest.raises(TypeError, match=r"read-only.*numpy\.array\(x\), or a separate output"):
                    call()
        comm.barrier()


@pytest.mark.parametrize("case", [inputs, outputs])
def test_array_of_jax_is_an_input_and_no_output(run_ranks, case):
    run_ranks(case, env={"JAX_PLATFORMS": "cpu"})
