// What the C++ kernels share: blocks of 1,024 lanes in fp32, stores, the sums of ops/_reduce.py, threads.
// A block of fp32 input is read where it lies; other dtypes and a sample's last block go through a 4 KiB buffer in L1.
#pragma once

#include <cstring>

#include <torch/csrc/stable/ops.h>

#include "math.h"
#include "ops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// One wheel for every x86-64: avx2.cpp includes the sources of the large loops again, as namespace avx2, and bindings.cpp asks the CPU.
#ifndef FLOWGRPO_CPU
#define FLOWGRPO_CPU cpu
#endif

// For lambdas that hand vectors on.
#define FLOWGRPO_INLINE __attribute__((always_inline))

namespace flowgrpo::FLOWGRPO_CPU {

// Below this many bytes a gradient is better left in the caches; above, ordinary stores would read every line before writing it.
constexpr int64_t kStreamBytes = 8 << 20;

FLOWGRPO_FN float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

FLOWGRPO_FN uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7FC0u : rounded);
}

FLOWGRPO_FN float from_f16(uint16_t value) {
  // Exponent and mantissa moved into place and scaled by 2^112, which also makes subnormals right; infinities and NaN apart.
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16, rest = static_cast<uint32_t>(value & 0x7FFFu) << 13;
  float magnitude;
  memcpy(&magnitude, &rest, sizeof magnitude);
  magnitude *= 0x1p112f;
  uint32_t bits;
  memcpy(&bits, &magnitude, sizeof bits);
  bits = (rest >= 0x0F800000u ? rest | 0x7F800000u : bits) | sign;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

FLOWGRPO_FN uint16_t to_f16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  // Subnormal halves: adding 0.5 lets the fp32 adder round at 2^-24.
  float small;
  memcpy(&small, &magnitude, sizeof small);
  small += 0.5f;
  uint32_t small_bits;
  memcpy(&small_bits, &small, sizeof small_bits);
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? small_bits - 0x3F000000u : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;
  half = magnitude > 0x7F800000u ? 0x7E00u : half;
  return static_cast<uint16_t>(half | sign);
}

// Eight lanes by the compilers' vector extensions: one AVX register, or two of SSE or NEON. Left to itself GCC 12 takes twice as long for the
// loops over bf16.
typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef int32_t Int8 __attribute__((vector_size(32)));
typedef uint32_t Word8 __attribute__((vector_size(32)));
typedef uint16_t Half8 __attribute__((vector_size(16)));

template <typename V, typename T>
FLOWGRPO_FN V vector_at(const T* pointer) {
  V value;
  memcpy(&value, pointer, sizeof value);
  return value;
}

// Lanes of fp32 or bf16 memory, eight at a time.
struct F32Lanes {
  const float* data;
  FLOWGRPO_FN Float8 at(int64_t i) const { return vector_at<Float8>(data + i); }
};

struct Bf16Lanes {
  const uint16_t* data;
  FLOWGRPO_FN Float8 at(int64_t i) const {
#if defined(FLOWGRPO_AVX2)  // one instruction, which GCC 12 does not find: it makes four
    return (Float8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(vector_at<__m128i>(data + i)), 16);
#else
    return (Float8)(__builtin_convertvector(vector_at<Half8>(data + i), Word8) << 16);
#endif
  }
};

// 1,024 fp32 -> bf16, to nearest even.
FLOWGRPO_FN void narrow_block(const float* from, uint16_t* to) {
  for (int64_t i = 0; i < kLanes; i += 8) {
    const Int8 bits = vector_at<Int8>(from + i);
    const Int8 is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    const Int8 rounded = bits + 0x7FFF + ((bits >> 16) & 1);
    const Word8 chosen = (Word8)((rounded & ~is_nan) | (0x7FC00000 & is_nan));
#if defined(FLOWGRPO_AVX2)
    const __m256i shifted = (__m256i)(chosen >> 16);
    const __m128i upper = _mm_packus_epi32(_mm256_castsi256_si128(shifted), _mm256_extracti128_si256(shifted, 1));
#else
    const Half8 upper = __builtin_convertvector(chosen >> 16, Half8);
#endif
    memcpy(to + i, &upper, sizeof upper);
  }
}

// The lanes [offset, offset + n) of a sample as fp32, zeros up to 1,024: in place where they lie so, else in `buffer`.
FLOWGRPO_FN const float* load(const Rows& rows, int64_t sample, int64_t offset, int64_t n, float* buffer) {
  const int64_t start = sample * rows.stride + offset;
  if (rows.dtype == Dtype::f32) {
    const float* data = static_cast<const float*>(rows.data) + start;
    if (n == kLanes) return data;
    memcpy(buffer, data, n * sizeof(float));
  } else {
    const uint16_t* data = static_cast<const uint16_t*>(rows.data) + start;
    if (rows.dtype == Dtype::bf16 && n == kLanes) {
      for (int64_t i = 0; i < kLanes; i += 8) {
        const Float8 value = Bf16Lanes{data}.at(i);
        memcpy(buffer + i, &value, sizeof value);
      }
    } else if (rows.dtype == Dtype::bf16) {
      for (int64_t i = 0; i < n; ++i) buffer[i] = from_bf16(data[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) buffer[i] = from_f16(data[i]);
    }
  }
  for (int64_t i = n; i < kLanes; ++i) buffer[i] = 0.0f;
  return buffer;
}

// Calls f with the lanes of a block: whole bf16 blocks where they lie, everything else as `load` has it. A pass through a buffer would
// cost as much as the arithmetic.
template <typename F>
FLOWGRPO_FN void with_lanes(const Rows& rows, int64_t sample, int64_t offset, int64_t n, float* buffer, const F& f) {
  if (rows.dtype == Dtype::bf16 && n == kLanes) {
    f(Bf16Lanes{static_cast<const uint16_t*>(rows.data) + sample * rows.stride + offset});
  } else {
    f(F32Lanes{load(rows, sample, offset, n, buffer)});
  }
}

FLOWGRPO_FN void copy_out(void* to, const void* from, int64_t bytes, bool stream) {
#if defined(__x86_64__)
  if (stream && reinterpret_cast<uintptr_t>(to) % 16 == 0 && bytes % 16 == 0) {
    for (int64_t i = 0; i < bytes; i += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + i)));
    }
    return;
  }
