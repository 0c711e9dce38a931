// Linear layers.

#include "kernels/products.h"

namespace umbra {

Rows Scratch::split(const float* x) const { return {x, reinterpret_cast<const Block*>(aligned(memory))}; }

void Linear::run(Context& context) const {
    const int64_t k = w.like().k, each = stride ? stride : n;
    const Rows rows = scratch.split(x);
    if (w.like().quantised()) quantise_rows(context, tokens, k, rows);
    context.pool.on_nodes(
        [&](int node) { return w.blocks(node); },
        [&](int node, int begin, int end, int) {
            const Matrix& part = w.parts[node];
            float y[kTile * kWide];
            const auto tile = [&](int first_block, int last_block, int64_t start, int count) {
                for (int block = first_block; block < last_block; block += kNear) {
                    const int blocks = std::min(kNear, last_block - block);
                    products(context.kernels, part, block, blocks, rows.from(start, k), nullptr, count, y);
                    const int64_t first = static_cast<int64_t>(w.first[node] + block) * kRows;
                    const int64_t width = std::min<int64_t>(blocks * kRows, n - first);
                    for (int t = 0; t < count; t++)
                        for (int64_t r = 0; r < width; r++)
                            out[(start + t) * each + first + r] = y[t * kWide + r] + (bias ? bias[first + r] : 0.0f);
                }
            };
            for_near_blocks(begin, end, tokens, [&](int first_block, int last_block) {
                for (int64_t start = 0; start < tokens; start += kTile)
                    tile(first_block, last_block, start, static_cast<int>(std::min<int64_t>(kTile, tokens - start)));
            });
        });
}

void HeadLinear::run(Context& context) const {
    const int64_t k = w.like().k;
    const float* from = x;
    if (stride != heads * k) {  // kernels take rows that follow one another
        float* copy = reinterpret_cast<float*>(aligned(scratch));
        each_row(context, tokens, [&](int64_t t) { std::copy_n(x + t * stride, heads * k, copy + t * heads * k); });
        from = copy;
    }
    const Rows rows = Scratch{scratch + tokens * heads * k * 4 + 64}.split(from);
    if (w.like().quantised()) quantise_rows(context, tokens * heads, k, rows);
    const auto each = [&](int node) { return (w.blocks(node) + kNear - 1) / kNear; };  // tasks of a head
    context.pool.on_nodes([&](int node) { return static_cast<int>(heads) * each(node); },
                          [&](int node, int begin, int end, int) {
                              float y[kTile * kWide];
                              int32_t index[kTile];
                              for (int task = begin; task < end; task++) {
                                  const int head = task / each(node), block = task % each(node) * kNear;
                                  const Matrix own = w.parts[node].at(head);
                                  const int blocks = std::min(kNear, w.blocks(node) - block);
                                  const int64_t first = static_cast<int64_t>(w.first[node] + block) * kRows;
                                  const int64_t width = std::min<int64_t>(blocks * kRows, n - first);
                                  for (int64_t start = 0; start < tokens; start += kTile) {
                                      const int count = static_cast<int>(std::min<int64_t>(kTile, tokens - start));
                                      for (int t = 0; t < count; t++)
                                          index[t] = static_cast<int32_t>((start + t) * heads + head);
                                      products(context.kernels, own, block, blocks, rows, index, count, y);
                                      for (int t = 0; t < count; t++)
                                          for (int64_t r = 0; r < width; r++)
                                              out[index[t] * n + first + r] = y[t * kWide + r];
                                  }
                              }
                          });
}

}  // namespace umbra
