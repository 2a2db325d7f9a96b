#include "base/types.h"
#include "kernels/probe/probe.h"

namespace cpumoe::scalar {

extern const int32_t probe_flops = 12 * 2;

uint64_t probe_read(const void* p, int64_t bytes) {
  const char* at = static_cast<const char*>(p);
  uint64_t a[8] = {};
  for (int64_t i = 0; i < bytes; i += 64) {
    uint64_t v[8];
    memcpy(v, at + i, 64);
    for (int j = 0; j < 8; ++j) a[j] |= v[j];
  }
  return a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6] | a[7];
}

float probe_fma(int64_t passes) {
  float x = 0.999999f, y = 1e-7f, c[12];
  for (int j = 0; j < 12; ++j) c[j] = float(j);
  for (int64_t i = 0; i < passes; ++i) {
    for (int j = 0; j < 12; ++j) c[j] = c[j] * x + y;
  }
  float sum = 0;
  for (int j = 0; j < 12; ++j) sum += c[j];
  return sum;
}

}  // namespace cpumoe::scalar
