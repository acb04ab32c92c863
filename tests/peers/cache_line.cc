// Measures the round trip of one cache line between two cores in nanoseconds. On a virtual machine it shows where the
// hypervisor has placed the CPUs.
//
//   cache_line [CPU CPU]      default: 0 1; prints one number, the median of 101 batches of 1,000 round trips
//
// The time of small collectives between local processes follows this number; comparisons without it are not
// comparable with each other.

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr int kBatches = 101;
constexpr unsigned kTrips = 1000;

// Aligned beyond a cache line: the adjacent-line prefetcher would blur the result.
struct alignas(256) Line {
  std::atomic<unsigned> value{0};
};

bool pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

void wait_for(const Line& line, unsigned value) {
  while (line.value.load(std::memory_order_acquire) != value) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int here = argc > 2 ? atoi(argv[1]) : 0;
  const int there = argc > 2 ? atoi(argv[2]) : 1;
  // On one core, two spinning threads would measure the scheduler.
  if (here == there || !pin(there) || !pin(here)) {
    fprintf(stderr, "cache_line: cannot pin threads to CPUs %d and %d\n", here, there);
    return 1;
  }
  static Line line;
  std::thread echo([there] {
    pin(there);
    for (unsigned trip = 0; trip < kBatches * kTrips; trip++) {
      wait_for(line, 2 * trip + 1);
      line.value.store(2 * trip + 2, std::memory_order_release);
    }
  });
  std::vector<double> batches_ns;
  for (unsigned batch = 0, trip = 0; batch < kBatches; batch++) {
    const auto start = std::chrono::steady_clock::now();
    for (const unsigned end = trip + kTrips; trip < end; trip++) {
      line.value.store(2 * trip + 1, std::memory_order_release);
      wait_for(line, 2 * trip + 2);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    batches_ns.push_back(took.count() / kTrips);
  }
  echo.join();
  std::nth_element(batches_ns.begin(), batches_ns.begin() + kBatches / 2, batches_ns.end());
  printf("%.0f\n", batches_ns[kBatches / 2]);
  return 0;
}
