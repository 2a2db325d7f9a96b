#include "moe/workspace.h"

#include <string>

#include "base/error.h"

namespace cpumoe {
namespace {

constexpr int64_t kSmallPackBytes = 128 << 10;  // some 10 us of one core: not worth a phase
constexpr int64_t kPackTaskBytes = 64 << 10;

}  // namespace

Workspace::Workspace() : impl(std::make_unique<Impl>()) {}
Workspace::~Workspace() = default;

const DotKernel* KernelCache::dot(const DotRequest& r, IsaSet isa, const char* where) {
  const size_t hash =
      size_t(r.m) * 7 + size_t(r.code) * 3 + size_t(r.layout) * 2 + size_t(r.act_class);
  Entry& entry = entries_[hash % entries_.size()];
  const DotRequest& known = entry.request;
  if (entry.kernel != nullptr && known.code == r.code && known.layout == r.layout &&
      known.act_class == r.act_class && known.m == r.m && entry.isa == isa.mask) {
    return entry.kernel;
  }
  std::string why;
  const DotKernel* kernel = select_dot(r, isa, &why);
  if (kernel == nullptr) throw Error(concat(where, ": ", why));
  entry = {r, isa.mask, kernel};
  return kernel;
}

Arena make_arena(AlignedBuffer& buffer, const std::vector<Product>& products, bool pair,
                 int workers) {
  size_t tile = 0, bias = 0, scratch = 0;
  for (const Product& p : products) {
    const int64_t n = p.slice.features * p.rows_per_feature, m = p.slice.tokens;
    const size_t values = aligned(size_t(p.slice.features) * sizeof(float));
    bias = values > bias ? values : bias;
    for (const DotKernel* k : {p.kernel, p.up}) {
      if (k == nullptr) continue;
      const DotKernel* both = p.up != nullptr && p.up->order == p.kernel->order ? p.up : nullptr;
      const size_t bytes = aligned(size_t(tile_shape(*k, both, n, m).floats()) * sizeof(float));
      tile = bytes > tile ? bytes : tile;
      const size_t own = aligned(k->scratch_bytes(n, m, p.inputs));
      scratch = own > scratch ? own : scratch;
    }
  }
  Arena a;
  a.tile2 = tile;
  a.bias = a.tile2 + (pair ? tile : 0);
  a.bias2 = a.bias + bias;
  a.scratch = a.bias2 + (pair ? bias : 0);
  a.per_worker = a.scratch + scratch + 128;  // no line (pair) shared between workers
  a.base = static_cast<char*>(buffer.reserve(a.per_worker * size_t(workers)));
  return a;
}

void run_packs(const std::vector<PackJob>& jobs, std::vector<Task>& tasks, Executor& executor) {
  int64_t bytes = 0;
  for (const PackJob& j : jobs) bytes += j.args.m * j.args.src.cols * 4;
  if (bytes <= kSmallPackBytes || executor.threads() == 1) {
    for (const PackJob& j : jobs) j.kernel->pack(j.args);
    return;
  }
  tasks.clear();
  for (size_t i = 0; i < jobs.size(); ++i) {
    const PackArgs& a = jobs[i].args;
    const int64_t step =
        round_up(max64(1, kPackTaskBytes / max64(1, a.src.cols * 4)), jobs[i].kernel->m_block);
    for (int64_t m = 0; m < a.m; m += step) {
      tasks.push_back({int32_t(i), 0, 0, int32_t(m), int32_t(min64(m + step, a.m))});
    }
  }
  executor.parallel(int64_t(tasks.size()), [&](int64_t i, int) {
    const Task& t = tasks[size_t(i)];
    PackArgs a = jobs[size_t(t.item)].args;
    a.m0 = t.m0;
    a.m1 = t.m1;
    jobs[size_t(t.item)].kernel->pack(a);
  });
}

const float* vector_values(const VectorView& v, int64_t start, int64_t step, int64_t count,
                           float* buffer) {
  if (v.data == nullptr) return nullptr;
  const bool aligned_floats =
      v.code == Code::f32 && reinterpret_cast<uintptr_t>(v.data) % alignof(float) == 0;
  if (aligned_floats && v.step * step == 1) return static_cast<const float*>(v.data) + start;
  for (int64_t i = 0; i < count; ++i) {
    buffer[i] = load_as_float(v.data, v.code, (start + i * step) * v.step);
  }
  return buffer;
}

}  // namespace cpumoe
