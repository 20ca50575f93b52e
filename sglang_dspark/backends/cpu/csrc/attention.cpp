// softmax(q k^T scale) v over a paged cache in place (paged_attention.py).
//
// An item is a block of a request's queries with one KV head; its rows are the queries of the
// head's group. Keys and values pass in tiles of positions that stay in the first-level cache while
// all rows of the item meet them.
//
// A row is bitwise the same in every window, batch and thread count: hidden positions weigh exactly
// 0, tiles start at multiples of kTile, and sums have the order of lanes.h; values are added by one
// chain of fused multiply-adds over ascending positions.

#include "attention.h"

#include <stdlib.h>

#include "lanes.h"

namespace {

constexpr int64_t kTile = kRowLanes; // positions; rows of scores are padded to a multiple of it
constexpr int64_t kTogether = 32;    // queries of a long window in one item: TOGETHER
constexpr float kNegligible = -87.0f; // exp of less is below float32's normal range
constexpr int kRows = 4;             // that share a read of keys and values
constexpr int kColumns = kNative == 8 ? 2 : 4; // vectors of values whose sums stay in registers

enum { kRow, kFirst, kQueries, kCached, kFields }; // columns of Plan.requests

inline const float *head_at(Heads rows, int64_t row, int64_t head) {
  return rows.data + row * rows.row_stride + head * rows.head_stride;
}

struct Job {
  const Plan &plan;
  const Attention &attention;
  Heads queries;
  float *out;
  int64_t blocks; // of the longest window
  int32_t failed; // 1 once memory was missing
};

struct Item {
  const Attention &attention;
  int64_t kv_head, group;
  int64_t first, queries, cached; // as in Plan.requests
  int64_t start;                  // first position that is read
  const int32_t *slots;           // of positions start .. cached
  Heads q;
  float *out;
  float *scores; // [rows, padded]
  int64_t padded;

  int64_t rows() const { return queries * group; }
  int64_t length() const { return cached - start; }
  const float *query(int64_t row) const {
    return head_at(q, first + row / group, kv_head * group + row % group);
  }
  float *result(int64_t row) const {
    const int64_t head = (first + row / group) * attention.heads + kv_head * group + row % group;
    return out + head * attention.value_width;
  }
};

// scores[r][j] = scale * query r . key j of positions from .. to, for R rows.
template <int R> void score_rows(const Item &item, int64_t row, int64_t from, int64_t to) {
  const Attention &a = item.attention;
  const int64_t stride = a.kv_heads * a.width, last = item.length() - 1;
  const float *keys = a.keys + item.kv_head * a.width, *queries[R];
  UNROLL for (int r = 0; r < R; ++r) queries[r] = item.query(row + r);
  float *scores = item.scores + row * item.padded;
  for (int64_t j = from; j < to; j += 4) { // the last key again, behind it: hidden later
    const float *four[4];
    UNROLL for (int k = 0; k < 4; ++k) four[k] = keys + item.slots[least(j + k, last)] * stride;
    float found[4 * R + kNative];
    dots<4, R>(four, queries, a.width, found);
    UNROLL for (int r = 0; r < R; ++r) {
      const Quarter scaled = load<Quarter>(found + 4 * r) * a.scale;
      memcpy(scores + r * item.padded + j, &scaled, sizeof scaled);
    }
  }
}

// Add the values of positions from .. to to R rows of results, from column c on.
template <int R, int C, typename Lanes>
inline void mix_columns(const Item &item, int64_t row, int64_t from, int64_t to, int64_t c,
                        Lanes lanes) {
  const Attention &a = item.attention;
  const int64_t stride = a.kv_heads * a.value_width;
  const float *values = a.values + item.kv_head * a.value_width + c;
  const float *weights = item.scores + row * item.padded;
  float *results[R];
  UNROLL for (int r = 0; r < R; ++r) results[r] = item.result(row + r) + c;
  Floats sums[R][C];
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int i = 0; i < C; ++i) sums[r][i] = lanes.load(results[r] + i * kNative);
  }
  for (int64_t j = from; j < to; ++j) {
    const float *value = values + item.slots[j] * stride;
    Floats columns[C];
    UNROLL for (int i = 0; i < C; ++i) columns[i] = lanes.load(value + i * kNative);
    UNROLL for (int r = 0; r < R; ++r) {
      const Floats weight = spread(weights[r * item.padded + j]);
      UNROLL for (int i = 0; i < C; ++i) sums[r][i] = fma(weight, columns[i], sums[r][i]);
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int i = 0; i < C; ++i) lanes.store(results[r] + i * kNative, sums[r][i]);
  }
}

