// Encoded JPEGs to the pixels that models read, a chunk of images in one call.
//
// libjpeg-turbo is the one that Pillow brings, opened by path, so decoded pixels are Pillow's. The resizer has Pillow's
// filters (a = -0.5, as wide as the reduction) in 16-bit numbers, as torch's kernels for bytes: results are off by at
// most 2 of 255. Rows are resized across as they are decoded, and down as soon as a window of them is there.
//
// Only the plain case is done here: 8 bits, one or three components, within the limits, nothing that libjpeg warns of.
// All other images come back as "not mine", and Pillow decides what they are.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include <jpeglib.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int32_t DONE = 0, NOT_MINE = 1;
constexpr int FITS_MAX = 16;  // models of one run that look at images
constexpr int BATCH = 16;    // rows that are decoded before they are resized
constexpr int SPARE = 64;    // bytes behind a row that kernels may read and write, beside the pixels of a window's taps
constexpr int MARGIN = 8;    // columns of a cropped decode beside those that are read: upsampling looks at neighbours
constexpr int SKIPPED = 32;  // rows or columns that are worth a cropped decode

// The limits of embq/worker/embedders/image/headers.py.
constexpr int64_t FILE_MAX_BYTES = 32'000'000, MAX_PIXELS = 64'000'000;
constexpr int SIDE_MAX = 32'768, ASPECT_MAX = 50, SCANS_MAX = 64;
constexpr unsigned ENGINE_SIDE_MAX = 16'384;  // of the JPEG engines of GPUs
// libjpeg holds all coefficients of an image of several scans: the caller decodes larger ones two at a time.
constexpr int64_t SCANS_MAX_PIXELS = 16'000'000;

struct Library {
  decltype(&jpeg_std_error) std_error;
  decltype(&jpeg_CreateDecompress) create;
  decltype(&jpeg_destroy_decompress) destroy;
  decltype(&jpeg_mem_src) mem_src;
  decltype(&jpeg_read_header) read_header;
  decltype(&jpeg_start_decompress) start;
  decltype(&jpeg_read_scanlines) read;
  decltype(&jpeg_skip_scanlines) skip;
  decltype(&jpeg_crop_scanline) crop;
  decltype(&jpeg_has_multiple_scans) has_scans;
  decltype(&jpeg_finish_decompress) finish;
};

Library jpeg;

}  // namespace

extern "C" {

// The geometry of a model's images, as embq.worker.embedders.image.preprocess.Fit.
struct Fit {
  int32_t height, width;
  int32_t mode;      // 0 shortest, 1 longest, 2 squash
  int32_t bilinear;  // else bicubic
  int32_t edge, even, pillow, fill;
};
}

