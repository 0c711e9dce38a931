// Linear layers and the fused mixture of experts: how the products of matrix.h are cut into tasks.

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace umbra {

void silu_mul(const float* gate, const float* up, float* out, int64_t width);  // elementwise.cpp

namespace {

constexpr int kTile = 64;  // activation rows that meet a task's weights while both are in the second cache

// Quantise rows 0 .. count - 1 into `to`, shared over the pool where there are many.
void quantise_rows(Context& context, const float* x, int64_t count, int64_t k, const Rows& to) {
    const int64_t blocks = k / kBlock;
    const auto one = [&](int64_t i) {
        context.kernels.quantise(x + i * k, static_cast<int>(blocks), const_cast<int8_t*>(to.q) + i * k,
                                 const_cast<float*>(to.scale) + i * blocks, const_cast<int32_t*>(to.sum) + i * blocks);
    };
    if (count < 4) {
        for (int64_t i = 0; i < count; i++) one(i);
    } else {
        context.pool.each(static_cast<int>(count), [&](int i, int) { one(i); });
    }
}

// Ask for the first lines of a row block that will be read next: kernels prefetch within a block only, and the first
// lines of 500 short streams a layer would each cost the full latency of memory.
void prefetch_block(const Matrix& w, int block) {
    const uint8_t* at = w.quants + block * w.quant_stride();
    for (int i = 0; i < 4096; i += 64) __builtin_prefetch(at + i);
}

uint8_t* aligned(uint8_t* at) { return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t{63}); }

}  // namespace

Rows Scratch::split(const float* x, int64_t rows, int64_t k) const {
    Rows r;
    uint8_t* at = aligned(memory);
    r.x = x;
    r.q = reinterpret_cast<int8_t*>(at);
    r.scale = reinterpret_cast<float*>(at + rows * k);
    r.sum = reinterpret_cast<int32_t*>(at + rows * k + rows * (k / kBlock) * 4);
    return r;
}

void Linear::run(Context& context) const {
    const int64_t k = w.like().k;
    const Rows rows = scratch.split(x, tokens, k);
    if (w.like().quantised()) quantise_rows(context, x, tokens, k, rows);
    const Product product = context.kernels.product[static_cast<int>(w.like().format)];
    const int per_task = std::clamp(w.blocks() / (context.pool.threads() * 8), 1, 4);
    const auto tasks = [&](int node) { return (w.blocks(node) + per_task - 1) / per_task; };
    context.pool.on_nodes(tasks, [&](int node, int task, int) {
        const Matrix& part = w.parts[node];
        const int last_block = std::min(w.blocks(node), (task + 1) * per_task);
        float y[kTile * kRows];
        for (int64_t start = 0; start < tokens; start += kTile) {
            const int count = static_cast<int>(std::min<int64_t>(kTile, tokens - start));
            Rows tile = rows;
            tile.x = x + start * k;
            tile.q = rows.q + start * k;
            tile.scale = rows.scale + start * (k / kBlock);
            tile.sum = rows.sum + start * (k / kBlock);
            for (int block = task * per_task; block < last_block; block++) {
                product(part, block, tile, nullptr, count, y, kRows);
                const int64_t first = static_cast<int64_t>(w.first[node] + block) * kRows;
                const int64_t width = std::min<int64_t>(kRows, n - first);
                for (int t = 0; t < count; t++)
                    for (int64_t r = 0; r < width; r++)
                        out[(start + t) * n + first + r] = y[t * kRows + r] + (bias ? bias[first + r] : 0.0f);
            }
        }
    });
}

int64_t Moe::scratch_bytes(int64_t tokens, int64_t k, int64_t experts, int64_t hidden, int64_t inner) {
    const int64_t assignments = tokens * k;
    return Scratch::bytes(tokens, hidden) + Scratch::bytes(assignments, inner) + assignments * inner * 4 +
           assignments * 8 + (2 * experts + 1) * 4 + 256;
}

