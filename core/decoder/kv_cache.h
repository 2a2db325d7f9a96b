// Inside of a KvCache: where each layer's heads lie. Layout of one head: kernels/attend/attend.h.
#pragma once
#include <vector>

#include "decoder/decoder.h"
#include "kernels/attend/attend.h"

namespace cpumoe {

struct LayerCache {
  int64_t kv_heads = 0, key_dim = 0, value_dim = 0;
  char* data = nullptr;  // in slab 0; kv_heads times: K of the head, then V of the head
  int64_t head_bytes = 0, key_bytes = 0;  // of one head and slab: K and V together; K alone

  char* keys(int64_t head) const { return data + head * head_bytes; }
  // Null when values are part of the keys (latents).
  char* values(int64_t head) const {
    return head_bytes == key_bytes ? nullptr : keys(head) + key_bytes;
  }
};

struct KvCache::Impl {
  void* base = nullptr;  // of the mapping, as are the bytes
  int64_t bytes = 0;
  int64_t length = 0, capacity = 0, bytes_per_token = 0;
  Code code = Code::f16;
  // A slab holds all layers and heads of some tokens, so that a short text lies on few huge pages:
  // attention over 512 keys of 4 heads takes 70 us with them and 92 us with small ones (Zen 4).
  Slabs slabs;
  std::vector<LayerCache> layers;
  ~Impl();
};

}  // namespace cpumoe
