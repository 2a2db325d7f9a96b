#include "decoder/attention.h"

#include <algorithm>
#include <array>

namespace cpumoe {
namespace {

// Query rows of a task: one conversion of K and V serves them all.
constexpr int64_t kBlockRows = 64;
constexpr int64_t kSliceHeads = 32;  // query heads of a task at most: few tokens still make tasks
constexpr int64_t kPieceTasks = 64;  // parts are cut until a piece has about as many tasks ...
constexpr int64_t kPartKeys = 256;   // ... but no shorter than this
// Multiply-adds below which a phase costs more than it saves.
constexpr int64_t kSerialWork = 1 << 17;
constexpr int64_t kMaxLanes = 64;

int64_t first_key(int64_t position, int64_t window) {
  return window > 0 ? std::max<int64_t>(0, position - window + 1) / kScoreBlock * kScoreBlock : 0;
}

struct Slices {
  int64_t heads, per_kv_head;  // query heads of each but the last
  explicit Slices(const AttentionSpec& a)
      : heads(std::min(a.heads / a.kv_heads, kSliceHeads)),
        per_kv_head(ceil_div(a.heads / a.kv_heads, heads)) {}
};

}  // namespace

Attention::Totals Attention::cut(std::span<const Piece> pieces, const AttentionSpec& spec) {
  Totals total{};
  cuts_.clear();
  const Slices slices(spec);
  const int64_t slice_count = spec.kv_heads * slices.per_kv_head;
  for (const Piece& p : pieces) {
    Cut c;
    c.block_tokens = std::min(p.count, std::max<int64_t>(1, kBlockRows / slices.heads));
    c.blocks = ceil_div(p.count, c.block_tokens);
    const int64_t last = p.position + p.count, keys = last - first_key(last - 1, spec.window);
    c.parts = std::min(ceil_div(keys, kPartKeys), kPieceTasks / (c.blocks * slice_count));
    c.parts = std::max<int64_t>(c.parts, 1);
    c.first_task = total.tasks;
    c.first_join = total.joins;
    c.first_state = total.states;
    const int64_t joins = c.blocks * slice_count;
    total.tasks += joins * c.parts;
    total.work += p.count * spec.heads * keys * (spec.key_dim() + spec.value_dim());
    if (c.parts > 1) {
      total.joins += joins;
      total.states +=
          joins * c.parts * c.block_tokens * slices.heads * state_stride(spec.value_dim());
    }
    cuts_.push_back(c);
  }
  return total;
}

void Attention::reserve(std::span<const Piece> pieces, const AttentionSpec& spec,
                        Executor& executor) {
  const Totals t = cut(pieces, spec);
  const int64_t rows = std::max(kBlockRows, Slices(spec).heads);
  const int64_t bytes = attend_scratch_bytes(rows, spec.key_dim(), spec.value_dim());
  scratch_bytes_ = std::max(scratch_bytes_, round_up(bytes, 64));
  scratch_.reserve(size_t(scratch_bytes_ * executor.threads()));
  states_.reserve_as<float>(size_t(t.states));
  if (t.joins > joins_) {
    arrived_ = std::make_unique<std::atomic<int32_t>[]>(size_t(t.joins));
    joins_ = t.joins;
  }
}

void Attention::reset() {
  for (int64_t i = 0; i < joins_; ++i) arrived_[size_t(i)].store(0, std::memory_order_relaxed);
}

void Attention::run(std::span<const Piece> pieces, const AttentionSpec& spec, const float* sinks,
                    size_t layer, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                    IsaSet isa, Executor& executor) {
  const Totals total = cut(pieces, spec);
  const Slices slices(spec);
  const int64_t group = spec.heads / spec.kv_heads,
                slice_count = spec.kv_heads * slices.per_kv_head;
  const int64_t key_dim = spec.key_dim(), value_dim = spec.value_dim();
  float* states = static_cast<float*>(states_.data());

  const auto task = [&](int64_t number, int worker) {
    // The piece of this task: the last one that starts at or before it.
    const auto after = std::upper_bound(cuts_.begin(), cuts_.end(), number,
                                        [](int64_t n, const Cut& c) { return n < c.first_task; });
    const size_t i = size_t(after - cuts_.begin()) - 1;
    const Piece& p = pieces[i];
    const Cut& c = cuts_[i];
    // Late blocks see the most keys: they go first.
    const int64_t local = number - c.first_task, part = local % c.parts;
    const int64_t join = local / c.parts, slice = join % slice_count;
    const int64_t block = c.blocks - 1 - join / slice_count;
    const int64_t from = block * c.block_tokens;
    // Query heads [first, first + a.group) share KV head `kv`.
    const int64_t kv = slice / slices.per_kv_head, within = slice % slices.per_kv_head;
    const int64_t first = kv * group + within * slices.heads;
    const LayerCache& cache = p.cache->layers[layer];

    AttendArgs a{};
    a.tokens = std::min(c.block_tokens, p.count - from);
    a.group = std::min(slices.heads, group - within * slices.heads);
    a.head_dim = key_dim;
    a.value_dim = value_dim;
    a.position = p.position + from;
    a.q = q + (p.row + from) * q_stride + first * key_dim;
    a.q_stride = q_stride;
    a.out = out + (p.row + from) * out_stride + first * value_dim;
    a.out_stride = out_stride;
    a.k_cache = cache.keys(kv);
    a.v_cache = cache.values(kv);
    a.slabs = p.cache->slabs;
    a.window = spec.window;
    a.scale = spec.scale;
    a.sinks = sinks != nullptr && part == 0 ? sinks + first : nullptr;
    a.scratch = static_cast<char*>(scratch_.data()) + worker * scratch_bytes_;
    const int64_t begin = first_key(a.position, spec.window), end = a.position + a.tokens;
    const int64_t step = round_up(ceil_div(end - begin, c.parts), kScoreBlock);
    a.key0 = std::min(begin + part * step, round_up(end, kScoreBlock));
    a.key1 = std::min(a.key0 + step, end);
    if (c.blocks == 1 && part == c.parts - 1 && slice + 1 < slice_count) {
      const int64_t element = int64_t(code_bits(p.cache->code)) / 8;
      a.next = static_cast<const char*>(cache.keys((slice + 1) / slices.per_kv_head)) +
               slab_shift(a.slabs, begin) + within_slab(a.slabs, begin) * key_dim * element;
    }
    float* const finished = a.out;
    const int64_t state = a.tokens * a.group * state_stride(value_dim);
    float* const first_state =
        states + c.first_state +
        join * c.parts * (c.block_tokens * slices.heads) * state_stride(value_dim);
    if (c.parts > 1) {
      a.out = nullptr;
      a.state = first_state + part * state;
    }
    select_attend(p.cache->code, isa)->run(a);
    if (c.parts == 1) return;
    std::atomic<int32_t>& arrived = arrived_[size_t(c.first_join + join)];
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < c.parts) return;
    arrived.store(0, std::memory_order_relaxed);
    attend_merge({first_state, c.parts, a.tokens, a.group, value_dim, finished, out_stride});
  };
  if (total.work < kSerialWork) {
    for (int64_t t = 0; t < total.tasks; ++t) task(t, 0);
  } else {
    // One block of query tokens: tasks in order walk through the keys in order.
    std::array<int64_t, kMaxLanes> ends;
    const int64_t lanes = std::min<int64_t>(executor.at_once(), kMaxLanes);
    for (int64_t i = 0; i < lanes; ++i) ends[size_t(i)] = total.tasks * (i + 1) / lanes;
    const bool decode = std::all_of(cuts_.begin(), cuts_.end(),
                                    [](const Cut& c) { return c.blocks == 1; });
    decode ? executor.parallel({ends.data(), size_t(lanes)}, task)
           : executor.parallel(total.tasks, task);
  }
}

}  // namespace cpumoe
