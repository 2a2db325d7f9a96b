#include "kernels/vec/avx2.h"
#include "kernels/act/body.h"

namespace cpumoe::avx2 {

void act(const ActArgs& a) { act_run<Vec>(a); }

}  // namespace cpumoe::avx2
