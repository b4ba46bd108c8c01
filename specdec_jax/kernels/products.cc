// Products of a few rows of bfloat16 with weights [columns, depth] in bfloat16 or int8, summed in float32.
//
// Weights are read once, in a few streams, each in the order in which it lies in memory, whatever the number of rows: a
// pass over them takes as long as reading them, or as its arithmetic. The sum of an entry is taken in one order, which
// depends on the depth alone: a row's results do not depend on the other rows. One file for every path; the flags it is
// compiled with choose: AMX, AVX-512 with bfloat16, AVX-512, or AVX2 with FMA.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using Bf16 = uint16_t;

struct Product {
  const Bf16* x;  // [rows, depth]
  const void* weights;  // [columns, depth] Bf16, or int8_t where there are scales
  const float* scale;  // [columns], or null
  float* out;  // [rows, columns]
  size_t rows, depth, columns;
  const void* inputs;  // x as `prepare` lays it
};

// Memory of the calling thread for one of its uses; it lives until the thread asks for that use again.
enum Use { INPUTS, QUERIES, SCORES, ROW };
template <Use use>
void* scratch(size_t bytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + 64) memory.resize(bytes + 64);
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
}

size_t up(size_t size, size_t step) { return (size + step - 1) / step * step; }

inline float to_float(Bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

#ifdef __AVX512F__
using Lanes = __m512;
constexpr size_t LANES = 16;
inline Lanes zero() { return _mm512_setzero_ps(); }
inline Lanes load(const float* from) { return _mm512_loadu_ps(from); }
inline Lanes add(Lanes sum, Lanes a, Lanes b) { return _mm512_fmadd_ps(a, b, sum); }
inline float total(Lanes sum) { return _mm512_reduce_add_ps(sum); }
inline Lanes halves_added(Lanes a, Lanes b) {  // halves of 256 bits, then of 128, as in `total`
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline __m128 totals(Lanes a, Lanes b, Lanes c, Lanes d) {
  const Lanes ab = halves_added(a, b), cd = halves_added(c, d);  // two quarters of each
  Lanes all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
  return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), all));
}
inline Lanes to_lanes(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Lanes to_lanes(const Bf16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Lanes rounded_to_bf16(Lanes value) {  // of positive numbers, to the nearest, ties to even
  const __m512i bits = _mm512_castps_si512(value), last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, last), _mm512_set1_epi32(0x7fff));
  return _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(int(0xffff0000))));
}
inline Lanes all(float value) { return _mm512_set1_ps(value); }
inline Lanes times(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes plus(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes over(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes whole(Lanes a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes power_of_two(Lanes n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline void store(float* to, Lanes value) { _mm512_storeu_ps(to, value); }
#else
using Lanes = __m256;
constexpr size_t LANES = 8;
inline Lanes zero() { return _mm256_setzero_ps(); }
inline Lanes load(const float* from) { return _mm256_loadu_ps(from); }
inline Lanes add(Lanes sum, Lanes a, Lanes b) { return _mm256_fmadd_ps(a, b, sum); }
inline float total(Lanes sum) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline __m128 totals(Lanes a, Lanes b, Lanes c, Lanes d) {  // as `total`
  const Lanes ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  const Lanes cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
  const Lanes two = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const Lanes one = _mm256_add_ps(two, _mm256_movehdup_ps(two));  // a, -, c, - | b, -, d, -
  return _mm_unpacklo_ps(_mm_shuffle_ps(_mm256_castps256_ps128(one), _mm256_castps256_ps128(one), 0x88),
                         _mm_shuffle_ps(_mm256_extractf128_ps(one, 1), _mm256_extractf128_ps(one, 1), 0x88));
}
inline Lanes to_lanes(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Lanes to_lanes(const Bf16* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Lanes rounded_to_bf16(Lanes value) {  // of positive numbers, to the nearest, ties to even
  const __m256i bits = _mm256_castps_si256(value), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, last), _mm256_set1_epi32(0x7fff));
  return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(int(0xffff0000))));
}
inline Lanes all(float value) { return _mm256_set1_ps(value); }
inline Lanes times(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
inline Lanes plus(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
inline Lanes larger(Lanes a, Lanes b) { return _mm256_max_ps(a, b); }
inline Lanes over(Lanes a, Lanes b) { return _mm256_div_ps(a, b); }
inline Lanes whole(Lanes a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes power_of_two(Lanes n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline void store(float* to, Lanes value) { _mm256_storeu_ps(to, value); }
#endif
template <class Register>
inline Register in_register(Register value) {  // else compilers load an input again for each use, and spill sums
  asm("" : "+v"(value));
  return value;
}

#ifdef __AMX_BF16__

// A tile of 16 weights' rows by 32 of the depth times one of 32 of the depth by 16 rows of x, in pairs.
constexpr size_t UNIT = 64;  // columns of a group: four tiles
constexpr size_t STEP = 32, SIDE = 16;

bool enable() {
  constexpr int REQUEST = 0x1023, TILES = 18;
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

void transpose(__m512i tile[SIDE]) {
  alignas(64) int low[SIDE], high[SIDE];
  for (int side : {8, 4, 2, 1}) {
    for (int j = 0; j < 16; j++) {
      low[j] = j & side ? 16 + (j ^ side) : j;
      high[j] = j & side ? 16 + j : j ^ side;
    }
    const __m512i from_low = _mm512_load_si512(low), from_high = _mm512_load_si512(high);
    for (int i = 0; i < 16; i++) {
      if (i & side) continue;
      const __m512i a = tile[i], b = tile[i + side];
      tile[i] = _mm512_permutex2var_epi32(a, from_low, b);
      tile[i + side] = _mm512_permutex2var_epi32(a, from_high, b);
    }
  }
}

// [rows / 16, depth / 32, 16 pairs, 16 rows, 2], with zeros for what is not there.
void prepare(Product& p) {
  const size_t steps = up(p.depth, STEP) / STEP, blocks = up(p.rows, SIDE) / SIDE;
  __m512i* out = static_cast<__m512i*>(scratch<INPUTS>(blocks * steps * 1024));
  p.inputs = out;
  for (size_t block = 0; block < blocks; block++) {
    for (size_t step = 0; step < steps; step++, out += SIDE) {
      const size_t left = std::min(STEP, p.depth - step * STEP);
      const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << left) - 1);
      __m512i tile[SIDE];
      for (size_t i = 0; i < SIDE; i++) {
        const size_t row = block * SIDE + i;
        tile[i] = row < p.rows ? _mm512_maskz_loadu_epi16(mask, p.x + row * p.depth + step * STEP) : _mm512_setzero_si512();
      }
      transpose(tile);
      for (size_t i = 0; i < SIDE; i++) _mm512_store_si512(out + i, tile[i]);
    }
  }
}

inline __m512i widened(const Bf16* from, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, from); }

inline __m512i widened(const int8_t* from, __mmask32 mask) {  // a small whole number's float32 ends in 16 zeros
  const __m512i pairs = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi8(mask, from));
  const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24));
  const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(pairs, 8));
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

struct Panel {
  const void* data;
  size_t stride;
};

// 16 rows of the weights from `column` on, 32 of the depth from `k` on: as they lie, or laid in `copy` with zeros.
template <class W>
inline Panel panel(const Product& p, size_t column, size_t k, __m512i* copy) {
  const W* from = static_cast<const W*>(p.weights) + column * p.depth + k;
  const size_t rows = std::min(SIDE, p.columns - column), left = std::min(STEP, p.depth - k);
  if (sizeof(W) == 2 && rows == SIDE && left == STEP) return {from, p.depth * sizeof(W)};
  const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << left) - 1);
  for (size_t i = 0; i < rows; i++) _mm512_store_si512(copy + i, widened(from + i * p.depth, mask));
  for (size_t i = rows; i < SIDE; i++) _mm512_store_si512(copy + i, _mm512_setzero_si512());
  return {copy, 64};
}

