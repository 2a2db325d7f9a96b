#include "kernels/act/body.h"
#include "kernels/vec/avx2.h"

namespace cpumoe::avx2 {

void act(const ActArgs& a) { act_run<Vec>(a); }

}  // namespace cpumoe::avx2
