/* Packing matrices of integers (quantized_layout.h), and the embedding that reads the same packed weights. */
#include "operations.h"
#include "pool.h"
#include "quantized_layout.h"

/* ---- packing: rows 0 … n-1 of a matrix become channels first … first+n-1 of the packed weights ---- */

EXPORT long trunkline_quantized_panel_bytes(int k, int bits, int group, int scale_format, int offsets) {
    return (long)lay_out(k, bits, group, scale_format, offsets).panel_bytes;
}

struct pack {
    const int8_t *values;         /* [n, k] */
    const float *scales, *offsets; /* [n, k / group]; offsets NULL: 0 */
    char *to;                     /* zeros, but for other matrices' channels */
    int n, first, group;          /* this group is a multiple of the layout's */
    struct layout at;
};

/* Where input k of a channel of a panel is stored. */
static char *find_byte(const struct layout *at, char *panel, int channel, int k) {
    int span = k / at->span, step = k % at->span / STEP, pair = k % STEP / 2;
    char *of_step = panel + at->header + span * at->value_stride + step * at->step_bytes;
    return of_step + (at->bits == 8 ? pair * 2 * PANEL : 0) + channel * 2 + k % 2;
}

static void pack_panel(const void *argument, int task, void *scratch) {
    (void)scratch;
    const struct pack *job = argument;
    const struct layout *at = &job->at;
    int number = job->first / PANEL + task;
    char *panel = job->to + number * at->panel_bytes;
    for (int channel = 0; channel < PANEL; channel++) {
        int row = number * PANEL + channel - job->first;
        if (row < 0 || row >= job->n) continue; /* another matrix's, or padding */
        for (int k = 0; k < at->k; k += at->group) {
            size_t group = (size_t)row * (at->k / job->group) + k / job->group;
            char *scales = panel + k / at->span * at->scale_stride;
            store_one(at->scale_format, scales, channel, job->scales[group]);
            if (at->offsets == STORED && job->offsets != NULL)
                store_one(at->scale_format, scales, PANEL + channel, job->offsets[group]);
        }
        for (int k = 0; k < at->k; k++) {
            int8_t value = job->values[(size_t)row * at->k + k];
            char *byte = find_byte(at, panel, channel, k);
            if (at->bits == 8) *byte = value;
            else *byte |= (value & 15) << (k % STEP / 2 * 4);
        }
    }
}

EXPORT int trunkline_pack_quantized(struct pool *pool, const int8_t *values, const float *scales, const float *offsets,
                                    void *to, int n, int k, int first, int matrix_group, int bits, int group,
                                    int scale_format, int layout_offsets) {
    struct pack job = {values, scales, offsets, to, n, first, matrix_group,
                       lay_out(k, bits, group, scale_format, layout_offsets)};
    return pool_run(pool, (first + n - 1) / PANEL - first / PANEL + 1, pack_panel, &job, 0);
}

/* ---- embedding: out[t] = scale * value + offset of row ids[t] - first_id, zeros where there is no such row ---- */

struct embed {
    const int32_t *ids; /* [rows] */
    const char *weights;
    float *out; /* [rows, k] */
    int n, first_id;
    struct layout at;
};

static void embed_row(const void *argument, int row, void *scratch) {
    (void)scratch;
    const struct embed *job = argument;
    const struct layout *at = &job->at;
    int id = job->ids[row] - job->first_id, channel = id % PANEL;
    float *out = job->out + (size_t)row * at->k;
    if (id < 0 || id >= job->n) {
        memset(out, 0, at->k * sizeof *out);
        return;
    }
    char *panel = (char *)job->weights + id / PANEL * at->panel_bytes;
    for (int k = 0; k < at->k; k++) {
        const char *scales = panel + k / at->span * at->scale_stride;
        float scale = load_one(at->scale_format, scales, channel);
        char byte = *find_byte(at, panel, channel, k);
        int value = at->bits == 8 ? (int8_t)byte : (uint8_t)byte >> (k % STEP / 2 * 4) & 15;
        out[k] = scale * (float)value;
        if (at->offsets == STORED) out[k] += load_one(at->scale_format, scales, PANEL + channel);
        if (at->offsets == CENTRED) out[k] -= 8 * scale;
    }
}

EXPORT int trunkline_embed_quantized(struct pool *pool, const int32_t *ids, const void *weights, float *out, int rows,
                                     int n, int k, int first_id, int bits, int group, int scale_format, int offsets) {
    struct embed job = {ids, weights, out, n, first_id, lay_out(k, bits, group, scale_format, offsets)};
    return pool_run(pool, rows, embed_row, &job, 0);
}
