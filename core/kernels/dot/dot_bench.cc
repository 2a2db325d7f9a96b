// Ring 1: the dot kernels against read bandwidth and FMA peak measured beside each cell.
//   kernels_dot_dot_bench [threads=1] [part of kernel/shape/mTOKENS, ...] [repeats=5] [small]
// `small` keeps the weights in 4 KiB pages. Prints one JSON object a line.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/buffer.h"
#include "kernels/dot/dot.h"
#include "kernels/probe/measure.h"
#include "kernels/testing/random.h"
#include "machine/executor.h"

namespace cpumoe {
namespace {

struct Shape {
  const char* name;
  Layout layout;
  int64_t n, k;
};
constexpr Shape kShapes[] = {
    {"qwen3-up", Layout::rows, 768, 2048},       {"qwen3-down", Layout::rows, 2048, 768},
    {"mixtral-up", Layout::rows, 14336, 4096},   {"mixtral-down", Layout::rows, 4096, 14336},
    {"gpt-oss-up", Layout::columns, 5760, 2880}, {"gpt-oss-down", Layout::columns, 2880, 2880},
};
constexpr int64_t kPool = int64_t(512) << 20;      // bytes of weights, walked by every cell
constexpr int64_t kSliceBytes = int64_t(1) << 20;  // of a task, where the kernel has no wish

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}
bool matches(const std::string& label, std::string filter) {
  while (!filter.empty()) {
    const size_t comma = filter.find(',');
    if (label.find(filter.substr(0, comma)) == std::string::npos) return false;
    filter = comma == std::string::npos ? "" : filter.substr(comma + 1);
  }
  return true;
}

void run_cell(const DotKernel& kernel, const Shape& s, int64_t m, int repeats, const char* pool,
              Probe& probe, Executor& executor) {
  const int64_t element = int64_t(code_bits(kernel.code)) / 8, matrix = s.n * s.k * element;
  const int64_t enough = 4000000000 / (m * s.n * s.k) + 1;  // about 8 GFLOP
  const int64_t matrices = std::clamp<int64_t>(kPool / matrix, 1, enough);
  const int64_t stride = s.layout == Layout::rows ? s.k : s.n;
  const int64_t slice = kernel.n_slice != 0
                            ? kernel.n_slice
                            : round_up(ceil_div(kSliceBytes, s.k * element), kernel.n_block);
  const int64_t slices = ceil_div(s.n, slice);
  const bool n_major = kernel.order == TileOrder::n_major;
  const int64_t c_stride = round_up(n_major ? m : slice, 16);
  const int64_t c_lines = n_major ? round_up(slice, kernel.n_block) : round_up(m, kernel.m_block);

  AlignedBuffer act(kernel.act_bytes(m, s.k));
  std::vector<float> x(size_t(m * s.k), 0.5f);
  kernel.pack({{x.data(), Code::f32, m, s.k, s.k}, nullptr, 0, m, m, act.data()});
  std::vector<AlignedBuffer> c(size_t(executor.threads())), scratch(size_t(executor.threads()));
  for (auto& b : c) b.reserve(size_t(c_stride * c_lines) * 4);
  for (auto& b : scratch) b.reserve(kernel.scratch_bytes(slice, m, s.k));
  const auto pass = [&] {
    executor.parallel(slices * matrices, [&](int64_t task, int worker) {
      const WeightView w{find_format(code_name(kernel.code)), s.layout, s.n, s.k, stride,
                         pool + task / slices * matrix};
      const int64_t n0 = task % slices * slice;
      kernel.run({&w, n0, min64(n0 + slice, s.n), act.data(), m, 0, m,
                  static_cast<float*>(c[size_t(worker)].data()), c_stride,
                  scratch[size_t(worker)].data()});
    });
  };
  std::vector<double> seconds, read, fma;
  pass();
  for (int i = 0; i < repeats; ++i) {
    read.push_back(probe.read_gb_per_s(executor));
    fma.push_back(probe.fma_gflop_per_s(executor));
    const auto start = std::chrono::steady_clock::now();
    pass();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const double gb = double(matrix * matrices) * 1e-9 / median(seconds);
  const double gflop = 2.0 * double(m * s.n * s.k * matrices) * 1e-9 / median(seconds);
  std::printf(
      "{\"kernel\": \"%s\", \"shape\": \"%s\", \"tokens\": %lld, \"threads\": %d, \"gb_per_s\": "
      "%.1f, "
      "\"read_gb_per_s\": %.1f, \"share_of_bandwidth\": %.3f, \"gflop_per_s\": %.1f, "
      "\"fma_gflop_per_s\": %.1f, \"share_of_peak\": %.3f}\n",
      kernel.name, s.name, static_cast<long long>(m), executor.threads(), gb, median(read),
      gb / median(read), gflop, median(fma), gflop / median(fma));
  std::fflush(stdout);
}

}  // namespace
}  // namespace cpumoe

int main(int argc, char** argv) {
  using namespace cpumoe;
  const Machine machine = probe_machine();
  Executor::Options options;
  options.threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const std::string filter = argc > 2 ? argv[2] : "";
  const int repeats = argc > 3 ? std::max(1, std::atoi(argv[3])) : 5;
  const bool small = argc > 4 && std::string(argv[4]) == "small";
  Executor executor(machine, options);
  Probe probe(machine, int64_t(256) << 20);

  void* map =
      mmap(nullptr, size_t(kPool), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) {
    std::fprintf(stderr, "dot_bench: needs %lld MiB\n", static_cast<long long>(kPool >> 20));
    return 1;
  }
  madvise(map, size_t(kPool), small ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  testing::Rng rng(1);
  for (int64_t i = 0; i < kPool / 8; ++i) {  // near 1 or -1 in every code
    static_cast<uint64_t*>(map)[i] = (rng.next() & 0x80ff80ff80ff80ffu) | 0x3f003f003f003f00u;
  }
  for (const Shape& shape : kShapes) {
    for (const Code code : {Code::bf16, Code::f32, Code::f16}) {
      for (const int64_t m : {1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256, 512}) {
        const DotKernel* kernel = select_dot({code, shape.layout, ActClass::fp32, m}, machine.isa);
        const std::string label =
            std::string(kernel->name) + "/" + shape.name + "/m" + std::to_string(m) + "/";
        if (matches(label, filter)) {
          run_cell(*kernel, shape, m, repeats, static_cast<const char*>(map), probe, executor);
        }
      }
    }
  }
}
