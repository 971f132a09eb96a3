/* How matrices of integers are packed for quantized.c, by quantized_pack.c.
 *
 * Weights are packed in panels of PANEL channels. A panel is a sequence of spans, and a span is
 *
 *     scale [PANEL]   offset [PANEL]   values [span / 4, ...]         scale and offset float32 or float16
 *
 * where a step of 4 inputs are two pairs, and a pair of inputs of a channel are neighbours, as multiply-add of int16
 * pairs wants them; c is the channel, two bytes a channel:
 *
 *     8 bits    [pair][c = 0 … 15][input of the pair]                   64 bytes
 *     4 bits    [c = 0 … 15][input of the pair]                         32 bytes: pair 0 in the low halves, 1 in the high
 *
 * If a whole channel shares a scale, it stands once, at the head of the panel, and the spans behind it are values only.
 */
#pragma once

#include "vector.h"

enum {
    PANEL = 16,
    STEP = 4,
    CHANNEL_SPAN = 384, /* inputs at most, where there are no groups. Up to 512, sums are exact: 512 * 128 * 32767 < 2^31 */
};

enum offsets { NO_OFFSETS = 0, STORED = 1, CENTRED = 2 }; /* CENTRED: -8 * scale, all of them. Mirrored by ../quantized.py */

/* How a matrix is packed. All strides are in bytes. */
struct layout {
    int k, bits, group, scale_format;
    enum offsets offsets;
    int span, spans; /* inputs of a span, all but perhaps the last; how many there are */
    size_t header, step_bytes, scale_stride, value_stride, panel_bytes;
};

INLINE struct layout lay_out(int k, int bits, int group, int scale_format, int offsets) {
    struct layout at = {.k = k, .bits = bits, .group = group, .scale_format = scale_format, .offsets = offsets};
    at.header = PANEL * format_bytes(scale_format) * (offsets == STORED ? 2 : 1);
    at.step_bytes = STEP * PANEL * bits / 8;
    at.span = group;
    if (group >= k) { /* of about equal length */
        int spans = (k + CHANNEL_SPAN - 1) / CHANNEL_SPAN;
        at.span = (k + spans * STEP - 1) / (spans * STEP) * STEP;
    }
    at.spans = (k + at.span - 1) / at.span;
    at.value_stride = at.span / STEP * at.step_bytes;
    if (group < k) {
        at.scale_stride = at.value_stride += at.header;
        at.panel_bytes = at.spans * at.value_stride;
    } else {
        at.scale_stride = 0;
        at.panel_bytes = at.header + (k + STEP - 1) / STEP * at.step_bytes;
    }
    at.panel_bytes = (at.panel_bytes + 63) / 64 * 64;
    return at;
}

INLINE int steps_of(const struct layout *at, int span) {
    int inputs = at->k - span * at->span;
    return ((inputs < at->span ? inputs : at->span) + STEP - 1) / STEP;
}