namespace {

// ---------------------------------------------------------------------------------------------------------- weights

double filter(double x, bool bilinear) {
  x = std::fabs(x);
  if (bilinear) return x < 1 ? 1 - x : 0;
  constexpr double a = -0.5;
  if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

// What each pixel of a side is made of: `taps` neighbours from `first` on.
struct Weights {
  int size, out, start, count;
  double span;
  bool bilinear;
  int taps = 0, bits = 0;  // taps is even; a weight of 1 is 1 << bits
  std::vector<int> first, end;
  std::vector<int16_t> values;

  // Of `count` pixels from `start` on, of `out` that are made of `size` pixels. `span` is how far those reach: of an
  // image that the decoder made smaller, the last one may stand for less than a pixel.
  Weights(int size, double span, int out, int start, int count, bool bilinear)
      : size(size), out(out), start(start), count(count), span(span), bilinear(bilinear) {
    const double scale = span / out, wide = std::max(scale, 1.0), support = (bilinear ? 1 : 2) * wide;
    std::vector<double> exact;
    const int most = 2 * static_cast<int>(std::ceil(support)) + 1;
    exact.resize(static_cast<size_t>(count) * most);
    double largest = 0;
    for (int i = 0; i < count; ++i) {
      const double centre = (start + i + 0.5) * scale;
      const int from = std::clamp(static_cast<int>(centre - support + 0.5), 0, size - 1);
      const int to = std::clamp(static_cast<int>(centre + support + 0.5), from + 1, size);
      double *const row = &exact[static_cast<size_t>(i) * most], sum = 0;
      for (int k = from; k < to; ++k) sum += row[k - from] = filter((k - centre + 0.5) / wide, bilinear);
      for (int k = 0; k < to - from; ++k) largest = std::max(largest, std::fabs(row[k] /= sum));
      first.push_back(from);
      end.push_back(to);
      taps = std::max(taps, to - from);
    }
    taps += taps & 1;
    while (bits < 22 && largest * (1 << (bits + 1)) + 0.5 < 32767) ++bits;
    values.resize(static_cast<size_t>(count) * taps);
    for (int i = 0; i < count; ++i) {
      const double *const row = &exact[static_cast<size_t>(i) * most];
      int16_t *const mine = &values[static_cast<size_t>(i) * taps];
      int left = 1 << bits, peak = 0;
      for (int k = 0; k < end[i] - first[i]; ++k) {
        left -= mine[k] = static_cast<int16_t>(std::lrint(row[k] * (1 << bits)));
        if (mine[k] > mine[peak]) peak = k;
      }
      mine[peak] = static_cast<int16_t>(mine[peak] + left);  // or one colour would become another
    }
  }

  const int16_t *of(int i) const { return &values[static_cast<size_t>(i) * taps]; }
};

using Shared = std::shared_ptr<const Weights>;

// Images of one size come in long rows. Who uses weights holds them, so nothing goes that is in use.
Shared weights(int size, double span, int out, int start, int count, bool bilinear) {
  thread_local std::vector<Shared> kept;
  constexpr size_t KEPT = 16;
  for (size_t i = 0; i < kept.size(); ++i) {
    const Weights &w = *kept[i];
    if (w.size == size && w.span == span && w.out == out && w.start == start && w.count == count &&
        w.bilinear == bilinear) {
      std::rotate(kept.begin(), kept.begin() + static_cast<std::ptrdiff_t>(i), kept.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      return kept.front();
    }
  }
  if (kept.size() == KEPT) kept.pop_back();
  kept.insert(kept.begin(), std::make_shared<const Weights>(size, span, out, start, count, bilinear));
  return kept.front();
}

// ---------------------------------------------------------------------------------------------------------- kernels

// Two rows of RGBX to two rows of RGB, each of `w.count` pixels; `from` is the column at which the rows begin.
using Across = void (*)(const uint8_t *a, const uint8_t *b, int from, const Weights &w, uint8_t *to_a, uint8_t *to_b);
// `taps` rows to one, byte by byte.
using Down = void (*)(const uint8_t *const *rows, const int16_t *values, int taps, int bits, int bytes, uint8_t *to);

uint8_t byte(int sum, int bits) { return static_cast<uint8_t>(std::clamp((sum + (1 << bits >> 1)) >> bits, 0, 255)); }

void across_plain(const uint8_t *a, const uint8_t *b, int from, const Weights &w, uint8_t *to_a, uint8_t *to_b) {
  for (int i = 0; i < w.count; ++i) {
    const int16_t *const values = w.of(i);
    const size_t at = 4 * static_cast<size_t>(w.first[i] - from);
    int sums[2][4] = {};
    for (int k = 0; k < w.taps; ++k)
      for (int c = 0; c < 4; ++c) {
        sums[0][c] += values[k] * a[at + 4 * k + c];
        sums[1][c] += values[k] * b[at + 4 * k + c];
      }
    for (int c = 0; c < 3; ++c) {
      to_a[3 * i + c] = byte(sums[0][c], w.bits);
      to_b[3 * i + c] = byte(sums[1][c], w.bits);
    }
  }
}

void down_plain(const uint8_t *const *rows, const int16_t *values, int taps, int bits, int bytes, uint8_t *to) {
  for (int at = 0; at < bytes; at += 16) {
    int sums[16] = {};
    for (int k = 0; k < taps; ++k)
      for (int i = 0; i < 16; ++i) sums[i] += values[k] * rows[k][at + i];
    for (int i = 0; i < 16; ++i) to[at + i] = byte(sums[i], bits);
  }
}

#if defined(__x86_64__)
int pair(const int16_t *values) {
  int both;
  std::memcpy(&both, values, sizeof both);
  return both;
}

__attribute__((target("avx2"))) void across_avx2(const uint8_t *a, const uint8_t *b, int from, const Weights &w,
                                                 uint8_t *to_a, uint8_t *to_b) {
  // Of each lane, one row: pixels 0 and 1, or 2 and 3, channel by channel, as 16-bit numbers.
  const __m256i first = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
  const __m256i second = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(8, -1, 12, -1, 9, -1, 13, -1, 10, -1, 14, -1, 11, -1, 15, -1));
  const __m256i half = _mm256_set1_epi32(1 << w.bits >> 1);
  const __m128i shift = _mm_cvtsi32_si128(w.bits);
  for (int i = 0; i < w.count; ++i) {
    const int16_t *const values = w.of(i);
    const size_t at = 4 * static_cast<size_t>(w.first[i] - from);
    __m256i sum = half, more = _mm256_setzero_si256();
    for (int k = 0; k < w.taps; k += 4) {
      const __m256i pixels = _mm256_inserti128_si256(
          _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(a + at + 4 * k))),
          _mm_loadu_si128(reinterpret_cast<const __m128i *>(b + at + 4 * k)), 1);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, first), _mm256_set1_epi32(pair(values + k))));
      if (k + 2 < w.taps)
        more = _mm256_add_epi32(
            more, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, second), _mm256_set1_epi32(pair(values + k + 2))));
    }
    sum = _mm256_sra_epi32(_mm256_add_epi32(sum, more), shift);
    sum = _mm256_packs_epi32(sum, sum);
    sum = _mm256_packus_epi16(sum, sum);
    const int made_a = _mm256_extract_epi32(sum, 0), made_b = _mm256_extract_epi32(sum, 4);
    std::memcpy(to_a + 3 * i, &made_a, 4);  // the fourth byte is the next pixel's first
    std::memcpy(to_b + 3 * i, &made_b, 4);
  }
}

