// A Python ModelSpec as core's.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "arrays.h"
#include "decoder/decoder.h"

namespace cpumoe_py {

// A contiguous array of one dimension and the given element type.
Array take_line(nanobind::handle source, const char* where, const std::string& name,
                const char* dtype);
// Views of the arrays that `spec` holds: they live as long as it does.
cpumoe::ModelSpec take_model(nanobind::handle spec);

}  // namespace cpumoe_py
