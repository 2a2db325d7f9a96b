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

nb::tuple select_dot(const std::string& format, const std::string& layout, int64_t tokens) {
  const cpumoe::Format* f = cpumoe::find_format(format);
  cpumoe::require(f != nullptr, "select_dot", "format must be a known one; got ", format,
                  ". See formats.inc");
  std::string why;
  const cpumoe::DotKernel* k = cpumoe::select_dot(
      {f->code, take_layout(layout, "select_dot"), cpumoe::ActClass::fp32, tokens}, process_isa(),
      &why);
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
  m.def("select_dot", &select_dot, "format"_a, "layout"_a, "tokens"_a,
        "(name, why): the dot kernel for an expert with `tokens` tokens, None when there is none; why\n"
        "names the candidates before it and what refused them.");
  m.def("selected", &selected, "Chosen kernel of every other room, by name.");
}

}  // namespace cpumoe_py