void write(const Product& p, __m512i sums[SIDE], size_t column, size_t block) {
  transpose(sums);
  const size_t count = std::min(SIDE, p.columns - column), rows = std::min(SIDE, p.rows - block * SIDE);
  const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  const __m512 scale = p.scale ? _mm512_maskz_loadu_ps(mask, p.scale + column) : _mm512_set1_ps(1.0f);
  for (size_t i = 0; i < rows; i++) {
    float* out = p.out + (block * SIDE + i) * p.columns + column;
    _mm512_mask_storeu_ps(out, mask, _mm512_mul_ps(_mm512_castsi512_ps(sums[i]), scale));
  }
}

// Up to four tiles of weights, one of rows.
template <class W>
void narrow(const Product& p, size_t column, size_t tiles, size_t block) {
  const size_t steps = up(p.depth, STEP) / STEP;
  const char* inputs = static_cast<const char*>(p.inputs) + block * steps * 1024;
  __m512i copy[4][SIDE], sums[SIDE];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (size_t step = 0; step < steps; step++) {
    const size_t k = step * STEP;
    // All panels before the first tile: what was just stored is slow to load.
    Panel panels[4];
    for (size_t i = 0; i < tiles; i++) panels[i] = panel<W>(p, column + i * SIDE, k, copy[i]);
    _tile_loadd(7, inputs + step * 1024, 64);
#define SPECDEC_TILE(I, A)                               \
  if (I < tiles) {                                       \
    _tile_loadd(A, panels[I].data, panels[I].stride);    \
    _tile_dpbf16ps(I, A, 7);                             \
  }
    SPECDEC_TILE(0, 4)
    SPECDEC_TILE(1, 5)
    SPECDEC_TILE(2, 6)
    SPECDEC_TILE(3, 4)
#undef SPECDEC_TILE
  }
#define SPECDEC_WRITE(I)                         \
  if (I < tiles) {                               \
    _tile_stored(I, sums, 64);                   \
    write(p, sums, column + I * SIDE, block);    \
  }
  SPECDEC_WRITE(0)
  SPECDEC_WRITE(1)
  SPECDEC_WRITE(2)
  SPECDEC_WRITE(3)
#undef SPECDEC_WRITE
}

