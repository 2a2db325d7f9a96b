#include "decoder/decoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "decoder/attention.h"
#include "decoder/views.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"

namespace cpumoe {
namespace {

constexpr int64_t kChunk = 1024;          // rows that run through the layers together
constexpr int64_t kSerialWork = 1 << 16;  // elements below which a phase costs more than it saves

struct RopeTable {
  std::vector<float> inv_freq;
  float scale;
  AlignedBuffer buffer;  // rows x (cos, sin)
  float *cos, *sin;
};

struct Layer {
  ExpertsView experts;   // routed, or the dense block
  ExpertsView shared;    // experts == 0: none
  Router router;
  std::vector<float> correction;
  int rope = -1;         // index of its table
  int64_t dense_bytes = 0;             // weights that every forward reads
  std::vector<uint8_t> touched;        // experts that this forward has read
};

int64_t bytes_of(const Linear& l) { return l.present() ? weight_bytes(l.w) : 0; }
int64_t bytes_of(const ExpertsView& e, int64_t expert) {
  const size_t i = size_t(expert);
  return weight_bytes(e.gate[i]) + (e.up.empty() ? 0 : weight_bytes(e.up[i])) +
         weight_bytes(e.down[i]);
}

template <Code C>
void gather(const WeightView& w, int32_t id, float scale, float* out) {
  for (int64_t i = 0; i < w.k; ++i) out[i] = load_as_float(w.data, C, id * w.stride + i) * scale;
}

}  // namespace

struct Decoder::Impl {
  ModelSpec model;
  IsaSet isa;
  Executor& executor;
  const NormKernel* norm;
  const RopeKernel* rope;
  std::vector<Layer> layers;
  std::vector<RopeTable> tables;
  int64_t qkv_width = 0, heads_width = 0, max_experts = 0, max_top_k = 0;

  Workspace workspace;
  Attention attention;
  RoutingPlan routed_plan, every_plan;   // every: one expert, all tokens
  AlignedBuffer x, h, qkv, attended, mixed, router_logits, score, ids, weights, zeros;
  std::vector<Piece> pieces;
  std::vector<const KvCache::Impl*> seen;
  int64_t embedded = 0;                  // rows gathered by this forward

  Impl(ModelSpec spec, IsaSet isa, Executor& executor);
  int add_table(const AttentionSpec& a);
  void check(std::span<const Segment> segments);
  void reserve(int64_t rows);
  void start(int64_t rows);
  void run_layer(size_t index, int64_t rows);
  void attend(size_t index, int64_t rows);
  void finish_projection(const AttentionSpec& a, size_t index, int64_t begin, int64_t end);
  void route_rows(size_t index, int64_t rows);
  void feed_forward(size_t index, int64_t rows);
  void head(LogitsOf which, int64_t rows, int64_t first_row, float* logits);
  int64_t weight_bytes_read() const;

  float* data(AlignedBuffer& b) { return static_cast<float*>(b.data()); }

