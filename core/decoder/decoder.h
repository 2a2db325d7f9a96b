// The whole forward pass, prefill and decode, as one native call over ragged sequences.
#pragma once
#include <functional>
#include <memory>
#include <span>

#include "decoder/spec.h"
#include "machine/executor.h"
#include "moe/moe.h"

namespace cpumoe {

// Keys and values of one sequence. One reservation of virtual memory for `capacity` tokens, touched
// on demand (so RSS grows with use; with a capacity beyond 128 tokens in steps of as many, in huge
// pages). code: f32, f16 or bf16. One forward() at a time may use it.
class KvCache {
 public:
  KvCache(const ModelSpec& model, int64_t capacity, Code code);
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;
  int64_t length() const;
  int64_t capacity() const;
  void truncate(int64_t length);   // forget tokens from `length` on
  int64_t bytes_per_token() const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

struct Segment {                   // new tokens of one sequence
  KvCache* cache;
  std::span<const int32_t> tokens; // at least one
};

enum class LogitsOf : uint8_t { last, all };  // of each segment

// What a layer's linear maps are applied to: q, k, v (or what makes them); o; router and experts.
enum class Site : uint8_t { attention, output, feed_forward };
// Sees fp32 rows [rows, width] of successive tokens during forward(), site by site. May throw.
using Tap = std::function<void(int64_t layer, Site site, const float* x, int64_t rows,
                               int64_t width)>;

class Decoder {
 public:
  Decoder(ModelSpec model, IsaSet isa, Executor& executor);  // the executor must outlive it
  ~Decoder();
  const ModelSpec& model() const;
  // Appends every segment's tokens to its cache and writes fp32 logits [rows, vocab], rows = number
  // of segments (last) or of tokens (all). Throws Error before changing any cache when: a token id
  // is out of range, a cache would overflow, a cache appears twice or has another geometry. NaN/Inf
  // router logits throw too; the caches are then as long as they were. Prompts longer than an
  // internal chunk are processed in chunks. Results do not depend on the number of threads.
  void forward(std::span<const Segment> segments, LogitsOf which, float* logits,
               const Tap& tap = {});
  // Bytes of weights that the last forward() read at least once (each touched expert counted once).
  int64_t last_weight_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace cpumoe
