// Ring 1: the dot kernels against read bandwidth and FMA peak measured beside each cell.
//   kernels_dot_dot_bench [threads=1] [part of kernel/format/shape/mTOKENS/, ...] [repeats=5]
//                         [small]
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

constexpr const char* kFormats[] = {
    "bf16",      "fp16",     "fp32",      "fp8_block", "fp8_row", "mxfp4",      "nvfp4",
    "int8_g128", "int4_g32", "int4_g128", "u3_g64",    "u2_g64",  "gptq4_g128", "awq4_g128",
    "q8_0",      "q4_0",     "q4_1",      "q5_0",      "q5_1",    "q2_k",       "q3_k",
    "q4_k",      "q5_k",     "q6_k",      "iq4_nl",    "iq4_xs",  "gguf_mxfp4",
};

// A matrix with its scales and zero points behind one another, 64 bytes aligned.
struct Parts {
  WeightView view;  // of offset 0
  int64_t bytes;

  Parts(const Format& f, const Shape& s) : view{&f, s.layout, s.n, s.k} {
    const bool rows = s.layout == Layout::rows;
    view.stride = rows ? s.k : s.n;
    bytes = round_up(
        (rows ? s.n : s.k) / code_block(f.code).lines * line_bytes(f.code, view.stride), 64);
    if (!f.scaled()) return;
    const int64_t along = ceil_div(s.n, f.scale_rows), across = ceil_div(s.k, f.scale_cols);
    const int64_t r = rows ? along : across, c = rows ? across : along;
    const Code code =
        f.code == Code::e2m1 ? f.scale_cols == 16 ? Code::e4m3 : Code::e8m0 : Code::f16;
    view.scales = {nullptr, code, r, c, c};
    bytes += round_up(r * line_bytes(code, c), 64);
    if (!f.stored_zeros()) return;
    view.zeros = {nullptr, f.code == Code::u4_awq ? Code::u4_awq : Code::u4, r, c, c};
    bytes += round_up(r * line_bytes(view.zeros.code, c), 64);
  }
  WeightView at(const char* p) const {
    WeightView w = view;
    w.data = p;
    p += round_up((w.layout == Layout::rows ? w.n : w.k) / code_block(w.format->code).lines *
                      line_bytes(w.format->code, w.stride),
                  64);
    for (MatrixView* m : {&w.scales, &w.zeros}) {
      if (m->cols == 0) continue;
      m->data = p;
      p += round_up(m->rows * line_bytes(m->code, m->cols), 64);
    }
    return w;
  }
};

void run_cell(const DotKernel& kernel, const Format& format, const Shape& s, int64_t m, int repeats,
              const char* pool, Probe& probe, Executor& executor) {
  const Parts parts(format, s);
  const int64_t matrix = parts.bytes, bytes = weight_bytes(parts.at(pool));
  const int64_t enough = 4000000000 / (m * s.n * s.k) + 1;  // about 8 GFLOP
  const int64_t matrices = std::clamp<int64_t>(kPool / matrix, 1, enough);
  const int64_t block = max64(kernel.n_block, feature_step(parts.view));
  const int64_t slice = kernel.n_slice != 0
                            ? round_up(kernel.n_slice, block)
                            : round_up(ceil_div(kSliceBytes, max64(1, bytes / s.n)), block);
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
      const WeightView w = parts.at(pool + task / slices * matrix);
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
  const double gb = double(bytes * matrices) * 1e-9 / median(seconds);
  const double gflop = 2.0 * double(m * s.n * s.k * matrices) * 1e-9 / median(seconds);
  std::printf(
      "{\"kernel\": \"%s\", \"format\": \"%s\", \"shape\": \"%s\", \"tokens\": %lld, \"threads\": "
      "%d, \"gb_per_s\": "
      "%.1f, "
      "\"read_gb_per_s\": %.1f, \"share_of_bandwidth\": %.3f, \"gflop_per_s\": %.1f, "
      "\"fma_gflop_per_s\": %.1f, \"share_of_peak\": %.3f}\n",
      kernel.name, format.name, s.name, static_cast<long long>(m), executor.threads(), gb,
      median(read), gb / median(read), gflop, median(fma), gflop / median(fma));
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
  // Near 1 or -1 in codes of two bytes and more, and as a scale of one byte nowhere near the ends of
  // fp32, where arithmetic is slower.
  for (int64_t i = 0; i < kPool / 8; ++i) {
    static_cast<uint64_t*>(map)[i] = (rng.next() & 0x801f801f801f801fu) | 0x3f603f603f603f60u;
  }
  for (const Shape& shape : kShapes) {
    for (const char* name : kFormats) {
      const Format& format = *find_format(name);
      if (shape.k % code_block(format.code).elements != 0) continue;
      for (const ActClass act : {ActClass::fp32, ActClass::bf16, ActClass::int8}) {
        for (const int64_t m : {1, 2, 3, 4, 8, 16, 24, 32, 64, 128, 256, 512}) {
          const DotKernel* kernel = select_dot({format.code, shape.layout, act, m}, machine.isa);
          if (kernel == nullptr) continue;
          const std::string label = std::string(kernel->name) + "/" + name + "/" + shape.name +
                                    "/m" + std::to_string(m) + "/";
          if (matches(label, filter)) {
            run_cell(*kernel, format, shape, m, repeats, static_cast<const char*>(map), probe,
                     executor);
          }
        }
      }
    }
  }
}
