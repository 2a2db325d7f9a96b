#include "decoder/decoder.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "decoder/impl.h"

namespace cpumoe {
namespace {

constexpr int64_t kChunk = 1024;  // rows that run through the layers together

int64_t bytes_of(const Linear& l) { return l.present() ? weight_bytes(l.w) : 0; }
int64_t bytes_of(const ExpertsView& e, int64_t expert) {
  const size_t i = size_t(expert);
  return weight_bytes(e.gate[i]) + (e.up.empty() ? 0 : weight_bytes(e.up[i])) +
         weight_bytes(e.down[i]);
}

std::vector<float> as_floats(const VectorView& v) {
  std::vector<float> out;
  for (int64_t i = 0; v.data != nullptr && i < v.size; ++i) {
    out.push_back(load_as_float(v.data, v.code, i * v.step));
  }
  return out;
}

// What q, k and v give together.
int64_t projected_width(const AttentionSpec& a) {
  const int64_t q = a.heads * a.head_dim;
  return a.is_latent() ? q + a.key_dim() : q + 2 * a.kv_heads * a.head_dim;
}

}  // namespace

Decoder::Impl::Impl(ModelSpec spec, IsaSet isa_, Executor& executor_)
    : model(std::move(spec)),
      isa(isa_),
      executor(executor_),
      norm(select_norm(isa_)),
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
    qkv_width = std::max(qkv_width, projected_width(a));
    heads_width = std::max(heads_width, a.mixed_dim());
    l.rope = a.rope_dims > 0 ? add_table(a) : -1;
    l.dense_bytes = bytes_of(a.q) + bytes_of(a.k) + bytes_of(a.v) + bytes_of(a.o);
    l.sinks = as_floats(a.sinks);
    if (a.is_latent()) {
      low_width = std::max(low_width, a.latent.q_a.w.n);
      absorbed_width = std::max(absorbed_width, a.heads * a.key_dim());
      latent_width = std::max(latent_width, a.heads * a.latent.rank);
      l.dense_bytes += bytes_of(a.latent.q_a);
      for (const WeightView& w : a.latent.k_up) l.dense_bytes += weight_bytes(w);
      for (const WeightView& w : a.latent.v_up) l.dense_bytes += weight_bytes(w);
    }
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
    l.correction = as_floats(f.correction);
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
              "token ids must be in [0, ", model.vocab, "); got ", segment.tokens[t], " as token ",
              t, " of segment ", s, ". Do tokenizer and model belong together?");
    }
    const KvCache::Impl& cache = *segment.cache->impl;
    const int64_t more = int64_t(segment.tokens.size());
    require(more <= cache.capacity - cache.length, "decoder", "the cache of segment ", s,
            " must hold ", cache.length + more, " tokens; got room for ", cache.capacity,
            ". Make the cache larger or the prompt shorter");
    bool fits = cache.layers.size() == layers.size();
    for (size_t i = 0; fits && i < layers.size(); ++i) {
      fits = cache.layers[i].kv_heads == model.layers[i].attn.kv_heads &&
             cache.layers[i].key_dim == model.layers[i].attn.key_dim() &&
             cache.layers[i].value_dim == model.layers[i].attn.value_dim();
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
    int32_t* zero = zeros.reserve_as<int32_t>(n);
    std::fill_n(zero, zeros.size() / sizeof(int32_t), 0);
  }
  for (RopeTable& t : tables) {
    const size_t half = t.inv_freq.size();
    t.cos = t.buffer.reserve_as<float>(n * half * 2);
    t.sin = t.cos + n * half;
  }
  if (absorbed_width > 0) reserve_latent(rows);
  for (const LayerSpec& l : model.layers) {
    if (!l.attn.is_latent()) attention.reserve(pieces, l.attn, executor);
  }
  attention.reset();
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

// A cache's length moves only after every chunk has succeeded: until then whatever the layers wrote
// past it does not exist, so an error leaves the caches as they were.
void Decoder::forward(std::span<const Segment> segments, LogitsOf which, float* logits,
                      const Tap& tap) {
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
    for (size_t i = 0; i < m.layers.size(); ++i) m.run_layer(i, rows, tap);
    m.head(which, rows, done, logits);
    done += rows;
  }
  for (const Segment& s : segments) s.cache->impl->length += int64_t(s.tokens.size());
}

}  // namespace cpumoe