// Up to two tiles of weights, two of rows.
template <class W>
void wide(const Product& p, size_t column, size_t tiles, size_t block) {
  const size_t steps = up(p.depth, STEP) / STEP;
  const char* inputs = static_cast<const char*>(p.inputs) + block * steps * 1024;
  __m512i copy[SIDE], sums[SIDE];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (size_t step = 0; step < steps; step++) {
    const size_t k = step * STEP;
    _tile_loadd(6, inputs + step * 1024, 64);
    _tile_loadd(7, inputs + (steps + step) * 1024, 64);
    const Panel first = panel<W>(p, column, k, copy);
    _tile_loadd(4, first.data, first.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (tiles < 2) continue;
    const Panel second = panel<W>(p, column + SIDE, k, copy);
    _tile_loadd(5, second.data, second.stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  write(p, sums, column, block);
  _tile_stored(1, sums, 64);
  write(p, sums, column, block + 1);
  if (tiles < 2) return;
  _tile_stored(2, sums, 64);
  write(p, sums, column + SIDE, block);
  _tile_stored(3, sums, 64);
  write(p, sums, column + SIDE, block + 1);
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

template <class W>
void multiply(const Product& p, size_t begin, size_t end) {
  static const TileConfig config;
  _tile_loadconfig(&config);
  const size_t blocks = up(p.rows, SIDE) / SIDE;
  for (size_t column = begin; column < end; column += UNIT) {
    const size_t tiles = up(std::min(UNIT, end - column), SIDE) / SIDE;
    size_t block = 0;
    for (; block + 2 <= blocks; block += 2) {
      for (size_t tile = 0; tile < tiles; tile += 2) {
        wide<W>(p, column + tile * SIDE, std::min(tiles - tile, size_t{2}), block);
      }
    }
    if (block < blocks) narrow<W>(p, column, tiles, block);
  }
  _tile_release();
}

void score(const Product& p) { multiply<Bf16>(p, 0, p.columns); }

#else

bool enable() { return true; }

#ifdef __AVX512F__
constexpr int MOST_ROWS = 8;
constexpr int COLUMNS[MOST_ROWS + 1] = {0, 8, 8, 6, 4, 4, 4, 3, 3};  // of a tile, by rows: at most 24 sums
#else
constexpr int MOST_ROWS = 6;
constexpr int COLUMNS[MOST_ROWS + 1] = {0, 6, 4, 3, 3, 2, 2};  // of a tile, by rows: at most 12 sums of 16 registers
#endif

// How weights of a type are multiplied: `STEP` of the depth at a time, in `PARTS` of one register, with inputs laid for
// it.
template <class W>
struct By {
  using Input = float;
  using Weights = Lanes;
  static constexpr size_t STEP = LANES;
  static constexpr int PARTS = 1;
  template <int part, bool spare>
  static Weights read(const W* from) {
    return to_lanes(from);
  }
  static Lanes input(const float* x) { return in_register(load(x)); }
  static Lanes sum(Lanes sum, Weights w, Lanes x) { return add(sum, w, x); }
  static void lay(const Bf16* from, float* out) { store(out, to_lanes(from)); }
};

#ifndef __AVX512F__
// Eight pairs of neighbours: the first of a pair is shifted up, the second has the first cleared below it, by a mask or,
// where no register is `spare` for one, by two shifts. Half the instructions of widening.
template <>
struct By<Bf16> : By<int8_t> {
  static constexpr size_t STEP = 2 * LANES;
  static constexpr int PARTS = 2;
  template <int part, bool spare>
  static Weights read(const Bf16* from) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (part == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    if (spare) return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(pairs, 16), 16));
  }
  static void lay(const Bf16* from, float* out) {
    store(out, read<0, true>(from));
    store(out + LANES, read<1, true>(from));
  }
};
#endif

#ifdef __AVX512BF16__
struct InPairs {
  using Input = Bf16;
  using Weights = __m512bh;
  static constexpr size_t STEP = 32;
  static constexpr int PARTS = 1;
  template <int part, bool spare>
  static Weights read(const Bf16* from) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(from));
  }
  template <int part, bool spare>
  static Weights read(const int8_t* from) {  // small whole numbers are exact
    return in_register(_mm512_cvtne2ps_pbh(to_lanes(from + LANES), to_lanes(from)));
  }
  static __m512bh input(const Bf16* x) { return in_register(reinterpret_cast<__m512bh>(_mm512_loadu_si512(x))); }
  static Lanes sum(Lanes sum, Weights w, __m512bh x) { return _mm512_dpbf16_ps(sum, w, x); }
  static void lay(const Bf16* from, Bf16* out) { memcpy(out, from, STEP * sizeof(Bf16)); }
};
template <>
struct By<Bf16> : InPairs {};
template <>
struct By<int8_t> : InPairs {};
#endif

