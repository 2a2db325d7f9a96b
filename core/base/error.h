// The one exception of the core: `<where>: <what must hold>; got <values>. <what to do>`.
// Kernels never throw; machine, moe and decoder do, before any memory is touched.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace cpumoe {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... A>
std::string concat(const A&... a) {
  std::ostringstream s;
  (s << ... << a);
  return s.str();
}

// require(k <= experts, "route", "k must be at most the number of experts; got k=", k, ...);
template <class... A>
void require(bool ok, const char* where, const A&... message) {
  if (!ok) throw Error(concat(where, ": ", message...));
}

}  // namespace cpumoe
