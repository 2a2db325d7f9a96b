// Inside of a KvCache: where each layer's heads lie. Layout of one head: kernels/attend/attend.h.
#pragma once
#include <vector>

#include "decoder/decoder.h"
#include "kernels/attend/attend.h"

namespace cpumoe {

struct LayerCache {
  int64_t kv_heads = 0, key_dim = 0, value_dim = 0;
  char* data = nullptr;                   // kv_heads times: K of the head, then V of the head
  int64_t head_bytes = 0, key_bytes = 0;  // of one head: K and V together; K alone

  char* keys(int64_t head) const { return data + head * head_bytes; }
  // Null when values are part of the keys (latents).
  char* values(int64_t head) const {
    return head_bytes == key_bytes ? nullptr : keys(head) + key_bytes;
  }
};

struct KvCache::Impl {
  void* base = nullptr;
  int64_t bytes = 0;
  int64_t length = 0, capacity = 0, bytes_per_token = 0;
  Code code = Code::f16;
  std::vector<LayerCache> layers;
  ~Impl();
};

}  // namespace cpumoe
