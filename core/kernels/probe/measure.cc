#include "kernels/probe/measure.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "base/error.h"
#include "base/types.h"

namespace cpumoe {
namespace {

constexpr int64_t kChunk = 4 << 20;        // bytes of one task; a multiple of the huge page
constexpr int64_t kSmallest = 1 << 20;     // bytes
constexpr int64_t kFmaPasses = 200 * 1000;  // of one task: about 0.3 ms

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Repeats step() for at least `least` seconds; returns how often per second it ran.
template <class Step>
double rate(double least, const Step& step) {
  const Clock::time_point start = Clock::now();
  int64_t steps = 0;
  double seconds = 0;
  do {
    step();
    ++steps;
    seconds = seconds_since(start);
  } while (seconds < least);
  return double(steps) / seconds;
}

int64_t buffer_size(const Machine& machine, int64_t bytes) {
  if (bytes == 0) {
    bytes = int64_t{1} << 30;
    if (machine.memory_available > 0) bytes = min64(bytes, machine.memory_available / 4);
    bytes = max64(bytes, kSmallest);
  }
  require(bytes >= kSmallest, "Probe", "bytes must be at least ", kSmallest, "; got ", bytes, ".");
  return round_up(bytes, 256);
}

}  // namespace

Probe::Probe(const Machine& machine, int64_t bytes)
    : kernel_(select_probe(machine.isa)), bytes_(buffer_size(machine, bytes)) {
  require(kernel_ != nullptr, "Probe", "the machine must have a usable ISA; got none.");
}

void Probe::touch(Executor& executor) {
  if (touched_) return;
  const int64_t huge = 2 << 20;
  char* raw = buffer_.reserve_as<char>(size_t(bytes_));
  char* aligned = raw + (round_up(int64_t(uintptr_t(raw)), huge) - int64_t(uintptr_t(raw)));
  const int64_t length = (raw + bytes_ - aligned) / huge * huge;
  // Advice only: with small pages the measurement is a little lower, and so are the kernels.
  if (length > 0) madvise(aligned, size_t(length), MADV_HUGEPAGE);
  executor.parallel(ceil_div(bytes_, kChunk), [&](int64_t task, int) {
    std::memset(raw + task * kChunk, 1, size_t(min64(kChunk, bytes_ - task * kChunk)));
  });
  touched_ = true;
}

double Probe::read_gb_per_s(Executor& executor) {
  touch(executor);
  const char* data = static_cast<const char*>(buffer_.data());
  std::atomic<uint64_t> sink{0};
  const double passes = rate(0.01, [&] {
    executor.parallel(ceil_div(bytes_, kChunk), [&](int64_t task, int) {
      const int64_t begin = task * kChunk;
      sink.fetch_or(kernel_->read(data + begin, min64(kChunk, bytes_ - begin)));
    });
  });
  require(sink.load() == 0x0101010101010101u, "Probe",
          "the buffer must hold what was written; got ", sink.load(),
          ". The memory of this machine is faulty.");
  return passes * double(bytes_) * 1e-9;
}

double Probe::fma_gflop_per_s(Executor& executor) {
  const int64_t tasks = 8 * int64_t(executor.threads());
  std::atomic<bool> finite{true};
  const double batches = rate(0.02, [&] {
    executor.parallel(tasks, [&](int64_t, int) {
      if (!(kernel_->fma(kFmaPasses) < 1e6f)) finite.store(false);
    });
  });
  require(finite.load(), "Probe",
          "the chains must stay finite; got NaN. This CPU computes wrongly.");
  return batches * double(tasks) * double(kFmaPasses) * kernel_->flops_per_pass * 1e-9;
}

}  // namespace cpumoe
