// Words of GPTQ and AWQ.
#include "kernels/dot/integer/word_codes.h"