__attribute__((target("avx2"))) void down_avx2(const uint8_t *const *rows, const int16_t *values, int taps, int bits,
                                               int bytes, uint8_t *to) {
  const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << bits >> 1);
  const __m128i shift = _mm_cvtsi32_si128(bits);
  for (int at = 0; at < bytes; at += 32) {
    __m256i sums[4] = {half, half, half, half};
    for (int k = 0; k < taps; k += 2) {
      const __m256i weight = _mm256_set1_epi32(pair(values + k));
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(rows[k] + at));
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(rows[k + 1] + at));
      const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
      sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), weight));
      sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), weight));
      sums[2] = _mm256_add_epi32(sums[2], _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), weight));
      sums[3] = _mm256_add_epi32(sums[3], _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), weight));
    }
    for (__m256i &sum : sums) sum = _mm256_sra_epi32(sum, shift);
    _mm256_storeu_si256(
        reinterpret_cast<__m256i *>(to + at),
        _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3])));
  }
}
#elif defined(__aarch64__)
void across_neon(const uint8_t *a, const uint8_t *b, int from, const Weights &w, uint8_t *to_a, uint8_t *to_b) {
  const int32x4_t half = vdupq_n_s32(1 << w.bits >> 1), shift = vdupq_n_s32(-w.bits);
  for (int i = 0; i < w.count; ++i) {
    const int16_t *const values = w.of(i);
    const size_t at = 4 * static_cast<size_t>(w.first[i] - from);
    int32x4_t sums[2] = {half, half};
    for (int k = 0; k < w.taps; k += 2) {
      const int16x8_t pixels_a = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(a + at + 4 * k)));
      const int16x8_t pixels_b = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(b + at + 4 * k)));
      sums[0] = vmlal_n_s16(sums[0], vget_low_s16(pixels_a), values[k]);
      sums[1] = vmlal_n_s16(sums[1], vget_low_s16(pixels_b), values[k]);
      sums[0] = vmlal_n_s16(sums[0], vget_high_s16(pixels_a), values[k + 1]);
      sums[1] = vmlal_n_s16(sums[1], vget_high_s16(pixels_b), values[k + 1]);
    }
    const int16x8_t both = vcombine_s16(vqmovn_s32(vshlq_s32(sums[0], shift)), vqmovn_s32(vshlq_s32(sums[1], shift)));
    const uint32x2_t made = vreinterpret_u32_u8(vqmovun_s16(both));
    const uint32_t made_a = vget_lane_u32(made, 0), made_b = vget_lane_u32(made, 1);
    std::memcpy(to_a + 3 * i, &made_a, 4);  // the fourth byte is the next pixel's first
    std::memcpy(to_b + 3 * i, &made_b, 4);
  }
}
#endif

struct Kernels {
  Across across = across_plain;
  Down down = down_plain;  // on NEON the compiler's
  const char *name = "plain";
};

Kernels chosen() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return {across_avx2, down_avx2, "avx2"};
#elif defined(__aarch64__)
  return {across_neon, down_plain, "neon"};
#endif
  return {};
}

const Kernels BEST = chosen();
Kernels kernels = BEST;

