// The large loops once more, for CPUs with AVX2. Whole functions are compiled for it, not clones of inlined ones: GCC splits eight-lane vectors
// into SSE halves before it inlines. Headers come first, so that no library code is compiled for AVX2 and then linked into the rest.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <cmath>
#include <cstring>

#include <torch/csrc/stable/ops.h>

#include <immintrin.h>

#include "math.h"
#include "ops.h"

#pragma GCC target("avx2")
#define FLOWGRPO_CPU avx2
#define FLOWGRPO_AVX2

#include "cfg_combine.cpp"
#include "sde_log_prob.cpp"
#include "sde_step.cpp"

#endif
