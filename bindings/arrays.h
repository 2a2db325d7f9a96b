// One way in for every array of Python: DLPack or the buffer protocol, CPU only, never copied.
// Python's side of the border is src/cpumoe/_arrays.py, which turns what neither protocol can name
// (numpy arrays of ml_dtypes.bfloat16) into a pair (array of raw units, format name).
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/types.h"
#include "formats/format.h"

namespace cpumoe_py {

// A checked view of somebody's array. `owner` holds a reference to the exporter, so the memory
// lives as long as the Array (or a copy of `owner`) does. Destroy it with the GIL held.
struct Array {
  nanobind::ndarray<nanobind::ro> owner;
  const void* data = nullptr;
  std::string dtype;                       // "fp32" "fp16" "bf16" "int32" "int64" "uint8" ...
  const cpumoe::Format* format = nullptr;  // row of formats.inc with that name; null for integers
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // elements; any value where the extent is 1 or the array is empty

  size_t ndim() const { return shape.size(); }
  bool empty() const;
  std::string describe() const;  // "fp32[4, 8]", with the strides when it is not contiguous
};

// `source`: an array, or a pair (array of raw units, format name). `where` and `name` begin the
// error message ("moe", "x"). Throws cpumoe::Error when it is no array, or not in CPU memory. With
// `writable`, a read-only array is refused too.
Array take_array(nanobind::handle source, const char* where, const std::string& name,
                 bool writable = false);

// Refuse with one message form. Shape: -1 stands for any extent, printed as its letter in `letters`
// ("T" "H"): require_shape(x, {-1, hidden}, "moe", "x", "[T, H]").
void require_shape(const Array& a, const std::vector<int64_t>& shape, const char* where,
                   const std::string& name, const char* letters);
// fp32, fp16 or bf16.
void require_float(const Array& a, const char* where, const std::string& name);

// Views of a checked array: unit step along the last dimension, rows that do not overlap.
// matrix_view collapses the leading dimensions into rows; weight_view is W[N, K] in `layout`;
// `index` chooses along the first dimension.
cpumoe::MatrixView matrix_view(const Array& a, const char* where, const std::string& name);
cpumoe::VectorView vector_view(const Array& a, const char* where, const std::string& name);
cpumoe::WeightView weight_view(const Array& a, cpumoe::Layout layout, const char* where,
                               const std::string& name);
cpumoe::WeightView weight_view(const Array& a, int64_t index, cpumoe::Layout layout,
                               const char* where, const std::string& name);
cpumoe::VectorView vector_view(const Array& a, int64_t index, const char* where,
                               const std::string& name);

// The bytes an array spans, from its first to behind its last element.
using Extent = std::pair<const char*, const char*>;
Extent extent(const Array& a);

// "auto" (absent: each format's own), "fp32" or "int8".
std::optional<cpumoe::ActClass> take_act_class(const std::string& name, const char* where);
// "rows" or "columns".
cpumoe::Layout take_layout(const std::string& layout, const char* where);

}  // namespace cpumoe_py
