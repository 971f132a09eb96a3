/* The vector vocabulary of the CPU kernels: eight floats at a time, on any machine.
 *
 * Types are GCC/Clang vector extensions, so that the same source compiles for AVX2, for plain x86-64 and for aarch64.
 * Only what the compilers cannot be trusted to find (fused multiply-add, float16 conversion) is written per machine.
 * Every function is elementwise, or reduces its lanes in one fixed order: nothing here depends on how many rows a
 * caller works on.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__F16C__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 16")

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint8_t u8x8 __attribute__((vector_size(8)));

/* How numbers are stored in weights and pages; the arithmetic is always float32. Mirrored by cpu.py. FLOAT8 is e4m3
 * without infinities (arXiv:2209.05433): sign, 4 bits of exponent, 3 of mantissa, up to 448. */
enum format { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2, FLOAT8 = 3 };

INLINE size_t format_bytes(int format) { return format == FLOAT32 ? 4 : format == FLOAT8 ? 1 : 2; }

/* What a loaded number is to be multiplied by; a power of two, so that a sum may be instead. */
INLINE float format_unit(int format) { return format == FLOAT8 ? 256.0f : 1.0f; }

INLINE f32x8 splat(float value) { return value - (f32x8){0}; }

/* memcpy is how C spells an unaligned load: each of these is one instruction. */
INLINE f32x8 load(const float *from) {
    f32x8 loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE void store(float *to, f32x8 values) { memcpy(to, &values, sizeof values); }

/* a * b + c, rounded once where the machine can. */
INLINE f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
    return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    union { f32x8 all; float32x4_t half[2]; } x = {a}, y = {b}, z = {c};
    z.half[0] = vfmaq_f32(z.half[0], x.half[0], y.half[0]);
    z.half[1] = vfmaq_f32(z.half[1], x.half[1], y.half[1]);
    return z.all;
#else
    return a * b + c;
#endif
}

INLINE f32x8 select8(i32x8 condition, f32x8 yes, f32x8 no) {
    return (f32x8)((condition & (i32x8)yes) | (~condition & (i32x8)no));
}

/* a > b ? a : b, so b where one of them is NaN. */
INLINE f32x8 max8(f32x8 a, f32x8 b) {
#if defined(__AVX__)
    return (f32x8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select8(a > b, a, b);
#endif
}

INLINE float horizontal_sum(f32x8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

INLINE float horizontal_max(f32x8 v) {
    float largest = v[0];
    for (int lane = 1; lane < 8; lane++) largest = v[lane] > largest ? v[lane] : largest;
    return largest;
}

/* float16 -> float32, exact. Without hardware: put exponent and mantissa in place, then correct the exponent's bias by
 * one multiplication, which is exact for subnormal numbers too. (Infinity and NaN become large numbers: neither is ever
 * stored.) */
INLINE f32x8 widen_float16(u16x8 stored) {
#if defined(__F16C__)
    return (f32x8)_mm256_cvtph_ps((__m128i)stored);
#else
    i32x8 bits = __builtin_convertvector(stored, i32x8);
    f32x8 magnitude = (f32x8)((bits & 0x7fff) << 13) * splat(0x1p112f);
    return (f32x8)((i32x8)magnitude | ((bits & 0x8000) << 16));
#endif
}

/* FLOAT8 -> 1/256 of it as float32, exact: e4m3 is float16 with a smaller exponent, so its bits, moved seven places, are
 * a float16 of 1/256 of the value, of subnormal numbers, too. NaN, always stored as 0x7f, stays NaN: it sets all bits. */
INLINE f32x8 load_float8(const uint8_t *from) {
#if defined(__AVX2__) && defined(__F16C__)
    __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from)); /* the sign fills bits 15 to 7 */
    __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff));
    return (f32x8)_mm256_cvtph_ps(_mm_or_si128(halves, _mm_cmpeq_epi16(wide, _mm_set1_epi16(0x7f))));
#else
    u8x8 stored;
    memcpy(&stored, from, sizeof stored);
    i32x8 bits = __builtin_convertvector(stored, i32x8);
    f32x8 magnitude = (f32x8)((bits & 0x7f) << 20) * splat(0x1p112f);
    return (f32x8)((i32x8)magnitude | (bits & 0x80) << 24 | (bits == 0x7f));
#endif
}

/* Eight stored numbers from element `index` on, as float32 in format_unit(format). `format` is a constant wherever this
 * is called. */
