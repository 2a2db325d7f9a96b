// Ring 1: the dot kernels against read bandwidth and FMA peak measured next to each cell.
//   kernels_dot_dot_bench [threads=1] [filter=""] [MiB of weights=512] [pages=4k|huge] [repeats=5]
// Prints one JSON object a cell: kernel, shape, tokens, gb_per_s, gflop_per_s and their shares.
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/buffer.h"
#include "kernels/dot/dot.h"
#include "kernels/testing/random.h"

namespace cpumoe {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void pin(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);
}
// Runs f(thread) on `threads` pinned threads; seconds from the common start to the last end.
double timed(int threads, const std::function<void(int)>& f) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> pool;
  std::vector<double> end(static_cast<size_t>(threads));
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      pin(t);
      ready++;
      while (!go) {
      }
      f(t);
      end[size_t(t)] = now();
    });
  }
  while (ready < threads) std::this_thread::yield();
  const double start = now();
  go = true;
  for (auto& p : pool) p.join();
  return *std::max_element(end.begin(), end.end()) - start;
}
volatile int sink;
__attribute__((target("avx2"))) void read_all(const char* p, size_t n) {
  __m256i a[8];
  for (auto& v : a) v = _mm256_setzero_si256();
  for (size_t i = 0; i + 256 <= n; i += 256) {
    for (int j = 0; j < 8; ++j) {
      a[j] = _mm256_or_si256(a[j], _mm256_load_si256((const __m256i*)(p + i + 32 * j)));
    }
  }
  for (int i = 1; i < 8; ++i) a[0] = _mm256_or_si256(a[0], a[i]);
  sink = _mm256_extract_epi32(a[0], 0);
}
__attribute__((target("avx2,fma"))) void fma_many(long iters) {
  __m256 x = _mm256_set1_ps(0.999999f), y = _mm256_set1_ps(1e-7f), c[12];
  for (auto& v : c) v = y;
  for (long r = 0; r < iters; ++r) {
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) c[i] = _mm256_fmadd_ps(c[i], x, y);
    __asm__ volatile("" : "+x"(x));
  }
  for (int i = 1; i < 12; ++i) c[0] = _mm256_add_ps(c[0], c[i]);
  sink = _mm256_extract_epi32(_mm256_castps_si256(c[0]), 0);
}

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

}  // namespace
}  // namespace cpumoe

