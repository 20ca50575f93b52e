// Write context rows into the draft's K/V cache (context_kv.py), and defer them by cache slot
// (waiting_rows.py).

#include <string.h>

#include "matmul.h"
#include "rows.h"

namespace {

// `ContextTables` of context_kv.py: L layers, heads of `size`.
struct Tables {
  Matmul multiply[2]; // with fc [d, features] and stacked [L * 2 * heads * size, d]
  const void *weights[2];
  int64_t threads[2];
  const float *fc_norm, *head_norms, *cos_sin; // [d], [L, size], [positions, rotary]
  float *const *caches; // [L, 2]: keys and values [slots, heads * size]
  int64_t layers, features, d, heads, size, rotary;
  float fc_epsilon, head_epsilon;
};

// `_Rows` of waiting_rows.py: features [places, width], the others [places].
struct Waiting {
  float *features;
  int64_t *positions, *slots;
  bool *waits;
  int64_t places, width;
};

} // namespace

extern "C" {

// Project rows x [n, features] and write them into the caches. n > 0,
// positions, slots [n]; room: n * (2 * d + stacked) floats.
DSPARK_EXPORT void NAMED(inject_context)(const Tables *tables, const float *x, int64_t n,
                                         const int64_t *positions, const int64_t *slots,
                                         float *room) {
  const Tables &t = *tables;
  const auto multiply = [&](int which, const float *rows, int64_t k, int64_t width, float *out) {
    const int32_t threads = static_cast<int32_t>(t.threads[which]);
    t.multiply[which](rows, k, n, t.weights[which], width, k, out, threads);
  };
  const int64_t width = t.heads * t.size, stride = t.layers * 2 * width;
  float *context = room + n * t.d, *stacked = context + n * t.d;
  multiply(0, x, t.features, t.d, room);
  NAMED(rms_norm_rows)(room, t.d, n, t.d, t.fc_norm, t.fc_epsilon, context);
  multiply(1, context, t.d, stride, stacked);
  for (int64_t layer = 0; layer < t.layers; ++layer) {
    float *keys = stacked + layer * 2 * width, *const *cache = t.caches + 2 * layer;
    const float *norm = t.head_norms + layer * t.size;
    NAMED(rms_norm_heads)(keys, stride, n, t.heads, t.size, norm, t.head_epsilon);
    NAMED(rotate_rows)(positions, t.cos_sin, t.rotary, keys, stride, n, t.heads, t.size);
    for (int64_t i = 0; i < n; ++i) {
      const float *row = keys + i * stride;
      memcpy(cache[0] + slots[i] * width, row, width * sizeof *row);
      memcpy(cache[1] + slots[i] * width, row + width, width * sizeof *row);
    }
  }
}

// Copy rows first .. n of x to their places, up to one that another slot's row occupies. Returns
// that row's number, or n.
DSPARK_EXPORT int64_t NAMED(keep_context)(const Waiting *waiting, const float *x,
                                          const int64_t *positions, const int64_t *slots,
                                          int64_t first, int64_t n) {
  const Waiting &w = *waiting;
  for (int64_t i = first; i < n; ++i) {
    const int64_t place = slots[i] % w.places;
    if (w.waits[place] && w.slots[place] != slots[i]) return i;
    w.waits[place] = true;
    w.positions[place] = positions[i];
    w.slots[place] = slots[i];
    memcpy(w.features + place * w.width, x + i * w.width, w.width * sizeof *x);
  }
  return n;
}

// Take the places of rows that wait for slots table[rows[r], :lens[r]], at most all that wait;
// table [., context]. Returns their number.
DSPARK_EXPORT int64_t NAMED(take_context)(const Waiting *waiting, const int32_t *table,
                                          int64_t context, const int64_t *rows,
                                          const int64_t *lens, int64_t requests, int64_t *found) {
  const Waiting &w = *waiting;
  int64_t count = 0;
  for (int64_t r = 0; r < requests; ++r) {
    const int32_t *slots = table + rows[r] * context;
    for (int64_t i = 0; i < lens[r]; ++i) {
      const int64_t place = slots[i] % w.places;
      if (!w.waits[place] || w.slots[place] != slots[i]) continue;
      w.waits[place] = false;
      found[count++] = place;
    }
  }
  return count;
}
}
