#include "decoder/kv_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace cpumoe {
namespace {

// Keeps every product below in int64: 2^31 tokens x 2^31 bytes per token.
constexpr int64_t kMaxCapacity = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxTokenBytes = int64_t(1) << 31;
constexpr int64_t kSlabTokens = 128;
constexpr int64_t kHugePage = 2 << 20;  // bytes
static_assert(kSlabTokens % kScoreBlock == 0);

}  // namespace

KvCache::Impl::~Impl() {
  if (base != nullptr) munmap(base, size_t(bytes));
}

KvCache::KvCache(const ModelSpec& model, int64_t capacity, Code code)
    : impl(std::make_unique<Impl>()) {
  require(capacity >= 1 && capacity <= kMaxCapacity, "kv cache", "capacity must be in [1, ",
          kMaxCapacity, "] tokens; got ", capacity, ". Choose the longest context you need");
  const int64_t element = int64_t(code_bits(code)) / 8;
  impl->capacity = capacity;
  impl->code = code;
  const int64_t slab = std::min(capacity, kSlabTokens);
  int64_t slab_bytes = 0;
  for (const LayerSpec& spec : model.layers) {
    const AttentionSpec& a = spec.attn;
    const int64_t k = a.key_dim(), v = a.is_latent() ? 0 : a.value_dim();
    require(a.kv_heads >= 1 && k >= 1 && k < kMaxTokenBytes && a.kv_heads < kMaxTokenBytes / k,
            "kv cache", "kv_heads and head_dim must be positive and sane; got ", a.kv_heads,
            " and ", k, ". Correct the model's attention geometry");
    LayerCache layer;
    layer.kv_heads = a.kv_heads;
    layer.key_dim = k;
    layer.value_dim = a.value_dim();
    layer.key_bytes = round_up(key_elements(slab, k) * element, 64);
    layer.head_bytes = layer.key_bytes + round_up(value_elements(slab, v) * element, 64);
    impl->bytes_per_token += a.kv_heads * (k + value_stride(v)) * element;
    require(impl->bytes_per_token < kMaxTokenBytes, "kv cache",
            "one token must take less than 2 GiB; got ", impl->bytes_per_token,
            " bytes. Correct the model's attention geometry");
    slab_bytes += layer.kv_heads * layer.head_bytes;
    impl->layers.push_back(layer);
  }
  if (slab_bytes == 0) return;
  if (slab < capacity) impl->slabs = {slab, slab_bytes};
  const int64_t total = slab_bytes * ceil_div(capacity, slab) + kHugePage;
  void* base = mmap(nullptr, size_t(total), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  require(base != MAP_FAILED, "kv cache", "the system must grant ", total,
          " bytes of address space; got a refusal for capacity ", capacity,
          ". Choose a smaller capacity");
  impl->base = base;
  impl->bytes = total;
  // Advice only. Without slabs the cache is short, and a huge page perhaps longer than all of it.
  madvise(base, size_t(total), slab < capacity ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  const uintptr_t first = reinterpret_cast<uintptr_t>(base);
  char* at = static_cast<char*>(base) + (round_up(int64_t(first), kHugePage) - int64_t(first));
  for (LayerCache& layer : impl->layers) {
    layer.data = at;
    at += layer.kv_heads * layer.head_bytes;
  }
}

KvCache::~KvCache() = default;

int64_t KvCache::length() const { return impl->length; }
int64_t KvCache::capacity() const { return impl->capacity; }
int64_t KvCache::bytes_per_token() const { return impl->bytes_per_token; }

void KvCache::truncate(int64_t length) {
  require(length >= 0 && length <= impl->length, "kv cache", "truncate takes a length in [0, ",
          impl->length, "]; got ", length, ". Only tokens in the cache can be forgotten");
  impl->length = length;
}

}  // namespace cpumoe
