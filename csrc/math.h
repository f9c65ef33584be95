// Formulas that the C++ and the CUDA kernels share: the arithmetic of flowgrpo_fast/ops, operation for operation.
// Compiled without floating-point contraction (-ffp-contract=off, -fmad=false): a fused multiply-add would round once where the
// reference rounds twice, and every result is meant to have the reference's bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FLOWGRPO_FN __host__ __device__ __forceinline__
#else
#define FLOWGRPO_FN inline __attribute__((always_inline))
#endif

namespace flowgrpo {

constexpr int64_t kLanes = 1024;  // ops/_reduce.py: LANES, CHUNK
constexpr int64_t kBlocks = 4;
constexpr int64_t kChunk = kBlocks * kLanes;
constexpr double kLogSqrt2Pi = 0.9189385332046727;
constexpr float kLogRatioBound = 10.0f;

// Philox-4x32-10, as ops/_philox.py: word i of a sample is lane i % 4 of counter i / 4.
struct Counter {
  uint32_t w0, w1, w2, w3;
};

FLOWGRPO_FN Counter philox(uint32_t index, uint32_t step_stream, uint64_t sample_id, uint64_t seed) {
  uint32_t c0 = index, c1 = step_stream, c2 = static_cast<uint32_t>(sample_id), c3 = static_cast<uint32_t>(sample_id >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

FLOWGRPO_FN uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

FLOWGRPO_FN double double_of(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// ln of (bits + 0.5) 2^-24. The exponent is shifted out as an unsigned number (AVX2 has no arithmetic 64-bit shift), 64 too large.
FLOWGRPO_FN double log_uniform(uint32_t bits) {
  const uint64_t pattern = bits_of((static_cast<double>(static_cast<int32_t>(bits)) + 0.5) * 0x1p-24);
  const uint64_t biased = (pattern - 0x3FE6A09E667F3BCDull + (64ull << 52)) >> 52;
  const int32_t exponent = static_cast<int32_t>(biased) - 64;
  const double m = double_of(pattern + (64ull << 52) - (biased << 52));
  const double f = (m - 1.0) / (m + 1.0), z = f * f;
  double series = 1.0 / 13;
  series = 1.0 / 11 + z * series;
  series = 1.0 / 9 + z * series;
  series = 1.0 / 7 + z * series;
  series = 1.0 / 5 + z * series;
  series = 1.0 / 3 + z * series;
  series = 1.0 + z * series;
  return exponent * 0.6931471805599453 + 2.0 * f * series;
}

struct Pair {
  double cos, sin;
};

// cos and sin of 2 pi (bits + 0.5) 2^-24.
FLOWGRPO_FN Pair cos_sin_uniform(uint32_t bits) {
  const int32_t quarter = static_cast<int32_t>((bits + (1u << 21)) >> 22);
  const double angle = (static_cast<double>(static_cast<int32_t>(bits) - (quarter << 22)) + 0.5) * (0x1p-22 * 3.141592653589793 / 2);
  const double z = angle * angle;
  double cos = 1.0 / 479001600;
  cos = -1.0 / 3628800 + z * cos;
  cos = 1.0 / 40320 + z * cos;
  cos = -1.0 / 720 + z * cos;
  cos = 1.0 / 24 + z * cos;
  cos = -1.0 / 2 + z * cos;
  cos = 1.0 + z * cos;
  double sin = 1.0 / 6227020800;
  sin = -1.0 / 39916800 + z * sin;
  sin = 1.0 / 362880 + z * sin;
  sin = -1.0 / 5040 + z * sin;
  sin = 1.0 / 120 + z * sin;
  sin = -1.0 / 6 + z * sin;
  sin = 1.0 + z * sin;
  sin = angle * sin;
  const bool odd = quarter & 1;
  const double x = odd ? sin : cos, y = odd ? cos : sin;
  return {((quarter + 1) & 2) ? -x : x, (quarter & 2) ? -y : y};
}

FLOWGRPO_FN void box_muller(uint32_t word_0, uint32_t word_1, float& z0, float& z1) {
  const double radius = sqrt(-2.0 * log_uniform(word_0 >> 8));
  const Pair pair = cos_sin_uniform(word_1 >> 8);
  z0 = static_cast<float>(radius * pair.cos);
  z1 = static_cast<float>(radius * pair.sin);
}

FLOWGRPO_FN float affine_mean(float x, float v, float a, float b) { return x * a + v * b; }

FLOWGRPO_FN float guided(float pos, float neg, float scale) { return neg + scale * (pos - neg); }

FLOWGRPO_FN float or_zero(float numerator, float norm) { return norm > 0 ? numerator / norm : 0.0f; }

// What multiplies a squared distance: 1 / (2 s^2), or 1 in flow_grpo's form; 0 where s = 0.
FLOWGRPO_FN double precision(double s, bool gaussian) {
  if (s == 0) return 0.0;
  return gaussian ? 0.5 / (s * s) : 1.0;
}

FLOWGRPO_FN float log_density(double square, double s, int64_t length, bool gaussian, bool mean) {
  if (s == 0) return 0.0f;
  if (mean) square /= static_cast<double>(length);
  if (!gaussian) return static_cast<float>(-square);
  const double constant = (log(s) + kLogSqrt2Pi) * (mean ? 1.0 : static_cast<double>(length));
  return static_cast<float>(-square / (2.0 * s * s) - constant);
}

// KL or log-ratio of a sample from its sum over the elements.
FLOWGRPO_FN float scaled_sum(double sum, double s, int64_t length, bool gaussian, bool mean) {
  if (s == 0) return 0.0f;
  if (mean) sum /= static_cast<double>(length);
  return static_cast<float>(sum * precision(s, gaussian));
}

struct Weights {
  float residual, shift;
};

// What multiplies prev - mu and v - v_ref in the gradient of one sample.
FLOWGRPO_FN Weights sample_weights(double grad, double grad_kl, float b, float s, int64_t length, bool gaussian, bool mean) {
  const double slope = 2.0 * static_cast<double>(b) / (mean ? static_cast<double>(length) : 1.0);
  return {static_cast<float>(grad * slope * precision(s, gaussian)),
          static_cast<float>(grad_kl * slope * static_cast<double>(b) * precision(s, true))};
}

// One entry of the clipped loss.
struct Entry {
  float loss, grad, r1, bounded;
  bool low, high;
};

FLOWGRPO_FN Entry clipped_entry(float log_r, float advantage, float scale, float clip_low, float clip_high) {
  Entry e;
  e.bounded = log_r > kLogRatioBound ? kLogRatioBound : (log_r < -kLogRatioBound ? -kLogRatioBound : log_r);
  e.r1 = static_cast<float>(expm1(static_cast<double>(e.bounded)));
  e.low = advantage < 0 && e.r1 < -clip_low;
  e.high = advantage > 0 && e.r1 > clip_high;
  const float effective = e.low ? -clip_low : (e.high ? clip_high : e.r1);
  e.loss = (-advantage - advantage * effective) * scale;
  const bool inert = e.low || e.high || fabsf(log_r) > kLogRatioBound;
  e.grad = inert ? 0.0f : (-advantage - advantage * e.r1) * scale;
  return e;
}

}  // namespace flowgrpo
