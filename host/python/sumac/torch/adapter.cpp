// The backend as c10d's C++ sees it. A backend in Python is enough for every operation, but torch hands only `wait` and
// `get_future` of its works through. This one passes all that programs ask of a work: whether it has completed, its error,
// who sent a message from any rank, the result. Each call goes on to the backend in Python.
//
// `python -m sumac.torch build` compiles it for the torch that is there: c10d's classes change with each release.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>

namespace {

using c10::intrusive_ptr;
using std::vector;
using Tensors = vector<at::Tensor>;

// A Python object that may be let go on any thread, and after the interpreter has ended.
class Owned {
 public:
  explicit Owned(py::object object) : object_(std::move(object)) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  ~Owned() {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }

  const py::object& get() const {
    return object_;
  }

  // Call a method and convert what it returns.
  template <typename Result, typename... Arguments>
  Result call(const char* name, Arguments&&... arguments) const {
    py::gil_scoped_acquire gil;
    py::object result = object_.attr(name)(std::forward<Arguments>(arguments)...);
    if constexpr (!std::is_void_v<Result>) {
      return result.template cast<Result>();
    }
  }

 private:
  py::object object_;
};

class Work final : public c10d::Work {
 public:
  explicit Work(py::object work) : work_(std::move(work)) {}

  bool isCompleted() override {
    return work_.call<bool>("is_completed");
  }

  bool isSuccess() const override {
    return work_.call<bool>("is_success");
  }

  std::exception_ptr exception() const override {
    py::gil_scoped_acquire gil;
    py::object error = work_.get().attr("exception")();
    if (error.is_none()) {
      return nullptr;
    }
    return std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, py::str(error).cast<std::string>()));
  }

  int sourceRank() const override {
    return work_.call<int>("source_rank");
  }

  Tensors result() override {
    return work_.call<Tensors>("result_tensors");
  }

  void synchronize() override {
    work_.call<void>("wait");
  }

  bool wait(std::chrono::milliseconds timeout) override {
    return work_.call<bool>("wait", timeout);
  }

  void blockCurrentStream() override {
    work_.call<void>("wait");
  }

  intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return work_.call<std::shared_ptr<torch::jit::PythonFutureWrapper>>("get_future")->fut;
  }

 private:
  Owned work_;
};

class Backend final : public c10d::Backend {
 public:
  explicit Backend(py::object inner)
      : c10d::Backend(inner.attr("rank")().cast<int>(), inner.attr("size")().cast<int>()), inner_(std::move(inner)) {}

  const py::object& inner() const {
    return inner_.get();
  }

  // An operation of c10d: its name here and in Python, its parameters, and the arguments.
#define OPERATION(name, python, parameters, ...)       \
  intrusive_ptr<c10d::Work> name parameters override { \
    return work(python, __VA_ARGS__);                  \
  }
#define PARAMETERS(...) (__VA_ARGS__)