constexpr size_t UNIT = 24;  // columns of a group, a multiple of every tile's: threads cut between groups
constexpr size_t CACHE_SHARE = 300 << 10;  // bytes of weights that stay in the second-level cache for the next rows
constexpr size_t AHEAD = LANES == 16 ? 1024 : 512;  // bytes of a stream of weights that are fetched in advance

// Adds the products of a step of x with COLUMNS columns of weights, `apart` entries apart.
template <class W, int ROWS, int COLUMNS, int part = 0>
inline void add_step(Lanes (&sums)[COLUMNS][ROWS], const W* weights, size_t apart, const typename By<W>::Input* x, size_t stride) {
  using How = By<W>;
  constexpr bool spare = ROWS * COLUMNS + COLUMNS < 14;  // of 16 registers, with one for x
  typename How::Weights w[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) w[c] = How::template read<part, spare>(weights + c * apart);
  for (int r = 0; r < ROWS; r++) {
    const auto input = How::input(x + r * stride + part * LANES);
    for (int c = 0; c < COLUMNS; c++) sums[c][r] = in_register(How::sum(sums[c][r], w[c], input));
  }
  if constexpr (part + 1 < How::PARTS) add_step<W, ROWS, COLUMNS, part + 1>(sums, weights, apart, x, stride);
}

// The sums of COLUMNS columns of weights, `apart` columns apart, for ROWS rows.
template <class W, int ROWS, int COLUMNS>
inline void add_up(Lanes (&sums)[COLUMNS][ROWS], const Product& p, size_t column, size_t apart, size_t row, size_t ahead) {
  using How = By<W>;
  const size_t stride = up(p.depth, How::STEP), whole = p.depth / How::STEP * How::STEP;
  const W* weights = static_cast<const W*>(p.weights) + column * p.depth;
  const typename How::Input* x = static_cast<const typename How::Input*>(p.inputs) + row * stride;
  for (int c = 0; c < COLUMNS; c++)
    for (int r = 0; r < ROWS; r++) sums[c][r] = zero();
  for (size_t k = 0; k < whole; k += How::STEP) {
    for (int c = 0; c < COLUMNS; c++) {
      _mm_prefetch(reinterpret_cast<const char*>(weights + c * apart * p.depth + k) + ahead, _MM_HINT_T0);
    }
    add_step<W, ROWS, COLUMNS>(sums, weights + k, apart * p.depth, x + k, stride);
  }
  if (whole < p.depth) {
    W rest[COLUMNS][How::STEP] = {};
    for (int c = 0; c < COLUMNS; c++) {
      memcpy(rest[c], weights + c * apart * p.depth + whole, (p.depth - whole) * sizeof(W));
    }
    add_step<W, ROWS, COLUMNS>(sums, rest[0], How::STEP, x + whole, stride);
  }
}

// COLUMNS columns, `apart` columns apart from `column` on. The next tile continues each of their streams.
template <class W, int ROWS, int COLUMNS>
inline void tile(const Product& p, size_t column, size_t apart, size_t row, size_t ahead) {
  Lanes sums[COLUMNS][ROWS];
  add_up<W, ROWS, COLUMNS>(sums, p, column, apart, row, ahead);
  constexpr int SUMS = COLUMNS * ROWS;
  float each[SUMS];
  const Lanes* sum = sums[0];
  for (int i = 0; i + 4 <= SUMS; i += 4) _mm_storeu_ps(each + i, totals(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]));
  for (int i = SUMS / 4 * 4; i < SUMS; i++) each[i] = total(sum[i]);
  for (int c = 0; c < COLUMNS; c++) {
    const size_t at = column + c * apart;
    const float scale = p.scale ? p.scale[at] : 1.0f;
    for (int r = 0; r < ROWS; r++) p.out[(row + r) * p.columns + at] = each[c * ROWS + r] * scale;
  }
}

// The `turn`-th of `turns` passes over the columns from `begin` to `end`, which share the fetching of the next as many.
template <class W, int ROWS>
void group(const Product& p, size_t begin, size_t end, size_t row, size_t turn, size_t turns) {
  constexpr int WIDE = COLUMNS[ROWS];
  const size_t apart = (end - begin) / WIDE, next = (end - begin) * p.depth * sizeof(W);
  for (size_t i = 0; i < apart; i++) {
    tile<W, ROWS, WIDE>(p, begin + i, apart, row, LANES == 16 && turns > 1 && i % turns == turn ? next : AHEAD);
  }
  for (size_t column = begin + apart * WIDE; column < end; column++) tile<W, ROWS, 1>(p, column, 1, row, AHEAD);
}

template <class W, int ROWS = MOST_ROWS>
void rows(const Product& p, size_t begin, size_t end, size_t row, size_t count, size_t turn = 0, size_t turns = 1) {
  if (count == ROWS) return group<W, ROWS>(p, begin, end, row, turn, turns);
  if constexpr (ROWS > 1) rows<W, ROWS - 1>(p, begin, end, row, count, turn, turns);
}

