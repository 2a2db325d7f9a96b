// Which kernels there are, which would be chosen and why: what `doctor` and `bench` print.
#include <nanobind/stl/string.h>

#include <string>

#include "arrays.h"
#include "base/error.h"
#include "bindings.h"
#include "formats/format.h"
#include "kernels/act/act.h"
#include "kernels/attend/attend.h"
#include "kernels/dot/dot.h"
#include "kernels/norm/norm.h"
#include "kernels/rope/rope.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace cpumoe_py {
namespace {

template <class Kernel>
nb::dict row(const char* room, const Kernel& kernel) {
  nb::dict d;
  d["room"] = room;
  d["name"] = kernel.name;
  d["isa"] = cpumoe::isa_name(kernel.isa);
  return d;
}

template <class Kernel>
void add_rooms(nb::list& list, const char* room, const Kernel* kernels, int count) {
  for (int i = 0; i < count; ++i) list.append(row(room, kernels[i]));
}

nb::list kernels() {
  nb::list list;
  int count = 0;
  const cpumoe::DotKernel* dot = cpumoe::dot_kernels(&count);
  for (int i = 0; i < count; ++i) {
    nb::dict d = row("dot", dot[i]);
    d["code"] = cpumoe::code_name(dot[i].code);
    d["layout"] = dot[i].layout == cpumoe::Layout::rows ? "rows" : "columns";
    d["m_min"] = dot[i].m_min;
    d["m_max"] = dot[i].m_max;
    d["act_class"] = cpumoe::act_class_name(dot[i].act_class);
    d["act_layout"] = dot[i].act_layout;
    list.append(d);
  }
  const cpumoe::AttendKernel* attend = cpumoe::attend_kernels(&count);
  for (int i = 0; i < count; ++i) {
    nb::dict d = row("attend", attend[i]);
    d["code"] = cpumoe::code_name(attend[i].code);
    list.append(d);
  }
  const cpumoe::ActKernel* act = cpumoe::act_kernels(&count);
  add_rooms(list, "act", act, count);
  const cpumoe::NormKernel* norm = cpumoe::norm_kernels(&count);
  add_rooms(list, "norm", norm, count);
  const cpumoe::RopeKernel* rope = cpumoe::rope_kernels(&count);
  add_rooms(list, "rope", rope, count);
  return list;
}

// formats.inc as data.
nb::list formats() {
  nb::list list;
  int count = 0;
  const cpumoe::Format* rows = cpumoe::formats(&count);
  for (int i = 0; i < count; ++i) {
    const cpumoe::Format& f = rows[i];
    const cpumoe::CodeBlock block = cpumoe::code_block(f.code);
    nb::dict d;
    d["name"] = f.name;
    d["code"] = cpumoe::code_name(f.code);
    d["block_elements"] = block.elements;
    d["block_lines"] = block.lines;
    d["block_bytes"] = block.bytes;
    d["scale_rows"] = f.scale_rows == cpumoe::kWhole ? -1 : f.scale_rows;
    d["scale_cols"] = f.scale_cols == cpumoe::kWhole ? -1 : f.scale_cols;
    d["zeros"] = cpumoe::zero_rule_name(f.zeros);
    d["act_class"] = cpumoe::act_class_name(f.act_class);
    list.append(d);
  }
  return list;
}

cpumoe::DotRequest request(const char* where, const std::string& format,
                           const std::string& layout, int64_t tokens,
                           const std::string& activations) {
  const cpumoe::Format* f = cpumoe::find_format(format);
  cpumoe::require(f != nullptr, where, "format must be a known one; got ", format,
                  ". See formats.inc");
  const cpumoe::Layout l = take_layout(layout, where);
  return {f->code, l, cpumoe::class_for(*f, l, take_act_class(activations, where), process_isa()),
          tokens};
}

const char* class_for(const std::string& format, const std::string& layout,
                      const std::string& activations) {
  return cpumoe::act_class_name(request("class_for", format, layout, 1, activations).act_class);
}

nb::tuple select_dot(const std::string& format, const std::string& layout, int64_t tokens,
                     const std::string& activations) {
  std::string why;
  const cpumoe::DotKernel* k = cpumoe::select_dot(
      request("select_dot", format, layout, tokens, activations), process_isa(), &why);
  return nb::make_tuple(k == nullptr ? nb::none() : nb::object(nb::str(k->name)), why);
}

// Room -> chosen kernel, of the rooms that have one kernel per ISA (and cache format).
nb::dict selected() {
  const cpumoe::IsaSet isa = process_isa();
  const auto name = [](const auto* kernel) {
    return kernel == nullptr ? nb::none() : nb::object(nb::str(kernel->name));
  };
  nb::dict d;
  d["act"] = name(cpumoe::select_act(isa));
  d["norm"] = name(cpumoe::select_norm(isa));
  d["rope"] = name(cpumoe::select_rope(isa));
  for (const cpumoe::Code code : {cpumoe::Code::f32, cpumoe::Code::f16, cpumoe::Code::bf16}) {
    d[nb::str((std::string("attend ") + cpumoe::code_name(code)).c_str())] =
        name(cpumoe::select_attend(code, isa));
  }
  return d;
}

}  // namespace

void bind_inspect(nb::module_& m) {
  m.def("kernels", &kernels,
        "All compiled-in kernels, best first within a room: dicts with room, name, isa; dot also with\n"
        "code, layout, act_layout and the tokens per expert it is for (m_min..m_max).");
  m.def("formats", &formats,
        "The table of weight formats: dicts with name, code, the code's block (block_elements of a\n"
        "line, block_lines, block_bytes), scale_rows and scale_cols (features and inputs that share a\n"
        "scale; 0: no scales, -1: all), zeros (rule of the zero point) and act_class (default,\n"
        "where this CPU has kernels for it).");
  m.def("class_for", &class_for, "format"_a, "layout"_a, "activations"_a = "auto",
        "The class of activations that products of this format and layout run in.");
  m.def("select_dot", &select_dot, "format"_a, "layout"_a, "tokens"_a, "activations"_a = "auto",
        "(name, why): the dot kernel for an expert with `tokens` tokens, None when there is none; why\n"
        "names the candidates before it and what refused them.");
  m.def("selected", &selected, "Chosen kernel of every other room, by name.");
}

}  // namespace cpumoe_py
