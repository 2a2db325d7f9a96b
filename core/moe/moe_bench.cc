// Ring 2: one expert layer against read bandwidth and FMA peak measured next to each cell.
//   moe_moe_bench [hidden=2048] [inter=768] [experts=128] [top_k=8] [format=bf16] [layout=rows]
//                 [interleaved=0] [threads=0] [seconds=1] [tokens=1,4,16,64,256,1024]
// Prints one line a cell: median of the interleaved samples, bytes and flops, and their shares.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/probe/measure.h"
#include "kernels/testing/random.h"
#include "moe/moe.h"

namespace cpumoe {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string option(int argc, char** argv, const char* name, const char* value) {
  const std::string prefix = std::string(name) + "=";
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], prefix.c_str(), prefix.size()) == 0) return argv[i] + prefix.size();
  }
  return value;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

struct Weights {
  std::vector<WeightView> gate, up, down;
};

// Random weights of all experts in one mapping with huge pages, as large tensors in memory have.
Weights make_weights(int64_t experts, int64_t hidden, int64_t inter, const Format* format,
                     Layout layout, bool interleaved) {
  const int64_t size = int64_t(code_bits(format->code)) / 8, each = hidden * inter * size;
  const size_t bytes = size_t(3 * experts * each);
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  require(map != MAP_FAILED, "moe_bench", "memory must hold ", bytes, " bytes of weights");
  madvise(map, bytes, MADV_HUGEPAGE);
  testing::Rng rng(1);
  std::vector<char> pattern(size_t(1) << 20);
  testing::fill_random(pattern.data(), format->code, int64_t(pattern.size()) / size, 0.05f, rng);
  for (size_t i = 0; i < bytes; i += pattern.size()) {
    std::memcpy(static_cast<char*>(map) + i, pattern.data(), std::min(pattern.size(), bytes - i));
  }
  Weights w;
  char* at = static_cast<char*>(map);
  const auto matrix = [&](int64_t n, int64_t k) {
    const WeightView v{format, layout, n, k, layout == Layout::rows ? k : n, at};
    at += n * k * size;
    return v;
  };
  for (int64_t e = 0; e < experts; ++e) {
    w.gate.push_back(matrix(interleaved ? 2 * inter : inter, hidden));
    if (!interleaved) w.up.push_back(matrix(inter, hidden));
    w.down.push_back(matrix(hidden, inter));
  }
  return w;
}

void run(int argc, char** argv) {
  const auto number = [&](const char* name, const char* value) {
    return std::atol(option(argc, argv, name, value).c_str());
  };
  const int64_t hidden = number("hidden", "2048"), inter = number("inter", "768");
  const int64_t experts = number("experts", "128"), k = number("top_k", "8");
  const bool interleaved = number("interleaved", "0") != 0;
  const double seconds = std::atof(option(argc, argv, "seconds", "1").c_str());
  const Format* format = find_format(option(argc, argv, "format", "bf16"));
  require(format != nullptr, "moe_bench", "format must be known");
  const Layout layout =
      option(argc, argv, "layout", "rows") == "rows" ? Layout::rows : Layout::columns;
  const Machine machine = probe_machine();
  Executor executor(machine, {int(number("threads", "0")), true, -1});
  Probe probe(machine);
  const Weights w = make_weights(experts, hidden, inter, format, layout, interleaved);
  ExpertsView view;
  view.experts = experts;
  view.hidden = hidden;
  view.inter = inter;
  view.interleaved = interleaved;
  view.gate = w.gate;
  view.up = w.up;
  view.down = w.down;

  Workspace workspace;
  testing::Rng rng(2);
  std::string list = option(argc, argv, "tokens", "1,4,16,64,256,1024");
  for (char* p = list.data(); *p != 0;) {
    const int64_t tokens = std::strtol(p, &p, 10);
    if (*p == ',') ++p;
    std::vector<uint16_t> x(size_t(tokens * hidden)), out(x.size());
    testing::fill_random(x.data(), Code::bf16, tokens * hidden, 1.0f, rng);
    std::vector<int32_t> ids(size_t(tokens * k));
    std::vector<float> weights(ids.size(), 1.0f / float(k));
    RoutingPlan plan;
    std::vector<double> times, rates, bandwidth, peak;  // rates: bytes per second of each call
    const double start = now();
    int64_t turn = 0;
    while (times.size() < 5 || now() - start < seconds) {
      std::vector<bool> used(size_t(experts), false);
      for (int64_t t = 0; t < tokens; ++t) {  // distinct experts per token; others in the next call
        const int64_t first = tokens == 1 ? turn : rng.below(experts);
        const int64_t step = tokens == 1 || experts <= k ? 1 : 1 + rng.below(experts / k);
        for (int64_t j = 0; j < k; ++j) {
          const int32_t e = int32_t((first + j * step) % experts);
          ids[size_t(t * k + j)] = e;
          used[size_t(e)] = true;
        }
      }
      turn += k;
      const double bytes =
          double(std::count(used.begin(), used.end(), true)) * 3 * double(hidden * inter) *
          double(code_bits(format->code)) / 8;
      const double a = now();
      make_plan(plan, ids.data(), weights.data(), tokens, k, experts, false);
      const MoeBlock block{&view, &plan};
      moe({{&block, 1},
           {x.data(), Code::bf16, tokens, hidden, hidden},
           out.data(),
           Code::bf16,
           hidden,
           false},
          machine.isa, workspace, executor);
      times.push_back(now() - a);
      rates.push_back(bytes / times.back());
      if (times.size() % 8 == 1) {
        bandwidth.push_back(probe.read_gb_per_s(executor));
        peak.push_back(probe.fma_gflop_per_s(executor));
      }
    }
    times.erase(times.begin());  // the first call makes buffers
    rates.erase(rates.begin());
    const double s = median(times), gb = median(rates) * 1e-9;
    const double gflop = double(tokens * k) * 6 * double(hidden * inter) / s * 1e-9;
    std::sort(times.begin(), times.end());
    std::printf(
        "T %5ld  %9.3f ms (best %9.3f)  %6.1f GB/s = %5.1f %% of %5.1f   %6.1f GFLOP/s = %5.1f %% "
        "of %5.1f\n",
        long(tokens), s * 1e3, times[0] * 1e3, gb, 100 * gb / median(bandwidth), median(bandwidth),
        gflop, 100 * gflop / median(peak), median(peak));
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace cpumoe

int main(int argc, char** argv) {
  try {
    cpumoe::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