template <class W>
void multiply(const Product& p, size_t begin, size_t end) {
  if (p.rows <= MOST_ROWS) return rows<W>(p, begin, end, 0, p.rows);
  const size_t tiles = up(p.rows, MOST_ROWS) / MOST_ROWS, each = up(p.rows, tiles) / tiles;  // of rows, about equal
  const size_t most = LANES == 16 && p.rows <= 64 ? 1 : 4;  // few rows: short pieces, fetched one ahead
  const size_t cached = std::clamp<size_t>((CACHE_SHARE / sizeof(W)) / (p.depth * UNIT), 1, most) * UNIT;
  for (size_t column = begin; column < end; column += cached) {
    const size_t last = std::min(column + cached, end);
    for (size_t row = 0; row < p.rows; row += each) {
      rows<W>(p, column, last, row, std::min(p.rows - row, each), row / each, tiles);
    }
  }
}

template <class W>
void lay(Product& p) {
  using How = By<W>;
  const size_t stride = up(p.depth, How::STEP);
  auto* out = static_cast<typename How::Input*>(scratch<INPUTS>(p.rows * stride * sizeof(typename How::Input)));
  p.inputs = out;
  for (size_t row = 0; row < p.rows; row++, out += stride) {
    const Bf16* from = p.x + row * p.depth;
    size_t k = 0;
    for (; k + How::STEP <= p.depth; k += How::STEP) How::lay(from + k, out + k);
    if (k == p.depth) continue;
    Bf16 rest[How::STEP] = {};
    memcpy(rest, from + k, (p.depth - k) * sizeof(Bf16));
    How::lay(rest, out + k);
  }
}

void prepare(Product& p) { p.scale ? lay<int8_t>(p) : lay<Bf16>(p); }

// As `multiply`, to the same bits, and faster for a short depth: sums of four neighbouring columns are stored together.
template <int ROWS = LANES == 16 ? 6 : 3>
void score(const Product& p, size_t row = 0) {
  for (; row + ROWS <= p.rows; row += ROWS) {
    for (size_t next = 0; next < p.columns; next += 4) {
      const size_t column = std::min(next, p.columns - 4);
      Lanes sums[4][ROWS];
      add_up<Bf16, ROWS, 4>(sums, p, column, 1, row, AHEAD);
      float* out = p.out + row * p.columns + column;
      for (int r = 0; r < ROWS; r++) _mm_storeu_ps(out + r * p.columns, totals(sums[0][r], sums[1][r], sums[2][r], sums[3][r]));
    }
  }
  if constexpr (ROWS > 1) score<ROWS - 1>(p, row);
}

#endif

void part(const Product& p, size_t begin, size_t end) {
  p.scale ? multiply<int8_t>(p, begin, end) : multiply<Bf16>(p, begin, end);
}

constexpr size_t SMALL = 1 << 18;  // bytes of weights below which a product is not worth a second thread
constexpr size_t SHARES = 3;  // of each thread: one that is late leaves the rest to the others

// Pieces of work that threads take as they come. Who comes too late finds none left and touches nothing else.
template <class Work>
struct Shared {
  Work work;  // (begin, end)
  size_t pieces, share;
  std::atomic<size_t> next{0}, done{0};

  Shared(Work work, size_t pieces, size_t share) : work(work), pieces(pieces), share(share) {}

  void take() {
    for (size_t begin; (begin = next.fetch_add(share)) < pieces;) {
      const size_t end = std::min(begin + share, pieces);
      work(begin, end);
      done.fetch_add(end - begin, std::memory_order_release);
    }
  }
};

template <class Work>
void spread(Work work, size_t pieces, size_t bytes, ffi::ThreadPool* pool) {
  const size_t threads = pool ? std::min<size_t>(pool->num_threads(), pieces) : 1;
  if (threads < 2 || bytes < SMALL) return work(0, pieces);
  auto shared = std::make_shared<Shared<Work>>(work, pieces, std::max<size_t>(1, pieces / (SHARES * threads)));
  for (size_t i = 1; i < threads; i++) pool->Schedule([shared] { shared->take(); });
  shared->take();
  for (int turns = 0; shared->done.load(std::memory_order_acquire) < pieces; turns++) {
    turns < 4096 ? _mm_pause() : std::this_thread::yield();
  }
}

void run(Product p, ffi::ThreadPool* pool) {
  prepare(p);
  const auto work = [p](size_t begin, size_t end) { part(p, begin * UNIT, std::min(end * UNIT, p.columns)); };
  spread(work, up(p.columns, UNIT) / UNIT, p.columns * p.depth * (p.scale ? 1 : 2), pool);
}

// Attention of a few queries over the slots of a cache. A row is a query's head; the rows of heads that share keys lie
// together. A row's sums go over the slots that it sees, in order, wherever they lie and whatever else there is.
struct Attention {
  const Bf16 *query, *keys, *values;  // [batch, width, heads, dim], scaled; [batch, kv_heads, slots, dim]
  const bool* mask;  // [batch, width, slots]
  const float* biases;  // [batch, heads, width, slots], added to scores that are capped; or null
  float* out;  // [batch, width, heads, dim]
  size_t batch, width, heads, kv_heads, slots, dim;
  float cap;  // of scores, softly; 0: none

