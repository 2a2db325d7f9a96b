// Reproducible data for tests and benchmarks (splitmix64).
#pragma once
#include <cstdint>

#include "base/types.h"

namespace cpumoe::testing {

struct Rng {
  uint64_t state;
  explicit Rng(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint64_t next() {
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  // Uniform in [lo, hi).
  float uniform(float lo, float hi) {
    return lo + (hi - lo) * float(next() >> 40) * 5.9604644775390625e-8f;
  }
  // Uniform in 0..n-1, n > 0 (the bias of the remainder does not matter here).
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
};

// Fills `count` elements of `code` with uniform values in [-scale, scale). Any alignment.
inline void fill_random(void* p, Code code, int64_t count, float scale, Rng& rng) {
  for (int64_t i = 0; i < count; ++i) store_from_float(p, code, i, rng.uniform(-scale, scale));
}

}  // namespace cpumoe::testing
