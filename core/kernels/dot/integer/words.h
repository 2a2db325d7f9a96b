// Words of packed codes, columns: a line holds all features of one or more inputs, so that a
// register of it times broadcast activations are sums of many features, and nothing is summed
// across lanes.
// Included by ISA files only.
#pragma once
#include "kernels/dot/dot.h"
#include "kernels/dot/integer/math.h"
#include "kernels/dot/integer/unpack.h"

namespace cpumoe::CPUMOE_NS {

constexpr int64_t kLeastGroup = 16;  // inputs that share a factor
constexpr int64_t kMostLanes = 128;  // features of a register of words

// Inputs [k, k + depth) of a slice's features [n, n + features), and the tokens from x on.
struct Block {
  int64_t n, features;
  const char* lines;  // the first one; its feature n
  int64_t stride;     // between lines
  int64_t k, depth;
  int64_t size, groups, group;  // inputs that share a factor, such groups, the first of them
  float* scales;                // [groups][pitch]; in the order of the sums
  float* offsets;
  int64_t pitch;
  bool load;  // the factors are not there yet
  // From a byte of the block to the same one of each block after it that is to be asked for; 0: not
  // again.
  int64_t ahead[3];
  const char* x;
  int64_t xs;
  float* c;
  int64_t cs;
};

// Asks for what is used one, two and three blocks after the line at w: in the order of use, which
// needs no counting, and again and again, because a core drops a prefetch while too many are under
// way (Zen 4, AWQ, one token, 34 GB/s: 93 % of it asked three times, 86 % asked twice).
CPUMOE_INLINE void ask(const Block& b, const char* w) {
  _mm_prefetch(w + b.ahead[2], _MM_HINT_T1);
  _mm_prefetch(w + b.ahead[1], _MM_HINT_T1);
  _mm_prefetch(w + b.ahead[0], _MM_HINT_T1);
}

// A source of words:
//   Order, kCode, kInputs    of its activations (layouts.h); inputs of a line
//   kDepth, kMostFeatures    inputs of a block, most features of one
//   pitch(n)                 floats of a group's factors of a slice of n features
//   kTokens                  most tokens at a time
//   Grid                     made of a WeightView: what loading its factors takes
//   tokens<T>(block, grid)   c (+)= the block times T tokens; asks for what is near and far; the
//                            order of the sums is the source's own
//   restore(p, features)     sums of a token from that order

// Up to T of `tokens` tokens; returns how many.
template <class S, int T>
CPUMOE_INLINE int64_t words_tokens(const Block& b, const typename S::Grid& grid, int64_t tokens) {
  if constexpr (T > 1) {
    if (tokens < T) return words_tokens<S, T - 1>(b, grid, tokens);
  }
  S::template tokens<T>(b, grid);
  return T;
}

template <class S>
static void words(const DotArgs& a) {
  const WeightView& w = *a.w;
  const int64_t size = w.format->scale_cols;
  typename S::Grid grid(w);
  Block b{};
  b.stride = line_bytes(S::kCode, w.stride), b.size = min64(size, S::kDepth);
  b.xs = Spans::line_bytes(w.k), b.cs = a.c_stride;
  for (b.n = a.n0; b.n < a.n1; b.n += b.features) {
    b.features = min64(S::kMostFeatures, a.n1 - b.n);
    float* c = a.c + (b.n - a.n0);
    if (w.k == 0) {
      for (int64_t m = a.m0; m < a.m1; ++m) {
        memset(c + (m - a.m0) * b.cs, 0, size_t(b.features) * 4);
      }
      continue;
    }
    b.pitch = S::pitch(a.n1 - a.n0);
    b.scales = static_cast<float*>(a.scratch);
    b.offsets = b.scales + S::kDepth / kLeastGroup * b.pitch;
    const char* first = static_cast<const char*>(w.data) + line_bytes(S::kCode, b.n);
    const char* next = b.n + b.features < a.n1 ? first + line_bytes(S::kCode, b.features)
                                               : static_cast<const char*>(a.next);
    // Where the block of inputs from k on lies, counted on in what is read next.
    const auto block_at = [&](int64_t k) {
      if (k < w.k) return first + k / S::kInputs * b.stride;
      return next == nullptr ? b.lines
                             : next + (k - round_up(w.k, S::kDepth)) / S::kInputs * b.stride;
    };
    for (b.k = 0; b.k < w.k; b.k += S::kDepth) {
      b.depth = min64(S::kDepth, w.k - b.k);
      b.groups = ceil_div(b.depth, b.size), b.group = b.k / size;
      b.load = b.k % size == 0 || size < S::kDepth;
      b.lines = block_at(b.k);
      for (int j = 0; j < 3; ++j) b.ahead[j] = block_at(b.k + (j + 1) * S::kDepth) - b.lines;
      for (int64_t m = a.m0; m < a.m1;) {
        b.x = static_cast<const char*>(a.act) + m * b.xs;
        b.c = c + (m - a.m0) * b.cs;
        m += words_tokens<S, S::kTokens>(b, grid, a.m1 - m);
        b.load = false, b.ahead[0] = b.ahead[1] = b.ahead[2] = 0;
      }
    }
    for (int64_t m = a.m0; m < a.m1; ++m) S::restore(c + (m - a.m0) * b.cs, b.features);
  }
}

}  // namespace cpumoe::CPUMOE_NS
