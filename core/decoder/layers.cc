// The layers of a chunk of rows, first to last.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "base/error.h"
#include "decoder/impl.h"

namespace cpumoe {
// Embedding rows, and cos and sin of every position.
void Decoder::Impl::start(int64_t rows) {
  int64_t work = model.hidden;
  for (const RopeTable& t : tables) work += 64 * int64_t(t.inv_freq.size());
  over_rows(rows, work, [&](int64_t begin, int64_t end) {
    for (const Piece& p : pieces) {
      const int64_t last = std::min(end, p.row + p.count);
      for (int64_t r = std::max(begin, p.row); r < last; ++r) {
        float* out = data(x) + r * model.hidden;
        const int32_t id = p.tokens[r - p.row];
        decode_line(model.embed, id, 0, model.hidden, out);
        for (int64_t i = 0; model.embed_scale != 1 && i < model.hidden; ++i)
          out[i] *= model.embed_scale;
        for (RopeTable& t : tables) {
          const int64_t half = int64_t(t.inv_freq.size());
          rope_table(p.position + r - p.row, t.inv_freq.data(), half, t.scale, t.cos + r * half,
                     t.sin + r * half);
        }
      }
    }
  });
}

// Tokens [begin, end) of the chunk, all of piece p: their new keys and values into the cache. They
// stand behind q in the rows of qkv.
void Decoder::Impl::append(const AttentionSpec& a, size_t index, const Piece& p, int64_t begin,
                           int64_t end) {
  if (begin >= end) return;
  const LayerCache& cache = p.cache->layers[index];
  AppendArgs c{};
  c.tokens = end - begin;
  c.head_dim = cache.key_dim;
  c.value_dim = cache.value_dim;
  c.stride = qkv_width;
  c.position = p.position + begin - p.row;
  const float* keys = data(qkv) + begin * qkv_width + a.heads * a.head_dim;
  for (int64_t g = 0; g < a.kv_heads; ++g) {
    c.k = keys + g * cache.key_dim;
    c.v = a.is_latent() ? nullptr : keys + (a.kv_heads + g) * a.head_dim;
    c.k_cache = cache.keys(g);
    c.v_cache = cache.values(g);
    c.slabs = p.cache->slabs;
    select_attend(p.cache->code, isa)->append(c);
  }
}

// Between the projections and attention: q/k norm, clip (in Transformers' order), rope, and the new
// keys and values into the caches.
void Decoder::Impl::finish_projection(const AttentionSpec& a, size_t index, int64_t begin,
                                      int64_t end) {
  const int64_t q_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  for (const Piece& p : pieces) {
    const int64_t first = std::max(begin, p.row), last = std::min(end, p.row + p.count);
    for (int64_t r = first; r < last; ++r) {
      float* q = data(qkv) + r * qkv_width;
      float* k = q + q_width;
      if (a.qk_norm == QkNorm::per_head) {
        norm_in_place(q, a.heads, a.head_dim, a.q_norm, model.norm_eps);
        norm_in_place(k, a.kv_heads, a.head_dim, a.k_norm, model.norm_eps);
      } else if (a.qk_norm == QkNorm::whole) {
        norm_in_place(q, 1, q_width, a.q_norm, model.norm_eps);
        norm_in_place(k, 1, kv_width, a.k_norm, model.norm_eps);
      }
      if (a.clip_qkv > 0) {
        const float limit = a.clip_qkv;
        for (int64_t i = 0; i < q_width + 2 * kv_width; ++i) {
          q[i] = std::min(std::max(q[i], -limit), limit);
        }
      }
      if (a.rope_dims > 0) rotate(a, index, q, a.heads + a.kv_heads, a.head_dim, r);
    }
    append(a, index, p, first, last);
  }
}

void Decoder::Impl::attend(size_t index, int64_t rows) {
  const AttentionSpec& a = model.layers[index].attn;
  const int64_t q_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  float* q = data(qkv);
  const LinearOp projections[] = {{&a.q.w, a.q.bias, q, qkv_width},
                                  {&a.k.w, a.k.bias, q + q_width, qkv_width},
                                  {&a.v.w, a.v.bias, q + q_width + kv_width, qkv_width}};
  linear(projections, view(h, rows, model.hidden), model.act_class, isa, workspace, executor);
  over_rows(rows, (q_width + 2 * kv_width) * 4,
            [&](int64_t begin, int64_t end) { finish_projection(a, index, begin, end); });
  attention.run(pieces, a, sinks(index), index, q, qkv_width, data(attended), q_width, isa,
                executor);
}

// mixed <- o applied to what attention gave.
void Decoder::Impl::mix(size_t index, int64_t rows) {
  const AttentionSpec& a = model.layers[index].attn;
  const LinearOp output[] = {{&a.o.w, a.o.bias, data(mixed), model.hidden}};
  linear(output, view(attended, rows, a.mixed_dim()), model.act_class, isa, workspace, executor);
}

void Decoder::Impl::route_rows(size_t index, int64_t rows) {
  Layer& l = layers[index];
  const int64_t experts = l.experts.experts, top_k = l.router.top_k;
  std::atomic<int64_t> bad{rows};  // the first row with a bad logit, `rows` when there is none
  over_rows(rows, experts * 8, [&](int64_t begin, int64_t end) {
    const int64_t token =
        route(l.router, data(router_logits) + begin * experts, experts, end - begin,
              static_cast<int32_t*>(ids.data()) + begin * top_k, data(weights) + begin * top_k);
    if (token < 0) return;
    int64_t lowest = bad.load();
    while (begin + token < lowest && !bad.compare_exchange_weak(lowest, begin + token)) {
    }
  });
  for (const Piece& p : pieces) {
    const int64_t at = bad.load() - p.row;
    require(at >= p.count || at < 0, "decoder",
            "router logits must be finite; got NaN or infinity in layer ", index, " for position ",
            p.position + at, " of segment ", p.segment,
            ". Check the weights; fp16 caches overflow beyond 65504, bf16 ones do not");
  }
  make_plan(routed_plan, static_cast<int32_t*>(ids.data()), data(weights), rows, top_k, experts,
            false);
  for (int64_t e = 0; e < experts; ++e) {
    if (routed_plan.offsets[size_t(e)] < routed_plan.offsets[size_t(e) + 1])
      l.touched[size_t(e)] = 1;
  }
}

// x += feed-forward(h). The shared expert is a second block in the same phases.
void Decoder::Impl::feed_forward(size_t index, int64_t rows) {
  const FfnSpec& f = model.layers[index].ffn;
  Layer& l = layers[index];
  MoeBlock blocks[2];
  size_t count = 0;
  const bool scored = f.routed && f.shared_score.present();
  if (f.routed) {
    const LinearOp ops[] = {
        {&f.router_w.w, f.router_w.bias, data(router_logits), l.experts.experts},
        {&f.shared_score.w, f.shared_score.bias, data(score), 1}};
    linear({ops, scored ? size_t(2) : size_t(1)}, view(h, rows, model.hidden), model.act_class, isa,
           workspace, executor);
    route_rows(index, rows);
    blocks[count++] = {&l.experts, &routed_plan};
  }
  if (!f.routed || l.shared.experts > 0) {
    float* weight = data(score);
    for (int64_t r = 0; r < rows; ++r) weight[r] = scored ? 1 / (1 + std::exp(-weight[r])) : 1.0f;
    make_plan(every_plan, static_cast<int32_t*>(zeros.data()), weight, rows, 1, 1, false);
    blocks[count++] = {f.routed ? &l.shared : &l.experts, &every_plan};
  }
  MoeArgs args{};
  args.blocks = {blocks, count};
  args.x = view(h, rows, model.hidden);
  args.out = data(x);
  args.out_code = Code::f32;
  args.out_stride = model.hidden;
  args.accumulate = true;
  args.act_class = model.act_class;
  args.checked = true;  // by check_model
  moe(args, isa, workspace, executor);
}

void Decoder::Impl::run_layer(size_t index, int64_t rows, const Tap& tap) {
  const LayerSpec& spec = model.layers[index];
  const auto show = [&](Site site, AlignedBuffer& b, int64_t width) {
    if (tap) tap(int64_t(index), site, data(b), rows, width);
  };
  norm_rows(spec.attn_norm, nullptr, rows, data(x), data(h));
  show(Site::attention, h, model.hidden);
  if (spec.attn.is_latent()) {
    attend_latent(index, rows);
  } else {
    attend(index, rows);
  }
  show(Site::output, attended, spec.attn.mixed_dim());
  mix(index, rows);
  norm_rows(spec.ffn_norm, data(mixed), rows, data(x), data(h));
  show(Site::feed_forward, h, model.hidden);
  feed_forward(index, rows);
}

// Logits of the wanted rows. `first_row` counts tokens (all) or is unused (last).
void Decoder::Impl::head(LogitsOf which, int64_t rows, int64_t first_row, float* logits) {
  int64_t wanted = rows, to = first_row;
  if (which == LogitsOf::all) {
    norm_rows(model.final_norm, nullptr, rows, data(x), data(h));
  } else {
    wanted = 0;
    for (const Piece& p : pieces) {
      if (!p.last) continue;
      if (wanted == 0) to = p.segment;
      norm_rows(model.final_norm, nullptr, 1, data(x) + (p.row + p.count - 1) * model.hidden,
                data(h) + wanted++ * model.hidden);
    }
    if (wanted == 0) return;
  }
  const LinearOp ops[] = {{&model.head.w, model.head.bias, logits + to * model.vocab, model.vocab}};
  linear(ops, view(h, wanted, model.hidden), model.act_class, isa, workspace, executor);
}

}  // namespace cpumoe
