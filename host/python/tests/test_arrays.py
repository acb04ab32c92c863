"""Which arrays operations take, and what they say about others. One rank needs no peers."""

import array
import gc

import ml_dtypes
import numpy as np
import pytest

import sumac
from sumac import _sumac
from sumac.testing import Cluster


@pytest.fixture(scope="module")
def comm():
    with Cluster(1) as cluster:
        variables = cluster.environments()[0]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            with sumac.init() as comm:
                yield comm


@pytest.mark.parametrize("dtype", "i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 bool c8 c16".split())
def test_numpy_dtype_is_accepted(comm, dtype):
    x = np.ones(5, dtype)
    comm.all_reduce(x, "max" if dtype == "bool" else "sum")
    assert (x == np.ones(5, dtype)).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_narrow_float_of_ml_dtypes_is_used_in_place(comm, dtype):
    x, out = np.arange(4).astype(dtype), np.zeros(4, dtype)
    comm.all_reduce(x, out=out)
    assert (x == out).all()


def test_buffer_without_numpy_is_accepted(comm):
    x = array.array("d", [1.0, 2.0])
    comm.all_reduce(x)
    comm.broadcast(bytearray(3))
    assert x.tolist() == [1.0, 2.0]


class DLPackOnly:
    """An array without the buffer protocol."""

    def __init__(self, array, device=(1, 0), versioned=True):
        self.array, self.device, self.versioned = array, device, versioned

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **named):
        if not self.versioned and named:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**named)


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_array_is_used_without_a_copy(comm, versioned):
    x, out = np.arange(6, dtype="f4").reshape(2, 3), np.zeros((2, 3), "f4")
    comm.all_reduce(DLPackOnly(x, versioned=versioned), out=DLPackOnly(out, versioned=versioned))
    assert (out == x).all()


def test_read_only_dlpack_array_is_no_output(comm):
    x = np.zeros(3)
    x.flags.writeable = False
    with pytest.raises(TypeError, match="read-only.*numpy.array"):
        comm.all_reduce(DLPackOnly(x))


class OnDevice:
    """An array in memory of a device, as cupy's: nobody may ask for its memory."""

    def __init__(self, kind):
        self.kind = kind

    def __dlpack_device__(self):
        return (self.kind, 1)

    def __dlpack__(self, **named):
        raise AssertionError("the memory of a device was asked for")


@pytest.mark.parametrize("kind, name", [(2, "CUDA"), (10, "ROCm"), (13, "CUDA managed memory"), (99, "of another kind")])
def test_array_of_another_device_is_a_type_error_that_says_what_to_do(comm, kind, name):
    says = rf"on a device \({name} 1\).*copy it there first, with \.cpu\(\) in torch, \.get\(\) in cupy"
    with pytest.raises(TypeError, match=says):
        comm.all_reduce(OnDevice(kind))
    with pytest.raises(TypeError, match=says):
        comm.all_reduce(np.zeros(3), out=OnDevice(kind))


@pytest.mark.parametrize("kind", [3, 11])
def test_pinned_memory_of_the_host_is_used_without_a_copy(comm, kind):
    x, out = np.arange(6.0), np.zeros(6)
    comm.all_reduce(DLPackOnly(x, device=(kind, 0)), out=DLPackOnly(out, device=(kind, 0)))
    assert (out == x).all()


def test_read_only_output_is_a_type_error_and_input_is_not(comm):
    out = bytearray(3)
    comm.all_reduce(b"abc", "max", out=out)
    assert out == b"abc"
    with pytest.raises(TypeError, match="read-only"):
        comm.all_reduce(b"abc", "max")


@pytest.mark.parametrize(
    "x", [np.zeros((4, 4))[:, 1], np.zeros(8)[::2], np.zeros((2, 3)).T, DLPackOnly(np.zeros(8)[::2])]
)
def test_strided_array_is_a_type_error_that_says_what_to_do(comm, x):
    with pytest.raises(TypeError, match="ascontiguousarray"):
        comm.all_reduce(x)


@pytest.mark.parametrize("x", [[1.0], 1.0, None, "text", np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, "M8[s]")])
def test_unusable_object_is_a_type_error(comm, x):
    with pytest.raises(TypeError):
        comm.broadcast(x)


@pytest.mark.parametrize("call", "all_reduce broadcast all_to_all all_gather all_to_all_v send receive".split())
def test_tuple_that_describes_memory_is_a_type_error_that_says_what_is_accepted(comm, call):
    x = np.zeros(2)
    described = (x.ctypes.data, x.nbytes, "f64", x)
    further = {"all_gather": (x,), "all_to_all_v": ([2], x, [2]), "send": (0,), "receive": (0,)}
    with pytest.raises(TypeError, match="tuple is no array: pass an object that has the buffer protocol or __dlpack__"):
        getattr(comm, call)(described, *further.get(call, ()))


def test_region_has_no_constructor_and_is_in_no_public_list():
    with pytest.raises(TypeError, match="Region"):
        _sumac.Region(0, 8, "f64", None)
    with pytest.raises(TypeError):
        type("Other", (_sumac.Region,), {})
    assert "Region" not in _sumac.__all__ and not hasattr(sumac, "Region")


