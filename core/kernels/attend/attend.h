// Room `attend`: softmax(scale Q K^T) V of one KV head over a range of cached tokens.
//
// The query heads that share a KV head, times the tokens of a block, are the rows M of two small
// products (scores, then P V), so decode and prefill are one code path with different M.
//
//   score[r, l] = scale * sum over d of q[r, d] K[l, d], then softcap * tanh(score / softcap)
//   token i sees the keys l with l <= position + i and, if window > 0, l > position + i - window
//   p = softmax over the seen keys, and over the sink's logit, which has no value row
//   out[r, d] = sum over l of p[r, l] V[l, d]
//
// Layout of one head in the cache, element code as the row says:
//   K: blocks of kKeyBlock keys, inside a block [head_dim][kKeyBlock]. A step over d meets 16 keys
//      side by side: no sum across lanes, no transpose, and the head is one forward stream.
//   V: [key][value_stride(value_dim)], lanes past value_dim zero: nobody writes them, and a fresh
//      cache is zero.
// Shared (v_cache null, DeepSeek's latents): V[l] is the first value_dim <= head_dim elements of
// K[l]. There is no second copy: each block of K is transposed once for all rows.
#pragma once
#include "base/types.h"
#include "machine/isa.h"

namespace cpumoe {

inline constexpr int64_t kKeyBlock = 16;
CPUMOE_INLINE int64_t value_stride(int64_t value_dim) { return round_up(value_dim, 16); }
// Elements of K and of V of one head with room for `tokens`.
CPUMOE_INLINE int64_t key_elements(int64_t tokens, int64_t head_dim) {
  return round_up(tokens, kKeyBlock) * head_dim;
}
CPUMOE_INLINE int64_t value_elements(int64_t tokens, int64_t value_dim) {
  return round_up(tokens, kKeyBlock) * value_stride(value_dim);
}

// keys > 0: the cache lies in slabs; that of a head's keys [i * keys, (i + 1) * keys), K and V
// alike, begins i * bytes behind the first one. keys: a multiple of kScoreBlock. 0: one piece.
struct Slabs {
  int64_t keys = 0, bytes = 0;
};
// Bytes from slab 0 to the one that holds key l, and l's number in it.
CPUMOE_INLINE int64_t slab_shift(const Slabs& c, int64_t l) {
  return c.keys > 0 ? l / c.keys * c.bytes : 0;
}
CPUMOE_INLINE int64_t within_slab(const Slabs& c, int64_t l) {
  return c.keys > 0 ? l % c.keys : l;
}

// Copies new tokens of one head into the cache at `position`..position + tokens - 1.
struct AppendArgs {
  const float* k;  // tokens x head_dim, `stride` elements between tokens
  const float* v;  // tokens x value_dim likewise; null: shared
  int64_t tokens, head_dim, value_dim, stride;
  int64_t position;
  void* k_cache;  // the head's K and V
  void* v_cache;
  Slabs slabs;
};

// Softmax state of a row over a part of its keys: acc[value_stride] = sum of exp(score - max) V,
// then max and sum. `state_stride` floats in all.
CPUMOE_INLINE int64_t state_stride(int64_t value_dim) { return value_stride(value_dim) + 16; }

struct AttendArgs {
  const float* q;         // token i, head g: q + i * q_stride + g * head_dim
  int64_t q_stride;       // elements between tokens
  int64_t tokens, group;  // rows M = tokens * group, row r = i * group + g
  int64_t head_dim, value_dim;
  int64_t position;     // of token 0
  const void* k_cache;  // the head's K and V
  const void* v_cache;  // null: shared
  Slabs slabs;
  // Keys to walk; key0 a multiple of kKeyBlock, with slabs of kScoreBlock. Keys no token sees are
  // skipped.
  int64_t key0, key1;
  int64_t window;      // 0: none
  float scale, softcap;  // softcap 0: none
  const float* sinks;    // nullable, [group]; give them with one part of the keys only
  float* out;  // finished rows, token i, head g: out + i * out_stride + g * value_dim; null: write
               // `state` instead
  int64_t out_stride;
  float* state;   // M x state_stride(value_dim)
  const void* next;  // nullable: the keys that the caller walks after these, of this shape, which
                     // may be prefetched, never read. Null: those behind key1
  void* scratch;  // attend_scratch_bytes(M, head_dim, value_dim), 64-byte aligned, uninitialised
};
// Rounding: fp32 throughout; sums over d in order, over keys in order within blocks of 64 from
// key0, so a row's result depends on key0 and the row alone, not on the other rows. exp errs by at
// most 4 ulp. NaN and Inf behave as in softmax(scores) V with masked p = 0: a NaN score poisons its
// row, a +Inf score gives NaN, a row whose keys are all -Inf gives NaN, and a NaN or Inf in V may
// poison every row of the call whose key range holds it, seen or not (0 * NaN). Stale lanes of the
// last key block are read and discarded; V is read up to key1 only.

struct AttendKernel {
  const char* name;
  Isa isa;
  Code code;  // of the cache
  void (*run)(const AttendArgs&);
  void (*append)(const AppendArgs&);
};
const AttendKernel* attend_kernels(int* count);
const AttendKernel* select_attend(Code code, IsaSet isa);

// Keys per softmax step. Scratch: q and acc rows, scores, the fp32 copy of a block of K or V.
inline constexpr int64_t kScoreBlock = 64;
CPUMOE_INLINE int64_t attend_scratch_bytes(int64_t rows, int64_t head_dim, int64_t value_dim) {
  const int64_t q = value_stride(head_dim), acc = value_stride(value_dim);
  return 4 * (rows * (q + acc + kScoreBlock) + kScoreBlock * (q > acc ? q : acc) +
              2 * round_up(rows, 16));
}

// Joins the states of the same rows over `parts` disjoint key ranges, in order: state p of row r
// starts at states + (p * tokens * group + r) * state_stride. Same out layout as AttendArgs.
struct MergeArgs {
  const float* states;
  int64_t parts, tokens, group, value_dim;
  float* out;
  int64_t out_stride;
};
void attend_merge(const MergeArgs& args);

}  // namespace cpumoe