template <int R> void mix_rows(const Item &item, int64_t row, int64_t from, int64_t to) {
  const int64_t n = item.attention.value_width;
  int64_t c = 0;
  for (; c + kColumns * kNative <= n; c += kColumns * kNative) {
    mix_columns<R, kColumns>(item, row, from, to, c, Whole{});
  }
  for (; c + kNative <= n; c += kNative) mix_columns<R, 1>(item, row, from, to, c, Whole{});
  if (c < n) mix_columns<R, 1>(item, row, from, to, c, Rest{n - c});
}

typedef void (*Pass)(const Item &item, int64_t row, int64_t from, int64_t to);
constexpr Pass kScore[kRows] = {score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>};
constexpr Pass kMix[kRows] = {mix_rows<1>, mix_rows<2>, mix_rows<3>, mix_rows<4>};

// Do all rows for each tile of positions.
void in_tiles(const Item &item, const Pass (&passes)[kRows]) {
  for (int64_t from = 0; from < item.length(); from += kTile) {
    const int64_t to = least(from + kTile, item.length());
    for (int64_t row = 0; row < item.rows(); row += kRows) {
      passes[least(item.rows() - row, kRows) - 1](item, row, from, to);
    }
  }
}

void hide_range(float *scores, int64_t from, int64_t to) {
  for (int64_t j = from; j < to; ++j) scores[j] = -__builtin_inff();
}

// Set the scores of positions that query i does not see to -inf, also those behind the last one.
void hide(const Item &item, int64_t i, float *scores) {
  const Attention &a = item.attention;
  const int64_t own = item.cached - item.queries - item.start; // the first query's position
  const int64_t end = a.causal ? own + i + 1 : item.length();
  if (a.window >= 0) hide_range(scores, 0, own + i - a.window);
  hide_range(scores, end, item.padded);
}

// The largest score, ignoring NaN; n is a multiple of kTile.
float largest(const float *scores, int64_t n) {
  constexpr int parts = 4; // so that none waits for the comparison before
  Floats tops[parts];
  UNROLL for (int p = 0; p < parts; ++p) tops[p] = spread(-__builtin_inff());
  for (int64_t j = 0; j < n; j += parts * kNative) {
    UNROLL for (int p = 0; p < parts; ++p) {
      const Floats v = load<Floats>(scores + j + p * kNative);
      tops[p] = v > tops[p] ? v : tops[p];
    }
  }
  float top = tops[0][0];
  for (const Floats &each : tops) {
    for (int lane = 0; lane < kNative; ++lane) top = each[lane] > top ? each[lane] : top;
  }
  return top;
}

// Turn scores into numerators of the softmax in place and return their sum.
float exp_row(float *scores, int64_t n) {
  const Floats top = spread(largest(scores, n));
  return sum_of(n, [=](int64_t j, auto lanes) {
    const Floats gap = lanes.load(scores + j) - top;
    const Floats weight = gap < spread(kNegligible) ? Floats{} : exp32(gap);
    lanes.store(scores + j, weight);
    return weight;
  });
}

