/* How matrices of integers are packed for quantized.c, by quantized_pack.c.
 *
 * Weights are packed in panels of PANEL channels. A panel is a sequence of spans, and a span is
 *
 *     scale [PANEL]   offset [PANEL]   steps [span / inputs of a step]         scale and offset float32 or float16
 *
 * A step is 64 bytes, and four neighbours of them are a channel's for four inputs, a quad, as multiply-add of bytes wants
 * them; c is the channel:
 *
 *     8 bits    [c = 0 … 15][input of the quad]     a step is 4 inputs, stored as value + BIAS_8
 *     4 bits    [c = 0 … 15][input of the quad]     a step is 8 inputs: quad 0 in the low halves of bytes, 1 in the high
 *
 * A span that is no whole number of steps is filled up; by what does not matter, for there rows have zeros. If a whole
 * channel shares a scale, it stands once, at the head of the panel, and the spans behind it are steps only.
 */
#pragma once

#include "vector16.h"

enum {
    PANEL = 16,
    QUAD = 4,
    STEP_BYTES = PANEL * QUAD,
    BIAS_8 = LONG_VECTORS ? 128 : 0, /* VNNI multiplies unsigned bytes by signed ones; the others are served by signed weights */
    SPAN = 32, /* inputs at most. Sums of 4-bit weights are exact in int16: 32 / 2 * 15 * 127 < 2^15 */
};

enum offsets { NO_OFFSETS = 0, STORED = 1, CENTRED = 2 }; /* CENTRED: -8 * scale, all of them. Mirrored by ../quantized.py */

/* How a matrix is packed. All strides are in bytes. */
struct layout {
    int k, bits, group, scale_format;
    enum offsets offsets;
    int step;        /* inputs of one */
    int span, spans; /* inputs of a span, all but perhaps the last; how many there are */
    int steps, last_steps; /* of a span; of the last */
    size_t header, scale_stride, value_stride, panel_bytes;
};

INLINE struct layout lay_out(int k, int bits, int group, int scale_format, int offsets) {
    struct layout at = {.k = k, .bits = bits, .group = group, .scale_format = scale_format, .offsets = offsets};
    at.header = PANEL * format_bytes(scale_format) * (offsets == STORED ? 2 : 1);
    at.step = bits == 4 ? 2 * QUAD : QUAD;
    at.span = group < k ? group : SPAN;
    at.spans = (k + at.span - 1) / at.span;
    at.steps = (at.span + at.step - 1) / at.step;
    at.last_steps = (k - (at.spans - 1) * at.span + at.step - 1) / at.step;
    at.value_stride = at.steps * STEP_BYTES;
    if (group < k) {
        at.scale_stride = at.value_stride += at.header;
        at.panel_bytes = at.spans * at.value_stride;
    } else {
        at.scale_stride = 0;
        at.panel_bytes = at.header + (k + at.step - 1) / at.step * STEP_BYTES;
    }
    at.panel_bytes = (at.panel_bytes + 63) / 64 * 64;
    return at;
}

INLINE int steps_of(const struct layout *at, int span) { return span < at->spans - 1 ? at->steps : at->last_steps; }
