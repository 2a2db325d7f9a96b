// Weights in any format from arrays of bytes, scales and zero points; nothing is copied.
#include "weights.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "base/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cpumoe_py {
namespace {

using cpumoe::Code;
using cpumoe::concat;
using cpumoe::Error;
using cpumoe::Format;
using cpumoe::Layout;
using cpumoe::MatrixView;
using cpumoe::require;
using cpumoe::WeightView;

constexpr const char* kWhere = "Weight";
constexpr int64_t kMaxExtent = int64_t(1) << 31;

bool contiguous(const Array& a) {
  int64_t dense = 1;
  if (a.empty()) return true;
  for (size_t i = a.ndim(); i-- > 0;) {
    if (a.shape[i] != 1 && a.strides[i] != dense) return false;
    dense *= a.shape[i];
  }
  return true;
}

int64_t bytes_of(const Array& a) {
  int64_t n = int64_t(a.owner.itemsize());
  for (int64_t s : a.shape) n *= s;
  return n;
}

Array take_contiguous(nb::handle source, const std::string& name) {
  Array a = take_array(source, kWhere, name);
  require(contiguous(a), kWhere, name, " must be contiguous; got ", a.describe(),
          ". Make it so, for example with numpy.ascontiguousarray");
  return a;
}

// A grid [count, rows, cols] of which `a` holds the elements in order.
std::vector<MatrixView> split(const Array& a, Code code, int64_t count, int64_t rows, int64_t cols,
                              const std::string& name) {
  const int64_t line = cpumoe::line_bytes(code, cols);
  require(bytes_of(a) == count * rows * line, kWhere, name, " must hold ", count, " x [", rows,
          ", ", cols, "] of ", cpumoe::code_name(code), ", ", count * rows * line, " bytes; got ",
          a.describe(), ". Check the shape, the format and the layout");
  const int64_t stride = cpumoe::round_up(cols, cpumoe::code_block(code).elements);
  std::vector<MatrixView> views;
  for (int64_t i = 0; i < count; ++i)
    views.push_back(
        {static_cast<const char*>(a.data) + i * rows * line, code, rows, cols, stride});
  return views;
}

Code scale_code(const Array& a) {
  if (a.format != nullptr) return a.format->code;
  if (a.dtype == "e4m3") return Code::e4m3;
  require(a.dtype == "e8m0", kWhere, "scales must be fp32, fp16, bf16, e4m3 or e8m0; got ",
          a.describe(), ". Pass bytes as a pair (array, \"e8m0\")");
  return Code::e8m0;
}

// Zero points are packed like the codes of the weight, or a byte each. Where both would have this
// size (one group to a line) the packed reading holds: of a byte that is one zero point it is that.
Code zero_code(const Array& a, const Format& f, int64_t count, int64_t rows, int64_t cols) {
  Code packed = Code::u8;
  if (f.code == Code::u4 || f.code == Code::u4_gptq) packed = Code::u4;
  if (f.code == Code::u4_awq) packed = Code::u4_awq;
  if (f.code == Code::u2) packed = Code::u2;
  const bool fits = bytes_of(a) == count * rows * cpumoe::line_bytes(packed, cols);
  return fits || bytes_of(a) != count * rows * cols ? packed : Code::u8;
}

// An array with a shape must have that of the grid; one dimension may hold its elements in order.
// cols < 0: any (packed).
void require_grid(const Array& a, int64_t rows, int64_t cols, const char* name) {
  const size_t n = a.ndim();
  if (n < 2) return;
  require(a.shape[n - 2] == rows && (cols < 0 || a.shape[n - 1] == cols), kWhere, name,
          " must be [..., ", rows, ", ", cols < 0 ? "packed" : std::to_string(cols),
          "], groups of features by groups of inputs in rows layout, transposed in columns; got ",
          a.describe(), ". Check the layout");
}

PyWeight make_weight(const std::string& format, const std::vector<int64_t>& shape, nb::object data,
                     nb::object scales, nb::object zeros, const std::string& layout_name,
                     const std::vector<float>& global_scale) {
  PyWeight out;
  WeightView w;
  w.format = cpumoe::find_format(format);
  require(w.format != nullptr, kWhere, "format must be a known one; got \"", format,
          "\". cpumoe._core.formats() lists them");
  const Format& f = *w.format;
  w.layout = take_layout(layout_name, kWhere);
  const std::string misplaced = cpumoe::layout_fault(f, w.layout);
  require(misplaced.empty(), kWhere, "a weight ", misplaced, ". Pass layout=");
  require(shape.size() == 2 || shape.size() == 3, kWhere,
          "shape must be [N, K] or [E, N, K]; got ", shape.size(), " extents");
  for (int64_t s : shape) {
    require(s >= 1 && s < kMaxExtent, kWhere, "extents must be from 1 to 2^31 - 1; got ", s,
            ". Check the shape");
  }
  out.stacked = shape.size() == 3;
  const int64_t count = out.stacked ? shape[0] : 1;
  w.n = shape[shape.size() - 2];
  w.k = shape[shape.size() - 1];
  const bool rows = w.layout == Layout::rows;
  const cpumoe::CodeBlock block = cpumoe::code_block(f.code);
  const int64_t length = rows ? w.k : w.n, lines = rows ? w.n : w.k;
  w.stride = cpumoe::round_up(length, block.elements);
  const int64_t line = cpumoe::line_bytes(f.code, length), blocks = cpumoe::ceil_div(lines, block.lines);
  require(blocks < (int64_t(1) << 58) / line / count, kWhere, "data must fit in memory; got [",
          count, ", ", w.n, ", ", w.k, "]. Check the shape");
  const Array bytes = take_contiguous(data, "data");
  require(bytes_of(bytes) == count * blocks * line, kWhere, "data must hold ", count, " x [", w.n,
          ", ", w.k, "] in format ", format, ", ", count * blocks * line, " bytes; got ",
          bytes.describe(), ", ", bytes_of(bytes), " bytes. Check the shape, format and layout");
  out.owners.push_back(bytes);
  require(global_scale.size() == 1 || int64_t(global_scale.size()) == count, kWhere,
          "global_scale must be one number, or one per expert; got ", global_scale.size(),
          " for ", count, " experts");
  std::vector<MatrixView> scale(size_t(count), MatrixView{}), zero = scale;
  require(f.scaled() == !scales.is_none(), kWhere, "scales must ",
          f.scaled() ? "be given" : "not be given", " for format ", format, "; got ",
          scales.is_none() ? "None" : "an array");
  require(f.stored_zeros() == !zeros.is_none(), kWhere, "zeros must ",
          f.stored_zeros() ? "be given" : "not be given", " for format ", format, "; got ",
          zeros.is_none() ? "None" : "an array");
  if (f.scaled()) {
    const int64_t along = cpumoe::ceil_div(w.n, f.scale_rows), across = cpumoe::ceil_div(w.k, f.scale_cols);
    const int64_t r = rows ? along : across, c = rows ? across : along;
    const Array s = take_contiguous(scales, "scales");
    require_grid(s, r, c, "scales");
    scale = split(s, scale_code(s), count, r, c, "scales");
    out.owners.push_back(s);
    if (f.stored_zeros()) {
      const Array z = take_contiguous(zeros, "zeros");
      require(z.dtype.find("int") != std::string::npos, kWhere,
              "zeros must be integers, a byte each or packed; got ", z.describe(),
              ". Pass the zero points as stored");
      require_grid(z, r, -1, "zeros");
      zero = split(z, zero_code(z, f, count, r, c), count, r, c, "zeros");
      out.owners.push_back(z);
    }
  }
  for (int64_t e = 0; e < count; ++e) {
    WeightView v = w;
    v.data = static_cast<const char*>(bytes.data) + e * blocks * line;
    v.scales = scale[size_t(e)];
    v.zeros = zero[size_t(e)];
    v.global_scale = global_scale[global_scale.size() == 1 ? 0 : size_t(e)];
    out.views.push_back(v);
  }
  const std::string fault = cpumoe::weight_fault(out.views[0]);
  require(fault.empty(), kWhere, "a weight ", fault, ". Pass other sizes");
  return out;
}

PyWeight part(const PyWeight& self, int64_t first, int64_t count) {
  PyWeight out;
  out.stacked = self.stacked;
  out.owners = self.owners;
  for (const WeightView& v : self.views)
    out.views.push_back(take_features(v, first, count, kWhere, "features"));
  return out;
}

nb::object decode(const PyWeight& self) {
  const WeightView& w = self.views[0];
  std::vector<size_t> shape{size_t(w.n), size_t(w.k)};
  if (self.stacked) shape.insert(shape.begin(), self.views.size());
  const size_t each = size_t(w.n * w.k);
  std::unique_ptr<float[]> out(new float[each * self.views.size()]);
  {
    nb::gil_scoped_release unlocked;
    for (size_t e = 0; e < self.views.size(); ++e) {
      const WeightView& v = self.views[e];
      float* to = out.get() + e * each;
      if (v.layout == Layout::rows) {
        for (int64_t n = 0; n < v.n; ++n) cpumoe::decode_line(v, n, 0, v.k, to + n * v.k);
        continue;
      }
      std::vector<float> line(size_t(v.n), 0.0f);
      for (int64_t k = 0; k < v.k; ++k) {
        cpumoe::decode_line(v, k, 0, v.n, line.data());
        for (int64_t n = 0; n < v.n; ++n) to[n * v.k + k] = line[size_t(n)];
      }
    }
  }
  float* data = out.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float>(data, shape.size(), shape.data(), owner));
}