  // f(begin, end) over [0, rows): in parallel when that is `work` elements per row worth a phase.
  template <class F>
  void over_rows(int64_t rows, int64_t work, F&& f) {
    if (rows * work < kSerialWork || executor.threads() == 1) {
      f(int64_t(0), rows);
      return;
    }
    const int64_t block = std::max<int64_t>(1, kSerialWork / 4 / work);
    executor.parallel(ceil_div(rows, block), [&](int64_t task, int) {
      f(task * block, std::min(rows, (task + 1) * block));
    });
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

Decoder::Impl::Impl(ModelSpec spec, IsaSet isa_, Executor& executor_)
    : model(std::move(spec)), isa(isa_), executor(executor_), norm(select_norm(isa_)),
      rope(select_rope(isa_)) {
  check_model(model);
  require(norm != nullptr && rope != nullptr && select_attend(Code::f32, isa) != nullptr, "decoder",
          "norm, rope and attend need a kernel for this instruction set; got mask ", isa.mask,
          ". Pass a set from usable_isa()");
  layers.resize(model.layers.size());
  for (size_t i = 0; i < layers.size(); ++i) {
    const AttentionSpec& a = model.layers[i].attn;
    const FfnSpec& f = model.layers[i].ffn;
    Layer& l = layers[i];
    qkv_width = std::max(qkv_width, (a.heads + 2 * a.kv_heads) * a.head_dim);
    heads_width = std::max(heads_width, a.heads * a.head_dim);
    l.rope = a.rope_dims > 0 ? add_table(a) : -1;
    l.dense_bytes = bytes_of(a.q) + bytes_of(a.k) + bytes_of(a.v) + bytes_of(a.o);
    if (!f.routed) {
      l.experts = block_view(f.gate, f.up, f.down, f.act);
      l.dense_bytes += bytes_of(l.experts, 0);
      continue;
    }
    l.experts = experts_view(f, model.hidden);
    l.dense_bytes += bytes_of(f.router_w) + bytes_of(f.shared_score);
    if (f.shared_down.present()) {
      l.shared = block_view(f.shared_gate, f.shared_up, f.shared_down, f.act);
      l.dense_bytes += bytes_of(l.shared, 0);
    }
    l.router = f.router;
    for (int64_t e = 0; f.correction.data != nullptr && e < f.correction.size; ++e) {
      l.correction.push_back(
          load_as_float(f.correction.data, f.correction.code, e * f.correction.step));
    }
    l.router.correction = l.correction.empty() ? nullptr : l.correction.data();
    const char* wrong = check_router(l.router);
    require(wrong == nullptr, concat("layer ", i, " ffn.router").c_str(), wrong ? wrong : "",
            "; got another correction. Check the checkpoint");
    l.touched.assign(size_t(l.experts.experts), 0);
    max_experts = std::max(max_experts, l.experts.experts);
    max_top_k = std::max<int64_t>(max_top_k, l.router.top_k);
  }
}

int Decoder::Impl::add_table(const AttentionSpec& a) {
  for (size_t i = 0; i < tables.size(); ++i) {
    if (tables[i].inv_freq == a.inv_freq && tables[i].scale == a.rope_scale) return int(i);
  }
  tables.push_back({a.inv_freq, a.rope_scale, {}, nullptr, nullptr});
  return int(tables.size()) - 1;
}

void Decoder::Impl::check(std::span<const Segment> segments) {
  seen.clear();
  for (size_t s = 0; s < segments.size(); ++s) {
    const Segment& segment = segments[s];
    require(segment.cache != nullptr && !segment.tokens.empty(), "decoder", "segment ", s,
            " must have a cache and at least one token; got ", segment.tokens.size(),
            " tokens. Leave out sequences without new tokens");
    for (size_t t = 0; t < segment.tokens.size(); ++t) {
      require(segment.tokens[t] >= 0 && segment.tokens[t] < model.vocab, "decoder",
              "token ids must be in [0, ", model.vocab, "); got ", segment.tokens[t], " as token ", t,
              " of segment ", s, ". Do tokenizer and model belong together?");
    }
    const KvCache::Impl& cache = *segment.cache->impl;
    const int64_t more = int64_t(segment.tokens.size());
    require(more <= cache.capacity - cache.length, "decoder", "the cache of segment ", s,
            " must hold ", cache.length + more, " tokens; got room for ", cache.capacity,
            ". Make the cache larger or the prompt shorter");
    bool fits = cache.layers.size() == layers.size();
    for (size_t i = 0; fits && i < layers.size(); ++i) {
      fits = cache.layers[i].kv_heads == model.layers[i].attn.kv_heads &&
             cache.layers[i].head_dim == model.layers[i].attn.head_dim;
    }
    require(fits, "decoder", "the cache of segment ", s,
            " must be made for this model; got other layers or heads. Make it from the same model");
    seen.push_back(&cache);
  }
  std::sort(seen.begin(), seen.end());
  require(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "decoder",
          "each cache may appear once in a call; got one twice. Join the tokens of one sequence");
}

void Decoder::Impl::reserve(int64_t rows) {
  const size_t n = size_t(rows), hidden = size_t(model.hidden);
  x.reserve_as<float>(n * hidden);
  h.reserve_as<float>(n * hidden);
  mixed.reserve_as<float>(n * hidden);
  qkv.reserve_as<float>(n * size_t(qkv_width));
  attended.reserve_as<float>(n * size_t(heads_width));
  router_logits.reserve_as<float>(n * size_t(max_experts));
  score.reserve_as<float>(n);
  ids.reserve_as<int32_t>(n * size_t(max_top_k));
  weights.reserve_as<float>(n * size_t(max_top_k));
  if (zeros.size() < n * sizeof(int32_t)) {
    std::fill_n(zeros.reserve_as<int32_t>(n), n, 0);
  }
  for (RopeTable& t : tables) {
    const size_t half = t.inv_freq.size();
    t.cos = t.buffer.reserve_as<float>(n * half * 2);
    t.sin = t.cos + n * half;
  }
  attention.reserve(pieces, model, executor);
}

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
        switch (model.embed.format->code) {
          case Code::f32: gather<Code::f32>(model.embed, id, model.embed_scale, out); break;
          case Code::f16: gather<Code::f16>(model.embed, id, model.embed_scale, out); break;
          case Code::bf16: gather<Code::bf16>(model.embed, id, model.embed_scale, out); break;
        }
        for (RopeTable& t : tables) {
          const int64_t half = int64_t(t.inv_freq.size());
          rope_table(p.position + r - p.row, t.inv_freq.data(), half, t.scale, t.cos + r * half,
                     t.sin + r * half);
        }
      }
    }
  });
}

