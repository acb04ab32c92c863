// Gloo's all-reduce over TCP, by default on the loopback interface, timed for comparison with Sumac's.
//
//   gloo_allreduce [--iterations COUNT] [--hosts NAME=ADDRESS,...] ALGORITHM RANKS SIZE_BYTES...
//
// f32 sum, in place, one process a rank. With --hosts, which needs root, each rank is in the network namespace of its
// host, which `ip netns add` has made, and has its address.
// ring, ring_chunked, halving_doubling and bcube are Gloo's older class API; new_ring is gloo::allreduce(), which
// PyTorch's backend calls. Prints one JSON object per size:
//
//   {"algorithm":"ring","ranks":4,"size_bytes":8,"iterations":700,"time_us":286.1,"p99_us":402.7,"cpu_us":95.2}
//
// An iteration is a barrier, then one timed operation; the slowest rank's time counts, and time_us is the median over
// the iterations. Their number is COUNT, or, after a warm-up, what fits into a budget of time.
// First, every rank checks every element of one operation. cpu_us is the CPU time per operation, user and system, all
// threads, maximum over ranks; it is measured in a separate pass, since reading that clock is a system
// call.
//
// Do not use gloo::BarrierAllToAll here: its 4-byte buffers leave the pair with a send buffer of a few bytes, on which
// later collectives stall for tens of milliseconds. gloo::barrier() has no such effect.

#include <fcntl.h>
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
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <sstream>
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

struct Host {
  // The name of a network namespace; empty for that of this process.
  std::string netns;
  std::string address;
};

struct Options {
  std::string algorithm;
  int ranks = 0;
  // 0: as many as fit into the budget.
  int iterations = 0;
  // One for each rank.
  std::vector<Host> hosts;
  std::vector<size_t> sizes;
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
  Rank(const Options& options, int rank, const std::string& store, Shared* shared)
      : algorithm_(options.algorithm),
        rank_(rank),
        ranks_(options.ranks),
        iterations_(options.iterations),
        shared_(shared) {
    gloo::transport::tcp::attr address;
    address.hostname = options.hosts[rank].address;
    auto device = gloo::transport::tcp::CreateDevice(address);
    gloo::rendezvous::FileStore file_store(store);
    auto context = std::make_shared<gloo::rendezvous::Context>(rank_, ranks_);
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

    const int iterations = iterations_ > 0 ? iterations_ : affordable(operation);
    for (int i = 0; i < iterations; i++) {
      barrier();
      const double start = now_us();
      operation();
      shared_->samples_us[rank_][i] = now_us() - start;
    }
    const int least = iterations_ > 0 ? 1 : kMinCpuIterations;
    shared_->cpu_us[rank_] = measure_cpu(operation, std::max(iterations / 4, least));
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

  // Warm up; return the number of iterations that fit into the budget, as rank 0 estimates it.
  int affordable(const std::function<void()>& operation) {
    const double mean_us = warm_up(operation);
    if (rank_ == 0) {
      const double fit = kBudgetUs / std::max(mean_us, 0.1);
      shared_->iterations = static_cast<int>(std::clamp<double>(fit, kMinIterations, kMaxIterations));
    }
    barrier();
    return shared_->iterations;
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
  const int iterations_;
  Shared* const shared_;
  std::shared_ptr<gloo::Context> context_;
};

void enter(const Host& host) {
  if (host.netns.empty()) return;
  const std::string path = "/run/netns/" + host.netns;
  const int netns = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (netns < 0 || setns(netns, CLONE_NEWNET) != 0) throw std::runtime_error("cannot enter " + path);
  close(netns);
}

int run_rank(const Options& options, int rank, const std::string& store, Shared* shared) {
  try {
    enter(options.hosts[rank]);
    Rank self(options, rank, store, shared);
    for (const size_t size_bytes : options.sizes) self.measure(size_bytes);
    self.finish();
    return 0;
  } catch (const std::exception& error) {
    fprintf(stderr, "gloo_allreduce %s: rank %d: %s\n", options.algorithm.c_str(), rank, error.what());
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

// Parse NAME=ADDRESS,... Names and addresses contain neither character.
std::vector<Host> parse_hosts(const std::string& text) {
  std::vector<Host> hosts;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) {
    const size_t at = word.find('=');
    if (at == std::string::npos) return {};
    hosts.push_back({word.substr(0, at), word.substr(at + 1)});
  }
  return hosts;
}

bool parse(int argc, char** argv, Options& options) {
  int at = 1;
  for (; at + 1 < argc && strncmp(argv[at], "--", 2) == 0; at += 2) {
    if (strcmp(argv[at], "--iterations") == 0) {
      options.iterations = atoi(argv[at + 1]);
      if (options.iterations < 1 || options.iterations > kMaxIterations) return false;
    } else if (strcmp(argv[at], "--hosts") == 0) {
      options.hosts = parse_hosts(argv[at + 1]);
      if (options.hosts.empty()) return false;
    } else {
      return false;
    }
  }
  if (argc < at + 3) return false;
  options.algorithm = argv[at];
  options.ranks = atoi(argv[at + 1]);
  for (int i = at + 2; i < argc; i++) options.sizes.push_back(strtoull(argv[i], nullptr, 10));
  if (options.ranks < 2 || options.ranks > kMaxRanks) return false;
  if (options.hosts.empty()) options.hosts.assign(options.ranks, {"", "127.0.0.1"});
  const auto& sizes = options.sizes;
  return options.hosts.size() == static_cast<size_t>(options.ranks) &&
         std::all_of(sizes.begin(), sizes.end(), [](size_t size) { return size > 0 && size % 4 == 0; });
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    fprintf(stderr,
            "usage: gloo_allreduce [--iterations COUNT] [--hosts NAME=ADDRESS,...] ALGORITHM RANKS(2..%d) "
            "SIZE_BYTES(multiple of 4)...\n",
            kMaxRanks);
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
  for (int rank = 0; rank < options.ranks; rank++) {
    const pid_t child = fork();
    if (child < 0) {
      perror("gloo_allreduce: fork");
      for (const pid_t started : children) kill(started, SIGKILL);
      break;
    }
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(run_rank(options, rank, store, shared));
    }
    children.push_back(child);
  }
  const int failed = wait_for(children);
  std::error_code ignored;
  std::filesystem::remove_all(store, ignored);
  return failed || children.size() != static_cast<size_t>(options.ranks);
}
