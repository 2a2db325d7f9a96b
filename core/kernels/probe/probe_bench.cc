// Limits of this machine and costs of the Executor. Prints; asserts nothing.
#include <atomic>
#include <chrono>
#include <cstdio>

#include "kernels/probe/measure.h"

namespace cpumoe {
namespace {

using Clock = std::chrono::steady_clock;

double nanoseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

void busy(double nanoseconds) {
  const auto start = Clock::now();
  while (nanoseconds_since(start) < nanoseconds) {
  }
}

// Nanoseconds of one phase of `tasks` tasks that take `work` nanoseconds each.
double phase_ns(Executor& executor, int64_t tasks, double work) {
  const int phases = 5000;
  const auto task = [work](int64_t, int) {
    if (work > 0) busy(work);
  };
  for (int i = 0; i < 500; ++i) executor.parallel(tasks, task);
  const auto start = Clock::now();
  for (int i = 0; i < phases; ++i) executor.parallel(tasks, task);
  return nanoseconds_since(start) / phases;
}

// Nanoseconds until two workers have met: what a phase costs beyond its tasks.
double meeting_ns(Executor& executor) {
  const int phases = 5000;
  const auto start = Clock::now();
  for (int i = 0; i < phases; ++i) {
    std::atomic<int> here{0};
    executor.parallel(2, [&here](int64_t, int) {
      here.fetch_add(1);
      while (here.load(std::memory_order_relaxed) < 2) {
      }
    });
  }
  return nanoseconds_since(start) / phases;
}

void report(const Machine& machine, Probe& probe, int threads, bool pin) {
  Executor::Options options;
  options.threads = threads;
  options.pin = pin;
  Executor executor(machine, options);
  const int at_once = threads < machine.default_threads() ? threads : machine.default_threads();
  const double empty = phase_ns(executor, 2 * threads, 0);
  const double loaded = phase_ns(executor, 8 * at_once, 2000) - 8 * 2000;
  const double meeting = at_once > 1 ? meeting_ns(executor) : 0;
  const int64_t before = executor.wakes();
  double read[9], fma[9];
  for (int i = 0; i < 9; ++i) {
    read[i] = probe.read_gb_per_s(executor);
    fma[i] = probe.fma_gflop_per_s(executor);
  }
  double best_read = 0, best_fma = 0;
  for (int i = 0; i < 9; ++i) {
    best_read = read[i] > best_read ? read[i] : best_read;
    best_fma = fma[i] > best_fma ? fma[i] : best_fma;
  }
  std::printf(
      "threads %3d pin %d: empty phase %5.0f ns, phase of 16 us %+6.0f ns, meeting %5.0f ns, "
      "read %6.2f GB/s, fma %7.2f GFLOP/s, %lld + %lld wakes\n",
      threads, int(pin), empty, loaded, meeting, best_read, best_fma, (long long)before,
      (long long)(executor.wakes() - before));
}

}  // namespace
}  // namespace cpumoe

int main() {
  using namespace cpumoe;
  const Machine machine = probe_machine();
  Probe probe(machine);
  for (int threads : {1, 2, 4, 8, 32}) {
    for (bool pin : {false, true}) report(machine, probe, threads, pin);
  }
}