// Between the projections and attention: q/k norm, clip (in Transformers' order), rope, and the new keys
// and values into the caches.
void Decoder::Impl::finish_projection(const AttentionSpec& a, size_t index, int64_t begin,
                                      int64_t end) {
  const int64_t q_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  for (const Piece& p : pieces) {
    const int64_t first = std::max(begin, p.row), last = std::min(end, p.row + p.count);
    for (int64_t r = first; r < last; ++r) {
      float* q = data(qkv) + r * qkv_width;
      float* k = q + q_width;
      if (a.qk_norm != QkNorm::none) {
        const bool whole = a.qk_norm == QkNorm::whole;
        NormArgs n{};
        n.eps = model.norm_eps;
        for (const bool of_q : {true, false}) {
          const int64_t heads = of_q ? a.heads : a.kv_heads;
          n.rows = whole ? 1 : heads;
          n.size = n.x_stride = n.out_stride = whole ? heads * a.head_dim : a.head_dim;
          n.weight = of_q ? a.q_norm : a.k_norm;
          n.out = of_q ? q : k;
          n.x = n.out;
          norm->run(n);
        }
      }
      if (a.clip_qkv > 0) {
        const float limit = a.clip_qkv;
        for (int64_t i = 0; i < q_width + 2 * kv_width; ++i) {
          q[i] = std::min(std::max(q[i], -limit), limit);
        }
      }
      if (a.rope_dims > 0) {
        const RopeTable& t = tables[size_t(layers[index].rope)];
        const int64_t half = a.rope_dims / 2;
        rope->run({q, 1, a.heads + a.kv_heads, a.head_dim, qkv_width, a.rope_dims, t.cos + r * half,
                   t.sin + r * half, half});
      }
    }
    if (first >= last) continue;
    const AttendKernel* kernel = select_attend(p.cache->code, isa);
    for (int64_t g = 0; g < a.kv_heads; ++g) {
      AppendArgs c{};
      c.k = data(qkv) + first * qkv_width + q_width + g * a.head_dim;
      c.v = c.k + kv_width;
      c.tokens = last - first;
      c.head_dim = a.head_dim;
      c.stride = qkv_width;
      c.position = p.position + first - p.row;
      c.k_cache = p.cache->layers[index].keys(g);
      c.v_cache = p.cache->layers[index].values(g);
      kernel->append(c);
    }
  }
}

void Decoder::Impl::attend(size_t index, int64_t rows) {
  const AttentionSpec& a = model.layers[index].attn;
  const int64_t q_width = a.heads * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  float* q = data(qkv);
  const LinearOp projections[] = {{&a.q.w, a.q.bias, q, qkv_width},
                                  {&a.k.w, a.k.bias, q + q_width, qkv_width},
                                  {&a.v.w, a.v.bias, q + q_width + kv_width, qkv_width}};
  linear(projections, view(h, rows, model.hidden), ActClass::fp32, isa, workspace, executor);
  over_rows(rows, (q_width + 2 * kv_width) * 4, [&](int64_t begin, int64_t end) {
    finish_projection(a, index, begin, end);
  });
  attention.run(pieces, a, index, q, qkv_width, data(attended), q_width, isa, executor);
  const LinearOp output[] = {{&a.o.w, a.o.bias, data(mixed), model.hidden}};
  linear(output, view(attended, rows, q_width), ActClass::fp32, isa, workspace, executor);
}

