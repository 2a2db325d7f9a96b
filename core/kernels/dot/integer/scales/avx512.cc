// Scales and offsets in the lanes of a span.
#include "kernels/dot/integer/expand.h"
