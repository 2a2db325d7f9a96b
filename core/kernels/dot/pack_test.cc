// What pack and store_mid write, bit for bit: layouts.h read independently of the kernels.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "kernels/dot/dot.h"
#include "kernels/testing/dot_problem.h"
#include "kernels/testing/sizes.h"
#include "testing/test.h"

namespace cpumoe {
namespace {

using testing::fill_random;
using testing::formats_of;
using testing::guarded_bytes;
using testing::GuardedBuffer;
using testing::kernels_under_test;
using testing::Problem;
using testing::Rng;
using testing::sizes_near;

// Activations of all tokens as bytes: value(token, input).
using Values = std::vector<std::vector<float>>;

template <class T>
void put(std::vector<char>& to, int64_t byte, T v) {
  CHECK(byte >= 0 && byte + int64_t(sizeof v) <= int64_t(to.size()));
  std::memcpy(to.data() + byte, &v, sizeof v);
}

int64_t float_position(const std::string& layout, int64_t m, int64_t k, int64_t inputs) {
  const int64_t line = (inputs + 15) / 16 * 16;
  if (layout == "rows") return m * line + k;
  if (layout == "rows_even_odd") return m * line + k / 16 * 16 + k % 2 * 8 + k % 16 / 2;
  CHECK_EQ(layout, std::string("panels8"));
  return m / 8 * inputs * 8 + k * 8 + m % 8;
}

struct Group {
  int8_t codes[kActGroup];
  float scale;
};
Group group_of(const std::vector<float>& x, int64_t k) {
  Group g;
  g.scale = quantize_group(x.data() + k, min64(kActGroup, int64_t(x.size()) - k), g.codes);
  return g;
}

void put_int8_row(std::vector<char>& to, int64_t m, const std::vector<float>& x) {
  const int64_t inputs = int64_t(x.size()), codes = (inputs + 31) / 32 * 32;
  const int64_t line = m * ((codes + codes / 8 + 63) / 64 * 64);
  for (int64_t k = 0; k < inputs; k += kActGroup) {
    const Group g = group_of(x, k);
    for (int64_t i = 0; i < kActGroup; ++i) put(to, line + k + i, g.codes[i]);
    put(to, line + codes + k / 32 * 4, g.scale);
  }
}

// Groups in the order of the lanes, and which input byte b of vector v holds.
struct SpanOrder {
  int groups[8];
  int (*input)(int v, int b);
};
const std::map<std::string, SpanOrder> kSpanOrders = {
    {"int8_quads", {{0, 2, 4, 6, 1, 3, 5, 7}, [](int v, int b) { return 4 * v + b; }}},
    {"int8_quads_high", {{0, 1, 4, 5, 2, 3, 6, 7}, [](int v, int b) { return 4 * v + b; }}},
    {"int8_pairs",
     {{0, 2, 4, 6, 1, 3, 5, 7},
      [](int v, int b) { return v / 4 * 16 + v % 2 * 8 + v / 2 % 2 + 2 * b; }}},
    {"int8_fours",
     {{0, 1, 4, 5, 2, 3, 6, 7}, [](int v, int b) { return v / 4 * 16 + v % 4 + 4 * b; }}},
};

void put_spans(std::vector<char>& to, const SpanOrder& order, int64_t m,
               const std::vector<float>& x) {
  const int64_t spans = (int64_t(x.size()) + 255) / 256;
  for (int64_t s = 0; s < spans; ++s) {
    const int64_t at = (m * spans + s) * 448;
    for (int lane = 0; lane < 8; ++lane) {
      const int64_t k = s * 256 + order.groups[lane] * 32;
      if (k >= int64_t(x.size())) continue;
      const Group g = group_of(x, k);
      int sums[2] = {0, 0}, pairs[2][2] = {{0, 0}, {0, 0}};
      for (int v = 0; v < 8; ++v) {
        for (int b = 0; b < 4; ++b) {
          const int8_t code = g.codes[order.input(v, b)];
          put(to, at + v * 32 + lane * 4 + b, code);
          sums[order.input(v, b) / 16] += code;
          pairs[v / 4][b / 2] += code;
        }
      }
      put(to, at + 256 + lane * 4, g.scale);
      put(to, at + 288 + lane * 4, g.scale * float(sums[0] + sums[1]));
      put(to, at + 320 + lane * 4, g.scale * float(sums[0]));
      put(to, at + 352 + lane * 4, g.scale * float(sums[1]));
      for (int p = 0; p < 2; ++p) {
        put(to, at + 384 + lane * 4 + 2 * p, int16_t(-pairs[0][p] - pairs[1][p]));
        put(to, at + 416 + lane * 4 + 2 * p, int16_t(-pairs[0][p]));
      }
    }
  }
}

// Codes of a byte, and how many.
const std::map<std::string, int64_t> kLineCodes = {{"int8_lines2", 2}, {"int8_lines4", 4}};

void put_lines(std::vector<char>& to, int64_t codes, int64_t m, const std::vector<float>& x) {
  const int64_t chunk = 64 * codes, bytes = 64 * (codes + 2);
  const int64_t inputs = int64_t(x.size()), chunks = (inputs + chunk - 1) / chunk;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t at = (m * chunks + i) * bytes;
    int32_t minus[16] = {};
    for (int64_t k = i * chunk; k < std::min(inputs, (i + 1) * chunk); k += kActGroup) {
      const Group g = group_of(x, k);
      for (int64_t e = 0; e < kActGroup; ++e) {
        const int64_t input = k % chunk + e, byte = input / codes;
        put(to, at + input % codes * 64 + byte, g.codes[e]);
        put(to, at + 64 * codes + byte / 4 * 4, g.scale);
        minus[byte / 4] -= g.codes[e];
      }
    }
    for (int64_t lane = 0; lane < 16; ++lane)
      put(to, at + 64 * (codes + 1) + lane * 4, minus[lane]);
  }
}

// Inputs `step` apart in lanes, chunks of `chunk`.
struct ScaledOrder {
  int64_t chunk, step;
};
const std::map<std::string, ScaledOrder> kScaledOrders = {
    {"rows_scaled", {32, 4}}, {"rows_scaled64", {64, 4}}, {"rows_scaled128", {128, 8}}};

void put_scaled_row(std::vector<char>& to, const ScaledOrder& order, int64_t m,
                    const std::vector<float>& x) {
  const int64_t chunk = order.chunk, step = order.step, inputs = int64_t(x.size());
  const int64_t padded = (inputs + chunk - 1) / chunk * chunk;
  const int64_t line = m * ((padded + (inputs + 127) / 128 + 15) / 16 * 16);
  for (int64_t g = 0; g < inputs; g += 128) {
    float amax = 0;
    bool finite = true;
    for (int64_t k = g; k < std::min(inputs, g + 128); ++k) {
      finite = finite && std::isfinite(x[size_t(k)]);
      amax = std::max(amax, std::fabs(x[size_t(k)]));
    }
    // 2^e amax in [2^126, 2^127), but 2^-1 <= 2^e <= 2^126.
    int e = !finite ? -1 : amax == 0 ? 126 : std::clamp(126 - std::ilogb(amax), -1, 126);
    for (int64_t k = g; k < std::min(inputs, g + 128); ++k) {
      const int64_t at = line + k / chunk * chunk + k % step * (chunk / step) + k % chunk / step;
      put(to, at * 4, x[size_t(k)] * std::ldexp(1.0f, e));
    }
    put(to, (line + padded + g / 128) * 4, std::ldexp(1.0f, 120 - e));
  }
}

std::vector<char> expected(const DotKernel& kernel, const Values& x, int64_t k) {
  const std::string layout = kernel.act_layout;
  std::vector<char> out(kernel.act_bytes(int64_t(x.size()), k), 0);
  for (size_t t = 0; t < x.size(); ++t) {
    const int64_t m = int64_t(t);
    if (layout == "int8_rows") {
      put_int8_row(out, m, x[t]);
    } else if (layout == "bf16_rows") {
      const int64_t line = m * ((k + 31) / 32 * 32);
      for (int64_t j = 0; j < k; ++j)
        store_from_float(out.data(), Code::bf16, line + j, x[t][size_t(j)]);
    } else if (kScaledOrders.count(layout) != 0) {
      put_scaled_row(out, kScaledOrders.at(layout), m, x[t]);
    } else if (kLineCodes.count(layout) != 0) {
      put_lines(out, kLineCodes.at(layout), m, x[t]);
    } else if (kSpanOrders.count(layout) != 0) {
      put_spans(out, kSpanOrders.at(layout), m, x[t]);
    } else {
      for (int64_t j = 0; j < k; ++j)
        put(out, float_position(layout, m, j, k) * 4, x[t][size_t(j)]);
    }
  }
  return out;
}

void check_act(const DotKernel& kernel, const char* act, const Values& x, int64_t k) {
  const std::vector<char> want = expected(kernel, x, k);
  for (size_t i = 0; i < want.size(); ++i) {
    CHECK_MSG(act[i] == want[i], kernel.name << " m=" << x.size() << " k=" << k << " byte " << i
                                             << " of " << want.size() << ": " << int(act[i])
                                             << " for " << int(want[i]));
  }
}

// One kernel of each activation layout and instruction set.
std::vector<DotKernel> one_of_each_layout() {
  std::vector<DotKernel> out;
  std::vector<std::string> seen;
  for (const DotKernel& kernel : kernels_under_test()) {
    const std::string key = std::string(kernel.act_layout) + isa_name(kernel.isa);
    if (std::find(seen.begin(), seen.end(), key) != seen.end()) continue;
    seen.push_back(key);
    out.push_back(kernel);
  }
  return out;
}

// Magnitudes of all sizes, ties between codes, zeros, and what is too small or not finite.
void make_odd(Values& x, Rng& rng) {
  for (std::vector<float>& line : x) {
    for (size_t g = 0; g < line.size(); g += 32) {
      const float scale = std::ldexp(1.0f, int(rng.below(260)) - 135);
      const int64_t kind = rng.below(6);
      for (size_t i = g; i < std::min(line.size(), g + 32); ++i) {
        if (kind == 0) line[i] = float(rng.below(509) - 254) * 0.5f * scale;
        if (kind == 1) line[i] *= scale;
        if (kind == 2) line[i] = 0;
      }
      if (kind == 0) line[g] = 127 * scale;
      if (kind == 3) line[g] = rng.below(2) == 0 ? INFINITY : NAN;
    }
  }
}

TEST(pack_gathers_bit_for_bit) {
  for (const DotKernel& kernel : one_of_each_layout()) {
    Rng rng(5);
    for (const Code code : {Code::f32, Code::f16, Code::bf16}) {
      for (const int64_t m : sizes_near({8, 16})) {
        for (const int64_t k : sizes_near({8, 16, 32, 256})) {
          Problem p(kernel, {formats_of(Code::f32)[0], {}}, 1, k, m, code, rng);
          Values x;
          for (int64_t t = 0; t < m + 2; ++t) {
            x.push_back({});
            for (int64_t j = 0; j < k; ++j)
              x.back().push_back(load_as_float(p.x.data, code, t * k + j));
          }
          make_odd(x, rng);
          for (int64_t i = 0; i < (m + 2) * k; ++i) {
            store_from_float(p.source.data(), code, i, x[size_t(i / k)][size_t(i % k)]);
            x[size_t(i / k)][size_t(i % k)] = load_as_float(p.x.data, code, i);
          }
          Values picked;
          for (const int32_t row : p.index) picked.push_back(x[size_t(row)]);
          for (int64_t m0 = 0; m0 < m; m0 += kernel.m_block) {
            kernel.pack({p.x, p.index.data(), m0, min64(m, m0 + kernel.m_block), m, p.act.data()});
          }
          check_act(kernel, p.act.data(), picked, k);
          kernel.pack({p.x, nullptr, 0, m, m, p.act.data()});
          x.resize(size_t(m));
          check_act(kernel, p.act.data(), x, k);
        }
      }
    }
  }
}

// Cuts 0..size at random multiples of `step`.
std::vector<int64_t> cuts(int64_t size, int64_t step, Rng& rng) {
  std::vector<int64_t> out{0};
  while (out.back() < size) out.push_back(min64(size, out.back() + step * (1 + rng.below(4))));
  return out;
}

TEST(store_mid_places_tiles_bit_for_bit) {
  for (const DotKernel& kernel : one_of_each_layout()) {
    Rng rng(6);
    for (const TileOrder order : {TileOrder::n_major, TileOrder::m_major}) {
      for (const int64_t m : sizes_near({4, 8, 16, 24})) {
        for (const int64_t k : sizes_near({8, 16, 48, 256, 320})) {
          for (const int64_t step : {1, 8}) {  // tiles of any kernel: blocks of 1 or 8 tokens
            Values mid(static_cast<size_t>(m), std::vector<float>(static_cast<size_t>(k)));
            for (auto& line : mid) fill_random(line.data(), Code::f32, k, 1, rng);
            make_odd(mid, rng);
            GuardedBuffer act(guarded_bytes(kernel.act_bytes(m, k)));
            const std::vector<int64_t> ms = cuts(m, step, rng),
                                       ks = cuts(k, max64(step, kernel.k_group), rng);
            for (size_t a = 0; a + 1 < ms.size(); ++a) {
              for (size_t b = 0; b + 1 < ks.size(); ++b) {
                const int64_t tokens = ms[a + 1] - ms[a], features = ks[b + 1] - ks[b];
                const bool n_major = order == TileOrder::n_major;
                const int64_t stride = round_up(n_major ? tokens : features, 16);
                const int64_t lines = n_major ? features : round_up(tokens, step);
                GuardedBuffer tile(size_t(lines * stride) * 4);
                for (int64_t t = 0; t < tokens; ++t) {
                  for (int64_t f = 0; f < features; ++f) {
                    tile.as<float>()[n_major ? f * stride + t : t * stride + f] =
                        mid[size_t(ms[a] + t)][size_t(ks[b] + f)];
                  }
                }
                kernel.store_mid({tile.as<float>(), order, stride, ks[b], ks[b + 1], ms[a],
                                  ms[a + 1], m, k, act.data()});
              }
            }
            check_act(kernel, act.data(), mid, k);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace cpumoe
