// Gloo's all-reduce over TCP on the loopback interface, timed for comparison with Sumac's.
//
//   gloo_allreduce ALGORITHM RANKS SIZE_BYTES...        f32 sum, in place, one process a rank
//
// ring, ring_chunked, halving_doubling and bcube are Gloo's older class API; new_ring is gloo::allreduce(), which
// PyTorch's backend calls. Prints one JSON object per size:
//
//   {"algorithm":"ring","ranks":4,"size_bytes":8,"iterations":700,"time_us":286.1,"p99_us":402.7,"cpu_us":95.2}
//
// An iteration is a barrier, then one timed operation; the slowest rank's time counts, and time_us is the median over
// the iterations. First, every rank checks every element of one operation. cpu_us is the CPU time per operation, user
// and system, all threads, maximum over ranks; it is measured in a separate pass, since reading that clock is a system
// call.
//
// Do not use gloo::BarrierAllToAll here: its 4-byte buffers leave the pair with a send buffer of a few bytes, on which
// later collectives stall for tens of milliseconds. gloo::barrier() has no such effect.

#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gloo/allreduce.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

namespace {

constexpr int kMaxRanks = 64;
constexpr int kMaxIterations = 20000;
constexpr int kMinIterations = 9;
constexpr int kWarmUpOps = 4;
constexpr double kWarmUpUs = 50e3;
constexpr double kBudgetUs = 200e3;
constexpr int kMinCpuIterations = 3;
constexpr std::chrono::seconds kTimeout{60};
constexpr uint32_t kBarrierTag = 3;
constexpr uint32_t kAllReduceTag = 7;

// Mapped by all ranks. Plain fields are written before a barrier and read after it.
struct Shared {
  double samples_us[kMaxRanks][kMaxIterations];
  double cpu_us[kMaxRanks];
  int iterations;
  bool warm;
  std::atomic<int> finished;
};

double now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}

// The same clock that `sumac perf` reads.
double cpu_us() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) * 1e6 + static_cast<double>(used.tv_nsec) * 1e-3;
}

// Small integers: f32 represents their sums over kMaxRanks ranks exactly.
float input(int rank, size_t index) { return static_cast<float>((rank + 1) * static_cast<int>((index * 7 + 3) % 1009)); }

class Rank {
 public:
  Rank(std::string algorithm, int rank, int ranks, const std::string& store, Shared* shared)
      : algorithm_(std::move(algorithm)), rank_(rank), ranks_(ranks), shared_(shared) {
    gloo::transport::tcp::attr address;
    address.hostname = "127.0.0.1";
    auto device = gloo::transport::tcp::CreateDevice(address);
    gloo::rendezvous::FileStore file_store(store);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, ranks);
    context->setTimeout(kTimeout);
    context->connectFullMesh(file_store, device);
    context_ = context;
  }

  void measure(size_t size_bytes) {
    const size_t count = size_bytes / sizeof(float);
    std::unique_ptr<float, decltype(&free)> buffer(static_cast<float*>(aligned_alloc(4096, round_up(size_bytes))), &free);
    if (!buffer) throw std::runtime_error("out of memory");
    const auto operation = prepare(buffer.get(), count);
    check(operation, buffer.get(), count);
    // Zeros stay finite over any number of in-place operations.
    std::fill_n(buffer.get(), count, 0.0f);

    const double mean_us = warm_up(operation);
    if (rank_ == 0) {
      const double fit = kBudgetUs / std::max(mean_us, 0.1);
      shared_->iterations = static_cast<int>(std::clamp<double>(fit, kMinIterations, kMaxIterations));
    }
    barrier();
    const int iterations = shared_->iterations;
    for (int i = 0; i < iterations; i++) {
      barrier();
      const double start = now_us();
      operation();
      shared_->samples_us[rank_][i] = now_us() - start;
    }
    shared_->cpu_us[rank_] = measure_cpu(operation, std::max(iterations / 4, kMinCpuIterations));
    barrier();
    if (rank_ == 0) report(size_bytes, iterations);
    barrier();
  }

  // All ranks leave together: closing a socket early is an error for ranks that still use it.
  void finish() {
    barrier();
    shared_->finished.fetch_add(1);
    while (shared_->finished.load() < ranks_) sched_yield();
  }

 private:
  static size_t round_up(size_t size_bytes) { return (size_bytes + 4095) / 4096 * 4096; }

  void barrier() {
    gloo::BarrierOptions options(context_);
    options.setTag(kBarrierTag);
    gloo::barrier(options);
  }

  std::function<void()> prepare(float* data, size_t count) {
    const std::vector<float*> buffers{data};
    const int elements = static_cast<int>(count);
    std::shared_ptr<gloo::Algorithm> algorithm;
    if (algorithm_ == "ring") {
      algorithm = std::make_shared<gloo::AllreduceRing<float>>(context_, buffers, elements);
    } else if (algorithm_ == "ring_chunked") {
      algorithm = std::make_shared<gloo::AllreduceRingChunked<float>>(context_, buffers, elements);
    } else if (algorithm_ == "halving_doubling") {
      algorithm = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(context_, buffers, elements);
    } else if (algorithm_ == "bcube") {
      algorithm = std::make_shared<gloo::AllreduceBcube<float>>(context_, buffers, elements);
    } else if (algorithm_ == "new_ring") {
      return [this, data, count] {
        gloo::AllreduceOptions options(context_);
        options.setOutput(data, count);
        options.setTag(kAllReduceTag);
        options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
        void (*sum)(void*, const void*, const void*, size_t) = &gloo::sum<float>;
        options.setReduceFunction(sum);
        gloo::allreduce(options);
      };
    } else {
      throw std::runtime_error("unknown algorithm " + algorithm_);
    }
    return [algorithm] { algorithm->run(); };
  }

  void check(const std::function<void()>& operation, float* data, size_t count) {
    for (size_t i = 0; i < count; i++) data[i] = input(rank_, i);
    operation();
    for (size_t i = 0; i < count; i++) {
      float expected = 0;
      for (int rank = 0; rank < ranks_; rank++) expected += input(rank, i);
      if (data[i] != expected) {
        throw std::runtime_error("element " + std::to_string(i) + " of " + std::to_string(count) + " is " +
                                 std::to_string(data[i]) + ", expected " + std::to_string(expected));
      }
    }
    barrier();
  }

  // Run for at least kWarmUpUs; return the mean time per operation in microseconds.
  double warm_up(const std::function<void()>& operation) {
    const double start = now_us();
    for (int done = kWarmUpOps;; done += kWarmUpOps) {
      for (int i = 0; i < kWarmUpOps; i++) operation();
      const double took = now_us() - start;
      if (rank_ == 0) shared_->warm = took > kWarmUpUs;
      barrier();
      const bool warm = shared_->warm;
      barrier();
      if (warm) return took / done;
    }
  }

  double measure_cpu(const std::function<void()>& operation, int iterations) {
    double used_us = 0;
    for (int i = 0; i < iterations; i++) {
      barrier();
      const double start = cpu_us();
      operation();
      used_us += cpu_us() - start;
    }
    return used_us / iterations;
  }

  void report(size_t size_bytes, int iterations) {
    std::vector<double> slowest(iterations, 0.0);
    for (int rank = 0; rank < ranks_; rank++) {
      for (int i = 0; i < iterations; i++) slowest[i] = std::max(slowest[i], shared_->samples_us[rank][i]);
    }
    std::sort(slowest.begin(), slowest.end());
    const double most_cpu_us = *std::max_element(shared_->cpu_us, shared_->cpu_us + ranks_);
    printf("{\"algorithm\":\"%s\",\"ranks\":%d,\"size_bytes\":%zu,\"iterations\":%d,", algorithm_.c_str(), ranks_,
           size_bytes, iterations);
    printf("\"time_us\":%.2f,\"p99_us\":%.2f,\"cpu_us\":%.2f}\n", slowest[iterations / 2],
           slowest[iterations * 99L / 100], most_cpu_us);
    fflush(stdout);
  }

  const std::string algorithm_;
  const int rank_;
  const int ranks_;
  Shared* const shared_;
  std::shared_ptr<gloo::Context> context_;
};