def test_region_is_used_in_place_and_bounded(comm):
    x = np.arange(3, dtype="f4")
    out = np.zeros(3, "f4")
    comm.all_reduce(x, out=_sumac.Region._at(out.ctypes.data, out.nbytes, "f32", out))
    assert (out == x).all()
    for address, len_bytes in [(0, 8), (8, 1 << 63), ((1 << 64) - 8, 16), (8, 7)]:
        with pytest.raises(ValueError, match="bytes"):
            _sumac.Region._at(address, len_bytes, "f32", x)


def test_input_and_output_of_different_types_are_a_type_error(comm):
    with pytest.raises(TypeError, match="elements of f32, the output of f64"):
        comm.all_reduce(np.zeros(2, "f4"), out=np.zeros(2, "f8"))


def test_input_and_output_that_overlap_are_refused(comm):
    x = np.zeros(8)
    with pytest.raises(ValueError, match="in place"):
        comm.all_reduce(x[:4], out=x[2:6])


@pytest.mark.parametrize(("dtype", "op"), [("bool", "sum"), ("c8", "max"), ("bool", "avg")])
def test_operator_without_a_meaning_for_the_elements_is_refused(comm, dtype, op):
    with pytest.raises(TypeError, match=op):
        comm.all_reduce(np.zeros(2, dtype), op)


def test_unknown_names_list_the_known_ones(comm):
    with pytest.raises(ValueError, match="choose from sum, prod"):
        comm.all_reduce(np.zeros(2), "plus")
    with pytest.raises(ValueError, match="nowhere"):
        comm.all_reduce(np.zeros(2), algo="nowhere")
    with pytest.raises(TypeError, match='"speed" is no option'):
        comm.all_reduce(np.zeros(2), speed=1)
    with pytest.raises(TypeError, match='"jobs" is no setting'):
        sumac.init(controller="127.0.0.1:1", job="x", rank=0, world=1, jobs=2)


@pytest.mark.parametrize(
    ("name", "value", "kind", "why"),
    [
        ("order", "random", ValueError, 'setting order: "random" is not one of arrival, fold, pairwise'),
        ("deadline", "soon", ValueError, 'setting deadline: "soon" is not a number of seconds'),
        ("deadline", -1, ValueError, 'setting deadline: "-1" is not a number of seconds'),
        ("deadline", float("inf"), ValueError, 'setting deadline: "inf" is not'),
        ("recover", "yes", ValueError, 'setting recover: "yes" is not one of 1, 0'),
        ("trees", 300, ValueError, 'setting trees: "300" is not'),
        ("progress", "nobody", ValueError, 'setting progress: "nobody" is not one of caller, thread'),
        ("progress", "caller", ValueError, "setting progress: Python needs the thread"),
        ("straggler", "late", ValueError, 'setting straggler: "late" is not wait, deadline:SECONDS'),
        ("transport", "carrier", ValueError, "setting transport: .*carrier"),
        ("controller", "localhost:port", ValueError, "setting controller: .*localhost:port"),
        ("key", "sumac-key 07", ValueError, "setting key: (?!.*07)"),
        ("order", ["fold"], TypeError, "setting order: it takes a text, a number, True or False, not list"),
    ],
)
def test_invalid_setting_is_named_as_the_program_wrote_it(name, value, kind, why):
    settings = {"controller": "127.0.0.1:1", "job": "x", "rank": 0, "world": 1, name: value}
    with pytest.raises(kind, match=why):
        sumac.init(**settings)


def test_progress_by_callers_in_the_environment_is_refused(comm, monkeypatch):
    monkeypatch.setenv("SUMAC_PROGRESS", "caller")
    with pytest.raises(ValueError, match="SUMAC_PROGRESS"):
        sumac.init()


def test_settings_of_every_type_are_accepted(monkeypatch):
    with Cluster(1) as cluster:
        variables = cluster.environments()[0]
        monkeypatch.setenv("SUMAC_KEY_FILE", variables["SUMAC_KEY_FILE"])
        controller = f"{variables['MASTER_ADDR']}:{variables['SUMAC_PORT']}"
        named = {"controller": controller, "job": variables["SUMAC_JOB"], "rank": np.int64(0), "world": 1}
        further = {"order": "fold", "recover": False, "hierarchical": True, "trees": 1, "progress": "thread", "join_timeout": 2.5}
        with sumac.init(**named, **further, deadline=30, straggler="deadline:20") as comm:
            x = np.ones(3)
            comm.all_reduce(x, algo="ring", straggler="wait", deadline=20.5)
            assert (x == 1).all()


@pytest.mark.parametrize("shape", [(), 0, 3, (2, 0), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["f4", "c16", ml_dtypes.bfloat16])
def test_empty_returns_a_zeroed_array_of_shape_and_type(comm, shape, dtype):
    x = sumac.empty(shape, dtype, comm=comm)
    assert x.dtype == np.dtype(dtype) and x.shape == np.zeros(shape).shape and not x.any()
    comm.all_reduce(x)


def outliving():
    comm = sumac.init()
    x = comm.empty(4096, "i8")
    x[:] = 7
    assert comm.all_reduce(x).transfer == "zero-copy"
    view = memoryview(x[1024:])
    comm.leave()
    del comm, x
    gc.collect()
    assert view[-1] == 14


def test_memory_of_empty_is_zero_copy_and_outlives_array_and_communicator(run_ranks):
    run_ranks(outliving)
