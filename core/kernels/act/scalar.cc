#include "kernels/act/body.h"
#include "kernels/vec/scalar.h"

namespace cpumoe::scalar {

void act(const ActArgs& a) { act_run<Vec>(a); }

}  // namespace cpumoe::scalar
