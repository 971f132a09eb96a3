/* Sixteen numbers at a time: one vector where the machine has such long ones, two of eight elsewhere. Lane by lane they
 * compute what vector.h's do: results are the same to the bit.
 */
#pragma once

#include "vector.h"

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int16_t i16x16 __attribute__((vector_size(32)));

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define LONG_VECTORS 1
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
#else
#define LONG_VECTORS 0
typedef struct { f32x8 low, high; } f32x16;
typedef struct { i32x8 low, high; } i32x16;
typedef struct { i16x16 low, high; } i16x32;
#endif

INLINE f32x16 join8(f32x8 low, f32x8 high) {
#if LONG_VECTORS
    return (f32x16)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)low), (__m256)high, 1);
#else
    return (f32x16){low, high};
#endif
}

INLINE f32x8 low8(f32x16 v) {
#if LONG_VECTORS
    return (f32x8)_mm512_castps512_ps256((__m512)v);
#else
    return v.low;
#endif
}

INLINE f32x8 high8(f32x16 v) {
#if LONG_VECTORS
    return (f32x8)_mm512_extractf32x8_ps((__m512)v, 1);
#else
    return v.high;
#endif
}

INLINE f32x16 splat16(float value) {
#if LONG_VECTORS
    return (f32x16)_mm512_set1_ps(value);
#else
    return (f32x16){splat(value), splat(value)};
#endif
}

INLINE f32x16 load16(const float *from) {
#if LONG_VECTORS
    return (f32x16)_mm512_loadu_ps(from);
#else
    return (f32x16){load(from), load(from + 8)};
#endif
}

INLINE void store16(float *to, f32x16 v) {
#if LONG_VECTORS
    _mm512_storeu_ps(to, (__m512)v);
#else
    store(to, v.low);
    store(to + 8, v.high);
#endif
}

INLINE f32x16 add16(f32x16 a, f32x16 b) {
#if LONG_VECTORS
    return a + b;
#else
    return (f32x16){a.low + b.low, a.high + b.high};
#endif
}

INLINE f32x16 subtract16(f32x16 a, f32x16 b) {
#if LONG_VECTORS
    return a - b;
#else
    return (f32x16){a.low - b.low, a.high - b.high};
#endif
}

/* As max8. */
INLINE f32x16 max16(f32x16 a, f32x16 b) {
#if LONG_VECTORS
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return (f32x16){max8(a.low, b.low), max8(a.high, b.high)};
#endif
}

INLINE f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if LONG_VECTORS
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return (f32x16){fma8(a.low, b.low, c.low), fma8(a.high, b.high, c.high)};
#endif
}

/* As load_stored: sixteen stored numbers from element `index` on. Bytes are widened at half the cost. */
INLINE f32x16 load_stored16(const int format, const void *from, size_t index) {
#if LONG_VECTORS
    if (format == FLOAT16)
        return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + index)));
#endif
#if defined(__AVX2__) && defined(__F16C__)
    if (format == FLOAT8) { /* as in load_float8 */
        __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)((const uint8_t *)from + index)));
        __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
        halves = _mm256_or_si256(halves, _mm256_cmpeq_epi16(wide, _mm256_set1_epi16(0x7f)));
        return join8((f32x8)_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                     (f32x8)_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    }
#endif
    if (format == FLOAT32) return load16((const float *)from + index);
    return join8(load_stored(format, from, index), load_stored(format, from, index + 8));
}

/* As exp8. */
INLINE f32x16 exp16(f32x16 x) {
#if LONG_VECTORS
    const f32x16 round = splat16(12582912.0f);
    f32x16 shifted = fma16(x, splat16(1.44269504089f), round);
    f32x16 n = shifted - round;
    f32x16 r = fma16(n, splat16(-0.693359375f), x);
    r = fma16(n, splat16(2.12194440e-4f), r);
    f32x16 p = splat16(1.9875691500e-4f);
    p = fma16(p, r, splat16(1.3981999507e-3f));
    p = fma16(p, r, splat16(8.3334519073e-3f));
    p = fma16(p, r, splat16(4.1665795894e-2f));
    p = fma16(p, r, splat16(1.6666665459e-1f));
    p = fma16(p, r, splat16(5.0000001201e-1f));
    p = fma16(r * r, p, r + splat16(1.0f));
    i32x16 exponent = (i32x16)shifted - (i32x16)round;
    __m512 result = (__m512)(p * (f32x16)((exponent + 127) << 23));
    __mmask16 small = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.33654f), _CMP_LT_OQ);
    __mmask16 large = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(88.37626f), _CMP_GT_OQ);
    result = _mm512_mask_blend_ps(small, result, _mm512_setzero_ps());
    return (f32x16)_mm512_mask_blend_ps(large, result, _mm512_set1_ps(__builtin_inff()));
#else
    return (f32x16){exp8(x.low), exp8(x.high)};
#endif
}

/* ---- integers ---- */

INLINE i32x16 splat_int16(int32_t value) {
#if LONG_VECTORS
    return (i32x16)_mm512_set1_epi32(value);
#else
    return (i32x16){value - (i32x8){0}, value - (i32x8){0}};
#endif
}

INLINE i32x16 add_int16(i32x16 a, i32x16 b) {
#if LONG_VECTORS
    return a + b;
#else
    return (i32x16){a.low + b.low, a.high + b.high};
#endif
}

INLINE f32x16 float_of16(i32x16 v) {
#if LONG_VECTORS
    return (f32x16)_mm512_cvtepi32_ps((__m512i)v);
#else
    return (f32x16){__builtin_convertvector(v.low, f32x8), __builtin_convertvector(v.high, f32x8)};
#endif
}