#endif
  memcpy(to, from, bytes);
}

// Streamed stores become visible to other threads only after a fence: once a chunk.
FLOWGRPO_FN void fence(bool stream) {
#if defined(__x86_64__)
  if (stream) _mm_sfence();
#endif
}

// Writes n lanes at an element offset, rounded to the output's dtype; `stream`: past the caches.
FLOWGRPO_FN void store(const Out& out, int64_t offset, int64_t n, const float* values, bool stream) {
  if (out.dtype == Dtype::f32) {
    copy_out(static_cast<float*>(out.data) + offset, values, n * sizeof(float), stream);
    return;
  }
  uint16_t rounded[kLanes];
  if (out.dtype == Dtype::bf16 && n == kLanes) {
    narrow_block(values, rounded);
  } else if (out.dtype == Dtype::bf16) {
    for (int64_t i = 0; i < n; ++i) rounded[i] = to_bf16(values[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) rounded[i] = to_f16(values[i]);
  }
  copy_out(static_cast<uint16_t*>(out.data) + offset, rounded, n * sizeof(uint16_t), stream);
}

// The values as a reader of the output will see them.
FLOWGRPO_FN void round_lanes(float* values, Dtype dtype) {
  if (dtype == Dtype::bf16) {
    uint16_t rounded[kLanes];
    narrow_block(values, rounded);
    for (int64_t i = 0; i < kLanes; i += 8) {
      const Float8 value = Bf16Lanes{rounded}.at(i);
      memcpy(values + i, &value, sizeof value);
    }
  } else if (dtype == Dtype::f16) {
    for (int64_t i = 0; i < kLanes; ++i) values[i] = from_f16(to_f16(values[i]));
  }
}

FLOWGRPO_FN bool streams(const Out& out, int64_t elements) {
  return elements * (out.dtype == Dtype::f32 ? 4 : 2) >= kStreamBytes;
}

inline float entry(const Entries& entries, int64_t row, int64_t step) {
  const int64_t at = row * entries.row_stride + step * entries.step_stride;
  if (entries.dtype == Dtype::f32) return static_cast<const float*>(entries.data)[at];
  const uint16_t value = static_cast<const uint16_t*>(entries.data)[at];
  return entries.dtype == Dtype::bf16 ? from_bf16(value) : from_f16(value);
}

inline void store_entry(const Out& out, int64_t at, float value) {
  if (out.dtype == Dtype::f32) {
    static_cast<float*>(out.data)[at] = value;
  } else {
    static_cast<uint16_t*>(out.data)[at] = out.dtype == Dtype::bf16 ? to_bf16(value) : to_f16(value);
  }
}

// Adds neighbours until one is left; width is a power of two. Overwrites the values: element i is read before it is written.
template <typename T>
FLOWGRPO_FN T tree_sum(T* values, int64_t width) {
  if constexpr (sizeof(T) == 4) {
    for (; width >= 8; width /= 2) {
      for (int64_t i = 0; i < width / 2; i += 4) {
        const Float4 left = vector_at<Float4>(values + 2 * i), right = vector_at<Float4>(values + 2 * i + 4);
#if defined(__clang__)
        const Float4 sum = __builtin_shufflevector(left, right, 0, 2, 4, 6) + __builtin_shufflevector(left, right, 1, 3, 5, 7);
#else  // GCC knows the other name only from version 12 on
        const Float4 sum = __builtin_shuffle(left, right, Int4{0, 2, 4, 6}) + __builtin_shuffle(left, right, Int4{1, 3, 5, 7});
#endif
        memcpy(values + i, &sum, sizeof sum);
      }
    }
  }
  for (; width > 1; width /= 2) {
    for (int64_t i = 0; i < width / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
  }
  return values[0];
}

inline int64_t power_of_two(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// lane_sum of ops/_reduce.py.
template <typename T, typename From>
inline T lane_sum(const From* values, int64_t n) {
  T lanes[kLanes];
  const int64_t width = n < kLanes ? power_of_two(n) : kLanes;
  for (int64_t i = 0; i < width; ++i) lanes[i] = i < n ? static_cast<T>(values[i]) : T(0);
  for (int64_t start = width; start < n; start += width) {
    for (int64_t i = 0; i < width && start + i < n; ++i) lanes[i] += static_cast<T>(values[start + i]);
  }
  return tree_sum(lanes, width);
}

inline int64_t chunks(int64_t length) { return (length + kChunk - 1) / kChunk; }

// Every (sample, chunk) once, over torch's threads. 8 chunks are 32,768 elements: below that a thread costs more than it does.
template <typename F>
inline void for_each_chunk(int64_t batch, int64_t length, const F& f) {
  const int64_t per_sample = chunks(length);
  torch::stable::parallel_for(0, batch * per_sample, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i / per_sample, i % per_sample);
  });
}

}  // namespace flowgrpo::FLOWGRPO_CPU