int main(int argc, char** argv) {
  using namespace cpumoe;
  const int threads = argc > 1 ? atoi(argv[1]) : 1;
  const std::string filter = argc > 2 ? argv[2] : "";
  const size_t mib = argc > 3 ? size_t(atol(argv[3])) : 512;
  const bool huge = argc > 4 && std::string(argv[4]) == "huge";
  const int repeats = argc > 5 ? atoi(argv[5]) : 5;
  const IsaSet isa = usable_isa(getenv("CPUMOE_ISA") ? getenv("CPUMOE_ISA") : "");
  const size_t bytes = mib << 20;
  char* pool = static_cast<char*>(
      mmap(nullptr, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  madvise(pool, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  testing::Rng rng(1);
  for (size_t i = 0; i < bytes / 8; ++i) {  // bf16 and fp32 near 1, whatever code reads them
    reinterpret_cast<uint64_t*>(pool)[i] = (rng.next() & 0x80ff80ff80ff80ffu) | 0x3f003f003f003f00u;
  }
  const auto bandwidth = [&] {
    return double(bytes) / 1e9 / timed(threads, [&](int t) { read_all(pool + bytes / size_t(threads) * size_t(t) / 4096 * 4096, bytes / size_t(threads)); });
  };
  const auto peak = [&] {
    return 192.0 * 1e6 * threads / 1e9 / timed(threads, [&](int) { fma_many(1000000); });
  };
  for (const Shape& s : kShapes) {
    for (const Code code : {Code::bf16, Code::f32, Code::f16}) {
      for (const int64_t m : {1, 2, 3, 4, 6, 8, 16, 24, 32, 64, 128, 256, 512}) {
        const DotKernel* kernel = nullptr;
        const char* force = getenv("DOT_SHAPE");
        int count;
        const DotKernel* all = dot_kernels(&count);
        for (int i = 0; i < count && force; ++i) {
          if (all[i].code == code && all[i].layout == s.layout && strstr(all[i].name, force)) kernel = &all[i];
        }
        if (!kernel) kernel = select_dot({code, s.layout, ActClass::fp32, m}, isa);
        const std::string label = std::string(kernel->name) + "/" + s.name + "/m" + std::to_string(m) + "/";
        size_t at = 0; bool match = true;
        for (std::string f = filter; !f.empty() && match;) {
          const size_t c = f.find(',');
          const std::string part = f.substr(0, c);
          match = label.find(part) != std::string::npos;
          f = c == std::string::npos ? "" : f.substr(c + 1);
        }
        (void)at;
        if (!match) continue;
        const int64_t elem = int64_t(code_bits(code)) / 8;
        const size_t matrix = size_t(s.n * s.k * elem);
        const int64_t matrices = std::max<int64_t>(1, int64_t(std::min<size_t>(bytes / matrix, size_t(4e9 / double(m) / double(s.n * s.k)) + 1)));
        AlignedBuffer act(kernel->act_bytes(m, s.k));
        std::vector<float> x(size_t(m * s.k));
        for (auto& v : x) v = rng.uniform(-1, 1);
        kernel->pack({{x.data(), Code::f32, m, s.k, s.k}, nullptr, 0, m, m, act.data()});
        const int64_t slice = kernel->n_slice ? kernel->n_slice : round_up(ceil_div(512 << 10, s.k * elem), kernel->n_block);
        const int64_t per = ceil_div(s.n, slice), tasks = per * matrices;
        std::vector<AlignedBuffer> c(static_cast<size_t>(threads)), scratch(static_cast<size_t>(threads));
        const int64_t cs = kernel->order == TileOrder::n_major ? round_up(m, 16) : round_up(slice, 16);
        const int64_t lines = kernel->order == TileOrder::n_major ? slice : round_up(m, kernel->m_block);
        for (auto& b : c) b.reserve(size_t(cs * lines) * 4);
        for (auto& b : scratch) b.reserve(kernel->scratch_bytes(slice, m, s.k));
        std::vector<double> gb, bw, gf, fm;
        const auto body = [&](int t) {
          for (int64_t i = t; i < tasks; i += threads) {
            WeightView w{find_format(code_name(code)), s.layout, s.n, s.k, s.layout == Layout::rows ? s.k : s.n, pool + size_t(i / per) * matrix};
            const int64_t n0 = i % per * slice;
            kernel->run({&w, n0, std::min(n0 + slice, s.n), act.data(), m, 0, m, c[size_t(t)].reserve_as<float>(0), cs, scratch[size_t(t)].data()});
          }
        };
        timed(threads, body);
        for (int r = 0; r < repeats; ++r) {
          bw.push_back(bandwidth());
          fm.push_back(peak());
          const double sec = timed(threads, body);
          gb.push_back(double(matrix) * double(matrices) / 1e9 / sec);
          gf.push_back(2.0 * double(m) * double(s.n * s.k) * double(matrices) / 1e9 / sec);
        }
        const auto best = [](std::vector<double> v) { std::sort(v.begin(), v.end()); return v[v.size() - 1]; };
        const auto median = [](std::vector<double> v) { std::sort(v.begin(), v.end()); return v[v.size() / 2]; };
        printf("{\"kernel\": \"%s\", \"shape\": \"%s\", \"tokens\": %ld, \"threads\": %d, \"gb_per_s\": %.1f, \"read\": %.1f, \"share_of_bandwidth\": %.3f, \"gflop_per_s\": %.1f, \"fma\": %.1f, \"share_of_peak\": %.3f, \"best_bw\": %.3f, \"best_peak\": %.3f}\n",
               kernel->name, s.name, long(m), threads, median(gb), median(bw), median(gb) / median(bw), median(gf), median(fm), median(gf) / median(fm), best(gb) / best(bw), best(gf) / best(fm));
        fflush(stdout);
      }
    }
  }
}
