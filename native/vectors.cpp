// float32 to float16, rounded as IEEE 754 says and NumPy does, which takes twenty times as long.

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <cstring>
#endif

namespace {

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) int64_t narrowed(const float *from, int64_t count, uint16_t *to) {
  int64_t at = 0;
  for (; at + 8 <= count; at += 8) {
    const __m128i eight = _mm256_cvtps_ph(_mm256_loadu_ps(from + at), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to + at), eight);
  }
  for (; at < count; ++at) to[at] = static_cast<uint16_t>(_cvtss_sh(from[at], _MM_FROUND_TO_NEAREST_INT));
  return at;
}
#endif

}  // namespace

extern "C" {

// Narrow `count` numbers; the number of those that are done, which is 0 where this CPU has no instruction for it.
__attribute__((visibility("default"))) int64_t embq_float16(const float *from, int64_t count, uint16_t *to) {
#if defined(__x86_64__)
  // Clang 14 cannot ask for F16C, which every processor with AVX2 has.
  return __builtin_cpu_supports("avx2") ? narrowed(from, count, to) : 0;
#elif defined(__aarch64__)
  for (int64_t at = 0; at < count; ++at) {
    const auto narrow = static_cast<__fp16>(from[at]);
    std::memcpy(to + at, &narrow, sizeof narrow);
  }
  return count;
#else
  (void)from, (void)count, (void)to;
  return 0;
#endif
}

}  // extern "C"
