// Attention of one layer over the pieces of a chunk: which tasks there are, and their buffers.
#pragma once
#include <atomic>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer.h"
#include "decoder/kv_cache.h"
#include "machine/executor.h"

namespace cpumoe {

// Consecutive new tokens of one sequence within a chunk of flattened rows.
struct Piece {
  const KvCache::Impl* cache;
  const int32_t* tokens;
  int64_t segment;     // whose tokens these are
  int64_t row, count;  // rows [row, row + count) of the chunk
  int64_t position;    // of the first one in its sequence
  bool last;           // holds the segment's last token
};

// How a piece is cut: blocks of query tokens x parts of the keys they see, per slice of the query
// heads of a KV head. A function of the lengths alone, so that results do not depend on the number
// of threads.
struct Cut {
  int64_t block_tokens, blocks;
  int64_t parts;  // > 1: partial softmax states, merged by whoever finishes last
  int64_t first_task, first_join, first_state;  // of this piece among all; states in floats
};

class Attention {
 public:
  // Grows every buffer for these pieces and a layer like this; run() then allocates nothing.
  void reserve(std::span<const Piece> pieces, const AttentionSpec& spec, Executor& executor);
  // Before the first run() of a forward: one that threw may have left counts behind.
  void reset();
  // out rows [heads * value_dim] <- attention of q rows [heads * key_dim] over the caches (elements
  // between rows: q_stride, out_stride). sinks: [heads] or null.
  void run(std::span<const Piece> pieces, const AttentionSpec& spec, const float* sinks,
           size_t layer, const float* q, int64_t q_stride, float* out, int64_t out_stride,
           IsaSet isa, Executor& executor);

 private:
  struct Totals {
    int64_t tasks, joins, states, work;
  };
  Totals cut(std::span<const Piece> pieces, const AttentionSpec& spec);

  std::vector<Cut> cuts_;
  AlignedBuffer scratch_, states_;
  int64_t scratch_bytes_ = 0;  // per worker
  std::unique_ptr<std::atomic<int32_t>[]> arrived_;
  int64_t joins_ = 0;
};

}  // namespace cpumoe
