// The measured limits of this machine. Short, so that a benchmark can take one beside each cell.
#pragma once
#include "base/buffer.h"
#include "kernels/probe/probe.h"
#include "machine/executor.h"

namespace cpumoe {

class Probe {
 public:
  // bytes: size of the buffer that is read, several times the last cache; 0: 1 GiB, or a quarter of
  // the available memory where that is less. Throws Error below 1 MiB.
  explicit Probe(const Machine& machine, int64_t bytes = 0);

  int64_t bytes() const { return bytes_; }
  // Reads the buffer with all workers, once or for at least 10 ms. The first call also writes it.
  double read_gb_per_s(Executor& executor);
  // fp32 multiplies and adds of all workers together, over 20 ms.
  double fma_gflop_per_s(Executor& executor);

 private:
  void touch(Executor& executor);
  const ProbeKernel* kernel_;
  int64_t bytes_;
  AlignedBuffer buffer_;
  bool touched_ = false;
};

}  // namespace cpumoe
