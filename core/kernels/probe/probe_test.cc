#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/probe/measure.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

std::vector<ProbeKernel> runnable() {
  int count = 0;
  const ProbeKernel* kernels = probe_kernels(&count);
  std::vector<ProbeKernel> result;
  const IsaSet usable = probe_machine().isa;
  for (int i = 0; i < count; ++i) {
    if (usable.has(kernels[i].isa)) result.push_back(kernels[i]);
  }
  return result;
}

TEST(every_byte_is_read) {
  AlignedBuffer buffer;
  for (const ProbeKernel& kernel : runnable()) {
    for (int64_t bytes : {256, 512, 1024}) {
      uint8_t* p = buffer.reserve_as<uint8_t>(size_t(bytes));
      std::fill(p, p + bytes, uint8_t{0});
      CHECK_EQ(kernel.read(p, bytes), 0u);
      for (int64_t i = 0; i < bytes; ++i) {
        p[i] = 1;
        CHECK_EQ(kernel.read(p, bytes), uint64_t{1} << (i % 8 * 8));
        p[i] = 0;
      }
    }
  }
}

TEST(chains_compute_what_they_say) {
  for (const ProbeKernel& kernel : runnable()) {
    const int lanes = kernel.flops_per_pass / 24;
    for (int64_t passes : {0, 1, 1000}) {
      double sum = 0;
      for (int j = 0; j < 12; ++j) {
        double c = j;
        for (int64_t i = 0; i < passes; ++i) c = c * double(0.999999f) + double(1e-7f);
        sum += c * lanes;
      }
      // Each step rounds twice at most, and no partial sum exceeds `sum`.
      const double bound = double(2 * passes + 16) * std::ldexp(1.0, -24) * 66.0 * lanes;
      CHECK_LE(std::abs(double(kernel.fma(passes)) - sum), bound);
    }
  }
}

TEST(selection_takes_the_best_row) {
  CHECK_EQ(std::string(select_probe(IsaSet{1})->name), std::string("probe_scalar"));
  CHECK(select_probe(IsaSet{0}) == nullptr);
  int count = 0;
  CHECK(select_probe(probe_machine("", "").isa) == probe_kernels(&count));
}

TEST(measures_with_any_number_of_threads) {
  const Machine machine = probe_machine();
  for (int threads : {1, 3}) {
    Executor::Options options;
    options.threads = threads;
    Executor executor(machine, options);
    Probe probe(machine, (5 << 20) + 1);
    CHECK_EQ(probe.bytes(), (5 << 20) + 256);
    CHECK_GT(probe.read_gb_per_s(executor), 0.0);
    CHECK_GT(probe.fma_gflop_per_s(executor), 0.0);
  }
}

TEST(buffer_size_follows_the_memory) {
  Machine machine = probe_machine();
  machine.memory_available = 0;
  CHECK_EQ(Probe(machine).bytes(), int64_t{1} << 30);
  machine.memory_available = 400 << 20;
  CHECK_EQ(Probe(machine).bytes(), 100 << 20);
  machine.memory_available = 1;
  CHECK_EQ(Probe(machine).bytes(), 1 << 20);
  CHECK_THROWS(Probe(machine, 1000), "bytes must be at least 1048576; got 1000");
  CHECK_THROWS(Probe(machine, -1), "got -1");
}

}  // namespace
}  // namespace cpumoe
