#include "arrays.h"

#include <nanobind/stl/string.h>

#include "base/error.h"
#include "bindings.h"
#include "kernels/dot/dot.h"

namespace nb = nanobind;

namespace cpumoe_py {
namespace {

using cpumoe::Code;
using cpumoe::concat;
using cpumoe::Error;
using cpumoe::require;

std::string dtype_text(nb::dlpack::dtype d) {
  const std::string bits = std::to_string(int(d.bits) * int(d.lanes));
  switch (nb::dlpack::dtype_code(d.code)) {
    case nb::dlpack::dtype_code::Float:
      return "fp" + bits;
    case nb::dlpack::dtype_code::Bfloat:
      return "bf" + bits;
    case nb::dlpack::dtype_code::Int:
      return "int" + bits;
    case nb::dlpack::dtype_code::UInt:
      return "uint" + bits;
    case nb::dlpack::dtype_code::Bool:
      return "bool";
    case nb::dlpack::dtype_code::Complex:
      return "complex" + bits;
    default:
      return "dlpack type " + std::to_string(d.code) + " of " + bits + " bits";
  }
}

std::string type_text(nb::handle h) {
  return nb::cast<std::string>(nb::str(nb::type_name(h.type())));
}

template <class... A>
[[noreturn]] void refuse(const char* where, const A&... message) {
  throw Error(concat(where, ": ", message...));
}

// Says why an object that both protocols refused was refused.
[[noreturn]] void refuse_source(nb::handle source, const char* where, const std::string& name,
                                bool writable) {
  const std::string type = type_text(source);
  if (!nb::ndarray_check(source)) {
    refuse(where, name, " must be an array that speaks DLPack or the buffer protocol; got ", type,
           ". Convert it first, for example with numpy.asarray");
  }
  if (nb::hasattr(source, "__dlpack_device__")) {
    try {
      nb::object device = source.attr("__dlpack_device__")();
      const int kind = nb::cast<int>(device[0]);
      if (kind != nb::device::cpu::value) {
        refuse(where, name, " must be in CPU memory; got DLPack device type ", kind,
               ". Move it to the CPU first");
      }
    } catch (nb::python_error&) {  // the exporter cannot say: the general message follows
    } catch (nb::cast_error&) {
    }
  }
  const nb::object dtype = nb::getattr(source, "dtype", nb::none());
  if (nb::hasattr(dtype, "isnative") && !nb::cast<bool>(dtype.attr("isnative"))) {
    refuse(where, name, " must have this machine's byte order, little-endian; got ", type,
           " of dtype ", nb::cast<std::string>(nb::str(dtype)),
           ". Convert it with .astype(dtype.newbyteorder(\"=\"))");
  }
  refuse(where, name, " must be ", writable ? "a writable" : "an exportable",
         " dense array in CPU memory; got ", type, " whose export by DLPack or buffer failed. ",
         writable ? "Pass an array that may be written" : "Pass a plain CPU array");
}

// Elements from one index of the leading dimensions to the next, when these collapse into one.
bool collapse_rows(const Array& a, int64_t* rows, int64_t* stride) {
  const size_t n = a.ndim();
  *rows = 1;
  *stride = a.shape[n - 1];
  bool first = true;
  for (size_t i = n - 1; i-- > 0;) {
    if (a.shape[i] == 1) continue;
    if (first) {
      *stride = a.strides[i];
      first = false;
    } else if (a.strides[i] != *stride * *rows) {
      return false;
    }
    *rows *= a.shape[i];
  }
  return true;
}

const void* at(const Array& a, int64_t index) {
  const int64_t bytes = int64_t(cpumoe::code_bits(a.format->code)) / 8;
  return static_cast<const char*>(a.data) + index * a.strides[0] * bytes;
}

constexpr const char* kCopy = ". Make it contiguous, for example with numpy.ascontiguousarray";

// The last two dimensions as rows with unit step that do not overlap. `advice` ends the message
// about another order of the elements.
cpumoe::MatrixView plane(const Array& a, const char* where, const std::string& name, int64_t rows,
                         int64_t stride, const char* advice) {
  const size_t n = a.ndim();
  const int64_t cols = a.shape[n - 1];
  if ((cols > 1 && rows > 0 && a.strides[n - 1] < 0) || (rows > 1 && cols > 0 && stride < 0)) {
    refuse(where, name, " must not be reversed; got a negative stride in ", a.describe(), kCopy);
  }
  if (cols > 1 && rows > 0 && a.strides[n - 1] != 1) {
    refuse(where, name, " must be contiguous along its last dimension; got ", a.describe(), advice);
  }
  if (rows > 1 && cols > 0 && stride < cols) {
    refuse(where, name, " must have rows that do not overlap; got ", a.describe(),
           ". Make it contiguous");
  }
  return {a.data, a.format->code, rows, cols, rows > 1 ? stride : cols};
}

}  // namespace

bool Array::empty() const {
  for (int64_t n : shape)
    if (n == 0) return true;
  return false;
}

std::string Array::describe() const {
  std::string s = dtype + "[";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  s += "]";
  int64_t dense = 1;
  bool contiguous = true;
  for (size_t i = shape.size(); i-- > 0;) {
    contiguous = contiguous && (shape[i] == 1 || strides[i] == dense);
    dense *= shape[i];
  }
  if (contiguous || empty()) return s;
  s += " with strides [";
  for (size_t i = 0; i < strides.size(); ++i) s += (i ? ", " : "") + std::to_string(strides[i]);
  return s + "]";
}

Array take_array(nb::handle source, const char* where, const std::string& name, bool writable) {
  std::string format;
  nb::object held;
  if (nb::isinstance<nb::tuple>(source)) {
    require(nb::len(source) == 2, where, name,
            " must be an array or a pair (array of raw units, format name); got a tuple of ",
            nb::len(source), ". Pass the array itself");
    format = nb::cast<std::string>(nb::str(source[1]));
    held = source[0];
    source = held;
  }
  Array a;
  if (writable) {
    nb::ndarray<> rw;
    if (!nb::try_cast(source, rw)) refuse_source(source, where, name, true);
    a.owner = nb::ndarray<nb::ro>(rw);
  } else if (!nb::try_cast(source, a.owner)) {
    refuse_source(source, where, name, false);
  }
  require(a.owner.device_type() == nb::device::cpu::value, where, name,
          " must be in CPU memory; got DLPack device type ", a.owner.device_type(),
          ". Move it to the CPU first");
  a.data = a.owner.data();
  a.shape.assign(a.owner.shape_ptr(), a.owner.shape_ptr() + a.owner.ndim());
  a.strides.assign(a.owner.stride_ptr(), a.owner.stride_ptr() + a.owner.ndim());
  a.dtype = dtype_text(a.owner.dtype());
  if (format.empty()) {
    a.format = cpumoe::find_format(a.dtype);
    return a;
  }
  a.format = cpumoe::find_format(format);
  const bool byte = format == "e4m3" || format == "e8m0";
  require(byte || (a.format != nullptr && cpumoe::is_float(a.format->code)), where, name,
          " must be read as fp32, fp16, bf16, e4m3 or e8m0; got \"", format,
          "\". Pass quantised weights as a cpumoe.Weight");
  const size_t bits = byte ? 8 : cpumoe::code_bits(a.format->code);
  require(a.owner.dtype().bits == bits, where, name, " must have units of ", bits,
          " bits to be read as ", format, "; got ", a.dtype,
          ". View it as an unsigned integer of that width");
  a.dtype = format;
  return a;
}

void require_shape(const Array& a, const std::vector<int64_t>& shape, const char* where,
                   const std::string& name, const char* letters) {
  bool ok = a.ndim() == shape.size();
  for (size_t i = 0; ok && i < shape.size(); ++i) ok = shape[i] < 0 || shape[i] == a.shape[i];
  if (ok) return;
  std::string want = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    want += (i ? ", " : "") + (shape[i] < 0 ? std::string("*") : std::to_string(shape[i]));
  refuse(where, name, " must have shape ", letters, " = ", want, "]; got ", a.describe(),
         ". Reshape or slice it to match the other arguments");
}

void require_float(const Array& a, const char* where, const std::string& name) {
  if (a.format == nullptr)
    refuse(where, name, " must be fp32, fp16 or bf16; got ", a.describe(),
           ". Convert it to one of these");
}

cpumoe::MatrixView matrix_view(const Array& a, const char* where, const std::string& name) {
  require_float(a, where, name);
  require(a.ndim() >= 1, where, name,
          " must have at least one dimension; got a scalar. Pass [T, H]");
  if (a.empty()) {
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < a.ndim(); ++i) rows *= a.shape[i];
    return {a.data, a.format->code, rows, a.shape.back(), a.shape.back()};
  }
  int64_t rows, stride;
  if (!collapse_rows(a, &rows, &stride)) {
    refuse(where, name, " must have leading dimensions with one common stride; got ", a.describe(),
           ". Make it contiguous");
  }
  return plane(a, where, name, rows, stride, kCopy);
}