int64_t total_bytes(const PyWeight& w) {
  int64_t bytes = 0;
  for (const WeightView& v : w.views) bytes += cpumoe::weight_bytes(v);
  return bytes;
}

}  // namespace

const PyWeight* find_weight(nb::handle source) {
  const PyWeight* w = nullptr;
  if (nb::try_cast(source, w, false)) return w;
  if (!nb::hasattr(source, "_native")) return nullptr;
  return nb::try_cast(source.attr("_native"), w, false) ? w : nullptr;
}

WeightView take_features(const WeightView& w, int64_t n0, int64_t n, const char* where,
                         const std::string& name) {
  const int64_t step = cpumoe::feature_step(w);
  require(n0 >= 0 && n >= 1 && n <= w.n && n0 <= w.n - n && n0 % step == 0, where, name,
          " must lie within ", w.n, " and begin at a multiple of ", step,
          ", where a block or a scale of format ", w.format->name, " does; got ", n, " from ", n0,
          " on. Use whole weights there, gate and up apart");
  return cpumoe::features_of(w, n0, n);
}

void bind_weights(nb::module_& m) {
  nb::class_<PyWeight>(m, "Weight")
      // Not nb::new_: object.__new__() would then give an instance that nanobind does not know, and
      // aborts on.
      .def("__init__",
           [](PyWeight* self, const std::string& format, const std::vector<int64_t>& shape,
              nb::object data, nb::object scales, nb::object zeros, const std::string& layout,
              const std::vector<float>& global_scale) {
             new (self)
                 PyWeight(make_weight(format, shape, data, scales, zeros, layout, global_scale));
           },
           "format"_a, "shape"_a, "data"_a, "scales"_a.none(),
           "zeros"_a.none(), "layout"_a, "global_scale"_a)
      .def("features", &part, "first"_a, "count"_a)
      .def("decode", &decode, nb::sig("def decode(self) -> numpy.typing.NDArray[numpy.float32]"))
      .def_prop_ro("format", [](const PyWeight& w) { return w.views[0].format->name; })
      .def_prop_ro("layout",
                   [](const PyWeight& w) {
                     return w.views[0].layout == Layout::rows ? "rows" : "columns";
                   })
      .def_prop_ro("shape",
                   [](const PyWeight& w) {
                     std::vector<int64_t> s{w.views[0].n, w.views[0].k};
                     if (w.stacked) s.insert(s.begin(), int64_t(w.views.size()));
                     return s;
                   })
      .def_prop_ro("nbytes", &total_bytes);
}

}  // namespace cpumoe_py