// ----------------------------------------------------------------------------------------------------------- geometry

struct Size {
  int height, width;
};

// As preprocess.Fit.resized, .columns_first and ._offset; Python rounds halves to the even side, as nearbyint does.
Size resized(const Fit &fit, int height, int width) {
  if (fit.mode == 2) return fit.edge ? Size{fit.edge, fit.edge} : Size{fit.height, fit.width};
  if (fit.mode == 0 && fit.edge) {
    const double edge = fit.edge;
    if (width <= height) return {static_cast<int>(edge * height / width), fit.edge};
    return {fit.edge, static_cast<int>(edge * width / height)};
  }
  const double high = static_cast<double>(height) / fit.height, wide = static_cast<double>(width) / fit.width;
  const double ratio = fit.mode == 1 ? std::max(high, wide) : std::min(high, wide);
  return {static_cast<int>(std::nearbyint(height / ratio)), static_cast<int>(std::nearbyint(width / ratio))};
}

int offset(const Fit &fit, int have, int want) {
  if (have < want) return -((want - have) / 2);
  return fit.even ? static_cast<int>(std::nearbyint((have - want) / 2.0)) : (have - want) / 2;
}

// Makes the pixels of one model from the rows of an image, which come in order.
class Fitter {
 public:
  // Of an image of `height` x `width`, made smaller by `scale` already. False where a side becomes 0.
  bool begin(const Fit &fit, int height, int width, int scale, uint8_t *row) {
    const Size wanted = resized(fit, height, width);
    if (wanted.height < 1 || wanted.width < 1) return false;
    const int top = offset(fit, wanted.height, fit.height), left = offset(fit, wanted.width, fit.width);
    const int y = std::max(top, 0), x = std::max(left, 0);
    const int rows = std::min(fit.height, wanted.height - y), columns = std::min(fit.width, wanted.width - x);
    const auto have = [scale](int side) { return (side + scale - 1) / scale; };
    const auto span = [scale](int side) { return static_cast<double>(side) / scale; };
    across_ = weights(have(width), span(width), wanted.width, x, columns, fit.bilinear);
    down_ = weights(have(height), span(height), wanted.height, y, rows, fit.bilinear);
    columns_first_ =
        fit.pillow && height > wanted.height && height - wanted.height > 2 * (width - wanted.width);
    if (rows < fit.height || columns < fit.width)
      std::memset(row, fit.fill, static_cast<size_t>(fit.height) * fit.width * 3);
    stride_ = static_cast<size_t>(fit.width) * 3;
    to_ = row + std::max(-top, 0) * stride_ + static_cast<size_t>(std::max(-left, 0)) * 3;
    made_ = 0;
    return true;
  }

  int first_row() const { return down_->first.front(); }
  int end_row() const { return down_->end.back(); }
  int first_column() const { return across_->first.front(); }
  int end_column() const { return across_->end.back(); }
  // A window at the right edge is cut short, and the kernels read the pixels of a whole one.
  size_t spare() const { return 4 * static_cast<size_t>(across_->taps) + SPARE; }

  // Memory for rows that begin at column `from`.
  void open(int from) {
    from_ = from;
    held_ = down_->taps + BATCH;
    bytes_ = columns_first_ ? 4 * (end_column() - first_column()) : 3 * across_->count;
    pitch_ = static_cast<size_t>(bytes_) + spare();
    ring_.resize(std::max(ring_.size(), pitch_ * held_));
    line_.resize(std::max(line_.size(), std::max(pitch_, static_cast<size_t>(3 * across_->count + SPARE))));
    spare_.resize(line_.size());
    window_.resize(static_cast<size_t>(down_->taps));
  }

  // `count` rows from number `at` on.
  void take(uint8_t *const *rows, int at, int count) {
    for (int i = 0; i < count; i += columns_first_ ? 1 : 2) {
      const int next = std::min(i + 1, count - 1);
      if (columns_first_)
        std::memcpy(held(at + i), rows[i] + 4 * static_cast<size_t>(first_column() - from_), static_cast<size_t>(bytes_));
      else
        kernels.across(rows[i], rows[next], from_, *across_, held(at + i), next == i ? spare_.data() : held(at + next));
    }
    for (; made_ < down_->count && down_->end[static_cast<size_t>(made_)] <= at + count; ++made_) make();
  }

