// Multi-head latent attention in absorbed form (LatentSpec): queries go into the latent space of
// the cache, so that a cached token costs rank + rope_dims elements whatever the number of heads.
#include <algorithm>

#include "decoder/impl.h"

namespace cpumoe {
namespace {

// Rows whose absorbed queries exist at a time: 128 heads of 512 + 64 elements take 38 MB of them,
// and their latent outputs 34 MB.
constexpr int64_t kLatentRows = 128;

}  // namespace

// The pieces' tokens among rows [begin, end), with rows counted from `begin`.
std::span<const Piece> Decoder::Impl::pieces_of(int64_t begin, int64_t end) {
  block_pieces.clear();
  for (const Piece& p : pieces) {
    const int64_t first = std::max(begin, p.row), last = std::min(end, p.row + p.count);
    if (first >= last) continue;
    Piece part = p;
    part.tokens += first - p.row;
    part.position += first - p.row;
    part.row = first - begin;
    part.count = last - first;
    block_pieces.push_back(part);
  }
  return block_pieces;
}

void Decoder::Impl::reserve_latent(int64_t rows) {
  const size_t block = size_t(std::min(rows, kLatentRows));
  low.reserve_as<float>(size_t(rows * low_width));
  absorbed.reserve_as<float>(block * size_t(absorbed_width));
  latents.reserve_as<float>(block * size_t(latent_width));
  for (int64_t begin = 0; begin < rows; begin += kLatentRows) {
    const std::span<const Piece> part = pieces_of(begin, std::min(rows, begin + kLatentRows));
    for (const LayerSpec& l : model.layers) {
      if (l.attn.is_latent()) attention.reserve(part, l.attn, executor);
    }
  }
}

// Norm of the latents, rope, and the new keys into the caches.
void Decoder::Impl::finish_latent(const AttentionSpec& a, size_t index, int64_t begin,
                                  int64_t end) {
  const int64_t nope = a.head_dim - a.rope_dims;
  for (const Piece& p : pieces) {
    const int64_t first = std::max(begin, p.row), last = std::min(end, p.row + p.count);
    for (int64_t r = first; r < last; ++r) {
      float* q = data(qkv) + r * qkv_width;
      float* c = q + a.heads * a.head_dim;
      norm_in_place(c, 1, a.latent.rank, a.latent.norm, a.latent.norm_eps);
      if (a.rope_dims == 0) continue;
      rotate(a, index, q + nope, a.heads, a.head_dim, r);
      rotate(a, index, c + a.latent.rank, 1, a.rope_dims, r);
    }
    append(a, index, p, first, last);
  }
}

void Decoder::Impl::attend_latent(size_t index, int64_t rows) {
  const AttentionSpec& a = model.layers[index].attn;
  float* q = data(qkv);
  const LinearOp of_q{&a.q.w, a.q.bias, q, qkv_width};
  const LinearOp of_c{&a.k.w, a.k.bias, q + a.heads * a.head_dim, qkv_width};
  const Linear& q_a = a.latent.q_a;
  const LinearOp of_low{&q_a.w, q_a.bias, data(low), q_a.w.n};
  const LinearOp from_hidden[] = {q_a.present() ? of_low : of_q, of_c};
  linear(from_hidden, view(h, rows, model.hidden), model.act_class, isa, workspace, executor);
  if (q_a.present()) {
    over_rows(rows, q_a.w.n * 2, [&](int64_t begin, int64_t end) {
      norm_in_place(data(low) + begin * q_a.w.n, end - begin, q_a.w.n, a.latent.q_norm,
                    a.latent.norm_eps);
    });
    linear({&of_q, 1}, view(low, rows, q_a.w.n), model.act_class, isa, workspace, executor);
  }
  over_rows(rows, (a.heads * a.rope_dims + a.key_dim()) * 4,
            [&](int64_t begin, int64_t end) { finish_latent(a, index, begin, end); });
  for (int64_t begin = 0; begin < rows; begin += kLatentRows) {
    attend_latent_rows(a, index, begin, std::min(rows, begin + kLatentRows));
  }
}

void Decoder::Impl::attend_latent_rows(const AttentionSpec& a, size_t index, int64_t begin,
                                       int64_t end) {
  const int64_t rows = end - begin, key = a.key_dim(), rank = a.latent.rank;
  const int64_t nope = a.head_dim - a.rope_dims, q_width = a.heads * key;
  const int64_t value = a.latent.value_dim, latent_row = a.heads * rank;
  const float* q = data(qkv) + begin * qkv_width;
  float* to = data(absorbed);
  over_rows(rows, a.heads * a.rope_dims, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      for (int64_t i = 0; i < a.heads; ++i) {
        std::copy_n(q + r * qkv_width + i * a.head_dim + nope, a.rope_dims,
                    to + r * q_width + i * key + rank);
      }
    }
  });
  head_ops.clear();
  for (int64_t i = 0; i < a.heads; ++i) {
    head_ops.push_back({&a.latent.k_up[size_t(i)], {}, to + i * key, q_width, i * a.head_dim});
  }
  linear(head_ops, {q, Code::f32, rows, a.heads * a.head_dim, qkv_width}, model.act_class, isa,
         workspace, executor);
  attention.run(pieces_of(begin, end), a, sinks(index), index, to, q_width, data(latents),
                latent_row, isa, executor);
  float* const out = data(attended) + begin * a.mixed_dim();
  head_ops.clear();
  for (int64_t i = 0; i < a.heads; ++i) {
    head_ops.push_back({&a.latent.v_up[size_t(i)], {}, out + i * value, a.mixed_dim(), i * rank});
  }
  linear(head_ops, view(latents, rows, latent_row), model.act_class, isa, workspace, executor);
}

}  // namespace cpumoe
