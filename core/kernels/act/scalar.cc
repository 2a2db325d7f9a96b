#include "kernels/vec/scalar.h"
#include "kernels/act/body.h"

namespace cpumoe::scalar {

void act(const ActArgs& a) { act_run<Vec>(a); }

}  // namespace cpumoe::scalar