// totals [rows]: scratch memory.
void attend_item(const Item &item, float *totals) {
  const int64_t n = item.attention.value_width;
  in_tiles(item, kScore);
  for (int64_t row = 0; row < item.rows(); ++row) {
    float *scores = item.scores + row * item.padded;
    hide(item, row / item.group, scores);
    totals[row] = exp_row(scores, item.padded);
    memset(item.result(row), 0, n * sizeof(float));
  }
  in_tiles(item, kMix);
  for (int64_t row = 0; row < item.rows(); ++row) {
    float *result = item.result(row);
    const Floats share = spread(1.0f / totals[row]);
    each_vector(n, [=](int64_t i, auto lanes) {
      lanes.store(result + i, lanes.load(result + i) * share);
    });
  }
}

// Blocks of the longest window; 1 where a query's place in it matters: bidirectional, with a limit.
int64_t count_blocks(const Plan &plan, const Attention &attention) {
  if (!attention.causal && attention.window >= 0) return 1;
  int64_t longest = 1;
  for (int64_t r = 0; r < plan.count; ++r) {
    const int64_t queries = plan.requests[r * kFields + kQueries];
    longest = queries > longest ? queries : longest;
  }
  return (longest + kTogether - 1) / kTogether;
}

// An item by its number: by request, then by head, then by block. It may have no queries.
Item item_of(const Job &job, int64_t number) {
  const Attention &a = job.attention;
  const int64_t r = number / (a.kv_heads * job.blocks), block = number % job.blocks;
  const int64_t *request = job.plan.requests + r * kFields;
  Item item = {a, number / job.blocks % a.kv_heads, a.heads / a.kv_heads};
  item.first = request[kFirst], item.queries = request[kQueries], item.cached = request[kCached];
  if (job.blocks > 1) {
    const int64_t before = least(block * kTogether, item.queries), all = item.queries;
    item.first += before;
    item.queries = least(kTogether, all - before);
    if (a.causal) item.cached += before + item.queries - all;
  }
  const int64_t seen = item.cached - item.queries - a.window;
  item.start = a.window >= 0 && seen > 0 ? seen / kTile * kTile : 0;
  item.slots = job.plan.table + request[kRow] * job.plan.columns + item.start;
  item.q = job.queries;
  item.out = job.out;
  item.padded = (item.length() + kTile - 1) / kTile * kTile;
  return item;
}

void attend_items(void *data, int64_t first, int64_t end) {
  Job &job = *static_cast<Job *>(data);
  float *scratch = nullptr;
  int64_t size = 0;
  for (int64_t number = first; number < end; ++number) {
    Item item = item_of(job, number);
    if (item.queries == 0) continue;
    const int64_t needed = item.rows() * (item.padded + 1);
    if (needed > size) {
      free(scratch);
      scratch = static_cast<float *>(malloc(needed * sizeof(float)));
      size = scratch == nullptr ? 0 : needed;
    }
    if (scratch == nullptr) {
      __atomic_store_n(&job.failed, 1, __ATOMIC_RELAXED);
      continue;
    }
    item.scores = scratch;
    attend_item(item, scratch + item.rows() * item.padded);
  }
  free(scratch);
}

void store(Heads rows, const int64_t *slots, int64_t n, int64_t heads, int64_t width,
           float *cache) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      memcpy(cache + (slots[i] * heads + h) * width, head_at(rows, i, h), width * sizeof(float));
    }
  }
}

} // namespace

int32_t NAMED(attend)(const Plan *plan, const Attention *attention, Heads queries, Heads new_keys,
                      Heads new_values, const int64_t *new_slots, int64_t added, float *out,
                      int64_t threads) {
  const Attention &a = *attention;
  store(new_keys, new_slots, added, a.kv_heads, a.width, a.keys);
  store(new_values, new_slots, added, a.kv_heads, a.value_width, a.values);
  Job job = {*plan, a, queries, out, count_blocks(*plan, a), 0};
  const int64_t items = plan->count * a.kv_heads * job.blocks;
  dspark_pool_run(attend_items, &job, items, items > 1 ? threads : 1);
  return job.failed;
}