void Moe::run(Context& context) const {
    const int64_t assignments = tokens * k;
    // Scratch: quantised x | quantised h | h | token of each assignment | its weight | start of each expert | experts hit
    const Scratch x_scratch{scratch};
    const Scratch h_scratch{scratch + Scratch::bytes(tokens, hidden)};
    uint8_t* at = aligned(h_scratch.memory + Scratch::bytes(assignments, inner));
    float* h = reinterpret_cast<float*>(at);
    int32_t* token_of = reinterpret_cast<int32_t*>(h + assignments * inner);
    float* weight_of = reinterpret_cast<float*>(token_of + assignments);
    int32_t* start_of = reinterpret_cast<int32_t*>(weight_of + assignments);
    int32_t* hit = start_of + experts + 1;

    // Sort assignments by expert, stably, so that a token's experts are added in order of expert.
    std::fill(start_of, start_of + experts + 1, 0);
    for (int64_t a = 0; a < assignments; a++) {
        const int64_t e = ids[a] - first_expert;
        if (e >= 0 && e < experts) start_of[e + 1]++;
    }
    int hits = 0;
    for (int64_t e = 0; e < experts; e++) {
        if (start_of[e + 1]) hit[hits++] = static_cast<int32_t>(e);
        start_of[e + 1] += start_of[e];
    }
    for (int64_t a = 0; a < assignments; a++) {
        const int64_t e = ids[a] - first_expert;
        if (e < 0 || e >= experts) continue;
        token_of[start_of[e]] = static_cast<int32_t>(a / k);
        weight_of[start_of[e]++] = weights[a];
    }
    for (int64_t e = experts; e > 0; e--) start_of[e] = start_of[e - 1];
    start_of[0] = 0;

    const Rows xs = x_scratch.split(x, tokens, hidden);
    const Rows hs = h_scratch.split(h, assignments, inner);
    if (w13.like().quantised()) quantise_rows(context, x, tokens, hidden, xs);
    const Product up_product = context.kernels.product[static_cast<int>(w13.like().format)];
    const Product down_product = context.kernels.product[static_cast<int>(w2.like().format)];

    constexpr int kGroup = 4;  // blocks: gate, up, gate, up: one stream, which makes 32 values of h
    const int groups = static_cast<int>(inner / kBlock);
    const auto up_tasks = [&](int node) { return hits * (w13.blocks(node) / kGroup); };
    context.pool.on_nodes(up_tasks, [&](int node, int task, int) {
        const int here = w13.blocks(node) / kGroup, block = task % here * kGroup;
        const int64_t e = hit[task / here];
        const int64_t g = (w13.first[node] + block) / kGroup;
        const Matrix w = w13.parts[node].at(e);
        float gate[kTile * kBlock], up[kTile * kBlock];
        for (int start = start_of[e]; start < start_of[e + 1]; start += kTile) {
            const int count = std::min(kTile, start_of[e + 1] - start);
            for (int half = 0; half < 2; half++) {
                up_product(w, block + 2 * half, xs, token_of + start, count, gate + half * kRows, kBlock);
                up_product(w, block + 2 * half + 1, xs, token_of + start, count, up + half * kRows, kBlock);
            }
            for (int t = 0; t < count; t++) {
                const int64_t row = start + t;
                float* to = h + row * inner + g * kBlock;
                silu_mul(gate + t * kBlock, up + t * kBlock, to, kBlock);
                if (w2.like().quantised())
                    context.kernels.quantise(to, 1, const_cast<int8_t*>(hs.q) + row * inner + g * kBlock,
                                             const_cast<float*>(hs.scale) + row * groups + g,
                                             const_cast<int32_t*>(hs.sum) + row * groups + g);
            }
        }
    });

    const int per_task = std::clamp(w2.blocks() / (context.pool.threads() * 12), 1, 4);
    const auto down_tasks = [&](int node) { return (w2.blocks(node) + per_task - 1) / per_task; };
    context.pool.on_nodes(down_tasks, [&](int node, int task, int) {
        const Matrix& part = w2.parts[node];
        const int first_block = task * per_task, last_block = std::min(w2.blocks(node), first_block + per_task);
        const int64_t first = static_cast<int64_t>(w2.first[node] + first_block) * kRows;
        const int64_t end = std::min<int64_t>(static_cast<int64_t>(w2.first[node] + last_block) * kRows, hidden);
        const int64_t width = end - first;
        for (int64_t t = 0; t < tokens; t++) std::memset(out + t * hidden + first, 0, width * sizeof(float));
        float y[kTile * kRows];
        for (int i = 0; i < hits; i++) {
            const int64_t e = hit[i];
            const Matrix w = part.at(e);
            if (i + 1 < hits) prefetch_block(part.at(hit[i + 1]), first_block);
            for (int start = start_of[e]; start < start_of[e + 1]; start += kTile) {
                const int count = std::min(kTile, start_of[e + 1] - start);
                Rows rows;
                rows.x = h + static_cast<int64_t>(start) * inner;
                rows.q = hs.q + static_cast<int64_t>(start) * inner;
                rows.scale = hs.scale + static_cast<int64_t>(start) * groups;
                rows.sum = hs.sum + static_cast<int64_t>(start) * groups;
                for (int block = first_block; block < last_block; block++) {
                    down_product(w, block, rows, nullptr, count, y, kRows);
                    const int64_t column = static_cast<int64_t>(w2.first[node] + block) * kRows;
                    const int64_t kept = std::min<int64_t>(kRows, hidden - column);
                    for (int t = 0; t < count; t++) {
                        float* to = out + token_of[start + t] * hidden + column;
                        const float weight = weight_of[start + t];
                        for (int64_t r = 0; r < kept; r++) to[r] += weight * y[t * kRows + r];
                    }
                }
            }
        }
    });
}

}  // namespace umbra