 private:
  Shared across_, down_;
  std::vector<uint8_t> ring_, line_, spare_;
  std::vector<const uint8_t *> window_;
  size_t stride_ = 0, pitch_ = 0;
  uint8_t *to_ = nullptr;
  int from_ = 0, held_ = 0, bytes_ = 0, made_ = 0;
  bool columns_first_ = false;

  uint8_t *held(int row) { return &ring_[static_cast<size_t>(row % held_) * pitch_]; }

  void make() {
    const int first = down_->first[static_cast<size_t>(made_)], last = down_->end[static_cast<size_t>(made_)] - 1;
    for (int k = 0; k < down_->taps; ++k) window_[static_cast<size_t>(k)] = held(std::min(first + k, last));
    kernels.down(window_.data(), down_->of(made_), down_->taps, down_->bits, bytes_, line_.data());
    const uint8_t *made = line_.data();
    if (columns_first_) {
      kernels.across(line_.data(), line_.data(), first_column(), *across_, spare_.data(), spare_.data());
      made = spare_.data();
    }
    std::memcpy(to_ + static_cast<size_t>(made_) * stride_, made, static_cast<size_t>(across_->count) * 3);
  }
};

// Memory of a thread. Not in the frame that longjmp leaves.
struct Thread {
  std::vector<Fitter> fitters;
  std::vector<uint8_t> rows;
  uint8_t *pointers[BATCH];

  bool begin(const Fit *fits, int fit_count, int height, int width, int scale, uint8_t *const *to) noexcept try {
    if (fitters.size() < static_cast<size_t>(fit_count)) fitters.resize(static_cast<size_t>(fit_count));
    for (int i = 0; i < fit_count; ++i)
      if (!fitters[static_cast<size_t>(i)].begin(fits[i], height, width, scale, to[i])) return false;
    return true;
  } catch (const std::bad_alloc &) {
    return false;
  }

  // Memory for rows of `width` pixels that begin at column `from`.
  bool open(int width, int from, int fit_count) noexcept try {
    size_t spare = 0;
    for (int i = 0; i < fit_count; ++i) spare = std::max(spare, fitters[static_cast<size_t>(i)].spare());
    const size_t pitch = 4 * static_cast<size_t>(width) + spare;
    rows.resize(std::max(rows.size(), pitch * BATCH));
    for (int i = 0; i < BATCH; ++i) pointers[i] = &rows[pitch * static_cast<size_t>(i)];
    for (int i = 0; i < fit_count; ++i) fitters[static_cast<size_t>(i)].open(from);
    return true;
  } catch (const std::bad_alloc &) {
    return false;
  }
};

thread_local Thread mine;

// ------------------------------------------------------------------------------------------------------------ decoding

struct Errors {
  jpeg_error_mgr base;
  jmp_buf away;
};

void leave(j_common_ptr c) { std::longjmp(reinterpret_cast<Errors *>(c->err)->away, 1); }

void leave_at_warning(j_common_ptr c, int level) {
  if (level < 0) leave(c);
}

bool has_many_scans(const uint8_t *data, size_t size) {
  int scans = 0;
  for (const uint8_t *at = data, *end = data + size - 1;
       (at = static_cast<const uint8_t *>(std::memchr(at, 0xFF, static_cast<size_t>(end - at)))) != nullptr && at < end; ++at)
    if (at[1] == 0xDA && ++scans > SCANS_MAX) return true;
  return false;
}

bool is_mine(const jpeg_decompress_struct &c, bool has_scans) {
  const int64_t height = c.image_height, width = c.image_width;
  const int64_t longer = std::max(height, width), shorter = std::min(height, width);
  return c.data_precision == 8 && (c.num_components == 1 || c.num_components == 3) && !c.arith_code && shorter >= 1 &&
         height * width <= (has_scans ? SCANS_MAX_PIXELS : MAX_PIXELS) && longer <= SIDE_MAX &&
         longer <= ASPECT_MAX * shorter;
}

// The largest scale that leaves every model twice the sides it wants: the decoder's coarse filter is then not seen.
int scale_for(const Fit *fits, int fit_count, int height, int width) {
  for (int scale = 8; scale > 1; scale /= 2) {
    bool fine = true;
    for (int i = 0; i < fit_count; ++i) {
      const Size wanted = resized(fits[i], height, width);
      fine = fine && height / scale >= 2 * wanted.height && width / scale >= 2 * wanted.width;
    }
    if (fine) return scale;
  }
  return 1;
}