int run_rank(const std::string& algorithm, int rank, int ranks, const std::vector<size_t>& sizes,
             const std::string& store, Shared* shared) {
  try {
    Rank self(algorithm, rank, ranks, store, shared);
    for (const size_t size_bytes : sizes) self.measure(size_bytes);
    self.finish();
    return 0;
  } catch (const std::exception& error) {
    fprintf(stderr, "gloo_allreduce %s: rank %d: %s\n", algorithm.c_str(), rank, error.what());
    return 1;
  }
}

// Wait for all ranks. Once one fails, kill the others, which would block forever.
int wait_for(const std::vector<pid_t>& ranks) {
  int failed = 0;
  for (size_t left = ranks.size(); left > 0; left--) {
    int status = 0;
    if (waitpid(-1, &status, 0) < 0) return 1;
    if (status != 0 && failed++ == 0) {
      for (const pid_t rank : ranks) kill(rank, SIGKILL);
    }
  }
  return failed > 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 3 ? atoi(argv[2]) : 0;
  std::vector<size_t> sizes;
  for (int i = 3; i < argc; i++) sizes.push_back(strtoull(argv[i], nullptr, 10));
  const bool valid = std::all_of(sizes.begin(), sizes.end(), [](size_t size) { return size > 0 && size % 4 == 0; });
  if (ranks < 2 || ranks > kMaxRanks || !valid) {
    fprintf(stderr, "usage: gloo_allreduce ALGORITHM RANKS(2..%d) SIZE_BYTES(multiple of 4)...\n", kMaxRanks);
    return 2;
  }
  void* mapping = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  char store[] = "/tmp/gloo_allreduce.XXXXXX";
  if (mapping == MAP_FAILED || mkdtemp(store) == nullptr) {
    perror("gloo_allreduce");
    return 1;
  }
  auto* shared = new (mapping) Shared();
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; rank++) {
    const pid_t child = fork();
    if (child < 0) {
      perror("gloo_allreduce: fork");
      for (const pid_t started : children) kill(started, SIGKILL);
      break;
    }
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(run_rank(argv[1], rank, ranks, sizes, store, shared));
    }
    children.push_back(child);
  }
  const int failed = wait_for(children);
  std::error_code ignored;
  std::filesystem::remove_all(store, ignored);
  return failed || children.size() != static_cast<size_t>(ranks);
}