  static constexpr size_t ROWS = 16;  // of a piece

  size_t group() const { return heads / kv_heads; }
  size_t chunks() const { return up(width * group(), ROWS) / ROWS; }
  size_t pieces() const { return batch * kv_heads * chunks(); }
};

// To about 1e-7 of the result, for x up to 88; NaN stays NaN: of two operands with a NaN `larger` returns the second.
inline Lanes exponential(Lanes x) {
  x = larger(all(-87.0f), x);
  const Lanes n = whole(times(x, all(1.44269504f)));
  const Lanes r = add(add(x, n, all(-0.693359375f)), n, all(2.12194440e-4f));
  Lanes y = all(1.9875691500e-4f);
  for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = add(all(factor), y, r);
  }
  return times(plus(add(r, y, times(r, r)), all(1.0f)), power_of_two(n));
}

// cap tanh(x / cap) of scores [count].
void soften(float* scores, size_t count, float cap) {
  for (size_t i = 0; i < count; i += LANES) {
    float some[LANES] = {};
    const size_t here = std::min(LANES, count - i);
    memcpy(some, scores + i, here * sizeof(float));
    // Below -40 caps it is -cap.
    const Lanes e = exponential(times(larger(all(-40.0f * cap), load(some)), all(-2.0f / cap)));
    store(some, times(over(plus(all(1.0f), times(e, all(-1.0f))), plus(all(1.0f), e)), all(cap)));
    memcpy(scores + i, some, here * sizeof(float));
  }
}

// Scores [count] as their softmax rounded to bfloat16; what lies behind them, up to whole lanes, becomes zero. All NaN,
// as XLA's, with a score that is NaN or infinite, or where all are minus infinity.
void softmax(float* scores, size_t count) {
  constexpr float LOWEST = -std::numeric_limits<float>::infinity();
  const size_t lanes = up(count, LANES);
  for (size_t i = count; i < lanes; i++) scores[i] = LOWEST;
  Lanes top = all(LOWEST), sum = zero();
  for (size_t i = 0; i < lanes; i += LANES) top = larger(top, load(scores + i));
  float each[LANES];
  store(each, top);
  const Lanes highest = all(-*std::max_element(each, each + LANES));
  for (size_t i = 0; i < lanes; i += LANES) {
    store(scores + i, exponential(plus(load(scores + i), highest)));
    for (size_t j = std::max(i, count); j < i + LANES; j++) scores[j] = 0.0f;
    sum = plus(sum, load(scores + i));
  }
  const Lanes whole_sum = all(total(sum));
  for (size_t i = 0; i < lanes; i += LANES) store(scores + i, rounded_to_bf16(over(load(scores + i), whole_sum)));
}