// No object with a destructor may be in this frame.
bool decode(const uint8_t *data, size_t size, const Fit *fits, int fit_count, uint8_t *const *to, bool fast) {
  if (size < 4 || size > FILE_MAX_BYTES || data[0] != 0xFF || data[1] != 0xD8 || data[2] != 0xFF) return false;
  jpeg_decompress_struct c;
  Errors errors;
  std::memset(&c, 0, sizeof c);
  c.err = jpeg.std_error(&errors.base);
  errors.base.error_exit = leave;
  errors.base.emit_message = leave_at_warning;
  if (setjmp(errors.away)) {
    jpeg.destroy(&c);
    return false;
  }
  jpeg.create(&c, JPEG_LIB_VERSION, sizeof c);
  jpeg.mem_src(&c, data, static_cast<unsigned long>(size));
  jpeg.read_header(&c, TRUE);
  const bool has_scans = jpeg.has_scans(&c) != 0;
  if (!is_mine(c, has_scans) || (has_scans && has_many_scans(data, size))) leave(reinterpret_cast<j_common_ptr>(&c));
  const int height = static_cast<int>(c.image_height), width = static_cast<int>(c.image_width);
  const int scale = fast ? scale_for(fits, fit_count, height, width) : 1;
  if (!mine.begin(fits, fit_count, height, width, scale, to)) leave(reinterpret_cast<j_common_ptr>(&c));
  c.out_color_space = JCS_EXT_RGBX;
  c.scale_num = 1;
  c.scale_denom = static_cast<unsigned>(scale);
  jpeg.start(&c);
  int top = INT32_MAX, bottom = 0, left = INT32_MAX, right = 0;
  for (int i = 0; i < fit_count; ++i) {
    const Fitter &fitter = mine.fitters[static_cast<size_t>(i)];
    top = std::min(top, fitter.first_row());
    bottom = std::max(bottom, fitter.end_row());
    left = std::min(left, fitter.first_column());
    right = std::max(right, fitter.end_column());
  }
  const int whole = static_cast<int>(c.output_width), rows = static_cast<int>(c.output_height);
  JDIMENSION from = 0;
  if (left + whole - right >= SKIPPED) {
    from = static_cast<JDIMENSION>(std::max(0, left - MARGIN));
    JDIMENSION columns = static_cast<JDIMENSION>(std::min(whole, right + MARGIN)) - from;
    jpeg.crop(&c, &from, &columns);
  }
  if (!mine.open(static_cast<int>(c.output_width), static_cast<int>(from), fit_count))
    leave(reinterpret_cast<j_common_ptr>(&c));
  if (top >= SKIPPED) jpeg.skip(&c, static_cast<JDIMENSION>(top - MARGIN));
  while (static_cast<int>(c.output_scanline) < bottom) {
    const int at = static_cast<int>(c.output_scanline), wanted = std::min(BATCH, bottom - at);
    for (int got = 0; got < wanted;)
      got += static_cast<int>(jpeg.read(&c, mine.pointers + got, static_cast<JDIMENSION>(wanted - got)));
    for (int i = 0; i < fit_count; ++i) mine.fitters[static_cast<size_t>(i)].take(mine.pointers, at, wanted);
  }
  // What is skipped to the very end is not looked at, and damage there would pass.
  if (rows - 1 > static_cast<int>(c.output_scanline)) jpeg.skip(&c, static_cast<JDIMENSION>(rows - 1) - c.output_scanline);
  while (static_cast<int>(c.output_scanline) < rows) jpeg.read(&c, mine.pointers, 1);
  jpeg.finish(&c);
  jpeg.destroy(&c);
  return true;
}

// Whether what follows a header is the data of one scan and nothing else, to the end of the file.
bool is_one_scan(const uint8_t *at, const uint8_t *end) {
  while ((at = static_cast<const uint8_t *>(std::memchr(at, 0xFF, static_cast<size_t>(end - at)))) != nullptr && ++at < end)
    if (*at != 0x00 && *at != 0xFF && (*at < 0xD0 || *at > 0xD7)) return *at == 0xD9 && at + 1 == end;
  return false;
}

// Whether the first frame is a baseline one; newer libjpegs read lossless ones too and do not say so.
bool is_first_frame_baseline(const uint8_t *data, size_t size) {
  for (size_t at = 2; at + 4 < size && data[at] == 0xFF;
       at += data[at + 1] == 0xFF ? 1 : 2 + static_cast<size_t>(data[at + 2] << 8 | data[at + 3]))
    if ((data[at + 1] & 0xF0) == 0xC0 && data[at + 1] != 0xC4 && data[at + 1] != 0xC8 && data[at + 1] != 0xCC)
      return data[at + 1] == 0xC0;
  return false;
}