INLINE f32x8 load_stored(const int format, const void *from, size_t index) {
    if (format == FLOAT32) return load((const float *)from + index);
    if (format == FLOAT8) return load_float8((const uint8_t *)from + index);
    u16x8 stored;
    memcpy(&stored, (const uint16_t *)from + index, sizeof stored);
    if (format == FLOAT16) return widen_float16(stored);
    return (f32x8)(__builtin_convertvector(stored, i32x8) << 16);
}

INLINE float load_one(int format, const void *from, size_t index) {
    if (format == FLOAT32) return ((const float *)from)[index];
    u16x8 stored = {((const uint16_t *)from)[index]};
    if (format == FLOAT16) return widen_float16(stored)[0];
    return ((f32x8)(__builtin_convertvector(stored, i32x8) << 16))[0];
}

/* float32 -> float16, to nearest, ties to even; what is out of range becomes the largest finite number, NaN stays NaN.
 * */
INLINE uint16_t narrow_float16(float value) {
#if defined(__F16C__)
    value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;
    if (bits >= 0x477ff000) return sign | 0x7bff; /* 65520 and more */
    if (bits < 0x38800000) {                      /* below 2^-14: subnormal, a multiple of 2^-24 */
        float magnitude, aligned;
        memcpy(&magnitude, &bits, sizeof bits);
        aligned = magnitude + 0.5f; /* the last bit of a float at 0.5 is 2^-24: this addition rounds */
        memcpy(&bits, &aligned, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - 0x38000000) >> 13);
#endif
}

/* float32 -> bfloat16, to nearest, ties to even; NaN stays NaN. */
INLINE uint16_t narrow_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* float32 -> FLOAT8, to nearest, ties to even; what is out of range becomes the largest number, NaN stays NaN. */
INLINE uint8_t narrow_float8(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return 0x7f;
    if (bits >= 0x43e00000) return sign | 0x7e; /* 448 and more */
    if (bits < 0x3c800000) {                    /* below 2^-6: subnormal, a multiple of 2^-9 */
        float magnitude, aligned;
        memcpy(&magnitude, &bits, sizeof bits);
        aligned = magnitude + 16384.0f; /* whose last bit is 2^-9: this addition rounds */
        memcpy(&bits, &aligned, sizeof bits);
        return sign | (uint8_t)(bits - 0x46800000);
    }
    bits += 0x7ffff + (bits >> 20 & 1);
    return sign | (uint8_t)((bits - 0x3c000000) >> 20);
}

INLINE void store_one(int format, void *to, size_t index, float value) {
    if (format == FLOAT32) ((float *)to)[index] = value;
    else if (format == FLOAT8) ((uint8_t *)to)[index] = narrow_float8(value);
    else ((uint16_t *)to)[index] = format == FLOAT16 ? narrow_float16(value) : narrow_bfloat16(value);
}

/* e^x within 2 units in the last place: x = n ln 2 + r, a polynomial in r, then n into the exponent. Below the smallest
 * normal number the result is exactly 0 (so that a masked score of -infinity weighs nothing), above the largest it is
 * infinity, and NaN stays NaN. */
INLINE f32x8 exp8(f32x8 x) {
    const f32x8 round = splat(12582912.0f); /* 1.5 * 2^23: adding it leaves an integer in the mantissa's low bits */
    f32x8 shifted = fma8(x, splat(1.44269504089f), round);
    f32x8 n = shifted - round;
    f32x8 r = fma8(n, splat(-0.693359375f), x);
    r = fma8(n, splat(2.12194440e-4f), r);
    f32x8 p = splat(1.9875691500e-4f);
    p = fma8(p, r, splat(1.3981999507e-3f));
    p = fma8(p, r, splat(8.3334519073e-3f));
    p = fma8(p, r, splat(4.1665795894e-2f));
    p = fma8(p, r, splat(1.6666665459e-1f));
    p = fma8(p, r, splat(5.0000001201e-1f));
    p = fma8(r * r, p, r + splat(1.0f));
    i32x8 exponent = (i32x8)shifted - (i32x8)round;
    f32x8 result = p * (f32x8)((exponent + 127) << 23);
    result = select8(x < splat(-87.33654f), splat(0.0f), result);
    return select8(x > splat(88.37626f), splat(__builtin_inff()), result);
}

INLINE float exp1(float x) { return exp8(splat(x))[0]; }
