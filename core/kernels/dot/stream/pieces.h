// Rows of a slice as a stream takes them: `block` rows one piece each, then their next pieces, then
// the rows behind them. Included by ISA files only.
#pragma once
#include <immintrin.h>

#include "kernels/dot/dot.h"

namespace cpumoe::CPUMOE_NS {

// Bytes before their use at which lines are fetched into L2, again and again: a core drops what it
// asks for while too much is under way. One token, q4_0, Zen 4: 87 % of 34 GB/s when asked once,
// 98 % when asked three times (`kernels_dot_dot_bench 2 int_stream,/q4_0/,/m1/` with kAsks 1).
constexpr int kAsks = 3;
constexpr int64_t kAhead[kAsks] = {16384, 10240, 5120};

struct Pieces {
  const char* base;      // row 0
  const char* next;      // what the caller streams after the slice, or null
  int64_t stride, end;   // bytes between rows; the row behind the slice
  int64_t block;         // rows
  int64_t piece, bytes;  // of a whole piece, of a row
};

// What is used kAhead bytes of each of R rows after a piece of rows: so many rows and bytes later.
template <int R>
struct Later {
  int64_t rows[kAsks], bytes[kAsks];
  // After the pieces from byte `at` on.
  CPUMOE_INLINE Later than(const Pieces& p, int64_t at) {
    const int64_t piece = max64(1, min64(p.piece, p.bytes - at));
    Later l;
    for (int j = 0; j < kAsks; ++j) {
      l.rows[j] = kAhead[j] / R / piece * R;
      l.bytes[j] = kAhead[j] / R % piece;
    }
    return l;
  }
};

// What to fetch while R rows from n on of the block from n0 on take their piece from byte `at` on,
// as if it began a row.
template <int R>
struct Ahead {
  const char* at[kAsks][R];
  CPUMOE_INLINE Ahead from(const Pieces& p, const Later<R>& later, int64_t n0, int64_t n,
                           int64_t at) {
    Ahead a;
    const int64_t rows = min64(p.block, p.end - n0);
    for (int j = 0; j < kAsks; ++j) {
      int64_t row = n - n0 + later.rows[j], shift = later.bytes[j];
      if (row >= rows && p.bytes > p.piece) {
        row -= rows;
        if (at + p.piece < p.bytes) {
          shift += p.piece;
        } else {
          row += p.block, shift -= at;
        }
      }
      row += n0;
      const char* to = row < p.end         ? p.base + row * p.stride + shift
                       : p.next != nullptr ? p.next + (row - p.end) * p.stride + shift
                                           : p.base + n * p.stride;
      for (int r = 0; r < R; ++r) a.at[j][r] = to + r * p.stride;
    }
    return a;
  }
  // While bytes [byte, byte + kBytes) of the rows are used: each line once.
  template <int64_t kBytes>
  CPUMOE_INLINE void fetch(const Ahead& a, int64_t byte) {
    int64_t line = round_up(byte, 64);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBytes / 64; ++i, line += 64) fetch_line(a, line);
    if (kBytes % 64 != 0 && line < byte + kBytes) fetch_line(a, line);
  }
  CPUMOE_INLINE void fetch_line(const Ahead& a, int64_t byte) {
#pragma GCC unroll 4
    for (int j = 0; j < kAsks; ++j) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) _mm_prefetch(a.at[j][r] + byte, _MM_HINT_T1);
    }
  }
};

}  // namespace cpumoe::CPUMOE_NS