// Whether a file has brought the table that it names. libjpeg checks numbers of tables only when it decodes.
template <typename Table, int COUNT>
bool has_table(Table *const (&tables)[COUNT], int number) {
  return number >= 0 && number < COUNT && tables[number] != nullptr;
}

// Whether an engine decodes a JPEG as libjpeg does, or fails: baseline, with all tables, in colours that need no mark.
bool is_baseline(const jpeg_decompress_struct &c) {
  if (c.comps_in_scan != c.num_components) return false;  // the others' numbers of Huffman tables are not set
  for (int i = 0; i < c.num_components; ++i) {
    const jpeg_component_info &one = c.comp_info[i];
    const bool is_sampled = i == 0 ? one.h_samp_factor <= 2 && one.v_samp_factor <= 2
                                   : one.h_samp_factor == 1 && one.v_samp_factor == 1;
    if (!is_sampled || !has_table(c.quant_tbl_ptrs, one.quant_tbl_no) || !has_table(c.dc_huff_tbl_ptrs, one.dc_tbl_no) ||
        !has_table(c.ac_huff_tbl_ptrs, one.ac_tbl_no))
      return false;
  }
  return c.image_height <= ENGINE_SIDE_MAX && c.image_width <= ENGINE_SIDE_MAX &&
         c.jpeg_color_space == (c.num_components == 1 ? JCS_GRAYSCALE : JCS_YCbCr);
}

// The sides of a JPEG that an engine may decode: one that is plain for `decode`, baseline, and whole.
bool sides(const uint8_t *data, size_t size, int32_t *height, int32_t *width) {
  if (size < 4 || size > FILE_MAX_BYTES || data[0] != 0xFF || data[1] != 0xD8 || data[2] != 0xFF) return false;
  jpeg_decompress_struct c;
  Errors errors;
  std::memset(&c, 0, sizeof c);
  c.err = jpeg.std_error(&errors.base);
  errors.base.error_exit = leave;
  errors.base.emit_message = leave_at_warning;
  if (setjmp(errors.away)) {
    jpeg.destroy(&c);
    return false;
  }
  jpeg.create(&c, JPEG_LIB_VERSION, sizeof c);
  jpeg.mem_src(&c, data, static_cast<unsigned long>(size));
  jpeg.read_header(&c, TRUE);
  *height = static_cast<int32_t>(c.image_height);
  *width = static_cast<int32_t>(c.image_width);
  const bool is_plain = is_mine(c, jpeg.has_scans(&c) != 0) && is_first_frame_baseline(data, size) &&
                        is_baseline(c) && is_one_scan(c.src->next_input_byte, data + size);
  jpeg.destroy(&c);
  return is_plain;
}

bool resize(const uint8_t *pixels, int height, int width, const Fit *fits, int fit_count, uint8_t *const *to) {
  if (std::min(height, width) < 1 || std::max(height, width) > SIDE_MAX) return false;
  if (!mine.begin(fits, fit_count, height, width, 1, to) || !mine.open(width, 0, fit_count)) return false;
  int top = height, bottom = 0;
  for (int i = 0; i < fit_count; ++i) {
    top = std::min(top, mine.fitters[static_cast<size_t>(i)].first_row());
    bottom = std::max(bottom, mine.fitters[static_cast<size_t>(i)].end_row());
  }
  for (int at = top; at < bottom; at += BATCH) {
    const int count = std::min(BATCH, bottom - at);
    for (int i = 0; i < count; ++i)
      std::memcpy(mine.pointers[i], pixels + 4 * static_cast<size_t>(at + i) * width, 4 * static_cast<size_t>(width));
    for (int i = 0; i < fit_count; ++i) mine.fitters[static_cast<size_t>(i)].take(mine.pointers, at, count);
  }
  return true;
}

// Whether the arithmetic of `resized` and `Weights` holds for these geometries, which a model's configuration gives.
bool are_usable(const Fit *fits, int fit_count) {
  return fit_count >= 1 && fit_count <= FITS_MAX && std::all_of(fits, fits + fit_count, [](const Fit &fit) {
           return std::min(fit.height, fit.width) >= 1 && fit.edge >= 0 &&
                  std::max({fit.height, fit.width, fit.edge}) <= SIDE_MAX && fit.mode >= 0 && fit.mode <= 2;
         });
}