cpumoe::VectorView vector_view(const Array& a, const char* where, const std::string& name) {
  require_float(a, where, name);
  require_shape(a, {-1}, where, name, "[N]");
  return {a.data, a.format->code, a.shape[0], a.shape[0] > 1 ? a.strides[0] : 1};
}

cpumoe::VectorView vector_view(const Array& a, int64_t index, const char* where,
                               const std::string& name) {
  require_float(a, where, name);
  require_shape(a, {-1, -1}, where, name, "[E, N]");
  return {at(a, index), a.format->code, a.shape[1], a.shape[1] > 1 ? a.strides[1] : 1};
}

namespace {
constexpr const char* kOtherLayout =
    ". Make it contiguous, or pass the untransposed array with the other layout";

cpumoe::WeightView as_weight(const Array& a, cpumoe::MatrixView m, cpumoe::Layout layout) {
  cpumoe::WeightView w;
  w.format = a.format;
  w.layout = layout;
  w.n = layout == cpumoe::Layout::rows ? m.rows : m.cols;
  w.k = layout == cpumoe::Layout::rows ? m.cols : m.rows;
  w.stride = m.stride;
  w.data = m.data;
  return w;
}
}  // namespace

cpumoe::WeightView weight_view(const Array& a, cpumoe::Layout layout, const char* where,
                               const std::string& name) {
  require_float(a, where, name);
  require_shape(a, {-1, -1}, where, name, layout == cpumoe::Layout::rows ? "[N, K]" : "[K, N]");
  return as_weight(a, plane(a, where, name, a.shape[0], a.strides[0], kOtherLayout), layout);
}

