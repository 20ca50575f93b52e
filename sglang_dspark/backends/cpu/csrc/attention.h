// Attention over a paged cache (attention.cpp), for Python and layers.cpp.
#pragma once
#include "operators.h"

// R requests of a pass; `AttentionPlan` of attention_plan.py, which mirrors the struct.
struct Plan {
  const int32_t *table; // [rows, columns]: cache slots by position
  int64_t columns;
  const int64_t *requests; // [R, 4]: row of the table, first query, queries, cached tokens
  int64_t count;           // R
};

// A layer's heads and cache; `Attention` of paged_attention.py mirrors the struct.
struct Attention {
  int64_t heads, kv_heads, width, value_width; // H, Hkv, D, Dv
  float *keys, *values;                        // [slots, Hkv, D], [slots, Hkv, Dv]
  int64_t window;                              // tokens behind a position that it sees, or -1
  float scale;
  int32_t causal;
};

// Rows of heads [n, heads, width], with the floats from row to row and from head to head.
struct Heads {
  const float *data;
  int64_t row_stride, head_stride;
};

extern "C" {
// Write `added` rows of new keys and values to their slots, then attend every query of the plan:
// out [queries, H, Dv]. Returns 0, or 1 where memory for the scores is missing.
DSPARK_EXPORT int32_t NAMED(attend)(const Plan *plan, const Attention *attention, Heads queries,
                                    Heads new_keys, Heads new_values, const int64_t *new_slots,
                                    int64_t added, float *out, int64_t threads);
}