template <typename Function>
bool found(void *library, const char *name, Function &function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool fits_abi() {
  jpeg_decompress_struct c;
  Errors errors;
  std::memset(&c, 0, sizeof c);
  c.err = jpeg.std_error(&errors.base);
  errors.base.error_exit = leave;
  if (setjmp(errors.away)) return false;
  jpeg.create(&c, JPEG_LIB_VERSION, sizeof c);
  jpeg.destroy(&c);
  return true;
}

}  // namespace

#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// Open libjpeg-turbo. Gives what is wrong with it, or nullptr.
EXPORTED const char *embq_open(const char *path) {
  void *const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "it cannot be opened";
  if (!found(library, "jpeg_std_error", jpeg.std_error) || !found(library, "jpeg_CreateDecompress", jpeg.create) ||
      !found(library, "jpeg_destroy_decompress", jpeg.destroy) || !found(library, "jpeg_mem_src", jpeg.mem_src) ||
      !found(library, "jpeg_read_header", jpeg.read_header) || !found(library, "jpeg_start_decompress", jpeg.start) ||
      !found(library, "jpeg_read_scanlines", jpeg.read) || !found(library, "jpeg_skip_scanlines", jpeg.skip) ||
      !found(library, "jpeg_crop_scanline", jpeg.crop) || !found(library, "jpeg_finish_decompress", jpeg.finish) ||
      !found(library, "jpeg_has_multiple_scans", jpeg.has_scans))
    return "it is not libjpeg-turbo";
  return fits_abi() ? nullptr : "its structures are not those of libjpeg 6.2";
}

// Name of the kernels that are used from now on: those of this processor, or the plain ones.
EXPORTED const char *embq_kernels(int plain) {
  kernels = plain ? Kernels{} : BEST;
  return kernels.name;
}

// Pixels of `n` encoded images for each of `fit_count` models: those of image i, uint8 of shape (height, width, 3), at
// rows[fit] + i * height * width * 3. Undefined where status[i] is not 0.
//
// fast: whether the decoder may make large images smaller.
EXPORTED void embq_prepare(const uint8_t *const *data, const int64_t *sizes, int n, const Fit *fits, int fit_count,
                  uint8_t *const *rows, int fast, int32_t *status) {
  uint8_t *to[FITS_MAX];
  std::fill(status, status + n, NOT_MINE);
  if (!are_usable(fits, fit_count)) return;
  for (int i = 0; i < n; ++i) {
    for (int f = 0; f < fit_count; ++f)
      to[f] = rows[f] + static_cast<size_t>(i) * fits[f].height * fits[f].width * 3;
    status[i] = decode(data[i], static_cast<size_t>(sizes[i]), fits, fit_count, to, fast != 0) ? DONE : NOT_MINE;
  }
}

// The same of one decoded image: RGBX of shape (height, width, 4). 0 where it is done.
EXPORTED int embq_resize(const uint8_t *pixels, int height, int width, const Fit *fit, uint8_t *row) {
  return are_usable(fit, 1) && resize(pixels, height, width, fit, 1, &row) ? DONE : NOT_MINE;
}

// The same of `n` decoded images that lie one behind the other: image i has the rows of place[i]. Sets no status where
// a geometry is unusable.
EXPORTED void embq_resize_all(const uint8_t *pixels, const int32_t *heights, const int32_t *widths, const int32_t *places,
                              int n, const Fit *fits, int fit_count, uint8_t *const *rows, int32_t *status) {
  uint8_t *to[FITS_MAX];
  if (!are_usable(fits, fit_count)) return;
  for (int i = 0; i < n; ++i) {
    for (int f = 0; f < fit_count; ++f)
      to[f] = rows[f] + static_cast<size_t>(places[i]) * fits[f].height * fits[f].width * 3;
    status[places[i]] = resize(pixels, heights[i], widths[i], fits, fit_count, to) ? DONE : NOT_MINE;
    pixels += 4 * static_cast<size_t>(heights[i]) * widths[i];
  }
}

// (height, width) of each of `n` encoded images that a JPEG engine may decode; a height of 0 of all others.
EXPORTED void embq_sides(const uint8_t *const *data, const int64_t *sizes, int n, int32_t *heights, int32_t *widths) {
  for (int i = 0; i < n; ++i)
    if (!sides(data[i], static_cast<size_t>(sizes[i]), &heights[i], &widths[i])) heights[i] = widths[i] = 0;
}

}  // extern "C"