// weights [ROWS of `stride`] times values [slots, dim], COUNT lanes of it from `values` on, to out [ROWS].
template <int ROWS, int COUNT>
inline void weigh(const float* weights, size_t stride, const Bf16* values, size_t slots, size_t dim, float* const* out) {
  Lanes sums[ROWS][COUNT];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < COUNT; v++) sums[r][v] = zero();
  for (size_t s = 0; s < slots; s++) {
    Lanes value[COUNT];
    for (int v = 0; v < COUNT; v++) value[v] = to_lanes(values + s * dim + v * LANES);
    for (int r = 0; r < ROWS; r++) {
      const Lanes weight = all(weights[r * stride + s]);
      for (int v = 0; v < COUNT; v++) sums[r][v] = add(sums[r][v], weight, value[v]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < COUNT; v++) store(out[r] + v * LANES, sums[r][v]);
}

constexpr int VECTORS = LANES == 16 ? 4 : 2;  // of an output row at a time: sums stay in registers

template <int ROWS>
void weigh_all(const float* weights, size_t stride, const Bf16* values, size_t slots, size_t dim, float* const* out) {
  size_t d = 0;
  float* at[ROWS];
  const auto here = [&] {
    for (int r = 0; r < ROWS; r++) at[r] = out[r] + d;
    return at;
  };
  for (; d + VECTORS * LANES <= dim; d += VECTORS * LANES) weigh<ROWS, VECTORS>(weights, stride, values + d, slots, dim, here());
  for (; d + LANES <= dim; d += LANES) weigh<ROWS, 1>(weights, stride, values + d, slots, dim, here());
  for (; d < dim; d++) {
    for (int r = 0; r < ROWS; r++) {
      float sum = 0.0f;
      for (size_t s = 0; s < slots; s++) sum += weights[r * stride + s] * to_float(values[s * dim + d]);
      out[r][d] = sum;
    }
  }
}

void attend(const Attention& a, size_t piece) {
  const size_t group = a.group(), chunk = piece % a.chunks(), kv = piece / a.chunks() % a.kv_heads;
  const size_t b = piece / a.chunks() / a.kv_heads, first = chunk * Attention::ROWS;
  const size_t rows = std::min(Attention::ROWS, a.width * group - first);
  Bf16* queries = static_cast<Bf16*>(scratch<QUERIES>(rows * a.dim * sizeof(Bf16)));
  float* out[Attention::ROWS];
  const bool* mask[Attention::ROWS];
  size_t begin[Attention::ROWS], end[Attention::ROWS], low = a.slots, high = 0;
  for (size_t i = 0; i < rows; i++) {
    const size_t t = (first + i) / group, head = kv * group + (first + i) % group;
    const size_t place = ((b * a.width + t) * a.heads + head) * a.dim;
    memcpy(queries + i * a.dim, a.query + place, a.dim * sizeof(Bf16));
    out[i] = a.out + place;
    mask[i] = a.mask + (b * a.width + t) * a.slots;
    const void *seen = memchr(mask[i], 1, a.slots), *last = memrchr(mask[i], 1, a.slots);
    begin[i] = seen ? static_cast<const bool*>(seen) - mask[i] : a.slots;
    end[i] = last ? static_cast<const bool*>(last) - mask[i] + 1 : 0;
    low = std::min(low, begin[i]);
    high = std::max(high, end[i]);
  }
  const size_t slots = high > low ? high - low : 0, stride = slots + LANES;
  const size_t offset = (b * a.kv_heads + kv) * a.slots * a.dim + low * a.dim;
  float* scores = static_cast<float*>(scratch<SCORES>((rows * (slots + stride)) * sizeof(float)));
  float* weights = scores + rows * slots;  // [rows, stride]
  Product p{queries, a.keys + offset, nullptr, scores, rows, a.dim, slots, nullptr};
  prepare(p);
  slots < 4 ? multiply<Bf16>(p, 0, slots) : score(p);
  float* row = static_cast<float*>(scratch<ROW>(stride * sizeof(float)));
  memset(weights, 0, rows * stride * sizeof(float));
  for (size_t i = 0; i < rows; i++) {
    if (begin[i] >= end[i]) continue;
    const size_t from = begin[i] - low, count = end[i] - begin[i];
    const bool* sees = mask[i] + begin[i];
    float *score = scores + i * slots + from, *weight = weights + i * stride + from;
    if (a.cap > 0) soften(score, count, a.cap);
    if (a.biases) {
      const size_t t = (first + i) / group, head = kv * group + (first + i) % group;
      const float* bias = a.biases + ((b * a.heads + head) * a.width + t) * a.slots + begin[i];
      for (size_t s = 0; s < count; s++) score[s] += bias[s];
    }
    if (!memchr(sees, 0, count)) {
      memcpy(row, score, count * sizeof(float));
      softmax(row, count);
      memcpy(weight, row, count * sizeof(float));
      continue;
    }
    size_t visible = 0;
    for (size_t s = 0; s < count; s++)
      if (sees[s]) row[visible++] = score[s];
    softmax(row, visible);
    for (size_t s = 0, n = 0; s < count; s++)
      if (sees[s]) weight[s] = row[n++];
  }
  const Bf16* values = a.values + offset;
  size_t i = 0;
  for (; i + 4 <= rows; i += 4) weigh_all<4>(weights + i * stride, stride, values, slots, a.dim, out + i);
  if (i + 2 <= rows) weigh_all<2>(weights + i * stride, stride, values, slots, a.dim, out + i), i += 2;
  if (i < rows) weigh_all<1>(weights + i * stride, stride, values, slots, a.dim, out + i);
  // A slot that a row does not see, but another row does, may hold NaN or infinity, which times zero is NaN.
  for (i = 0; i < rows; i++) {
    for (size_t d = 0; d < a.dim; d++) {
      if (out[i][d] == out[i][d]) continue;
      float sum = 0.0f;
      for (size_t s = begin[i]; s < end[i]; s++)
        if (mask[i][s]) sum += weights[i * stride + s - low] * to_float(values[(s - low) * a.dim + d]);
      out[i][d] = sum;
    }
  }
}

void run(const Attention& a, ffi::ThreadPool* pool) {
  const auto work = [a](size_t begin, size_t end) {
    for (size_t piece = begin; piece < end; piece++) attend(a, piece);
  };
  spread(work, a.pieces(), 4 * a.batch * a.kv_heads * a.slots * a.dim, pool);
}

// Sums of the rows of x [rows, depth], or of their squares.
void sum_rows(const float* x, float* out, size_t rows, size_t depth, bool squared) {
  for (size_t row = 0; row < rows; row++, x += depth) {
    Lanes sums[4] = {zero(), zero(), zero(), zero()};
    const Lanes one = all(1.0f);
    size_t k = 0;
    for (; k + LANES <= depth; k += LANES) {
      const Lanes value = load(x + k);
      sums[k / LANES % 4] = add(sums[k / LANES % 4], value, squared ? value : one);
    }
    float rest = 0.0f;
    for (; k < depth; k++) rest += squared ? x[k] * x[k] : x[k];
    out[row] = total(plus(plus(sums[0], sums[1]), plus(sums[2], sums[3]))) + rest;
  }
}

template <class X, class Weights>
ffi::Error product(ffi::ThreadPool& pool, X x, Weights weights, const float* scale, ffi::ResultBuffer<ffi::F32> out) {
  const auto dims = weights.dimensions();
  const size_t columns = dims[0], depth = dims[1], rows = depth ? x.element_count() / depth : 0;
  if (rows * columns != out->element_count()) return ffi::Error::InvalidArgument("shapes of a product do not fit");
  if (rows && columns) {
    run({static_cast<const Bf16*>(x.untyped_data()), weights.untyped_data(), scale, out->typed_data(), rows, depth,
         columns, nullptr},
        &pool);
  }
  return ffi::Error::Success();
}

ffi::Error bfloat16_product(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::BF16> weights,
                            ffi::ResultBuffer<ffi::F32> out) {
  return product(pool, x, weights, nullptr, out);
}

ffi::Error int8_product(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::S8> weights,
                        ffi::Buffer<ffi::F32> scale, ffi::ResultBuffer<ffi::F32> out) {
  return product(pool, x, weights, scale.typed_data(), out);
}

ffi::Error sums(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, bool squared, ffi::ResultBuffer<ffi::F32> out) {
  const size_t rows = out->element_count(), depth = x.dimensions().back();
  if (rows * depth != x.element_count()) return ffi::Error::InvalidArgument("shapes of sums do not fit");
  const float* from = x.typed_data();
  float* to = out->typed_data();
  const auto work = [=](size_t begin, size_t end) {
    sum_rows(from + begin * depth, to + begin, end - begin, depth, squared);
  };
  spread(work, rows, rows * depth * sizeof(float), &pool);
  return ffi::Error::Success();
}

ffi::Error attention(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> query, ffi::Buffer<ffi::BF16> keys,
                     ffi::Buffer<ffi::BF16> values, ffi::Buffer<ffi::PRED> mask, ffi::RemainingArgs rest, float cap,
                     ffi::ResultBuffer<ffi::F32> out) {
  const float* biases = nullptr;
  if (rest.size()) {
    const auto added = rest.get<ffi::Buffer<ffi::F32>>(0);
    if (added.has_error()) return ffi::Error::InvalidArgument("biases of attention are no float32");
    biases = added->typed_data();
  }
  const auto q = query.dimensions(), k = keys.dimensions(), m = mask.dimensions();
  if (q.size() != 4 || k.size() != 4 || m.size() != 3 || k[1] == 0 || q[2] % k[1] || q[3] != k[3] || m[1] != q[1] ||
      m[2] != k[2] || k[0] != q[0] || m[0] != q[0] || out->element_count() != query.element_count()) {
    return ffi::Error::InvalidArgument("shapes of attention do not fit");
  }
  run(Attention{reinterpret_cast<const Bf16*>(query.untyped_data()), reinterpret_cast<const Bf16*>(keys.untyped_data()),
                reinterpret_cast<const Bf16*>(values.untyped_data()), mask.typed_data(), biases, out->typed_data(),
                static_cast<size_t>(q[0]), static_cast<size_t>(q[1]), static_cast<size_t>(q[2]),
                static_cast<size_t>(k[1]), static_cast<size_t>(k[2]), static_cast<size_t>(q[3]), cap},
      &pool);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_bfloat16_product, bfloat16_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_int8_product, int8_product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_sums, sums,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("squared")
                                  .Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(specdec_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::PRED>>()
                                  .RemainingArgs()
                                  .Attr<float>("cap")
                                  .Ret<ffi::Buffer<ffi::F32>>());

// Asks the system for what the path needs; false: it may not be used.
extern "C" bool specdec_enable() { return enable(); }

// The same on the calling thread, for checks: x [rows, depth], weights [columns, depth], scale [columns] or null.
extern "C" void specdec_product(const void* x, const void* weights, const float* scale, float* out, size_t rows,
                                size_t depth, size_t columns) {
  run({static_cast<const Bf16*>(x), weights, scale, out, rows, depth, columns, nullptr}, nullptr);
}

// The same: x [rows, depth].
extern "C" void specdec_sum_rows(const float* x, float* out, size_t rows, size_t depth, bool squared) {
  sum_rows(x, out, rows, depth, squared);
}

// The same: query [batch, width, heads, dim], keys and values [batch, kv_heads, slots, dim], mask [batch, width, slots],
// biases [batch, heads, width, slots] or null; `sizes` in this order.
extern "C" void specdec_attend(const void* query, const void* keys, const void* values, const bool* mask,
                               const float* biases, float* out, const size_t* sizes, float cap) {
  run(Attention{static_cast<const Bf16*>(query), static_cast<const Bf16*>(keys), static_cast<const Bf16*>(values), mask,
                biases, out, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], cap},
      nullptr);
}
