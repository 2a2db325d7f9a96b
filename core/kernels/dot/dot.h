// Room `dot`: products of a slice of one weight matrix with the tokens of one expert.
//
//   c[n, m] = sum over k of W[n, k] * X[m, k]        n in [n0, n1), m in [m0, m1)
//
// X is read in the kernel's own activation layout, which its `pack` (gather rows of tokens) or its
// `store_mid` (a tile of the intermediate) has written: the weights stay as published, the
// intermediate is transformed ("HiNa-MoE: High-Performance, Non-Intrusive MoE Inference on CPUs
// with Matrix Engines", section 4). The tile c is fp32 scratch in the kernel's own order and goes
// to the output through the kernel's `store_out`. A caller therefore never knows how a kernel wants
// its operands, and an AMX or integer kernel is one more row of kernels.inc.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "base/types.h"
#include "formats/format.h"
#include "machine/isa.h"

namespace cpumoe {

// n_major: c[(n - n0) * c_stride + (m - m0)];  m_major: c[(m - m0) * c_stride + (n - n0)].
enum class TileOrder : uint8_t { n_major, m_major };

struct DotArgs {
  const WeightView* w;  // format, layout as the kernel's row says; any alignment of its bytes
  int64_t n0, n1;       // features to compute, n0 a multiple of n_block; n1 likewise or w->n
  const void* act;      // packed activations of all `act_m` tokens x w->k inputs
  int64_t act_m;        // tokens in `act`
  int64_t m0, m1;       // tokens to compute; m0 a multiple of m_block, m1 <= act_m
  float* c;             // tile, 64-byte aligned, overwritten; lanes past m1/n1 (up to the block)
                        // must be allocated and receive unspecified values, finite or not
  int64_t c_stride;     // elements, a multiple of 16; n_major: >= round_up(m1-m0, m_block),
                        // m_major: >= round_up(n1-n0, n_block)
  void* scratch;        // scratch_bytes(n1-n0, m1-m0, k) bytes, 64-byte aligned, uninitialised
  // Nullable: where the caller will go on reading weights of this shape afterwards. A kernel may
  // prefetch from it, never read.
  const void* next = nullptr;
};

// Gathers tokens: packed token m (m in [m0, m1)) = row index[m] of src (row m when index is null).
struct PackArgs {
  MatrixView src;        // [rows, k] hidden states, any code
  const int32_t* index;  // nullable
  int64_t m0, m1, m;     // slice to write (m0 a multiple of m_block; m1 likewise or m), all tokens
  void* dst;             // act_bytes(m, k) bytes, 64-byte aligned
};

// Stores a tile of the intermediate: feature n of token m is input k = n of the next product. n0 is
// a multiple of k_group; n1 likewise or k.
struct StoreMidArgs {
  const float* tile;
  TileOrder order;         // of the tile (that of the kernel which computed it)
  int64_t stride;          // elements
  int64_t n0, n1, m0, m1;  // what the tile covers
  int64_t m, k;            // all tokens and all inputs of dst
  void* dst;               // act_bytes(m, k) bytes
};

// Stores a tile of the output: out[index[m] * out_stride + n] (+)= scale[m] * (tile + bias[n]).
struct StoreOutArgs {
  const float* tile;  // in the kernel's own order
  int64_t stride;
  int64_t n0, n1, m0, m1;
  const float* bias;     // nullable; bias[n - n0]
  const float* scale;    // nullable; scale[m], m counted from 0 as m0 and m1 are
  const int32_t* index;  // nullable; output row of token m
  float* out;            // fp32 rows
  int64_t out_stride;    // elements
  bool accumulate;       // add to out instead of overwriting it
};

struct DotKernel {
  const char* name;
  Isa isa;
  Code code;
  Layout layout;
  ActClass act_class;
  const char* act_layout;  // name of the packed activation layout: "rows", "panels8", ...
  TileOrder order;
  int64_t m_min, m_max;  // numbers of tokens it is meant for (it is correct for any)
  int64_t m_block, n_block;
  int64_t n_slice;  // preferred features per task, a multiple of n_block; 0: sized by bytes
  // Inputs that share an activation scale: slices that store_mid is given start at multiples of it
  // and end at one or at k. 1: none do.
  int64_t k_group;
  void (*run)(const DotArgs&);
  size_t (*scratch_bytes)(int64_t n, int64_t m, int64_t k);
  size_t (*act_bytes)(int64_t m, int64_t k);
  void (*pack)(const PackArgs&);
  void (*store_mid)(const StoreMidArgs&);
  void (*store_out)(const StoreOutArgs&);
};
// Rounding, class fp32: products and sums in fp32, fused or not. Class bf16: pack and store_mid round
// activations to nearest even; products and sums are fp32, where operands, products and sums below
// 2^-126 may count as zero. Class int8: pack and store_mid
// round activations as quantize.h says; codes times codes are exact integers, or decoded weights
// times codes fp32; scales, zero points and minima enter in fp32. The order of the sum over k is
// fixed by the kernel and independent of n0, n1, m0, m1 and of the other tokens. NaN and Inf
// propagate. Reads no weight byte outside the K (rows) or N (columns) elements of each stored line
// and nothing of `act` past act_bytes. Never allocates, throws or logs.

// Every compiled-in row, best first within one (code, layout, class).
const DotKernel* dot_kernels(int* count);

// The class of activations for weights of this format and layout: the one asked for where there are
// products of it, else the format's own, else fp32. Of class int8 there are those of has_integers, of
// class bf16 those that `isa` has a kernel for.
ActClass class_for(const Format& f, Layout layout, std::optional<ActClass> asked, IsaSet isa);

struct DotRequest {
  Code code;
  Layout layout;
  ActClass act_class;
  int64_t m;  // tokens of one expert
};
// Pure: the first row that fits, or null. *why (if given) lists the candidates (rows of the code)
// before it, all of them when null, and their refusals.
const DotKernel* select_dot(const DotRequest& request, IsaSet isa, std::string* why = nullptr);

}  // namespace cpumoe