cpumoe::WeightView weight_view(const Array& a, int64_t index, cpumoe::Layout layout,
                               const char* where, const std::string& name) {
  require_float(a, where, name);
  require_shape(a, {-1, -1, -1}, where, name,
                layout == cpumoe::Layout::rows ? "[E, N, K]" : "[E, K, N]");
  cpumoe::MatrixView m = plane(a, where, name, a.shape[1], a.strides[1], kOtherLayout);
  m.data = at(a, index);
  return as_weight(a, m, layout);
}

Extent extent(const Array& a) {
  const char* lo = static_cast<const char*>(a.data);
  if (a.empty()) return {lo, lo};
  const int64_t size = int64_t(a.owner.itemsize());
  int64_t first = 0, last = 0;
  for (size_t i = 0; i < a.ndim(); ++i)
    (a.strides[i] < 0 ? first : last) += (a.shape[i] - 1) * a.strides[i];
  return {lo + first * size, lo + (last + 1) * size};
}

std::optional<cpumoe::ActClass> take_act_class(const std::string& name, const char* where) {
  if (name == "fp32") return cpumoe::ActClass::fp32;
  if (name == "int8") return cpumoe::ActClass::int8;
  if (name == "bf16") {
    const cpumoe::Format& f = *cpumoe::find_format("bf16");
    const cpumoe::IsaSet isa = process_isa();
    require(cpumoe::class_for(f, cpumoe::Layout::rows, {}, isa) == cpumoe::ActClass::bf16, where,
            "activations \"bf16\" must have the instruction set avx512_bf16; got ",
            cpumoe::isa_list(isa), ". Take \"auto\", each format's own");
    return cpumoe::ActClass::bf16;
  }
  require(name == "auto", where,
          "the activation class must be \"auto\", \"fp32\", \"bf16\" or \"int8\"; got \"", name,
          "\". auto: each weight format's own");
  return {};
}

cpumoe::Layout take_layout(const std::string& layout, const char* where) {
  require(layout == "rows" || layout == "columns", where,
          "layout must be \"rows\" or \"columns\"; got \"", layout,
          "\". rows: each output feature's inputs are contiguous (torch.nn.Linear)");
  return layout == "rows" ? cpumoe::Layout::rows : cpumoe::Layout::columns;
}

}  // namespace cpumoe_py