void Decoder::Impl::route_rows(size_t index, int64_t rows) {
  Layer& l = layers[index];
  const int64_t experts = l.experts.experts, top_k = l.router.top_k;
  std::atomic<int64_t> bad{std::numeric_limits<int64_t>::max()};
  over_rows(rows, experts * 8, [&](int64_t begin, int64_t end) {
    const int64_t token = route(l.router, data(router_logits) + begin * experts, experts, end - begin,
                                static_cast<int32_t*>(ids.data()) + begin * top_k,
                                data(weights) + begin * top_k);
    if (token < 0) return;
    int64_t lowest = bad.load();
    while (begin + token < lowest && !bad.compare_exchange_weak(lowest, begin + token)) {
    }
  });
  for (const Piece& p : pieces) {
    const int64_t at = bad.load() - p.row;
    require(at >= p.count || at < 0, "decoder", "router logits must be finite; got NaN or infinity in layer ",
            index, " for position ", p.position + at, " of segment ", p.segment,
            ". Check the weights; fp16 caches overflow beyond 65504, bf16 ones do not");
  }
  make_plan(routed_plan, static_cast<int32_t*>(ids.data()), data(weights), rows, top_k, experts,
            false);
  for (int64_t e = 0; e < experts; ++e) {
    if (routed_plan.offsets[size_t(e)] < routed_plan.offsets[size_t(e) + 1]) l.touched[size_t(e)] = 1;
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
    linear({ops, scored ? size_t(2) : size_t(1)}, view(h, rows, model.hidden), ActClass::fp32, isa,
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
  moe(args, isa, workspace, executor);
}

void Decoder::Impl::run_layer(size_t index, int64_t rows) {
  const LayerSpec& spec = model.layers[index];
  norm_rows(spec.attn_norm, nullptr, rows, data(x), data(h));
  attend(index, rows);
  norm_rows(spec.ffn_norm, data(mixed), rows, data(x), data(h));
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
  linear(ops, view(h, wanted, model.hidden), ActClass::fp32, isa, workspace, executor);
}

int64_t Decoder::Impl::weight_bytes_read() const {
  if (embedded == 0) return 0;
  const int64_t row = weight_bytes(model.embed) / model.vocab;
  int64_t bytes = std::min(embedded, model.vocab) * row + bytes_of(model.head);
  for (const Layer& l : layers) {
    bytes += l.dense_bytes;
    for (size_t e = 0; e < l.touched.size(); ++e) {
      if (l.touched[e]) bytes += bytes_of(l.experts, int64_t(e));
    }
  }
  return bytes;
}

Decoder::Decoder(ModelSpec model, IsaSet isa, Executor& executor)
    : impl_(std::make_unique<Impl>(std::move(model), isa, executor)) {}
Decoder::~Decoder() = default;

const ModelSpec& Decoder::model() const { return impl_->model; }
int64_t Decoder::last_weight_bytes() const { return impl_->weight_bytes_read(); }

// A cache's length moves only after every chunk has succeeded: until then whatever the layers wrote past
// it does not exist, so an error leaves the caches as they were.
void Decoder::forward(std::span<const Segment> segments, LogitsOf which, float* logits) {
  Impl& m = *impl_;
  m.check(segments);
  for (Layer& l : m.layers) std::fill(l.touched.begin(), l.touched.end(), 0);
  int64_t total = 0, done = 0, taken = 0;
  for (const Segment& s : segments) total += int64_t(s.tokens.size());
  m.embedded = total;
  if (total == 0) return;
  // Equal chunks: a last one of a few rows would read all weights for them.
  const int64_t chunk = ceil_div(total, ceil_div(total, kChunk));
  for (size_t s = 0; s < segments.size();) {
    int64_t rows = 0;
    m.pieces.clear();
    while (s < segments.size() && rows < chunk) {
      const KvCache::Impl* cache = segments[s].cache->impl.get();
      const int64_t length = int64_t(segments[s].tokens.size());
      const int64_t count = std::min(length - taken, chunk - rows);
      const bool last = taken + count == length;
      m.pieces.push_back({cache, segments[s].tokens.data() + taken, int64_t(s), rows, count,
                          cache->length + taken, last});
      rows += count;
      taken = last ? 0 : taken + count;
      s += last ? 1 : 0;
    }
    m.reserve(rows);
    m.start(rows);
    for (size_t i = 0; i < m.layers.size(); ++i) m.run_layer(i, rows);
    m.head(which, rows, done, logits);
    done += rows;
  }
  for (const Segment& s : segments) s.cache->impl->length += int64_t(s.tokens.size());
}

}  // namespace cpumoe