  OPERATION(broadcast, "broadcast", PARAMETERS(Tensors& x, const c10d::BroadcastOptions& opts), x, opts)
  OPERATION(allreduce, "allreduce", PARAMETERS(Tensors& x, const c10d::AllreduceOptions& opts), x, opts)
  OPERATION(allreduce_sparse, "allreduce_sparse", PARAMETERS(Tensors& x, const c10d::AllreduceOptions& opts), x, opts)
  OPERATION(
      allreduce_coalesced, "allreduce_coalesced",
      PARAMETERS(Tensors& x, const c10d::AllreduceCoalescedOptions& opts), x, opts)
  OPERATION(reduce, "reduce", PARAMETERS(Tensors& x, const c10d::ReduceOptions& opts), x, opts)
  OPERATION(
      allgather, "allgather", PARAMETERS(vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& opts), out, in,
      opts)
  OPERATION(
      all_gather_single, "all_gather_single",
      PARAMETERS(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& opts), out, in, opts)
  OPERATION(
      allgather_coalesced, "allgather_coalesced",
      PARAMETERS(vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& opts), out, in, opts)
  OPERATION(
      all_gather_single_coalesced, "all_gather_single_coalesced",
      PARAMETERS(Tensors& out, Tensors& in, const c10d::AllgatherOptions& opts), out, in, opts)
  OPERATION(
      gather, "gather", PARAMETERS(vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& opts), out, in, opts)
  OPERATION(
      scatter, "scatter", PARAMETERS(Tensors& out, vector<Tensors>& in, const c10d::ScatterOptions& opts), out, in, opts)
  OPERATION(
      reduce_scatter, "reduce_scatter",
      PARAMETERS(Tensors& out, vector<Tensors>& in, const c10d::ReduceScatterOptions& opts), out, in, opts)
  OPERATION(
      reduce_scatter_single, "reduce_scatter_single",
      PARAMETERS(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& opts), out, in, opts)
  OPERATION(
      reduce_scatter_single_coalesced, "reduce_scatter_single_coalesced",
      PARAMETERS(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& opts), out, in, opts)
  OPERATION(
      all_to_all_single, "all_to_all_single",
      PARAMETERS(
          at::Tensor& out, at::Tensor& in, vector<int64_t>& out_splits, vector<int64_t>& in_splits,
          const c10d::AllToAllOptions& opts),
      out, in, out_splits, in_splits, opts)
  OPERATION(
      alltoall, "alltoall", PARAMETERS(Tensors& out, Tensors& in, const c10d::AllToAllOptions& opts), out, in, opts)
  OPERATION(send, "send", PARAMETERS(Tensors& x, int to, int tag), x, to, tag)
  OPERATION(recv, "recv", PARAMETERS(Tensors& x, int from, int tag), x, from, tag)
  OPERATION(recvAnysource, "recv_anysource", PARAMETERS(Tensors& x, int tag), x, tag)
  OPERATION(barrier, "barrier", PARAMETERS(const c10d::BarrierOptions& opts), opts)

#undef PARAMETERS
#undef OPERATION

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waits_for_all) override {
    inner_.call<void>("monitored_barrier", opts, waits_for_all);
  }

  void startCoalescing() override {
    inner_.call<void>("start_coalescing");
  }

  intrusive_ptr<c10d::Work> endCoalescing() override {
    return work("end_coalescing");
  }

  intrusive_ptr<c10d::Backend> split(
      const intrusive_ptr<c10d::Store>& store, const vector<int>& ranks,
      const intrusive_ptr<c10d::Backend::Options>& opts) override {
    py::gil_scoped_acquire gil;
    return c10::make_intrusive<Backend>(inner().attr("split")(store, ranks, opts));
  }

  bool supportsSplitting() const override {
    return true;
  }

  const std::string getBackendName() const override {
    return inner_.call<std::string>("getBackendName");
  }

  intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    py::gil_scoped_acquire gil;
    return inner().attr("options").cast<intrusive_ptr<c10d::Backend::Options>>();
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    inner_.call<void>("set_timeout", timeout);
  }

  void setSequenceNumberForGroup() override {
    inner_.call<void>("_set_sequence_number_for_group");
  }

  uint64_t getSequenceNumberForGroup() override {
    return inner_.call<uint64_t>("_get_sequence_number_for_group");
  }

  // Devices of the host have no number.
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    return device < 0;
  }

  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    py::gil_scoped_acquire gil;
    using namespace py::literals;
    auto dtype = c10::typeMetaToScalarType(options.dtype());
    return inner().attr("allocate_tensor")(size, "dtype"_a = dtype, "device"_a = options.device()).cast<at::Tensor>();
  }

  void abort() override {
    inner_.call<void>("abort");
  }

  void shutdown() override {
    inner_.call<void>("shutdown");
  }

 private:
  template <typename... Arguments>
  intrusive_ptr<c10d::Work> work(const char* name, Arguments&... arguments) {
    py::gil_scoped_acquire gil;
    py::object work = inner().attr(name)(arguments...);
    if (work.is_none()) {
      return {};
    }
    return c10::make_intrusive<Work>(std::move(work));
  }

  Owned inner_;
};

} // namespace

PYBIND11_MODULE(_adapter, module) {
  // Their base classes are torch's.
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Work, c10d::Work, intrusive_ptr<Work>>(module, "Work");
  py::class_<Backend, c10d::Backend, intrusive_ptr<Backend>>(module, "Backend")
      .def(py::init<py::object>(), py::arg("inner"))
      .def_property_readonly("inner", &Backend::inner);
}
