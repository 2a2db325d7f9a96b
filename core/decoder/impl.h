// Inside of a Decoder. decoder.cc builds, checks and drives it; layers.cc runs the layers.
#pragma once
#include <algorithm>
#include <span>
#include <vector>

#include "decoder/attention.h"
#include "decoder/decoder.h"
#include "decoder/views.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"

namespace cpumoe {

// Elements below which a phase costs more than it saves.
inline constexpr int64_t kRowWork = 1 << 16;

struct RopeTable {
  std::vector<float> inv_freq;
  float scale;
  AlignedBuffer buffer;  // rows x (cos, sin)
  float *cos, *sin;
};

struct Layer {
  ExpertsView experts;  // routed, or the dense block
  ExpertsView shared;   // experts == 0: none
  Router router;
  std::vector<float> correction;
  std::vector<float> sinks;      // [heads], or empty
  int rope = -1;                 // index of its table
  int64_t dense_bytes = 0;       // weights that every forward reads
  std::vector<uint8_t> touched;  // experts that this forward has read
};

struct Decoder::Impl {
  ModelSpec model;
  IsaSet isa;
  Executor& executor;
  const NormKernel* norm;
  const RopeKernel* rope;
  std::vector<Layer> layers;
  std::vector<RopeTable> tables;
  int64_t qkv_width = 0, heads_width = 0, max_experts = 0, max_top_k = 0;
  // Latent attention: the query's low rank, and all heads' absorbed queries and latent outputs.
  int64_t low_width = 0, absorbed_width = 0, latent_width = 0;

  Workspace workspace;
  Attention attention;
  RoutingPlan routed_plan, every_plan;  // every: one expert, all tokens
  AlignedBuffer x, h, qkv, attended, mixed, router_logits, score, ids, weights, zeros;
  AlignedBuffer low, absorbed, latents;
  std::vector<Piece> pieces, block_pieces;
  std::vector<LinearOp> head_ops;
  std::vector<const KvCache::Impl*> seen;
  int64_t embedded = 0;  // rows gathered by this forward

  Impl(ModelSpec spec, IsaSet isa, Executor& executor);
  int add_table(const AttentionSpec& a);
  void check(std::span<const Segment> segments);
  void reserve(int64_t rows);
  void start(int64_t rows);
  void run_layer(size_t index, int64_t rows, const Tap& tap);
  void attend(size_t index, int64_t rows);
  void mix(size_t index, int64_t rows);
  void finish_projection(const AttentionSpec& a, size_t index, int64_t begin, int64_t end);
  void append(const AttentionSpec& a, size_t index, const Piece& p, int64_t begin, int64_t end);
  void attend_latent(size_t index, int64_t rows);
  void finish_latent(const AttentionSpec& a, size_t index, int64_t begin, int64_t end);
  void attend_latent_rows(const AttentionSpec& a, size_t index, int64_t begin, int64_t end);
  void reserve_latent(int64_t rows);
  std::span<const Piece> pieces_of(int64_t begin, int64_t end);
  void route_rows(size_t index, int64_t rows);
  void feed_forward(size_t index, int64_t rows);
  void head(LogitsOf which, int64_t rows, int64_t first_row, float* logits);
  int64_t weight_bytes_read() const;

  float* data(AlignedBuffer& b) { return static_cast<float*>(b.data()); }
  const float* sinks(size_t layer) const {
    return layers[layer].sinks.empty() ? nullptr : layers[layer].sinks.data();
  }

  // Rope on the first rope_dims elements of `heads` parts, `stride` elements apart, of chunk row r.
  void rotate(const AttentionSpec& a, size_t layer, float* at, int64_t heads, int64_t stride,
              int64_t r) {
    const RopeTable& t = tables[size_t(layers[layer].rope)];
    const int64_t half = a.rope_dims / 2;
    rope->run({at, 1, heads, stride, heads * stride, a.rope_dims, t.cos + r * half,
               t.sin + r * half, half, a.rope_interleaved});
  }

  // f(begin, end) over [0, rows): in parallel when that is `work` elements per row worth a phase.
  template <class F>
  void over_rows(int64_t rows, int64_t work, F&& f) {
    if (rows * work < kRowWork || executor.threads() == 1) {
      f(int64_t(0), rows);
      return;
    }
    const int64_t block = std::max<int64_t>(1, kRowWork / 4 / work);
    executor.parallel(ceil_div(rows, block), [&](int64_t task, int) {
      f(task * block, std::min(rows, (task + 1) * block));
    });
  }

  // Rows of `size` elements, one after the other, in place.
  void norm_in_place(float* at, int64_t rows, int64_t size, const VectorView& weight, float eps) {
    NormArgs n{};
    n.x = n.out = at;
    n.rows = rows;
    n.size = n.x_stride = n.out_stride = size;
    n.weight = weight;
    n.eps = eps;
    norm->run(n);
  }

  // out rows <- norm(x rows [+ residual rows, summed into x first]).
  void norm_rows(const VectorView& weight, const float* residual, int64_t rows, float* from,
                 float* out) {
    const int64_t size = model.hidden;
    over_rows(rows, size * 2, [&](int64_t begin, int64_t end) {
      NormArgs a{};
      a.x = from + begin * size;
      a.rows = end - begin;
      a.size = a.x_stride = a.out_stride = size;
      a.weight = weight;
      a.eps = model.norm_eps;
      if (residual != nullptr) {
        a.residual = residual + begin * size;
        a.sum = from + begin * size;
      }
      a.out = out + begin * size;
      norm->run(a);
    });
  }

  MatrixView view(AlignedBuffer& b, int64_t rows, int64_t cols) {
    return {b.data(), Code::f32, rows, cols, cols};
  }
};

}  // namespace cpumoe
