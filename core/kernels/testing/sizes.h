// Sizes that find edge errors: around every block and its multiples.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace cpumoe::testing {

// 1, and b - 1, b, b + 1 for each block b; sorted, without repeats and non-positive values.
inline std::vector<int64_t> sizes_near(std::initializer_list<int64_t> blocks) {
  std::vector<int64_t> out{1};
  for (const int64_t b : blocks) {
    for (const int64_t s : {b - 1, b, b + 1}) {
      if (s > 0) out.push_back(s);
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

}  // namespace cpumoe::testing
